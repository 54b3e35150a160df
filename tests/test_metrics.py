"""What the worker tells Prometheus: read by Prometheus' own parser, to this host alone, and whoever asks holds up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sealnet.errors import CannotSeal, Interrupted, NoBroker, SealnetError, TooMany, UsageError
from sealnet.guard import EVENTS
from sealnet.kernel import sockets
from sealnet.model import config, endpoint
from sealnet.model.endpoint import Endpoint
from sealnet.model.record import Record
from sealnet.worker import metrics, scrape
from sealnet.worker.metrics import BOUNDS, Metrics, Now
from sealnet.worker.scrape import Scrapes
from tests.lab import PATIENCE

HOSTILE = 'x"} 1\nsealnet_runs{state="running'
DOOR = 65533


def record(**given: Any) -> Record:
    known = {"asked": "sealed", "boot_id": "b", "supervisor": 1, "supervisor_start": 1, "ifname": "seal0", "netns": "n", "started": 1.0}
    return Record(**{"run_id": "a-1", "confinement": "sealed", "user": "u", "command": "c", "state": "running", **known, **given})


def now(*records: Record, **given: Any) -> Now:
    seen = {"launching": 0, "helper_starts": 1, "crew_died": 0, "reserved": 0, "most": 4096, "open_fds": 9, "resident_bytes": 1, **given}
    return Now(records=records, **seen)


def parsed(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """By sample name: labels and values. A series that is told twice is none."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), (sample.name, labels)
            found[sample.name][labels] = sample.value
    return found


def test_prometheus_reads_every_line_of_it() -> None:
    text = Metrics().render(now())

    found = parsed(text)

    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert sum(map(len, found.values())) == len(lines)
    assert text.endswith("\n")
    # https://prometheus.io/docs/practices/naming/
    assert all(re.fullmatch("(sealnet|process)_[a-z_]+", name) for name in found)


def test_the_page_tells_of_every_metric() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs/operations.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    cells = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    told = {(name, kind.strip()) for first, kind, *_ in cells for name in re.findall(r"`([a-z_]+)", first)}

    found = set(re.findall("^# TYPE ([a-z_]+) ([a-z]+)$", Metrics().render(now()), re.MULTILINE))

    assert len(found) > 15
    assert told == found


def test_what_has_happened_is_counted() -> None:
    counted = Metrics()
    counted.launch("sealed", 0.02)
    counted.launch("severed", 99.0)
    for error in (NoBroker("a"), CannotSeal("b"), TooMany("c"), TooMany("c"), SealnetError("d"), Interrupted(15)):
        counted.refuse(error)
    events = ({"event": "gate-restored"}, {"event": "gate-restored"}, {"event": "gave-up"})
    tried = [("192.0.2.1", "tcp", 80, 3), ("192.0.2.2", "udp", 53, 4)]
    counted.end(record(events=events), tried=tried, denied=5, took_s=0.5, is_left=True)
    live = record(lease_ports=(8080, 29400), events=({"event": "gave-up"},))
    closing = record(confinement="severed", state="exited")

    found = parsed(counted.render(now(live, live, closing, launching=7, helper_starts=3, crew_died=4, reserved=2)))

    assert found["sealnet_launches_total"][("confinement", "sealed"),] == 1
    assert {labels[0][1]: value for labels, value in found["sealnet_launches_refused_total"].items() if value} == {
        "no_broker": 1,
        "cannot_seal": 1,
        "too_many": 2,
        "failed": 1,
        "cancelled": 1,
    }
    assert {labels: value for labels, value in found["sealnet_runs"].items() if value} == {
        (("confinement", "sealed"), ("state", "running")): 2,
        (("confinement", "severed"), ("state", "exited")): 1,
    }
    # Those of live runs count with those of ended ones, and stay when a run goes from the one to the other.
    assert {labels[0][1]: value for labels, value in found["sealnet_tamper_events_total"].items() if value} == {
        "gate-restored": 2,
        "gave-up": 3,
    }
    assert {labels[0][1]: value for labels, value in found["sealnet_helper_restarts_total"].items()} == {"nft": 2, "door": 0, "crew": 4}
    singles = {name: found[name][()] for name in found if () in found[name]}
    assert (singles["sealnet_denied_packets_total"], singles["sealnet_denied_requests_total"]) == (7, 5)
    assert (singles["sealnet_leases"], singles["sealnet_subnets_reserved"], singles["sealnet_launches_in_progress"]) == (4, 2, 7)
    assert singles["sealnet_teardown_faults_total"] == 1
    assert (singles["sealnet_setup_seconds_count"], singles["sealnet_setup_seconds_sum"]) == (2, 99.02)


