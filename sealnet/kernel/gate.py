"""The host's side of every seal: the one static table that knows the leases, put up before the first link, put back when it is lost."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from ipaddress import IPv4Address
from pathlib import Path

from sealnet.errors import CannotSeal, KernelRefused
from sealnet.kernel import nfnetlink
from sealnet.kernel.locks import locked
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.netns import Inside
from sealnet.kernel.nft import Nft
from sealnet.model import ruleset
from sealnet.model.plan import Seal

_NAME = f"table {ruleset.FAMILY} {ruleset.TABLE}"
_LEASES = f"{ruleset.FAMILY} {ruleset.TABLE} leases"
_DENIED = f"{ruleset.FAMILY} {ruleset.TABLE} denied"


class Gate:
    """The gate of the calling thread's network namespace. `directory` keeps what it read back as when it was put up."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept = directory / "gate"
        self._nft: Nft | None = None
        self._kernel: Netlink | None = None

    @property
    def nft(self) -> Nft:
        if self._nft is None:
            self._nft = Nft()
        return self._nft

    def close(self) -> None:
        """Let libnftables go, and its socket with it: whoever still refers to us may do so until the garbage is collected."""
        self._nft = None
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def add(self) -> str:
        """Make sure that the gate stands as sealnet puts it up; the SHA-256 of its rules as the kernel holds them.

        What it must read back as is kept since it was put up; where that is missing or differs, a gate put up in a namespace of its own
        tells. One that somebody has changed is put up anew when no lease stands in it; else the run is refused: others would be cut off.
        """
        with locked(self._directory / "gate.lock"):
            seen = nfnetlink.see_table(self._netfilter, ruleset.TABLE)
            if seen is not None and not self._differs(seen):
                return seen.sha256
            if seen is not None:
                with Inside.new("sealnet-gate") as scratch:
                    expected = scratch.call(_put_up_here)
                if seen == expected:
                    self._kept.write_text(seen.sha256 + "\n")
                    return seen.sha256
                if nfnetlink.set_mentions(self._netfilter, ruleset.TABLE, "leases", b""):
                    raise CannotSeal(
                        f"cannot use the gate: {_NAME} has been changed by somebody, and leases of live runs stand in it",
                        hint=f"when no run is alive (sealnet ls): nft delete {_NAME}",
                    )
            seen = _put_up(self.nft, self._netfilter)
            self._kept.write_text(seen.sha256 + "\n")
            return seen.sha256

    def _differs(self, seen: nfnetlink.Table) -> bool:
        return not self._kept.exists() or self._kept.read_text().strip() != seen.sha256

    def difference(self) -> str | None:
        """What is wrong with the gate, or None."""
        return self.see()[0]

    def see(self) -> tuple[str | None, str]:
        """What is wrong with the gate, or None; and the SHA-256 of its rules as the kernel holds them, empty where it is gone."""
        seen = nfnetlink.see_table(self._netfilter, ruleset.TABLE)
        if seen is None:
            return f"the gate is gone ({_NAME})", ""
        return f"the gate has been changed ({_NAME})" if self._differs(seen) else None, seen.sha256

    def changed(self) -> str | None:
        """What is wrong with a gate that stands, when that is known; None also where there is none, or nobody put it up from here."""
        return self.difference() if self._kept.exists() and nfnetlink.see_table(self._netfilter, ruleset.TABLE) is not None else None

    def grant(self, seal: Seal, *, ttl_s: int) -> bool:
        """Grant or refresh the run's leases; whether the gate had to be put back first (somebody's `nft flush ruleset`)."""
        if seal.sandbox is None or seal.gateway is None:
            return False
        text, what = _granted(seal, ttl_s), f"grant the lease of run {seal.run_id}"
        try:
            self.nft.apply(text, what)
        except KernelRefused as error:
            if error.errno != errno.ENOENT:
                raise
            self.add()
            self.nft.apply(text, what)
            return True
        return False

    def grant_all(self, wanted: Sequence[tuple[Seal, int]]) -> None:
        """The same for many runs, each with its ttl in seconds, in one transaction. Raises KernelRefused: none was."""
        self.nft.apply("".join(_granted(seal, ttl_s) for seal, ttl_s in wanted), f"grant the leases of {len(wanted)} runs")

    def restore(self, *, ttl_s: int) -> None:
        """Put the gate back where it is gone or has been changed, the leases that still stand in it too, in one transaction."""
        with locked(self._directory / "gate.lock"):
            seen = nfnetlink.see_table(self._netfilter, ruleset.TABLE)
            if seen is not None and not self._differs(seen):
                return
            leases = [] if seen is None else self.leases()
            granted = "".join(ruleset.render_lease(name, sandbox, gateway, port, ttl_s=ttl_s) for name, sandbox, gateway, port in leases)
            self._kept.write_text(_put_up(self.nft, self._netfilter, granted).sha256 + "\n")

    def has(self, seal: Seal) -> bool:
        """Asked of the kernel directly, by key: libnftables would read all leases before it asks (6 ms at 1,000)."""
        if seal.sandbox is None or seal.gateway is None:
            return False
        keys = [ruleset.lease_key(seal.ifname, seal.sandbox, seal.gateway, port) for port in seal.ports]
        return all(self._holds("leases", key) for key in keys)

    def _holds(self, set_name: str, key: bytes) -> bool:
        return nfnetlink.has_element(self._netfilter, ruleset.TABLE, set_name, key)

    @property
    def _netfilter(self) -> Netlink:
        if self._kernel is None:
            self._kernel = nfnetlink.connect()
        return self._kernel

    def guards(self, seal: Seal) -> bool:
        """Whether the gate knows the run's gateway, so that no other link leads to it."""
        return seal.gateway is not None and self._holds("gateways", seal.gateway.packed)

    def leases(self) -> list[tuple[str, IPv4Address, IPv4Address, int]]:
        """(ifname, sandbox, gateway, port) of every lease there is."""
        keys = [entry["elem"]["val"]["concat"] for entry in self.nft.elements(_LEASES, "list the leases")]
        return [(key[0], IPv4Address(key[1]), IPv4Address(key[2]), int(key[3])) for key in keys]

    def sandbox_of(self, ifname: str) -> IPv4Address | None:
        """The sandbox address that a lease of the link names."""
        if not self._mentions("leases", ifname):
            return None
        return next((sandbox for name, sandbox, _gateway, _port in self.leases() if name == ifname), None)

    def forget(self, seal: Seal) -> None:
        """Remove every lease of the run's link, and what keeps other links from its gateway. Succeeds if there is none, or no gate."""
        if seal.sandbox is not None and seal.gateway is not None:
            keys = [(seal.ifname, seal.sandbox, seal.gateway, port) for port in seal.ports]
        elif self._mentions("leases", seal.ifname):
            keys = [key for key in self.leases() if key[0] == seal.ifname]
        else:
            keys = []
        if not keys:
            return
        try:
            self.nft.apply("".join(ruleset.render_no_lease(*key) for key in keys), f"remove the lease of link {seal.ifname}")
        except KernelRefused as error:
            if error.errno != errno.ENOENT:
                raise
            # There is no gate; or one that somebody has changed, without one of the sets, and with the lease in the other.
            for key in keys:
                self._delete(f"{_LEASES} {{ {ruleset.lease_element(*key)} }}", seal.ifname)

    def forget_all(self, seals: Sequence[Seal]) -> None:
        """The same for many runs whose sandbox is known, in one transaction: the kernel has one grace period for it.

        Raises KernelRefused, where a gate or something of it is missing as well: none was.
        """
        self.nft.apply("".join(map(_forgotten, seals)), f"remove the leases of {len(seals)} links")

    def forget_denied(self, ifname: str) -> None:
        """Remove what was counted of a link. That comes after the link itself: its last packets are counted when the lease is gone.

        Looking comes before deleting: nf_tables makes the next request after a deletion wait for a grace period of RCU (10 ms).
        """
        if self._mentions("denied", ifname):
            for address, protocol, port, _packets in self.denied(ifname):
                self._delete(f'{_DENIED} {{ "{ifname}" . {address} . {protocol} . {port} }}', ifname)

    def withdraw(self, seal: Seal, ports: Sequence[int]) -> None:
        """Remove the leases of these ports; the run keeps its others. Succeeds if there is none, or no gate."""
        for port in ports:
            key = ruleset.lease_element(seal.ifname, seal.sandbox, seal.gateway, port)
            self._delete(f"{_LEASES} {{ {key} }}", seal.ifname)

    def _mentions(self, set_name: str, ifname: str) -> bool:
        """Asked of the kernel directly, for libnftables would list every set of the table."""
        return nfnetlink.set_mentions(self._netfilter, ruleset.TABLE, set_name, ifname.encode() + b"\0")

    def _delete(self, element: str, ifname: str) -> None:
        try:
            self.nft.apply(f"delete element {element}", f"remove an element of link {ifname}")
        except KernelRefused as error:
            if error.errno != errno.ENOENT:
                raise

    def denied(self, ifname: str) -> list[tuple[str, str, int, int]]:
        """(destination, protocol, port, packets) of what passed the inside filter and the gate dropped: none, while the filter stands."""
        found = []
        for entry in self.nft.elements(_DENIED, "list what was denied"):
            element = entry["elem"]
            key = element["val"]["concat"]
            if key[0] == ifname:
                found.append((str(key[1]), str(key[2]), int(key[3]), int(element.get("counter", {}).get("packets", 0))))
        return found


def _granted(seal: Seal, ttl_s: int) -> str:
    if seal.sandbox is None or seal.gateway is None:
        return ""
    return "".join(ruleset.render_lease(seal.ifname, seal.sandbox, seal.gateway, port, ttl_s=ttl_s) for port in seal.ports)


def _forgotten(seal: Seal) -> str:
    if seal.sandbox is None or seal.gateway is None:
        return ""
    return "".join(ruleset.render_no_lease(seal.ifname, seal.sandbox, seal.gateway, port) for port in seal.ports)


def _put_up_here() -> nfnetlink.Table:
    with nfnetlink.connect() as nl:
        return _put_up(Nft(), nl)


def _put_up(nft: Nft, nl: Netlink, leases: str = "") -> nfnetlink.Table:
    """Load the gate in the namespace of both, and what the kernel then tells of it."""
    nft.apply(ruleset.render_gate() + leases, f"add the gate ({_NAME})")
    seen = nfnetlink.see_table(nl, ruleset.TABLE)
    if seen is None or tuple(chain[:4] for chain in seen.chains) != ruleset.GATE_CHAINS:
        raise CannotSeal(f"cannot add the gate: {_NAME} does not read back as it was written")
    return seen
