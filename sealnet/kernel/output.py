"""What root writes where a caller says, perhaps in a directory that a payload may write: a file, or a directory of files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from typing import Protocol

from sealnet.errors import CannotSeal, UsageError

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Sink(Protocol):
    """Takes a whole document, again and again; the last one stands at `path`."""

    @property
    def path(self) -> str: ...

    def write(self, data: bytes) -> None: ...

    def is_there(self) -> bool: ...


class Sinks:
    """Several as one. Where one cannot be written the others are all the same."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    @property
    def path(self) -> str:
        """Of those that are not there, where that is so."""
        gone = [sink for sink in self._sinks if not sink.is_there()]
        return " and ".join(sink.path for sink in gone or self._sinks)

    def is_there(self) -> bool:
        return all(sink.is_there() for sink in self._sinks)

    def write(self, data: bytes) -> None:
        failed = []
        for sink in self._sinks:
            try:
                sink.write(data)
            except CannotSeal as error:
                failed.append(error)
        if failed:
            raise failed[0]


class Output:
    """Opened before anything else happens, written whole, by rename: a link of that name is replaced and never followed.

    A link on the way is refused, but in `/` (a merged /usr): a payload may have made it.
    """

    def __init__(self, path: str, option: str) -> None:
        """Raises UsageError when it cannot be written."""
        self.path, self._option = path, option
        self._name = os.path.basename(path)
        if self._name in ("", ".", ".."):
            raise UsageError(f"cannot use {option} {path}: it names no file")
        self._directory = _open(os.path.dirname(os.path.abspath(path)), path, option)
        try:
            found = os.lstat(self._name, dir_fd=self._directory) if self._exists() else None
            if found is not None and not stat.S_ISREG(found.st_mode) and not stat.S_ISLNK(found.st_mode):
                raise UsageError(f"cannot use {option} {path}: it is there and no plain file")
            # Whether it can be written is known before anything of the run is made.
            _unlink(self._directory, _create(self._directory, self._name))
        except OSError as e:
            self.close()
            raise UsageError(f"cannot use {option} {path}: {e.strerror}") from e
        except UsageError:
            self.close()
            raise

    def _exists(self) -> bool:
        try:
            os.lstat(self._name, dir_fd=self._directory)
        except FileNotFoundError:
            return False
        return True

    def write(self, data: bytes) -> None:
        """Raises CannotSeal: what was to be written down of a run must be."""
        try:
            _write(self._directory, self._name, [data])
        except OSError as e:
            raise CannotSeal(f"cannot write {self._option} {self.path}: {e.strerror}") from e

    def is_there(self) -> bool:
        """Whether the path still leads to what was written: a payload may have moved the directory, where it may write above it."""
        return _leads_to(os.path.dirname(os.path.abspath(self.path)), self._directory)

    def close(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1


class Directory:
    """A directory that files are written into as `Output` writes its one. It is made where it is missing, the ones above it are not."""

    def __init__(self, path: str, option: str) -> None:
        """Raises UsageError where it cannot be had."""
        self.path, self._option = path, option
        above, name = os.path.split(os.path.abspath(path))
        try:
            parent = _open(above, path, option)
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=parent)
            finally:
                os.close(parent)
        except OSError as e:
            raise UsageError(f"cannot use {option} {path}: {e.strerror}") from e
        self._fd = _open(os.path.abspath(path), path, option)

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Raises CannotSeal."""
        try:
            _write(self._fd, name, chunks)
        except OSError as e:
            raise CannotSeal(f"cannot write {self._option} {self.path}/{name}: {e.strerror}") from e

    def remove(self, name: str) -> None:
        """Succeeds where there is none. Raises CannotSeal."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._fd)
        except OSError as e:
            raise CannotSeal(f"cannot replace {self._option} {self.path}/{name}: {e.strerror}") from e

    def is_there(self) -> bool:
        """Whether the path still leads to it."""
        return _leads_to(os.path.abspath(self.path), self._fd)

    def names(self) -> list[str]:
        return sorted(os.listdir(self._fd))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _leads_to(path: str, directory: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(directory))
    except OSError:
        return False


def emptied(path: str, option: str) -> int:
    """A descriptor of a file to append to, emptied, and made where it is missing. Raises UsageError: a link is on the way, for example."""
    directory = _open(os.path.dirname(os.path.abspath(path)), path, option)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(os.path.basename(path), flags, 0o644, dir_fd=directory)
    except OSError as e:
        raise UsageError(f"cannot use {option} {path}: {e.strerror}") from e
    finally:
        os.close(directory)


def _open(directory: str, told: str, option: str) -> int:
    at = os.open("/", _DIRECTORY)
    passed = ""
    try:
        for depth, part in enumerate(part for part in directory.split("/") if part):
            passed += f"/{part}"
            flags = _DIRECTORY if depth else _DIRECTORY & ~os.O_NOFOLLOW
            below = os.open(part, flags, dir_fd=at)
            os.close(at)
            at = below
    except OSError as e:
        os.close(at)
        why = e.strerror
        with contextlib.suppress(OSError):
            if stat.S_ISLNK(os.lstat(passed).st_mode):
                why = "it is a symbolic link, and a payload may have made it"
        raise UsageError(f"cannot use {option} {told}: {passed}: {why}", hint="name a directory that exists, by its real path") from e
    return at


def _create(directory: int, name: str) -> str:
    fresh = f".{name[:200]}.{os.urandom(8).hex()}"
    os.close(os.open(fresh, _NEW, 0o644, dir_fd=directory))
    return fresh


def _unlink(directory: int, name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=directory)


def _write(directory: int, name: str, chunks: Iterable[bytes]) -> None:
    """By rename. Raises OSError, and then nothing of it is left."""
    fresh = f".{name[:200]}.{os.urandom(8).hex()}"
    try:
        with open(os.open(fresh, _NEW, 0o644, dir_fd=directory), "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.writelines(chunks)
        os.rename(fresh, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        _unlink(directory, fresh)
        raise
