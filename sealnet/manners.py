"""Installs what keeps a host's network managers off sealnet's links, and takes it away; never a file that is somebody else's."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sealnet.errors import CannotSeal, SealnetError
from sealnet.kernel import libc, process
from sealnet.model import config, manners
from sealnet.model.manners import File, Manager

_RELOAD_S = 60
_MAX_BYTES = 1 << 20


class Change(NamedTuple):
    """What became of one file, whose `path` is below the root; `text` is what it holds.

    `new`, `changed`, `unchanged`, `removed`, `kept` where it is not sealnet's; in a dry run `unseen` where the caller may not look.
    """

    manager: str
    path: str
    state: str
    text: str


class Skipped(NamedTuple):
    manager: str
    why: str


class _Tree(NamedTuple):
    """The file system of the host that is meant: its root, opened, and what that is called here."""

    fd: int
    root: str

    def here(self, path: str) -> str:
        return below(self.root, path)


class Reload(NamedTuple):
    """A manager that must read its files again: `due`, `reloaded`, `not running`, or `failed` and why."""

    manager: str
    command: tuple[str, ...]
    state: str = "due"
    fault: str = ""


def door_ports(root: str) -> tuple[int, int]:
    """The first and the last of the ports of doors, as the configuration of the host below `root` says. Raises UsageError."""
    with _opened(root) as tree:
        return config.parse(_read(tree, config.PATH) or "", tree.here(config.PATH)).door_ports


def install(
    root: str, *, ports: Sequence[int], doors: tuple[int, int], everything: bool, dry_run: bool
) -> tuple[list[Change], list[Skipped]]:
    """Write the files of every manager that is on the host below `root`, of all of them with `everything`; with `dry_run` only tell.

    `ports` are those of leases, `doors` the first and the last of those of doors.
    Nothing is written when one of them is somebody else's (UsageError).
    """
    changes, skipped, foreign = [], [], []
    with _opened(root) as tree:
        for manager in manners.MANAGERS:
            if not everything and not any(_exists(tree, program) for program in manager.programs):
                skipped.append(Skipped(manager.name, "it is not on this host"))
                continue
            if dry_run and (unseen := _unseen(tree, manager)):
                changes += unseen
                continue
            for file in manners.files(manager, [*ports, *_earlier_ports(tree, manager)], doors):
                found = _read(tree, file.path)
                if found is not None and not manners.is_own(found):
                    foreign.append(tree.here(file.path))
                state = "new" if found is None else "unchanged" if found == file.text else "changed"
                changes.append(Change(manager.name, file.path, state, file.text))
        manners.refuse_foreign(foreign)
        for change in changes:
            if change.state in ("new", "changed") and not dry_run:
                _write(tree, File(change.path, change.text))
    return changes, skipped


def below(root: str, path: str) -> str:
    """A path of the host below `root`, as it is called here."""
    return path if root == "/" else root + path


def _unseen(tree: _Tree, manager: Manager) -> list[Change]:
    """The files of a manager, where whoever asks may not look at one of them: firewalld's directory is root's alone."""
    try:
        for path in manager.paths:
            _read(tree, path)
    except SealnetError as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        return [Change(manager.name, path, "unseen", "") for path in manager.paths]
    return []


def _earlier_ports(tree: _Tree, manager: Manager) -> list[int]:
    """The ports of leases that an earlier installation let in: another run may live by them."""
    texts = [_read(tree, path) or "" for path in manager.paths]
    return [port for text in texts if manners.is_own(text) for port in manners.ports_of(text)]


def remove(root: str, *, dry_run: bool) -> list[Change]:
    """Take away every file that sealnet has installed below `root`, whichever managers are there."""
    changes = []
    with _opened(root) as tree:
        for manager in manners.MANAGERS:
            if dry_run and (unseen := _unseen(tree, manager)):
                changes += unseen
                continue
            for path in manager.paths:
                found = _read(tree, path)
                if found is None:
                    continue
                if not manners.is_own(found):
                    changes.append(Change(manager.name, path, "kept", ""))
                    continue
                if not dry_run:
                    with _failing("remove", tree.here(path)), _directory(tree, path, make=False) as directory:
                        os.unlink(os.path.basename(path), dir_fd=directory)
                changes.append(Change(manager.name, path, "removed", ""))
    return changes


def managers_of(changes: Sequence[Change]) -> list[Manager]:
    """Whoever must read its files again."""
    changed = {change.manager for change in changes if change.state in ("new", "changed", "removed")}
    return [manager for manager in manners.MANAGERS if manager.name in changed]


def reload(manager: Manager) -> Reload:
    """Let a manager read its files again, if it runs."""
    if _fault(manager.alive) is not None:
        return Reload(manager.name, manager.reload, "not running")
    fault = _fault(manager.reload)
    return Reload(manager.name, manager.reload, "reloaded" if fault is None else "failed", fault or "")


def _fault(command: tuple[str, ...]) -> str | None:
    """Why a command did not succeed."""
    try:
        done = subprocess.run(
            [process.tool(command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_RELOAD_S,
            check=False,
        )
    except CannotSeal as error:
        return error.message
    except subprocess.TimeoutExpired:
        return f"no answer in {_RELOAD_S} s"
    return None if done.returncode == 0 else (done.stderr.strip() or done.stdout.strip() or f"status {done.returncode}")


@contextlib.contextmanager
def _failing(verb: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "run it as root" if os.geteuid() != 0 else None
        raise SealnetError(f"cannot {verb} {path}: {os.strerror(error.errno or 0)}", hint=hint) from error


@contextlib.contextmanager
def _opened(root: str) -> Iterator[_Tree]:
    with _failing("open", root):
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield _Tree(fd, root)
    finally:
        os.close(fd)


def _exists(tree: _Tree, path: str) -> bool:
    try:
        os.close(libc.open_in_root(tree.fd, path, os.O_PATH))
    except OSError:
        return False
    return True


def _read(tree: _Tree, path: str) -> str | None:
    """The text of a file; None where there is none. What is no file (a link to /dev/null, say) is somebody's, too: it reads empty."""
    with _failing("read", tree.here(path)):
        try:
            with _directory(tree, path, make=False) as directory:
                name = os.path.basename(path)
                if not stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                    return ""
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
                with open(fd, "rb") as file:
                    return file.read(_MAX_BYTES).decode(errors="replace")
        except FileNotFoundError:
            return None


