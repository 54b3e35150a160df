"""NetworkManager, told to manage every link there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from e2e.hosts.machine import Machine

pytestmark = pytest.mark.tool("nmcli")

# Its own udev rules leave veth alone; somebody wants it otherwise.
_ALL = """[main]
plugins=keyfile
no-auto-default=
[keyfile]
unmanaged-devices=none
[device-all]
match-device=*
managed=1
"""
_RULE = 'ACTION!="remove", SUBSYSTEM=="net", ENV{NM_UNMANAGED}="0"\n'


@contextlib.contextmanager
def networkmanager(machine: Machine) -> Iterator[None]:
    with (
        machine.file("/etc/NetworkManager/conf.d/50-all.conf", _ALL),
        machine.file("/etc/udev/rules.d/90-all.rules", _RULE),
        machine.undoing("udevadm control --reload"),
    ):
        machine.run("udevadm", "control", "--reload")
        with machine.unit("NetworkManager"):
            machine.run("nm-online", "-s", "-q", "-t", "60", check=False)
            yield


def state_of(machine: Machine, link: str) -> str:
    told = machine.run("nmcli", "-t", "-f", "DEVICE,STATE", "device").stdout
    return next((line.partition(":")[2] for line in told.splitlines() if line.startswith(f"{link}:")), "")


def test_a_manager_of_everything_opens_nothing(machine: Machine) -> None:
    with networkmanager(machine):
        machine.control()
        live = machine.live("managed")

        machine.run("systemctl", "restart", "NetworkManager")
        live.still()
        code, told = live.check()

        # Whatever it has done to the link, that is what check says.
        assert (code == 0) == (told["faults"] == [] and told["inconclusive"] == []), told
        machine.control()
        live.back()
        live.end()


def test_told_to_leave_it_networkmanager_restarts_beside_a_run(machine: Machine) -> None:
    with machine.undoing("sealnet host remove --reload"), networkmanager(machine):
        installed = machine.sealnet("host", "install", "--reload")
        assert installed.returncode == 0, installed.stderr
        machine.control()
        live = machine.live("left-alone")

        for command in ("systemctl restart NetworkManager", "nmcli general reload", "systemctl restart NetworkManager"):
            machine.run(*command.split())
            live.sealed()
        live.still()

        assert state_of(machine, live.record["ifname"]) in ("unmanaged", "")
        assert state_of(machine, "lan0") not in ("unmanaged", "")
        assert live.events() == []
        assert live.refused() == []
        machine.control()
        live.end()
