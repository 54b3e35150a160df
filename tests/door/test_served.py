"""A connection that is served without a task for as long as nothing is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from sealnet.door.ready import Loop, Ready
from sealnet.door.served import Connection, Served


class _Waiting(Connection):
    """Waits for what the test gives, and then for its client."""

    async def serve(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.client.recv(100)
        self.given: asyncio.Future[str] = self.loop.create_future()
        try:
            self.got = await self.given
        except asyncio.CancelledError:
            if not self.was_late():
                raise
            self.got = "late"
        return True


@pytest.fixture
def loop() -> Iterator[Loop]:
    faults: list[Exception] = []
    made = Loop(Ready(faults.append))
    yield made
    assert faults == []
    made.close()


@pytest.fixture
def asking(loop: Loop) -> Iterator[tuple[_Waiting, socket.socket]]:
    """A connection that waits for `given`, and its client."""
    ready = loop._selector  # type: ignore[attr-defined]
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    served = Served(loop, ready, "run-1", "127.0.0.1", listener, _Waiting)
    served.start()
    with socket.create_connection(listener.getsockname()) as client:
        client.settimeout(5)
        client.send(b"x")
        run(loop)
        (made,) = served._connections
        assert isinstance(made, _Waiting)
        run(loop)
        yield made, client
    served.stop()


def run(loop: Loop) -> None:
    """Two turns: what is there, and what comes of it."""
    loop.run_until_complete(asyncio.sleep(0.01))


def test_it_goes_on_when_what_it_waits_for_is_there_and_waits_again(loop: Loop, asking: tuple[_Waiting, socket.socket]) -> None:
    connection, client = asking
    first = connection.given
    first.set_result("one")
    run(loop)
    assert connection.got == "one"

    client.send(b"y")
    run(loop)
    assert connection.given is not first
    connection.given.set_result("two")
    run(loop)
    assert connection.got == "two"
    assert not connection.is_over


def test_what_takes_too_long_goes_on_as_late(loop: Loop, asking: tuple[_Waiting, socket.socket]) -> None:
    connection, _client = asking

    connection.interrupt()
    run(loop)

    assert connection.got == "late"
    assert not connection.is_over


def test_one_that_is_cut_while_it_is_late_is_over(loop: Loop, asking: tuple[_Waiting, socket.socket]) -> None:
    connection, client = asking

    connection.interrupt()
    connection.cut()
    run(loop)

    assert connection.is_over
    assert not hasattr(connection, "got")
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_one_that_is_cut_before_its_task_has_begun_is_closed(loop: Loop, asking: tuple[_Waiting, socket.socket]) -> None:
    connection, client = asking
    connection.given.set_result("one")
    run(loop)

    async def both() -> None:
        connection.go_on()
        connection.cut()

    loop.run_until_complete(both())
    run(loop)

    assert connection.is_over
    with pytest.raises(ConnectionResetError):
        client.recv(1)
