"""Takes over a durable run that its supervisor has left: nothing is believed of it that is not seen now."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from dataclasses import replace

from sealnet.doors import Doorkeeper
from sealnet.errors import CannotSeal
from sealnet.kernel import netns, process
from sealnet.kernel.host import Host
from sealnet.kernel.netns import Visit
from sealnet.model.config import Config
from sealnet.model.durable import Durable, of
from sealnet.model.plan import Plan, User
from sealnet.model.policy import Confinement
from sealnet.model.receipt import Receipt, parse
from sealnet.model.record import Record, seal_of
from sealnet.records import ALIVE, Claim, State
from sealnet.running import Run


class Adopted(Run):
    """A run whose bwrap is no child of ours: how that has ended is in its status file, and may be known to whoever has started it."""

    ask_code: Callable[[], int | None] = staticmethod(lambda: None)
    """What wait(2) told of bwrap; asked where bwrap has written nothing."""

    @property
    def receipt(self) -> Receipt:
        """As it was made before the payload started: what was observed then is in the record."""
        return parse(self.record.receipt) if self.record.receipt is not None else super().receipt

    def _code(self) -> int | None:
        if _is_alive(self.pidfd):
            return None
        # One that was killed has written nothing.
        told = self.ask_code() if self.claim.status() is None else None
        return -signal.SIGKILL if told is None else told


def adopt(host: Host, state: State, config: Config, claim: Claim, places: Callable[[Record, Durable], Doorkeeper | None]) -> Run | None:
    """The run of a claim that was taken over; None when it is not one that goes on: it never did, or has ended, or is not the one recorded.

    The claim stays the caller's then, and what there is of the run is to be taken away. `places` tells its door.
    """
    record, durable = claim.record, of(claim.record)
    if durable is None or record.state != "running" or record.boot_id != process.boot_id():
        return None
    with contextlib.ExitStack() as undo:
        # bwrap first: it lives until it has written how the payload ended, so that is never read too early.
        pidfd = process.open_exactly(durable.bwrap_pid, durable.bwrap_start)
        if pidfd is None:
            return None
        undo.callback(os.close, pidfd)
        # Then its child, which holds `alive`, and is in the run's namespace: by these a stranger is told, whatever pid it has.
        init = process.open_exactly(record.init_pid, durable.init_start)
        if init is None:
            return None
        undo.callback(os.close, init)
        if process.parent(record.init_pid or 0) != durable.bwrap_pid or not state.is_held(record.run_id, ALIVE):
            return None
        inside = None
        if record.confinement != str(Confinement.OPEN):
            if record.netns_inode is None or netns.inode_of(record.init_pid or 0) != record.netns_inode:
                return None
            # Its mark is read as well: the namespace is the run's, not just of that number.
            found = host.join(record.run_id, record.netns_inode)
            if found is None:
                return None
            with found:
                if found.inode != record.netns_inode:
                    return None
                inside = Visit(found.fd)
            undo.callback(inside.close)
        if not _is_alive(init):
            return None
        door = places(record, durable)
        run = taken(host, claim, config, inside=inside, pidfd=os.dup(pidfd))
        run.door = door
        undo.pop_all()
    for fd in (pidfd, init):
        os.close(fd)
    # Who sees to it is for people to read: a run is not ended because that cannot be written (a full /run).
    with contextlib.suppress(CannotSeal):
        claim.update(supervisor=os.getpid(), supervisor_start=process.start_time(os.getpid()) or 0)
    return run


def taken(host: Host, claim: Claim, config: Config, *, inside: Visit | None, pidfd: int) -> Adopted:
    """The run of a claim, by what is open of it: its namespace, where it has one, and bwrap. These are the run's from now on.

    Raises ValueError where it is not durable.
    """
    record, durable = claim.record, of(claim.record)
    if durable is None:
        raise ValueError(f"run {record.run_id} is not durable")
    run = Adopted(host, claim, _plan_of(record, durable), seal_of(record), config, {})
    run.inside, run.init_pid, run.pidfd = inside, record.init_pid or 0, pidfd
    return run


def _is_alive(pidfd: int) -> bool:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return not ended.poll(0)


def _plan_of(record: Record, durable: Durable) -> Plan:
    """As much of its plan as is asked of a run that runs. Where it leads is in its seal."""
    user = User(name=record.user, uid=record.uid or 0, gid=durable.gid, groups=durable.groups, home="/", shell="/bin/sh")  # noqa: S604
    bare = Plan(
        run_id=record.run_id,
        confinement=Confinement.SEVERED,
        argv=(record.command or "?",),
        user=user,
        environment={},
        cwd="/",
        grace_s=durable.grace_s,
        on_tamper=durable.on_tamper,
    )
    if record.confinement == str(Confinement.OPEN):
        return replace(bare, confinement=Confinement.OPEN)
    return bare
