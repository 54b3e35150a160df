"""One call that waits for its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sealnet.errors import SealnetError
from sealnet.model import varlink
from sealnet.model.calling import INTERFACE, Peer
from sealnet.model.varlink import Call
from sealnet.worker.connection import Connection
from sealnet.worker.log import log
from sealnet.worker.metrics import kind_of

SERVICE = "org.varlink.service"


@dataclass(frozen=True, slots=True)
class Asked:
    """A call and where it came from. Whatever is told raises Gone where nobody hears it any more."""

    connection: Connection
    call: Call

    @property
    def peer(self) -> Peer:
        return self.connection.peer

    @property
    def parameters(self) -> dict[str, Any]:
        return self.call.parameters

    async def tell(self, parameters: Mapping[str, Any], *, continues: bool = False) -> None:
        if not self.call.oneway:
            await self.connection.send(varlink.render_reply(parameters, continues=continues))

    async def refuse(self, error: str, **parameters: str) -> None:
        """By an error of the protocol's own."""
        if not self.call.oneway:
            await self.connection.send(varlink.render_error(f"{SERVICE}.{error}", parameters))

    async def fail(self, error: SealnetError) -> None:
        """By an error of ours."""
        kind = kind_of(error)
        log("info", "refused", method=self.call.method.rpartition(".")[2], uid=self.peer.uid, kind=kind, reason=error.message)
        if not self.call.oneway:
            told = {
                "kind": kind,
                "message": error.message,
                "hint": error.hint,
                "exit_status": error.exit_status,
                "notes": list(getattr(error, "__notes__", [])),
            }
            await self.connection.send(varlink.render_error(f"{INTERFACE}.Failed", told))
