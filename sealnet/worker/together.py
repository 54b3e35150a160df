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


class Together(Generic[T, R]):
    """One thread does it at a time, for all who have come by then; whoever comes meanwhile is served by the next.

    `together` answers for each, in order. Where it raises SealnetError, each goes alone, and is told by `alone` what is the matter.
    """

    def __init__(self, *, alone: Callable[[T], R], together: Callable[[Sequence[T]], Sequence[R]]) -> None:
        self._alone, self._together = alone, together
        self._doing, self._lock = threading.Lock(), threading.Lock()
        self._waiting: list[_Wanted[T, R]] = []

    def do(self, what: T) -> R:
        own: _Wanted[T, R] = _Wanted(what)
        with self._lock:
            self._waiting.append(own)
        with self._doing:
            with self._lock:
                found, self._waiting = self._waiting, []
            if found == [own]:
                return self._alone(what)
            if found:
                with contextlib.suppress(SealnetError):
                    for one, answer in zip(found, self._together([one.what for one in found]), strict=True):
                        one.answer.append(answer)
        return own.answer[0] if own.answer else self._alone(what)
