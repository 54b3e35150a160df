"""A first file system of a few files: the modules that find a disk, and a script that changes to it."""

from __future__ import annotations

import lzma
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from scripts.machines.failure import NoMachine

_WANTED = ("virtio_pci", "virtio_blk", "ext4")

# The disks are told by their serial numbers: which of them is vda is for the kernel to say.
_INIT = """#!/busybox sh
# No /proc: a static program of glibc 2.41 that finds one looks for itself in it, and aborts for what it finds here.
/busybox mkdir -p /sys /dev /new
/busybox mount -t sysfs sysfs /sys
/busybox mount -t devtmpfs dev /dev
while read -r module; do /busybox insmod "/modules/$module"; done </modules/order
tries=0
until [ -n "$root" ] && [ -n "$modules" ]; do
  for disk in /sys/block/vd*; do
    read -r serial 2>/dev/null <"$disk/serial"
    [ "$serial" != root ] || root=/dev/${disk##*/}
    [ "$serial" != modules ] || modules=/dev/${disk##*/}
  done
  tries=$((tries + 1))
  if [ "$tries" -gt 200 ]; then echo 'initrd: no disk'; exit 1; fi
  /busybox usleep 50000
done
/busybox mount -t ext4 -o rw,noatime "$root" /new || exit 1
/busybox mount -t ext4 -o ro "$modules" /new/usr/lib/modules || exit 1
/busybox umount /sys
exec /busybox switch_root -c /dev/console /new /sbin/init
"""


def build(release: Path, busybox: Path) -> bytes:
    """The archive for a kernel whose modules and modules.dep are in `release`."""
    modules = list(_in_order(release, _WANTED))
    files = [("busybox", 0o755, busybox.read_bytes()), ("init", 0o755, _INIT.encode())]
    files += [(f"modules/{path.name.removesuffix('.xz')}", 0o644, _plain(path)) for path in modules]
    order = "".join(f"{path.name.removesuffix('.xz')}\n" for path in modules)
    return _cpio([*files, ("modules/order", 0o644, order.encode())], directories=("modules", "dev"))


def _in_order(release: Path, wanted: Iterable[str]) -> Iterator[Path]:
    """The modules' files, each after those that it needs. What is in the kernel itself has none."""
    needs = {}
    for line in (release / "modules.dep").read_text(encoding="ascii").splitlines():
        path, _, others = line.partition(":")
        needs[_name(path)] = (path, [_name(other) for other in others.split()])
    builtin = {_name(line) for line in (release / "modules.builtin").read_text(encoding="ascii").splitlines()}
    done: set[str] = set()

    def walk(name: str) -> Iterator[Path]:
        if name in done or name in builtin:
            return
        if name not in needs:
            raise NoMachine(f"cannot make initrd of {release.name}: it has no module {name}")
        done.add(name)
        path, others = needs[name]
        for other in others:
            yield from walk(other)
        yield release / path

    for name in wanted:
        yield from walk(name)


def _name(path: str) -> str:
    return path.rpartition("/")[2].partition(".ko")[0].replace("-", "_")


def _plain(path: Path) -> bytes:
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content


def _cpio(files: list[tuple[str, int, bytes]], *, directories: tuple[str, ...]) -> bytes:
    """The `newc` format (Documentation/driver-api/early-userspace/buffer-format.rst)."""
    entries = [(name, stat.S_IFDIR | 0o755, b"") for name in directories]
    entries += [(name, stat.S_IFREG | mode, content) for name, mode, content in files]
    out = bytearray()
    for number, (name, mode, content) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08x" % value for value in fields) + name.encode() + b"\0"
        out += b"\0" * (-len(out) % 4)
        out += content
        out += b"\0" * (-len(out) % 4)
    return bytes(out)
