"""The receipt as the tool writes it, and many of them as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import sealnet
from tests.lab import SEALNET, Host

SCHEMA = json.loads((Path(__file__).parents[1] / "docs/receipt.schema.json").read_text())
CONTRACT = {
    "run_id", "started", "confinement", "verdict", "wording", "network_severed", "egress_sealed", "egress_enforced", "gateway", "sandbox",
    "lease_ports", "subnet", "link", "netns_inode", "checks", "rulesets", "versions",
}  # fmt: skip


def receipt_of(host: Host, *options: str, argv: tuple[str, ...] = ("true",), status: int = 0) -> dict[str, Any]:
    path = host.directory / "receipt.json"
    path.unlink(missing_ok=True)
    done = host.sealnet("run", "--receipt", str(path), *options, "--", *argv, cwd="/")
    assert done.returncode == status, done.stderr
    told: dict[str, Any] = json.loads(path.read_text())
    jsonschema.validate(told, SCHEMA)
    return told


def test_each_confinement_has_its_receipt(host: Host) -> None:
    host.broker()
    severed = receipt_of(host)
    sealed = receipt_of(host, "--lease-port", "8080")
    opened = receipt_of(host, "--network", "open", "--allow-unenforced-egress")

    claims = ("network_severed", "egress_sealed", "egress_enforced")
    assert [[told[name] for name in ("confinement", "verdict", *claims)] for told in (severed, sealed, opened)] == [
        ["severed", "severed", True, True, True],
        ["sealed", "sealed", False, True, True],
        ["open", "open", False, False, False],
    ]
    assert severed["wording"] == "network: off - severed"
    assert sealed["wording"] == f"network: off - egress sealed to the run's broker at {sealed['gateway']}:8080"
    assert opened["wording"] == "network: on - egress is not enforced"
    assert sealed.keys() >= CONTRACT
    assert (severed["link"], severed["subnet"], opened["link"], opened["checks"]) == (None, None, None, [])
    assert sealed["link"]["ifname"].startswith("seal")
    assert sealed["rulesets"].keys() == {"gate", "inside"}


def test_the_payload_cannot_have_started_when_it_is_written(host: Host) -> None:
    """The payload finds it complete at its very start."""
    host.directory.chmod(0o755)
    path = host.directory / "receipt.json"

    done = host.sealnet("run", "--receipt", str(path), "--ro-bind", str(host.directory), "--", "cat", str(path), cwd="/")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(path.read_text())


def test_a_refused_run_leaves_a_receipt_that_claims_nothing(host: Host) -> None:
    told = receipt_of(host, "--lease-port", "8080", status=125)

    assert told["verdict"] == "broken"
    assert told["reason"].startswith("cannot reach the broker")
    assert not told["egress_enforced"]


def test_a_run_that_was_severed_instead_says_so(host: Host) -> None:
    # Nothing of the pool is free.
    host.run("ip", "route", "add", "198.18.0.0/15", "dev", "lan0")
    host.run("ip", "route", "add", "10.0.0.0/8", "dev", "lan0")
    host.settled()
    host.broker()

    told = receipt_of(host, "--lease-port", "8080", "--fallback", "sever")

    assert (told["confinement"], told["asked"], told["verdict"]) == ("severed", "sealed", "severed")
    assert "198.18.0.0/15" in told["why_severed"]
    assert told["wording"] == "network: off - severed"
    declared = receipt_of(host, "--allow", "allowed.test", "--fallback", "sever")
    assert (declared["confinement"], declared["asked"], declared["verdict"]) == ("severed", "allowlist", "severed")


def test_a_planted_link_is_not_followed(host: Host) -> None:
    """An earlier payload has the directory; root writes there."""
    victim = host.directory / "victim"
    victim.write_text("mine")
    (host.directory / "receipt.json").symlink_to(victim)
    done = host.sealnet("run", "--receipt", str(host.directory / "receipt.json"), "--", "true", cwd="/")

    assert done.returncode == 0, done.stderr
    assert victim.read_text() == "mine"
    assert json.loads((host.directory / "receipt.json").read_text())["verdict"] == "severed"

    (host.directory / "dir").symlink_to("/etc")
    refused = host.sealnet("run", "--receipt", str(host.directory / "dir/x.json"), "--", "true", cwd="/")
    assert refused.returncode == 2
    assert "it is a symbolic link, and a payload may have made it" in refused.stderr
    assert not os.path.exists("/etc/x.json")


def test_all_runs_are_as_confined_as_the_least_of_them(host: Host) -> None:
    host.broker()

    def together() -> dict[str, Any]:
        told = json.loads(host.sealnet("inspect", "--all", "--json").stdout)
        assert sealnet.fold(shown["receipt"] for shown in told["runs"]).to_json() == told["fold"]
        return told["fold"]

    assert together()["confinement"] == "severed"
    runs = [host.spawn_run("a-severed", "sleep", "30")]
    assert (together()["confinement"], together()["network_severed"]) == ("severed", True)
    runs.append(host.spawn_run("b-sealed", "sleep", "30", options=("--lease-port", "8080")))
    folded = together()
    assert (folded["confinement"], folded["verdict"], folded["least"]) == ("sealed", "sealed", "b-sealed")
    assert (folded["network_severed"], folded["egress_sealed"]) == (False, True)
    runs.append(host.spawn_run("c-open", "sleep", "30", options=("--network", "open", "--allow-unenforced-egress")))
    folded = together()
    assert (folded["confinement"], folded["egress_enforced"], folded["runs"]) == ("open", False, 3)
    shown = host.sealnet("inspect", "--all")
    assert shown.stdout.splitlines()[-1] == "together  network: on - egress is not enforced (3 runs, the least confined is c-open)"
    for run in runs:
        run.terminate()
        run.wait(60)


def test_inspect_shows_what_was_proved(host: Host) -> None:
    host.broker()
    run = host.spawn_run("one", "sleep", "30", options=("--lease-port", "8080"))

    shown = host.sealnet("inspect", "one").stdout
    told = json.loads(host.sealnet("inspect", "one", "--json").stdout)

    assert f"proof        sealed, {len(told['receipt']['checks'])} checks before it started\n" in shown
    assert f"network      at its start: off - egress sealed to the run's broker at {told['gateway']}:8080\n" in shown
    jsonschema.validate(told["receipt"], SCHEMA)
    assert host.sealnet("inspect").returncode == host.sealnet("inspect", "one", "--all").returncode == 2
    run.terminate()
    run.wait(60)


def test_the_python_api_hands_the_receipt_over(host: Host) -> None:
    host.broker()
    path = host.directory / "receipt.json"

    completed = sealnet.run(["true"], lease_port=8080, receipt=path, cwd="/")

    assert completed.receipt is not None
    assert completed.receipt.verdict == "sealed"
    assert completed.receipt.egress_sealed
    assert json.loads(path.read_text()) == completed.receipt.to_json()
    assert sealnet.fold([completed.receipt, completed.receipt.to_json()]).runs == 2


def test_many_threads_prove_at_once(host: Host) -> None:
    """In a process of its own: forks and holds of many runs are made beside each other."""
    host.broker()
    program = """
        import concurrent.futures, sealnet
        def one(n):
            done = sealnet.run(["/bin/sh", "-c", "exit 7"], lease_port=8080 if n % 2 else None, cwd="/", environ={}, user="nobody")
            return done.returncode, done.receipt.verdict
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            print(sorted(set(pool.map(one, range(24)))))
    """
    done = subprocess.run([sys.executable, "-I", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=90, check=False)

    assert done.stdout == "[(7, 'sealed'), (7, 'severed')]\n", done.stderr


@pytest.mark.parametrize("option", [("--lease-port", "8080"), ()], ids=["sealed", "severed"])
def test_check_of_a_run_in_the_background(host: Host, option: tuple[str, ...]) -> None:
    host.broker()
    run = host.spawn(*SEALNET, "run", "--run-id", "one", *option, "--", "sh", "-c", "while :; do sleep 0.01; done")
    host.wait_running("one", run)

    done = host.sealnet("check", "one", "--json")
    assert json.loads(done.stdout)["schema"] == "sealnet.check/1"

    told = json.loads(done.stdout)
    assert (done.returncode, told["faults"]) == (0, []), told["faults"]
    assert {one["kind"] for one in told["checks"]} == {"positive", "negative", "state"}
    run.terminate()
    run.wait(60)


FORGE = """
import json, os, sys
path = sys.argv[1]
receipt = json.load(open(path))
os.rename(path, path + ".true")
with open(path, "w") as file:
    json.dump(receipt | {"verdict": "severed", "wording": "network: off - severed"}, file)
