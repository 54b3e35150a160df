"""How much of the worker one caller may have, at once and per second. Time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Rate:
    """Tokens per uid: `per_s` come back each second, up to `burst`."""

    per_s: float
    burst: float
    _left: dict[int, tuple[float, float]] = field(default_factory=dict)

    def take(self, uid: int, now_s: float, amount: int = 1) -> bool:
        """Whether there was one left; who takes more than is left has to wait for longer."""
        left, at = self._left.get(uid, (self.burst, now_s))
        left = min(self.burst, left + (now_s - at) * self.per_s)
        taken = left >= 1
        self._left[uid] = (left - amount if taken else left, now_s)
        return taken

    def forget_full(self, now_s: float) -> None:
        """Let go of those who have all of theirs again."""
        self._left = {uid: (left, at) for uid, (left, at) in self._left.items() if left + (now_s - at) * self.per_s < self.burst}

    def __len__(self) -> int:
        return len(self._left)


@dataclass(slots=True)
class Count:
    """Things that a uid has, up to `most` each."""

    most: int
    _held: dict[int, int] = field(default_factory=dict)

    def take(self, uid: int, amount: int = 1) -> bool:
        if self._held.get(uid, 0) + amount > self.most:
            return False
        if amount:
            self._held[uid] = self._held.get(uid, 0) + amount
        return True

    def add(self, uid: int) -> None:
        """One that is there, whatever the limit says."""
        self._held[uid] = self._held.get(uid, 0) + 1

    def give_back(self, uid: int, amount: int = 1) -> None:
        left = self._held.get(uid, 0) - amount
        if left:
            self._held[uid] = left
        else:
            self._held.pop(uid, None)

    def of(self, uid: int) -> int:
        return self._held.get(uid, 0)
