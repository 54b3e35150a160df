"""A small rtnetlink codec: batched requests, replies and dumps over one socket, nothing more than a run needs.

Sources: netlink(7), rtnetlink(7), include/uapi/linux/{netlink,rtnetlink,if_link}.h. One sendmsg carries a whole batch; the kernel
works through it in order and answers each message by its sequence number.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from sealnet.errors import KernelRefused

# Message kinds (linux/rtnetlink.h).
NEWLINK, DELLINK, GETLINK, SETLINK = 16, 17, 18, 19
NEWADDR, DELADDR, GETADDR = 20, 21, 22
NEWROUTE, DELROUTE, GETROUTE = 24, 25, 26
NEWNEIGH = 28
NEWRULE, DELRULE, GETRULE = 32, 33, 34
NEWNETCONF, DELNETCONF = 80, 81
NEWNSID, GETNSID = 88, 90
NEWLINKPROP = 108

# Flags (linux/netlink.h).
ACK, ECHO, DUMP = 0x4, 0x8, 0x300
REPLACE, EXCL, CREATE = 0x100, 0x200, 0x400
_REQUEST, _DUMP_INTR = 0x1, 0x10
_ERROR, _DONE = 2, 3
_NESTED = 0x8000

_HEADER = struct.Struct("=IHHII")
_WORD, _KIND = struct.Struct("=I"), struct.Struct("=HH")
_INT = struct.Struct("=i")
_ATTRIBUTE = struct.Struct("=HH")
_SOL_NETLINK, _EXT_ACK, _STRICT = 270, 11, 12
# A dump comes in datagrams of at most 32 kB (netlink_dump()), and no answer is larger.
_RECEIVE_BYTES = 1 << 16
_DUMP_TRIES = 20

_PLACES: list[memoryview] = []


class Message(NamedTuple):
    """One request. `what` completes the error text: `cannot <what>: <strerror>`."""

    kind: int
    flags: int
    body: bytes
    what: str


class Reply(NamedTuple):
    kind: int
    body: bytes


def attribute(kind: int, data: bytes | str | int) -> bytes:
    """One attribute: text gets its NUL, an int is 32 bits in host order."""
    if isinstance(data, str):
        data = data.encode() + b"\0"
    elif isinstance(data, int):
        data = struct.pack("=I", data)
    return _ATTRIBUTE.pack(4 + len(data), kind) + data + b"\0" * (-len(data) % 4)


def nested(kind: int, *attributes: bytes) -> bytes:
    return attribute(kind | _NESTED, b"".join(attributes))


def attributes(body: bytes, offset: int) -> dict[int, bytes]:
    """The attributes of `body` from `offset` on; of a kind that repeats, the last."""
    found: dict[int, bytes] = {}
    while offset + 4 <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < 4:
            break
        found[kind & 0x3FFF] = body[offset + 4 : offset + length]
        offset += (length + 3) & ~3
    return found


def listed(body: bytes) -> list[bytes]:
    """The attributes of a list, whatever kind each says it is."""
    found, offset = [], 0
    while offset + 4 <= len(body):
        length, _kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < 4:
            break
        found.append(body[offset + 4 : offset + length])
        offset += (length + 3) & ~3
    return found


def messages(datagram: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(kind, flags, sequence, body) of each message of a datagram."""
    offset = 0
    while offset + 16 <= len(datagram):
        length, kind, flags, sequence, _port = _HEADER.unpack_from(datagram, offset)
        if length < 16:
            break
        yield kind, flags, sequence, datagram[offset + 16 : offset + length]
        offset += (length + 3) & ~3


def stretches(datagram: bytes) -> Iterator[tuple[int, memoryview, int]]:
    """The messages of a datagram, those of one length that follow each other together: where they begin, their 32-bit words, and how many
    of these each has.

    A slice with a step looks at one word of a thousand messages at once. A datagram that ends within a message ends before it.
    """
    words = memoryview(datagram)[: len(datagram) & ~3].cast("I")
    offset, end = 0, len(words)
    while offset + 4 <= end:
        length = words[offset]
        width = (length + 3) >> 2
        following = offset + width
        if length < 16 or following > end:
            return
        step = 8
        # Where the next is of another length there is nothing to gain.
        while following < end and words[following] == length:
            lengths = words[following : following + step * width : width].tolist()
            same = next((at for at, one in enumerate(lengths) if one != length), len(lengths))
            following += same * width
            if same < step:
                break
            step *= 2
        if following > end:
            following -= width
        yield 4 * offset, words[offset:following], width
        offset = following


