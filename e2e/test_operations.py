"""What those who run it see: metrics, listings in order, a live table, and whether the host can seal, also without being root."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.test_worker_socket import ALICE, BOB, Worker, running, worker
from tests.lab import PATIENCE, SEALNET, Host, wait_for
from tests.test_metrics import parsed

__all__ = ["worker"]

pytestmark = pytest.mark.root

PORT = 9464
AT = f"127.0.0.1:{PORT}"
# Sets the window's title, clears the screen, writes to the clipboard, moves up, and looks like markup of rich's.
HOSTILE = "\x1b]0;pwned\x07\x1b[2J\x1b]52;c;cHduZWQ=\x07\x9b5A\u202e[bold red]x[/]"


def ask() -> str:
    """The answer, head and body."""
    with socket.create_connection(("127.0.0.1", PORT), 20 * PATIENCE) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        return b"".join(iter(lambda: sock.recv(65536), b"")).decode()


def value(name: str, **labels: str) -> float:
    head, _, body = ask().partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"), head
    return parsed(body)[name][tuple(sorted(labels.items()))]


@pytest.fixture
def told(worker: Worker) -> Worker:
    """A worker that tells its metrics."""
    worker.end()
    worker.config.write_text(f'group = "nogroup"\nmetrics = "{AT}"\n')
    worker.start()
    return worker


def test_the_metrics_tell_what_happens(told: Worker) -> None:
    told.host.broker(8080)
    script = "curl -sm 5 http://192.0.2.1/; curl -fsS http://broker.sealnet:8080/; exec sleep 600"
    process = running(told, ALICE, "counted", "sh", "-c", script, options=("--lease-port", "8080"))
    refused = told.call(BOB, "run", "--lease-port", "1", "--", "true")
    assert refused.returncode == 125

    assert value("sealnet_runs", state="running", confinement="sealed") == 1
    assert value("sealnet_leases") == value("sealnet_subnets_reserved") == 1
    assert value("sealnet_launches_total", confinement="sealed") == 1
    assert value("sealnet_launches_refused_total", kind="no_broker") == 1
    assert value("sealnet_setup_seconds_count") == 1
    assert value("sealnet_denied_packets_total") == 0
    assert value("sealnet_helper_restarts_total", helper="nft") == 0

    proxied = told.call(ALICE, "run", "--allow", "a.test", "--no-preflight", "--", "curl", "-sm", "20", "http://denied.test/")
    assert "denied" in proxied.stdout
    assert value("sealnet_denied_requests_total") == 1

    told.host.run("nft", "delete", "table", "inet", "sealnet")
    wait_for(lambda: value("sealnet_tamper_events_total", event="gate-restored") == 1, what="that the gate was lost is counted")
    for kind, which in (("nft", "sealnet.kernel.nfthelper"), ("crew", "sealnet-crew")):
        os.kill(told.helpers(which)[-1], signal.SIGKILL)
        # A run with a door is the worker's own to launch, and any other its crew's.
        options = ("--allow", "a.test", "--no-preflight") if kind == "nft" else ()
        assert told.call(ALICE, "run", *options, "--", "true").returncode == 0
        wait_for(lambda kind=kind: value("sealnet_helper_restarts_total", helper=kind) == 1, what=f"{kind} is counted")

    assert told.call(ALICE, "reap", "counted").returncode == 0
    process.wait(60)
    assert value("sealnet_runs_ended_total", confinement="sealed") == 1
    assert value("sealnet_runs", state="running", confinement="sealed") == 0
    assert value("sealnet_leases") == value("sealnet_subnets_reserved") == 0
    assert value("sealnet_denied_packets_total") >= 1
    assert value("sealnet_tamper_events_total", event="gate-restored") == 1
    assert value("sealnet_teardown_seconds_count") == 4
    assert value("sealnet_log_lines_total", level="info", event="started") == 4
    assert "alice" not in (text := ask())
    assert "counted" not in text


def test_no_run_reaches_the_metrics(told: Worker) -> None:
    """Not by itself, and not by a relay, which its caller may lead to any port of this host."""
    told.host.broker(8080)
    told.host.broker(9000, "127.0.0.1")
    tries = " ".join(f"http://{where}:{PORT}/metrics" for where in ("127.0.0.1", "broker.sealnet", "192.168.77.1"))
    by_itself = f"for url in {tries}; do curl -sm 5 -o /dev/null -w '%{{http_code}} ' $url; done; curl -fsS http://broker.sealnet:8080/ok"
    by_relay = "curl -sm 20 -w ' %{http_code}' $SEALNET_BROKER_URL/metrics"

    own = told.call(ALICE, "run", "--lease-port", "8080", "--", "sh", "-c", by_itself)
    relayed = told.call(ALICE, "run", "--broker", f"tcp:{AT}", "--", "sh", "-c", by_relay)
    roots = told.host.sealnet("run", "--worker", "never", "--broker", f"tcp:{AT}", "--", "sh", "-c", by_relay)
    other = told.call(ALICE, "run", "--broker", "tcp:127.0.0.1:9000", "--", "sh", "-c", by_relay)

    assert own.stdout == "000 000 000 /ok"
    assert relayed.stdout == roots.stdout == "403 Forbidden\n 403"
    # The controls: a relay to another port of loopback leads there, and who is no payload is told.
    assert other.stdout == "/metrics 200"
    assert "sealnet_runs" in ask()


def test_what_is_no_place_for_metrics_is_refused_and_a_port_that_is_taken_keeps_no_worker_from_its_work(worker: Worker) -> None:
    worker.end()
    refused = worker.host.sealnet("worker", "--metrics", f"192.168.77.1:{PORT}", env=worker.environ)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "only a loopback address is for this one alone" in refused.stderr
    worker.config.write_text(f'group = "nogroup"\nmetrics = "{AT}"\n')
    with socket.create_server(("127.0.0.1", PORT)):
        worker.start()

        assert worker.lines("level=error event=no-metrics")
        assert worker.call(ALICE, "run", "--", "true").returncode == 0


# Doctor


def test_who_is_not_root_asks_the_worker_whether_this_host_can_seal(worker: Worker) -> None:
    asked = worker.call(ALICE, "doctor", "--json")
    people = worker.call(ALICE, "doctor")
    roots = worker.host.sealnet("doctor", "--worker", "--json")
    # Who is not let in is told what may be seen without.
    worker.end()
    worker.socket.unlink()
    alone = worker.call(ALICE, "doctor", "--json")

    document, by_root = json.loads(asked.stdout), json.loads(roots.stdout)
    assert (asked.returncode, document["can_seal"], document["probe"]["reason"]) == (0, True, None)
    assert document.keys() == by_root.keys()
    assert [row["name"] for row in document["rows"] if row["status"] == "fail"] == []
    assert (people.returncode, people.stdout.splitlines()[-1][:19]) == (0, "this host can seal:")
    assert (roots.returncode, by_root["can_seal"]) == (0, True)
    assert [step["step"] for step in by_root["probe"]["steps"]][-1] == "remove"
    assert (alone.returncode, json.loads(alone.stdout)["can_seal"]) == (1, False)
    assert "privileges" in [row["name"] for row in json.loads(alone.stdout)["rows"] if row["status"] == "fail"]
    worker.start()


def test_a_port_can_be_asked_for_through_the_worker(worker: Worker) -> None:
    """A firewall that lets in one port only: the answer is that port's own."""
    chain = "type filter hook input priority 0; policy drop; iif lo accept; tcp dport 8080 accept;"
    worker.host.run("nft", "-f", "-", input=f"table inet own {{ chain input {{ {chain} }}\n}}\n")
    worker.host.settled()
    script = """
import sealnet
sealer = sealnet.Sealer(worker="always")
print(*(bool(sealer.can_seal(lease_port=port)) for port in (8080, 8081, None)))
"""
    python = str(Path(SEALNET[0]).with_name("python"))
    own = ["setpriv", f"--reuid={ALICE}", f"--regid={ALICE}", "--groups=65534", python, "-c", script]

    answers = worker.host.run(*own, cwd=worker.home(ALICE))
    let_in, shut_out = (worker.call(ALICE, "doctor", "--lease-port", port) for port in ("8080", "8081"))

    assert answers.stdout == "True False False\n"
    assert (let_in.returncode, shut_out.returncode) == (0, 1)
    assert "CANNOT seal, at step prove" in shut_out.stdout


