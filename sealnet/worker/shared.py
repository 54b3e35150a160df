"""What all runs of one worker share: the host as each thread sees it, and one ear for the kernel's notifications."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from sealnet.kernel import links, sockets
from sealnet.kernel.host import Host
from sealnet.kernel.netns import Inside
from sealnet.kernel.taken import Taken
from sealnet.kernel.watch import Watch
from sealnet.model.plan import Seal
from sealnet.model.subnets import Occupant
from sealnet.worker.together import Together


class SharedHost(Host):
    """The host for any number of threads: each has sockets of its own, opened when it first needs them.

    Runs that begin, go on or end together have their leases granted, renewed and withdrawn in one transaction, their connections looked
    for in one dump, and their links deleted by one request. What waits for RCU waits once.
    """

    def __init__(self, directory: Path, tag: str) -> None:
        self.tag = tag
        self._directory = directory
        self._own = threading.local()
        self._made: list[Host] = []
        self._taken = Taken()
        self._granting = Together(alone=self._grant, together=self._grant_all, turn=_Turn(self))
        self._asking = Together(alone=super().is_connected, together=self._are_connected)
        self._revoking = Together(alone=super().revoke, together=self._revoke_all, turn=_Turn(self))
        self._deleting = Together(alone=self._delete, together=self._delete_all, turn=_Turn(self))

    def __getattr__(self, name: str) -> Any:
        # What Host.__init__ would have made once for all.
        if name not in ("netlink", "gate"):
            raise AttributeError(name)
        host: Host | None = getattr(self._own, "host", None)
        if host is None:
            self._own.host = host = self._make()
        return getattr(host, name)

    def _make(self) -> Host:
        host = Host(self._directory, self.tag)
        self._made.append(host)
        return host

    def forget(self) -> None:
        """Close what the calling thread has of it: it ends."""
        host: Host | None = getattr(self._own, "host", None)
        if host is not None:
            self._own.host = None
            self._made.remove(host)
            host.close()

    def lend(self, lent: Host | None) -> tuple[Host, Host | None]:
        """Have the calling thread see the host by what is `lent` to it, made where that is None; and by what it saw it before."""
        before: Host | None = getattr(self._own, "host", None)
        self._own.host = lent = self._make() if lent is None else lent
        return lent, before

    def give_back(self, before: Host | None) -> None:
        """See it as before."""
        self._own.host = before

    def see_taken(self, runs: frozenset[int]) -> list[Occupant]:
        """By whoever holds the lock under which subnets are reserved."""
        return self._taken.see(self.netlink, runs)

    def see_taken_anew(self, runs: frozenset[int]) -> list[Occupant]:
        return self._taken.see(self.netlink, runs, anew=True)

    def grant(self, seal: Seal, *, ttl_s: int) -> bool:
        return self._granting.do((seal, ttl_s))

    def _grant(self, wanted: tuple[Seal, int]) -> bool:
        seal, ttl_s = wanted
        return super().grant(seal, ttl_s=ttl_s)

    def _grant_all(self, wanted: Sequence[tuple[Seal, int]]) -> list[bool]:
        self.gate.grant_all(wanted)
        return [False] * len(wanted)

    def is_connected(self, sandbox: IPv4Address) -> bool:
        return self._asking.do(sandbox)

    def _are_connected(self, sandboxes: Sequence[IPv4Address]) -> list[bool]:
        found = sockets.connected(sandboxes)
        return [sandbox in found for sandbox in sandboxes]

    def revoke(self, seal: Seal) -> None:
        if seal.sandbox is None:
            super().revoke(seal)
        else:
            self._revoking.do(seal)

    def _revoke_all(self, seals: Sequence[Seal]) -> list[None]:
        self.gate.forget_all(seals)
        return [None] * len(seals)

    def delete_link(self, index: int, name: str) -> None:
        self._deleting.do((index, name))

    def _delete(self, link: tuple[int, str]) -> None:
        super().delete_link(*link)

    def _delete_all(self, found: Sequence[tuple[int, str]]) -> list[None]:
        links.remove_together(self.netlink, found)
        return [None] * len(found)

    def close(self) -> None:
        """Once no thread uses it any more."""
        self._taken.close()
        for host in self._made:
            host.close()
        self._made.clear()


class _Turn:
    """What only one thread at a time does, each with the same sockets: one libnftables for them all, and not for each of them."""

    def __init__(self, shared: SharedHost) -> None:
        self._shared = shared
        self._host: Host | None = None
        self._before: Host | None = None

    def __enter__(self) -> None:
        self._host, self._before = self._shared.lend(self._host)

    def __exit__(self, *_: object) -> None:
        self._shared.give_back(self._before)


class Ear:
    """What one run hears of the shared Watch. `told` is for the loop, the rest for the thread that the run belongs to."""

    def __init__(self, watch: SharedWatch) -> None:
        self._watch = watch
        self._run_id: str | None = None
        self._has_heard = threading.Event()
        self.rests_until: float | None = None

    @property
    def fd(self) -> int:
        return self._watch.fd

    def add(self, seal: Seal, inside: Inside, ifindex: int | None) -> None:
        self._watch.add(self, seal, inside, ifindex)
        self._run_id = seal.run_id

    def told(self) -> None:
        self._has_heard.set()

    def take(self, _now: float) -> frozenset[str]:
        if self._run_id is None or not self._has_heard.is_set():
            return frozenset()
        self._has_heard.clear()
        return frozenset([self._run_id])

    def close(self) -> None:
        if self._run_id is not None:
            self._watch.remove(self._run_id)
            self._run_id = None


class SharedWatch:
    """One Watch for all runs. `take` is called by the loop, when `fd` is readable or `rests_until` has come."""

    def __init__(self, wake: Callable[[str], None]) -> None:
        """`wake` is called by `take` for each run that has something to look at."""
        self._watch, self._lock, self._wake = Watch(many=True), threading.Lock(), wake
        self._ears: dict[str, Ear] = {}
        self.fd = self._watch.fd

    @property
    def rests_until(self) -> float | None:
        return self._watch.rests_until

    def ear(self) -> Ear:
        return Ear(self)

    def add(self, ear: Ear, seal: Seal, inside: Inside, ifindex: int | None) -> None:
        with self._lock:
            self._watch.add(seal, inside, ifindex)
            self._ears[seal.run_id] = ear

    def remove(self, run_id: str) -> None:
        with self._lock:
            self._ears.pop(run_id, None)
            self._watch.remove(run_id)

    def take(self, now: float) -> None:
        with self._lock:
            found = self._watch.take(now)
            told = [(run_id, self._ears[run_id]) for run_id in found if run_id in self._ears]
        for run_id, ear in told:
            ear.told()
            self._wake(run_id)

    def settle(self) -> None:
        """Now and then."""
        with self._lock:
            self._watch.settle()

    def close(self) -> None:
        self._watch.close()
