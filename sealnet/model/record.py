"""What is written down of a run, so that it can be listed, checked and taken away by anybody with the run id."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from ipaddress import IPv4Address, IPv4Network
from typing import Any, Self

from sealnet.model.plan import Seal

SCHEMA = "sealnet.record/1"

# The states of a launch, in order; each is written before the step it announces is relied upon.
STATES = ("claimed", "built", "proved", "started", "running", "exited")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run. Addresses are text, times seconds since the epoch; None is `not yet` or `does not apply`."""

    run_id: str
    state: str = "claimed"
    confinement: str
    asked: str
    user: str
    uid: int | None = None
    allow_userns: bool = False
    command: str
    kind: str = "run"
    """`run`, or `build`: an image build, whose builder is root and whose RUN steps are containers of its."""
    started: float
    boot_id: str
    supervisor: int
    supervisor_start: int
    ifname: str
    netns: str
    subnet: str | None = None
    gateway: str | None = None
    sandbox: str | None = None
    lease_ports: tuple[int, ...] = ()
    proxy_port: int | None = None
    hosts: tuple[str, ...] = ()
    ifindex: int | None = None
    mac: str | None = None
    netns_inode: int | None = None
    rulesets: dict[str, str] = field(default_factory=dict)
    cgroup: str | None = None
    init_pid: int | None = None
    pid: int | None = None
    why_severed: str | None = None
    receipt: dict[str, Any] | None = None
    events: tuple[dict[str, Any], ...] = ()
    durable: dict[str, Any] | None = None
    """Of a run that goes on without its supervisor: what `sealnet.model.durable` makes of it."""
    note: dict[str, Any] = field(default_factory=dict)
    """What the worker's socket keeps of the caller."""

    def with_(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        # Not asdict(): it would copy the receipt, leaf by leaf, each time that anything else is written.
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in _NAMES}}

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Raises ValueError when `data` is no record."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError("not a record")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items() if name in _NAMES
        }
        try:
            record = cls(**values)
            record._check()
        except (TypeError, ValueError) as e:
            raise ValueError(f"not a record: {e}") from e
        return record

    def _check(self) -> None:
        """What others compute with must be what it says; ValueError or TypeError where it is not."""
        IPv4Network(self.subnet or "0.0.0.0/0")
        IPv4Address(self.gateway or 0)
        IPv4Address(self.sandbox or 0)
        numbers = (self.started, self.netns_inode or 0, self.init_pid or 0, *self.lease_ports)
        if not all(isinstance(number, int | float) for number in numbers) or (self.subnet and not self.lease_ports):
            raise ValueError("a number is none")
        if not all(isinstance(text, str) for text in (self.run_id, self.state, self.confinement, self.user, self.command)):
            raise ValueError("a text is none")
        if not isinstance(self.events, tuple) or not all(isinstance(e, dict) and isinstance(e.get("event"), str) for e in self.events):
            raise ValueError("an event is none")
        if not isinstance(self.durable, dict | None):
            raise ValueError("durable is no object")
        if not isinstance(self.note, dict):
            raise ValueError("its note is no object")

    def render(self) -> bytes:
        # Without indentation, which json has in C only so; it is written eight times before the payload runs.
        return json.dumps(self.to_json()).encode() + b"\n"


_NAMES = tuple(item.name for item in fields(Record))


def seal_of(record: Record) -> Seal:
    """The network side of a recorded run."""
    subnet = IPv4Network(record.subnet) if record.subnet else None
    broker = [port for port in record.lease_ports if port != record.proxy_port] if subnet else []
    return Seal(
        run_id=record.run_id, subnet=subnet, lease_port=broker[0] if broker else None, proxy_port=record.proxy_port if subnet else None
    )
