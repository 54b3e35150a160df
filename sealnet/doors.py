"""The privileged side of the doors: starts the unprivileged process, hands it sockets and policy, dials for it where the caller may.

It parses nothing that came over the network: what the door says is JSON over a socketpair, small, and believed only as far as it is
counted. The door is sealnet.door, which knows nothing of this side.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sealnet.errors import CannotSeal, UsageError
from sealnet.kernel import libc, links, owncode, process
from sealnet.kernel.netlink import Netlink
from sealnet.model import config
from sealnet.model.authority import shown
from sealnet.model.plan import Plan, User

LOG = "egress.jsonl"
# The kernel's for whom it cannot name (/proc/sys/kernel/overflowuid), and `nobody`'s: of many daemons, and of files on other machines.
_OVERFLOW_UID = 65534
_NO_LOGIN = ("nologin", "false")
# Its first answer is late by its start.
_ANSWER_S = 10.0
# Its connections are to be dead within 2 s of the run's end, and one that is halted or hangs ends them only by its own death.
_STOP_S, _END_S = 1.0, 0.5
# Longer than a door dials (10 s).
_PREFLIGHT_S = 15.0
# Others of the run wait meanwhile.
_UNIX_DIAL_S = 2
_MESSAGE = 1 << 20
_BACKLOG = 256
_LINE, _MOST_LINES = 256, 100
_IP_FREEBIND = 15


_Answers = queue.SimpleQueue[dict[str, Any] | None]


class Listening(NamedTuple):
    """A socket that listens for one run, before anybody can reach it."""

    kind: str
    socket: socket.socket
    port: int


def account(named: str, payload: User) -> User:
    """Whom doors run as: what one could be talked into ends where this user's rights end. Raises UsageError for one that has any."""
    found = process.user(named)
    fault = None
    if found.uid == 0 or found.gid == 0:
        fault = "it is root, or of its group"
    elif found.uid == payload.uid:
        fault = "it is the user of the run's payload"
    elif found.uid == _OVERFLOW_UID:
        fault = "that uid stands for users without a name of their own, and is others' too"
    elif process.has_account(found.uid) and os.path.basename(found.shell) not in _NO_LOGIN:
        fault = f"somebody may log in as {found.name} (its shell is {found.shell})"
    if fault is not None:
        raise UsageError(f"cannot use door_user {named}: {fault}", hint=f"door_user in {config.PATH}: a uid or account of its own")
    return found


def listen(kind: str, gateway: str, ports: Sequence[int]) -> Listening:
    """On the first free port of a gateway that no link has yet (IP_FREEBIND, ip(7)): each run has its own gateway. Raises CannotSeal."""
    for port in ports:
        try:
            return _listen(kind, gateway, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise CannotSeal(f"cannot listen at {gateway}:{port} for a door: {error.strerror}") from error
    raise CannotSeal(
        f"cannot listen at {gateway} for a door: others listen at each port of {min(ports)}-{max(ports)}",
        hint=f"who they are: ss -ltnp; or other ports, door_ports in {config.PATH}",
    )


def _listen(kind: str, gateway: str, port: int) -> Listening:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_IP, _IP_FREEBIND, 1)
        # Its connections inherit it, so that the port can be kept when they outlive their door. A socket that listens is not shared by it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((gateway, port))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return Listening(kind, sock, int(sock.getsockname()[1]))


class Doorkeeper(Protocol):
    """A run's door: a process of its own, or a place in one that others share."""

    @property
    def pidfd(self) -> int: ...
    @property
    def is_alive(self) -> bool: ...
    def doorway(self, listening: Sequence[Listening], plan: Plan) -> dict[str, Any] | None: ...
    def serve(self, run_id: str, listening: Listening, plan: Plan, sandbox: str, log: int | None) -> None: ...
    def preflight(self, run_id: str, plan: Plan) -> tuple[list[str], list[str]]: ...
    def keep(self, run_id: str) -> list[int]: ...
    def stop(self, run_id: str) -> dict[str, Any] | None: ...
    def close(self) -> None: ...


