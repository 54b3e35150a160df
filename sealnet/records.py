"""The state directory: claims, records, liveness locks and subnet reservations, all of it gone after a reboot."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import IPv4Network
from pathlib import Path

from sealnet.errors import CannotSeal, CannotTearDown, NoSuchRun, RunExists
from sealnet.kernel import locks, process
from sealnet.model import names
from sealnet.model.record import Record

DEFAULT = "/run/sealnet"

# Held by bwrap's init: the payload lives.
ALIVE = "alive"
_STATUS = "status.json"
_PROBED = "probed"
# Stands in a directory that was made for the teardown of leftovers alone.
_REAPING = "reaping"
_REAPING_S = 5.0


class State:
    """`/run/sealnet`, or `$SEALNET_STATE_DIR`. Only root writes here."""

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path or os.environ.get("SEALNET_STATE_DIR") or DEFAULT).absolute()
        self.runs = self.path / "runs"
        self.subnets = self.path / "subnets"
        self.stage = self.path / "stage"

    def prepare(self) -> None:
        """Make the directory where it is missing. One that others may write is refused: they could plant records."""
        try:
            for path, mode in ((self.path, 0o711), (self.runs, 0o700), (self.subnets, 0o700), (self.stage, 0o700)):
                path.mkdir(mode=mode, parents=path == self.path, exist_ok=True)
                if not _is_own(path.lstat()):
                    raise CannotSeal(
                        f"cannot use state directory {path}: it must be a directory of root's that nobody else may write",
                        hint=f"look at it: ls -ld {path}",
                    )
        except OSError as e:
            raise CannotSeal(f"cannot make state directory {e.filename}: {e.strerror}") from e

    def fault(self) -> tuple[str, str] | None:
        """What `prepare` would refuse the directory for, and what mends it; None also where it is still to be made."""
        try:
            found = self.path.lstat()
        except OSError:
            return None
        if _is_own(found):
            return None
        if not stat.S_ISDIR(found.st_mode):
            return "it is no directory", f"look at it, then move it away: ls -ld {self.path}"
        told = f"mode {stat.S_IMODE(found.st_mode):o}, of uid {found.st_uid}: it must be root's, and nobody else's to write"
        if found.st_uid != os.geteuid():
            return told, f"if nobody put anything there: install -d -o root -m 755 {self.path}"
        return told, f"chmod 755 {self.path}"

    @property
    def tag(self) -> str:
        """Which state directory this is, for marks on things outside it: device and inode."""
        found = self.path.stat()
        return f"{found.st_dev:x}:{found.st_ino:x}"

    def directory(self, run_id: str) -> Path:
        """Raises UsageError for what is no run id: it would be a way out of here."""
        return self.runs / names.known_run_id(run_id)

    def allocating(self) -> contextlib.AbstractContextManager[None]:
        """The lock under which the host's routes are read and a subnet is reserved."""
        return locks.locked(self.path / "alloc.lock")

    # Runs

    def claim(self, record: Record) -> Claim:
        """Claim a run id: the record appears whole, already locked, or RunExists is raised."""
        fresh, lock = self.runs, -1
        try:
            fresh = self._fresh(record.run_id)
            lock = locks.new(fresh / "lock")
            (fresh / ALIVE).touch(mode=0o600)
            write(fresh / "record.json", record.render())
            self._rename_in(fresh, record.run_id)
        except OSError as e:
            if fresh != self.runs:
                _discard(fresh)
            if lock >= 0:
                os.close(lock)
            if self.directory(record.run_id).exists():
                raise RunExists(
                    f"cannot claim run {record.run_id}: a run of that id exists",
                    hint=f"choose another id, or end it: sealnet reap {record.run_id}",
                ) from e
            raise CannotSeal(f"cannot claim run {record.run_id}: {e.strerror} ({self.runs})") from e
        return Claim(self, record, lock)

    def take_over(self, run_id: str) -> Claim | None:
        """The claim of a run whose supervisor is gone; None where somebody has it, or takes it away, or there is none."""
        directory = self.directory(run_id)
        with contextlib.ExitStack() as undo:
            try:
                lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                undo.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # From here on a teardown of orphans leaves it alone; one that had begun before holds the directory. The record is read
                # last: nobody else changes it any more.
                with self._untouched(directory):
                    claim = Claim(self, self.read(run_id), lock)
            except (OSError, NoSuchRun):
                return None
            undo.pop_all()
        return claim

    @contextlib.contextmanager
    def _untouched(self, directory: Path) -> Iterator[None]:
        """Raises BlockingIOError while a teardown goes on."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        finally:
            os.close(fd)

    def _rename_in(self, fresh: Path, run_id: str) -> None:
        """rename(2) replaces an empty directory only, and a run's is never empty. A teardown of leftovers is waited for."""
        deadline = time.monotonic() + _REAPING_S
        while True:
            try:
                os.rename(fresh, self.directory(run_id))
            except OSError:
                try:
                    taken = set(os.listdir(self.directory(run_id)))
                except FileNotFoundError:
                    taken = set()
                if (taken and _REAPING not in taken) or time.monotonic() > deadline:
                    raise
                time.sleep(0.002)
            else:
                return

    def _fresh(self, run_id: str) -> Path:
        """A directory that is not yet a run's. Its name says from its first moment on whose it is, for `sweep`."""
        pid = os.getpid()
        fresh = self.runs / f".{run_id}.{os.urandom(4).hex()}.{pid}.{process.start_time(pid)}"
        fresh.mkdir(mode=0o700)
        return fresh

    def run_ids(self) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.runs) if names.is_run_id(name))
        except (FileNotFoundError, PermissionError):
            return []

    def read(self, run_id: str) -> Record:
        """Raises NoSuchRun, also for one whose record cannot be read."""
        try:
            record = Record.from_json(json.loads((self.directory(run_id) / "record.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise NoSuchRun(f"cannot find run {run_id}: there is no record of it", hint="see the runs there are: sealnet ls") from None
        except PermissionError:
            raise NoSuchRun(f"cannot read run {run_id}: only root may", hint=f"sudo sealnet inspect {run_id}") from None
        except (ValueError, OSError) as e:
            raise NoSuchRun(f"cannot read the record of run {run_id}: {e}", hint=f"take it away: sealnet reap {run_id}") from e
        if record.run_id != run_id:
            raise NoSuchRun(f"cannot read the record of run {run_id}: it is of another", hint=f"take it away: sealnet reap {run_id}")
        return record

    def neighbours(self, run_id: str) -> list[str]:
        """Gateways of other runs."""
        return [gateway_of(subnet) for subnet, holder in self.reservations().items() if holder != run_id]

    def add_probed(self, run_id: str, tried: Iterable[tuple[str, str, int]]) -> None:
        """Keep what a proof has tried from inside, so that it is not taken for the payload's doing."""
        lines = "".join(f"{address} {protocol} {port}\n" for address, protocol, port in tried)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(FileNotFoundError), open(os.open(self.directory(run_id) / _PROBED, flags, 0o600), "w") as file:
            file.write(lines)

    def probed(self, run_id: str) -> Counter[tuple[str, str, int]]:
        """How often proofs have tried each (address, protocol, port) from inside the run."""
        found: Counter[tuple[str, str, int]] = Counter()
        with contextlib.suppress(FileNotFoundError):
            for line in (self.directory(run_id) / _PROBED).read_text(encoding="ascii").splitlines():
                address, protocol, port = line.split(" ")
                found[address, protocol, int(port)] += 1
        return found

    def is_held(self, run_id: str, name: str = "lock") -> bool:
        """Whether some process holds the run's lock: `lock` is its supervisor's, `alive` also bwrap's."""
        return locks.is_held(self.directory(run_id) / name)

    def status(self, run_id: str) -> int | None:
        """The payload's exit status, where bwrap has written it."""
        with contextlib.suppress(FileNotFoundError):
            return exit_status((self.directory(run_id) / _STATUS).read_text(encoding="utf-8"))
        return None

    @contextlib.contextmanager
    def teardown_lock(self, run_id: str) -> Iterator[bool]:
        """Serialise teardowns of one run against each other and against a new claim of its id. Yields whether there was a record.

        The lock is on the run's directory: while that stands nobody can claim the id. Where there is none, one is made for the time.
        """
        directory = self.directory(run_id)
        while True:
            if not directory.exists():
                try:
                    fresh = self._fresh(run_id)
                except FileNotFoundError as e:
                    raise CannotTearDown(f"cannot take run {run_id} away: {self.runs} is gone", hint="put the state directory back") from e
                try:
                    (fresh / _REAPING).touch(mode=0o600)
                    fresh.rename(directory)
                except OSError as e:
                    _discard(fresh)
                    # Somebody was first.
                    if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
            try:
                fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue
            try:
                locks.acquire(fd)
                # Whoever held it before may have removed the directory, and somebody may have claimed the id anew.
                if is_at(fd, directory):
                    yield (directory / "record.json").exists()
                    return
            finally:
                os.close(fd)

    def forget(self, run_id: str) -> None:
        """Remove the record: the last step of a teardown. The lock files go last of all."""
        directory = self.directory(run_id)
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(directory), key=lambda name: name in ("lock", ALIVE)):
                with contextlib.suppress(FileNotFoundError):
                    (directory / name).unlink()
            try:
                directory.rmdir()
            except OSError as e:
                # Somebody has claimed the id anew: rename(2) replaces an empty directory.
                if e.errno != errno.ENOTEMPTY:
                    raise

    def forget_leftovers(self, run_id: str) -> None:
        """Remove the directory that `teardown_lock` made, where there was no record."""
        if (self.directory(run_id) / _REAPING).exists():
            self.forget(run_id)

    def sweep(self) -> None:
        """Remove claims that were never finished: their maker is gone."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.runs):
                if name.startswith(".") and not _maker_lives(name):
                    shutil.rmtree(self.runs / name, ignore_errors=True)
            # Whoever reserves holds this lock, so a reservation without a name in it has no maker any more.
            with self.allocating():
                for subnet, holder in self.reservations().items():
                    if not names.is_run_id(holder):
                        (self.subnets / _file(subnet)).unlink(missing_ok=True)

    # Reservations

    def reservations(self) -> dict[IPv4Network, str]:
        """Each reserved /30 with the run that holds it."""
        found: dict[IPv4Network, str] = {}
        try:
            directory = os.open(self.subnets, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            return found
        try:
            # Every run reads all of them, so a thousand are read without the comfort of pathlib: 3 us each, not 16.
            for name in os.listdir(directory):
                with contextlib.suppress(ValueError, OSError):
                    address, _, bits = name.partition("_")
                    subnet = IPv4Network((int.from_bytes(socket.inet_pton(socket.AF_INET, address), "big"), int(bits)))
                    found[subnet] = _read(name, directory)
        finally:
            os.close(directory)
        return found

    def reserved(self) -> list[int]:
        """The first address of each reserved /30, as a number: all that an allocation asks, and no file is opened (0.3 us each)."""
        with contextlib.suppress(FileNotFoundError):
            return [first for name in os.listdir(self.subnets) if (first := _first(name)) is not None]
        return []

    def reserve(self, subnet: IPv4Network, run_id: str) -> None:
        """O_EXCL; the caller holds the `alloc` lock."""
        write(self.subnets / _file(subnet), run_id.encode() + b"\n", exclusive=True)

    def release(self, run_id: str, subnet: IPv4Network | None = None) -> None:
        """Give back whatever the run has reserved: `subnet`, when its record tells, else whatever is found to be the run's."""
        if subnet is not None:
            with contextlib.suppress(OSError, ValueError):
                if _read(self.subnets / _file(subnet)) == run_id:
                    # A run reserves one at a time, and says so in its record before it reserves anything else.
                    (self.subnets / _file(subnet)).unlink()
                    return
        for found, holder in self.reservations().items():
            if holder == run_id:
                with contextlib.suppress(FileNotFoundError):
                    (self.subnets / _file(found)).unlink()


class Claim:
    """A claimed run: its record, and the lock that says that its supervisor lives."""

    def __init__(self, state: State, record: Record, lock: int, fd: int | None = None) -> None:
        """`lock` is the descriptor that holds it, `fd` one of the run's directory, where there is one already: both are the claim's."""
        self.state = state
        self.record = record
        self.directory = state.directory(record.run_id)
        self.lock = lock
        # By descriptor: once somebody has reaped the run, its path may be another run's of the same id.
        self.fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW) if fd is None else fd

    def stands(self) -> bool:
        """Whether the run's directory is still this claim's."""
        return is_at(self.fd, self.directory)

    def update(self, **changes: object) -> None:
        """Change the record; a reader sees the old one or the new one, whole."""
        self.record = self.record.with_(**changes)
        try:
            write("record.json", self.record.render(), directory=self.fd)
        except FileNotFoundError:
            # A run that somebody has reaped meanwhile has no record to change.
            return
        except OSError as e:
            raise CannotSeal(f"cannot write the record of run {self.record.run_id}: {e.strerror} ({self.state.runs})") from e

    def open_status(self) -> int:
        """The file that bwrap writes the payload's end to."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(_STATUS, flags, 0o600, dir_fd=self.fd)
        except FileNotFoundError:
            raise NoSuchRun(f"cannot start run {self.record.run_id}: it has been reaped") from None

    def status(self) -> int | None:
        """The payload's exit status, once bwrap has written it."""
        with contextlib.suppress(FileNotFoundError):
            with open(os.open(_STATUS, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.fd), encoding="utf-8") as file:
                return exit_status(file.read())
        return None

    def close(self) -> None:
        for fd in (self.lock, self.fd):
            os.close(fd)


def exit_status(told: str) -> int | None:
    """The payload's, in what bwrap has written: a JSON document a line, the last with exit-code. None: it has not told it."""
    with contextlib.suppress(ValueError):
        for line in reversed(told.splitlines()):
            code = json.loads(line).get("exit-code")
            if code is not None:
                return int(code)
    return None


def _is_own(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def is_at(fd: int, path: Path) -> bool:
    """Whether a path leads to what a descriptor is of."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _discard(fresh: Path) -> None:
    """Remove what `_fresh` made and what was put into it. By name: to list a directory takes a descriptor, and there may be none left."""
    for name in ("record.json", ".record.json.new", "lock", ALIVE, _REAPING):
        with contextlib.suppress(OSError):
            (fresh / name).unlink()
    with contextlib.suppress(OSError):
        fresh.rmdir()


def _maker_lives(name: str) -> bool:
    pid, _, start = name.rpartition(".")
    pid = pid.rpartition(".")[2]
    return pid.isdigit() and start.isdigit() and process.start_time(int(pid)) == int(start) and process.lives(int(pid))


def gateway_of(subnet: IPv4Network) -> str:
    return str(subnet.network_address + 1)


def _read(path: Path | str, directory: int | None = None) -> str:
    """The run id in a reservation."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
    try:
        return os.read(fd, 4096).decode().strip()
    finally:
        os.close(fd)


# As many as live runs, mostly the same ones.
@lru_cache(maxsize=1 << 14)
def _first(name: str) -> int | None:
    """The first address of the reservation of that name; None where it is none."""
    try:
        return int.from_bytes(socket.inet_pton(socket.AF_INET, name.partition("_")[0]), "big")
    except OSError:
        return None


def _file(subnet: IPv4Network) -> str:
    return str(subnet).replace("/", "_")


def write(path: Path | str, data: bytes, *, exclusive: bool = False, directory: int | None = None) -> None:
    """Write a whole file; other than an exclusive one it replaces the old one in one step. `path` is relative to `directory`."""
    target = os.fspath(path) if exclusive else os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.new")
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if exclusive else os.O_TRUNC) | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with open(os.open(target, flags, 0o600, dir_fd=directory), "wb") as file:
            file.write(data)
        if not exclusive:
            os.replace(target, path, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as e:
        # Nothing half written stays, but what somebody else has made (EEXIST) does.
        if e.errno != errno.EEXIST:
            with contextlib.suppress(OSError):
                os.unlink(target, dir_fd=directory)
        raise
