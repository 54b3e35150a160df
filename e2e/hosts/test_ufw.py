"""ufw, incoming denied: refused with its name, then let in as its hint says, through enable, reload and disable."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.hosts.machine import LEASE, Machine

pytestmark = pytest.mark.tool("ufw")

_RULES = Path("/etc/ufw/before.rules")
_LET_IN = "-A ufw-before-input -i seal+ -p tcp --dport 8080 -j ACCEPT"


def test_ufw_is_named_and_with_its_rule_a_run_outlives_reload_disable_and_enable(machine: Machine) -> None:
    rules = _RULES.read_text()
    with machine.undoing("ufw --force disable"):
        machine.run("ufw", "--force", "enable")
        machine.run("ufw", "allow", "in", "on", "lan0")
        refused = machine.sealnet("run", *LEASE, "--", "true")
        doctor = machine.sealnet("doctor", "--lease-port", "8085")
        with machine.file(str(_RULES), rules.replace("# End required lines\n", f"# End required lines\n{_LET_IN}\n", 1)):
            assert _LET_IN in _RULES.read_text()
            machine.run("ufw", "reload")
            before = machine.looks()
            machine.control()
            live = machine.live("ufw")

            for command in ("ufw reload", "ufw disable", "ufw --force enable", "systemctl restart ufw"):
                machine.run(*command.split())
                live.sealed()

            machine.control()
            live.end()
            machine.same(before)
    machine.run("ufw", "delete", "allow", "in", "on", "lan0", check=False)

    assert refused.returncode == 125
    assert "cannot reach the broker" in refused.stderr
    assert "chain" in refused.stderr
    assert doctor.returncode == 1
    assert _LET_IN.replace("8080", "PORT") in doctor.stdout
