"""The worker's systemd units: they are valid, and take nothing from payloads that sealnet would give them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sealnet.model import syscalls

UNITS = Path(__file__).resolve().parents[1] / "scripts" / "systemd"
SERVICE = UNITS / "sealnet-worker.service"


def values(name: str) -> list[str]:
    """Of every line of the service that sets it."""
    return [word for line in SERVICE.read_text().splitlines() if line.startswith(f"{name}=") for word in line.partition("=")[2].split()]


@pytest.mark.root
@pytest.mark.tool("systemd-analyze")
@pytest.mark.parametrize("broken", [False, True])
def test_systemd_finds_no_fault_with_the_units(tmp_path: Path, broken: bool) -> None:
    for unit in UNITS.glob("sealnet-worker.*"):
        # Where the tool is not installed, its unit is no fault of the unit's.
        text = unit.read_text().replace("/usr/sbin/sealnet worker", "/bin/true")
        (tmp_path / unit.name).write_text(text.replace("WatchdogSec=30s", "WatchdogSec=soon") if broken else text)

    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(map(str, tmp_path.iterdir()))], capture_output=True, text=True, check=False
    )

    assert ("sealnet-worker" in found.stderr) == broken, found.stderr


@pytest.mark.root
@pytest.mark.tool("systemd-analyze")
def test_the_units_filter_has_nothing_that_a_payload_may_call() -> None:
    groups = [word.lstrip("~") for word in values("SystemCallFilter")]
    denied: set[str] = set()
    for group in groups:
        listed = subprocess.run(["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True).stdout
        denied |= {line.strip() for line in listed.splitlines()[1:] if line.strip() and "#" not in line}

    assert {"reboot", "init_module", "modify_ldt"} <= denied
    assert "adjtimex" in syscalls.ORDINARY
    assert denied & (syscalls.ORDINARY | set(syscalls.INSPECTED) | set(syscalls.NAMESPACES)) == set()


def test_a_restart_leaves_the_runs_alone() -> None:
    assert (values("KillMode"), values("Delegate"), values("Type")) == (["process"], ["yes"], ["notify"])
