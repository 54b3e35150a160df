"""Packs a machine as a box for Vagrant's libvirt provider: a disk that boots by itself, a user whose key everybody has."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

from scripts.machines import debian, furnish, images
from scripts.machines.debian import run
from scripts.machines.definitions import HOSTS
from scripts.machines.failure import NoMachine

_SIZE_GIB = 20
# In sectors: what lies before is the boot loader's.
_START = 2048
_LABEL = "sealnet"

# What a machine has that a container has not, and what Vagrant asks of one.
_SYSTEM = (
    "ca-certificates", "dbus", "initramfs-tools", "iproute2", "libpam-systemd", "linux-image-cloud-amd64", "openssh-server", "rsync",
    "sudo", "systemd", "systemd-resolved", "systemd-sysv", "udev",
)  # fmt: skip

# https://github.com/hashicorp/vagrant/blob/main/keys/vagrant.pub: its other half is public, and Vagrant puts another in its place at once.
_KEY = (
    "ssh-rsa AAAAB3NzaC1yc2EAAAABIwAAAQEA6NF8iallvQVp22WDkTkyrtvp9eWW6A8YVr+kz4TjGYe7gHzIw+niNltGEFHzD8+v1I2YJ6oXevct1YeS0o9HZyN1Q9qgCgzU"
    "FtdOKLv6IedplqoPkcmF0aYet2PkEDo3MlTBckFXPITAMzF8dJSIFo9D8HfdOV0IAdx4O7PtixWKn5y2hMNG0zQPyUecp4pzC6kivAIhyfHilFR61RGL+GPXQ2MWZWFYbAGj"
    "yiYJnAmCP3NOTd0jMZEnDkbUvxhMmBYSdETk1rRgm+R4LOzFUGaHqHDLKLX+FIPKcF96hrucXzcWyLbIbEgE98OHlnVYCzRdK8jlqm8tehUc9c9WhQ== vagrant insecur"
    "e public key\n"
)

_FILES = {
    "/etc/fstab": f"LABEL={_LABEL} / ext4 defaults 0 1\n",
    "/etc/hostname": "sealnet\n",
    "/etc/hosts": "127.0.0.1 localhost\n127.0.1.1 sealnet\n::1 localhost\n",
    # Empty: each machine makes its own. Without one, systemd takes the boot for an installation's first and enables every unit there is.
    "/etc/machine-id": "",
    "/etc/systemd/network/80-eth.network": "[Match]\nName=eth*\n\n[Network]\nDHCP=yes\n",
    "/etc/systemd/system/ssh-host-keys.service": (
        "[Unit]\nDescription=host keys of this machine's own\nBefore=ssh.service\n\n"
        "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/usr/bin/ssh-keygen -A\n\n[Install]\nWantedBy=multi-user.target\n"
    ),
    "/etc/sudoers.d/vagrant": "vagrant ALL=(ALL) NOPASSWD: ALL\n",
    "/boot/grub/grub.cfg": (
        "serial --unit=0 --speed=115200\nterminal_output console serial\n"
        # The package of a newer kernel moves the links.
        f"linux /vmlinuz root=LABEL={_LABEL} ro net.ifnames=0 console=tty0 console=ttyS0,115200n8\ninitrd /initrd.img\nboot\n"
    ),
}
_ENABLED = ("ssh-host-keys.service", "ssh.service", "systemd-networkd.service", "systemd-resolved.service")
_GRUB = Path("/usr/lib/grub/i386-pc")
_GRUB_MODULES = ("biosdisk", "boot", "ext2", "linux", "normal", "part_msdos", "serial", "terminal")

# For whoever brings no Vagrantfile of their own: Vagrant's default is NFS, which the machine has not.
_VAGRANTFILE = """Vagrant.configure("2") do |config|
  config.vm.synced_folder ".", "/vagrant", disabled: true
