"""A caller's connection: calls and descriptors in, replies out, and an end for whoever does not behave."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from sealnet.model import varlink
from sealnet.model.calling import MOST_FDS
from sealnet.worker import connection as connections
from sealnet.worker.connection import Connection, Gone, peer_of
from tests.lab import wait_for

CALL = varlink.render_call("a.B", {"n": 1})


def story(told: Callable[[Connection, socket.socket], Awaitable[None]]) -> None:
    """Told with a connection and the caller's end of it."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            connection = Connection(ours, peer_of(ours))
            try:
                await told(connection, theirs)
            finally:
                connection.drop()

    asyncio.run(asyncio.wait_for(run(), 20))


def send(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


@pytest.fixture
def files() -> Iterator[list[int]]:
    """Descriptors that can be told from each other by size."""
    made = []
    for size in range(4):
        fd = os.memfd_create(f"{size}")
        os.ftruncate(fd, size)
        made.append(fd)
    yield made
    for fd in made:
        os.close(fd)


def sizes(fds: list[int]) -> list[int]:
    found = [os.fstat(fd).st_size for fd in fds]
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds:
        os.close(fd)
    return found


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_who_calls_is_what_the_kernel_says() -> None:
    async def told(connection: Connection, _theirs: socket.socket) -> None:
        assert (connection.peer.uid, connection.peer.gid, connection.peer.pid) == (os.getuid(), os.getgid(), os.getpid())

    story(told)


def test_calls_come_in_order_and_replies_go_back() -> None:
    async def told(connection: Connection, theirs: socket.socket) -> None:
        theirs.sendall(varlink.render_call("a.First", {}) + varlink.render_call("a.Second", {}))

        found = [(await connection.next())[0].method for _ in range(2)]
        await connection.send(varlink.render_reply({"x": 1}))

        assert found == ["a.First", "a.Second"]
        assert theirs.recv(1000) == b'{"parameters":{"x":1}}\0'

    story(told)


def test_descriptors_belong_to_the_call_that_they_came_with(files: list[int]) -> None:
    async def told(connection: Connection, theirs: socket.socket) -> None:
        theirs.sendall(CALL)
        send(theirs, CALL, files[1:3])
        theirs.sendall(CALL)
        send(theirs, CALL[:5], files[3:])
        theirs.sendall(CALL[5:] + CALL)

        found = [sizes((await connection.next())[1]) for _ in range(5)]

        assert found == [[], [1, 2], [], [3], []]

    story(told)


def test_what_nobody_takes_is_closed(files: list[int]) -> None:
    before = open_descriptors()

    async def told(connection: Connection, theirs: socket.socket) -> None:
        send(theirs, CALL, files)
        send(theirs, CALL[:5], files)
        await asyncio.sleep(0)
        while open_descriptors() < before + 2 * len(files):
            await asyncio.sleep(0.01)
        connection.drop()

    story(told)

    # What an earlier test has left to be closed has been, perhaps.
    wait_for(lambda: open_descriptors() <= before, what="they are closed")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n\0", "no JSON"),
        (b'{"method":"a.B","parameters":[]}\0', "parameters"),
        (b"x" * (varlink.MOST_BYTES + 1), "longer"),
        (b'{"method":"a.B"}\0' * 9, "no answer"),
    ],
)
def test_who_does_not_speak_the_protocol_is_dropped(data: bytes, words: str) -> None:
    async def told(connection: Connection, theirs: socket.socket) -> None:
        theirs.setblocking(False)
        sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(theirs, data))

        await connection.gone.wait()

        assert words in str(connection.fault)
        with pytest.raises(Gone):
            await connection.next()
        with pytest.raises(Gone):
            await connection.send(b"x")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    story(told)


@pytest.mark.parametrize("in_one", [True, False])
def test_who_passes_too_many_descriptors_is_dropped(files: list[int], in_one: bool) -> None:
    before = open_descriptors()

    async def told(connection: Connection, theirs: socket.socket) -> None:
        if in_one:
            send(theirs, CALL, files[:1] * (MOST_FDS + 1))
        else:
            for at in range(MOST_FDS + 1):
                send(theirs, CALL[at % 5 : at % 5 + 1], files[:1])

        await connection.gone.wait()

        assert connection.fault == "it passes too many descriptors"

    story(told)
    # What an earlier test has left to be closed has been, perhaps.
    wait_for(lambda: open_descriptors() <= before, what="they are closed")


def test_as_many_as_may_be_are_taken(files: list[int]) -> None:
    async def told(connection: Connection, theirs: socket.socket) -> None:
        send(theirs, CALL, files[1:2] * MOST_FDS)

        assert sizes((await connection.next())[1]) == [1] * MOST_FDS

    story(told)


def test_a_hang_up_is_seen_and_what_was_said_before_is_answered() -> None:
    async def told(connection: Connection, theirs: socket.socket) -> None:
        theirs.sendall(CALL)
        theirs.shutdown(socket.SHUT_WR)

        call, _fds = await connection.next()
        await connection.gone.wait()
        await connection.send(b"still")

        assert call.method == "a.B"
        assert theirs.recv(100) == b"still"
        with pytest.raises(Gone):
            await connection.next()

    story(told)


def test_who_reads_nothing_is_waited_for_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_UNREAD_S", 0.2)

    async def told(connection: Connection, theirs: socket.socket) -> None:
        async def talk() -> None:
            while True:
                await connection.send(b"x" * 100_000)

        with pytest.raises(Gone):
            await talk()

        assert connection.fault == "it reads nothing"

    story(told)


def test_who_reads_slowly_gets_all_of_it() -> None:
    async def told(connection: Connection, theirs: socket.socket) -> None:
        theirs.setblocking(False)
        loop, got = asyncio.get_running_loop(), 0
        sending = asyncio.ensure_future(connection.send(b"y" * 3_000_000))
        while got < 3_000_000:
            got += len(await loop.sock_recv(theirs, 10_000))
        await sending

        assert got == 3_000_000

    story(told)


def test_who_asks_for_nothing_is_dropped_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_IDLE_S", 0.1)

    async def told(connection: Connection, theirs: socket.socket) -> None:
        with pytest.raises(Gone):
            await connection.next()

        assert connection.fault == "it has asked for nothing"
        assert theirs.recv(10) == b""

    story(told)
