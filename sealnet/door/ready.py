"""What the door waits for: one epoll(7), in which asyncio's waiting and the door's own stand side by side.

asyncio makes an object of every wake-up, and changes what it waits for before and after each. A tunnel's sockets are registered once and
edge-triggered, their calls are made right here, and the loop hears nothing of them. EPOLLERR comes without being asked for, so a reset is
heard of whatever is waited for just then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import selectors
import socket
import struct
from collections.abc import Callable, Mapping
from contextvars import Context
from time import monotonic
from typing import Any, TypeVarTuple

READ = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
READ_WRITE = READ | select.EPOLLOUT
# Of a listener: told again and again until all have been accepted.
LISTEN = select.EPOLLIN
WRITABLE, FAILED = select.EPOLLOUT, select.EPOLLERR
ENDED = select.EPOLLRDHUP | select.EPOLLHUP
_AT_ONCE = struct.pack("ii", 1, 0)

Call = Callable[[int], None]
_Ts = TypeVarTuple("_Ts")


def reset(sock: socket.socket) -> None:
    """Close with RST: the peer must not take what it has got so far for all."""
    # There is nothing to tell a peer that is gone.
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    sock.close()


class Ready(selectors.BaseSelector):
    """The selector of the loop. A socket may be watched here and waited for by asyncio at the same time: each hears what it asked for."""

    def __init__(self, tell: Callable[[Exception], None]) -> None:
        """`tell` is given what a call raises: a fault in one of them is not the loop's end."""
        self.is_loop_wanted = False
        self._tell = tell
        self._epoll = select.epoll()
        self._calls: dict[int, Call] = {}
        self._asked: dict[int, int] = {}
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._shared: set[int] = set()
        self._gone: set[int] = set()

    # The door's own

    def watch(self, sock: socket.socket, call: Call, events: int = READ, *, is_shared: bool = False) -> None:
        """Call with what has happened; edge-triggered, so the call takes all there is. Until it is forgotten.

        `is_shared`: another process may have a descriptor of it.
        """
        fd = sock.fileno()
        self._calls[fd] = call
        self._asked[fd] = events
        if is_shared:
            self._shared.add(fd)
        self._epoll.register(fd, events)

    def hand_over(self, sock: socket.socket, call: Call) -> None:
        """Somebody else is called from now on."""
        self._calls[sock.fileno()] = call

    def rearm(self, sock: socket.socket, events: int) -> None:
        """Ask for these from now on; what is there already is told once more."""
        fd = sock.fileno()
        self._asked[fd] = events
        self._epoll.modify(fd, self._wanted(fd))

    def forget(self, sock: socket.socket, *, is_closed: bool = True) -> None:
        """Right before it is closed; or before somebody else gets it."""
        fd = sock.fileno()
        if self._calls.pop(fd, None) is None:
            return
        del self._asked[fd]
        # What has been told of it in this round and is not passed on yet is of no other socket that gets its number.
        self._gone.add(fd)
        # With the last descriptor of a socket its registration goes, too.
        if fd in self._keys:
            self._epoll.modify(fd, self._wanted(fd))
        elif not is_closed or fd in self._shared:
            self._epoll.unregister(fd)
        self._shared.discard(fd)

    def is_waited_for(self, sock: socket.socket) -> bool:
        """By asyncio."""
        return sock.fileno() in self._keys

    def _wanted(self, fd: int) -> int:
        # asyncio's are level-triggered.
        key = self._keys.get(fd)
        if key is None:
            return self._asked[fd]
        return (select.EPOLLIN if key.events & selectors.EVENT_READ else 0) | (select.EPOLLOUT if key.events & selectors.EVENT_WRITE else 0)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait and make the door's own calls, until there is something for asyncio."""
        until = None if timeout is None else monotonic() + timeout
        self.is_loop_wanted = False
        while True:
            wait_s = -1.0 if until is None else max(0.0, math.ceil((until - monotonic()) * 1e3) * 1e-3)
            found = self._once(wait_s)
            if found or self.is_loop_wanted or (until is not None and monotonic() >= until):
                return found

    def _once(self, wait_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        found = []
        self._gone.clear()
        for fd, events in self._epoll.poll(wait_s, 256):
            if fd in self._gone:
                continue
            call = self._calls.get(fd)
            key = self._keys.get(fd)
            if call is not None and (key is None or events & FAILED):
                try:
                    call(events if key is None else FAILED)
                except Exception as error:  # noqa: BLE001 - a bug in one connection is told, and the others go on
                    self._tell(error)
            if key is None:
                continue
            told = (selectors.EVENT_READ if events & ~select.EPOLLOUT else 0) | (selectors.EVENT_WRITE if events & ~select.EPOLLIN else 0)
            if told := told & key.events:
                found.append((key, told))
        return found

    # What asyncio asks for

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else int(fileobj.fileno())
        if fd in self._keys:
            raise KeyError(fd)
        key = self._keys[fd] = selectors.SelectorKey(fileobj, fd, events, data)
        (self._epoll.modify if fd in self._calls else self._epoll.register)(fd, self._wanted(fd))
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self.get_key(fileobj)
        changed = self._keys[key.fd] = selectors.SelectorKey(fileobj, key.fd, events, data)
        if events != key.events:
            self._epoll.modify(key.fd, self._wanted(key.fd))
        return changed

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = self.get_key(fileobj)
        del self._keys[key.fd]
        if key.fd in self._calls:
            self._epoll.modify(key.fd, self._wanted(key.fd))
        else:
            # It may be closed by now, which has unregistered it.
            with contextlib.suppress(OSError):
                self._epoll.unregister(key.fd)
        return key

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys[fileobj if isinstance(fileobj, int) else fileobj.fileno()]

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys

    def close(self) -> None:
        self._epoll.close()


class Loop(asyncio.SelectorEventLoop):
    """Has its turn when it has something to do, and not after each of the door's own calls."""

    def __init__(self, ready: Ready) -> None:
        self._sockets = ready
        super().__init__(ready)

    def call_soon(self, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None) -> asyncio.Handle:
        self._sockets.is_loop_wanted = True
        return super().call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: Context | None = None) -> asyncio.TimerHandle:
        self._sockets.is_loop_wanted = True
        return super().call_at(when, callback, *args, context=context)
