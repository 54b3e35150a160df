"""Which server a TLS client asks for: the SNI of a ClientHello, read as its bytes come in, in whatever pieces.

RFC 8446 4.1.2 and 5.1, RFC 6066 3. Nothing is decrypted: a ClientHello is plain. What begins like TLS and cannot be read is BAD, since a
server might be more lenient than this; what does not begin like TLS passes.
"""

from __future__ import annotations

import enum

# A ClientHello with post-quantum keys and ECH is below 4 KiB; a resumed one may carry a large ticket.
MAX_HELLO = 32 * 1024
MAX_RECORDS = 256
_MAX_FRAGMENT = 16384

_CHANGE_CIPHER_SPEC, _HANDSHAKE, _HEARTBEAT = 20, 22, 24
_CLIENT_HELLO = 1
# How a second hello begins, which is one of TLS 1.3: type, length below 64 KiB, version. A record that is encrypted (TLS 1.2, resumed) is
# not taken for one.
_SECOND = (_CLIENT_HELLO, 0, None, None, 3, 3)
_SERVER_NAME = 0
_HOST_NAME = 0


class State(enum.Enum):
    """What may be done with the bytes fed so far."""

    HOLD = "hold"  # It cannot be told yet: send none of it on.
    PASS = "pass"  # noqa: S105 - Send it on, and go on feeding: another hello may follow.
    DONE = "done"  # Send it on, and all that follows.
    BAD = "bad"  # Send nothing on; `reason` says why.


class Malformed(Exception):
    """Not a ClientHello that this can read."""


class Hello:
    """Feed it what the client sends. `names` are the server names asked for so far, as they were written.

    A server may ask for a second hello (HelloRetryRequest), which could name another server: so this looks on until the client sends
    something that is none.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.reason = ""
        self._state = State.HOLD
        # Bytes of an unfinished record, and of an unfinished handshake message.
        self._rest = bytearray()
        self._message = bytearray()
        self._records = 0
        self._hellos = 0

    def feed(self, data: bytes) -> State:
        """Takes time linear in all that was fed, and keeps less than MAX_HELLO and one record. Raises nothing."""
        if self._state in (State.DONE, State.BAD):
            return self._state
        self._rest += data
        try:
            self._state = self._look()
        except Malformed as e:
            self.reason, self._state = str(e), State.BAD
        return self._state

    def _look(self) -> State:
        at, rest = 0, self._rest
        try:
            while True:
                left = len(rest) - at
                if left == 0:
                    return self._between()
                # The first byte decides whether this is TLS at all, and not the version after it: that is to be ignored (RFC 8446 5.1), and
                # a server that does (Go's, GnuTLS's) would take for a hello what had passed for something else.
                kind = rest[at]
                if not _CHANGE_CIPHER_SPEC <= kind <= _HEARTBEAT:
                    return self._ends("another record than TLS's amid a hello")
                if left < 5:
                    return State.HOLD
                if kind != _HANDSHAKE and (kind != _CHANGE_CIPHER_SPEC or not self._hellos):
                    # Servers put up with an alert, or an empty record, ahead of the hello; whoever sends one is hiding it.
                    if not self._hellos:
                        raise Malformed("it does not begin with a hello")
                    return self._ends("another record amid a hello")
                size = rest[at + 3] << 8 | rest[at + 4]
                if not 0 < size <= _MAX_FRAGMENT:
                    raise Malformed("the length of a record is wrong")
                if kind == _HANDSHAKE and not self._message:
                    start = rest[at + 5 : at + 5 + min(size, len(_SECOND))]
                    if not self._hellos:
                        if start and start[0] != _CLIENT_HELLO:
                            raise Malformed("it does not begin with a hello")
                    elif any(is_one != byte for is_one, byte in zip(_SECOND, start, strict=False) if is_one is not None):
                        return State.DONE
                if left < 5 + size:
                    return State.HOLD
                self._records += 1
                if self._records > MAX_RECORDS:
                    raise Malformed("it is in too many records")
                fragment = bytes(rest[at + 5 : at + 5 + size])
                at += 5 + size
                if kind == _CHANGE_CIPHER_SPEC:
                    if self._message:
                        raise Malformed("another record amid a hello")
                    continue
                self._message += fragment
                self._take_messages()
        finally:
            del rest[:at]

    def _between(self) -> State:
        return State.HOLD if self._message or not self._hellos else State.PASS

    def _ends(self, reason: str) -> State:
        if self._message:
            raise Malformed(reason)
        return State.DONE

    def _take_messages(self) -> None:
        message = self._message
        while len(message) >= 4:
            if message[0] != _CLIENT_HELLO:
                raise Malformed("something else is in one record with a hello")
            size = message[1] << 16 | message[2] << 8 | message[3]
            if size > MAX_HELLO:
                raise Malformed("it is too long")
            if len(message) < 4 + size:
                return
            found = server_name(bytes(message[4 : 4 + size]))
            if found is not None:
                self.names.append(found)
            self._hellos += 1
            if self._hellos > 2:
                raise Malformed("it is the third")
            del message[: 4 + size]
        if message and message[0] != _CLIENT_HELLO:
            raise Malformed("something else is in one record with a hello")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def take(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) < size:
            raise Malformed("it ends early")
        self._at += size
        return found

    def take_all(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def vector(self, size_bytes: int) -> _Reader:
        """What a length of so many bytes stands before."""
        return _Reader(self.take(self.number(size_bytes)))


def server_name(body: bytes) -> str | None:
    """The host_name of a ClientHello's body, None without one. Raises Malformed, also for two of them."""
    hello = _Reader(body)
    hello.take(2 + 32)
    hello.vector(1)
    hello.vector(2)
    hello.vector(1)
    if not hello:
        return None
    extensions = hello.vector(2)
    if hello:
        raise Malformed("it goes on after its end")
    found: str | None = None
    seen = False
    while extensions:
        kind = extensions.number(2)
        extension = extensions.vector(2)
        if kind != _SERVER_NAME:
            continue
        if seen:
            raise Malformed("it has two server names")
        seen = True
        entries = extension.vector(2)
        if extension or not entries:
            raise Malformed("its server name has a wrong length")
        if entries.number(1) != _HOST_NAME:
            raise Malformed("its server name is of an unknown kind")
        found = entries.vector(2).take_all().decode("latin-1")
        if entries:
            raise Malformed("it has two server names")
    return found
