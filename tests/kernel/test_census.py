"""One look at the host's processes for many that ask: never one that began too early."""

from __future__ import annotations

import itertools
import subprocess
import threading

import pytest

from sealnet.kernel import host, netns, process


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
    listings = [[10, 20], [10, 20, 30], [10, 30, 31], [10, 31]]
    told = iter(listings)
    monkeypatch.setattr(process, "pids", lambda: next(told))
    # 20 has long been dead; 30 dies as well, and leaves another.
    monkeypatch.setattr(netns, "inode_of", {10: 1, 31: 2}.get)

    assert host._Census().take() == {1: [10], 2: [31]}
    assert next(told) == listings[3]


def test_who_never_ends_having_children_is_not_followed_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(process, "pids", lambda: [next(numbers)])
    monkeypatch.setattr(netns, "inode_of", lambda _pid: None)

    assert host._Census().take() == {}
    assert next(numbers) == host._LISTINGS
