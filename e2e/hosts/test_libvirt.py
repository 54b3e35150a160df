"""libvirt's default network: a bridge, dnsmasq, NAT; its restart and the network's own end and beginning."""

from __future__ import annotations

import pytest

from e2e.hosts.machine import FORBIDDEN, Machine, wait_for

pytestmark = pytest.mark.tool("virsh")

_BRIDGE = "192.168.122.1"


def test_a_run_outlives_libvirtd_and_its_default_network(machine: Machine) -> None:
    virsh = ("virsh", "--connect", "qemu:///system")
    with machine.undoing("systemctl stop libvirtd libvirtd.socket libvirtd-ro.socket libvirtd-admin.socket"), machine.unit("libvirtd"):
        wait_for(lambda: machine.run(*virsh, "net-list", "--all", check=False).returncode == 0, timeout_s=60, what="libvirtd answers")
        machine.run(*virsh, "net-start", "default", check=False)
        with machine.undoing(f"{' '.join(virsh)} net-destroy default"):
            wait_for(lambda: _BRIDGE in machine.run("ip", "-4", "addr").stdout, timeout_s=30, what="virbr0 is up")
            machine.control(("host", "tcp", _BRIDGE))
            before = machine.looks()
            live = machine.live("libvirt", targets=tuple((kind, _BRIDGE, port) for kind in ("tcp", "udp") for port in (53, FORBIDDEN)))

            machine.run("systemctl", "restart", "libvirtd")
            live.sealed()
            machine.run(*virsh, "net-destroy", "default")
            live.sealed()
            machine.run(*virsh, "net-start", "default")
            live.sealed()

            assert live.refused() == []
            machine.control(("host", "tcp", _BRIDGE))
            live.end()
            machine.same(before)
