"""The demonstration: a broker, a sealed payload, and a score of the escape kit's ways out."""

from __future__ import annotations

from dataclasses import dataclass

from sealnet.attack.kit import Kit
from sealnet.kernel import process
from sealnet.model.attack import OK, Answer, Verdict
from sealnet.model.config import Config
from sealnet.records import State

# What a newcomer would try first. A route wants a link that is up, so the one comes with the other.
SHOWN = frozenset(
    "gateway-tcp gateway-udp loopback host-address ipv6-host-end peer-broker internet-tcp internet-ipv6 internet-udp metadata name "
    "raw-socket packet-socket vsock-socket unix-run unix-shown unix-abstract set-link add-route userns-unshare".split()
)


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was tried. `control` is the observation that makes a refusal count."""

    tried: str
    got: str
    ms: float
    control: str
    ok: bool


def demonstrate(*, state: State, config: Config, user: str, lease_port: int | None = None) -> tuple[list[Row], float]:
    """Run the demonstration on this host; its rows, and how many ms the seal took, from the claim to the held payload."""
    report = Kit(state, config, process.user(user), only=SHOWN, lease_port=lease_port).attack()
    broker = report.broker or Answer("the payload did not get so far", "", 0.0)
    rows = [Row(f"the broker, {report.broker_url}", broker.got, broker.ms, "", broker.code == OK)]
    rows += [
        Row(row.tried, row.found, row.ms, row.oracle, row.verdict is Verdict.BLOCKED)
        for row in report.rows
        if row.verdict is not Verdict.NOT_APPLICABLE
    ]
    return rows, report.seal_ms
