"""A thread to have functions run in, for what the kernel knows of each thread by itself: namespaces, identity, whom it traces."""

from __future__ import annotations

import errno
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A result that there will be."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._result: tuple[Any, BaseException | None] | None = None

    @property
    def is_done(self) -> bool:
        return self._result is not None

    def tell(self, found: Any, error: BaseException | None = None) -> None:
        self._result = found, error
        self._told.set()

    def wait(self, timeout_s: float | None = None) -> T:
        """Raises what the function raises, and TimeoutError. It may be waited for again, also where a signal's handler has raised, and by
        several threads.
        """
        if self._result is None:
            self._told.wait(timeout_s)
        if self._result is None:
            raise TimeoutError
        found, error = self._result
        if error is not None:
            raise error
        return found  # type: ignore[no-any-return]


_Queue = queue.SimpleQueue[tuple[Pending[Any], Callable[..., Any], tuple[Any, ...]] | None]


def _live(asked: _Queue) -> None:
    while (item := asked.get()) is not None:
        pending, function, arguments = item
        try:
            pending.tell(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller of `call`, whatever it is
            pending.tell(None, error)
        # Locals would keep the namespace's sockets alive until the next call.
        del item, pending, function, arguments


class OwnThread:
    """`call` runs a function there and hands back its result.

    The thread ends with this object: a signal's handler may raise before anybody has it.
    """

    def __init__(self, name: str) -> None:
        """Raises OSError where no thread can be had."""
        self._is_ended = False
        self._queue: _Queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=_live, args=(self._queue,), name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise BlockingIOError(errno.EAGAIN, str(error)) from error

    def __del__(self) -> None:
        # A Visit has no thread of its own.
        if (asked := self.__dict__.get("_queue")) is not None:
            asked.put(None)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        return self.begin(function, *arguments).wait()

    def begin(self, function: Callable[..., T], *arguments: Any) -> Pending[T]:
        """The same, but what is returned waits for the result."""
        # concurrent.futures would do the same, and cost 10 ms of imports (logging) at every start.
        pending: Pending[T] = Pending()
        self.do(pending, function, *arguments)
        return pending

    def do(self, pending: Pending[T], function: Callable[..., T], *arguments: Any) -> None:
        """The same for who has the Pending before anything is done: a signal's handler may raise in between."""
        if self._is_ended:
            raise RuntimeError("the thread has ended")
        self._queue.put((pending, function, arguments))

    def end(self, within_s: float | None = None) -> bool:
        """End the thread, once it has done what it was given; whether it had not ended before. After `within_s` it is left to itself."""
        self._is_ended = True
        if not self._thread.is_alive():
            return False
        self._queue.put(None)
        self._thread.join(within_s)
        return True