# Listings


def listed(host: Host, *argv: str) -> list[str]:
    return [line.split()[0] for line in host.sealnet("ls", *argv).stdout.splitlines()[1:]]


def test_a_listing_has_the_order_that_was_asked_for(host: Host) -> None:
    host.broker(8080)
    host.spawn_run("b-first", "sleep", "600", options=("--lease-port", "8080", "--user", "1"))
    host.spawn_run("c-second", "sleep", "500")
    host.spawn_run("a-third", "sleep", "400", options=("--user", "2"))

    assert listed(host) == ["b-first", "c-second", "a-third"]
    assert listed(host, "--reverse") == ["a-third", "c-second", "b-first"]
    assert listed(host, "--sort", "run") == ["a-third", "b-first", "c-second"]
    assert listed(host, "--sort", "command", "--reverse") == ["b-first", "c-second", "a-third"]
    # Those that are alike stay in the order of their start, either way.
    assert listed(host, "--sort", "confinement") == ["b-first", "c-second", "a-third"]
    assert listed(host, "--sort", "lease", "--reverse")[0] == "b-first"
    assert [one["run_id"] for one in json.loads(host.sealnet("ls", "--json", "--sort", "run").stdout)] == ["a-third", "b-first", "c-second"]
    refused = host.sealnet("ls", "--sort", "colour")
    assert (refused.returncode, refused.stdout) == (2, "")
    host.sealnet("reap", "--all")


