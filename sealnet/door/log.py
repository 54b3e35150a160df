"""The file of egress records: each written whole before anything is dialled, and finished on its spot."""

from __future__ import annotations

import contextlib
import errno
import os
import time

from sealnet.model import egress
from sealnet.model.egress import End, Request

# So much is written before the room that is left is looked at again.
_STEP_BYTES = 16 * 1024
_UNLIMITED = 1 << 62


class CannotRecord(Exception):
    """What cannot be written down is not done."""


class Entry:
    """An ALLOW record, to be finished."""

    __slots__ = ("_address", "_began", "_log", "_offset")

    def __init__(self, log: Log, offset: int) -> None:
        self._log = log
        self._offset = offset
        self._began = time.monotonic()
        self._address: str | None = None

    def reached(self, address: str) -> None:
        """Fill in whom it is connected with."""
        self._address = address
        self._log.fill(self._offset, egress.room_of_address(address))

    def ended(self, *, up: int, down: int, reason: str | None = None) -> None:
        self._log.fill(self._offset, egress.room(End(self._address, reason, up, down, time.monotonic() - self._began)))

    def failed(self, reason: str) -> None:
        self.ended(up=0, down=0, reason=reason)


class Log:
    """One run's. The only writer of its file."""

    def __init__(self, fd: int, run_id: str) -> None:
        self._fd = fd
        self._run_id = run_id
        self._offset = os.fstat(fd).st_size
        # Up to where there is room, as far as was looked.
        self._until = 0
        self.records = self.denied = 0
        self.failed: str | None = None

    def deny(self, request: Request, reason: str, address: str | None = None) -> None:
        """Raises CannotRecord."""
        self._write(self._head(egress.DENY, request) + egress.denial(reason, address))
        self.denied += 1

    def allow(self, request: Request) -> Entry:
        """Raises CannotRecord: then nothing may be dialled."""
        head = self._head(egress.ALLOW, request)
        offset = self._write(head + egress.EMPTY_ROOM)
        return Entry(self, offset + len(head))

    def _head(self, verdict: str, request: Request) -> str:
        return egress.head(seq=self.records + 1, run_id=self._run_id, time=time.time(), verdict=verdict, request=request)

    def _write(self, line: str) -> int:
        if self.failed is not None:
            raise CannotRecord(self.failed)
        offset = self._offset
        data = line.encode("ascii")
        try:
            if offset + len(data) > self._until:
                self._look(offset + len(data))
            written = os.pwrite(self._fd, data, offset)
            while written < len(data):
                # The rest will not fit either, and that tells why.
                written += os.pwrite(self._fd, data[written:], offset + written)
        except OSError as e:
            self.failed = os.strerror(e.errno or 0)
            # Half a record is none.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, offset)
            raise CannotRecord(self.failed) from None
        self._offset = offset + written
        self.records += 1
        return offset

    def _look(self, size: int) -> None:
        """A log is never larger than what its file system still has free, so that those of any number of runs leave room to other files.

        Raises OSError.
        """
        found = os.fstatvfs(self._fd)
        # A file system without a limit (ramfs, tmpfs with size=0) tells of no blocks at all.
        free = found.f_bavail * found.f_frsize if found.f_blocks else _UNLIMITED
        if size > free:
            raise OSError(errno.ENOSPC, "")
        # What is written is not free any more.
        self._until = size + min(_STEP_BYTES, (free - size) // 2)

    def fill(self, offset: int, room: str) -> None:
        """Overwrite in place: takes no room, so what fails here has failed the whole log."""
        if self._fd < 0:
            return
        data = room.encode("ascii")
        try:
            written = os.pwrite(self._fd, data, offset)
        except OSError as e:
            self.failed = self.failed or os.strerror(e.errno or 0)
            return
        if written < len(data):
            self.failed = self.failed or "no space left"

    def close(self) -> None:
        """What is still under way stays unfinished."""
        os.close(self._fd)
        self._fd = -1
        self.failed = self.failed or "closed"
