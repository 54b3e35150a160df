"""nftables through libnftables, in the network namespace of the calling thread; answers come by return code.

The library runs in this process, or in a helper's (`run_by`), which is given the namespace.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from typing import Any, Protocol

from sealnet.errors import CannotSeal, KernelRefused

try:
    import nftables
except ImportError as e:
    raise CannotSeal("cannot talk to nftables: its Python binding is missing", hint="apt-get install python3-nftables") from e

# libnftables waits with select(2), whose bitmap ends at FD_SETSIZE: with a higher descriptor glibc aborts the process.
_FD_LIMIT = 1024
_LIBRARY = "libnftables.so.1"
_TRIES = 100

# libnftables tells the kernel's errno only as strerror text.
_KNOWN = (
    errno.EINTR,
    errno.EAGAIN,
    errno.ENOENT,
    errno.EEXIST,
    errno.EPERM,
    errno.E2BIG,
    errno.ENOSPC,
    errno.ENFILE,
    errno.EBUSY,
    errno.EOPNOTSUPP,
    errno.ENOMEM,
)


def require() -> None:
    """Refuse where the library itself is missing. The binding would load it as well, and complain once more when it is thrown away."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError as e:
        raise CannotSeal(f"cannot talk to nftables: {e}", hint="apt-get install libnftables1 python3-nftables") from e


class Elsewhere(Protocol):
    """Runs nft commands in another process: `sealnet.kernel.nfthelper.Helper`."""

    def run(self, netns: int, text: str, *, as_json: bool) -> tuple[int, str, str]: ...


_elsewhere: Elsewhere | None = None


def run_by(helper: Elsewhere | None) -> None:
    """From now on the library is used in the helper's process, and not in this one."""
    global _elsewhere
    _elsewhere = helper


class Library:
    """One libnftables context. It opens its netlink socket at once, so it belongs to the namespace of the thread that made it."""

    def __init__(self) -> None:
        probe = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        os.close(probe)
        if probe >= _FD_LIMIT - 1:
            raise CannotSeal(
                f"cannot talk to nftables: libnftables cannot use file descriptors from {_FD_LIMIT} on, and this process holds more",
                hint="run sealnet in a process of its own",
            )
        require()
        self._nft = nftables.Nftables(_LIBRARY)

    def run(self, text: str, *, as_json: bool) -> tuple[int, str, str]:
        """The code, and what nft says on its output and on its standard error."""
        self._nft.set_json_output(as_json)
        code, output, error = self._nft.cmd(text)
        return code, output, error


class _There:
    """The same in the helper's process."""

    def __init__(self, helper: Elsewhere) -> None:
        self._helper = helper
        # Before anything can fail: it is closed when this goes.
        self._netns = -1
        self._netns = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._netns >= 0:
            os.close(self._netns)

    def run(self, text: str, *, as_json: bool) -> tuple[int, str, str]:
        return self._helper.run(self._netns, text, as_json=as_json)


class Nft:
    """nftables in the network namespace of the thread that made it."""

    def __init__(self) -> None:
        self._nft = Library() if _elsewhere is None else _There(_elsewhere)

    def apply(self, text: str, what: str) -> None:
        """Run nft commands as one transaction: all or nothing. Raises KernelRefused `cannot <what>: <nft's words>`."""
        code, _output, error = self._run(text, as_json=False)
        if code != 0:
            raise _refused(error, what)

    def _run(self, text: str, *, as_json: bool) -> tuple[int, str, str]:
        """Again where somebody else's transaction came between libnftables' reads: it tells EINTR then, and nothing was done."""
        for _ in range(_TRIES):
            code, output, error = self._nft.run(text, as_json=as_json)
            if code == 0 or _errno(error) not in (errno.EINTR, errno.EAGAIN):
                break
        return code, output, error

    def version(self) -> str:
        """libnftables' own, as its JSON tells it."""
        told = self._json("list tables", "ask libnftables for its version")
        return next((str(entry["metainfo"]["version"]) for entry in told if "metainfo" in entry), "unknown")

    def elements(self, name: str, what: str) -> list[Any]:
        """The elements of the set `name` (`FAMILY TABLE SET`), as nft's JSON tells them; none when the set is not there."""
        return [element for entry in self._json(f"list set {name}", what) for element in entry.get("set", {}).get("elem", [])]

    def _json(self, text: str, what: str) -> list[Any]:
        """What a command lists; nothing when that is not there."""
        code, output, error = self._run(text, as_json=True)
        if code != 0:
            if _errno(error) == errno.ENOENT:
                return []
            raise _refused(error, what)
        try:
            found: list[Any] = json.loads(output)["nftables"]
        except (ValueError, KeyError, TypeError) as e:
            raise CannotSeal(f"cannot {what}: what libnftables tells is no answer") from e
        return found


def _refused(error: str, what: str) -> KernelRefused:
    lines = [line for line in error.splitlines() if line.strip()]
    said = lines[0].split("Error: ")[-1] if lines else "no reason given"
    return KernelRefused(f"cannot {what}: {said}", errno=_errno(error))


def _errno(error: str) -> int:
    return next((code for code in _KNOWN if os.strerror(code) in error), errno.EINVAL)