class Door:
    """One door process, for one run or for many. `close` ends it, and so does the death of this process.

    With a `meeting` place (a socket that listens) it goes on after that while it serves anybody: there it can be met again.
    """

    stops_within_s = _STOP_S

    def __init__(self, user: User, *, meeting: socket.socket | None = None) -> None:
        """Raises CannotSeal when it does not come up."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)
        with theirs:
            fds = (theirs.fileno(), *(() if meeting is None else (meeting.fileno(),)))
            try:
                self.process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    [*owncode.program("sealnet.door"), *map(str, (user.uid, user.gid, *fds))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    # Not the caller's: a terminal can be read by whoever may write to it.
                    stderr=subprocess.PIPE,
                    pass_fds=fds,
                    cwd="/",
                    env={"PATH": ":".join(process.TOOL_PATH), "LANG": "C.UTF-8"},
                    start_new_session=True,
                )
            except OSError as error:
                control.close()
                raise CannotSeal(f"cannot start the door: {error.strerror}") from error
        self._begin(control, self.process.pid, os.pidfd_open(self.process.pid))

    def _begin(self, control: socket.socket, pid: int, pidfd: int) -> None:
        self._control, self.pid, self.pidfd = control, pid, pidfd
        control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE)
        self._waits(_ANSWER_S)
        # Who waits for an answer, by run.
        self._lock = threading.Lock()
        self._asked: dict[str, _Answers] = {}
        self._is_over, self._has_begun = False, threading.Event()
        self._first: dict[str, Any] | None = None
        self._targets: dict[str, tuple[str, User]] = {}
        # Where it listens for each run, and what stands there instead when it is dead.
        self._places: dict[str, list[tuple[str, int]]] = {}
        self._kept: dict[str, list[socket.socket]] = {}
        self._threads = [threading.Thread(target=target, name="sealnet-door", daemon=True) for target in (self._listen, self._pass_on)]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        return self.pidfd >= 0 and not _ends_within(self.pidfd, 0)

    def doorway(self, listening: Sequence[Listening], plan: Plan) -> dict[str, Any] | None:
        """What is to stand in a run's record, so that it can be met again; None: it cannot."""
        return None

    def serve(self, run_id: str, listening: Listening, plan: Plan, sandbox: str, log: int | None) -> None:
        """Hand over a listener; this side's copy is closed, so that a dead door's connections are refused. Raises CannotSeal."""
        told: dict[str, Any] = {"op": "serve", "run": run_id, "kind": listening.kind, "sandbox": sandbox}
        fds, place = [listening.socket.fileno()], listening.socket.getsockname()
        if listening.kind == "proxy":
            told["allow"] = [{"host": entry.host, "port": entry.port, "private": entry.private} for entry in plan.allow]
            told["own"] = own_addresses()
            fds += [log] if log is not None else []
        elif plan.broker is not None and plan.broker.path is not None:
            told["target"] = {"unix": True}
            self._targets[run_id] = (plan.broker.path, plan.user)
        elif plan.broker is not None:
            told["target"] = {"tcp": [plan.broker.host, plan.broker.port]}
        try:
            answer = self._ask(told, fds)
        finally:
            listening.socket.close()
        if "error" in answer:
            raise CannotSeal(f"cannot serve run {run_id} by a door: {answer['error']}")
        self._places.setdefault(run_id, []).append(place)

    def preflight(self, run_id: str, plan: Plan) -> tuple[list[str], list[str]]:
        """What lies behind a run's doors and does not answer, in words, and the options that would open what is refused for its address.

        Nothing of it is a decision of the payload's.
        """
        answer = self._ask({"op": "preflight", "run": run_id}, [], within_s=_PREFLIGHT_S)
        if "error" in answer:
            raise CannotSeal(f"cannot try the doors of run {run_id}: {answer['error']}")
        # The door does not know where that is.
        path, _user = self._targets.get(run_id, ("", None))
        try:
            told = [shown(f"{failed['host']}: {failed['reason']}") for failed in answer["failed"]]
        except (KeyError, TypeError) as error:
            raise CannotSeal(f"cannot try the doors of run {run_id}: what their process says makes no sense") from error
        # An option that is advised is one of a host that the caller has named, whatever else the door says.
        options = [f"--allow-private {entry.host}:{entry.port}" for entry in plan.allow]
        advised = [option for option in options if any(f"which {option} would allow" in text for text in told)]
        return [text.replace("its Unix socket", f"unix:{path}") for text in told], advised

    def stop(self, run_id: str) -> dict[str, Any] | None:
        """The door's own count of what it has recorded of a run; None when it is dead, and so it is when it does not answer at once."""
        self._targets.pop(run_id, None)
        self._places.pop(run_id, None)
        for sock in self._kept.pop(run_id, []):
            sock.close()
        try:
            self._waits(self.stops_within_s)
            return self._ask({"op": "stop", "run": run_id}, [], within_s=self.stops_within_s)
        except (CannotSeal, OSError):
            self._kill()
            return None

    def keep(self, run_id: str) -> list[int]:
        """Keep the ports of a dead door from everybody else: a socket that is bound and does not listen refuses.

        Returns those that somebody else has got by now.
        """
        lost = []
        for place in self._places.pop(run_id, []):
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                # To have listened, and not to share any more, is what makes it the only one: a bound socket shares with its like.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(place)
                sock.listen(0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
                sock.shutdown(socket.SHUT_RDWR)
                self._kept.setdefault(run_id, []).append(sock)
            except OSError:
                sock.close()
                lost.append(place[1])
        return lost

    def close(self) -> None:
        """End it; once is enough."""
        if self.pidfd < 0:
            return
        self._hang_up()
        if not _ends_within(self.pidfd, _END_S):
            self._kill()
            _ends_within(self.pidfd, None)
        self._let_go()

    def leave(self) -> None:
        """Let it go on for whoever meets it next."""
        if self.pidfd >= 0:
            self._hang_up()
            self._let_go()

    def _hang_up(self) -> None:
        # Not close(2): the thread reads from it.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def _let_go(self) -> None:
        if self.process is not None and not self.is_alive:
            self.process.wait()
        # One may be held up where a Unix broker's path leads to: a file system of somebody else's.
        self._threads[0].join(_END_S)
        if not self.is_alive:
            self._threads[1].join(_END_S)
        for sock in (sock for kept in self._kept.values() for sock in kept):
            sock.close()
        self._control.close()
        os.close(self.pidfd)
        self.pidfd = -1

    def _kill(self) -> None:
        if self.pidfd >= 0:
            kill(self.pidfd)

    # What is said

    def _waits(self, at_most_s: float) -> None:
        """Nobody waits for good for a door that does not read (struct timeval)."""
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(at_most_s), 0))

    def _ask(self, message: dict[str, Any], fds: Sequence[int], *, within_s: float = _ANSWER_S) -> dict[str, Any]:
        """One answer; of each run one question at a time. A door that does not answer in time is ended."""
        self.serving(within_s)
        answers: _Answers = queue.SimpleQueue()
        with self._lock:
            if self._is_over:
                answers.put(None)
            self._asked[message["run"]] = answers
        try:
            self._send(message, fds)
        except OSError as error:
            raise CannotSeal(f"cannot speak to the door: {error.strerror}") from error
        return self._answer(answers, within_s)

    def serving(self, within_s: float = _ANSWER_S) -> list[str]:
        """Once it is ready: the runs that it has served then."""
        if not self._has_begun.wait(within_s):
            self._kill()
            raise _silent(within_s)
        if self._first is None:
            raise _ended()
        return [str(run_id) for run_id in self._first.get("serves", ())]

    def _send(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._control.sendmsg([json.dumps(message).encode()], ancillary)

    def _answer(self, answers: _Answers, within_s: float) -> dict[str, Any]:
        try:
            answer = answers.get(timeout=within_s)
        except queue.Empty:
            self._kill()
            raise _silent(within_s) from None
        if answer is None:
            raise _ended()
        return answer

    def _listen(self) -> None:
        """What makes no sense, or is said without being asked, comes from a door that somebody else has taken over: it is ended at once."""
        try:
            while message := self._control.recv(_MESSAGE):
                told = json.loads(message)
                if not isinstance(told, dict):
                    break
                if told.get("op") == "dial":
                    self._dial(told)
                    continue
                if told.get("ready") is True and self._first is None:
                    self._first = told
                    self._has_begun.set()
                    continue
                with self._lock:
                    asked = self._asked.pop(str(told.get("run")), None)
                if asked is None:
                    break
                asked.put(told)
            else:
                return
        except (OSError, ValueError, RecursionError):
            pass
        finally:
            with self._lock:
                self._is_over = True
                for waiting in self._asked.values():
                    waiting.put(None)
            self._has_begun.set()
        self._kill()

    def _pass_on(self) -> None:
        """What the door writes to its standard error, as so many lines of printable ASCII; told at its end, for nothing of ours is printed
        while a payload lives."""
        if self.process is None or self.process.stderr is None:
            return
        said: list[str] = []
        with self.process.stderr as stream:
            for line in iter(partial(stream.readline, _LINE), b""):
                if len(said) < _MOST_LINES:
                    said.append(f"{shown(line.decode('latin-1').rstrip())}\n")
        with contextlib.suppress(OSError):
            os.write(2, "".join(said).encode("ascii"))

    def _dial(self, told: dict[str, Any]) -> None:
        """Connect to a run's Unix socket with the rights of the run's user, and hand that over: the door has no right to any."""
        path, user = self._targets.get(str(told.get("run")), ("", None))
        answer: dict[str, Any] = {"op": "dialled", "id": told.get("id")}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            try:
                if user is None:
                    raise FileNotFoundError(2, "no such run")
                # Of connect(2), which waits where a broker has more callers than it has taken yet.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _UNIX_DIAL_S, 0))
                before = os.getgroups()
                try:
                    libc.set_effective_identity(user.uid, user.gid, user.groups)
                    sock.connect(path)
                finally:
                    libc.set_effective_identity(0, 0, before)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bytes(16))
            except OSError as error:
                self._send({**answer, "error": error.strerror or str(error)}, [])
                return
            self._send(answer, [sock.fileno()])


