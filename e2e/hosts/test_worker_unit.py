"""The worker as a service: its units, started by its socket, and what a service goes through while runs live."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.hosts.machine import Machine, wait_for
from tests.lab import SEALNET

pytestmark = pytest.mark.root

UNITS = Path(__file__).parents[2] / "scripts" / "systemd"
SERVICE, SOCKET = "sealnet-worker.service", "sealnet-worker.socket"
_THIS_CHECKOUT = f"[Service]\nExecStart=\nExecStart={SEALNET[0]} worker\n"

# Ends with 7 once there is a file.
_PATIENT = "while ! [ -e stop ]; do sleep 0.2; done; exit 7"


class Unit:
    """The worker's units on the machine, two users that may call it and one that may not, and callers."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._said = len(self.journal())

    def pid(self) -> int:
        return int(self.machine.run("systemctl", "show", "--value", "--property", "MainPID", SERVICE).stdout)

    def state(self, unit: str = SERVICE) -> str:
        return self.machine.run("systemctl", "is-active", unit, check=False).stdout.strip()

    def started_again(self, before: int) -> None:
        """Wait until there is another worker, and it answers."""
        wait_for(lambda: self.pid() not in (0, before) and self.state() == "active", timeout_s=150, what="another worker is up")
        assert self.call("alice", "ls", "--json")[0] == 0

    def argv(self, user: str, *argv: str) -> list[str]:
        return ["runuser", "-u", user, "--", *SEALNET, *argv]

    def call(self, user: str, *argv: str) -> tuple[int, str, str]:
        done = self.machine.run(*self.argv(user, *argv), check=False, cwd=f"/home/{user}")
        return done.returncode, done.stdout, done.stderr

    def detached(self, run_id: str) -> None:
        """A run of alice's that nobody waits for."""
        stop = Path("/home/alice/stop")
        stop.unlink(missing_ok=True)
        asked = ("run", "--worker", "always", "--detach", "--run-id", run_id, "--lease-port", "8080")
        told = self.call("alice", *asked, "--", "sh", "-c", _PATIENT)
        assert told[0] == 0, told
        self.machine.wait_running(run_id)

    def ends(self, run_id: str) -> None:
        """It is alice's still, and ends as it does."""
        assert [one["run_id"] for one in json.loads(self.call("alice", "ls", "--json")[1])] == [run_id]
        assert self.call("alice", "check", run_id)[0] == 0
        Path("/home/alice/stop").touch()
        told = self.call("alice", "wait", run_id)
        assert told[0] == 7, told

    def said(self) -> str:
        """What the worker has said in this test."""
        return self.journal()[self._said :]

    def journal(self) -> str:
        return self.machine.run("journalctl", "--boot", "--no-pager", "--output", "cat", "--unit", SERVICE).stdout


@pytest.fixture
def unit(machine: Machine) -> Iterator[Unit]:
    made = Unit(machine)
    folder = Path("/etc/systemd/system")
    files = {folder / name: (UNITS / name).read_text() for name in (SERVICE, SOCKET)}
    files[folder / f"{SERVICE}.d" / "checkout.conf"] = _THIS_CHECKOUT
    for path, text in files.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    machine.run("groupadd", "--system", "--force", "sealnet")
    for user in ("alice", "mallory"):
        if machine.run("id", user, check=False).returncode:
            machine.run("useradd", "--create-home", *(("--groups", "sealnet") if user == "alice" else ()), user)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", SOCKET)
    try:
        yield made
    finally:
        for one in json.loads(machine.sealnet("ls", "--json").stdout):
            machine.sealnet("reap", one["run_id"])
        machine.run("systemctl", "stop", SOCKET, SERVICE, check=False)
        for path in files:
            path.unlink()
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "reset-failed", SERVICE, check=False)
        Path("/run/sealnet/worker.sock").unlink(missing_ok=True)


def test_the_first_caller_starts_it(unit: Unit) -> None:
    assert (unit.state(SOCKET), unit.state()) == ("active", "inactive")
    script = "id -un; exec curl -fsS --max-time 60 $SEALNET_BROKER_URL/hello"

    status, said, errors = unit.call("alice", "run", "--worker", "always", "--lease-port", "8080", "--", "sh", "-c", script)

    assert (status, said.splitlines()[0]) == (0, "alice"), errors
    assert unit.state() == "active"
    assert "event=ready" in unit.said()
    # The socket's mode is what keeps others out.
    status, _, errors = unit.call("mallory", "run", "--worker", "always", "--", "true")
    assert (status, "Permission denied" in errors) == (125, True), errors


