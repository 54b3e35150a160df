"""One look at the host's processes for many that ask: never one that began too early."""

from __future__ import annotations

import subprocess
import threading

import pytest

from sealnet.kernel import host, netns


def test_a_process_is_found_by_the_inode_of_its_namespace() -> None:
    census = host._Census()
    with subprocess.Popen(["sleep", "60"]) as process:
        inode = netns.inode_of(process.pid)
        assert inode is not None

        found = census.take()
        process.kill()
        process.wait()

        assert process.pid in found[inode]
        assert process.pid not in census.take().get(inode, [])


def test_whoever_asks_during_a_look_is_told_by_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    census = host._Census()
    looks: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def look() -> dict[int, list[int]]:
        looks.append(len(looks) + 1)
        begun.set()
        assert go_on.wait(60)
        return {0: [looks[-1]]}

    monkeypatch.setattr(census, "_look", look)
    told: list[int] = []
    first = threading.Thread(target=lambda: told.append(census.take()[0][0]))
    first.start()
    assert begun.wait(60)
    others = [threading.Thread(target=lambda: told.append(census.take()[0][0])) for _ in range(5)]
    for thread in others:
        thread.start()
    go_on.set()
    for thread in (first, *others):
        thread.join()

    assert told.count(1) == 1
    assert min(sorted(told)[1:]) == 2
    assert census.take()[0][0] == len(looks)


def test_who_died_during_a_look_may_have_left_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was listed, and is dead when it is asked; its child was born when the list was there already."""
    census = host._Census()
    looks = iter(
        [
            ({1: [10]}, {20}),
            ({1: [10, 11], 2: [21]}, {20, 30}),
            # These have been dead for long: nobody waits for them.
            ({1: [10]}, {20, 30}),
            ({1: [10]}, {30}),
            ({1: [10]}, {30, 31}),
            ({1: [10]}, set()),
        ]
    )
    monkeypatch.setattr(host, "_scan", lambda: next(looks))

    assert census.take() == {1: [10, 11], 2: [21]}
    assert census.take() == {1: [10]}
    assert census.take() == {1: [10]}
    assert census.take() == {1: [10]}
    assert next(looks, None) is None
