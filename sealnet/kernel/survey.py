"""What this host has of what a run needs: features of the kernel by using them in a namespace of their own, tools, limits, settings."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from sealnet.errors import CannotSeal, KernelRefused
from sealnet.kernel import cgroup, libc, links, process
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.netns import Inside
from sealnet.model import ruleset
from sealnet.model.facts import INSTALLED, ROOT_ONLY, Feature, Tool

_BWRAP = "0.8.0"
# Less than this is a full file system to whoever writes records.
_LEAST_BYTES = 1 << 20
# Each capability that a root must have, and its bit (linux/capability.h).
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_CONTAINERS = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")

_TALLY = "set s {\ntype ipv4_addr\nsize 16\nflags dynamic,timeout\ncounter\n}"
# What the two rulesets are made of, each alone in a table of its own.
_RULESETS = {
    "nf_tables inet": ("nf_tables", "chain c {\ntype filter hook input priority 0;\n}"),
    "nft fib": ("nft_fib_inet", 'chain c {\ntype filter hook prerouting priority 0;\nfib saddr oifname "lo" drop\n}'),
    "nft notrack": ("nft_ct", "chain c {\ntype filter hook prerouting priority raw;\nnotrack\n}"),
    "nft reject": ("nft_reject_inet", "chain c {\ntype filter hook output priority 0;\nreject with icmpx admin-prohibited\n}"),
    "nft dynamic sets": ("nf_tables", f"{_TALLY}\nchain c {{\ntype filter hook output priority 0;\nupdate @s {{ ip daddr }}\n}}"),
}


def features(*, root: bool) -> list[Feature]:
    """Every feature that a run needs of the kernel, tried. Nothing of it is left; the kernel may load modules for it, as for a run."""
    found = [_tried("openat2", _openat2), _tried("pidfd", _pidfd)]
    found.append(Feature(name="seccomp filters", found=os.path.exists("/proc/sys/kernel/seccomp/actions_avail")))
    found.append(_cgroup())
    if not root:
        names = ("network namespaces", "overlay", "veth", *_RULESETS, "the gate")
        return [*found, *(Feature(name=name, found=None, said=ROOT_ONLY) for name in names)]
    found.append(_tried("overlay", lambda: os.close(libc.fsopen("overlay")), module="overlay"))
    try:
        with Inside.new("sealnet-doctor") as inside:
            found.append(Feature(name="network namespaces", found=True))
            found += inside.call(lambda: list(_within(inside.fd)))
    except OSError as e:
        found.append(Feature(name="network namespaces", found=False, said=_strerror(e)))
    return found


def _strerror(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _tried(name: str, attempt: Callable[[], object], *, module: str = "") -> Feature:
    try:
        attempt()
    except OSError as e:
        return Feature(name=name, found=False, said=_strerror(e), module=module)
    except (CannotSeal, KernelRefused) as e:
        return Feature(name=name, found=False, said=e.message, module=module)
    return Feature(name=name, found=True, module=module)


def _openat2() -> None:
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(libc.open_beneath(root, "proc", os.O_PATH))
    finally:
        os.close(root)


def _pidfd() -> None:
    fd = os.pidfd_open(os.getpid())
    try:
        signal.pidfd_send_signal(fd, 0)
    finally:
        os.close(fd)


def _cgroup() -> Feature:
    try:
        root = cgroup.root()
    except CannotSeal as e:
        return Feature(name="cgroup v2", found=False, said=e.message)
    return Feature(name="cgroup v2", found=True, said=str(root))


def _within(fd: int) -> Iterator[Feature]:
    """In a namespace that is thrown away."""
    ends = {"name": "veth0", "mac": "02:00:00:00:00:01", "peer_name": "veth1", "peer_mac": "02:00:00:00:00:02"}
    with Netlink() as nl:
        yield _tried("veth", lambda: links.add_veth(nl, **ends, group=0, netns_fd=fd), module="veth")
    try:
        from sealnet.kernel.nft import Nft

        nft = Nft()
    except CannotSeal as e:
        # A library is missing, which is told with the tools.
        yield from (Feature(name=name, found=None, said=e.message) for name in (*_RULESETS, "the gate"))
        return
    for name, (module, body) in _RULESETS.items():
        yield _tried(name, lambda body=body: nft.apply(f"table inet t {{\n{body}\n}}\ndelete table inet t\n", "load it"), module=module)  # type: ignore[misc]
    yield _tried("the gate", lambda: nft.apply(ruleset.render_gate(), "load it"))


def tools() -> list[Tool]:
    """Every program and library that a run uses."""
    found = []
    for name, needed in {"bwrap": _BWRAP, "setpriv": None, "setsid": None, "env": None, "sh": None}.items():
        try:
            path = process.tool(name)
        except CannotSeal:
            path = None
        # dash has no --version.
        version = process.version(path) if path and name != "sh" else None
        found.append(Tool(name=name, package=process.PACKAGES[name], path=path, version=version, needed=needed))
    # libnftables tells its version through nft alone, which is of the same source.
    nft = None
    with contextlib.suppress(CannotSeal):
        nft = process.version(process.tool("nft"))
    found.append(Tool(name="libnftables", package="libnftables1", path=_library("libnftables.so.1"), version=nft))
    found.append(Tool(name="libseccomp", package="libseccomp2", path=_library("libseccomp.so.2"), version=_libseccomp_version()))
    for module in ("nftables", "seccomp"):
        spec = importlib.util.find_spec(module)
        found.append(Tool(name=f"Python binding {module}", package=f"python3-{module}", path=spec.origin if spec else None))
    return found


def _library(name: str) -> str | None:
    try:
        ctypes.CDLL(name)
    except OSError:
        return None
    return name


def _libseccomp_version() -> str | None:
    class Version(ctypes.Structure):
        _fields_ = (("major", ctypes.c_uint), ("minor", ctypes.c_uint), ("micro", ctypes.c_uint))

    try:
        function = ctypes.CDLL("libseccomp.so.2").seccomp_version
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.POINTER(Version)
    version = function().contents
    return f"{version.major}.{version.minor}.{version.micro}"


def lacking() -> tuple[str, ...]:
    """Capabilities that this process has not and a seal needs."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            return tuple(name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1)
    return tuple(_CAPABILITIES)


