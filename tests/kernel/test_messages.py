"""Messages with descriptors between two processes: whole, or an error, and no descriptor is lost on the way."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from sealnet.kernel import messages
from tests.crash import descriptors


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        yield one, other


@pytest.mark.parametrize("size", [0, 1, 4096, 5 << 20])
@pytest.mark.parametrize("count", [0, 1, messages.MOST_FDS])
def test_what_is_sent_comes_whole_one_after_the_other(ends: tuple[socket.socket, socket.socket], size: int, count: int) -> None:
    one, other = ends
    known = [os.fstat(fd).st_ino for fd in range(3)]
    data = os.urandom(size)

    def send() -> None:
        for number in range(2):
            messages.send(one, data + bytes([number]), [fd % 3 for fd in range(count)])

    sender = threading.Thread(target=send)
    sender.start()
    for number in range(2):
        found, fds = messages.receive(other)
        assert found == data + bytes([number])
        assert [os.fstat(fd).st_ino for fd in fds] == [known[fd % 3] for fd in range(count)]
        assert not any(os.get_inheritable(fd) for fd in fds)
        for fd in fds:
            os.close(fd)
    sender.join()


def test_an_end_is_told_wherever_it_comes(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    messages.send(one, b"text", [0])
    whole = other.recv(4096)
    before = descriptors()

    for cut in range(len(whole)):
        first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with second:
            with first:
                # With a descriptor, as soon as there is a byte that it can go with.
                if cut:
                    socket.send_fds(first, [whole[:cut]], [0])
            with pytest.raises(EOFError):
                messages.receive(second)
    assert descriptors() == before
    other.close()
    with pytest.raises(OSError, match="Broken pipe"):
        messages.send(one, b"text")


def test_descriptors_that_cannot_be_had_are_an_error_and_none_stays(ends: tuple[socket.socket, socket.socket]) -> None:
    one, other = ends
    messages.send(one, b"text", [0, 0, 0, 0])
    messages.send(one, b"more", [0])
    before, limits = descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.split()[0]) for entry in before)
    try:
        with contextlib.ExitStack() as taken:
            # Room for two.
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, limits[1]))
            room = []
            with contextlib.suppress(OSError):
                while True:
                    room.append(os.open("/dev/null", os.O_RDONLY))
            for fd in room[2:]:
                taken.callback(os.close, fd)
            for fd in room[:2]:
                os.close(fd)
            with pytest.raises(OSError) as failed:
                messages.receive(other)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert failed.value.errno == errno.EMFILE
    assert descriptors() == before
