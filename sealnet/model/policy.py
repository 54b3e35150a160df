"""Which confinement a request asks for, and which requests contradict themselves."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from sealnet.errors import UsageError

# sun_path (unix(7)) with its NUL.
_UNIX_PATH = 107
_HOST = re.compile(r"[A-Za-z0-9.:_-]{1,253}", re.ASCII)


class Confinement(enum.StrEnum):
    """From most to least confined."""

    SEVERED = "severed"
    SEALED = "sealed"
    ALLOWLIST = "allowlist"
    OPEN = "open"


_RANK = {confinement: rank for rank, confinement in enumerate(Confinement)}


def least_confined(confinements: Iterable[Confinement]) -> Confinement:
    """A set of runs is as confined as its least confined member. An empty set is severed: nothing ran."""
    return max(confinements, key=_RANK.__getitem__, default=Confinement.SEVERED)


def port(value: int, option: str) -> int:
    # True is an int to Python, and 8080.5 is none to nft.
    if type(value) is not int or not 1 <= value <= 65535:
        raise UsageError(f"cannot use {option} {value}: a TCP port is 1 to 65535")
    return value


@dataclass(frozen=True, slots=True)
class Target:
    """Where a relay leads: a TCP port, or the pathname of a Unix socket."""

    host: str | None = None
    port: int | None = None
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in str(self.host) else f"tcp:{self.host}:{self.port}"


def target(text: str) -> Target:
    """`tcp:HOST:PORT` (an IPv6 address in brackets) or `unix:/PATH`; UsageError for anything else."""
    kind, _, rest = text.partition(":")
    refused = f"cannot use --broker {text!r}"
    if kind == "unix" and rest.startswith("/") and "\0" not in rest and len(rest) <= _UNIX_PATH:
        return Target(path=rest)
    if kind == "unix":
        raise UsageError(f"{refused}: the path of a Unix socket is absolute, and at most {_UNIX_PATH} bytes", hint="unix:/run/broker.sock")
    host, _, number = rest.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_host = _HOST.fullmatch(bare) is not None and not (":" in bare and bare == host)
    if kind != "tcp" or not is_host or not number.isascii() or not number.isdigit() or len(number) > 5:
        raise UsageError(f"{refused}: it is neither tcp:HOST:PORT nor unix:/PATH", hint="--broker tcp:127.0.0.1:8080")
    return Target(host=bare, port=port(int(number), f"--broker {text!r}, port"))


def derive(
    *,
    network: str | None = None,
    lease_port: int | None = None,
    broker: str | None = None,
    allow: Iterable[str] = (),
    broker_env: Iterable[str] = (),
    allow_unenforced_egress: bool = False,
) -> Confinement:
    """The confinement a request means. Raises UsageError where two options contradict each other; nothing is ever ignored."""
    hosts = list(allow)
    if lease_port is not None and broker is not None:
        raise UsageError("cannot use --lease-port with --broker: a run has one broker", hint="give one of the two")
    has_broker = lease_port is not None or broker is not None
    if hosts:
        derived = Confinement.ALLOWLIST
    elif has_broker:
        derived = Confinement.SEALED
    else:
        derived = Confinement.SEVERED

    if network is None:
        if allow_unenforced_egress:
            raise UsageError("cannot use --allow-unenforced-egress alone: it only permits --network open", hint="add --network open")
        asked = derived
    else:
        try:
            asked = Confinement(network)
        except ValueError:
            words = ", ".join(Confinement)
            raise UsageError(f"cannot use --network {network}: it is not one of {words}") from None

    if asked is Confinement.OPEN:
        if has_broker or hosts:
            raise UsageError("cannot use --network open with a broker or --allow: an open run has the host's whole network")
        if not allow_unenforced_egress:
            raise UsageError(
                "cannot use --network open: it enforces nothing",
                hint="add --allow-unenforced-egress if that is meant; the record will say so",
            )
    elif allow_unenforced_egress:
        raise UsageError(f"cannot use --allow-unenforced-egress with --network {asked}: it only permits --network open")
    elif asked is not derived:
        raise UsageError(_contradiction(asked, derived))
    if any(True for _ in broker_env) and not has_broker:
        raise UsageError("cannot use --broker-env: the run has no broker", hint="add --lease-port PORT")
    return asked


def _contradiction(asked: Confinement, derived: Confinement) -> str:
    needs = {
        Confinement.SEVERED: "nothing is reachable in a severed run, so it takes neither a broker nor --allow",
        Confinement.SEALED: "a sealed run has a broker (--lease-port PORT) and no --allow",
        Confinement.ALLOWLIST: "an allowlist run needs at least one --allow HOST",
    }
    return f"cannot use --network {asked} here: the other options make the run {derived}; {needs[asked]}"