def container() -> str | None:
    """The mark of a container, where there is one."""
    return next((path for path in _CONTAINERS if os.path.exists(path)), None)


def modules(release: str) -> Literal["here", "of another kernel", "none"]:
    """Whether the modules of the running kernel are on disk: an upgrade takes them away until the next boot."""
    for base in ("/lib/modules", "/usr/lib/modules"):
        if os.path.isdir(f"{base}/{release}"):
            return "here"
    try:
        return "of another kernel" if os.listdir("/lib/modules") else "none"
    except OSError:
        return "none"


def number(path: str) -> int | None:
    """A setting under /proc/sys; None where the kernel has none of it, or it cannot be read."""
    try:
        return int(Path(f"/proc/sys/{path}").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def sysctls_writable() -> bool:
    """Whether the settings of links may be written here: in a container /proc/sys is often read-only."""
    return os.access("/proc/sys/net/ipv4/conf/default/forwarding", os.W_OK)


def installed() -> frozenset[str]:
    """The services that sealnet's own files keep off a run's link."""
    return frozenset(name for name, paths in INSTALLED.items() if all(map(os.path.exists, paths)))


def storage_fault(path: Path) -> str | None:
    """Why nothing can be written at `path`, or where it would be made; None when it can."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(path)
    except OSError as e:
        return _strerror(e)
    if found.f_flag & os.ST_RDONLY:
        return os.strerror(errno.EROFS)
    # A tmpfs without a limit tells of no blocks at all.
    if (found.f_blocks and found.f_bavail * found.f_frsize < _LEAST_BYTES) or (found.f_files and not found.f_favail):
        return os.strerror(errno.ENOSPC)
    return None
