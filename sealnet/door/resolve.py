"""Names to addresses, by the host's own resolver, in threads: getaddrinfo(3) blocks."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures.thread import ThreadPoolExecutor

from sealnet.door.hosts import Hosts
from sealnet.model.destination import Address, address

# Of one run: whoever asks for a name whose server is silent keeps nobody waiting but itself.
_THREADS = 16


class NoAddress(Exception):
    """The name leads nowhere. The text is the resolver's."""


class Resolver:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._threads = ThreadPoolExecutor(_THREADS, "resolve")
        self._hosts = Hosts()

    async def lookup(self, host: str) -> list[Address]:
        """Every address of a name, the best first (RFC 6724). Raises NoAddress."""
        if known := self._hosts.find(host):
            return known
        asked = self._hosts.stamp()
        found = await self._loop.run_in_executor(self._threads, _lookup, host)
        self._hosts.keep(host, found, asked)
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _lookup(host: str) -> list[Address]:
    try:
        # Bytes: of a str Python would first make an IDNA name, at length.
        found = socket.getaddrinfo(host.encode("ascii"), None, type=socket.SOCK_STREAM)
    except OSError as e:
        raise NoAddress(e.strerror or type(e).__name__) from None
    return list(dict.fromkeys(address(str(sockaddr[0])) for _family, _kind, _protocol, _name, sockaddr in found))
