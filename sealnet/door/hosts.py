"""What /etc/hosts says of a name, kept while it says the same: a thread and getaddrinfo(3) take longer than all the rest of a request."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from sealnet.model.destination import Address, address

_HOSTS, _ORDER = "/etc/hosts", "/etc/nsswitch.conf"
# A file that was changed as lately as this can be changed again without its times and size telling so.
_SETTLED_NS = 2_000_000_000
# An answer of this age is no older than one that the resolver was asked for.
_FRESH_S = 0.005
_MAX_BYTES = 64 * 1024
# Whatever follows, the file's answer is the answer (nsswitch.conf(5)).
_FILES_FIRST = re.compile(r"^[ \t]*hosts:[ \t]*files\b", re.MULTILINE)

Stamp = tuple[tuple[int, ...], ...]


class Hosts:
    """Answers of getaddrinfo(3) that are the file's alone. Of one run; each is judged anew whenever it is used."""

    def __init__(self, hosts: str = _HOSTS, order: str = _ORDER) -> None:
        self._hosts, self._order = hosts, order
        self._stamp: Stamp | None = None
        self._looked = 0.0
        # Of what was asked for while the files were the same. Nothing: it is for the resolver to say, each time.
        self._kept: dict[str, list[Address]] = {}

    def find(self, host: str) -> list[Address]:
        """Empty: ask the resolver."""
        found = self._kept.get(host, [])
        if found and (now := time.monotonic()) - self._looked > _FRESH_S:
            self._looked = now
            if self._seen() != self._stamp:
                self._kept = {}
                return []
        return found

    def keep(self, host: str, answer: list[Address], asked: Stamp | None) -> None:
        """`asked` is the stamp from before the question: an answer that came while a file was changed is nobody's."""
        if asked is None or (asked == self._stamp and host in self._kept):
            return
        try:
            kept = answer if self._tells(host, answer) else []
        except OSError:
            return
        if asked == self.stamp():
            self._kept = {**(self._kept if asked == self._stamp else {}), host: kept}
            self._stamp = asked

    def stamp(self) -> Stamp | None:
        """Which files they are, and of what state. None: a later state might look the same, or there is too much to read."""
        seen = self._seen()
        if seen is None or any(size > _MAX_BYTES or abs(time.time_ns() - changed) < _SETTLED_NS for _, _, size, _, changed in seen):
            return None
        return seen

    def _seen(self) -> Stamp | None:
        try:
            one, other = os.stat(self._hosts), os.stat(self._order)
        except OSError:
            return None
        return (
            (one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns),
            (other.st_dev, other.st_ino, other.st_size, other.st_mtime_ns, other.st_ctime_ns),
        )

    def _tells(self, host: str, answer: list[Address]) -> bool:
        """Whether each of these addresses is in the file, beside the name."""
        lines = (line.partition("#")[0].split() for line in _text(self._hosts).splitlines())
        told = {_canonical(words[0]) for words in lines if host in map(str.lower, words[1:])}
        return _FILES_FIRST.search(_text(self._order)) is not None and told.issuperset(answer)


def _text(path: str) -> str:
    return Path(path).read_text("utf-8", "replace")


def _canonical(text: str) -> Address | None:
    try:
        return address(text)
    except ValueError:
        return None
