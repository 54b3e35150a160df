"""Makes what a machine boots from: a host's root disk, a kernel with its first file system and a disk of its modules."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.machines import cache, debian, furnish, initrd
from scripts.machines.definitions import EXTRAS, HOSTS, KERNELS, TOOLS
from scripts.machines.failure import NoMachine

_HERE = Path(__file__).parent
# Not the distribution's choice but what holds it together.
_SYSTEM = ("dbus", "kmod", "mount", "systemd", "systemd-sysv", "udev")
_SPARE_BYTES = 2 << 30


@dataclass(frozen=True)
class Machine:
    """A name is `bookworm-6.1` or `bookworm-6.1+docker+ufw`."""

    host: str
    kernel: str
    extras: tuple[str, ...] = ()

    @property
    def host_name(self) -> str:
        return "+".join((self.host, *sorted(set(self.extras))))

    @property
    def name(self) -> str:
        return "+".join((f"{self.host}-{self.kernel}", *sorted(set(self.extras))))


@dataclass(frozen=True)
class Booted:
    """What a kernel boots with."""

    kernel: Path
    initrd: Path
    modules: Path
    release: str


def root_disk(machine: Machine, *, fresh: bool = False) -> Path:
    extras = sorted(set(machine.extras))
    packages = _packages(machine.host, extras)
    recipe = {
        "host": dataclasses.asdict(HOSTS[machine.host]),
        "extras": [dataclasses.asdict(EXTRAS[name]) for name in extras],
        "packages": packages,
        "python": furnish.requirements(),
    }
    key = cache.key_of(recipe, *(_HERE / name for name in ("debian.py", "furnish.py", "images.py")))

    def make(into: Path) -> None:
        _need_root(f"host {machine.host_name}")
        tree = into / "tree"
        tree.mkdir()
        debian.unpack_host(HOSTS[machine.host], packages, tree)
        furnish.furnish(tree, extras)
        (tree / "usr/lib/modules").mkdir(exist_ok=True)
        _disk(tree, into / "root.ext4", spare_bytes=_SPARE_BYTES)
        shutil.rmtree(tree)

    return cache.obtain(f"host-{machine.host_name}", key, make, fresh=fresh) / "root.ext4"


def kernel(name: str, *, fresh: bool = False) -> Booted:
    key = cache.key_of(dataclasses.asdict(KERNELS[name]), *(_HERE / source for source in ("debian.py", "images.py", "initrd.py")))

    def make(into: Path) -> None:
        _need_root(f"kernel {name}")
        tree = into / "tree"
        tree.mkdir()
        debian.unpack_kernel(KERNELS[name], tree)
        modules = next(path for path in (tree / "usr/lib/modules", tree / "lib/modules") if path.is_dir())
        (release,) = os.listdir(modules)
        _index(modules, release)
        busybox = next(path for path in (tree / "usr/bin/busybox", tree / "bin/busybox") if path.is_file())
        (into / "initrd").write_bytes(initrd.build(modules / release, busybox))
        shutil.copy(next(tree.glob("**/vmlinuz*")), into / "vmlinuz")
        _disk(modules, into / "modules.ext4", spare_bytes=8 << 20)
        (into / "release").write_text(release, encoding="ascii")
        shutil.rmtree(tree)

    made = cache.obtain(f"kernel-{name}", key, make, fresh=fresh)
    return Booted(made / "vmlinuz", made / "initrd", made / "modules.ext4", (made / "release").read_text(encoding="ascii"))


def runtime_packages() -> list[str]:
    script = 'root=$1; source "$root/scripts/bootstrap"; printf "%s\\n" "${runtime_packages[@]}"'
    return debian.run(["bash", "-c", script, "bash", furnish.CHECKOUT], doing="read scripts/bootstrap").split()


def _packages(host: str, extras: Sequence[str]) -> list[str]:
    wanted = {*runtime_packages(), *TOOLS, *_SYSTEM}
    for name in extras:
        wanted |= {*EXTRAS[name].packages, *EXTRAS[name].packages_of.get(host, ())}
    return sorted(wanted)


def _index(modules: Path, release: str) -> None:
    # depmod wants lib/modules below its base directory, which is usr where the release has merged them.
    base = modules.parents[1]
    debian.run(["depmod", "--basedir", base, release], doing=f"index the modules of {release}")


def _disk(tree: Path, disk: Path, *, spare_bytes: int) -> None:
    used = sum(os.lstat(os.path.join(directory, name)).st_blocks * 512 for directory, _, names in os.walk(tree) for name in names)
    size_kib = (used * 5 // 4 + spare_bytes) // 1024
    debian.run(
        ["mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1", "-m", "0", "-d", tree, disk, f"{size_kib}k"],
        doing=f"make disk {disk.name}",
    )


def _need_root(what: str) -> None:
    if os.geteuid() != 0:
        raise NoMachine(f"cannot make {what}: only root can unpack packages as they are", hint="sudo scripts/vm build")
