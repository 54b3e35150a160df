"""Per-link network settings under /proc/sys/net, of the calling thread's namespace."""

from __future__ import annotations

import contextlib
import os

from sealnet.errors import KernelRefused

_NET = "/proc/sys/net"

# What others could undo without touching sealnet (a change of ip_forward resets `forwarding` everywhere), so `see` reads them back.
LINK = {
    "ipv4/conf/{link}/forwarding": "0",
    "ipv4/conf/{link}/rp_filter": "1",
    "ipv4/conf/{link}/accept_local": "0",
    "ipv4/conf/{link}/route_localnet": "0",
    "ipv4/conf/{link}/arp_ignore": "1",
    "ipv4/conf/{link}/proxy_arp": "0",
    "ipv4/conf/{link}/accept_redirects": "0",
    "ipv4/conf/{link}/send_redirects": "0",
    "ipv4/conf/{link}/accept_source_route": "0",
    "ipv6/conf/{link}/disable_ipv6": "1",
    "ipv6/conf/{link}/accept_ra": "0",
}
# By family, each setting's own name and its key in LINK.
_FAMILIES = {family: {key.rpartition("/")[2]: key for key in LINK if key.startswith(f"{family}/")} for family in ("ipv4", "ipv6")}


def set_link(link: str) -> None:
    """Write every setting of LINK. IPv6 ones do not exist on a host without IPv6, which is as good as off."""
    for family, settings in _FAMILIES.items():
        directory = f"{_NET}/{family}/conf/{link}"
        try:
            fd = _open(directory)
        except OSError as e:
            if isinstance(e, FileNotFoundError) and family == "ipv6" and not os.path.exists(f"{_NET}/ipv6"):
                continue
            raise KernelRefused(f"cannot set {directory}: {e.strerror}", errno=e.errno or 0) from e
        try:
            for name, key in settings.items():
                _write(fd, name, LINK[key], f"{directory}/{name}")
        finally:
            os.close(fd)


def _open(directory: str) -> int:
    """A link's settings of one family. Its path is looked up once for all of them: the kernel keeps the `net`, `conf` and `eth0` of all
    namespaces in one chain each, and a thousand runs make that long."""
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _write(directory: int, name: str, value: str, path: str) -> None:
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)
    except OSError as e:
        raise KernelRefused(f"cannot set {path}: {e.strerror}", errno=e.errno or 0) from e


def see_link(link: str) -> dict[str, str]:
    """Every setting of LINK that the kernel has, as it is now."""
    seen = {}
    for family, settings in _FAMILIES.items():
        try:
            directory = _open(f"{_NET}/{family}/conf/{link}")
        except FileNotFoundError:
            continue
        try:
            for name, key in settings.items():
                with contextlib.suppress(FileNotFoundError):
                    seen[key] = _read(directory, name)
        finally:
            os.close(directory)
    return seen


def _read(directory: int, name: str) -> str:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, 64).decode("ascii").strip()
    finally:
        os.close(fd)


def expected() -> dict[str, str]:
    """What `see_link` must tell."""
    return dict(LINK)
