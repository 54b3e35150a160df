"""sealnet on the machine itself: no throw-away host, but systemd's own services, links and firewall. `scripts/vm` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.smoke, pytest.mark.brief, pytest.mark.root]

SEALNET = str(Path(sys.executable).with_name("sealnet"))
PORT = "8080"

# Answers who asks; the payload's other half tells what it could reach.
_BROKER = "import http.server as h; h.ThreadingHTTPServer(('0.0.0.0', 8080), h.SimpleHTTPRequestHandler).serve_forever()"
_TRY = """
import json, os, socket, urllib.parse, urllib.request
broker = os.environ["SEALNET_BROKER_URL"]
told = {"broker": urllib.request.urlopen(broker, timeout=20).status}
others = {"the machine's router": ("10.0.2.2", 53), "another port": (urllib.parse.urlsplit(broker).hostname, 22)}
for name, address in others.items():
    try:
        socket.create_connection(address, timeout=5).close()
        told[name] = "open"
    except TimeoutError:
        told[name] = "silent"
    except OSError:
        told[name] = "refused"
print(json.dumps(told))
"""


def run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0 or not check, f"{argv} ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.1)


def links() -> set[str]:
    return set(os.listdir("/sys/class/net"))


def routes() -> str:
    """All of them; how long a router's word is good changes by itself."""
    return re.sub(r" expires \d+sec", "", run("ip", "route", "show", "table", "all"))


def is_clean() -> bool:
    """Whether nothing of a run is left."""
    names = Path("/run/netns")
    cgroups = [directory for directory, _, _ in os.walk("/sys/fs/cgroup") if Path(directory).parent.name == "sealnet"]
    return (
        not any(link.startswith("seal") for link in links())
        and not (names.is_dir() and any(name.startswith("sealnet-") for name in os.listdir(names)))
        and json.loads(run(SEALNET, "ls", "--json")) == []
        and not cgroups
    )


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """The host as it was, but for the gate."""
    before_routes, rules = routes(), run("ip", "rule")
    failed = run("systemctl", "--failed", "--plain", "--no-legend")
    before = links()
    yield
    wait_for(is_clean, "everything of the runs is gone")
    assert links() == before
    assert run("ip", "rule") == rules
    wait_for(lambda: routes() == before_routes, "the routes are what they were")
    assert run("systemctl", "--failed", "--plain", "--no-legend") == failed


@pytest.fixture
def broker() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-I", "-c", _BROKER], cwd="/var/empty" if Path("/var/empty").is_dir() else "/srv") as process:
        try:
            wait_for(lambda: f":{PORT}" in run("ss", "-Htln"), "the broker listens")
            yield
        finally:
            process.kill()


def test_the_machine_is_systemds_and_has_the_unified_hierarchy_alone() -> None:
    assert Path("/proc/1/comm").read_text().strip() == "systemd"
    assert run("stat", "--file-system", "--format", "%T", "/sys/fs/cgroup").strip() == "cgroup2fs"
    assert " cgroup " not in Path("/proc/self/mounts").read_text()


def test_the_host_can_seal() -> None:
    told = json.loads(run(SEALNET, "doctor", "--json"))

    assert told["can_seal"], told["probe"]
    assert not [row for row in told["rows"] if row["status"] == "fail"]


def test_the_demonstration_holds() -> None:
    assert "sealed" in run(SEALNET, "demo")


def test_a_run_in_a_service_reaches_its_broker_and_nothing_else(broker: None) -> None:
    command = (SEALNET, "run", "--lease-port", PORT, "--", sys.executable, "-I", "-c", _TRY)

    told = json.loads(run("systemd-run", "--quiet", "--wait", "--pipe", "--collect", *command))

    assert told == {"broker": 200, "the machine's router": "refused", "another port": "refused"}


def test_a_service_that_is_stopped_leaves_nothing() -> None:
    with _service("sealnet-stopped") as unit:
        run("systemctl", "stop", unit)

        wait_for(is_clean, "the stopped service's run is gone")


def test_a_service_that_is_killed_leaves_nothing_that_one_reap_does_not_take() -> None:
    with _service("sealnet-killed") as unit:
        run("systemctl", "kill", "--signal", "KILL", unit)
        wait_for(lambda: run("systemctl", "is-active", unit, check=False).strip() != "active", "the service has ended")

        run(SEALNET, "reap", "--all")

        assert is_clean()


@contextlib.contextmanager
def _service(name: str) -> Iterator[str]:
    """A service that is a live run."""
    unit = f"{name}.service"
    run("systemd-run", "--quiet", f"--unit={unit}", SEALNET, "run", "--run-id", name, "--", "sleep", "600")
    try:
        wait_for(lambda: name in run(SEALNET, "ls", "--json") and '"running"' in run(SEALNET, "ls", "--json"), "the service's run is up")
        yield unit
    finally:
        run("systemctl", "stop", unit, check=False)
        run("systemctl", "reset-failed", unit, check=False)
