"""The worker as its callers meet it: users that are not root, through the socket."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sealnet import request
from sealnet.model.config import Config
from sealnet.records import State
from sealnet.running import Streams, Ways
from sealnet.worker import service
from sealnet.worker.runs import Runs
from tests.lab import SEALNET, Host, wait_for

pytestmark = pytest.mark.root

# Nobody's, and not 65534, whose processes are others'.
ALICE, BOB = 65531, 65530
GROUP = 65534


class Worker:
    """A worker on the throw-away host, and what callers do with it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.socket = host.state / "worker.sock"
        self.log = host.directory / "worker.log"
        self.config = host.directory / "config.toml"
        self.config.write_text('group = "nogroup"\n')
        self.environ = {**os.environ, "SEALNET_CONFIG": str(self.config)}
        self.process: subprocess.Popen[Any] | None = None
        self.start()

    def start(self, *prefix: str) -> None:
        said = len(self.lines("event=ready")) if self.log.exists() else 0
        with self.log.open("a") as log:
            self.process = self.host.spawn(*prefix, *SEALNET, "worker", env=self.environ, stdout=log, stderr=log)
        wait_for(lambda: self.process.poll() is not None or len(self.lines("event=ready")) > said, what="the worker is ready")
        assert self.process.poll() is None, self.log.read_text()

    def end(self, signum: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(signum)
        return self.process.wait(60)

    def lines(self, word: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if word in line]

    def helpers(self, which: str) -> list[int]:
        """Its own processes of that module or name, the oldest first."""
        assert self.process is not None
        below, found = [self.process.pid], []
        for pid in below:
            # What has ended meanwhile has none.
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    below += map(int, (task / "children").read_text().split())
                if which in (Path(f"/proc/{pid}/comm").read_text().strip(), *Path(f"/proc/{pid}/cmdline").read_text().split("\0")):
                    found.append(pid)
        return sorted(found)

    def home(self, uid: int) -> Path:
        made = Path(f"/run/home-{uid}")
        if not made.exists():
            made.mkdir()
            os.chown(made, uid, uid)
        return made

    def argv(self, uid: int, *argv: str) -> list[str]:
        return ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={GROUP}", *SEALNET, *argv]

    def call(self, uid: int, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.host.run(*self.argv(uid, *argv), check=False, cwd=self.home(uid), **options)

    def spawn(self, uid: int, *argv: str, **options: Any) -> subprocess.Popen[Any]:
        return self.host.spawn(*self.argv(uid, *argv), cwd=self.home(uid), **options)


@pytest.fixture
def worker(host: Host) -> Iterator[Worker]:
    made = Worker(host)
    yield made
    for one in json.loads(host.sealnet("ls", "--json").stdout):
        host.sealnet("reap", one["run_id"])
    made.end()


def running(worker: Worker, uid: int, run_id: str, *argv: str, options: tuple[str, ...] = (), **popen: Any) -> subprocess.Popen[Any]:
    process = worker.spawn(uid, "run", "--run-id", run_id, *options, "--", *argv, **popen)
    worker.host.wait_running(run_id, process)
    return process


def gone(worker: Worker, run_id: str) -> None:
    wait_for(lambda: worker.host.record(run_id) is None, what=f"nothing is left of {run_id}")


# Running


def test_a_user_runs_sealed_as_itself_with_its_own_habits(worker: Worker) -> None:
    worker.host.broker(8080)
    script = "id; umask; ulimit -n; env; echo $PWD; exec curl -fsS http://broker.sealnet:8080/hello"
    own = worker.argv(ALICE, "run", "--lease-port", "8080", "--pass-env", "MI*", "--", "sh", "-c", script)

    done = worker.host.run(
        "sh", "-c", 'umask 027; ulimit -n 321; exec "$@"', "sh", *own, cwd=worker.home(ALICE), env={**os.environ, "MINE": "1", "OURS": "2"}
    )

    lines = done.stdout.splitlines()
    assert lines[:3] == [f"uid={ALICE} gid={ALICE} groups={ALICE}", "0027", "321"]
    assert "MINE=1" in lines
    assert not any(line.startswith(("OURS", "SEALNET_CONFIG")) for line in lines)
    assert lines[-2:] == [str(worker.home(ALICE)), "/hello"]


def test_exit_statuses_are_those_of_a_direct_run(worker: Worker) -> None:
    wanted = {
        ("--", "sh", "-c", "exit 42"): 42,
        ("--", "sh", "-c", "kill -TERM $$"): 143,
        ("--", "no-such-command"): 127,
        ("--", "/etc/passwd"): 126,
        ("--timeout", "0.2", "--", "sleep", "60"): 124,
        ("--lease-port", "1", "--", "touch", "ran"): 125,
        ("--network", "sealed", "--", "touch", "ran"): 2,
    }

    def all_of(start: Any) -> dict[tuple[str, ...], subprocess.CompletedProcess[str]]:
        begun = {words: start(words) for words in wanted}
        told = {words: process.communicate(timeout=90) for words, process in begun.items()}
        return {words: subprocess.CompletedProcess(words, begun[words].returncode, *told[words]) for words in wanted}

    through = all_of(lambda words: worker.spawn(ALICE, "run", *words))
    direct = all_of(lambda words: worker.host.spawn(*SEALNET, "run", "--worker", "never", *words))

    assert {words: done.returncode for words, done in through.items()} == wanted
    assert {words: done.returncode for words, done in direct.items()} == wanted
    refused = ("--network", "sealed", "--", "touch", "ran")
    assert through[refused].stderr == direct[refused].stderr
    assert not (worker.home(ALICE) / "ran").exists()
    assert "event=refused method=Run" in worker.lines("kind=no_broker")[0]


def test_streams_and_signals_pass(worker: Worker) -> None:
    script = "trap 'echo usr1' USR1; trap 'echo bye >&2; exit 7' TERM; cat; echo end; while :; do sleep 0.05; done"
    process = running(worker, ALICE, "streams", "sh", "-c", script, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.close()
    process.stdin = None
    assert [process.stdout.readline() for _ in range(2)] == ["hello\n", "end\n"]

    process.send_signal(signal.SIGUSR1)
    assert process.stdout.readline() == "usr1\n"
    process.send_signal(signal.SIGTERM)

    assert process.communicate(timeout=90) == ("", "bye\n")
    assert process.returncode == 7


def test_a_terminal_is_the_runs_own(worker: Worker) -> None:
    from e2e.test_cases_proc import Terminal

    script = (
        "trap 'echo got int' INT; trap 'stty size' WINCH; stty size; tty; echo ready; until read -t 0.1 line; do :; done; echo end $line"
    )
    terminal = Terminal(worker.host, "env", "-C", str(worker.home(ALICE)), *worker.argv(ALICE, "run", "--", "bash", "-c", script))
    try:
        terminal.expect("^24 80$")
        terminal.expect("^/dev/console$")
        terminal.expect("^ready$")
        terminal.resize(40, 120)
        terminal.expect("^40 120$")
        terminal.type("\x03")
        terminal.expect("got int$")
        terminal.type("words\n")
        terminal.expect("^end words$")

        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_a_run_is_a_job_like_any_other(worker: Worker) -> None:
    from e2e.test_cases_proc import Terminal

    terminal = Terminal(worker.host, "env", "-C", str(worker.home(ALICE)), "bash", "--norc", "--noprofile", "--noediting", "-i")
    try:
        terminal.expect("^prompt> ")
        terminal.type(" ".join(worker.argv(ALICE, "run", "--run-id", "job", "--", "sed", "-u", "s/^/said-/")) + "\n")
        worker.host.wait_running("job")
        terminal.type("one\n")
        terminal.expect("^said-one$")
        terminal.type("\x1a")
        terminal.expect("Stopped")
        terminal.expect("^prompt> ")
        frozen = Path(worker.host.record("job")["cgroup"]) / "cgroup.freeze"
        assert frozen.read_text() == "1\n"
        terminal.type("fg\n")
        terminal.expect("sealnet run")
        terminal.type("two\n")
        terminal.expect("^said-two$")
        terminal.type("\x04")
        terminal.expect("^prompt> ")

        terminal.type("exit 0\n")
        assert terminal.wait() == 0
    finally:
        terminal.close()


def test_receipt_and_evidence_are_the_callers_own_files(worker: Worker) -> None:
    home = worker.home(ALICE)

    done = worker.call(
        ALICE, "run", "--receipt", "proof.json", "--evidence", "bundle", "--report", "--", "sh", "-c",
        "curl -s -m 2 http://192.0.2.7:81/; echo lies >proof.json; exit 3",
    )  # fmt: skip

    assert done.returncode == 3
    assert "192.0.2.7" in done.stderr
    found = {path.name: path for path in (home / "bundle").iterdir()}
    assert {"plan.lock.json", "receipt.json", "environment.json"} < set(found)
    assert [found[name].read_bytes() for name in found if name.endswith(".egress.jsonl")] == [b""]
    assert {path.stat().st_uid for path in (*found.values(), home / "proof.json")} == {ALICE}
    proof = json.loads((home / "proof.json").read_text())
    told = json.loads(found["environment.json"].read_text())
    assert (proof["verdict"], told["complete"], told["exit_status"]) == ("severed", True, 3)
    assert json.loads(found["receipt.json"].read_text()) == proof
    assert worker.host.sealnet("evidence", str(home / "bundle")).returncode == 0

    words = ("--lease-port", "1", "--receipt", "refused.json", "--evidence", "bundle", "--", "true")
    refused, direct = worker.call(ALICE, "run", *words), worker.host.sealnet("run", "--worker", "never", *words)
    proofs = [json.loads((place / "refused.json").read_text()) for place in (home, Path.cwd())]
    told = json.loads((home / "bundle" / "environment.json").read_text())
    assert (refused.returncode, direct.returncode) == (125, 125)
    assert [proof["verdict"] for proof in proofs] == ["broken", "broken"]
    assert told["reason"] == json.loads((home / "bundle" / "receipt.json").read_text())["reason"] == proofs[0]["reason"]
    assert (told["egress_enforced"], told["exit_status"]) == (False, 125)


def test_a_caller_imports_nothing_any_more_once_its_payload_runs(worker: Worker) -> None:
    """That may be able to write where its caller's sealnet lies: a checkout in the working directory."""
    checkout = worker.home(ALICE) / "checkout"
    for part in ("sealnet", "scripts"):
        shutil.copytree(Path(__file__).parents[1] / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chown", "-R", f"{ALICE}:{ALICE}", checkout], check=True)
    start = [*worker.argv(ALICE)[: -len(SEALNET)], sys.executable, "-IS", str(checkout / "scripts" / "start.py")]
    told = ["--receipt", "seal.json", "--evidence", "evidence", "--report"]

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return worker.host.run(*start, "run", "--worker", "always", *told, "--", "sh", "-c", script, check=False, cwd=checkout)

    whole = run("exit 3")
    emptied = run("find sealnet -name '*.py*' -delete; exit 4")

    assert (whole.returncode, emptied.returncode) == (3, 4)
    assert emptied.stderr == whole.stderr
    assert json.loads((checkout / "seal.json").read_text())["verdict"] == "severed"
    assert json.loads((checkout / "evidence" / "environment.json").read_text())["exit_status"] == 4
    # It was the one that ran: the next finds nothing to run.
    assert "ModuleNotFoundError" in run("exit 5").stderr


def test_what_root_calls_from_another_installation_is_not_written_by_its_payload(worker: Worker) -> None:
    """The worker knows where its own code lies, and the caller where its own does."""
    checkout = worker.home(ALICE) / "checkout"
    for part in ("sealnet", "scripts"):
        shutil.copytree(Path(__file__).parents[1] / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    start = [sys.executable, "-IS", str(checkout / "scripts" / "start.py"), "run", "--worker", "always"]

    def run(*argv: str, directory: Path = checkout) -> subprocess.CompletedProcess[str]:
        return worker.host.run(*start, *argv, check=False, cwd=directory)

    written = run("--report", "--", "sh", "-c", "touch sealnet/planted scripts/planted planted; echo done")
    bound = [run("--bind", str(path), "--", "true", directory=Path("/")) for path in (checkout, checkout / "sealnet")]
    (checkout.parent / "other").mkdir()
    control = run("--", "touch", "written", directory=checkout.parent / "other")
    top = run("--report", "--", "true", directory=Path("/"))

    assert (written.returncode, written.stdout) == (0, "done\n"), written.stderr
    assert "the working directory was read-only in the run: sealnet itself is in it" in written.stderr
    assert list(checkout.rglob("planted")) == []
    assert [(one.returncode, "sealnet itself is in it" in one.stderr) for one in bound] == [(2, True)] * 2
    assert control.returncode == 0, control.stderr
    assert (checkout.parent / "other" / "written").exists()
    # Nothing of it is the payload's to write anyway.
    assert (top.returncode, "read-only" in top.stderr) == (0, False)


def test_the_log_of_a_proxy_is_its_owners(worker: Worker) -> None:
    running(
        worker, ALICE, "logged", "sh", "-c", "curl -s http://other.example/; echo done; exec sleep 60",
        options=("--allow", "only.example", "--no-preflight"),
    )  # fmt: skip

    said = wait_for(lambda: worker.call(ALICE, "log", "logged").stdout, what="something was denied")

    assert said.startswith("DENY other.example:80 GET")
    assert json.loads(worker.call(ALICE, "log", "logged", "--json").stdout)[0]["host"] == "other.example"
    assert worker.call(BOB, "log", "logged").returncode == 125


# Who may what


def test_two_users_do_not_see_each_other(worker: Worker) -> None:
    running(worker, ALICE, "hers", "sleep", "60")
    running(worker, BOB, "his", "sleep", "60")

    def seen(uid: int) -> list[str]:
        return [one["run_id"] for one in json.loads(worker.call(uid, "ls", "--json").stdout)]

    assert (seen(ALICE), seen(BOB)) == (["hers"], ["his"])
    assert sorted(one["run_id"] for one in json.loads(worker.host.sealnet("ls", "--json").stdout)) == ["hers", "his"]
    with as_user(worker, BOB, CURIOUS) as curious:
        asked = list(iter(curious.stdout.readline, "\n"))
        for line in asked:
            method, others, nobodys = json.loads(line)
            assert others == json.loads(json.dumps(nobodys).replace("none", "hers")), method
            assert "there is no record of it" in json.dumps(others) or method in ("Reap", "Cancel")
    assert len(asked) == 10
    assert worker.call(BOB, "inspect", "hers").returncode == 125
    assert worker.call(ALICE, "inspect", "hers").returncode == 0
    assert worker.call(ALICE, "check", "hers").returncode == 0
    worker.call(BOB, "reap", "--all")
    assert (seen(ALICE), seen(BOB)) == (["hers"], [])
    taken = worker.call(BOB, "run", "--run-id", "hers", "--", "true")
    assert (taken.returncode, "a run of that id exists" in taken.stderr) == (125, True)
    assert worker.call(ALICE, "reap", "hers").stdout == "reaped  hers\n"


def test_who_had_a_run_has_no_right_to_the_next_of_its_name(worker: Worker) -> None:
    worker.call(ALICE, "run", "--run-id", "name", "--evidence", "mine", "--", "true")
    roots = worker.host.spawn(*SEALNET, "run", "--worker", "never", "--run-id", "name", "--", "sleep", "60")
    worker.host.wait_running("name", roots)

    for words in ("inspect", "check", "log"):
        assert "there is no record of it" in worker.call(ALICE, words, "name").stderr, words
    assert worker.call(ALICE, "reap", "name").stdout == ""
    assert worker.call(ALICE, "kill", "name").returncode == 125
    assert worker.host.sealnet("kill", "name").returncode == 2
    assert worker.host.sealnet("inspect", "name").returncode == 0
    assert roots.poll() is None
    assert worker.call(ALICE, "wait", "name").returncode == 0
    assert worker.host.sealnet("reap", "name").returncode == 0
    with connect(worker) as sock, contextlib.ExitStack() as opened:
        fds = [os.open("/", os.O_PATH) if at == 3 else os.open(os.devnull, os.O_RDWR) for at in range(4)]
        for fd in fds:
            opened.callback(os.close, fd)
        run = {"argv": ["true"], "cwd": "/", "environ": {}, "options": {"run_id": "name"}}
        told = call(sock, "Run", tuple(fds), **run, more=True)
        assert "started" in told["parameters"]
        # No file of another's evidence comes before the end.
        assert "ended" in json.loads(read_message(sock))["parameters"]


def test_what_is_roots_alone(worker: Worker) -> None:
    home = worker.home(ALICE)
    (home / "own").mkdir()
    os.chown(home / "own", ALICE, ALICE)
    (home / "profile").write_text("--dir\n/x\n")
    system = "only root may put something into the system's directories"

    for words, said in (
        (("--user", "root"), "cannot run as 0: only root may run as somebody else"),
        (("--user", str(BOB)), f"cannot run as {BOB}: only root may run as somebody else"),
        (("--bwrap-args", "profile"), "cannot use --bwrap-args: only root may bring a profile of its own"),
        (("--bind", "own:/usr/bin"), system),
        (("--ro-bind", "own:/etc/group"), system),
        (("--bind", "own:/run/nscd"), system),
        (("--tmpfs", "/etc"), system),
    ):
        refused = worker.call(ALICE, "run", *words, "--", "touch", "ran")
        assert (refused.returncode, said in refused.stderr) == (125, True), refused.stderr
    # Root is not refused: with this one it has no program left to run.
    assert system not in worker.host.sealnet("run", "--worker", "always", "--bind", "own:/usr/bin", "--", "true", cwd=home).stderr
    # What it would be for: setpriv looks a number up as a name first. Behind the rule stands the look at the payload before it starts.
    (home / "passwd").write_text(f"root:x:0:0::/:/bin/sh\n{ALICE}:x:0:0::/:/bin/sh\n")
    words = ("--user", str(ALICE), "--ro-bind", "passwd:/etc/passwd", "--chdir", "/", "--", "touch", f"{home}/ran")
    caught = worker.host.sealnet("run", "--worker", "always", *words, cwd=home)
    assert (caught.returncode, "found uid 0" in caught.stderr) == (125, True)
    assert not (home / "ran").exists()
    assert worker.call(ALICE, "run", "--bind", "own:/mnt", "--", "touch", "/mnt/ran").returncode == 0


def test_nobody_shows_itself_what_it_may_not_reach(worker: Worker) -> None:
    hers = worker.home(ALICE) / "closed"
    (hers / "secret").mkdir(parents=True)
    (hers / "secret" / "key").write_text("hers")
    for path in (hers, hers / "secret", hers / "secret" / "key"):
        os.chown(path, ALICE, ALICE)
    hers.chmod(0o700)
    words = ("run", "--ro-bind", f"{hers}/secret:/mnt", "--", "cat", "/mnt/key")

    own, others = worker.call(ALICE, *words), worker.call(BOB, *words)
    missing = worker.call(BOB, "run", "--ro-bind", f"{hers}/none:/mnt", "--", "cat", "/mnt/key")

    assert (own.returncode, own.stdout) == (0, "hers")
    assert (others.returncode, others.stdout) == (2, "")
    assert others.stderr.replace("secret", "none") == missing.stderr


def test_another_mount_namespace_is_not_the_hosts(worker: Worker) -> None:
    home = worker.home(ALICE)
    inside = f'mount -t tmpfs tmpfs {home} && chown {ALICE}:{ALICE} {home} && cd {home} && exec "$@"'
    through = worker.argv(ALICE, "run", "--", "pwd")

    elsewhere = worker.host.run("unshare", "-m", "sh", "-c", inside, "sh", *through, check=False)
    here = worker.host.run(*through, cwd=home)

    assert (elsewhere.returncode, elsewhere.stdout) == (125, "")
    assert "it is another one for the worker" in elsewhere.stderr
    assert here.stdout == f"{home}\n"


def test_who_is_not_in_the_group_is_not_let_in(worker: Worker) -> None:
    outside = ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--clear-groups", *SEALNET, "run"]
    cwd = worker.home(ALICE)

    automatic = worker.host.run(*outside, "--", "true", check=False, cwd=cwd)
    always = worker.host.run(*outside, "--worker", "always", "--", "true", check=False, cwd=cwd)

    assert (automatic.returncode, always.returncode) == (125, 125)
    assert automatic.stderr == always.stderr
    assert "Permission denied" in always.stderr
    assert "adduser" in always.stderr
    assert worker.call(ALICE, "run", "--", "true").returncode == 0


def test_root_is_served_and_may_do_without(worker: Worker) -> None:
    through = worker.host.sealnet("run", "--", "sh", "-c", "exit 4")
    started = len(worker.lines("event=started"))
    direct = worker.host.sealnet("run", "--worker", "never", "--", "sh", "-c", "exit 5")
    worker.end()
    without = worker.host.sealnet("run", "--", "sh", "-c", "exit 6")
    always = worker.host.sealnet("run", "--worker", "always", "--", "true")
    worker.start()

    assert (through.returncode, direct.returncode, without.returncode, always.returncode) == (4, 5, 6, 125)
    assert (started, len(worker.lines("event=started"))) == (1, 1)


# The end, and other ends


def test_a_caller_that_dies_takes_its_run_along(worker: Worker) -> None:
    script = "trap 'echo asked >>asked; exit' TERM; echo ready; while :; do sleep 0.05; done"
    process = running(worker, ALICE, "mortal", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    process.kill()

    gone(worker, "mortal")
    assert (worker.home(ALICE) / "asked").read_text() == "asked\n"
    assert worker.lines("event=client-gone run=mortal")


def test_a_caller_that_dies_during_the_start_leaves_nothing(worker: Worker) -> None:
    # It listens, and never accepts what the proof sends; a launch waits for that.
    with socket.socket() as broker:
        broker.bind(("0.0.0.0", 8080))
        broker.listen(0)
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", 8080))
        for run_id, signum in (("killed", signal.SIGKILL), ("ended", signal.SIGTERM)):
            process = worker.spawn(ALICE, "run", "--run-id", run_id, "--lease-port", "8080", "--", "touch", run_id)
            wait_for(lambda run_id=run_id: (worker.host.record(run_id) or {}).get("state") == "built", what="it is being proved")
            process.send_signal(signum)
            status = process.wait(60)
            gone(worker, run_id)

        assert status == 143
        for filler in fillers:
            filler.close()
    assert not (worker.home(ALICE) / "killed").exists()
    assert not (worker.home(ALICE) / "ended").exists()
    assert worker.lines("event=started") == []


def test_detached_runs_are_waited_for_followed_and_killed(worker: Worker) -> None:
    script = "trap 'echo asked; exit 9' TERM; echo one; while :; do sleep 0.05; done"
    started = worker.call(ALICE, "run", "--detach", "--output", "out.log", "--run-id", "apart", "--", "sh", "-c", script)
    assert (started.returncode, started.stdout, started.stderr) == (0, "apart\n", "")
    attached, waiting = worker.spawn(ALICE, "attach", "apart"), worker.spawn(ALICE, "wait", "apart")
    doomed = worker.spawn(ALICE, "attach", "apart")
    for one in (attached, doomed):
        assert one.stdout is not None
        assert one.stdout.readline() == "one\n"

    doomed.kill()
    doomed.wait(60)
    assert worker.call(ALICE, "kill", "-s", "TERM", "apart").returncode == 0

    assert (attached.communicate(timeout=90)[0], attached.returncode) == ("asked\n", 9)
    assert waiting.wait(60) == 9
    assert worker.call(ALICE, "wait", "apart").returncode == 9
    # A payload may have made a link on the way, to where root writes.
    (worker.home(ALICE) / "logs").symlink_to("/run")
    linked = worker.call(ALICE, "run", "--detach", "--output", "logs/out.log", "--", "true")
    assert (linked.returncode, "it is a symbolic link" in linked.stderr) == (2, True)
    # Who attaches too late is told how it has ended.
    late = worker.call(ALICE, "attach", "apart")
    assert (late.returncode, late.stdout, late.stderr) == (9, "", "")
    assert worker.call(BOB, "attach", "apart").returncode == 125
    assert (worker.home(ALICE) / "out.log").read_text() == "one\nasked\n"
    assert (worker.home(ALICE) / "out.log").stat().st_uid == ALICE
    assert worker.call(ALICE, "run", "--detach", "--report", "--", "true").returncode == 2
    assert worker.call(ALICE, "run", "--output", "x", "--", "true").returncode == 2


def test_a_caller_waits_on_while_the_worker_is_replaced(worker: Worker) -> None:
    worker.host.broker(8080)
    script = "echo ready; read go; curl -fsS http://broker.sealnet:8080/after; exit 6"
    processes = {
        how: running(worker, ALICE, how, "sh", "-c", script, options=("--lease-port", "8080"), stdin=subprocess.PIPE)
        for how in ("stopped", "killed")
    }
    for process in processes.values():
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    for how, signum in (("stopped", signal.SIGTERM), ("killed", signal.SIGKILL)):
        worker.end(signum)
        worker.start()
        wait_for(
            lambda how=how: worker.lines(f"event=client-back run={how}") or processes[how].poll(), timeout_s=30, what="the caller is back"
        )
        out, _ = processes[how].communicate("go\n", timeout=90)
        assert (out, processes[how].returncode) == ("/after", 6)
    assert len(worker.lines("event=adopted")) == 3


def test_a_worker_that_is_told_to_end_lets_a_launch_come_to_a_run(worker: Worker) -> None:
    worker.host.broker(8080)
    words = ("--run-id", "last", "--lease-port", "8080", "--", "sh", "-c", "echo ready; read go; exit 6")
    process = worker.spawn(ALICE, "run", *words, stdin=subprocess.PIPE)
    wait_for(lambda: worker.host.record("last"), what="it is being started")

    worker.end()
    assert worker.host.record("last")["state"] == "running"
    worker.start()

    assert process.communicate("go\n", timeout=90)[0] == "ready\n"
    assert process.returncode == 6


def test_a_run_whose_caller_never_comes_back_is_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are gone: the caller, and the worker that would have seen it go."""
    monkeypatch.setattr(service, "COMES_BACK_S", 0.3)
    state, null = State(host.state), subprocess.DEVNULL
    state.prepare()

    async def first() -> None:
        runs = Runs(state, Config())
        await runs.begin()
        for run_id, tied in (("tied", True), ("apart", False)):
            plan = request.plan(("sleep", "600"), run_id=run_id, cwd="/", grace_s=1.0)
            note = {"tied": tied, "output": None, "grace_s": plan.grace_s}
            await runs.launch(plan, owner=0, streams=Streams(null, null, null), ways=Ways(note=note))
        await runs.close(end=False)

    async def second() -> tuple[int, list[str]]:
        runs = Runs(state, Config())
        serving = service.Service(state, Config(), runs)
        serving.adopted(await runs.begin())
        ended = await asyncio.wait_for(runs.wait("tied"), 30)
        left = [record.run_id for record in runs.records()]
        await serving.close()
        await runs.close(end=True)
        return ended.status, left

    asyncio.run(first())
    assert asyncio.run(second()) == (143, ["apart"])


def test_a_signal_in_between_comes_through_in_the_end(worker: Worker) -> None:
    process = running(worker, ALICE, "patient", "sh", "-c", "trap 'exit 8' TERM; echo ready; while :; do sleep 0.05; done")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    worker.end(signal.SIGKILL)

    process.send_signal(signal.SIGTERM)
    worker.start()

    assert process.wait(60) == 8


# Limits, and callers that mean no good


def test_a_user_has_so_many_runs_and_launches(worker: Worker) -> None:
    worker.end()
    worker.config.write_text('group = "nogroup"\nmax_runs_per_user = 1\nlaunch_rate = 1\n')
    worker.start()
    running(worker, ALICE, "first", "sleep", "60")

    second = worker.call(ALICE, "run", "--", "true")
    others = worker.call(BOB, "run", "--", "true")
    root = worker.host.sealnet("run", "--", "true")
    with as_user(worker, BOB, HURRIED) as hurried:
        kinds = json.loads(hurried.stdout.readline())
    worker.config.write_text('group = "nogroup"\nmax_runs_per_user = 2\nlaunch_rate = 100\n')
    worker.process.send_signal(signal.SIGHUP)
    wait_for(lambda: worker.lines("event=reloaded"), what="the configuration is read again")

    assert (second.returncode, "max_runs_per_user is 1" in second.stderr) == (125, True)
    assert (others.returncode, root.returncode) == (0, 0)
    assert kinds[0] == "usage"
    assert kinds[-1] == "too_many"
    assert worker.call(ALICE, "run", "--", "true").returncode == 0


def connect(worker: Worker) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect(str(worker.socket))
    return sock


# Calls that could be launches, as fast as it goes.
HURRIED = """
sock = connect()
found = []
for _ in range(30):
    request = {"argv": ["true"], "cwd": "/", "environ": {}, "options": {}, "detach": True}
    sock.sendall(json.dumps({"method": "io.sealnet.Worker.Run", "parameters": request}).encode() + bytes(1))
    found.append(json.loads(sock.recv(65536)[:-1])["parameters"]["kind"])
print(json.dumps(found), flush=True)
"""
# Every question about another's run, and about none.
CURIOUS = """
sock = connect()
for method, more in (
    ("Inspect", {}), ("Check", {}), ("Wait", {}), ("Wait", {"tied": True}), ("Log", {}), ("Reap", {}), ("Freeze", {"frozen": True}),
    ("Kill", {"signal": 9}), ("Kill", {"signal": 0}), ("Cancel", {}),
):
    told = []
    for run_id in ("hers", "none"):
        request = {"method": "io.sealnet.Worker." + method, "parameters": {"run_id": run_id, **more}, "more": method == "Log"}
        sock.sendall(json.dumps(request).encode() + bytes(1))
        told.append(json.loads(sock.recv(65536)[:-1]))
    print(json.dumps([method, *told]), flush=True)
print(flush=True)
"""
# Connections on which nothing is asked, or half of something; how many of them were closed.
SILENT = """
socks = []
for number in range(700):
    socks.append(connect())
    if number % 3 == 0:
        try:
            socks[-1].send(b'{"method": "io.sealnet.Wor')
        except OSError:
            pass
closed = [sock for sock in socks[576:] if not heard(sock)]
kept = [sock for sock in socks[:576] if select.select([sock], [], [], 0)[0] == []]
print(json.dumps([len(closed), len(kept)]), flush=True)
"""


@contextlib.contextmanager
def as_user(worker: Worker, uid: int, script: str) -> Iterator[subprocess.Popen[Any]]:
    """A program of that user's, alive until the end."""
    head = f"""
import json, select, socket, sys

def connect():
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(20)
    sock.connect({str(worker.socket)!r})
    return sock

def heard(sock):
    try:
        return sock.recv(1)
    except OSError:
        return b""
"""
    own = ["setpriv", f"--reuid={uid}", f"--regid={uid}", f"--groups={GROUP}", "/usr/bin/python3", "-c", head + script + "sys.stdin.read()"]
    process = worker.host.spawn(*own, stdin=subprocess.PIPE, cwd="/")
    yield process
    process.communicate(timeout=90)


def call(sock: socket.socket, method: str, fds: tuple[int, ...] = (), *, more: bool = False, **parameters: Any) -> dict[str, Any]:
    data = json.dumps({"method": f"io.sealnet.Worker.{method}", "parameters": parameters, "more": more}).encode() + b"\0"
    socket.send_fds(sock, [data], fds)
    return json.loads(read_message(sock))


def read_message(sock: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\0"):
        chunk = sock.recv(1)
        if not chunk:
            raise EOFError(found)
        found += chunk
    return found[:-1]


def test_hundreds_of_silent_callers_keep_nobody_from_anything(worker: Worker) -> None:
    with as_user(worker, ALICE, SILENT) as silent:
        closed, kept = json.loads(silent.stdout.readline())
        others, own = worker.call(BOB, "run", "--", "true"), worker.call(ALICE, "run", "--", "true")

    # One user may have 576.
    assert (closed, kept) == (124, 576)
    assert others.returncode == 0
    assert own.returncode == 125


def test_many_callers_at_once_some_of_which_go_away_leave_nothing(worker: Worker) -> None:
    worker.host.broker(8080)
    told: list[dict[str, Any]] = []

    def run(number: int) -> None:
        options = {"user": str(ALICE), **({"lease_port": 8080} if number % 2 else {})}
        request = {"argv": ["sh", "-c", "sleep 0.2; exit 5"], "cwd": "/", "environ": {}, "options": options}
        fds = [os.open(os.devnull, os.O_RDWR), os.open("/", os.O_PATH)]
        with connect(worker) as sock:
            data = json.dumps({"method": "io.sealnet.Worker.Run", "parameters": request, "more": True}).encode() + b"\0"
            socket.send_fds(sock, [data], [fds[0]] * 3 + fds[1:])
            for fd in fds:
                os.close(fd)
            if number % 4 == 0:
                time.sleep(number / 40)
                return
            sock.settimeout(60)
            assert "started" in json.loads(read_message(sock))["parameters"]
            told.append(json.loads(read_message(sock))["parameters"]["ended"])

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        list(pool.map(run, range(40)))

    assert [one["status"] for one in told] == [5] * 30
    wait_for(lambda: os.listdir(worker.host.state / "runs") == [], timeout_s=30, what="nothing is left of any")


def test_what_is_no_call_ends_the_connection_and_no_more(worker: Worker) -> None:
    for data in (b"\0", b"GET / HTTP/1.0\r\n\r\n\0", b"[" * 200_000, b'{"method":"a.B","x":1}\0', os.urandom(5000) + b"\0"):
        with connect(worker) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1000) == b""
    with connect(worker) as sock:
        null = os.open(os.devnull, os.O_RDWR)
        with contextlib.suppress(OSError, EOFError):
            call(sock, "List", (null,) * 200)
            raise AssertionError("too many descriptors were taken")
        os.close(null)

    assert worker.lines("event=dropped")
    with connect(worker) as sock:
        assert call(sock, "List") == {"parameters": {"runs": []}}


def test_a_wrong_call_is_answered(worker: Worker) -> None:
    run = {"argv": ["true"], "cwd": "/", "environ": {}}
    with connect(worker) as sock:
        for method, parameters, error in (
            ("Nothing", {}, "org.varlink.service.MethodNotFound"),
            ("Kill", {"run_id": "x"}, "org.varlink.service.InvalidParameter"),
            ("Kill", {"run_id": "x", "signal": "9"}, "org.varlink.service.InvalidParameter"),
            ("Kill", {"run_id": "x", "signal": 9, "extra": 1}, "org.varlink.service.InvalidParameter"),
            ("Kill", {"run_id": "../x", "signal": 9}, "io.sealnet.Worker.Failed"),
            ("Kill", {"run_id": "x", "signal": -1}, "io.sealnet.Worker.Failed"),
            ("Run", {**run, "options": {}}, "org.varlink.service.ExpectedMore"),
            ("Run", {**run, "options": {"colour": "red"}}, "org.varlink.service.InvalidParameter"),
            ("Run", {**run, "options": {}, "detach": True}, "io.sealnet.Worker.Failed"),
            ("Events", {}, "org.varlink.service.ExpectedMore"),
        ):
            answer = call(sock, method, **parameters)
            assert answer["error"] == error, answer
        assert call(sock, "List") == {"parameters": {"runs": []}}


# Others' clients, and systemd


def test_a_client_that_is_not_ours_understands_it(worker: Worker) -> None:
    """asyncvarlink, an implementation of its own."""
    from asyncvarlink import VarlinkClientProtocol, VarlinkMethodCall, VarlinkTransport
    from asyncvarlink.serviceinterface import VarlinkServiceInterface

    async def connected() -> VarlinkClientProtocol:
        protocol = VarlinkClientProtocol()
        sock = connect(worker)
        sock.setblocking(False)
        VarlinkTransport(asyncio.get_running_loop(), sock, sock, protocol)
        # It tells the protocol in the next round of the loop.
        await asyncio.sleep(0)
        return protocol

    async def story() -> None:
        first, second = await connected(), await connected()
        service = first.make_proxy(VarlinkServiceInterface)
        info = await service.GetInfo()
        described = await service.GetInterfaceDescription(interface="io.sealnet.Worker")
        events = second.call_more(VarlinkMethodCall("io.sealnet.Worker.Events", {}, more=True))
        await anext(events)

        read, write = os.pipe()
        null, cwd = os.open(os.devnull, os.O_RDWR), os.open("/", os.O_PATH)
        request = {"argv": ["echo", "hello"], "cwd": "/", "environ": {}, "options": {"run_id": "foreign", "user": str(BOB)}}
        told = []
        async for reply, _fds in first.call_more(VarlinkMethodCall("io.sealnet.Worker.Run", request, more=True), [null, write, null, cwd]):
            told.append(reply.parameters)
        for fd in (write, null, cwd):
            os.close(fd)
        with open(read) as pipe:
            said = pipe.read()
        heard = [(await anext(events))[0].parameters["event"] for _ in range(2)]

        if shutil.which("varlinkctl"):
            # Where systemd is new enough to have it.
            reads = worker.host.run("varlinkctl", "introspect", str(worker.socket), "io.sealnet.Worker").stdout
            assert "method Run(" in reads
        assert info["product"] == "sealnet worker"
        assert info["interfaces"] == ["org.varlink.service", "io.sealnet.Worker"]
        assert described["description"].startswith("# Runs sealed commands")
        assert said == "hello\n"
        assert told[0]["started"]["receipt"]["verdict"] == "severed"
        assert told[-1]["ended"]["status"] == 0
        assert [(one["event"], one["run_id"], one["detail"]) for one in heard] == [
            ("started", "foreign", "severed"),
            ("ended", "foreign", "0"),
        ]

    asyncio.run(asyncio.wait_for(story(), 30))


def test_systemd_starts_it_and_hears_of_it(host: Host) -> None:
    """As its units do: a socket is passed, and notifications are heard."""
    host.state.mkdir(mode=0o711)
    listener, notified = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(host.state / "worker.sock"))
    listener.listen()
    notified.bind("/run/notify")
    notified.settimeout(20)
    start = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.environ['LISTEN_PID'] = str(os.getpid()); os.execv(sys.argv[2], sys.argv[2:])"
    environ = {**os.environ, "LISTEN_FDS": "1", "NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "400000"}
    with listener, notified:
        process = host.spawn(
            sys.executable, "-c", start, str(listener.fileno()), *SEALNET, "worker", pass_fds=(listener.fileno(),), env=environ
        )

        def hear(word: bytes) -> bytes:
            while word not in (told := notified.recv(4096)):
                pass
            return told

        assert b"STATUS=serving" in hear(b"READY=1")
        hear(b"WATCHDOG=1")
        hear(b"WATCHDOG=1")
        assert host.sealnet("run", "--worker", "always", "--", "sh", "-c", "exit 3; env | grep NOTIFY").returncode == 3
        process.send_signal(signal.SIGHUP)
        assert b"MONOTONIC_USEC=" in hear(b"RELOADING=1")
        hear(b"READY=1")
        process.send_signal(signal.SIGTERM)
        hear(b"STOPPING=1")
        assert process.wait(60) == 0


def test_it_needs_no_capability_that_its_unit_does_not_give(worker: Worker) -> None:
    worker.host.broker(8080)
    unit = (Path(__file__).parents[1] / "scripts/systemd/sealnet-worker.service").read_text()
    given = re.findall(r"CAP_(\w+)", " ".join(line for line in unit.splitlines() if line.startswith("CapabilityBoundingSet=")))
    mine = int(re.findall(r"CapBnd:\s(\w+)", Path("/proc/self/status").read_text())[0], 16)
    known = subprocess.run(["setpriv", "--list-caps"], capture_output=True, text=True, check=True).stdout.split()
    kept = [f"+{name.lower()}" for name in given if mine >> known.index(name.lower()) & 1]
    (worker.home(ALICE) / "shown").write_text("shown")
    script = "cat /mnt/shown; curl -fsS http://broker.sealnet:8080/hello"
    words = ("--ro-bind", f"{worker.home(ALICE)}:/mnt", "--evidence", "bundle")

    worker.end()
    worker.start("setpriv", f"--bounding-set=-all,{','.join(kept)}", "--inh-caps=-all", "--no-new-privs")
    sealed = worker.call(ALICE, "run", "--lease-port", "8080", *words, "--", "sh", "-c", script)
    relayed = worker.call(ALICE, "run", "--broker", "tcp:127.0.0.1:8080", "--", "sh", "-c", "curl -fsS $SEALNET_BROKER_URL/relayed")
    fewer = [name for name in kept if name != "+setuid"]
    worker.end()
    worker.start("setpriv", f"--bounding-set=-all,{','.join(fewer)}", "--inh-caps=-all")
    without = worker.call(ALICE, "run", "--lease-port", "8080", "--", "true")
    worker.end()
    worker.start()

    assert (sealed.returncode, sealed.stdout) == (0, "shown/hello"), sealed.stderr
    assert (relayed.returncode, relayed.stdout) == (0, "/relayed"), relayed.stderr
    assert without.returncode == 125


def test_there_is_one_worker(worker: Worker) -> None:
    second = worker.host.sealnet("worker")

    assert (second.returncode, "one runs already" in second.stderr) == (125, True)
    assert worker.call(ALICE, "run", "--", "true").returncode == 0


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_who_waits_for_a_run_without_a_worker_can_leave(worker: Worker, signum: int, is_told: bool) -> None:
    # Whether it has been told by then that its run runs, or not.
    client = running(worker, ALICE, "left", "sleep", "600", options=("--grace", "0.5"))
    if is_told:
        wait_for(lambda: worker.lines("event=started run=left"), what="the client is told")
    worker.end(signal.SIGKILL)
    assert worker.host.sealnet("reap", "left").stdout == "reaped  left\n"
    assert client.poll() is None

    client.send_signal(signum)

    _, said = client.communicate(timeout=30)
    assert (client.returncode, "the worker has gone, and no other has come" in said) == (125, True), said
