"""Frozen plans, bundles of evidence and the log of a run's proxy, as the tool writes and reads them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import sealnet
from sealnet.kernel import libc
from sealnet.model import ruleset
from tests.lab import LAN_PEER, SEALNET, Host, end, wait_for
from tests.model.build import egress_line

pytestmark = pytest.mark.root

DOCS = Path(__file__).parents[1] / "docs"
PLAN_SCHEMA, EVIDENCE_SCHEMA = (json.loads((DOCS / f"{name}.schema.json").read_text()) for name in ("plan", "evidence"))
OPEN = ("--network", "open", "--allow-unenforced-egress")


def evidence_of(host: Host, *options: str, argv: tuple[str, ...] = ("true",), status: int = 0, name: str = "evidence") -> dict[str, Any]:
    directory = host.directory / name
    done = host.sealnet("run", "--evidence", str(directory), *options, "--", *argv, cwd="/")
    assert done.returncode == status, done.stderr
    return told_in(directory)


def told_in(directory: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((directory / "environment.json").read_text())
    jsonschema.validate(told, EVIDENCE_SCHEMA)
    return told


# Plans


def frozen(host: Host, *words: str, name: str = "plan.lock.json", **options: Any) -> str:
    done = host.sealnet("plan", "--output", "-", *words, **{"cwd": "/", **options})
    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads(done.stdout), PLAN_SCHEMA)
    path = host.directory / name
    path.write_text(done.stdout)
    return str(path)


def test_a_run_takes_everything_from_its_plan(host: Host) -> None:
    host.broker(8080)
    work = host.directory / "work"
    work.mkdir()
    host.directory.chmod(0o755)
    script = 'pwd; id -u; echo "$A $URL $B"; touch /extra/x && echo wrote; curl -s http://broker.sealnet:8080/hello'
    options = ("--lease-port", "8080", "--user", "nobody", "--setenv", "A=secret", "--broker-env", "URL", "--pass-env", "B")
    path = frozen(host, *options, "--tmpfs", "/extra", "--timeout", "30", "--", "sh", "-c", script, cwd=work)

    done = host.sealnet("run", "--plan", path, "--setenv", "A=told", cwd="/", env={**os.environ, "B": "passed"})
    alike = host.sealnet("run", "--plan", path, "--setenv", "A=x", "--timeout", "30", "--run-id", "mine", "--", "sh", "-c", script)

    assert done.returncode == alike.returncode == 0, done.stderr + alike.stderr
    where, uid, variables, wrote, answer = done.stdout.splitlines()
    assert (where, uid, wrote, answer) == (str(work), "65534", "wrote", "/hello")
    assert variables.split() == ["told", "http://198.18.0.1:8080", "passed"]
    assert "secret" not in Path(path).read_text()


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        (("--timeout", "31"), "cannot use --timeout with --plan"),
        (("--lease-port", "8081"), "cannot use --lease-port with --plan"),
        (("--no-preflight",), "cannot use --no-preflight with --plan"),
        (("--user", "nobody"), "cannot use --user with --plan"),
        (("--pass-env", "A"), "cannot use --pass-env with --plan"),
        (("--setenv", "A=1"), "cannot use --setenv with --plan"),
        (("--tmpfs", "/x"), "cannot use --tmpfs with --plan"),
        (("--bind", "/usr"), "cannot use --bind, --ro-bind with --plan"),
        (OPEN, "cannot use --network"),
        (("--", "touch", "other"), "cannot use COMMAND with --plan"),
    ],
)
def test_what_stands_beside_a_plan_and_differs_is_refused(host: Host, beside: tuple[str, ...], words: str) -> None:
    path = frozen(host, "--lease-port", "8080", "--timeout", "30", "--", "touch", "ran")

    done = host.sealnet("run", "--plan", path, *beside)

    assert done.returncode == 2
    assert words in done.stderr
    assert not Path("ran").exists()
    assert not Path("/run/sealnet").exists()


def test_a_plan_that_was_changed_is_refused(host: Host) -> None:
    path = Path(frozen(host, "--", "true"))
    assert host.sealnet("run", "--plan", str(path), cwd="/").returncode == 0
    told = json.loads(path.read_text())
    told["plan"]["argv"] = ["false"]
    path.write_text(json.dumps(told))

    done = host.sealnet("run", "--plan", str(path), cwd="/")

    assert done.returncode == 2
    assert "it was changed by hand" in done.stderr


def test_a_host_that_has_changed_is_drift(host: Host) -> None:
    """Another user of that name; a link where there was a directory."""
    work = host.directory / "work"
    work.mkdir()
    path = frozen(host, "--bind", str(work), "--", "true")
    assert host.sealnet("run", "--plan", path, cwd="/").returncode == 0
    work.rmdir()
    work.symlink_to("/etc")

    done = host.sealnet("run", "--plan", path, cwd="/")

    assert done.returncode == 2
    assert "is a symbolic link, and a payload may have made it" in done.stderr


def test_a_value_that_no_plan_holds_is_asked_for(host: Host) -> None:
    path = frozen(host, "--setenv", "A=1", "--setenv", "B=2", "--", "true")

    done = host.sealnet("run", "--plan", path, cwd="/")

    assert done.returncode == 2
    assert done.stderr.endswith("it sets A, B, and a plan holds no values\n  hint: --setenv A=VALUE --setenv B=VALUE\n")


def test_the_same_plan_is_the_same_bytes(host: Host) -> None:
    first = host.sealnet("plan", "--output", "-", "--pass-env", "B", "--pass-env", "A", "--", "true", cwd="/")
    second = host.sealnet("plan", "--pass-env", "A", "--pass-env", "B", "--json", "--", "true", cwd="/")

    assert first.stdout == second.stdout
    assert first.stdout.endswith("}\n")


def test_a_plan_is_written_where_its_maker_is_and_nothing_else_is_touched(host: Host) -> None:
    work = host.directory / "work"
    work.mkdir()
    options = ("--lease-port", "8080", "--", "true")

    there = host.sealnet("plan", *options, cwd=work)
    made = (work / "plan.lock.json").read_text()
    named = host.sealnet("plan", "--run-id", "mine", "--output", "other.json", *options, cwd=work)
    before = sorted(os.listdir(work))
    printed = host.sealnet("plan", "--json", *options, cwd=work)
    (work / "plan.lock.json").unlink()
    (work / "plan.lock.json").symlink_to(work / "elsewhere")
    again = host.sealnet("plan", *options, cwd=work)
    odd = host.sealnet("plan", "--run-id", "../x", *options, cwd=work)
    closed = host.run("setpriv", "--reuid=65534", "--clear-groups", *SEALNET, "plan", "--", "true", check=False, cwd="/")

    assert (there.returncode, there.stdout, there.stderr) == (0, made, "")
    assert (named.stdout, (work / "other.json").read_text()) == (made, made)
    assert named.stderr == "sealnet: --run-id is of one run, and not in the plan: give it to sealnet run\n"
    assert (printed.stdout, before) == (made, ["other.json", "plan.lock.json"])
    # A link of that name may be a payload's.
    assert (again.returncode, (work / "plan.lock.json").is_symlink(), (work / "elsewhere").exists()) == (0, False, False)
    assert odd.returncode == 2
    assert (closed.returncode, closed.stdout) == (2, "")
    assert closed.stderr.endswith("Permission denied\n  hint: --output FILE, or --output - to print it alone\n")
    assert host.state.exists() is False
    host.broker(8080)
    assert host.sealnet("run", "--plan", "plan.lock.json", "--receipt", "receipt.json", cwd=work).returncode == 0
    assert json.loads((work / "receipt.json").read_text())["verdict"] == "sealed"


# Evidence


def test_each_confinement_has_its_evidence(host: Host) -> None:
    host.broker(8080)
    severed = evidence_of(host, name="severed", argv=("sh", "-c", "curl -s -m 1 http://192.0.2.7:81/; exit 3"), status=3)
    sealed = evidence_of(host, "--lease-port", "8080", "--run-id", "mine", name="sealed")
    opened = evidence_of(host, *OPEN, name="opened")

    claims = ("confinement", "verdict", "network_severed", "egress_sealed", "egress_enforced", "complete", "exit_status", "tally")
    assert [[told[name] for name in claims] for told in (severed, sealed, opened)] == [
        ["severed", "severed", True, True, True, True, 3, "whole"],
        ["sealed", "sealed", False, True, True, True, 0, "whole"],
        ["open", "open", False, False, False, True, 0, "none"],
    ]
    assert severed["tried"] == [{"address": "192.0.2.7", "protocol": "tcp", "port": 81, "packets": 1}]
    assert (sealed["run_id"], sealed["allowlist"], sealed["versions"].keys() >= {"sealnet", "kernel"}) == ("mine", [], True)
    # Nobody has decided anything, and that stands there.
    assert sorted(os.listdir(host.directory / "sealed")) == ["environment.json", "mine.egress.jsonl", "plan.lock.json", "receipt.json"]
    assert (host.directory / "sealed/mine.egress.jsonl").read_bytes() == b""
    for name in ("severed", "sealed", "opened"):
        assert host.sealnet("evidence", str(host.directory / name)).returncode == (name == "opened")
    (host.directory / "sealed/mine.egress.jsonl").unlink()
    assert "edited: " in host.sealnet("evidence", str(host.directory / "sealed")).stdout
    receipt = json.loads((host.directory / "sealed/receipt.json").read_text())
    assert (receipt["run_id"], receipt["verdict"], receipt["started"]) == ("mine", "sealed", sealed["started"])
    plan = json.loads((host.directory / "sealed/plan.lock.json").read_text())
    assert (plan["sha256"], plan["plan"]["lease_port"]) == (sealed["plan_sha256"], 8080)


_TRIES = """import socket, sys
for number in range(int(sys.argv[1])):
    try:
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"", (f"198.51.{number >> 8}.{number & 255}", 9))
    except PermissionError:
        pass
