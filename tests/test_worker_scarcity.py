"""What a caller is told where the host has no more of something."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from sealnet.worker.scarcity import scarcity


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOSPC, errno.EROFS, errno.EAGAIN])
def test_what_is_scarce_is_named(code: int) -> None:
    told = scarcity(OSError(code, os.strerror(code), "/run/x"))

    assert told is not None
    assert told.message == f"cannot answer: {os.strerror(code)} (/run/x)"


def test_so_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_arguments: object, **_options: object) -> None:
        raise threading.ThreadError("can't start new thread")

    monkeypatch.setattr(threading, "_start_new_thread", none, raising=False)
    monkeypatch.setattr(threading, "_start_joinable_thread", none, raising=False)
    with pytest.raises(RuntimeError) as error:
        threading.Thread(target=int).start()

    told = scarcity(error.value)
    assert told is not None
    assert "no thread" in told.message


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "x"), RuntimeError("x"), ValueError("start new thread")])
def test_anything_else_is_a_bug(error: Exception) -> None:
    assert scarcity(error) is None