# One that outlives its supervisor


@contextlib.contextmanager
def meeting(path: Path) -> Iterator[socket.socket]:
    """A socket where a door can be met, by root alone; for the door to have. Raises CannotSeal."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen(4)
        except OSError as error:
            raise CannotSeal(f"cannot make a place to meet a door: {error.strerror} ({path})") from error
        yield sock


def meet(path: Path) -> socket.socket | None:
    """A control socket of the door that is met there; None when there is none any more."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        return None
    return sock


def is_answered(control: socket.socket) -> bool:
    """Whether the door takes us for its supervisor: one that has another hangs up."""
    told = select.poll()
    told.register(control, select.POLLIN)
    try:
        return bool(told.poll(int(_ANSWER_S * 1000))) and bool(control.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def stop_left(path: Path, run_id: str | None = None) -> None:
    """Have a door that was left serve a run no more, or nobody: it ends then. One that has a supervisor is left alone."""
    control = meet(path)
    if control is None:
        path.unlink(missing_ok=True)
        return
    with control, contextlib.suppress(OSError, ValueError, AttributeError):
        control.settimeout(_STOP_S)
        first = control.recv(_MESSAGE)
        if not first:
            return
        served = [str(one) for one in json.loads(first).get("serves", ())]
        for one in served:
            if run_id in (None, one):
                control.send(json.dumps({"op": "stop", "run": one}).encode())
                control.recv(_MESSAGE)
        if not set(served) - {run_id}:
            path.unlink(missing_ok=True)


def kill(pidfd: int) -> None:
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _silent(within_s: float) -> CannotSeal:
    return CannotSeal(f"cannot use the door: it has said nothing for {within_s:g} s")


def _ended() -> CannotSeal:
    return CannotSeal("cannot use the door: its process has ended", hint="what it said stands above")


def _ends_within(pidfd: int, seconds: float | None) -> bool:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return bool(ended.poll(None if seconds is None else int(seconds * 1000)))


def own_addresses() -> list[str]:
    """Every address of this host, which no name may lead to."""
    with Netlink() as nl:
        found = [address for link in links.see_all(nl) for address in links.see_addresses(nl, link.ifindex)]
    return sorted({address.partition("/")[0] for address in found})


def open_log(directory: int) -> int:
    """A file in the run's directory for the decisions of its door."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(LOG, flags, 0o600, dir_fd=directory)
