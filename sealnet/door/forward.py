"""One plain http request to its origin and the response back, message by message: nothing of either head is passed on as it came."""

from __future__ import annotations

import asyncio
import socket

import h11

from sealnet.door.heads import Head, Headers, cleaned_response
from sealnet.model import authority

_READ_BYTES = 64 * 1024
_MAX_RESPONSE_HEAD = 64 * 1024


class OriginFailed(Exception):
    """No whole response came. `is_begun`: the client has a part of one."""

    def __init__(self, text: str, *, is_begun: bool) -> None:
        super().__init__(text)
        self.is_begun = is_begun


class ClientFailed(Exception):
    """The body of the request breaks the framing that its head told."""

    def __init__(self, *, is_begun: bool) -> None:
        super().__init__("the body is malformed")
        self.is_begun = is_begun


class Exchange:
    """`asked` has read the head, and is fed what the client sends. `up` and `down` count bytes on the origin's side."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, client: socket.socket, server: socket.socket, asked: h11.Connection, first: list[h11.Event]
    ) -> None:
        self._loop = loop
        self._client = client
        self._server = server
        self._asked = asked
        self._first = first
        self._origin = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_RESPONSE_HEAD)
        self._is_begun = False
        self.up = self.down = 0
        self.used = loop.time()

    async def run(self, head: Head) -> bool:
        """Whether the client may ask for more on its connection. Raises OriginFailed, ClientFailed, or ConnectionError of the client's."""
        host = head.target.host if head.target.port == authority.HTTP else str(head.target)
        headers: Headers = [(b"Host", host.encode("ascii")), *head.headers, (b"Connection", b"close")]
        if head.has_body and not any(name == b"content-length" for name, _ in head.headers):
            headers.append((b"Transfer-Encoding", b"chunked"))
        path = head.path or "/"
        await self._to_origin(h11.Request(method=head.method, target=path, headers=headers))
        upload = self._loop.create_task(self._upload())
        download = self._loop.create_task(self._download(head))
        try:
            # The response may be over before the request is, which nobody reads then any more.
            waiting = {upload, download}
            while not download.done():
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if upload.done():
                    waiting.discard(upload)
                    upload.result()
            download.result()
            return upload.done() and self._asked.our_state is h11.DONE and self._asked.their_state is h11.DONE
        finally:
            for task in (upload, download):
                task.cancel()
            await asyncio.gather(upload, download, return_exceptions=True)

    async def _to_origin(self, event: h11.Event) -> None:
        data = self._origin.send(event)
        if data:
            self.used = self._loop.time()
            try:
                await self._loop.sock_sendall(self._server, data)
            except OSError:
                # It may have answered already, and closed: that is for the download to say.
                raise _Unwilling from None
            self.up += len(data)

    async def _upload(self) -> None:
        try:
            while True:
                event = self._first.pop(0) if self._first else self._asked.next_event()
                if event is h11.NEED_DATA:
                    data = await self._loop.sock_recv(self._client, _READ_BYTES)
                    self.used = self._loop.time()
                    self._asked.receive_data(data)
                elif isinstance(event, h11.Data):
                    await self._to_origin(event)
                elif isinstance(event, h11.EndOfMessage):
                    await self._to_origin(h11.EndOfMessage())
                    return
        except h11.RemoteProtocolError:
            raise ClientFailed(is_begun=self._is_begun) from None
        except _Unwilling:
            return

    async def _download(self, head: Head) -> None:
        try:
            while True:
                event = self._origin.next_event()
                if event is h11.NEED_DATA:
                    try:
                        data = await self._loop.sock_recv(self._server, _READ_BYTES)
                    except OSError as e:
                        raise OriginFailed(e.strerror or "connection lost", is_begun=self._is_begun) from None
                    self.used = self._loop.time()
                    self.down += len(data)
                    self._origin.receive_data(data)
                elif isinstance(event, h11.InformationalResponse):
                    if event.status_code != 101 and head.is_1_1:
                        headers = [*cleaned_response(list(event.headers), has_length=False), (b"Via", b"1.1 sealnet")]
                        await self._to_client(
                            h11.InformationalResponse(status_code=event.status_code, headers=headers, reason=event.reason)
                        )
                elif isinstance(event, h11.Response):
                    await self._to_client(self._response(event))
                elif isinstance(event, h11.Data):
                    await self._to_client(event)
                elif isinstance(event, h11.EndOfMessage):
                    await self._to_client(h11.EndOfMessage())
                    return
                else:
                    raise OriginFailed("it closed the connection without an answer", is_begun=self._is_begun)
        except h11.RemoteProtocolError:
            raise OriginFailed("its answer is malformed or cut off", is_begun=self._is_begun) from None

    def _response(self, event: h11.Response) -> h11.Response:
        # RFC 9110 8.6: a 204 has no length, as an interim response has none; RFC 9112 6.3: an encoding overrides it.
        has_length = event.status_code != 204 and all(name != b"transfer-encoding" for name, _ in event.headers)
        headers = cleaned_response(list(event.headers), has_length=has_length)
        headers.append((b"Via", b"1.1 sealnet"))
        if self._asked.their_state is not h11.DONE:
            # What is still to come of the request will not be read.
            headers.append((b"Connection", b"close"))
        return h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)

    async def _to_client(self, event: h11.Event) -> None:
        data = self._asked.send(event)
        self._is_begun = self._is_begun or isinstance(event, h11.Response)
        if data:
            await self._loop.sock_sendall(self._client, data)


class _Unwilling(Exception):
    """The origin takes no more of the request."""
