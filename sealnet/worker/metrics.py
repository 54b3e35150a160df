"""What the worker counts, and how that is told to Prometheus (text exposition format 0.0.4).

No label has a value that a caller, a payload or the host chooses: how many series there are is known, and none can be forged.
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from sealnet.errors import KINDS, Interrupted, SealnetError
from sealnet.guard import EVENTS
from sealnet.model.policy import Confinement
from sealnet.model.record import Record
from sealnet.model.version import VERSION
from sealnet.worker.log import counted

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Seconds. A launch takes tens of milliseconds where nothing else is done, a teardown as long as the kernel's grace periods do.
BOUNDS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STATES = ("running", "exited")
_OTHER = "other"
# A log ends at 64 MiB, and no record of it is shorter than 64 bytes.
_MOST_DENIED = 1 << 20


class Histogram:
    """How long something took, in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum_s = 0.0

    def add(self, took_s: float) -> None:
        # `le` is inclusive.
        self._counts[bisect_left(BOUNDS, took_s)] += 1
        self._sum_s += took_s

    def render(self, name: str, told: str) -> Iterator[str]:
        yield from _head(name, "histogram", told)
        up_to = 0
        for bound, count in zip((*map(repr, BOUNDS), "+Inf"), self._counts, strict=True):
            up_to += count
            yield f'{name}_bucket{{le="{bound}"}} {up_to}'
        yield f"{name}_sum {self._sum_s!r}"
        yield f"{name}_count {up_to}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """What can be seen when somebody asks. `reserved` and `most` are subnets of all runs of the host, the worker's and others."""

    records: Iterable[Record]
    launching: int
    helper_starts: int
    crew_died: int
    reserved: int
    most: int
    open_fds: int
    resident_bytes: int


@dataclass(slots=True)
class Metrics:
    """For the event loop's thread. What is counted begins anew with each worker, which Prometheus takes for what it is."""

    launched: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    set_up: Histogram = field(default_factory=Histogram)
    teardown: Histogram = field(default_factory=Histogram)
    denied_packets: int = 0
    denied_requests: int = 0
    left: int = 0
    doors_lost: int = 0
    started: float = field(default_factory=time.time)

    def launch(self, confinement: str, took_s: float) -> None:
        """A payload was let go."""
        self.launched[confinement] += 1
        self.set_up.add(took_s)

    def refuse(self, error: SealnetError) -> None:
        """A launch was refused."""
        self.refused[_CANCELLED if isinstance(error, Interrupted) else kind_of(error)] += 1

    def end(self, record: Record, *, tried: Iterable[tuple[str, str, int, int]], denied: object, took_s: float, is_left: bool) -> None:
        """A run was taken away within `took_s`, or something of it `is_left`. `tried` as `Ended` has it; `denied` as its door says."""
        self.ended[record.confinement] += 1
        self.events.update(_event_kinds(record))
        self.teardown.add(took_s)
        self.denied_packets += sum(packets for _address, _protocol, _port, packets in tried)
        # Whoever has taken a door over has it say anything.
        if type(denied) is int and 0 <= denied <= _MOST_DENIED:
            self.denied_requests += denied
        self.left += is_left

    def render(self, now: Now) -> str:
        """The whole exposition."""
        records = tuple(now.records)
        live = Counter((record.state if record.state in _STATES else _STATES[0], record.confinement) for record in records)
        events = self.events.copy()
        for record in records:
            events.update(_event_kinds(record))
        confinements = tuple(map(str, Confinement))
        ports = sum(len(record.lease_ports) for record in records)
        runs = [({"state": state, "confinement": one}, live[state, one]) for state in _STATES for one in confinements]
        lost = {"nft": max(0, now.helper_starts - 1), "door": self.doors_lost, "crew": now.crew_died}
        restarts = [({"helper": helper}, count) for helper, count in lost.items()]
        said = [({"level": level, "event": event}, count) for (level, event), count in sorted(counted.items())]
        lines = [
            *_family("sealnet_worker_info", "gauge", "The worker's version.", [({"version": VERSION}, 1)]),
            *_one("sealnet_worker_start_time_seconds", "gauge", "When the worker began, in seconds since the epoch.", self.started),
            *_family("sealnet_runs", "gauge", "Runs of the worker's that live (running) or are being taken away (exited).", runs),
            *_one("sealnet_launches_in_progress", "gauge", "Runs that are being set up.", now.launching),
            *_by("sealnet_launches_total", "Runs whose payload was let go.", "confinement", confinements, self.launched),
            *_by("sealnet_launches_refused_total", "Launches that were refused.", "kind", _KINDS, self.refused),
            *_by("sealnet_runs_ended_total", "Runs that have ended.", "confinement", confinements, self.ended),
            *_one("sealnet_teardown_faults_total", "counter", "Runs of which something could not be taken away or written.", self.left),
            *self.set_up.render("sealnet_setup_seconds", "From a launch's turn until its payload was let go."),
            *self.teardown.render("sealnet_teardown_seconds", "From a payload's end until nothing of its run was left."),
            *_one("sealnet_subnets_reserved", "gauge", "Subnets of the pool that are in use, by all runs of the host.", now.reserved),
            *_one("sealnet_subnets_max", "gauge", "Subnets that may be in use (max_runs).", now.most),
            *_one("sealnet_leases", "gauge", "Ports that live runs of the worker's have leased.", ports),
            *_one("sealnet_denied_packets_total", "counter", "Packets refused to runs that have ended.", self.denied_packets),
            *_one("sealnet_denied_requests_total", "counter", "Requests denied by proxies of ended runs.", self.denied_requests),
            *_by("sealnet_tamper_events_total", "What others did to seals.", "event", (*sorted(EVENTS), _OTHER), events),
            *_family("sealnet_helper_restarts_total", "counter", "Processes of the worker's that died at work.", restarts),
            *_family("sealnet_log_lines_total", "counter", "Lines of the worker's log.", said),
            *_one("process_open_fds", "gauge", "Open file descriptors.", now.open_fds),
            *_one("process_resident_memory_bytes", "gauge", "Resident memory.", now.resident_bytes),
        ]
        return "\n".join(lines) + "\n"


# What callers undo themselves is no fault.
_CANCELLED = "cancelled"
_KINDS = (*KINDS, "failed", _CANCELLED)


def kind_of(error: SealnetError) -> str:
    """What an error is called over the socket."""
    return next((kind for kind, of in KINDS.items() if isinstance(error, of)), "failed")


def _event_kinds(record: Record) -> Iterator[str]:
    for event in record.events:
        yield kind if (kind := event.get("event")) in EVENTS else _OTHER


def _head(name: str, kind: str, told: str) -> Iterator[str]:
    yield f"# HELP {name} {told}"
    yield f"# TYPE {name} {kind}"


def _family(name: str, kind: str, told: str, samples: Iterable[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    yield from _head(name, kind, told)
    for labels, value in samples:
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{shown}}} {_number(value)}"


def _by(name: str, told: str, label: str, values: Iterable[str], found: Mapping[str, int]) -> Iterator[str]:
    """A counter for each value of one label: also those that have counted nothing, so that what comes first is seen to come."""
    yield from _family(name, "counter", told, [({label: value}, found.get(value, 0)) for value in values])


def _one(name: str, kind: str, told: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, told)
    yield f"{name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return repr(int(value)) if value == int(value) else repr(float(value))