def test_each_run_of_a_listing_has_the_same_keys_also_one_that_cannot_be_read(host: Host) -> None:
    host.spawn_run("fine", "sleep", "600")
    host.spawn_run("odd", "sleep", "600")
    record = host.state / "runs/odd/record.json"
    whole = record.read_bytes()
    record.write_text("{}")

    found = {one["run_id"]: one for one in json.loads(host.sealnet("ls", "--json", "--sort", "lease").stdout)}
    shown = host.sealnet("top", "--once", "--sort", "pid")
    assert found["odd"]["state"] == "unreadable"
    assert list(found["odd"]) == list(found["fine"])
    assert (shown.returncode, len(shown.stdout.splitlines())) == (0, 4)

    record.write_bytes(whole)
    host.sealnet("reap", "--all")


# The live table


class Screen:
    """A terminal on which a command runs, and every byte that it was sent."""

    def __init__(self, host: Host, *argv: str, rows: int = 24, columns: int = 100, **options: Any) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environ = {**os.environ, "TERM": "xterm-256color", **options.pop("environ", {})}
        self.process = host.spawn(
            *argv, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True, text=False, **options
        )
        os.close(slave)
        self.seen = b""

    def read(self) -> str:
        while select.select([self.master], [], [], 0)[0]:
            try:
                chunk = os.read(self.master, 65536)
            except OSError:
                break
            if not chunk:
                break
            self.seen += chunk
        return self.seen.decode()

    def close(self) -> None:
        os.close(self.master)


@contextlib.contextmanager
def screen(host: Host, *argv: str, **options: Any) -> Iterator[Screen]:
    made = Screen(host, *argv, **options)
    try:
        yield made
    finally:
        made.close()


# What a terminal is told to do: rich's own moves and colours are a few of ECMA-48's.
_SEQUENCES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07\x1b]*(\x07|\x1b\\)|.)")


def test_a_live_table_shows_runs_as_they_come_and_go_and_leaves_the_terminal_as_it_was(host: Host) -> None:
    with screen(host, *SEALNET, "top", "--interval", "0.2", columns=300) as shown:
        wait_for(lambda: "0 runs" in shown.read(), what="an empty table")
        host.spawn_run("comes", "sh", "-c", "exec sleep 600", HOSTILE)
        wait_for(lambda: "1 run: 1 severed" in shown.read(), what="a run has come")
        host.sealnet("reap", "comes")
        at = len(shown.read())
        wait_for(lambda: "0 runs" in shown.read()[at:], what="it has gone")
        shown.process.send_signal(signal.SIGINT)
        wait_for(lambda: shown.read() is not None and shown.process.poll() is not None, what="it ends")

        said = shown.read()
        assert shown.process.returncode == 0
        assert said.count("\x1b[?1049h") == said.count("\x1b[?1049l") == 1
        assert said.index("\x1b[?1049h") < said.index("comes") < said.index("\x1b[?1049l")
        assert "pwned" in said
        assert not re.search(r"\x1b\]|\x07|\x9b|\u202e", said)
        # The screen of its own, the cursor away and back, where to write, and how bold: nothing else.
        assert {found[0] for found in _SEQUENCES.findall(said)} <= {
            "[?1049h", "[?1049l", "[?25l", "[?25h", "[H", "[2J", "[0m", "[1m",
        }  # fmt: skip


def test_a_terminated_live_table_gives_the_terminal_back(host: Host) -> None:
    with screen(host, *SEALNET, "top") as shown:
        wait_for(lambda: "0 runs" in shown.read(), what="a table")
        shown.process.send_signal(signal.SIGTERM)
        wait_for(lambda: shown.read() is not None and shown.process.poll() is not None, what="it ends")

        assert shown.process.returncode == 128 + signal.SIGTERM
        # Its own screen, and a cursor.
        assert shown.read().endswith("\x1b[?25h\x1b[?1049l")


