"""systemd-networkd with a .network file that takes every link there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from e2e.hosts.machine import ETH0, LAN_HOST, LAN_HOST6, LEASE, Machine, wait_for

pytestmark = pytest.mark.tool("networkctl")

_DIRECTORY = "/etc/systemd/network"
_FILES = {
    f"{_DIRECTORY}/10-eth0.network": f"[Match]\nName=eth0\n[Network]\nIPv6AcceptRA=no\nAddress={ETH0}/24\nGateway=10.0.2.2\n",
    f"{_DIRECTORY}/10-lan0.network": f"[Match]\nName=lan0\n[Network]\nIPv6AcceptRA=no\nAddress={LAN_HOST}/24\nAddress={LAN_HOST6}/64\n",
    f"{_DIRECTORY}/99-all.network": (
        "[Match]\nName=*\n[Network]\nAddress=10.99.0.1/24\nDHCP=yes\nLinkLocalAddressing=yes\nIPv6AcceptRA=yes\nIPForward=yes\n"
    ),
}


@contextlib.contextmanager
def networkd(machine: Machine) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for path, text in _FILES.items():
            stack.enter_context(machine.file(path, text))
        # What it manages loses what somebody else gave it, and its own is left behind.
        stack.enter_context(
            machine.undoing(
                "ip addr del 10.99.0.1/24 dev lo",
                "ip addr flush dev eth0",
                f"ip addr add {ETH0}/24 dev eth0",
                "ip route add default via 10.0.2.2",
            )
        )
        stack.enter_context(machine.unit("systemd-networkd.socket", "systemd-networkd.service"))
        wait_for(lambda: " routable" in machine.run("networkctl", "list", "--no-pager", "lan0").stdout, what="networkd has taken lan0")
        yield


def test_a_catch_all_opens_nothing_whatever_it_takes(machine: Machine) -> None:
    """It takes the address off a link that is not its own: a new run is refused then, one that lives is put right or told broken."""
    live = machine.live("before-networkd")

    with networkd(machine):
        machine.control()
        wait_for(lambda: live.events(), what="networkd has taken the run's link")
        code, told = live.check()
        refused = machine.sealnet("run", *LEASE, "--", "true")

        assert (code == 0) == (told["faults"] == [] and told["inconclusive"] == []), told
        assert set(live.events()) <= {"address-lost", "address-added", "sysctl-changed", "ipv6-back", "route-changed", "gave-up"}
        # Unless it was over before networkd had looked.
        assert refused.returncode in (0, 125)
        assert refused.returncode == 0 or "198.18.0." in refused.stderr
        machine.control()
        assert machine.strangers() == []
    live.end()


def test_told_to_leave_it_networkd_starts_and_restarts_beside_a_run(machine: Machine) -> None:
    with machine.undoing("sealnet host remove --reload"), networkd(machine):
        installed = machine.sealnet("host", "install", "--reload")
        assert installed.returncode == 0, installed.stderr
        machine.control()
        live = machine.live("left-alone")
        ifname = live.record["ifname"]

        for command in ("systemctl restart systemd-networkd", "networkctl reload", "systemctl restart systemd-networkd"):
            machine.run(*command.split())
            live.sealed()
        live.still()

        assert "unmanaged" in machine.run("networkctl", "list", "--no-pager", ifname).stdout
        assert "198.18.0.1" in machine.run("ip", "-br", "addr", "show", "dev", ifname).stdout
        assert live.events() == []
        assert live.refused() == []
        machine.control()
        live.end()