def _write(tree: _Tree, file: File) -> None:
    """Whole or not at all, and for everybody to read: some managers are not root's."""
    name = os.path.basename(file.path)
    # No manager reads a file of such a name.
    new = f".{name}.new"
    with _failing("write", tree.here(file.path)), _directory(tree, file.path, make=True) as directory:
        # Two who install at once would write into the same file.
        fcntl.flock(directory, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=directory)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            with open(fd, "w", encoding="utf-8") as out:
                out.write(file.text)
                out.flush()
                os.fchmod(fd, 0o644)
                os.fsync(fd)
            os.rename(new, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(new, dir_fd=directory)
            raise


@contextlib.contextmanager
def _directory(tree: _Tree, path: str, *, make: bool) -> Iterator[int]:
    """The directory of a file below `tree`; a link on the way means what it means there, never what it means on this host."""
    walked, current = "", os.dup(tree.fd)
    try:
        for part in os.path.dirname(path).strip("/").split("/"):
            walked += f"/{part}"
            made = False
            try:
                below = libc.open_in_root(tree.fd, walked, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                if not make:
                    raise
                os.mkdir(part, 0o755, dir_fd=current)
                made = True
                below = libc.open_in_root(tree.fd, walked, os.O_RDONLY | os.O_DIRECTORY)
            os.close(current)
            current = below
            if made:
                # Whatever the caller's umask is: networkd is not root.
                os.fchmod(current, 0o755)
        yield current
    finally:
        os.close(current)
