"""What many threads want at once, done in one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from sealnet.errors import SealnetError

T = TypeVar("T")
R = TypeVar("R")


class _Wanted(Generic[T, R]):
    def __init__(self, what: T) -> None:
        self.what = what
        self.answer: list[R] = []
        self.is_next = False
        self.told = threading.Event()


class Together(Generic[T, R]):
    """One thread does it at a time, for all who have come by then; whoever comes meanwhile is served by the next, which is one of them.

    `together` answers for each, in order. Where it raises SealnetError, each goes alone, and is told by `alone` what is the matter.
    Who does it for all does it in a `turn`, which nobody else is in.
    """

    def __init__(
        self,
        *,
        alone: Callable[[T], R],
        together: Callable[[Sequence[T]], Sequence[R]],
        turn: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        self._alone, self._together = alone, together
        self._turn = contextlib.nullcontext() if turn is None else turn
        self._lock = threading.Lock()
        self._is_busy = False
        self._waiting: list[_Wanted[T, R]] = []

    def do(self, what: T) -> R:
        own: _Wanted[T, R] = _Wanted(what)
        with self._lock:
            self._waiting.append(own)
            own.is_next, self._is_busy = not self._is_busy, True
        if not own.is_next:
            own.told.wait()
        if own.is_next:
            with self._lock:
                found, self._waiting = self._waiting, []
            try:
                with self._turn:
                    if found == [own]:
                        return self._alone(what)
                    with contextlib.suppress(SealnetError):
                        for one, answer in zip(found, self._together([one.what for one in found]), strict=True):
                            one.answer.append(answer)
            finally:
                # Who has been served does not wait for who comes next.
                self._hand_on([one for one in found if one is not own])
        return own.answer[0] if own.answer else self._alone(what)

    def _hand_on(self, served: Sequence[_Wanted[T, R]]) -> None:
        with self._lock:
            self._is_busy = bool(self._waiting)
            successor = self._waiting[:1]
        for one in successor:
            one.is_next = True
        for one in (*successor, *served):
            one.told.set()
