"""Which addresses a declared name may lead to: public ones; private ones where that was declared; never the host itself.

Prefixes are from the IANA special-purpose address registries (RFC 6890), as of 2025, and written out: what `ipaddress` calls global has
changed between Python's own patch releases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

# May be opened by --allow-private: networks that people run themselves.
_PRIVATE: dict[str, str] = {
    "10.0.0.0/8": "private",
    "172.16.0.0/12": "private",
    "192.168.0.0/16": "private",
    "100.64.0.0/10": "shared (carrier-grade NAT)",
    "fc00::/7": "private",
}
# Never: no flag opens these.
_NEVER: dict[str, str] = {
    "0.0.0.0/8": "unspecified",
    "127.0.0.0/8": "loopback",
    "169.254.0.0/16": "link-local",
    "192.0.0.0/24": "reserved",
    "192.0.2.0/24": "documentation",
    "192.88.99.0/24": "reserved",
    "198.18.0.0/15": "benchmarking, where runs live",
    "198.51.100.0/24": "documentation",
    "203.0.113.0/24": "documentation",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
    # Platforms serve their metadata and keys here, from addresses that are otherwise public or private.
    "168.63.129.16/32": "metadata",
    "100.100.100.200/32": "metadata",
    "fd00:ec2::254/128": "metadata",
    "fd20:ce::254/128": "metadata",
    "::/128": "unspecified",
    "::1/128": "loopback",
    "64:ff9b:1::/48": "reserved",
    "100::/64": "discard-only",
    "2001:2::/48": "benchmarking",
    "2001:10::/28": "reserved",
    "2001:20::/28": "reserved",
    "2001:db8::/32": "documentation",
    "3fff::/20": "documentation",
    "fe80::/10": "link-local",
    "fec0::/10": "site-local",
    "ff00::/8": "multicast",
}


def _numbers(networks: Iterable[tuple[IPv4Network | IPv6Network, str]]) -> list[tuple[int, int, str]]:
    """Mask, prefix and word: a door compares each with every address that it dials."""
    return [(int(network.netmask), int(network.network_address), word) for network, word in networks]


_V4_NEVER = _numbers((IPv4Network(prefix), word) for prefix, word in _NEVER.items() if ":" not in prefix)
_V6_NEVER = _numbers((IPv6Network(prefix), word) for prefix, word in _NEVER.items() if ":" in prefix)
_V4_PRIVATE = _numbers((IPv4Network(prefix), word) for prefix, word in _PRIVATE.items() if ":" not in prefix)
_V6_PRIVATE = _numbers((IPv6Network(prefix), word) for prefix, word in _PRIVATE.items() if ":" in prefix)
_GLOBAL = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


def address(text: str) -> Address:
    """An address as a resolver gives it; an IPv4 one in IPv6's clothes (::ffff:0:0/96) is the IPv4 one. Raises ValueError."""
    found = ip_address(text)
    return found.ipv4_mapped or found if isinstance(found, IPv6Address) else found


def refusal(asked: Address, *, private: bool, own: Collection[Address]) -> str | None:
    """Why an address may not be dialled, in a word; None when it may.

    `private` is the entry's: it opens RFC 1918, ULA and shared addresses and nothing else. `own` are the host's addresses.
    """
    if asked in own:
        return "the host's own"
    if isinstance(asked, IPv4Address):
        return _of(asked, _V4_NEVER) or (None if private else _of(asked, _V4_PRIVATE))
    if asked.scope_id:
        return "link-local"
    if word := _of(asked, _V6_NEVER):
        return word
    if embedded := _embedded(asked):
        return next((word for each in embedded if (word := refusal(each, private=private, own=own))), None)
    if word := _of(asked, _V6_PRIVATE):
        return None if private else word
    return None if asked in _GLOBAL else "reserved"


def _of(asked: Address, prefixes: list[tuple[int, int, str]]) -> str | None:
    number = int(asked)
    for mask, prefix, word in prefixes:
        if number & mask == prefix:
            return word
    return None


def _embedded(asked: IPv6Address) -> tuple[IPv4Address, ...]:
    """The IPv4 addresses that packets to this one may end at: mapped, NAT64 (RFC 6052), 6to4 (RFC 3056), Teredo (RFC 4380)."""
    if asked.ipv4_mapped:
        return (asked.ipv4_mapped,)
    if asked in _NAT64:
        return (IPv4Address(int(asked) & 0xFFFFFFFF),)
    if asked.sixtofour:
        return (asked.sixtofour,)
    return asked.teredo or ()
