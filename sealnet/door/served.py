"""One run's listener: who may come in, how many at once, and how long each may take."""

from __future__ import annotations

import asyncio
import socket
import types
from collections.abc import Coroutine, Generator
from time import monotonic
from typing import Any

from sealnet.door.pump import Tunnel
from sealnet.door.ready import ENDED, FAILED, LISTEN, Ready, reset

MAX_CONNECTIONS = 256
_SWEEP_S = 0.25
# A connection whose peer has had this long and still asks for nothing makes room for one that may.
_PATIENCE_S = 0.1
_MAX_LINGERING = 64
_LINGER_S = 1.0


class Connection:
    """One connection of the payload's, while it asks and while it is served."""

    def __init__(self, served: Served, client: socket.socket) -> None:
        self.served = served
        self.loop = served.loop
        self.client = client
        # Of monotonic(). None: somebody else sees to it.
        self.deadline: float | None = None
        self.is_reset = False
        self.is_over = False
        # The client's end is right behind what there is to read.
        self.has_end = False
        # Serves it from then on, instead of the task.
        self.tunnel: Tunnel | None = None
        # Something is waited for: what is told of the client meanwhile is missed.
        self._task: asyncio.Task[None] | None = None
        self._is_late = False
        self._is_begun = False

    async def serve(self) -> bool:
        """Whether it waits for what the client will say next, which calls this again."""
        raise NotImplementedError

    def ready(self, events: int) -> None:
        """Something has happened to the client's socket."""
        if events & FAILED:
            self.cut()
            return
        if events & ENDED:
            self.has_end = True
        if self._task is None:
            self.go_on()

    def accepted(self) -> None:
        """It is there, and has said nothing yet."""

    def go_on(self) -> None:
        """Serve, at once: most of it is done without waiting. When something has to be waited for, a task is made of the rest."""
        served = self._whole()
        try:
            waited_for = served.send(None)
        except StopIteration:
            return
        self._task = self.loop.create_task(_rest(served, waited_for))
        # One that is cancelled before its first step has not come to the coroutine.
        self._task.add_done_callback(lambda _task: served.close())

    def due(self) -> float | None:
        """When it will have expired."""
        return self.tunnel.idle_until() if self.tunnel is not None else self.deadline

    def expired(self) -> None:
        """Its deadline has passed."""
        self.cut()

    def interrupt(self) -> None:
        """What is waited for takes too long: there it goes on with TimeoutError."""
        self.deadline = None
        if self._task is not None:
            self._is_late = True
            self._task.cancel()

    def was_late(self) -> bool:
        """Whether it was interrupt() that has cancelled the task."""
        is_late, self._is_late = self._is_late, False
        return is_late and not self.is_over

    def cut(self, *, is_reset: bool = True) -> None:
        """End it now, by RST unless there is nothing that could be taken for whole. Its slot is free at once."""
        if self.is_over:
            return
        self.is_reset = is_reset
        self.served.release(self)
        if self.tunnel is not None:
            self.tunnel.cut()
        elif self._task is not None:
            self._is_late = False
            self._task.cancel()
            if not self._is_begun:
                # A task that is cancelled before its first step comes to none of the coroutine, and so to no `finally`.
                self.close()
        else:
            self.close()

    async def _whole(self) -> None:
        self._is_begun = True
        waits = False
        try:
            waits = await self.serve()
        except asyncio.CancelledError:
            pass  # cut() has said how.
        except ConnectionError:
            self.is_reset = True
        except BaseException:
            self.is_reset = True
            raise
        finally:
            self._task = None
            if self.tunnel is None and not waits:
                self.close()

    def connect(self, server: socket.socket) -> Tunnel:
        """A tunnel between the client and a server, to be started. It closes both."""
        self.tunnel = Tunnel(self.loop, self.served.ready, self.client, server, self._tunnel_ended)
        return self.tunnel

    def _tunnel_ended(self) -> None:
        self.is_over = True
        self.served.release(self)
        self.ended()

    def ended(self) -> None:
        """The tunnel is closed."""

    def see_off(self, answer: bytes) -> None:
        """The client is the listener's from now on, to be answered and closed, and the slot is free."""
        self.is_over = True
        self.served.release(self)
        self.served.ready.forget(self.client, is_closed=False)
        self.served.see_off(self.client, answer)

    def close(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self.served.release(self)
        self.served.ready.forget(self.client)
        if self.served.ready.is_waited_for(self.client):
            self.loop.remove_reader(self.client)
            self.loop.remove_writer(self.client)
        if self.is_reset:
            reset(self.client)
        else:
            self.client.close()


@types.coroutine
def _steps(served: Coroutine[Any, Any, None], waited_for: Any) -> Generator[Any, Any, None]:
    """The rest of a coroutine that has begun without a task, and waits for this future."""
    try:
        while True:
            try:
                value = yield waited_for
            except BaseException as error:  # noqa: BLE001 - whatever it is, it is the coroutine's
                waited_for = served.throw(error)
            else:
                waited_for = served.send(value)
    except StopIteration:
        return


async def _rest(served: Coroutine[Any, Any, None], waited_for: Any) -> None:
    await _steps(served, waited_for)


class Served:
    """`strangers` is how many came from anywhere but the run's sandbox, and were closed without a word."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, ready: Ready, run_id: str, sandbox: str, listener: socket.socket, connection: type[Any]
    ) -> None:
        self.loop = loop
        self.ready = ready
        self.run_id = run_id
        self.strangers = 0
        self._sandbox = sandbox
        self._listener = listener
        self._connection = connection
        self._connections: dict[Connection, None] = {}
        # Those that have not asked for anything yet, the oldest first, and since when.
        self._waiting: dict[Connection, float] = {}
        self._lingering: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None

    def start(self) -> None:
        # Inherited by what it accepts.
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ready.watch(self._listener, self._accept, LISTEN)
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)

    async def preflight(self) -> list[tuple[str, str]]:
        """What lies behind and does not answer: (what, why)."""
        raise NotImplementedError

    def stop(self) -> dict[str, Any]:
        """Close everything; what there is to say of it."""
        # Whoever made it may have a descriptor of it.
        self.ready.forget(self._listener, is_closed=False)
        self._listener.close()
        if self._sweeper:
            self._sweeper.cancel()
        connections = list(self._connections)
        for connection in connections:
            connection.cut()
        for task in self._lingering:
            task.cancel()
        return {"records": 0, "denied": 0, "open": len(connections), "failed": None, "strangers": self.strangers}

    def _accept(self, _events: int) -> None:
        """One: of others that wait the listener tells again, and those that are here already have their turn in between."""
        try:
            # accept() without what makes names of its numbers.
            fd, peer = self._listener._accept()  # type: ignore[attr-defined]
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # Out of descriptors or memory. The listener stays readable, so it is left alone for a moment.
            self.ready.forget(self._listener, is_closed=False)
            self.loop.call_later(0.1, self._resume)
            return
        client = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
        if peer[0] != self._sandbox:
            self.strangers += 1
            reset(client)
            return
        client.setblocking(False)
        if len(self._connections) >= MAX_CONNECTIONS and not self._make_room():
            self.turn_away(client)
            return
        connection: Connection = self._connection(self, client)
        self._connections[connection] = None
        self.ready.watch(client, connection.ready)
        connection.accepted()

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self.ready.watch(self._listener, self._accept, LISTEN)

    def _make_room(self) -> bool:
        for connection, since in self._waiting.items():
            if monotonic() - since < _PATIENCE_S:
                return False
            self.crowded_out(connection)
            connection.cut()
            return True
        return False

    def crowded_out(self, connection: Connection) -> None:
        """It will be cut, to make room for another."""

    def turn_away(self, client: socket.socket) -> None:
        """There is no room for it."""
        reset(client)

    def waits(self, connection: Connection) -> None:
        """It asks for nothing just now."""
        self._waiting.pop(connection, None)
        self._waiting[connection] = monotonic()

    def asks(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def release(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self._waiting.pop(connection, None)

    def _sweep(self) -> None:
        now = monotonic()
        for connection in list(self._connections):
            due = connection.due()
            if due is not None and due < now:
                connection.expired()
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)

    def see_off(self, client: socket.socket, answer: bytes) -> None:
        """Answer and close, so that the answer arrives: data that nobody read would make the kernel reset the connection at once."""
        try:
            client.send(answer)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            reset(client)
            return
        if len(self._lingering) >= _MAX_LINGERING:
            client.close()
            return
        task = self.loop.create_task(self._drain(client))
        self._lingering.add(task)
        task.add_done_callback(self._lingering.discard)

    async def _drain(self, client: socket.socket) -> None:
        try:
            async with asyncio.timeout(_LINGER_S):
                while await self.loop.sock_recv(client, 65536):
                    pass
        except (OSError, asyncio.CancelledError):
            # Whatever it is, nobody waits for an answer any more. TimeoutError is an OSError.
            pass
        finally:
            self.loop.remove_reader(client.fileno())
            client.close()
