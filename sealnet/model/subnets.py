"""Which /30 a run gets: the first of the pool that overlaps nothing the host routes and no other run.

Everything is counted in blocks: block n is the /30 that begins at address 4n.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from ipaddress import IPv4Network
from typing import NamedTuple, Self

from sealnet.errors import PoolExhausted, UsageError

# RFC 2544 benchmarking first: nobody's peer lives there, while a 10.x peer behind the default gateway shows in no routing table.
DEFAULT_POOL = (IPv4Network("198.18.0.0/15"), IPv4Network("10.0.0.0/8"))

# Offered in the hint of an exhausted pool, the least likely to hide somebody's peer first.
_ALTERNATIVES = (*DEFAULT_POOL, IPv4Network("172.16.0.0/12"), IPv4Network("192.168.0.0/16"))
_UNUSABLE = {
    IPv4Network("0.0.0.0/8"): "this-network",
    IPv4Network("127.0.0.0/8"): "loopback",
    IPv4Network("169.254.0.0/16"): "link-local",
    IPv4Network("224.0.0.0/4"): "multicast",
    IPv4Network("240.0.0.0/4"): "class E",
}
_NAMED = 3
_CONFIG = "/etc/sealnet/config.toml"


class Occupant(NamedTuple):
    """A range of addresses that is in use. `str(why)` is read only when it is reported, so it may be something that renders late."""

    first: int
    last: int
    why: object

    @classmethod
    def of(cls, prefix: IPv4Network, why: object) -> Self:
        return cls(int(prefix.network_address), int(prefix.broadcast_address), why)


def parse_pool(values: Sequence[str]) -> tuple[IPv4Network, ...]:
    """The pool of a configuration, in its order; UsageError names the value that cannot be used."""
    if not values:
        raise UsageError("cannot use an empty pool: no run could get an address", hint='for example pool = ["198.18.0.0/15"]')
    pool: list[IPv4Network] = []
    for value in values:
        prefix = _parse_prefix(value)
        for other in pool:
            if prefix.overlaps(other):
                raise UsageError(f"cannot use pool prefix {prefix}: it overlaps {other}, which is in the pool too")
        pool.append(prefix)
    return tuple(pool)


def _parse_prefix(value: object) -> IPv4Network:
    refused = f"cannot use pool prefix {value}"
    try:
        if not isinstance(value, str) or "/" not in value:
            raise ValueError
        prefix = IPv4Network(value, strict=False)
    except ValueError:
        raise UsageError(f"{refused}: it is not an IPv4 prefix", hint="write it as ADDRESS/LENGTH, for example 198.18.0.0/15") from None
    if str(prefix) != value:
        raise UsageError(
            f"{refused}: that is not how the prefix is written (host bits, a netmask, or leading zeros)", hint=f"write {prefix}"
        )
    if prefix.prefixlen > 30:
        raise UsageError(f"{refused}: it has no room for one /30")
    for unusable, name in _UNUSABLE.items():
        if prefix.overlaps(unusable):
            raise UsageError(f"{refused}: it overlaps {unusable} ({name}), which is not for hosts")
    return prefix


def _walks(pool: Sequence[IPv4Network]) -> Iterator[range]:
    """The blocks of the pool in the order in which they are offered.

    A prefix is walked from its start, but one that holds x.1.0.0 (x its own first octet) from there, and x.0.0.0/16 last: that is where
    sites begin to number, so a peer in it that no route shows is likeliest.
    """
    for prefix in pool:
        base = int(prefix.network_address)
        first, end = base >> 2, (base + prefix.num_addresses) >> 2
        start = (base & 0xFF00_0000 | 0x1_0000) >> 2
        if first < start < end:
            yield range(start, end)
            yield range(first, start)
        else:
            yield range(first, end)


def order(prefix: IPv4Network, pool: Sequence[IPv4Network]) -> int:
    """The place of a /30 in the pool's walk. ValueError if it is no /30 of the pool."""
    block, passed = int(prefix.network_address) >> 2, 0
    for walk in _walks(pool):
        if prefix.prefixlen == 30 and block in walk:
            return passed + walk.index(block)
        passed += len(walk)
    raise ValueError(f"{prefix} is not a /30 of the pool")


def at(index: int, pool: Sequence[IPv4Network]) -> IPv4Network:
    """The /30 at a place of the pool's walk: the inverse of `order`. IndexError past the end."""
    left = index
    for walk in _walks(pool):
        if 0 <= left < len(walk):
            return IPv4Network((walk[left] << 2, 30))
        left -= len(walk)
    raise IndexError(index)


