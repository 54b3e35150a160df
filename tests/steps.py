"""What a process changes in the kernel, step by step and by name, and its death at a chosen one of them."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sealnet import doors
from sealnet.doors import Door
from sealnet.kernel import libc, netlink, nft
from sealnet.kernel.attempts import StandIn
from sealnet.model import names
from sealnet.running import Run

RELEASED = "the payload runs"
# What differs between two runs of the same plan.
_MOVING = (
    (r"/proc/(self|thread-self)/fd/\d+", "FD"),
    (r"\.[0-9a-f]{8}\.\d+\.\d+", ".NEW"),
    (r"\d+\.\d+\.\d+\.\d+(_\d+)?", "ADDRESS"),
    (r"link \d+", "link N"),
)


class Step(NamedTuple):
    """The nth change of that name."""

    name: str
    nth: int

    def __str__(self) -> str:
        return self.name if self.nth == 1 else f"{self.name} ({self.nth})"


def watch(run_id: str, told: Callable[[Step, bool], None]) -> None:
    """From now on `told(step, done)` is called in this process, and not in its children, before and after each change."""
    seen: Counter[str] = Counter()
    owner = os.getpid()
    moving = [(re.escape(run_id), "RUN"), (re.escape(names.ifname(run_id)), "LINK"), *_MOVING]

    def count(name: str) -> Step:
        for pattern, word in moving:
            name = re.sub(pattern, word, name)
        seen[name] += 1
        return Step(name, seen[name])

    def patch(module: Any, name: str, tell: Callable[..., str | None]) -> None:
        real = getattr(module, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            what = tell(*arguments, **options) if os.getpid() == owner else None
            if what is None:
                return real(*arguments, **options)
            step = count(what)
            told(step, False)
            try:
                return real(*arguments, **options)
            finally:
                told(step, True)

        setattr(module, name, watched)

    for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "setxattr", "symlink", "mknod"):
        patch(os, name, _of_path(name))
    for name in ("mount", "umount"):
        patch(libc, name, _of_path(name))
    for name in ("unshare", "setns"):
        patch(libc, name, lambda *_, name=name: name)
    patch(libc, "ptrace", lambda request, *_: f"ptrace {request}")
    patch(os, "open", lambda path, flags, *_, **__: f"create {_text(path)}" if flags & os.O_CREAT else None)
    patch(os, "write", lambda fd, _data: f"write {_target(fd)}")
    patch(os, "close", _closes)
    patch(os, "fork", lambda: "fork")
    patch(os, "kill", lambda _pid, signum: f"kill -{signum}")
    patch(signal, "pidfd_send_signal", lambda _pidfd, signum, *_: f"kill -{signum} by pidfd")
    patch(fcntl, "flock", lambda fd, how: f"flock {how} {_target(fd)}")
    patch(Path, "write_text", lambda path, *_, **__: f"write {path}")
    patch(subprocess.Popen, "__init__", lambda _self, argv, **_: f"spawn {os.path.basename(argv[0])}")
    patch(netlink.Netlink, "exchange", _exchanges)
    patch(nft.Nft, "apply", lambda _self, _words, what: f"nft: {what}")
    patch(StandIn, "make", lambda _self, _attempts: "try from inside")
    patch(doors, "listen", lambda kind, *_: f"door: listen for a {kind}")
    patch(Door, "serve", lambda _self, _run_id, listening, *_: f"door: serve a {listening.kind}")
    for name in ("preflight", "stop", "close"):
        patch(Door, name, lambda *_, name=name: f"door: {name}")
    patch(Run, "release", lambda _self: RELEASED)


def die_at(step: Step, *, done: bool) -> Callable[[Step, bool], None]:
    """For `watch`: SIGKILL, before the step or once it is done."""

    def told(now: Step, now_done: bool) -> None:
        if (now, now_done) == (step, done):
            _die()

    return told


def _die() -> NoReturn:
    # Not os.kill, which is watched.
    signal.raise_signal(signal.SIGKILL)
    raise AssertionError("SIGKILL came back")


def _text(path: Any) -> str:
    return f"descriptor {path}" if isinstance(path, int) else os.fsdecode(path)


def _of_path(name: str) -> Callable[..., str]:
    def tell(*arguments: Any, **_: Any) -> str:
        paths = [_text(one) for one in arguments[:2] if isinstance(one, str | bytes | os.PathLike)]
        return f"{name} {' '.join(paths)}"

    return tell


def _target(fd: int) -> str:
    try:
        return re.sub(r"(pipe|socket):\[\d+\]", r"a \1", os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        return "nothing"


def _closes(fd: int) -> str | None:
    """What somebody waits for on the other side: the end of a pipe, or a lock."""
    target = _target(fd)
    return f"close {target}" if target == "a pipe" or "lock" in target else None


def _exchanges(_self: Any, batch: Sequence[netlink.Message]) -> str | None:
    # rtnetlink(7): kinds come in fours, the third of which only asks.
    changes = [message.what for message in batch if message.kind & 3 != 2]
    return f"netlink: {', '.join(changes)}" if changes else None
