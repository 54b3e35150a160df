"""Every name of a run, derived from its run id alone, so that teardown and reap need nothing else."""

from __future__ import annotations

import base64
import re
from ipaddress import IPv6Address

from sealnet.errors import UsageError

LINK_PREFIX = "seal"
NETNS_PREFIX = "sealnet-"
CGROUP_PARENT = "sealnet"
LINK_GROUP = 0x5EA1
SANDBOX_LINK = "eth0"

_RUN_ID = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"


def is_run_id(text: str) -> bool:
    return _RUN_ID.fullmatch(text) is not None


def run_id(text: str) -> str:
    """`text` when it is a run id that a new run may have, else UsageError."""
    return _checked(text, "leave --run-id out and one is made up")


def known_run_id(text: str) -> str:
    """`text` when it can be the id of a run that there is, else UsageError."""
    return _checked(text, "see the runs there are: sealnet ls")


def _checked(text: str, hint: str) -> str:
    # Also of another type: nobody who calls us from Python is to walk out of a directory by it.
    if not isinstance(text, str) or not is_run_id(text):
        raise UsageError(
            f"cannot use run id {text!r}: it must be 1 to 63 of a-z, 0-9 and '-', and begin and end with a letter or digit", hint=hint
        )
    return text


def ulid(*, time_ms: int, random: bytes) -> str:
    """A ULID in lower case: 48 bits of milliseconds, 80 random bits; sorts by time. A run id that nobody has."""
    value = time_ms << 80 | int.from_bytes(random, "big")
    return "".join(_CROCKFORD[value >> shift & 31] for shift in range(125, -1, -5))


def ifname(run_id: str) -> str:
    """Host link: `seal` and 55 bits of SHA-256, 15 bytes, the most that IFNAMSIZ allows."""
    return LINK_PREFIX + base64.b32encode(_sha256(run_id))[:11].decode().lower()


def netns(run_id: str) -> str:
    """The altname of the link and the name under /run/netns."""
    return NETNS_PREFIX + run_id


def run_of_netns(name: str) -> str | None:
    """The run id in a netns name or altname; None when it is not one of sealnet's."""
    candidate = name.removeprefix(NETNS_PREFIX)
    return candidate if candidate != name and is_run_id(candidate) else None


def mac(run_id: str, *, end: int) -> str:
    """The MAC of the host (0) or sandbox (1) end: given at creation, for udev changes one that the kernel made up."""
    digest = _sha256(f"{run_id} {end}")
    # Locally administered, unicast (IEEE 802).
    return ":".join(f"{byte:02x}" for byte in bytes([digest[0] & 0xFC | 0x02]) + digest[1:6])


def link_local(mac: str) -> str:
    """The IPv6 address that a link of that MAC makes for itself where nobody stops it (EUI-64, RFC 4291)."""
    first, *rest = bytes.fromhex(mac.replace(":", ""))
    eui = bytes([first ^ 2, *rest[:2], 0xFF, 0xFE, *rest[2:]])
    return str(IPv6Address(b"\xfe\x80" + bytes(6) + eui))


def mark(run_id: str, state: str) -> str:
    """What the run's own lo says as ifalias: whose namespace this is. The payload has no capability to change it."""
    return f"sealnet {run_id} {state}"


def link_alias(run_id: str, state: str, told: str) -> str:
    """The host link's ifalias: the mark, and for people the user and command; at most 255 bytes (IFALIASZ)."""
    text = f"{mark(run_id, state)} {told}"
    printable = "".join(char if char.isprintable() else "?" for char in text)
    return printable.encode("ascii", "replace").decode()[:250]


def run_of_alias(alias: str, state: str) -> str | None:
    """The run id of a mark or link alias of this state directory; None for anybody else's."""
    words = alias.split(" ", 3)
    if len(words) >= 3 and words[0] == "sealnet" and words[2] == state and is_run_id(words[1]):
        return words[1]
    return None


def _sha256(text: str) -> bytes:
    # Not for who only asks a worker: OpenSSL takes 3 ms to load.
    import hashlib

    return hashlib.sha256(text.encode()).digest()
