"""Who calls."""

from __future__ import annotations

import time

from sealnet import caller
from sealnet.model import names


def test_run_ids_made_in_the_same_moment_differ_and_tell_the_time() -> None:
    before = names.ulid(time_ms=time.time_ns() // 1_000_000, random=bytes(10))

    made = {caller.new_run_id() for _ in range(1000)}

    assert len(made) == 1000
    assert all(map(names.is_run_id, made))
    assert before[:10] <= min(made)[:10] <= max(made)[:10] <= names.ulid(time_ms=time.time_ns() // 1_000_000, random=bytes(10))[:10]
