"""The door's side of its control socket: what to serve, what to stop, and sockets that only the privileged side may open.

SOCK_SEQPACKET: one JSON object a message, descriptors beside it. Its end is the door's, but for one that has been given a place to meet
whoever comes next (a listening socket that the privileged side has bound): that one goes on while it serves anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import struct
import sys
import traceback
from typing import Any

from sealnet.door.here import Here
from sealnet.door.log import Log
from sealnet.door.proxy import Proxy
from sealnet.door.ready import Loop, Ready
from sealnet.door.relay import Relay
from sealnet.door.served import Served
from sealnet.model.authority import Entry
from sealnet.model.destination import address

_MAX_MESSAGE = 4 * 1024 * 1024
_MAX_FDS = 2


class Refused(Exception):
    """A request of the privileged side that makes no sense here."""


def serve(fd: int, meeting: int | None) -> None:
    """Serve until the other end of the control socket is closed, and there is nobody to meet. Does not return."""
    ready = Ready(_tell_error)
    loop = Loop(ready)
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(_tell)
    loop.call_soon(lambda: Control(loop, ready, socket.socket(fileno=fd), None if meeting is None else socket.socket(fileno=meeting)))
    loop.run_forever()


def _tell(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Where a fault is, and never what an exception says: that could quote a request."""
    _tell_error(context.get("exception"))


def _tell_error(error: BaseException | None) -> None:
    where = traceback.format_tb(error.__traceback__) if error is not None else []
    print(f"sealnet door: {type(error).__name__}", *where, sep="\n", file=sys.stderr, flush=True)


