"""firewalld: reload, restart and panic mode, without and with the zone of `sealnet host install`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from e2e.hosts.machine import FORBIDDEN, LEASE, Machine

pytestmark = pytest.mark.tool("firewall-cmd")


@contextlib.contextmanager
def firewalld(machine: Machine, *permanent: str, zone: str = "public") -> Iterator[None]:
    """firewalld with these permanent options, and the LAN in a zone that trusts it: the control is not what is tested."""
    undo = ("rm -f /etc/firewalld/zones/public.xml /etc/firewalld/zones/trusted.xml", "firewall-cmd --set-default-zone public")
    with machine.unit("firewalld"):
        try:
            machine.run("firewall-cmd", "--set-default-zone", zone)
            machine.run("firewall-cmd", "--permanent", "--zone", "trusted", "--add-interface", "lan0")
            for option in permanent:
                machine.run("firewall-cmd", "--permanent", *option.split())
            machine.run("firewall-cmd", "--reload")
            yield
        finally:
            machine.run("firewall-cmd", "--panic-off", check=False)
            for command in undo:
                machine.run(*command.split(), check=False)


def zones(machine: Machine) -> str:
    return machine.run("firewall-cmd", "--list-all-zones").stdout


def test_the_default_zone_is_named_and_with_its_port_a_run_outlives_reload_and_restart(machine: Machine) -> None:
    with firewalld(machine):
        refused = machine.sealnet("run", *LEASE, "--", "true")
    assert refused.returncode == 125
    assert "table inet firewalld, chain filter_IN_public drops it (reject)" in refused.stderr
    assert "hint: let it in: sealnet host install --lease-port 8080 --reload" in refused.stderr

    # Port 9001 too: what shuts it is sealnet's, not the zone.
    with firewalld(machine, "--add-port 8080/tcp", f"--add-port {FORBIDDEN}/tcp", f"--add-port {FORBIDDEN}/udp"):
        before, zones_before = machine.looks(), zones(machine)
        machine.control()
        live = machine.live("default-zone")
        severed = machine.live("severed", "--network", "severed", asks=False)

        for command in ("firewall-cmd --reload", "firewall-cmd --complete-reload", "systemctl restart firewalld"):
            machine.run(*command.split())
            live.sealed()
            severed.sealed()

        machine.control()
        assert severed.events() == []
        assert zones(machine) == zones_before
        live.end()
        severed.end()
        machine.same(before)


def test_panic_mode_silences_a_run_and_its_end_brings_it_back(machine: Machine) -> None:
    with firewalld(machine, "--add-port 8080/tcp"):
        before = machine.looks()
        machine.control()
        live = machine.live("panic")

        machine.run("firewall-cmd", "--panic-on")
        live.silent()
        code, told = live.check()
        machine.run("firewall-cmd", "--panic-off")

        live.sealed()
        assert (code, told["verdict"]) != (0, "sealed"), told
        machine.control()
        live.end()
        machine.same(before)


def test_the_zone_of_host_install_holds_through_reload_restart_and_panic(machine: Machine) -> None:
    with firewalld(machine, zone="drop"), machine.undoing("sealnet host remove --reload"):
        installed = machine.sealnet("host", "install", "--lease-port", "8080", "--reload")
        assert installed.returncode == 0, installed.stderr
        before, zones_before = machine.looks(), zones(machine)
        machine.control()
        live = machine.live("zone")
        door = machine.sealnet("run", "--broker", "tcp:127.0.0.1:8080", "--", "true")

        for command in ("firewall-cmd --reload", "systemctl restart firewalld", "firewall-cmd --panic-on", "firewall-cmd --panic-off"):
            machine.run(*command.split())
            if command.endswith("panic-on"):
                live.silent()
            else:
                live.sealed()

        machine.control()
        assert zones(machine) == zones_before
        # Doors have ports of their own, which the zone lets in as well.
        assert door.returncode == 0, door.stderr
        live.end()
        machine.same(before)


def test_an_allowlist_run_in_a_trusted_zone_outlives_a_reload(machine: Machine) -> None:
    machine.in_lan_web()
    with firewalld(machine, "--zone trusted --add-interface seal+"):
        before = machine.looks()
        machine.control()
        live = machine.live("allowed", *machine.web, host="web.test:9002")

        for command in ("firewall-cmd --reload", "systemctl restart firewalld"):
            machine.run(*command.split())
            live.sealed()

        machine.control()
        live.end()
        machine.same(before)