"""


def test_a_payload_that_forges_its_receipt_has_it_put_right_at_its_end(host: Host) -> None:
    host.broker()
    path = host.directory / "receipt.json"
    argv = ("--receipt", "receipt.json", "--lease-port", "8080", "--", "/usr/bin/python3", "-c", FORGE, str(path))

    done = host.sealnet("run", *argv, cwd=host.directory)

    assert done.returncode == 0, done.stderr
    # It did what it wanted, and it was in vain.
    assert (host.directory / "receipt.json.true").exists()
    assert json.loads(path.read_text())["verdict"] == "sealed"


def test_a_receipt_whose_directory_was_moved_is_missed(host: Host) -> None:
    (host.directory / "out").mkdir()

    done = host.sealnet("run", "--receipt", "out/seal.json", "--", "sh", "-c", "mv out old; mkdir out; exit 7", cwd=host.directory)

    assert done.returncode == 7
    assert "out/seal.json: its directory has been moved" in done.stderr
    assert not (host.directory / "out/seal.json").exists()


def test_a_command_that_could_not_be_executed_says_so_in_its_receipt(host: Host) -> None:
    told = receipt_of(host, argv=("/nonexistent/tool",), status=127)

    assert (told["verdict"], told["reason"]) == ("inconclusive", "nothing of the payload ran: it ended before its first instruction")


def test_nobody_but_root_may_fold_what_he_cannot_see(host: Host) -> None:
    run = host.spawn_run("open-one", "sleep", "30", options=("--network", "open", "--allow-unenforced-egress"))
    unprivileged = host.run("setpriv", "--reuid", "65534", "--clear-groups", *SEALNET, "inspect", "--all", check=False)

    assert unprivileged.returncode == 125
    assert "only root may look" in unprivileged.stderr
    assert host.sealnet("check", "open-one").returncode == 1
    assert "not recorded" in host.sealnet("inspect", "open-one").stdout
    assert host.sealnet("inspect", "--all").stdout.splitlines()[-1] == "together  network: on - egress is not enforced"
    run.terminate()
    run.wait(60)
    assert host.sealnet("inspect", "--all").stdout.splitlines()[-1] == "no runs"


def test_a_run_that_nobody_supervises_is_not_called_sealed(host: Host) -> None:
    host.broker()
    run = host.spawn_run("orphan", "sleep", "30", options=("--lease-port", "8080"))
    assert host.sealnet("check", "orphan").returncode == 0
    run.kill()
    run.wait(60)

    done = host.sealnet("check", "orphan")

    assert done.returncode == 1
    assert "broken  its supervisor is gone" in done.stdout
    assert host.sealnet("reap", "orphan").returncode == 0