@pytest.mark.parametrize("denied", ["5", None, True, -1, 1.5, float("inf"), float("nan"), 10**400, [1], {}])
def test_what_a_door_that_was_taken_over_says_it_has_counted_spoils_nothing(denied: object) -> None:
    counted = Metrics()
    counted.end(record(), tried=[], denied=3, took_s=0.1, is_left=False)

    counted.end(record(), tried=[], denied=denied, took_s=0.1, is_left=False)

    found = parsed(counted.render(now()))
    assert found["sealnet_denied_requests_total"][()] == 3
    assert found["sealnet_runs_ended_total"][("confinement", "sealed"),] == 2


def test_a_histogram_counts_what_is_no_more_than_each_bound() -> None:
    counted = Metrics()
    for took_s in (0.0, 0.02, 0.020001, 31.0):
        counted.launch("sealed", took_s)

    buckets = parsed(counted.render(now()))["sealnet_setup_seconds_bucket"]

    assert [float(labels[0][1]) for labels in buckets] == [*BOUNDS, float("inf")]
    assert [value for _labels, value in buckets.items()] == [1, 2, *[3] * (len(BOUNDS) - 2), 4]


def test_what_callers_and_payloads_choose_is_in_no_label() -> None:
    counted = Metrics()
    counted.refuse(UsageError(HOSTILE))
    hostile = record(command=HOSTILE, user=HOSTILE, why_severed=HOSTILE, events=({"event": HOSTILE, "detail": HOSTILE},))
    counted.end(hostile, tried=[(HOSTILE, HOSTILE, 1, 1)], denied=0, took_s=0.1, is_left=False)

    plain, told = parsed(Metrics().render(now(record()))), parsed(counted.render(now(hostile)))

    # The same series, whatever the runs: none was added, and none hides another.
    assert {(name, labels) for name in told for labels in told[name]} == {(name, labels) for name in plain for labels in plain[name]}
    assert told["sealnet_tamper_events_total"][("event", "other"),] == 2
    assert told["sealnet_launches_refused_total"][("kind", "usage"),] == 1


def test_every_event_of_a_seal_is_known_and_on_the_page() -> None:
    root = Path(__file__).resolve().parents[1]
    sources = "".join((root / "sealnet" / name).read_text() for name in ("guard.py", "model/check.py"))
    page = (root / "docs/operations.md").read_text().partition("## While a run lives")[2].partition("\n## ")[0]

    named = set(re.findall(r'(?:Fault\(|_note\(\s*|append\(Fault\()"([a-z0-9-]+)"', sources))
    told = set(re.findall(r"`([a-z0-9-]+)`", "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))))

    assert {"link-gone", "door-ended", "gave-up"} <= named <= EVENTS
    # A gate that was changed is told as gate-restored or gate-lost.
    assert told == EVENTS - {"gate-changed"}


# Where it may be asked


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("unix:/run/sealnet/metrics.sock", Endpoint(path="/run/sealnet/metrics.sock")),
        ("127.0.0.1:9464", Endpoint(address="127.0.0.1", port=9464)),
        ("127.7.7.7:1", Endpoint(address="127.7.7.7", port=1)),
        ("[::1]:9464", Endpoint(address="::1", port=9464)),
    ],
)
def test_this_host_alone_may_ask(text: str, at: Endpoint) -> None:
    assert endpoint.parse(text, "--metrics") == at
    assert str(at) == text
    assert config.parse(f'metrics = "{text}"').metrics == at


