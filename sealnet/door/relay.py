"""A relay: what comes in at the lease goes to one target, a TCP address or a Unix socket, and back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from ipaddress import ip_address

from sealnet.door.dial import DIAL_S, DialFailed, dial
from sealnet.door.ready import Ready
from sealnet.door.resolve import NoAddress, Resolver
from sealnet.door.served import Connection, Served
from sealnet.model.destination import Address

Dialler = Callable[[str], "asyncio.Future[socket.socket]"]


class Relay(Served):
    """`target` is None for a Unix socket: the privileged side opens that as the caller of the run."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        ready: Ready,
        run_id: str,
        sandbox: str,
        listener: socket.socket,
        target: tuple[str, int] | None,
        open_unix: Dialler,
    ) -> None:
        super().__init__(loop, ready, run_id, sandbox, listener, _Relayed)
        self._target = target
        self._open_unix = open_unix
        self._resolver = Resolver(loop)

    @property
    def is_unix(self) -> bool:
        return self._target is None

    async def open(self) -> socket.socket:
        """Raises OSError, DialFailed or NoAddress."""
        async with asyncio.timeout(DIAL_S):
            if self._target is None:
                return await self._open_unix(self.run_id)
            host, port = self._target
            server, _ = await dial(self.loop, await self._addresses(host), port)
            return server

    async def _addresses(self, host: str) -> list[Address]:
        try:
            return [ip_address(host)]
        except ValueError:
            return await self._resolver.lookup(host)

    async def preflight(self) -> list[tuple[str, str]]:
        try:
            (await self.open()).close()
        except (OSError, DialFailed, NoAddress) as e:
            where = "its Unix socket" if self._target is None else "tcp:{}:{}".format(*self._target)
            return [(f"the broker at {where}", str(e) or "no answer in time")]
        return []

    def stop(self) -> dict[str, object]:
        told = super().stop()
        self._resolver.close()
        return told


class _Relayed(Connection):
    served: Relay

    def accepted(self) -> None:
        # Its client need not speak first.
        self._task = self.loop.create_task(self._whole())

    async def serve(self) -> bool:
        try:
            server = await self.served.open()
        except (OSError, DialFailed, NoAddress):
            # As if the target itself had refused. TimeoutError is an OSError.
            self.is_reset = True
            return False
        self.connect(server).start(is_shared=self.served.is_unix)
        return False