def test_what_has_no_room_is_counted(host: Host) -> None:
    for number in range(3):
        host.spawn_run(f"many-{number}", "sh", "-c", "exec sleep 600", "\u6f22" * 60)

    with screen(host, *SEALNET, "top", "--sort", "run", rows=5, columns=60) as shown:
        wait_for(lambda: "and 1 more" in shown.read(), what="two of three and a word")
        assert re.search(r"many-1 +running +severed", shown.read())
        assert "many-2" not in shown.read()
        shown.process.send_signal(signal.SIGINT)
        shown.process.wait(60)
    host.sealnet("reap", "--all")


def test_without_a_terminal_it_is_a_plain_table(host: Host) -> None:
    busy = host.spawn_run("busy", "sh", "-c", "for one in $(seq 200000); do :; done; exec sleep 600", "sh", HOSTILE)
    host.spawn_run("idle", "sleep", "600")

    def shown() -> list[list[str]]:
        done = host.sealnet("top", "--once")
        assert (done.returncode, done.stderr) == (0, "")
        assert "\x1b" not in done.stdout
        return [line.split() for line in done.stdout.splitlines()]

    wait_for(lambda: [row[0] for row in shown()[2:]] == ["busy", "idle"], what="the busy one is first")
    summary, head, first, *_ = shown()
    assert summary[1:] == ["2", "runs:", "2", "severed"]
    assert first[6].endswith("%")
    assert head == ["RUN", "STATE", "CONFINEMENT", "LEASE", "USER", "AGE", "CPU", "MEMORY", "EVENTS", "COMMAND"]
    assert [line.split()[0] for line in host.sealnet("top", "--once", "--sort", "run", "--reverse").stdout.splitlines()[2:]] == [
        "idle",
        "busy",
    ]
    # On a terminal that can do nothing, and into a pipe again and again.
    with screen(host, *SEALNET, "top", "--interval", "0.2", environ={"TERM": "dumb"}) as dumb:
        wait_for(lambda: dumb.read().count("COMMAND") >= 2, what="a table after the other")
        assert "\x1b" not in dumb.read()
        dumb.process.send_signal(signal.SIGINT)
        wait_for(lambda: dumb.read() is not None and dumb.process.poll() is not None, what="it ends")
    piped = host.spawn(*SEALNET, "top", "--interval", "0.2")
    assert piped.stdout is not None
    heads = 0
    while heads < 2:
        line = piped.stdout.readline()
        assert line
        heads += "COMMAND" in line
    piped.stdout.close()
    assert piped.wait(60 * PATIENCE) != 0
    assert host.sealnet("--json", "top").returncode == 2
    assert busy.poll() is None
    host.sealnet("reap", "--all")


def test_a_user_watches_its_own_runs_and_a_worker_may_be_replaced_meanwhile(worker: Worker) -> None:
    mine = running(worker, ALICE, "mine", "sleep", "600")
    theirs = running(worker, BOB, "theirs", "sleep", "600")

    once = worker.call(ALICE, "top", "--once")
    with screen(worker.host, *worker.argv(ALICE, "top", "--interval", "0.2"), cwd="/") as shown:
        wait_for(lambda: "mine" in shown.read(), what="its run")
        worker.end(signal.SIGKILL)
        wait_for(lambda: "cannot reach the worker" in shown.read(), what="that the worker has gone")
        at = len(shown.read())
        worker.start()
        wait_for(lambda: "mine" in shown.read()[at:], what="its run, by the next worker")
        shown.process.send_signal(signal.SIGINT)
        wait_for(lambda: shown.read() is not None and shown.process.poll() is not None, what="it ends")

        assert "theirs" not in shown.read()
    assert [line.split()[0] for line in once.stdout.splitlines()[2:]] == ["mine"]
    assert [line.split()[0] for line in worker.host.sealnet("top", "--once", "--sort", "run").stdout.splitlines()[2:]] == ["mine", "theirs"]
    for process, run_id in ((mine, "mine"), (theirs, "theirs")):
        worker.host.sealnet("reap", run_id)
        process.wait(60 * PATIENCE)


def test_nothing_imports_what_only_the_live_table_needs(host: Host) -> None:
    done = host.run(str(Path(SEALNET[0]).with_name("python")), "-X", "importtime", "-m", "sealnet", "top", "--once")

    assert "sealnet.cli.views" in done.stderr
    assert "rich" not in done.stderr
