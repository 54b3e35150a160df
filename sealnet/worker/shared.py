"""What all runs of one worker share: the host as each thread sees it, and one ear for the kernel's notifications."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sealnet.errors import KernelRefused
from sealnet.kernel import links
from sealnet.kernel.host import Host
from sealnet.kernel.netns import Inside
from sealnet.kernel.watch import Watch
from sealnet.model.plan import Seal


@dataclass(slots=True)
class _Wanted:
    """A link that is to be deleted."""

    index: int
    name: str
    is_gone: bool = False


class SharedHost(Host):
    """The host for any number of threads: each has sockets of its own, opened when it first needs them."""

    def __init__(self, directory: Path, tag: str) -> None:
        self.tag = tag
        self._directory = directory
        self._own = threading.local()
        self._made: list[Host] = []
        self._deleting, self._wanted_lock = threading.Lock(), threading.Lock()
        self._wanted: list[_Wanted] = []

    def __getattr__(self, name: str) -> Any:
        # What Host.__init__ would have made once for all.
        if name not in ("netlink", "gate"):
            raise AttributeError(name)
        host: Host | None = getattr(self._own, "host", None)
        if host is None:
            self._own.host = host = Host(self._directory, self.tag)
            self._made.append(host)
        return getattr(host, name)

    def delete_link(self, index: int, name: str) -> None:
        """Runs that end together have their links deleted together: whoever waits here meanwhile is served by the next who deletes."""
        own = _Wanted(index, name)
        with self._wanted_lock:
            self._wanted.append(own)
        with self._deleting:
            with self._wanted_lock:
                found, self._wanted = self._wanted, []
            if found:
                self._delete(found)
        # One that could not go with the others may go alone, or tells why it does not.
        if not own.is_gone:
            links.remove(self.netlink, index, name)

    def _delete(self, found: list[_Wanted]) -> None:
        with contextlib.suppress(KernelRefused):
            if len(found) > 1:
                links.remove_together(self.netlink, [(one.index, one.name) for one in found])
            else:
                links.remove(self.netlink, found[0].index, found[0].name)
            for one in found:
                one.is_gone = True

    def close(self) -> None:
        """Once no thread uses it any more."""
        for host in self._made:
            host.close()
        self._made.clear()


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
