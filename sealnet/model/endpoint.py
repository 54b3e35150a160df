"""Where something of the worker's may be asked for from this host alone: a Unix socket, or a port of a loopback address."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address

from sealnet.errors import UsageError

# sun_path (unix(7)) with its NUL, and what a fresh socket's name has more until it is moved there.
_UNIX_PATH = 100
_TCP = re.compile(r"(?:\[([0-9A-Fa-f:]{2,39})\]|([0-9.]{7,15})):([1-9][0-9]{0,4})", re.ASCII)
_HINT = "unix:/PATH, 127.0.0.1:PORT or [::1]:PORT"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`path`, or else `address` and `port`."""

    path: str | None = None
    address: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


def parse(text: str, option: str) -> Endpoint:
    """`unix:/PATH`, `127.0.0.1:PORT`, `[::1]:PORT`. A name is none: what it leads to may change. Raises UsageError."""
    refused = f"cannot use {option} {text!r}"
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or path.endswith("/") or not path.isprintable() or len(path.encode()) > _UNIX_PATH:
            raise UsageError(f"{refused}: it must be a whole path of {_UNIX_PATH} bytes at most", hint=_HINT)
        return Endpoint(path=path)
    found = _TCP.fullmatch(text)
    if found is None:
        raise UsageError(f"{refused}: it is no Unix socket and no port of an address", hint=_HINT)
    try:
        address = ip_address(found[1] or found[2])
    except ValueError:
        raise UsageError(f"{refused}: {found[1] or found[2]} is no address", hint=_HINT) from None
    if not address.is_loopback:
        raise UsageError(f"{refused}: it would be asked from other hosts; only a loopback address is for this one alone", hint=_HINT)
    if int(found[3]) > 65535:
        raise UsageError(f"{refused}: a TCP port is 1 to 65535", hint=_HINT)
    return Endpoint(address=str(address), port=int(found[3]))