def _extended(body: bytes) -> str:
    """The kernel's own words of a NLMSG_ERROR (NLMSGERR_ATTR_MSG), or nothing."""
    # The error echoes our header; NLM_F_CAPPED (the EXT_ACK default for errors is the whole request) decides where attributes start.
    length = struct.unpack_from("=I", body, 4)[0]
    for offset in (20, 4 + ((length + 3) & ~3)):
        text = attributes(body, offset).get(1, b"")
        if text.endswith(b"\0") and text[:-1].isascii() and text[:-1].decode("ascii").isprintable() and len(text) > 3:
            return text[:-1].decode("ascii")
    return ""


class Netlink:
    """One netlink socket of the network namespace in which it was opened. Not for two threads at once."""

    def __init__(self, protocol: int = 0) -> None:
        # 0 is NETLINK_ROUTE.
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)
        if protocol == 0:
            # NETLINK_GET_STRICT_CHK (Linux 4.20): without it the kernel takes no notice of what a dump is asked to be limited to.
            self._socket.setsockopt(_SOL_NETLINK, _STRICT, 1)
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> bytes:
        # Into a place that is used again: to have one mapped and given back costs more than most answers. There are as many of them as
        # threads have been at this at once: a run's own thread, which stays, keeps none.
        try:
            place = _PLACES.pop()
        except IndexError:
            place = memoryview(bytearray(_RECEIVE_BYTES))
        try:
            length = self._socket.recv_into(place, 0, socket.MSG_TRUNC)
            if length > len(place):
                raise KernelRefused(f"cannot read an answer of the kernel's: it has {length} bytes", errno=errno.EMSGSIZE)
            return bytes(place[:length])
        finally:
            _PLACES.append(place)

    def _pack(self, message: Message, extra: int) -> bytes:
        self._sequence = self._sequence % 0xFFFF_FFFF + 1
        return _HEADER.pack(16 + len(message.body), message.kind, _REQUEST | message.flags | extra, self._sequence, 0) + message.body

    def exchange(self, batch: Sequence[Message]) -> list[Reply]:
        """Send the batch in one datagram and wait for every acknowledgement; what the kernel told beside them is returned.

        The kernel goes on after a message it refused, so all answers are read; the first refusal is then raised as KernelRefused.
        """
        first = self._sequence + 1
        packed = [self._pack(message, ACK) for message in batch]
        sequences = range(first, first + len(batch))
        self._socket.send(b"".join(packed))
        waiting, replies, refused = set(sequences), [], {}
        while waiting:
            for kind, _flags, sequence, body in messages(self._receive()):
                if sequence not in waiting:
                    continue
                if kind == _ERROR:
                    waiting.discard(sequence)
                    code = -_INT.unpack_from(body)[0]
                    if code:
                        refused[sequence] = (code, _extended(body))
                else:
                    replies.append(Reply(kind, body))
        for sequence, message in zip(sequences, batch, strict=True):
            if sequence in refused:
                code, said = refused[sequence]
                detail = f" ({said})" if said else ""
                raise KernelRefused(f"cannot {message.what}: {os.strerror(code)}{detail}", errno=code)
        return replies

    def dump(self, message: Message) -> list[bytes]:
        """Every datagram of a dump, whole. One that the kernel marks as interrupted is asked again, never used in part."""
        for _ in range(_DUMP_TRIES):
            try:
                datagrams = self._dump_once(message)
            except KernelRefused as error:
                if error.errno != errno.EBUSY:
                    raise
                # One that nobody has read to its end (a signal's handler has raised) goes on.
                self._read_to_end()
                continue
            if datagrams is not None:
                return datagrams
        raise KernelRefused(f"cannot {message.what}: it changed during each of {_DUMP_TRIES} reads", errno=errno.EAGAIN)

    def _read_to_end(self) -> None:
        # There is always something to read of a dump that is not over.
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(1, socket.MSG_DONTWAIT)

    def _dump_once(self, message: Message) -> list[bytes] | None:
        packed = self._pack(message, DUMP)
        sequence = self._sequence
        self._socket.send(packed)
        datagrams, interrupted, done = [], False, False
        while not done:
            datagram = self._receive()
            if _HEADER.unpack_from(datagram)[3] != sequence:
                continue
            datagrams.append(datagram)
            for _offset, words, width in stretches(datagram):
                heads = words[1::width].tolist()
                for head in set(heads):
                    kind, flags = _KIND.unpack(_WORD.pack(head))
                    # nl_dump_check_consistent() marks a message after the change.
                    interrupted |= bool(flags & _DUMP_INTR)
                    if kind in (_ERROR, _DONE):
                        done = True
                        code = -_INT.unpack(_WORD.pack(words[heads.index(head) * width + 4]))[0] if width > 4 else 0
                        if code in (errno.EINTR, errno.EAGAIN):
                            interrupted = True
                        elif code:
                            raise KernelRefused(f"cannot {message.what}: {os.strerror(code)}", errno=code)
        return None if interrupted else datagrams
