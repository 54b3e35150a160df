"""A hardened machine: no user namespaces, AppArmor, strict source addresses; and sysctl.d applied anew while a run lives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from e2e.hosts.machine import Machine


@pytest.mark.tool("aa-status")
def test_a_hardened_machine_seals(machine: Machine) -> None:
    """Nothing here needs a user namespace, and nothing a loose rp_filter."""
    assert machine.run("aa-status", "--enabled", check=False).returncode == 0
    strict = {f"net__ipv4__conf__{link}__rp_filter": "1" for link in os.listdir("/proc/sys/net/ipv4/conf") if "." not in link}
    closed = {"kernel__unprivileged_userns_clone": "0", "user__max_user_namespaces": "0"}
    with machine.sysctls(**strict, **closed):
        refused = machine.run("setpriv", "--reuid=1234", "unshare", "--user", "true", check=False)
        before = machine.looks()
        machine.control()
        live = machine.live("hardened")
        doctor = machine.sealnet("doctor")
        live.still()
        live.sealed()

        assert refused.returncode != 0
        assert (doctor.returncode, live.events(), live.refused()) == (0, [], []), doctor.stdout
        machine.control()
        live.end()
        machine.same(before)


def test_sysctls_that_are_applied_anew_open_nothing(machine: Machine) -> None:
    """`sysctl --system` writes a router's settings over every link's; forwarding goes off and on again, which resets it everywhere."""
    router = "".join(
        f"net.ipv4.conf.{scope}.{name} = {value}\n"
        for scope in ("all", "default", "*")
        for name, value in (("forwarding", 1), ("rp_filter", 2), ("accept_local", 1), ("route_localnet", 1), ("accept_source_route", 1))
    )
    names = ("forwarding", "rp_filter", "accept_local", "route_localnet", "accept_source_route")
    links = [link for link in os.listdir("/proc/sys/net/ipv4/conf") if "." not in link]
    kept = {
        key: Path(f"/proc/sys/{key.replace('__', '/')}").read_text() for key in (f"net__ipv4__conf__{a}__{b}" for a in links for b in names)
    }
    with machine.sysctls(**kept), machine.file("/etc/sysctl.d/99-router.conf", router):
        machine.control()
        live = machine.live("router")

        machine.run("sysctl", "--system")
        live.until("sysctl-changed")
        live.sealed()
        machine.run("systemctl", "restart", "systemd-sysctl")
        live.sealed()
        for value in ("0", "1"):
            machine.run("sysctl", "-w", f"net.ipv4.ip_forward={value}")
        live.sealed()

        assert live.refused() == []
        machine.control()
        live.end()
