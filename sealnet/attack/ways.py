"""What a way out is: the attempt, the other end, and what is known of the place that it is made from."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Any

from sealnet.attack.ends import Ear, Wire
from sealnet.attack.lab import Lab
from sealnet.model.plan import User


class By(enum.Enum):
    """Whose payload: any user's, root's alone, or nobody's that one could count on."""

    USER, ROOT, NOBODY = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way out. `ear` hears it at the other end; without one the deed itself tells.

    `control` is the attempt from outside where that is another one; `wire` says that the ear is that of the run's link; `witnessed` and
    `lacking` are those of `Seen`. `apart`: outside a seal it is only ever done in a network namespace of its own, never on the host's.
    `plain`: whose payload reaches it from plain bwrap on any host; that it does is the control of the whole kit.
    """

    name: str
    group: str
    tried: str
    attempt: tuple[Any, ...] = ()
    control: tuple[Any, ...] | None = None
    ear: Ear | None = None
    wire: bool = False
    witnessed: str | None = None
    absent: str | None = None
    lacking: frozenset[str] = frozenset()
    apart: bool = False
    plain: By = By.USER


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A second run: its broker, and a payload that prints what it receives."""

    gateway: str
    sandbox: str
    port: int
    broker: Ear
    receives: int
    told: int
    netns_inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the attack is made from: `gateway` and `port` are its broker's; `device` is the link to it, as the payload names it."""

    sealed: bool
    gateway: str
    port: int
    subnet: IPv4Network
    device: str
    run_id: str
    wire: Wire
    user: User
    lab: Lab | None
    peer: Peer