"""


def test_more_attempts_than_can_be_listed_are_not_told_as_all_of_them(host: Host) -> None:
    few, many = (
        evidence_of(host, name=f"tried-{count}", argv=("python3", "-c", _TRIES, str(count)))
        for count in (ruleset.TALLY // 2, ruleset.TALLY + 200)
    )

    assert (few["tally"], len(few["tried"])) == ("whole", ruleset.TALLY // 2)
    assert many["tally"] == "full"
    assert ruleset.TALLY - 96 <= len({row["address"] for row in many["tried"]}) == len(many["tried"]) <= ruleset.TALLY


def test_attempts_of_proofs_take_room_and_that_is_told(host: Host) -> None:
    """Each `check` tries a port of its own: in the end nothing of the payload's has a place, and it has not tried nothing for that."""
    script = f"{_TRIES}print('tried', flush=True); sys.stdin.read()"
    run = host.spawn(*SEALNET, "run", "--run-id", "busy", "--", "python3", "-c", script, str(ruleset.TALLY + 9), stdin=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline() == "tried\n"
    # As if proofs had tried most of what stands there.
    with (host.state / "runs/busy/probed").open("a") as file:
        file.write("".join(f"198.51.{number >> 8}.{number & 255} udp 9\n" for number in range(ruleset.TALLY)))

    shown = json.loads(host.sealnet("inspect", "busy", "--json").stdout)
    people = host.sealnet("inspect", "busy").stdout

    assert (shown["tally"], len(shown["tried"]) < 10) == ("full", True)
    assert "and perhaps more" in people
    run.communicate("", timeout=60)


def test_many_bundles_are_as_enforced_as_the_least(host: Host) -> None:
    host.broker(8080)
    paths = {name: str(host.directory / name) for name in ("severed", "sealed", "opened")}
    evidence_of(host, name="severed")
    evidence_of(host, "--lease-port", "8080", name="sealed")
    evidence_of(host, *OPEN, name="opened")

    good = host.sealnet("evidence", paths["severed"], paths["sealed"], "--json")
    all_of_them = host.sealnet("evidence", *paths.values(), "--json")
    people = host.sealnet("evidence", *paths.values())

    assert (good.returncode, all_of_them.returncode, people.returncode) == (0, 1, 1)
    assert (json.loads(good.stdout)["egress_enforced"], json.loads(good.stdout)["confinement"]) == (True, "sealed")
    told = json.loads(all_of_them.stdout)
    assert (told["egress_enforced"], told["complete"], told["verdict"], told["runs"]) == (False, True, "open", 3)
    assert people.stdout.splitlines()[-1].startswith("together  network: on - egress is not enforced (3 runs")
    assert sealnet.fold_evidence(paths.values()).to_json() == told
    receipt = host.directory / "sealed/receipt.json"
    receipt.write_text(receipt.read_text().replace("8080", "8081"))
    edited = host.sealnet("evidence", paths["severed"], paths["sealed"])
    assert edited.returncode == 1
    assert "edited: " in edited.stdout
    assert host.sealnet("evidence", paths["severed"]).returncode == 0


def test_a_refused_run_leaves_evidence_of_that(host: Host) -> None:
    told = evidence_of(host, "--lease-port", "8080", status=125)

    assert told["reason"].startswith("cannot reach the broker")
    assert (told["egress_enforced"], told["complete"], told["exit_status"], told["verdict"]) == (False, True, 125, "broken")
    assert host.sealnet("evidence", str(host.directory / "evidence")).returncode == 1


def test_a_timeout_and_a_signal_are_in_it(host: Host) -> None:
    timed_out = evidence_of(host, "--timeout", "0.2", argv=("sleep", "60"), status=124, name="a")
    killed = evidence_of(host, argv=("sh", "-c", "kill -9 $$"), status=137, name="b")
    missing = evidence_of(host, argv=("no-such-program",), status=127, name="c")

    assert [told["exit_status"] for told in (timed_out, killed, missing)] == [124, 137, 127]
    assert [told["egress_enforced"] for told in (timed_out, killed, missing)] == [True, True, False]
    assert timed_out["duration_s"] >= 0.2


def test_a_sealnet_that_is_killed_leaves_nothing_that_claims_anything(host: Host) -> None:
    directory = host.directory / "evidence"
    process = host.spawn_run("mine", "sleep", "60", options=("--evidence", str(directory)), cwd="/")
    end(process, signal.SIGKILL)

    told = told_in(directory)
    folded = sealnet.fold_evidence([directory])

    assert (told["ended"], told["egress_enforced"], told["complete"]) == (False, False, False)
    assert folded.bundles[0].faults == ("the end of the run was not seen",)
    assert host.sealnet("reap", "--orphans").returncode == 0


def test_a_payload_that_writes_in_it_changes_nothing(host: Host) -> None:
    """It leaves a child that goes on after its end, and links where the files were."""
    work = host.directory / "work"
    work.mkdir()
    script = """
    sleep 0.1
    for name in environment.json receipt.json plan.lock.json; do rm -f $name; ln -s /etc/passwd $name; done
    (while :; do echo '{"egress_enforced": true}' > new; mv new environment.json; done) &
    sleep 0.1
    """

    done = host.sealnet("run", "--evidence", "evidence", "--chdir", "evidence", "--", "sh", "-c", script, cwd=work)

    assert done.returncode == 0, done.stderr
    told = told_in(work / "evidence")
    assert (told["verdict"], told["egress_enforced"], told["complete"]) == ("severed", True, True)
    assert all(not (work / "evidence" / name).is_symlink() for name in ("environment.json", "receipt.json", "plan.lock.json"))
    assert sealnet.fold_evidence([work / "evidence"]).egress_enforced


def test_a_payload_that_moves_it_away_is_found_out(host: Host) -> None:
    work = host.directory / "work"
    work.mkdir()

    done = host.sealnet("run", "--evidence", "evidence", "--", "sh", "-c", "mv evidence gone; mkdir evidence; exit 5", cwd=work)

    assert done.returncode == 5
    assert "its directory has been moved" in done.stderr
    assert sealnet.fold_evidence([work / "gone"]).egress_enforced
    assert not sealnet.fold_evidence([work / "evidence"]).egress_enforced


def test_the_python_api_writes_it_too(host: Host) -> None:
    first, second, third = (host.directory / name for name in ("first", "second", "third"))
    done = sealnet.run(["sh", "-c", "exit 7"], evidence=first, cwd="/")
    timed_out = sealnet.run(["sleep", "60"], evidence=third, cwd="/", timeout_s=0.2, grace_s=0.2)
    with sealnet.Sealer().launch(["sleep", "60"], evidence=second, cwd="/") as run:
        assert not told_in(second)["ended"]

    assert (done.returncode, told_in(first)["exit_status"], told_in(first)["egress_enforced"]) == (7, 7, True)
    assert (timed_out.returncode, told_in(third)["exit_status"]) == (124, 124)
    assert (told_in(second)["run_id"], told_in(second)["exit_status"], told_in(second)["ended"]) == (run.run_id, 137, True)
    assert sealnet.fold_evidence([first, second, third]).egress_enforced
    with pytest.raises(sealnet.NoBroker):
        sealnet.run(["true"], evidence=first, lease_port=8080, cwd="/")
    assert told_in(first)["reason"].startswith("cannot reach the broker")


def test_what_a_declared_run_did_is_on_record_and_counted(host: Host) -> None:
    names = host.directory / "hosts"
    names.write_text(f"127.0.0.1 localhost\n{LAN_PEER} good.test\n")
    names.chmod(0o644)
    libc.mount(str(names), os.path.realpath("/etc/hosts"), None, libc.MS_BIND)
    host.broker(8000, netns="lan")
    script = (
        "curl -s http://good.test:8000/hello; for n in 1 2; do curl -s -o /dev/null http://evil.test/; done; curl -s https://evil.test/"
    )
    options = ("--allow-private", "good.test:8000", "--allow", "pypi.org", "--no-preflight")
    path, directory = frozen(host, *options, "--", "sh", "-c", f"{script}; true"), host.directory / "evidence"

    done = host.sealnet("run", "--plan", path, "--evidence", str(directory), "--run-id", "mine", cwd="/")

    assert (done.returncode, done.stdout) == (0, "/hello"), done.stderr
    told = told_in(directory)
    assert (told["verdict"], told["egress_enforced"], told["complete"], told["incomplete"]) == ("allowlist", True, True, [])
    assert (told["allowlist"], told["allowed"], told["denied"], told["recorded"]) == (["good.test:8000", "pypi.org:443"], 1, 3, 4)
    assert [(one["host"], one["port"], one["count"], one["flag"]) for one in told["denials"]] == [
        ("evil.test", 80, 2, "--allow evil.test:80"),
        ("evil.test", 443, 1, "--allow evil.test:443"),
    ]
    assert host.sealnet("evidence", str(directory)).returncode == 0
    log = directory / "mine.egress.jsonl"
    log.write_bytes(log.read_bytes().partition(b"\n")[2])
    cut = host.sealnet("evidence", str(directory))
    assert cut.returncode == 1
    assert "edited: " in cut.stdout


# The log; written here by hand in a proxy's place


@pytest.fixture
def mine(host: Host) -> Iterator[Path]:
    """Where the log of a live run `mine` lies."""
    process = host.spawn_run("mine", "sleep", "60")
    yield host.state / "runs/mine/egress.jsonl"
    end(process)


def test_the_log_is_made_for_counting(host: Host, mine: Path) -> None:
    lines = [egress_line(1, "ALLOW", run_id="mine"), *(egress_line(number, run_id="mine") for number in (2, 3))]
    mine.write_bytes(b"".join(lines))

    text, raw = host.sealnet("log", "mine"), host.sealnet("log", "mine", "--json")
    shown = json.loads(host.sealnet("inspect", "mine", "--json").stdout)["egress"]

    assert (text.returncode, raw.returncode) == (0, 0)
    assert text.stdout == "ALLOW good.test:443 CONNECT\n" + "DENY evil.test:443 CONNECT not declared\n" * 2
    assert json.loads(raw.stdout) == [json.loads(line) for line in lines]
    assert (shown["allowed"], shown["denied"], shown["faults"]) == (1, 2, [])
    assert (shown["denials"][0]["count"], shown["denials"][0]["flag"]) == (2, "--allow evil.test:443")
    assert "2         evil.test:443  not declared  --allow evil.test:443" in host.sealnet("inspect", "mine").stdout


def test_a_log_that_was_cut_is_never_clean(host: Host, mine: Path) -> None:
    for data, words in (
        (egress_line(1, run_id="mine") + egress_line(2, run_id="mine")[:-9], "line 2 was cut"),
        (egress_line(1, run_id="mine") + egress_line(3, run_id="mine"), "records are missing"),
    ):
        mine.write_bytes(data)

        done = host.sealnet("log", "mine")

        assert done.returncode == 1
        assert done.stdout.startswith("DENY evil.test:443 CONNECT not declared\n")
        assert "the log of run mine is not whole: " in done.stderr
        assert words in done.stderr


def test_an_orphans_request_without_an_end_was_cut(host: Host) -> None:
    process = host.spawn_run("orphan", "sleep", "60")
    line = egress_line(1, "ALLOW", run_id="orphan", bytes_up=None)
    (host.state / "runs/orphan/egress.jsonl").write_bytes(line)
    before = host.sealnet("log", "orphan")
    end(process, signal.SIGKILL)

    after = host.sealnet("log", "orphan")
    shown = json.loads(host.sealnet("inspect", "orphan", "--json").stdout)["egress"]

    assert (before.returncode, after.returncode) == (0, 1)
    assert before.stdout == after.stdout == "ALLOW good.test:443 CONNECT\n"
    assert after.stderr == "sealnet: the log of run orphan is not whole: 1 allowed requests have no end\n"
    assert shown["faults"] == ["1 allowed requests have no end"]
    assert host.sealnet("reap", "--orphans").returncode == 0


def test_a_log_is_followed_to_the_end_of_the_run(host: Host, mine: Path) -> None:
    mine.write_bytes(egress_line(1, "ALLOW", run_id="mine", bytes_up=None, bytes_down=None))
    follower = host.spawn(*SEALNET, "log", "-f", "mine")
    assert follower.stdout is not None
    assert follower.stdout.readline() == "ALLOW good.test:443 CONNECT\n"

    with mine.open("r+b") as file:
        # As a door fills in the counts on their spot, and goes on.
        file.write(egress_line(1, "ALLOW", run_id="mine", bytes_up=1234, bytes_down=1234)[: mine.stat().st_size])
        file.seek(0, os.SEEK_END)
        file.write(egress_line(2, run_id="mine"))
        file.flush()
        assert follower.stdout.readline() == "DENY evil.test:443 CONNECT not declared\n"
    assert follower.poll() is None
    assert host.sealnet("reap", "mine").returncode == 0

    assert wait_for(lambda: follower.poll() is not None, what="the follower has ended")
    assert (follower.returncode, follower.stdout.read()) == (0, "")


@pytest.mark.usefixtures("mine")
def test_a_run_without_a_proxy_has_no_log(host: Host) -> None:
    done = host.sealnet("log", "mine")
    unknown = host.sealnet("log", "other")

    assert (done.returncode, unknown.returncode) == (125, 125)
    assert "it has none, for a severed run has no proxy" in done.stderr
    assert "there is no record of it" in unknown.stderr


def test_a_log_goes_into_the_bundle_and_is_counted(host: Host) -> None:
    directory = host.directory / "evidence"
    process = host.spawn_run("mine", "sleep", "60", options=("--evidence", str(directory)), cwd="/")
    lines = egress_line(1, "ALLOW", run_id="mine") + egress_line(2, run_id="mine")
    (host.state / "runs/mine/egress.jsonl").write_bytes(lines)
    end(process)

    told = told_in(directory)
    copied = directory / "mine.egress.jsonl"

    assert (told["allowed"], told["denied"], told["complete"]) == (1, 1, True)
    assert copied.read_bytes() == lines
    assert sealnet.fold_evidence([directory]).egress_enforced
    copied.write_bytes(egress_line(1, "ALLOW", run_id="mine"))
    assert "edited" in sealnet.fold_evidence([directory]).bundles[0].faults[0]