class Control:
    def __init__(self, loop: asyncio.AbstractEventLoop, ready: Ready, sock: socket.socket, meeting: socket.socket | None = None) -> None:
        self._loop = loop
        # None while nobody has come after one that is gone.
        self._socket: socket.socket | None = None
        self._meeting = meeting
        # A run may have one of each kind.
        self._served: dict[str, dict[str, Served]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = ready
        self._here = Here()
        self._dials: dict[int, tuple[str, asyncio.Future[socket.socket]]] = {}
        self._numbers = itertools.count(1)
        if meeting is not None:
            meeting.setblocking(False)
            loop.add_reader(meeting.fileno(), self._meet)
        self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop.add_reader(sock.fileno(), self._readable, sock)
        self._send({"ready": True, "serves": sorted(self._served)})

    def _meet(self) -> None:
        """Whoever comes next, if nobody is there: root alone, whatever mode the socket's file has."""
        if self._meeting is None:
            return
        try:
            sock, _ = self._meeting.accept()
        except OSError:
            return
        # struct ucred: pid, uid, gid.
        uid = struct.unpack("=iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid != 0 or self._socket is not None:
            sock.close()
            return
        self._begin(sock)

    def _lose(self, sock: socket.socket) -> None:
        """Whoever told us what to do is gone. What the logs have is written; nothing here outlives its supervisor for nobody's sake."""
        if self._meeting is None or not self._served:
            os._exit(0)
        self._loop.remove_reader(sock.fileno())
        sock.close()
        self._socket = None
        dials, self._dials = self._dials, {}
        for _run, future in dials.values():
            if not future.done():
                future.set_exception(ConnectionRefusedError("nobody is there to dial"))

    def _readable(self, sock: socket.socket) -> None:
        try:
            data, fds, flags, _ = socket.recv_fds(sock, _MAX_MESSAGE, _MAX_FDS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, fds, flags = b"", [], 0
        if not data:
            self._lose(sock)
            return
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise Refused("the message is too long")
            self._obey(json.loads(data), fds)
        except (Refused, ValueError, KeyError, TypeError, AttributeError) as e:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)
            self._send(
                {"run": _run_of(data), "error": str(e) if isinstance(e, Refused) else f"cannot read the request: {type(e).__name__}"}
            )

    def _obey(self, message: dict[str, Any], fds: list[int]) -> None:
        match message["op"]:
            case "serve":
                self._serve(message, fds)
            case "stop":
                self._stop(message["run"])
            case "preflight":
                task = self._loop.create_task(self._preflight(message["run"], self._of(message["run"])))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "dialled":
                self._dialled(message, fds)
            case _:
                raise Refused("there is no such op")

    def _serve(self, message: dict[str, Any], fds: list[int]) -> None:
        run, kind, sandbox = message["run"], message["kind"], str(address(message["sandbox"]))
        if kind in self._served.get(run, {}):
            raise Refused("it is served already")
        if kind not in ("proxy", "relay") or len(fds) != (2 if kind == "proxy" else 1):
            raise Refused("the kind and the descriptors do not fit")
        if kind == "proxy":
            allow = [Entry(each["host"], int(each["port"]), bool(each["private"])) for each in message["allow"]]
            own = frozenset(address(text) for text in message["own"])
            log = Log(fds[1], run)
            served: Served = Proxy(self._loop, self._ready, self._here, run, sandbox, _listener(fds[0]), allow, own, log)
        elif "tcp" in message["target"]:
            host, port = message["target"]["tcp"]
            served = Relay(self._loop, self._ready, run, sandbox, _listener(fds[0]), (str(host), int(port)), self.dial)
        elif message["target"].get("unix") is True:
            served = Relay(self._loop, self._ready, run, sandbox, _listener(fds[0]), None, self.dial)
        else:
            raise Refused("there is no such target")
        self._served.setdefault(run, {})[kind] = served
        served.start()
        self._send({"run": run, "serving": True})

    def _stop(self, run: str) -> None:
        told: dict[str, object] = {"run": run}
        still = 0
        for served in self._of(run):
            told |= (counted := served.stop())
            still += int(str(counted["open"]))
        del self._served[run]
        self._send({**told, "open": still})

    def _of(self, run: str) -> list[Served]:
        if run not in self._served:
            raise Refused("it is not served")
        return list(self._served[run].values())

    async def _preflight(self, run: str, served: list[Served]) -> None:
        """Try what lies behind a run's doors, all at once; nothing of it is written down, for it is no request of the payload's."""
        try:
            failed = [each for one in await asyncio.gather(*(one.preflight() for one in served)) for each in one]
        except BaseException:
            self._send({"run": run, "error": "the door itself failed"})
            raise
        self._send({"run": run, "failed": [{"host": host, "reason": reason} for host, reason in failed]})

    def dial(self, run: str) -> asyncio.Future[socket.socket]:
        """A socket that the privileged side connects, as the caller of the run."""
        number = next(self._numbers)
        future: asyncio.Future[socket.socket] = self._loop.create_future()
        if self._socket is None:
            future.set_exception(ConnectionRefusedError("nobody is there to dial"))
            return future
        try:
            self._socket.send(json.dumps({"op": "dial", "id": number, "run": run}).encode())
        except BlockingIOError as e:
            # A payload that connects and resets, over and over, has more dials waiting than connections: that is no fault of the other end.
            future.set_exception(e)
            return future
        self._dials[number] = (run, future)
        return future

    def _dialled(self, message: dict[str, Any], fds: list[int]) -> None:
        _run, future = self._dials.pop(int(message["id"]))
        if len(fds) > 1 or bool(fds) == ("error" in message):
            raise Refused("a dial is answered by one socket or an error")
        sock = socket.socket(fileno=fds[0]) if fds else None
        if future.done():
            if sock is not None:
                sock.close()
        elif sock is not None:
            sock.setblocking(False)
            future.set_result(sock)
        else:
            future.set_exception(ConnectionRefusedError(str(message["error"])))

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is None:
            # What was asked by somebody who is gone.
            return
        try:
            self._socket.send(json.dumps(message).encode())
        except ConnectionError:
            # Its end is read in a moment.
            return
        except OSError:
            # Somebody who does not read cannot be answered; without its control socket a door has no say.
            os._exit(1)


def _listener(fd: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
    except OSError as e:
        raise Refused(f"the listener is none: {e.strerror}") from None
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        sock.detach()
        raise Refused("the listener does not listen")
    sock.setblocking(False)
    return sock


def _run_of(data: bytes) -> str | None:
    try:
        run = json.loads(data).get("run")
    except (ValueError, AttributeError):
        return None
    return run if isinstance(run, str) else None