def first_free(pool: Sequence[IPv4Network], taken: Sequence[Occupant], runs: Set[int], *, max_runs: int) -> IPv4Network:
    """The first /30 of the pool's walk that overlaps nothing in `taken` and is none of the `runs`' blocks; PoolExhausted says who holds it.

    What lies within a run's block (its own address and routes) is not counted as the host's.
    """
    if len(runs) >= max_runs:
        raise PoolExhausted(
            f"cannot allocate a /30 from {_text(pool)}: {len(runs)} runs are live, and max_runs is {max_runs}",
            hint=f"end some (sealnet ls lists them), or set max_runs in {_CONFIG}",
        )
    busy = _Blocks(taken, runs)
    for walk in _walks(pool):
        block = busy.first_free(walk)
        if block is not None:
            return IPv4Network((block << 2, 30))
    raise _exhausted(pool, taken, runs, busy)


class _Blocks:
    """Occupied blocks, as sorted ranges that neither overlap nor touch: past the end of one, the next block is free."""

    def __init__(self, taken: Iterable[Occupant], runs: Iterable[int] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        end = -2
        # One int per range sorts in half the time of a pair. A kernel's dump is nearly in order, which the sort makes use of.
        for both in sorted([*((first >> 2) << 32 | last >> 2 for first, last, _why in taken), *[block << 32 | block for block in runs]]):
            first, last = both >> 32, both & 0xFFFF_FFFF
            if first > end + 1:
                self._firsts.append(first)
                self._lasts.append(last)
                end = last
            elif last > end:
                self._lasts[-1] = end = last

    def first_free(self, walk: range) -> int | None:
        if not walk:
            return None
        block = walk.start
        i = bisect_left(self._lasts, block)
        if i < len(self._firsts) and self._firsts[i] <= block:
            block = self._lasts[i] + 1
        return block if block in walk else None

    def count(self, walk: range) -> int:
        """How many blocks of the walk are occupied."""
        begin, end = bisect_left(self._lasts, walk.start), bisect_left(self._firsts, walk.stop)
        return sum(min(self._lasts[i] + 1, walk.stop) - max(self._firsts[i], walk.start) for i in range(begin, end))


def _exhausted(pool: Sequence[IPv4Network], taken: Sequence[Occupant], runs: Set[int], busy: _Blocks) -> PoolExhausted:
    """Who holds the pool: the host and the runs are counted apart, each block once, and the host's first."""
    walks = list(_walks(pool))
    hosts = [o for o in taken if not (o.first >> 2 == o.last >> 2 and o.first >> 2 in runs)]
    size, held = sum(map(len, walks)), sum(map(_Blocks(hosts).count, walks))
    cannot = f"cannot allocate a /30 from {_text(pool)}"
    if not held:
        runs_hint = f"end some (sealnet ls lists them), or set a larger pool in {_CONFIG}"
        return PoolExhausted(f"{cannot}: {_runs(size)} all of it", hint=runs_hint)

    another = next(
        (str(p) for p in _ALTERNATIVES if not any(map(p.overlaps, pool)) and any(busy.first_free(w) is not None for w in _walks([p]))), None
    )
    hint = (
        f'set another pool in {_CONFIG}, for example pool = ["{another}"]'
        if another
        else f"remove a route, or set another pool in {_CONFIG}"
    )
    covering = _named(hosts, walks)
    if held == size:
        return PoolExhausted(f"{cannot}: the host routes all of it ({covering})", hint=hint)
    return PoolExhausted(f"{cannot}: the host routes {held} of its {size} ({covering}), and {_runs(size - held)} the rest", hint=hint)


def _named(hosts: Sequence[Occupant], walks: Sequence[range]) -> str:
    """The widest of the host's ranges that reach into the pool; one that lies within another is not worth a word."""
    widest: list[Occupant] = []
    for occupant in sorted(hosts, key=lambda o: (o.first, -o.last)):
        reaches = any(occupant.first >> 2 < walk.stop and occupant.last >> 2 >= walk.start for walk in walks)
        if reaches and (not widest or occupant.last > widest[-1].last):
            widest.append(occupant)
    widest.sort(key=lambda o: o.first - o.last)
    more = [f"and {len(widest) - _NAMED} more"] if len(widest) > _NAMED else []
    return "; ".join([str(occupant.why) for occupant in widest[:_NAMED]] + more)


def _runs(count: int) -> str:
    return "1 live run holds" if count == 1 else f"{count} live runs hold"


def _text(pool: Sequence[IPv4Network]) -> str:
    return ", ".join(map(str, pool))
