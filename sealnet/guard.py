"""Looks after a live run: its lease renewed, what others change about its seal found, put back where that is possible, written down."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from sealnet.doors import Doorkeeper
from sealnet.errors import CannotSeal, SealnetError
from sealnet.kernel import sysctl
from sealnet.kernel.watch import Watch
from sealnet.model import check, names
from sealnet.model.check import Fault
from sealnet.model.plan import KILL, Seal
from sealnet.records import Claim
from sealnet.seal import Kernel

# Another program that changes the same thing again and again is not fought for ever.
MOST_RESTORES, _RESTORES_WITHIN_S = 10, 60.0
MOST_EVENTS = 100
_RESTORED = {"gate-lost": "gate-restored", "gate-changed": "gate-restored", "lease-lost": "lease-restored"}
_LINK = frozenset(("sysctl-changed", "ipv6-back", "enslaved", "address-lost", "link-down"))
# The others are not sealnet's to put back: one that is gone at the second look was taken back by whoever did it.
_PUT_BACK = _LINK | {"gate-lost", "gate-changed", "lease-lost", "filter-changed", "sink-changed"}
# Every kind of event that a record may have: what was found changed, and what was done about it.
EVENTS = _PUT_BACK | frozenset(
    (
        "gate-restored", "lease-restored", "route-changed", "link-added", "link-changed", "link-gone", "address-added", "mark-changed",
        "gave-up", "lease-not-renewed", "not-watched", "door-ended", "killed-by-watch",
    )
)  # fmt: skip
_FIRST_LOOK_S, GLANCE_S, _AGAIN_S, _MOST_AGAIN = 0.05, 5.0, 0.25, 3


class Ear(Protocol):
    """Where a run hears of changes: a Watch of its own, or its part of one that many share."""

    rests_until: float | None

    @property
    def fd(self) -> int: ...
    def add(self, seal: Seal, inside: Any, ifindex: int | None) -> None: ...
    def take(self, now: float) -> frozenset[str]: ...
    def close(self) -> None: ...


class Guard:
    """One run. Used by the thread that the run belongs to. `killed` is what its payload was ended for."""

    def __init__(self, host: Kernel, claim: Claim, seal: Seal, inside: Any, *, ttl_s: int, on_tamper: str) -> None:
        self._host, self._claim, self._seal, self._inside = host, claim, seal, inside
        self._ttl_s, self._on_tamper = ttl_s, on_tamper
        # What is leased: less than was planned once a door has died.
        self._leased: Seal | None = seal if seal.subnet is not None else None
        self.killed: str | None = None
        self._known: list[Fault] = []
        self._again: Counter[Fault] = Counter()
        self._restores: deque[float] = deque(maxlen=MOST_RESTORES)
        self._gave_up = False
        self._settings: list[dict[str, str]] = [] if seal.subnet is None else [sysctl.expected()] * 2
        # A lease that nobody has renewed in time ends by itself: that is not tampering.
        self._granted_until = time.monotonic() + ttl_s

    @property
    def run_id(self) -> str:
        return self._seal.run_id

    def attach(self, watch: Ear) -> None:
        """Be told by `watch`; a look after this misses nothing. Raises OSError."""
        watch.add(self._seal, self._inside, self._claim.record.ifindex)

    def unwatched(self, why: OSError) -> None:
        """Write down that looking now and then has to do."""
        self._note(
            "not-watched", f"cannot listen for changes: {why.strerror}; settings are read every {GLANCE_S:g} s, the rest at renewals"
        )

    def lost_door(self, ports: Sequence[int]) -> None:
        """The run's door is dead, and its leases of `ports` end with it: whoever listens there by now is not for the payload."""
        if self._leased is not None and ports:
            left = [port for port in self._leased.ports if port not in ports]
            self._leased = replace(self._leased, lease_port=left[0], proxy_port=None) if left else None
        what = "refused"
        if ports:
            what = f"dropped at port {', '.join(map(str, ports))}, which could not be kept"
            try:
                self._host.withdraw(self._seal, ports)
            except SealnetError as error:
                what += f" (once the lease has run out: {error.message})"
        self._note("door-ended", f"the run's door has ended: what it led to is {what}")

    # What is due now and then

    def renew(self) -> None:
        """Look at everything, and renew the lease."""
        self.look()
        leased = self._leased
        if leased is None or self.killed:
            return
        with self._undisturbed() as free:
            # Somebody may have emptied /run while the run goes on; of one that was taken away the link has gone before its record.
            try:
                if not free or not (self._claim.stands() or any(self._host.see_settings(self._seal, self._inside)[:1])):
                    return
                restored = self._host.grant(leased, ttl_s=self._ttl_s)
            except (SealnetError, OSError) as error:
                # The payload goes on without its broker: the kernel lets the lease run out, and the next renewal may succeed.
                self._note("lease-not-renewed", str(error))
                return
            self._granted_until = time.monotonic() + self._ttl_s
            self._known = [fault for fault in self._known if fault.kind != "lease-lost"]
            if restored:
                self._note("gate-restored", "the gate was gone; it was put back")

    def glance(self) -> bool:
        """Look if one of the link's settings has changed: most of them change without a notification. False as `look`."""
        try:
            settings = self._host.see_settings(self._seal, self._inside)
        except (SealnetError, OSError):
            return False
        if settings != self._settings:
            self._settings = settings
            return self.look()
        return True

    def look(self) -> bool:
        """Compare the seal with what was planned, and do what is to be done about it; False when it must be tried again.

        That is when somebody is taking the run away, or something cannot be read: the host changes too fast, no descriptor is left.
        """
        with self._undisturbed() as free:
            if self.killed:
                return True
            if not free or not self._claim.stands():
                return False
            try:
                return self._judge(self._faults())
            except (SealnetError, OSError):
                return False

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[bool]:
        """Hold the lock of the run's teardown, if that is not going on: what has been taken away must not be put back."""
        try:
            fcntl.flock(self._claim.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(self._claim.fd, fcntl.LOCK_UN)

    # Looking

    def _faults(self) -> list[Fault]:
        host, seal, inside = self._host, self._seal, self._inside
        seen = host.see(seal, inside)
        found = check.faults(
            seal,
            seen,
            mark=names.mark(seal.run_id, host.tag),
            sysctls=sysctl.expected(),
            macs=(names.mac(seal.run_id, end=0), names.mac(seal.run_id, end=1)),
            group=names.LINK_GROUP,
        )
        planned = self._claim.record.rulesets.get("inside")
        if planned and not seen.filter_fault and seen.rulesets["inside"] != planned:
            found.append(Fault("filter-changed", f"the filter inside netns {seal.netns} has other rules than when the run started"))
        elsewhere = host.see_sink(inside)
        if elsewhere is not None:
            found.append(Fault("sink-changed", f"packets of netns {seal.netns} to strangers: {elsewhere}, not dev lo"))
        if seal.subnet is None:
            return found
        kinds = {fault.kind for fault in found}
        if not kinds & (_LINK | {"link-gone"}):
            found += [Fault("route-changed", str(one)) for one in host.check_routes(seal) if not one.ok]
        leased = self._leased
        if leased is not None and "gate-lost" not in kinds and not (host.has_lease(leased) and host.has_gateway(leased)):
            # It may have gone with the whole gate, since that was read.
            gate = host.see(seal, inside).gate_fault
            lost = f"the lease of {seal.sandbox} on {seal.gateway}:{leased.ports[0]} is gone"
            found.append(Fault("lease-lost", lost) if gate is None else Fault("gate-lost", gate))
        return found

    # Doing something about it

    def _judge(self, faults: list[Fault]) -> bool:
        """False where what was put back is gone once more: `ip address flush` deletes until nothing is left."""
        known, self._known = self._known, faults
        new = [fault for fault in faults if fault not in known]
        if time.monotonic() > self._granted_until:
            new = [fault for fault in new if fault.kind != "lease-lost"]
        if not new:
            return True
        if self._on_tamper == KILL:
            self._end(new)
            return True
        why = self._restore({fault.kind for fault in faults})
        try:
            self._known = self._faults()
        except (SealnetError, OSError) as error:
            why = f"it cannot be read back: {error}"
        # These are new again the next time, which is soon.
        again = [] if why else [fault for fault in self._known if fault not in known and fault.kind in _PUT_BACK]
        again = [fault for fault in again if self._again[fault] < _MOST_AGAIN]
        self._again = Counter({fault: self._again[fault] + 1 for fault in again})
        self._known = [fault for fault in self._known if fault not in again]
        new = [fault for fault in new if fault not in again]
        for kind, text in _told(fault for fault in new if fault not in self._known):
            self._note(_RESTORED.get(kind, kind), f"{text}; it {'was put back' if kind in _PUT_BACK else 'has passed by itself'}")
        for kind, text in _told(fault for fault in self._known if fault not in known):
            self._note(kind, f"{text}; it stays so" + (f": {why}" if why else ""))
        return not again

    def _end(self, new: list[Fault]) -> None:
        try:
            self._host.kill(self.run_id, self._inside)
        except SealnetError:
            # Tried again with the next look, which is soon.
            self._known = []
            raise
        self.killed = new[0].text
        for kind, text in _told(new):
            self._note(kind, text)
        self._note("killed-by-watch", f"the payload was ended: {self.killed}")

    def _restore(self, kinds: set[str]) -> str:
        """Put back what can be; in words what could not be. A link comes up only behind a gate and a filter that stand."""
        now, host, seal, inside, leased = time.monotonic(), self._host, self._seal, self._inside, self._leased
        if not self._gave_up and len(self._restores) == MOST_RESTORES and now - self._restores[0] < _RESTORES_WITHIN_S:
            self._gave_up = True
            self._note("gave-up", f"{MOST_RESTORES} times within {_RESTORES_WITHIN_S:g} s something was put back; no more of it")
        if self._gave_up:
            return "sealnet gave up putting it back"
        steps: list[tuple[set[str] | frozenset[str], Callable[[], object]]] = [
            ({"gate-lost", "gate-changed"}, lambda: host.restore_gate(ttl_s=self._ttl_s)),
            ({"filter-changed"}, lambda: host.restore_filter(seal, inside)),
            ({"sink-changed"}, lambda: host.restore_sink(inside)),
            (_LINK, lambda: host.restore_link(seal, inside)),
            ({"gate-lost", "lease-lost"}, lambda: leased is not None and host.grant(leased, ttl_s=self._ttl_s)),
        ]
        wanted = [step for of, step in steps if of & kinds]
        if wanted:
            self._restores.append(now)
        for step in wanted:
            try:
                step()
            except (SealnetError, OSError) as error:
                # What comes after it would open more than what stands now.
                return str(error)
        return ""

    def _note(self, event: str, detail: str) -> None:
        events = self._claim.record.events
        # The first of its kind is always told: what the record claims may hang on it (a tally that began anew).
        if len(events) < MOST_EVENTS or all(one["event"] != event for one in events):
            # A payload that runs is not ended because its record cannot be written (a full /run).
            with contextlib.suppress(CannotSeal):
                self._claim.update(events=(*events, {"time": time.time(), "event": event, "detail": detail}))


def _told(faults: Iterable[Fault]) -> list[Fault]:
    """One of each kind: one policy rule bends every route, and is one event."""
    first: dict[str, list[str]] = {}
    for fault in faults:
        first.setdefault(fault.kind, []).append(fault.text)
    return [Fault(kind, texts[0] + (f" (and {len(texts) - 1} more)" if texts[1:] else "")) for kind, texts in first.items()]


class Upkeep:
    """What one run needs while somebody waits for it in a poll(2) loop: wake up for one of `fds` or at `next_at`, then `serve`.

    `ear` makes what it is told of changes by, if that is no Watch of its own. `glance_s` is how often the settings are read.
    """

    def __init__(
        self,
        guard: Guard | None,
        *,
        refresh_s: float,
        door: Doorkeeper | None = None,
        ear: Callable[[], Ear] | None = None,
        glance_s: Callable[[], float] = lambda: GLANCE_S,
    ) -> None:
        now = time.monotonic()
        self._door = door
        self._guard, self._refresh_s = guard, refresh_s
        self._ear, self._glance_s = ear, glance_s
        self._watch: Ear | None = None
        self._renew_at, self._glance_at = now + refresh_s, now + glance_s()
        # Not at once: most of what is short-lived has ended by then. The first look tells what was changed until it.
        self._begin_at: float | None = now + _FIRST_LOOK_S
        self._look_at: float | None = None

    @property
    def fds(self) -> list[int]:
        watch = [] if self._watch is None else [self._watch.fd]
        return watch if self._door is None else [*watch, self._door.pidfd]

    def next_at(self) -> float:
        """When to call `serve` at the latest (time.monotonic)."""
        if self._guard is None:
            return float("inf")
        rests_until = None if self._watch is None else self._watch.rests_until
        times = (self._begin_at, self._look_at, rests_until, self._glance_at, self._renew_at)
        return min(at for at in times if at is not None)

    def serve(self) -> None:
        """Whatever is due now."""
        guard, now = self._guard, time.monotonic()
        if guard is None:
            return
        if self._door is not None and not self._door.is_alive:
            # Its connections are refused from here on; nothing else is.
            lost = self._door.keep(guard.run_id)
            self._door = None
            guard.lost_door(lost)
        if self._begin_at is not None and now >= self._begin_at:
            self._begin_at, self._look_at = None, now
            try:
                self._watch = Watch() if self._ear is None else self._ear()
                guard.attach(self._watch)
            except OSError as error:
                guard.unwatched(error)
        if self._watch is not None and self._watch.take(now):
            self._look_at = now
        if self._look_at is not None and now >= self._look_at:
            self._look_at = None if guard.look() else now + _AGAIN_S
        elif now >= self._glance_at and not guard.glance():
            self._look_at = now + _AGAIN_S
        if now >= self._glance_at:
            self._glance_at = now + self._glance_s()
        if now >= self._renew_at:
            self.renew()

    def renew(self) -> None:
        if self._guard is not None:
            self._guard.renew()
            self._renew_at = time.monotonic() + self._refresh_s

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._guard = self._door = None
