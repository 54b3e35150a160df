"""What an unpacked userland gets before it becomes an image: a Python environment, a unit that runs the job, a link, extras."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from scripts.machines.debian import run
from scripts.machines.definitions import EXTRAS, Extra

CHECKOUT = Path(__file__).parents[2]
# Their opinions are the checkout's, not a machine's, and they are large.
_NOT_IN_MACHINES = re.compile(r"^(?:mypy|ruff)\b")

_JOB = """[Unit]
Description=the job of this machine
Wants=multi-user.target
After=multi-user.target
FailureAction=poweroff-force

[Service]
# Not oneshot: the boot ends where the job begins, so that systemd says `running`.
Type=exec
Environment=HOME=/root LANG=C.UTF-8 PATH=/sealnet/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ExecStart=/bin/sh -c 'tar -x -C / -f /dev/disk/by-id/virtio-job && exec /job/start'
"""

_LINK = """[Unit]
Description=eth0 of a machine whose network nobody manages
Before=network.target
Wants=network.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'until ip link set eth0 up 2>/dev/null; do sleep 0.1; done'
ExecStart=/bin/ip address add 10.0.2.15/24 dev eth0
ExecStart=/bin/ip route add default via 10.0.2.2

[Install]
WantedBy=multi-user.target
"""

_CONSOLE = """[Service]
ExecStart=
ExecStart=-/sbin/agetty --autologin root - $TERM
"""

_FILES = {
    "/etc/systemd/system/sealnet-job.service": _JOB,
    "/etc/systemd/system/serial-getty@ttyS0.service.d/root.conf": _CONSOLE,
    "/etc/hostname": "machine\n",
    "/etc/hosts": "127.0.0.1 localhost\n127.0.1.1 machine\n::1 localhost\n",
    # Without one, systemd takes the boot for an installation's first and enables every unit there is.
    "/etc/machine-id": "5ea1e75ea1e75ea1e75ea1e75ea1e700\n",
    # eth0, whatever its place on the bus.
    "/etc/systemd/network/10-eth0.link": "[Match]\nDriver=virtio_net\n\n[Link]\nName=eth0\n",
}
MASKED = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer",
    "getty@tty1.service", "man-db.timer", "systemd-networkd-wait-online.service", "NetworkManager-wait-online.service",
    "modprobe@configfs.service", "modprobe@drm.service", "modprobe@efi_pstore.service", "modprobe@fuse.service", "modprobe@loop.service",
    "systemd-hwdb-update.service", "systemd-pstore.service", "systemd-update-utmp.service", "systemd-update-utmp-runlevel.service",
)  # fmt: skip


def requirements() -> list[str]:
    """What the checkout's code and tests import, from its pyproject.toml."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"], "setuptools>=64", "wheel"]
    return [one for one in wanted if not _NOT_IN_MACHINES.match(one)]


def furnish(tree: Path, extras: Sequence[str]) -> None:
    install_python(tree)
    chosen = [EXTRAS[name] for name in extras]
    for path, text in {
        **_FILES,
        **({} if any(one.links for one in chosen) else {"/etc/systemd/system/sealnet-link.service": _LINK}),
    }.items():
        write(tree, path, text)
    resolver = tree / "etc/resolv.conf"
    if not resolver.is_symlink():
        resolver.write_text("nameserver 10.0.2.3\n", encoding="ascii")
    if not any(one.links for one in chosen):
        inside(tree, ["systemctl", "enable", "sealnet-link.service"])
    inside(tree, ["systemctl", "mask", *MASKED])
    for one in chosen:
        _add(tree, one)


def _add(tree: Path, extra: Extra) -> None:
    for path, text in extra.files.items():
        write(tree, path, text)
    for command in extra.commands:
        inside(tree, command)
    if extra.enabled:
        inside(tree, ["systemctl", "enable", *extra.enabled])


def install_python(tree: Path) -> None:
    """The checkout's .venv as scripts/bootstrap makes it, but of wheels: a machine has no network."""
    version = inside(tree, ["python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    wheels = tree / "wheels"
    doing = f"fetch what sealnet needs for Python {version}"
    run([sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--dest", wheels, "--only-binary=:all:",
         "--python-version", version, *requirements()], doing=doing)  # fmt: skip
    inside(tree, ["python3", "-m", "venv", "--system-site-packages", "/sealnet/.venv"])
    pip = ["/sealnet/.venv/bin/python", "-I", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    # Also those that the distribution has: its pytest may be older than the tests ask for.
    inside(tree, [*pip, "--find-links", "/wheels", *requirements()])
    # An editable installation is a line in a file, so a package without modules will do.
    shutil.copy(CHECKOUT / "pyproject.toml", tree / "sealnet/pyproject.toml")
    write(tree, "/sealnet/sealnet/__init__.py", "")
    inside(tree, [*pip, "--no-build-isolation", "--no-deps", "--editable", "/sealnet"])
    shutil.rmtree(wheels)


def inside(tree: Path, command: Sequence[str]) -> str:
    """The command's output. It has processes and mounts of its own, so that nothing of it is left."""
    isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", f"--mount-proc={tree}/proc", "chroot", str(tree)]
    return run([*isolated, *command], doing=f"furnish machine: {' '.join(command[:4])}")


def write(tree: Path, path: str, text: str) -> None:
    wanted = tree / path.lstrip("/")
    wanted.parent.mkdir(parents=True, exist_ok=True)
    wanted.write_text(text, encoding="utf-8")