@pytest.mark.parametrize(
    "text",
    [
        "0.0.0.0:9464", "192.168.77.1:9464", "[::]:9464", "[fe80::1]:9464", "[::ffff:192.168.77.1]:9464", "198.18.0.1:9464",
        "localhost:9464", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:+1", "127.1:80", ":9464", "9464", "",
        "::1:9464", "unix:", "unix:relative", "unix:/a/", "unix:/" + "x" * 100, "unix:/a\nb", "127.0.0.1:9464 ", "127.0.0.1:9464\n",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot use --metrics"):
        endpoint.parse(text, "--metrics")


def test_there_are_none_unless_they_are_asked_for() -> None:
    assert config.Config().metrics is None
    assert config.parse('metrics = ""').metrics is None
    with pytest.raises(UsageError, match="cannot use metrics in"):
        config.parse('metrics = "0.0.0.0:9464"')
    with pytest.raises(UsageError, match="it must be a text"):
        config.parse("metrics = 9464")


# Who asks


def story(
    told: Callable[[Any], Awaitable[None]],
    *,
    at: Endpoint | None = None,
    shut_out: int = DOOR,
    before: Callable[[Any], None] = lambda _address: None,
) -> None:
    """Told with the address at which metrics are served in this process. `before` they are, what comes waits in the kernel's queue."""
    runs = SimpleNamespace(metrics=Metrics(), launching=0, helper_starts=1, crew=SimpleNamespace(died=0), records=lambda: [record()])
    state = SimpleNamespace(reserved=lambda: [1, 2])

    async def run() -> None:
        sock = scrape.listen(at or Endpoint(address="127.0.0.1", port=0))
        scrapes = Scrapes(sock, runs, state, most=4096, shut_out=shut_out)  # type: ignore[arg-type]
        address = at.path if at is not None and at.path is not None else sock.getsockname()
        before(address)
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: faults.append(context))
        scrapes.start()
        try:
            await told(address)
        finally:
            scrapes.close()
        # The worker would write each down as a bug of its own.
        assert faults == []

    asyncio.run(asyncio.wait_for(run(), 20 * PATIENCE))


async def ask(address: Any, request: bytes = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") -> tuple[str, bytes]:
    """Status line and body."""
    reader, writer = await (asyncio.open_unix_connection(address) if isinstance(address, str) else asyncio.open_connection(*address[:2]))
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode().partition("\r\n")[0], body


@pytest.mark.parametrize("at", [None, Endpoint(address="::1", port=0), "unix"], ids=["IPv4", "IPv6", "unix"])
def test_who_asks_is_told(at: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"

    async def told(address: Any) -> None:
        status, body = await ask(address)

        assert status == "HTTP/1.1 200 OK"
        found = parsed(body.decode())
        assert found["sealnet_runs"][("confinement", "sealed"), ("state", "running")] == 1
        assert found["sealnet_subnets_reserved"][()] == 2

    story(told, at=Endpoint(path=str(path)) if at == "unix" else at)
    if at == "unix":
        assert path.stat().st_mode & 0o777 == 0o600
        # The next worker takes its place.
        story(told, at=Endpoint(path=str(path)))


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sock"
    path.write_text("somebody's")

    with pytest.raises(CannotSeal, match="something else is there"):
        scrape.listen(Endpoint(path=str(path)))

    assert path.read_text() == "somebody's"
    assert os.listdir(tmp_path) == ["metrics.sock"]


@pytest.mark.parametrize(
    ("request_bytes", "status", "has_body"),
    [
        (b"GET / HTTP/1.0\r\n\r\n", "200 OK", True),
        (b"GET /metrics?x=1 HTTP/1.1\r\n\r\n", "200 OK", True),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", "200 OK", False),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", "404 Not Found", True),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "400 Bad Request", True),
        (b"\x16\x03\x01\r\n\r\n", "400 Bad Request", True),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 3000 + b"\r\n\r\n", "200 OK", True),
    ],
)
def test_what_is_asked_is_one_line(request_bytes: bytes, status: str, has_body: bool) -> None:
    async def told(address: Any) -> None:
        found, body = await ask(address, request_bytes)

        assert found == f"HTTP/1.1 {status}"
        assert bool(body) == has_body

    story(told)


