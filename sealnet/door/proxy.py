"""The allowlist proxy: judges each request by host and port, writes it down, and only then resolves, dials and passes bytes on."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable
from time import monotonic
from typing import NoReturn

import h11

from sealnet.door.dial import DIAL_S, DialFailed, dial
from sealnet.door.forward import ClientFailed, Exchange, OriginFailed
from sealnet.door.heads import HEAD_S, MAX_HEAD, BadRequest, Head, first_words, read, short
from sealnet.door.here import Here
from sealnet.door.log import CannotRecord, Entry, Log
from sealnet.door.pump import IDLE_S
from sealnet.door.ready import Ready
from sealnet.door.resolve import NoAddress, Resolver
from sealnet.door.served import MAX_CONNECTIONS, Connection, Served
from sealnet.model import authority, destination
from sealnet.model.authority import Authority, BadTarget
from sealnet.model.destination import Address
from sealnet.model.egress import Request
from sealnet.model.hello import Hello, State

_READ_BYTES = MAX_HEAD + 1
_ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
_STATUS = {
    400: "Bad Request",
    403: "Forbidden",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}
# h11 makes one of equal lengths in one header; whoever wrote that wanted two parsers to disagree.
_LIST_OF_LENGTHS = re.compile(rb"\ncontent-length:[^\r\n]*,", re.IGNORECASE)
_BLANK_LINE = re.compile(rb"\n\r?\n")
_NOBODY = Request("", "", None)


def answer(status: int, reason: str, text: str, *, is_last: bool = False) -> bytes:
    """A response of the door's own: X-Sealnet-Reason tells it from an origin's."""
    body = f"sealnet: {text}\n".encode("ascii", "replace")
    more = "Allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, CONNECT\r\n" if status == 405 else ""
    more += "Connection: close\r\n" if is_last else ""
    head = (
        f"HTTP/1.1 {status} {_STATUS[status]}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
        f"Via: 1.1 sealnet\r\nX-Sealnet-Reason: {authority.shown(reason)}\r\n{more}\r\n"
    )
    return head.encode("ascii") + body


class Proxy(Served):
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ready: Ready,
        here: Here,
        run_id: str,
        sandbox: str,
        listener: socket.socket,
        allow: Iterable[authority.Entry],
        own: frozenset[Address],
        log: Log,
    ) -> None:
        super().__init__(loop, ready, run_id, sandbox, listener, _Proxied)
        self.private: dict[tuple[str, int], bool] = {}
        self.ports: dict[str, list[int]] = {}
        for entry in allow:
            # Canonical, whoever wrote it: what is compared is canonical.
            key = (authority.name(entry.host), entry.port)
            if key not in self.private:
                self.ports.setdefault(key[0], []).append(entry.port)
            self.private[key] = entry.private or self.private.get(key, False)
        self.log = log
        self.resolver = Resolver(loop)
        self._here = here
        self._own = own

    async def preflight(self) -> list[tuple[str, str]]:
        declared = list(self.private.items())
        told = await asyncio.gather(*(self._try(host, port, is_private=private) for (host, port), private in declared))
        return [(f"{host}:{port}", why) for ((host, port), _private), why in zip(declared, told, strict=True) if why is not None]

    async def _try(self, host: str, port: int, *, is_private: bool) -> str | None:
        """Why a declared host does not answer."""
        try:
            async with asyncio.timeout(DIAL_S):
                found = await self.resolver.lookup(host)
                refusals = [(each, self.refusal(each, private=is_private)) for each in found]
                good = [each for each, refusal in refusals if refusal is None]
                if not good:
                    refused, word = refusals[0]
                    option = f", which --allow-private {host}:{port} would allow" if _may_be_opened(refused, word or "") else ""
                    return f"{refused} is refused: {word}{option}"
                server, _reached = await dial(self.loop, good, port)
        except NoAddress as e:
            return f"no address: {e}"
        except DialFailed as e:
            return str(e)
        except TimeoutError:
            return f"no answer within {DIAL_S:g} s"
        server.close()
        return None

    def stop(self) -> dict[str, object]:
        told = super().stop()
        self.resolver.close()
        told |= {"records": self.log.records, "denied": self.log.denied, "failed": self.log.failed}
        self.log.close()
        return told

    def refusal(self, asked: Address, *, private: bool) -> str | None:
        return destination.refusal(asked, private=private, own=self._own) or self._here.refusal(asked)

    def turn_away(self, client: socket.socket) -> None:
        text = f"this run has {MAX_CONNECTIONS} connections open, which is the limit"
        self.see_off(client, self.denied(503, _NOBODY, f"limit: {MAX_CONNECTIONS} connections", text, is_last=True))

    def crowded_out(self, connection: Connection) -> None:
        if isinstance(connection, _Proxied):
            connection.gave_up("limit: it asked for nothing while others waited")

    def denied(self, status: int, request: Request, reason: str, text: str, *, is_last: bool, address: str | None = None) -> bytes:
        """Write a denial down; what to answer."""
        try:
            self.log.deny(request, reason, address)
        except CannotRecord as e:
            return self.cannot_record(e)
        return answer(status, reason, text, is_last=is_last)

    def cannot_record(self, error: CannotRecord) -> bytes:
        return answer(503, "cannot record", f"cannot record: {error}; what cannot be written down is not done", is_last=True)


class _Denied(Exception):
    """The answer to the client. `is_last`: it may not ask again on this connection."""

    def __init__(self, answer: bytes, *, is_last: bool) -> None:
        super().__init__()
        self.answer = answer
        self.is_last = is_last


class _Proxied(Connection):
    served: Proxy

    def __init__(self, served: Proxy, client: socket.socket) -> None:
        super().__init__(served, client)
        # What the client has sent of the head that is being read.
        self._raw = bytearray()
        self._exchange: Exchange | None = None
        self._entry: Entry | None = None
        self._sni_refused: str | None = None
        self._is_dialling = False
        # There was no more to read than was read.
        self._is_dry = False
        self._watched: Hello | None = None
        self._held = b""
        self._target = Authority("", 0)

    def due(self) -> float | None:
        return self._exchange.used + IDLE_S if self._exchange is not None else super().due()

    def accepted(self) -> None:
        self._waits()

    def _waits(self) -> None:
        """For the next request, or the first."""
        self.served.waits(self)
        self.deadline = monotonic() + HEAD_S

    async def serve(self) -> bool:
        while True:
            try:
                data = bytes(self._raw) or self.client.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                return True
            self._is_dry = not self._raw and len(data) < _READ_BYTES and not self.has_end
            if not data:
                return False
            try:
                if not await self._one(data):
                    return False
            except _Denied as denied:
                self._entry = None
                if denied.is_last:
                    self.see_off(denied.answer)
                    return False
                await self._say(denied.answer)
            except CannotRecord as error:
                self.see_off(self.served.cannot_record(error))
                return False
            self._waits()

    async def _say(self, data: bytes) -> None:
        try:
            sent = self.client.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        if sent < len(data):
            await self.loop.sock_sendall(self.client, data[sent:])

    def cut(self, *, is_reset: bool = True) -> None:
        if self._entry is not None and self.tunnel is None and not self.is_over:
            # The task hears of it later, when the log may be closed.
            up, down = (0, 0) if self._exchange is None else (self._exchange.up, self._exchange.down)
            self._entry.ended(up=up, down=down, reason="cut")
        super().cut(is_reset=is_reset)

    def expired(self) -> None:
        if self._is_dialling:
            self.interrupt()
            return
        is_silent = self._exchange is None and self.tunnel is None and not self._raw
        if self._raw:
            self.gave_up(f"limit: no request within {HEAD_S:g} s")
        self.cut(is_reset=not is_silent)

    def gave_up(self, reason: str) -> None:
        """A head that was begun and will not be finished is a denial. Who sent nothing asked for nothing."""
        if self._raw:
            method, host = first_words(bytes(self._raw))
            data = self.served.denied(408, Request(method, host, None), reason, reason, is_last=True)
            try:
                self.client.send(data)
            except OSError:
                pass  # It does not listen either.

    async def _one(self, data: bytes) -> bool:
        """One request, which begins with these; whether there may be another. Raises _Denied and CannotRecord."""
        if head := short(data):
            self._raw.clear()
            self._asked()
            return await self._connect(head, b"")
        self._raw[:] = data
        asked = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        head, first = await self._head(asked, data)
        self._raw.clear()
        self._asked()
        try:
            if head.path is None:
                return await self._connect(head, asked.trailing_data[0])
            return await self._forward(head, asked, first)
        except _Denied as denied:
            if not denied.is_last:
                self._raw[:] = asked.trailing_data[0]
            raise

    async def _head(self, asked: h11.Connection, data: bytes) -> tuple[Head, list[h11.Event]]:
        """By h11, with the first of a body: what has broken framing gets nobody to connect to."""
        first: list[h11.Event] = []
        try:
            request = await self._event(asked, data)
            if not isinstance(request, h11.Request):
                raise BadRequest("the request ends early")
            if _LIST_OF_LENGTHS.search(_BLANK_LINE.split(self._raw, 1)[0]):
                raise BadRequest("its Content-Length is a list")
            head = read(request)
            if head.has_body and not asked.they_are_waiting_for_100_continue:
                first.append(await self._event(asked, b""))
        except h11.RemoteProtocolError as e:
            # To a client that speaks another version, 505 would be in a version that it does not speak either.
            status = e.error_status_hint if e.error_status_hint in _STATUS and e.error_status_hint != 505 else 400
            if status == 431:
                self._refuse(BadRequest(f"the head is larger than {MAX_HEAD} bytes", status, "limit"))
            self._refuse(BadRequest("the request is malformed", status))
        except BadRequest as e:
            self._refuse(e)
        return head, first

    async def _event(self, asked: h11.Connection, data: bytes) -> h11.Event:
        """The next that there is. `data` was read already."""
        if data:
            asked.receive_data(data)
        while True:
            event = asked.next_event()
            if isinstance(event, h11.Event):
                return event
            data = await self.loop.sock_recv(self.client, _READ_BYTES)
            if len(self._raw) <= MAX_HEAD:
                self._raw += data
            asked.receive_data(data)

    def _asked(self) -> None:
        self.served.asks(self)
        self.deadline = None

    def _refuse(self, bad: BadRequest) -> NoReturn:
        method, host = first_words(bytes(self._raw))
        port = _port_of(host)
        if bad.target is not None:
            host, port = bad.target.host, bad.target.port
        reason = f"{bad.reason}: {bad}"
        self._raw.clear()
        self._asked()
        data = self.served.denied(bad.status, Request(method, host, port), reason, str(bad), is_last=True)
        raise _Denied(data, is_last=True)

    def _deny(self, head: Head, reason: str, text: str, address: str | None = None) -> _Denied:
        request = Request(head.method, head.target.host, head.target.port)
        is_last = head.has_body or not head.is_1_1
        return _Denied(self.served.denied(403, request, reason, text, is_last=is_last, address=address), is_last=is_last)

    async def _admit(self, head: Head) -> tuple[socket.socket, Entry]:
        """Judge, write down, dial. Raises _Denied and CannotRecord."""
        served, target = self.served, head.target
        private = served.private.get(target)
        if private is None:
            raise self._deny(head, *_not_declared(target, served.ports.get(target.host)))
        if served.log.failed is not None:
            raise CannotRecord(served.log.failed)
        request = Request(head.method, target.host, target.port)
        entry: Entry | None = None
        self.deadline, self._is_dialling = monotonic() + DIAL_S, True
        try:
            found = await served.resolver.lookup(target.host)
            refusals = [(each, served.refusal(each, private=private)) for each in found]
            good = [each for each, refusal in refusals if refusal is None]
            if not good:
                refused, word = refusals[0]
                raise self._deny(head, f"private address: {word}", _private(target, refused, word or ""), str(refused))
            self._entry = entry = served.log.allow(request)
            server, reached = await dial(self.loop, good, target.port)
        except NoAddress as e:
            reason = f"failed: no address: {e}"
            served.log.allow(request).failed(reason)
            raise self._failed(head, 502, reason, f"cannot resolve {target.host}: {e}") from None
        except DialFailed as e:
            raise self._unreached(head, request, entry, str(e), in_time=e.in_time) from None
        except asyncio.CancelledError:
            if self.was_late():
                raise self._unreached(head, request, entry, f"no answer within {DIAL_S:g} s", in_time=False) from None
            (entry or served.log.allow(request)).failed("cut: the client is gone")
            raise
        finally:
            self.deadline, self._is_dialling = None, False
        entry.reached(str(reached))
        return server, entry

    def _unreached(self, head: Head, request: Request, entry: Entry | None, text: str, *, in_time: bool) -> _Denied:
        reason = f"failed: {text}"
        (entry or self.served.log.allow(request)).failed(reason)
        return self._failed(head, 502 if in_time else 504, reason, f"{head.target} is allowed, and cannot be reached: {text}")

    def _failed(self, head: Head, status: int, reason: str, text: str) -> _Denied:
        is_last = head.has_body or not head.is_1_1
        return _Denied(answer(status, reason, text, is_last=is_last), is_last=is_last)

    # A tunnel

    async def _connect(self, head: Head, early: bytes) -> bool:
        server, self._entry = await self._admit(head)
        self._target = head.target
        try:
            await self._say(_ESTABLISHED)
        except BaseException:
            server.close()
            self._entry.failed("cut: the client is gone")
            raise
        self._watched = Hello()
        tunnel = self.connect(server)
        tunnel.up.look = self._look
        tunnel.start(early, is_dry=self._is_dry and self._task is None)
        return False

    def ended(self) -> None:
        tunnel, entry = self.tunnel, self._entry
        if tunnel is not None and entry is not None:
            entry.ended(up=tunnel.up.bytes, down=tunnel.down.bytes, reason=self._sni_refused)

    def _look(self, data: bytes, is_end: bool) -> bytes:
        """What of a client's bytes may go on to the server: nothing, until they ask for the host that CONNECT asked for, or are no TLS."""
        hello, tunnel = self._watched, self.tunnel
        if hello is None or tunnel is None:
            return data
        known = len(hello.names)
        state = hello.feed(data)
        self._held += data
        fault = hello.reason if state is State.BAD else "it ends early" if state is State.HOLD and is_end and self._held else None
        for name in hello.names[known:]:
            if not authority.agrees(name, self._target, default_port=None) or ":" in name:
                fault = authority.shown(name, 80)
        if fault is not None:
            self._mismatch(fault)
            return b""
        if state is State.HOLD:
            return b""
        if state is State.DONE:
            tunnel.up.look = self._watched = None
        passed, self._held = self._held, b""
        return passed

    def _mismatch(self, fault: str) -> None:
        self._sni_refused = f"sni mismatch: {fault}"
        try:
            self.served.log.deny(Request("CONNECT", self._target.host, self._target.port), self._sni_refused)
        except CannotRecord:
            pass  # It is cut all the same, and the stop tells that the log has failed.
        self.cut()

    # A plain request

    async def _forward(self, head: Head, asked: h11.Connection, first: list[h11.Event]) -> bool:
        server, entry = await self._admit(head)
        exchange = self._exchange = Exchange(self.loop, self.client, server, asked, first)
        reason: str | None = "cut"
        try:
            may_go_on = await exchange.run(head)
            reason = None
        except OriginFailed as e:
            reason = f"failed: {e}"
            if e.is_begun:
                # Its end must not look like a whole response's.
                self.is_reset = True
                return False
            raise self._failed(head._replace(has_body=True), 502, reason, f"{head.target} is allowed, and failed: {e}") from None
        except ClientFailed as e:
            reason = f"bad request: {e}"
            if e.is_begun:
                self.is_reset = True
                return False
            raise _Denied(answer(400, reason, str(e), is_last=True), is_last=True) from None
        finally:
            self._exchange = None
            self.loop.remove_reader(server.fileno())
            self.loop.remove_writer(server.fileno())
            server.close()
            entry.ended(up=exchange.up, down=exchange.down, reason=reason)
            self._entry = None
        if not may_go_on:
            self.see_off(b"")
            return False
        self._raw[:] = asked.trailing_data[0]
        return True


def _not_declared(target: Authority, ports: list[int] | None) -> tuple[str, str]:
    flag = f"to allow it, start the run with --allow {target}"
    if ports:
        told = ", ".join(map(str, sorted(ports)))
        return (
            f"port not declared: declared for {told}",
            f"DENY {target}: port not declared ({target.host} is declared for port {told}); {flag}",
        )
    return "not declared", f"DENY {target}: not declared (no --allow of this run names it); {flag}"


def _private(target: Authority, address: Address, word: str) -> str:
    text = f"DENY {target}: private address ({target.host} leads to {address}: {word})"
    opened = _may_be_opened(address, word)
    return f"{text}; to allow it, start the run with --allow-private {target}" if opened else f"{text}; no flag allows that"


def _may_be_opened(address: Address, word: str) -> bool:
    return destination.refusal(address, private=True, own=()) is None and word.startswith(("private", "shared"))


def _port_of(host: str) -> int | None:
    try:
        return authority.port(host.rpartition(":")[2]) if ":" in host else None
    except BadTarget:
        return None