def test_its_hardening_is_what_the_unit_says(unit: Unit) -> None:
    assert unit.call("alice", "doctor")[0] == 0
    status = Path(f"/proc/{unit.pid()}/status").read_text()

    assert "NoNewPrivs:\t1" in status
    # Outside of the unit root has them all.
    bounding = [int(re.findall(r"CapBnd:\s+(\w+)", text)[0], 16) for text in (status, Path("/proc/self/status").read_text())]
    for capability in (16, 17, 22, 25, 34):  # SYS_MODULE, SYS_RAWIO, SYS_BOOT, SYS_TIME, SYSLOG
        assert not bounding[0] >> capability & 1
        assert bounding[1] >> capability & 1
    told = unit.machine.run("systemd-analyze", "security", "--no-pager", SERVICE).stdout
    exposure = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", told)
    results = os.environ.get("SEALNET_VM_RESULTS")
    if results:
        Path(results, "security").write_text(told)
    assert float(exposure[0]) < 9.0


def _restart(unit: Unit) -> None:
    unit.machine.run("systemctl", "restart", SERVICE)


def _stop(unit: Unit) -> None:
    unit.machine.run("systemctl", "stop", SERVICE)


def _kill(unit: Unit) -> None:
    os.kill(unit.pid(), signal.SIGKILL)


def _halt(unit: Unit) -> None:
    os.kill(unit.pid(), signal.SIGSTOP)


def _out_of_memory(unit: Unit) -> None:
    # The kernel ends the process that is worth most to it: the system request `f` is its own way of being asked to.
    Path(f"/proc/{unit.pid()}/oom_score_adj").write_text("1000")
    Path("/proc/sysrq-trigger").write_text("f")


@pytest.mark.parametrize("deed", [_restart, _stop, _kill, _halt, _out_of_memory])
def test_runs_outlive_their_worker(unit: Unit, deed: Callable[[Unit], Any]) -> None:
    unit.detached("kept")
    live = unit.machine.live("attended")
    before = unit.pid()

    deed(unit)
    unit.started_again(before)

    live.sealed()
    assert "event=adopted" in unit.said()
    unit.ends("kept")
    live.end()
    # What it was answered all the while: the lease does not go with who renews it.
    assert live.refused() == []


def test_runs_live_while_there_is_no_worker_and_none_comes(unit: Unit) -> None:
    unit.detached("alone")
    before = unit.pid()

    unit.machine.run("systemctl", "stop", SOCKET, SERVICE)
    assert (unit.state(SOCKET), unit.state()) == ("inactive", "inactive")
    # All of the seal stands, and it says what does not.
    told = json.loads(unit.machine.sealnet("check", "--json", "alone").stdout)
    assert ["no worker sees to it" in fault for fault in told["faults"]] == [True], told
    assert {one["ok"] for one in told["checks"]} == {True}, told
    # Root's own run needs no worker.
    assert unit.machine.sealnet("run", "--", "true").returncode == 0
    unit.machine.run("systemctl", "start", SOCKET)

    # Who asks for it starts it.
    assert unit.call("alice", "ls")[0] == 0
    unit.started_again(before)
    unit.ends("alone")


def test_a_reload_reads_the_limits_again(unit: Unit) -> None:
    unit.detached("first")
    before = unit.pid()
    config = Path("/etc/sealnet/config.toml")

    with unit.machine.file(str(config), "max_runs_per_user = 1\n"):
        unit.machine.run("systemctl", "reload", SERVICE)
        wait_for(lambda: "event=reloaded" in unit.said(), what="it has read its configuration")
        refused = unit.call("alice", "run", "--worker", "always", "--", "true")
        assert refused[0] == 125, refused
        assert unit.pid() == before
    unit.machine.run("systemctl", "reload", SERVICE)
    wait_for(lambda: unit.said().count("event=reloaded") >= 2, what="and again")
    assert unit.call("alice", "run", "--worker", "always", "--", "true")[0] == 0
    unit.ends("first")


def test_a_run_that_is_out_of_memory_is_the_only_one_that_ends(unit: Unit) -> None:
    live = unit.machine.live("beside")
    before = unit.pid()
    unit.machine.run("systemctl", "set-property", "--runtime", SERVICE, "MemoryMax=384M", "MemorySwapMax=0")
    hungry = "whole = [b'x' * (1 << 20) for _ in range(1 << 10)]"

    told = unit.call("alice", "run", "--worker", "always", "--", "/usr/bin/python3", "-c", hungry)

    unit.machine.run("systemctl", "set-property", "--runtime", SERVICE, "MemoryMax=infinity")
    assert told[0] == 137, told
    assert unit.pid() == before
    live.sealed()
    live.end()


@pytest.mark.tool("varlinkctl")
def test_systemds_own_client_calls_it(unit: Unit) -> None:
    unit.detached("listed")
    at = "/run/sealnet/worker.sock"

    told = unit.machine.run("varlinkctl", "introspect", at, "io.sealnet.Worker").stdout
    assert "method Run(" in told
    listed = json.loads(unit.machine.run("varlinkctl", "--json=short", "call", at, "io.sealnet.Worker.List", "{}").stdout)
    assert [one["run_id"] for one in listed["runs"]] == ["listed"]
    wrong = unit.machine.run("varlinkctl", "call", at, "io.sealnet.Worker.Inspect", '{"run_id": "nobody"}', check=False)
    assert wrong.returncode != 0
    unit.ends("listed")
