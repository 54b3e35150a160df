"""The doors of a worker: one process for all runs of a user, which outlives the worker and is met again by the next one.

Not one for all: a door parses what payloads send, and whoever takes one over has the traffic of everybody that it serves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sealnet import doors
from sealnet.doors import Door, Listening
from sealnet.errors import CannotSeal
from sealnet.kernel import process
from sealnet.model.durable import Doorway, Durable
from sealnet.model.plan import Plan, User
from sealnet.model.record import Record
from sealnet.records import State

# So many are kept for the next run of their user.
_IDLE = 4
# One whose worker has just been killed may not have noticed yet.
_NOTICES_S = 2.0


class Shared(Door):
    """A door process that serves many runs. `runs` are those, for the Doors alone."""

    # One that is slow on a busy host is not ended for one run, with the connections of all others; those of the run end with its link.
    stops_within_s = 10.0

    def __init__(self, user: User, path: Path) -> None:
        self.path = path
        self.runs: set[str] = set()
        with doors.meeting(path) as meeting:
            super().__init__(user, meeting=meeting)

    @property
    def start(self) -> int:
        return process.start_time(self.pid) or 0


class Met(Shared):
    """One that another worker has left; a dead one where it is not to be met any more."""

    def __init__(self, path: Path, pid: int, pidfd: int | None) -> None:  # no process is started
        self.path, self.process = path, None
        self.runs = set()
        control = _meet(path) if pidfd is not None else None
        if control is None and pidfd is not None:
            # It is the one that was recorded, and nobody can tell it anything: what it does nobody answers for.
            doors.kill(pidfd)
        if control is not None and pidfd is not None:
            self._begin(control, pid, os.dup(pidfd))
            return
        # Nobody is at its other end.
        control = socket.socketpair()[0]
        self._begin(control, pid, -1)
        for thread in self._threads:
            thread.join()
        control.close()

    def know(self, run_id: str, places: Sequence[tuple[str, int]], broker: tuple[str, User] | None) -> None:
        """What it serves the run with: where it listens, and where that one's Unix broker is."""
        self._places[run_id] = list(places)
        if broker is not None:
            self._targets[run_id] = broker


def _meet(path: Path) -> socket.socket | None:
    deadline = time.monotonic() + _NOTICES_S
    while time.monotonic() < deadline:
        control = doors.meet(path)
        if control is None:
            return None
        if doors.is_answered(control):
            return control
        control.close()
        time.sleep(0.02)
    return None


class Place:
    """One run's place in a shared door, which is all of a door to that run."""

    def __init__(self, kept: Doors, door: Shared, run_id: str, *, is_served: bool = False) -> None:
        self._kept, self._door, self._run_id = kept, door, run_id
        # Of one that serves nothing for the run nobody asks anything: it may still be starting.
        self._is_served, self._is_left = is_served, False

    @property
    def pidfd(self) -> int:
        return self._door.pidfd

    @property
    def is_alive(self) -> bool:
        return self._door.is_alive

    def doorway(self, listening: Sequence[Listening], plan: Plan) -> dict[str, Any]:
        door, broker = self._door, plan.broker
        found = Doorway(
            name=door.path.name,
            pid=door.pid,
            start=door.start,
            ports=tuple(one.port for one in listening),
            broker=None if broker is None else broker.path,
        )
        return found.to_json()

    def serve(self, run_id: str, listening: Listening, plan: Plan, sandbox: str, log: int | None) -> None:
        self._is_served = True
        self._door.serve(run_id, listening, plan, sandbox, log)

    def preflight(self, run_id: str, plan: Plan) -> tuple[list[str], list[str]]:
        return self._door.preflight(run_id, plan)

    def keep(self, run_id: str) -> list[int]:
        return self._door.keep(run_id)

    def stop(self, run_id: str) -> dict[str, Any] | None:
        self._is_left = True
        try:
            return self._door.stop(run_id) if self._is_served else None
        finally:
            self._kept.left(self._door, run_id)

    def close(self) -> None:
        if not self._is_left:
            self.stop(self._run_id)


class Doors:
    """For any number of threads. `begun` is told of each door, so that somebody sees it die."""

    def __init__(self, state: State, begun: Callable[[Shared], None]) -> None:
        self._directory, self._begun = state.path / "doors", begun
        self._lock = threading.Lock()
        self._of: dict[int, Shared] = {}
        self._idle: list[Shared] = []
        self._met: dict[str, Shared] = {}

    def place(self, user: User, plan: Plan) -> Place:
        """A place for a run of the plan's user; `user` is whom doors run as."""
        with self._lock:
            door = self._of.get(plan.user.uid)
            if door is None or not door.is_alive:
                self._directory.mkdir(mode=0o700, exist_ok=True)
                door = Shared(user, self._directory / f"{plan.user.uid}-{os.urandom(4).hex()}.sock")
                self._of[plan.user.uid] = door
                self._begun(door)
            if door in self._idle:
                self._idle.remove(door)
            door.runs.add(plan.run_id)
            return Place(self, door, plan.run_id)

    def left(self, door: Shared, run_id: str) -> None:
        """A run needs its door no more."""
        with self._lock:
            door.runs.discard(run_id)
            if door.runs:
                return
            self._idle.append(door)
            ended = [one for one in self._idle if not one.is_alive or one not in self._of.values()]
            ended += [one for one in self._idle if one not in ended][:-_IDLE]
            for one in ended:
                self._idle.remove(one)
                self._of = {uid: door for uid, door in self._of.items() if door is not one}
        for one in ended:
            _end(one)

    # After another worker

    def take_over(self, record: Record, durable: Durable) -> Place | None:
        """The place that a run has; in a dead door where it is not to be had any more."""
        doorway = durable.door
        if doorway is None:
            return None
        with self._lock:
            door = self._met.get(doorway.name)
            if door is None:
                self._met[doorway.name] = door = self._meet(doorway)
                self._begun(door)
                if door.is_alive and record.uid is not None:
                    self._of.setdefault(record.uid, door)
            door.runs.add(record.run_id)
        user = User(name=record.user, uid=record.uid or 0, gid=durable.gid, groups=durable.groups, home="/", shell="/bin/false")  # noqa: S604
        places = [(str(record.gateway), port) for port in doorway.ports]
        if isinstance(door, Met):
            door.know(record.run_id, places, None if doorway.broker is None else (doorway.broker, user))
        return Place(self, door, record.run_id, is_served=True)

    def _meet(self, doorway: Doorway) -> Met:
        pidfd = process.open_exactly(doorway.pid, doorway.start)
        try:
            return Met(self._directory / doorway.name, doorway.pid, pidfd)
        finally:
            if pidfd is not None:
                os.close(pidfd)

    def sweep(self) -> None:
        """Once all runs have been taken over: what no run of ours has is told to stop serving, so that such a door ends."""
        ours = {run_id for door in self._met.values() for run_id in door.runs}
        for door in self._met.values():
            with contextlib.suppress(CannotSeal):
                for run_id in set(door.serving()) - ours:
                    door.stop(run_id)
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._directory):
                if name not in self._met:
                    doors.stop_left(self._directory / name)

    # The end

    def close(self) -> None:
        """Those that serve nobody end; the others go on for the next worker."""
        with self._lock:
            for door in {*self._of.values(), *self._met.values(), *self._idle}:
                if door.runs and door.is_alive:
                    door.leave()
                else:
                    _end(door)
            self._of, self._met, self._idle = {}, {}, []


def _end(door: Shared) -> None:
    door.close()
    door.path.unlink(missing_ok=True)