end
"""


def pack(host: str, into: Path) -> Path:
    """`into`/sealnet-HOST.box, made anew."""
    if os.geteuid() != 0:
        raise NoMachine(f"cannot make box {host}: only root can unpack packages as they are", hint="sudo scripts/vm box")
    if not _GRUB.is_dir():
        raise NoMachine(f"cannot make box {host}: there is no {_GRUB}", hint="apt-get install grub-pc-bin grub-common qemu-utils")
    into.mkdir(parents=True, exist_ok=True)
    box = into / f"sealnet-{host}.box"
    work = into / f".{box.name}"
    if work.exists():
        shutil.rmtree(work)
    work.mkdir()
    try:
        tree, disk = work / "tree", work / "disk"
        debian.unpack_host(HOSTS[host], sorted({*images.runtime_packages(), *_SYSTEM}), tree)
        _furnish(tree)
        _disk(tree, disk)
        run(["qemu-img", "convert", "-O", "qcow2", "-c", disk, work / "box.img"], doing=f"make disk of box {host}")
        (work / "metadata.json").write_text(json.dumps({"provider": "libvirt", "format": "qcow2", "virtual_size": _SIZE_GIB}) + "\n")
        (work / "Vagrantfile").write_text(_VAGRANTFILE)
        # The disk is compressed as it is.
        files = ["metadata.json", "Vagrantfile", "box.img"]
        run(["tar", "--create", "--use-compress-program=gzip -1", f"--file={work / 'box'}", "--owner=0", "--group=0", *files],
            doing=f"pack box {host}", cwd=work)  # fmt: skip
        (work / "box").rename(box)
    finally:
        shutil.rmtree(work)
    return box


def _furnish(tree: Path) -> None:
    furnish.install_python(tree)
    for path, text in _FILES.items():
        furnish.write(tree, path, text)
    (tree / "etc/sudoers.d/vagrant").chmod(0o440)
    furnish.inside(tree, ["useradd", "--create-home", "--shell", "/bin/bash", "vagrant"])
    furnish.write(tree, "/home/vagrant/.ssh/authorized_keys", _KEY)
    furnish.inside(tree, ["chown", "--recursive", "vagrant:vagrant", "/home/vagrant/.ssh"])
    furnish.inside(tree, ["chmod", "700", "/home/vagrant/.ssh"])
    for key in tree.glob("etc/ssh/ssh_host_*"):
        key.unlink()
    furnish.inside(tree, ["systemctl", "mask", *furnish.MASKED])
    furnish.inside(tree, ["systemctl", "enable", *_ENABLED])
    resolver = tree / "etc/resolv.conf"
    resolver.unlink(missing_ok=True)
    resolver.symlink_to("../run/systemd/resolve/stub-resolv.conf")
    # The first start of the checkout that Vagrant copies there finds all of it installed.
    shutil.copytree(furnish.CHECKOUT / "scripts", tree / "sealnet/scripts", ignore=shutil.ignore_patterns("__pycache__"))
    stamp = 'root=/sealnet; source /sealnet/scripts/bootstrap; write_stamp run "${runtime_packages[@]}"'
    furnish.inside(tree, ["bash", "-c", stamp])


def _disk(tree: Path, disk: Path) -> None:
    """A disk that a BIOS boots: the boot loader in the sectors before the one partition, as grub-bios-setup would put it there."""
    for name in ("vmlinuz", "initrd.img"):
        if not (tree / name).is_symlink():
            raise NoMachine(f"cannot make disk: the kernel's package has made no /{name}")
    with open(disk, "wb") as file:
        file.truncate(_SIZE_GIB << 30)
    sectors = (_SIZE_GIB << 30) // 512 - _START
    # GRUB 2.06 does not read a file system with the features that are left out.
    features = ["-L", _LABEL, "-O", "^metadata_csum_seed,^orphan_file", "-E", f"offset={_START * 512},lazy_itable_init=1"]
    run(["mke2fs", "-q", "-t", "ext4", *features, "-d", tree, disk, f"{sectors // 2}k"], doing="make the file system")
    core = disk.with_name("core.img")
    prefix = ["--prefix=(hd0,msdos1)/boot/grub", f"--directory={_GRUB}", f"--output={core}"]
    run(["grub-mkimage", "--format=i386-pc", *prefix, *_GRUB_MODULES], doing="make the boot loader")
    if core.stat().st_size > (_START - 1) * 512:
        raise NoMachine(f"cannot make disk: the boot loader has {core.stat().st_size} bytes, and {(_START - 1) * 512} are free")
    with open(disk, "r+b") as file:
        # The first sector has 440 bytes of the loader, an identifier, four partitions and a mark; the loader goes on in the second.
        # Of a partition: bootable, its first and last sector as no BIOS counts them any more, Linux, first sector, number of sectors.
        partition = struct.pack("<B3sB3sII", 0x80, b"\xfe\xff\xff", 0x83, b"\xfe\xff\xff", _START, sectors)
        file.write((_GRUB / "boot.img").read_bytes()[:440] + b"seal\0\0" + partition + bytes(48) + b"\x55\xaa" + core.read_bytes())