def test_a_door_is_told_nothing() -> None:
    async def told(address: Any) -> None:
        status, body = await ask(address)

        assert status == "HTTP/1.1 403 Forbidden"
        assert b"sealnet_runs" not in body

    # By another's name: this process is the door.
    story(told, shut_out=os.getuid())


def test_silent_and_talkative_callers_keep_nobody_from_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_WITHIN_S", 3600.0)

    async def told(address: Any) -> None:
        silent = [await asyncio.open_connection(*address[:2]) for _ in range(3 * scrape._MOST)]
        for _reader, writer in silent[::2]:
            writer.write(b"GET /metrics HT")

        assert (await ask(address))[0] == "HTTP/1.1 200 OK"
        # No more than there may be, the last ones and the one that asked: the others were let go.
        closed = 0
        for reader, _writer in silent[: 2 * scrape._MOST]:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            closed += 1
        assert closed == 2 * scrape._MOST
        # A head without an end.
        reader, writer = await asyncio.open_connection(*address[:2])
        writer.write(b"x" * 100_000)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""

    story(told)


def test_who_takes_too_long_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_WITHIN_S", 0.05)

    async def told(address: Any) -> None:
        reader, _writer = await asyncio.open_connection(*address[:2])

        assert await reader.read() == b""

    story(told)


def test_who_has_reset_its_connection_before_it_is_taken_is_no_bug() -> None:
    def reset(address: Any) -> None:
        with socket.create_connection(address) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))

    async def told(address: Any) -> None:
        # Taken in their order.
        assert (await ask(address))[0] == "HTTP/1.1 200 OK"

    story(told, before=reset)


def test_one_is_taken_at_a_time_and_then_there_is_a_rest_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_REST_S", 3600.0)
    taken: list[object] = []
    real = Scrapes._serve

    async def serve(self: Scrapes, *given: Any) -> None:
        taken.append(given)
        await real(self, *given)

    monkeypatch.setattr(Scrapes, "_serve", serve)
    waiting: list[socket.socket] = []

    def come(address: Any) -> None:
        for _ in range(6):
            waiting.append(socket.create_connection(address))
            waiting[-1].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")

    async def told(_address: Any) -> None:
        reader, writer = await asyncio.open_connection(sock=waiting[0])
        assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(taken) == 1

    story(told, before=come)
    for one in waiting[1:]:
        one.close()


def test_who_asks_when_the_worker_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "_WITHIN_S", 3600.0)

    async def run() -> None:
        sock = scrape.listen(Endpoint(address="127.0.0.1", port=0))
        scrapes = Scrapes(sock, SimpleNamespace(), SimpleNamespace(), most=1, shut_out=DOOR)  # type: ignore[arg-type]
        scrapes.start()
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        while not scrapes._open:
            await asyncio.sleep(0.001)

        scrapes.close()

        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()

    asyncio.run(asyncio.wait_for(run(), 20 * PATIENCE))


def test_the_owner_of_a_connection_is_told_by_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = server.getsockname()
        with socket.create_connection(where) as client:
            local = client.getsockname()

            assert sockets.owner(local, where) == os.getuid()
            # Not the listener's, whose port it names, and not one that was never there.
            assert sockets.owner(where, ("127.0.0.1", 1)) is None
        # Nobody holds it open any more, and what has no file says it is root's.
        assert sockets.owner(local, where) is None


def test_the_kinds_are_those_of_the_protocol() -> None:
    text = (Path(metrics.__file__).parent / "io.sealnet.Worker.varlink").read_text()
    told = re.search("# kind: ([a-z_, ]+)\\.", text)

    assert told is not None
    assert {*told[1].split(", ")} == {*metrics._KINDS} - {"cancelled"}
