"""The loop's selector: who is called for what, and a number that is given again."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import pytest

from sealnet.door.ready import ENDED, FAILED, READ_WRITE, WRITABLE, Loop, Ready, reset

Pair = tuple[socket.socket, socket.socket]


class Told(list[Exception]):
    """What calls have raised."""


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def ready(told: Told) -> Iterator[Ready]:
    made = Ready(told.append)
    yield made
    made.close()


def connected() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setblocking(False)
    return one, other


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = connected()
    yield made
    for sock in made:
        sock.close()


def test_a_call_is_made_once_for_what_has_happened(ready: Ready, pair: Pair) -> None:
    heard: list[int] = []
    ready.watch(pair[0], heard.append)

    ready.select(0)
    assert heard == []
    pair[1].send(b"x")
    ready.select(1)
    # Nobody has read, and nothing has happened since.
    ready.select(0)
    assert len(heard) == 1

    pair[1].shutdown(socket.SHUT_WR)
    ready.select(1)
    assert heard[1] & ENDED
    ready.rearm(pair[0], READ_WRITE)
    ready.select(1)
    assert heard[2] & WRITABLE
    assert heard[2] & ENDED


def test_a_reset_is_heard_of_whatever_is_waited_for(ready: Ready, pair: Pair) -> None:
    """Also by who is watched while asyncio waits for the same socket."""
    heard: list[int] = []
    ready.watch(pair[0], heard.append)
    ready.register(pair[0].fileno(), 2, "writing")
    assert [key.data for key, _ in ready.select(1)] == ["writing"]
    assert heard == []

    reset(pair[1])
    ready.select(1)

    assert heard == [FAILED]


def test_each_hears_what_it_asked_for_of_one_socket(ready: Ready, pair: Pair) -> None:
    heard: list[int] = []
    ready.watch(pair[0], heard.append)
    pair[1].send(b"x")
    ready.register(pair[0], 1, "reading")

    # Level-triggered, and not the other's to hear.
    assert [[key.data for key, _ in ready.select(1)] for _ in range(2)] == [["reading"]] * 2
    assert heard == []
    ready.unregister(pair[0])
    ready.select(1)
    assert len(heard) == 1
    ready.forget(pair[0], is_closed=False)
    pair[1].send(b"y")
    assert ready.select(0) == []
    assert len(heard) == 1
    # It can be watched again.
    ready.watch(pair[0], heard.append)
    ready.select(1)
    assert len(heard) == 2


def test_what_was_told_of_a_socket_that_is_closed_by_then_is_nobody_elses(ready: Ready) -> None:
    """The number is given again before its turn has come in the same round."""
    pairs = [connected() for _ in range(2)]
    heard: list[tuple[str, int]] = []
    new: list[socket.socket] = []

    def replace_the_other(index: int) -> None:
        if new:
            return
        other = pairs[1 - index][0]
        number = other.fileno()
        ready.forget(other)
        other.close()
        mine, peer = connected()
        if mine.fileno() != number:
            os.dup2(mine.fileno(), number)
            mine.close()
            mine = socket.socket(fileno=number)
        new.extend((mine, peer))
        ready.watch(mine, lambda events: heard.append(("new", events)))

    for index in range(2):
        ready.watch(pairs[index][0], lambda _events, index=index: replace_the_other(index))
        pairs[index][1].send(b"x")

    ready.select(0)
    ready.select(0)
    assert len(new) == 2
    assert heard == []

    new[1].send(b"y")
    ready.select(1)
    assert len(heard) == 1
    for sock in (*new, *(each for two in pairs for each in two)):
        sock.close()


def test_a_fault_in_a_call_is_told_and_the_others_are_made(ready: Ready, pair: Pair, told: Told) -> None:
    heard: list[int] = []

    def fail(_events: int) -> None:
        raise ValueError("of no connection but this")

    ready.watch(pair[0], fail)
    ready.watch(pair[1], heard.append)
    for sock in pair:
        sock.send(b"x")

    ready.select(1)
    ready.select(0)

    assert [type(error) for error in told] == [ValueError]
    assert len(heard) == 1


def test_the_loop_has_its_turn_when_a_call_asks_for_it(told: Told, pair: Pair) -> None:
    ready = Ready(told.append)
    loop = Loop(ready)
    heard: list[str] = []

    def hear(_events: int) -> None:
        heard.append("called")
        loop.call_soon(lambda: (heard.append("its turn"), loop.stop()))

    ready.watch(pair[0], hear)
    pair[1].send(b"x")
    # Nothing else would end it before.
    loop.call_later(5, lambda: (heard.append("its time"), loop.stop()))
    loop.run_forever()

    assert heard == ["called", "its turn"]
    assert told == []
    loop.close()


def test_asyncio_sends_and_receives_over_it(told: Told, pair: Pair) -> None:
    loop = Loop(Ready(told.append))

    async def talk() -> bytes:
        block = bytes(1 << 20)
        sending = loop.create_task(loop.sock_sendall(pair[0], block))
        got = b""
        while len(got) < len(block):
            got += await asyncio.wait_for(loop.sock_recv(pair[1], 1 << 16), 10)
        await sending
        return got

    assert loop.run_until_complete(talk()) == bytes(1 << 20)
    loop.close()
