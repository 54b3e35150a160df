"""What a reboot leaves of runs, of the worker and of the gate: the machine goes down with all of them alive, and comes up with none."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from e2e.hosts.machine import Machine
from e2e.hosts.test_worker_unit import SOCKET, Unit, unit

__all__ = ["unit"]

# scripts/vm run --reboots says so; without it a reboot is the machine's end.
MAY = "SEALNET_VM_REBOOTS"
# On the disk, which a reboot keeps.
BEFORE = Path("/var/lib/sealnet-before")

pytestmark = [pytest.mark.root, pytest.mark.skipif(MAY not in os.environ, reason="needs scripts/vm run --reboots")]


def traces(machine: Machine) -> list[str]:
    """Whatever has the name of a run, or of sealnet, but its files on the disk."""
    found = machine.things_left_over()
    # systemd's and udev's are of the units, and of the port that scripts/vm hears the machine by.
    found += [str(path) for path in Path("/run").rglob("*sealnet*") if not {"systemd", "udev"} & set(path.parts)]
    found += [str(path) for top in ("/var/lib", "/var/tmp", "/dev/shm", "/etc") for path in Path(top).rglob("*kept-run*")]
    return found + (["the gate"] if machine.gate() else [])


def began(machine: Machine, name: str) -> int:
    return int(machine.run("systemctl", "show", "--value", "--property", "InactiveExitTimestampMonotonic", name).stdout)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def test_a_reboot_leaves_a_clean_slate(unit: Unit) -> None:
    machine = unit.machine
    if not BEFORE.exists():
        unit.detached("kept-run")
        live = machine.live("kept-run-too", "--worker", "never", "--lease-port", "8080")
        doored = machine.live("kept-run-door", "--worker", "never", "--broker", "tcp:127.0.0.1:8080")
        assert [one.check()[0] for one in (live, doored)] == [0, 0]
        machine.run("systemctl", "enable", SOCKET)
        found = traces(machine)
        assert len(found) > 5, found
        BEFORE.write_text(json.dumps({"boot": boot_id(), "found": found}))
        os.sync()
        subprocess.run(("systemctl", "--no-block", "reboot"), check=True)
        time.sleep(600)
    before = json.loads(BEFORE.read_text())
    assert before["boot"] != boot_id()

    # Enabled, the socket was back before this test began, and its directory with it: nothing else is.
    assert began(machine, SOCKET) < began(machine, "sealnet-job.service")
    left = [trace for trace in traces(machine) if trace not in {"/run/sealnet", "/run/sealnet/worker.sock"}]
    assert left == [], f"before it was {before['found']}"
    assert json.loads(machine.sealnet("ls", "--json").stdout) == []
    unit.detached("after")
    unit.ends("after")
