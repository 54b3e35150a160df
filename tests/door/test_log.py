"""The log of one run: whole lines, finished in place, and nothing after it has failed."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from sealnet.door.log import CannotRecord, Log
from sealnet.model.egress import Request

REQUEST = Request("CONNECT", "allowed.test", 443)


def test_records_are_finished_in_place(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(os.open(path, os.O_RDWR | os.O_CREAT), "run-1")
    entry = log.allow(REQUEST)
    log.deny(REQUEST, "not declared")
    size = path.stat().st_size

    entry.reached("8.8.8.8")
    entry.ended(up=5, down=7)

    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert path.stat().st_size == size
    assert (first["address"], first["bytes_up"], first["bytes_down"], first["seq"]) == ("8.8.8.8", 5, 7, 1)
    assert (second["verdict"], second["seq"]) == ("DENY", 2)
    log.close()
    written = path.read_bytes()
    entry.ended(up=99, down=99)
    assert path.read_bytes() == written


def test_a_log_is_no_larger_than_the_room_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its file system tells; one that tells of no blocks at all has no limit."""
    told = {"blocks": 100, "free": 10 * 4096}
    fields = [4096, 4096, 100, 0, 0, 0, 0, 0, 0, 255]

    def look(_fd: int) -> os.statvfs_result:
        fields[2], fields[4] = told["blocks"], told["free"] // 4096
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "fstatvfs", look)
    path = tmp_path / "log"
    log = Log(os.open(path, os.O_RDWR | os.O_CREAT), "run-1")

    for _ in range(10 * 4096 // 400):
        with contextlib.suppress(CannotRecord):
            log.allow(REQUEST)
    with pytest.raises(CannotRecord, match="No space left"):
        log.allow(REQUEST)
    assert 9 * 4096 < path.stat().st_size <= 10 * 4096
    assert log.records == len(path.read_text().splitlines())
    told.update(blocks=0, free=0)
    Log(os.open(path, os.O_RDWR), "run-1").allow(REQUEST)


def test_a_log_that_failed_takes_nothing_more(tmp_path: Path) -> None:
    log = Log(os.open("/dev/full", os.O_RDWR), "run-1")
    for _ in range(2):
        with pytest.raises(CannotRecord, match="No space left"):
            log.allow(REQUEST)
    assert log.records == 0

    good = Log(os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT), "run-1")
    good.allow(REQUEST)
    assert good.records == 1
