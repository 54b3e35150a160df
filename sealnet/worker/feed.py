"""What happens, for whoever listens."""

from __future__ import annotations

import asyncio
import time
from typing import Any

_MOST = 1000

Heard = asyncio.Queue[tuple[int, dict[str, Any]]]


class Feed:
    """For the event loop's thread. A listener that does not keep up is let go of."""

    def __init__(self) -> None:
        self._listeners: set[Heard] = set()

    def listen(self) -> Heard:
        heard: Heard = asyncio.Queue(_MOST)
        self._listeners.add(heard)
        return heard

    def has(self, heard: Heard) -> bool:
        return heard in self._listeners

    def leave(self, heard: Heard) -> None:
        self._listeners.discard(heard)

    def tell(self, owner: int, event: str, run_id: str, detail: str) -> None:
        told = {"time": time.time(), "event": event, "run_id": run_id, "detail": detail}
        for heard in tuple(self._listeners):
            try:
                heard.put_nowait((owner, told))
            except asyncio.QueueFull:
                self._listeners.discard(heard)
