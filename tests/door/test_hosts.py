"""What is kept of /etc/hosts, and until when."""

from __future__ import annotations

import os
import time
from ipaddress import ip_address
from pathlib import Path

import pytest

from sealnet.door import hosts
from sealnet.door.hosts import Hosts

FOUND = [ip_address("192.0.2.1")]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Looked at anew each time, and settled from the start."""
    monkeypatch.setattr(hosts, "_FRESH_S", -1.0)
    monkeypatch.setattr(hosts, "_SETTLED_NS", 0)
    names, order = tmp_path / "hosts", tmp_path / "nsswitch.conf"
    names.write_text("127.0.0.1 localhost\n192.0.2.1 other A.test # b.test\n")
    order.write_text("passwd: files\nhosts:\tfiles dns\n")
    return names, order


def kept(files: tuple[Path, Path], host: str = "a.test") -> Hosts:
    made = Hosts(*map(str, files))
    made.keep(host, FOUND, made.stamp())
    return made


def test_an_answer_of_the_file_is_kept(files: tuple[Path, Path]) -> None:
    found = kept(files)

    assert found.find("a.test") == FOUND
    assert found.find("other") == []


@pytest.mark.parametrize(
    ("names", "order"),
    [
        ("192.0.2.1 b.test\n", "hosts: files dns\n"),
        ("192.0.2.2 a.test\n", "hosts: files dns\n"),
        ("192.0.2.1 # a.test\n", "hosts: files dns\n"),
        ("a.test 192.0.2.1\n", "hosts: files dns\n"),
        ("192.0.2.1 a.test\n", "hosts: dns files\n"),
        ("192.0.2.1 a.test\n", "#hosts: files dns\n"),
        ("192.0.2.1 a.test\n", "hosts: filesystem dns\n"),
        ("192.0.2.1 a.test\n", "passwd: files\n"),
        ("192.0.2.1 a.test\n" + "#" * 70_000, "hosts: files dns\n"),
    ],
)
def test_what_another_source_may_have_answered_is_not_kept(files: tuple[Path, Path], names: str, order: str) -> None:
    assert kept(files).find("a.test") == FOUND
    files[0].write_text(names)
    files[1].write_text(order)

    assert kept(files).find("a.test") == []


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("how", ["written", "replaced", "touched", "gone"])
def test_a_file_that_has_changed_ends_what_was_kept(files: tuple[Path, Path], which: int, how: str) -> None:
    found = kept(files)
    assert found.find("a.test") == FOUND
    path, text = files[which], files[which].read_text()

    if how == "written":
        path.write_text(text + "\n")
    elif how == "replaced":
        path.with_suffix(".new").write_text(text)
        os.rename(path.with_suffix(".new"), path)
    elif how == "touched":
        os.utime(path)
    else:
        path.unlink()

    assert found.find("a.test") == []


def test_a_file_that_changed_while_the_question_was_asked_is_not_believed(files: tuple[Path, Path]) -> None:
    made = Hosts(*map(str, files))
    asked = made.stamp()
    files[0].write_text(files[0].read_text() + "# more\n")

    made.keep("a.test", FOUND, asked)

    assert made.find("a.test") == []


def test_a_file_that_was_changed_just_now_is_not_kept(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(files).find("a.test") == FOUND
    monkeypatch.setattr(hosts, "_SETTLED_NS", 2_000_000_000)
    os.utime(files[0])

    assert kept(files).find("a.test") == []
    # What counts is when it was changed, not when it says that it was.
    os.utime(files[0], (time.time() - 60,) * 2)
    assert kept(files).find("a.test") == []
