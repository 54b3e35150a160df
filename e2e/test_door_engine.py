"""The door by itself: every case of names, HTTP, destinations and logs, byte by byte."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealnet.door.__main__ import MAX_LOG_BYTES
from sealnet.door.served import MAX_CONNECTIONS
from sealnet.kernel import identity
from tests.engine import (
    BLACK_HOLE,
    DOOR_UID,
    GATEWAY,
    PORT,
    PUBLIC,
    PUBLIC_6,
    SANDBOX,
    SECOND,
    Engine,
    answer,
    client_hello,
    ended,
    in_netns,
    readable,
    records_of,
    soon,
    status,
)
from tests.lab import LAN_HOST, LAN_PEER, PATIENCE, Host

pytestmark = [pytest.mark.root, pytest.mark.tool("curl", "openssl", "ip", "bash")]

MIB = 1 << 20


@pytest.fixture
def bare(host: Host) -> Iterator[Engine]:
    """A door that serves nothing yet."""
    made = Engine(host)
    try:
        yield made
        assert made.door.poll() is None, "the door has ended"
        assert "Traceback" not in (said := (host.directory / "door.stderr").read_text()), said
        assert said == ""
    finally:
        made.close()


@pytest.fixture
def engine(bare: Engine) -> Iterator[Engine]:
    """It serves run-1. In the end nobody was reached but those that an ALLOW record names."""
    bare.serve_proxy()
    yield bare
    found: list[list[str]] = []

    def agrees() -> bool:
        found[:] = [sorted(bare.reached()), sorted(bare.recorded())]
        return found[0] == found[1]

    soon(agrees, f"reached and recorded: {found}")


def connect_to(authority: str, host: str | None = None) -> bytes:
    return f"CONNECT {authority} HTTP/1.1\r\nHost: {authority if host is None else host}\r\n\r\n".encode("latin-1")


def get(url: str, host: str = "allowed.test", *headers: str) -> bytes:
    more = "".join(f"{header}\r\n" for header in headers)
    return f"GET {url} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode("latin-1")


def assert_refused(engine: Engine, request: bytes, *statuses: int) -> dict:
    """Refused: 4xx, no question, one DENY record. That nobody was dialled is the fixture's to see, a declared host the control beside."""
    before, questions = len(engine.records()), engine.questions.read_text()

    got = engine.ask(request)

    assert status(got) in (statuses or range(400, 500)), (request[:200], got)
    new = engine.records()[before:]
    assert [record["verdict"] for record in new] == ["DENY"], (request[:200], new)
    assert engine.questions.read_text() == questions
    return new[0]


def outcome(netns: str | None, port: int) -> str:
    """How a connection to the door ends that says nothing; a reset may come before connect(2) has returned."""
    with in_netns(netns) if netns else contextlib.nullcontext():
        sock = socket.socket()
    with sock:
        # A first packet may be lost on a busy machine, and TCP repeats it after 1 s, then 2, then 4.
        sock.settimeout(30)
        try:
            sock.connect((GATEWAY, port))
        except ConnectionResetError:
            return "reset"
        return ended(sock, 30)


def assert_allowed(engine: Engine, request: bytes) -> dict:
    before = len(engine.records())
    got = engine.ask(request)
    assert status(got) == 200, (request, got)
    new = engine.records()[before:]
    assert [record["verdict"] for record in new] == ["ALLOW"]
    return new[0]


# The process


def test_the_door_has_nothing_to_lose(engine: Engine) -> None:
    seen = identity.read(engine.door.pid)

    assert set(seen.uids) == set(seen.gids) == {DOOR_UID}
    assert seen.groups == ()
    assert set(seen.capabilities.values()) == {0}
    assert seen.no_new_privs
    assert seen.seccomp == 2
    assert os.readlink(f"/proc/{engine.door.pid}/cwd") == "/"
    assert os.stat(f"/proc/{engine.door.pid}/mem").st_uid == 0  # Not dumpable: proc(5).
    limits = Path(f"/proc/{engine.door.pid}/limits").read_text()
    assert re.search(r"Max core file size +0 +0 ", limits)
    assert re.search(rf"Max file size +{MAX_LOG_BYTES} +{MAX_LOG_BYTES} ", limits)
    assert re.search(rf"Max data size +{1 << 30} +{1 << 30} ", limits)
    assert_allowed(engine, connect_to("allowed.test:443"))


def test_the_door_ends_with_its_control_socket(bare: Engine, host: Host) -> None:
    other = Engine.__new__(Engine)
    other.host, other.control = host, None
    door = other._start_door()
    assert door.poll() is None

    other.close()

    assert door.wait(60) == 0


def test_a_stranger_is_turned_away_without_a_word(engine: Engine) -> None:
    assert outcome(None, PORT) == outcome("lan", PORT) == "reset"

    assert engine.records() == []
    assert_allowed(engine, connect_to("allowed.test:443"))
    assert engine.stop()["strangers"] == 2


@pytest.mark.parametrize(
    "message",
    [
        {"op": "serve", "run": "x", "kind": "relay", "sandbox": SANDBOX, "target": {"tcp": ["127.0.0.1", 1]}},
        {"op": "serve", "run": "run-1", "kind": "proxy"},
        {"op": "serve"},
        {"op": "stop", "run": "no-such"},
        {"op": "dialled", "id": 77, "error": "x"},
        {"op": "fly"},
        {"run": "x"},
        [],
    ],
)
def test_a_request_that_makes_no_sense_is_an_error_and_no_end(engine: Engine, message) -> None:
    engine.tell(message)

    assert "error" in engine.hear()
    assert_allowed(engine, connect_to("allowed.test:443"))


def test_two_runs_are_kept_apart(engine: Engine) -> None:
    other = engine.host.directory / "other.jsonl"
    engine.serve_proxy("run-b", [{"host": "evil.test", "port": 443}], port=PORT + 5, log=other)

    assert status(engine.ask(connect_to("evil.test:443"), port=PORT + 5)) == 200
    assert status(engine.ask(connect_to("allowed.test:443"), port=PORT + 5)) == 403
    assert_refused(engine, connect_to("evil.test:443"), 403)
    assert engine.stop("run-b")["records"] == 2
    assert [json.loads(line)["run_id"] for line in other.read_text().splitlines()] == ["run-b"] * 2
    assert_allowed(engine, connect_to("allowed.test:443"))


# F. Names and authorities


def test_trailing_dot(engine: Engine) -> None:
    """NAME-01"""
    assert assert_allowed(engine, connect_to("allowed.test.:443"))["host"] == "allowed.test"
    assert assert_allowed(engine, get("http://allowed.test./", "allowed.test."))["host"] == "allowed.test"
    for name in ("allowed.test..", ".allowed.test", "evil.test."):
        assert_refused(engine, connect_to(f"{name}:443"))
        assert_refused(engine, get(f"http://{name}/", name))


def test_case(engine: Engine) -> None:
    """NAME-02"""
    assert assert_allowed(engine, connect_to("ALLOWED.Test:443"))["host"] == "allowed.test"
    assert_allowed(engine, get("HTTP://Allowed.TEST/", "aLLowed.test"))
    engine.serve_proxy("run-c", [{"host": "ALLOWED.TEST", "port": 443}], port=PORT + 5, log=engine.host.directory / "c")
    assert status(engine.ask(connect_to("allowed.test:443"), port=PORT + 5)) == 200


@pytest.mark.parametrize("name", ["evilallowed.test", "x.allowed.test", "allowed.test.evil.test", "allowed.tes", "allowed-test", "*", ""])
def test_exact_means_exact(engine: Engine, name: str) -> None:
    """NAME-03"""
    assert_refused(engine, connect_to(f"{name}:443"))
    assert_refused(engine, get(f"http://{name}/", name))
    assert_allowed(engine, connect_to("allowed.test:443"))


@pytest.mark.parametrize("authority", ["[allowed.test]:443", "[1.2.3.4]:443", "[::1", "[allowed.test]x:443"])
def test_name_in_brackets(engine: Engine, authority: str) -> None:
    """NAME-04"""
    assert_refused(engine, connect_to(authority), 400)
    assert_refused(engine, get(f"http://{authority}/", authority), 400)
    assert_refused(engine, connect_to("allowed.test:443", "[allowed.test]:443"), 400)
    assert_allowed(engine, connect_to("allowed.test:443"))


@pytest.mark.parametrize(
    "form",
    "2130706433 0x7f000001 0177.0.0.1 127.1 0 127.0.0.1 [::ffff:7f00:1] [::1%25lo] 2852039166 0x7f.1 1.2.3.0x4 127.0.0.1.".split(),
)
def test_numeric_forms(engine: Engine, form: str) -> None:
    """NAME-07"""
    assert_refused(engine, connect_to(f"{form}:443"), 400, 403)
    assert_refused(engine, get(f"http://{form}/", form), 400, 403)
    assert_allowed(engine, connect_to("allowed.test:443"))


def test_giant_names(engine: Engine) -> None:
    """NAME-09"""
    names = ["a" * 60_000, "a" * 64 + ".test", "a." * 126 + "ab", "a..b", "xn--" + "9" * 50 + ".test", "a" * 15_000, "xn--.test", "-a.test"]
    with engine.tunnel() as normal:
        normal.sendall(b"ECHO")
        assert normal.recv(10) == b"ECHO"
        socks = [engine.connect() for _ in range(200)]
        for index, sock in enumerate(socks):
            sock.sendall(connect_to(f"{names[index % len(names)]}:443"))
        normal.sendall(b"ECHO again")
        assert normal.recv(100) == b"ECHO again"
        statuses = [status(answer(sock)) for sock in socks]
        for sock in socks:
            sock.close()

    assert all(400 <= each < 500 for each in statuses), statuses
    assert all(record["verdict"] == "DENY" for record in engine.records()[1:])
    assert len(engine.records()) == 201


@pytest.mark.parametrize("authority", ["allowed.test:22", "allowed.test:25", "allowed.test:8443", "b.test:443"])
def test_the_port_belongs_to_the_entry(engine: Engine, authority: str) -> None:
    """NAME-11"""
    record = assert_refused(engine, connect_to(authority), 403)
    assert record["reason"].startswith("port not declared: declared for")
    assert_allowed(engine, connect_to("b.test:8443"))


@pytest.mark.parametrize(
    "port", ["0", "00443", "+443", "-443", "443 ", "65979", "4_43", "0x1bb", "", "443:443", "443a", "99999999999999999999"]
)
def test_a_port_is_plain_decimal(engine: Engine, port: str) -> None:
    """NAME-11: other spellings of 443."""
    assert_refused(engine, connect_to(f"allowed.test:{port}"), 400)
    assert_allowed(engine, connect_to("allowed.test:443"))


@pytest.mark.parametrize("literal", ["[::1]:443", "::1:443", "[::1]", "[fe80::1%25eth0]:443", "[2001:db8::1]:99999"])
def test_ipv6_literal_splitting(engine: Engine, literal: str) -> None:
    """NAME-12"""
    record = assert_refused(engine, connect_to(literal), 400, 403)
    assert record["host"] == literal
    assert_allowed(engine, connect_to("allowed.test:443"))


# G. HTTP on the wire


@pytest.mark.parametrize(
    "request_",
    [
        get("http://allowed.test/", "evil.test"),
        b"GET http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\nHost: evil.test\r\n\r\n",
        b"GET http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\nHost: allowed.test\r\n\r\n",
        get("http://allowed.test/", "allowed.test:81"),
        get("http://allowed.test/", ""),
        get("http://allowed.test/", "allowed.test, evil.test"),
        get("http://evil.test@allowed.test/"),
        b"GET http://allowed.test/ HTTP/1.1\r\n\r\n",
        b"CONNECT allowed.test:443 HTTP/1.1\r\n\r\n",
        connect_to("allowed.test:443", "evil.test:443"),
        connect_to("allowed.test:443", "allowed.test:80"),
        b"CONNECT allowed.test:443 HTTP/1.1\r\nHost: allowed.test:443\r\nHost: evil.test:443\r\n\r\n",
        b"GET http://allowed.test/ HTTP/1.1\r\n Host: allowed.test\r\n\r\n",
        b"GET http://allowed.test/ HTTP/1.1\r\nHost : allowed.test\r\n\r\n",
    ],
    ids=itertools.count(),
)
def test_host_against_request_target(engine: Engine, request_: bytes) -> None:
    """HTTP-01"""
    assert_refused(engine, request_, 400)
    assert_allowed(engine, get("http://allowed.test/"))


def test_the_origin_sees_the_host_of_the_target(engine: Engine) -> None:
    """HTTP-01: Host is rewritten."""
    assert_allowed(engine, get("http://ALLOWED.test.:80/x", "allowed.test:80"))
    assert_allowed(engine, b"GET http://allowed.test?q=1 HTTP/1.0\r\n\r\n")

    heads = [each["head"] for each in engine.dialled() if "head" in each]
    assert [head.split("\r\n")[0] for head in heads] == ["GET /x HTTP/1.1", "GET /?q=1 HTTP/1.1"]
    assert all(re.findall(r"(?im)^host: (.*?)\r?$", head) == ["allowed.test"] for head in heads), heads


POST = b"POST http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n"


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"Content-Length: 5, 5\r\n\r\nhello",
        b"Content-Length: 5,6\r\n\r\nhello",
        b"Content-Length: +5\r\n\r\nhello",
        b"Content-Length: -5\r\n\r\nhello",
        b"Content-Length: 5_0\r\n\r\nhello",
        b"Content-Length: 0x5\r\n\r\nhello",
        b"Content-Length: \r\n\r\nhello",
        b"Transfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5_0\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n \r\nhello\r\n0\r\n\r\n",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    ],
    ids=itertools.count(),
)
def test_lengths_and_encodings_that_disagree(engine: Engine, rest: bytes) -> None:
    """HTTP-03"""
    assert_refused(engine, POST + rest, 400, 501)
    with engine.connect() as sock:
        sock.sendall(POST + rest)
        assert ended(sock) == "closed"


def test_an_encoding_in_http_1_0(engine: Engine) -> None:
    """HTTP-03"""
    assert_refused(engine, b"POST http://allowed.test/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 400)


def test_bodies_that_agree_and_what_comes_after(engine: Engine) -> None:
    """HTTP-03: the controls, and bytes after the last chunk, which are another request's."""
    for rest in (
        b"Content-Length: 5\r\n\r\nhello",
        b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    ):
        assert engine.ask(POST + rest).endswith(b"\r\n\r\nhello")
    with engine.connect() as sock:
        sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\nSMUGGLED / HTTP/1.1\r\n\r\n")
        assert status(answer(sock)) == 200
        assert status(answer(sock)) == 400
        assert ended(sock) == "closed"
    assert "SMUGGLED" not in engine.book.read_text()


def test_head_in_single_bytes(engine: Engine) -> None:
    """HTTP-06"""
    head = connect_to("allowed.test:443")
    with engine.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head:
            sock.sendall(bytes([byte]))
            time.sleep(0.002)
        assert status(answer(sock)) == 200
        sock.sendall(b"ECHO1")
        assert sock.recv(10) == b"ECHO1"
    with engine.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(head[:-1])
        time.sleep(0.05)
        sock.sendall(head[-1:])
        assert status(answer(sock)) == 200


def test_an_upload_that_does_not_wait(engine: Engine) -> None:
    """HTTP-06: 1 MB right behind the head."""
    with engine.connect() as sock:
        sock.sendall(connect_to("allowed.test:443") + b"TAKE" + b"x" * (MIB - 4))
        sock.shutdown(socket.SHUT_WR)
        assert status(answer(sock)) == 200
        assert sock.recv(100) == b"%d" % MIB


def test_an_end_that_does_not_wait(engine: Engine) -> None:
    """HTTP-07: all that the client will ever say is there before the door has heard of it, and before its name has led anywhere."""

    def say_all(early: bytes) -> None:
        os.kill(engine.door.pid, signal.SIGSTOP)
        try:
            sock = engine.connect()
            sock.sendall(connect_to("allowed.test:443") + early)
            sock.shutdown(socket.SHUT_WR)
        finally:
            os.kill(engine.door.pid, signal.SIGCONT)
        with sock:
            assert status(answer(sock)) == 200
            assert sock.recv(100) == (b"%d" % len(early) if early else b"")
            assert ended(sock) == "closed"

    # As much as is read at once, and more.
    earlies = [b"", b"TAKE" + b"x" * 10, b"TAKE" + b"x" * 20_000]
    for early in earlies:
        say_all(early)
    # What the file says is kept once it has been at rest: then nothing is waited for any more.
    hosts = engine.host.directory / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{PUBLIC} allowed.test\n")
    asked = engine.questions.read_text()
    soon(lambda: time.time() - hosts.stat().st_ctime > 2.1, "the file is at rest")
    engine.tunnel().close()
    for early in earlies:
        say_all(early)
    assert engine.questions.read_text() == asked


def test_half_close(engine: Engine) -> None:
    """HTTP-07"""
    fds = engine.fds()
    with engine.tunnel() as sock:
        sock.sendall(b"GIVE %d\n" % (4 * MIB))
        sock.shutdown(socket.SHUT_WR)
        got = bytearray()
        while more := sock.recv(65536):
            got += more
    assert bytes(got) == bytes(range(256)) * (4 * MIB // 256)
    with engine.tunnel() as sock:
        sock.sendall(b"TAKE" + bytes(range(256)) * (4 * MIB // 256))
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b"%d" % (4 * MIB + 4)
        assert sock.recv(100) == b""
    # Some pipes are kept for the next one.
    soon(lambda: engine.fds() <= fds + 8, f"descriptors are closed: {engine.fds()} of {fds}")
    soon(lambda: engine.records()[1]["bytes_up"] == 4 * MIB + 4, "the record is finished")
    assert engine.records()[0]["bytes_down"] == 4 * MIB


def test_a_reader_that_is_slow_gets_all(engine: Engine) -> None:
    """HTTP-07: back-pressure."""
    with engine.tunnel() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.sendall(b"GIVE %d\n" % (8 * MIB))
        sock.shutdown(socket.SHUT_WR)
        got = bytearray()
        while more := sock.recv(65536):
            got += more
            if len(got) < MIB:
                time.sleep(0.0005)
    assert len(got) == 8 * MIB
    assert bytes(got) == bytes(range(256)) * (8 * MIB // 256)


def test_a_reset_is_passed_on(engine: Engine) -> None:
    """HTTP-08"""
    with engine.tunnel() as sock:
        sock.sendall(b"RESET")
        assert ended(sock) == "reset"
    sock = engine.tunnel()
    sock.sendall(b"WAIT")
    soon(lambda: any(each.get("data") == b"WAIT".hex() for each in engine.dialled()), "the origin waits")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    soon(lambda: any(each.get("error") == "ConnectionResetError" for each in engine.dialled()), "the origin was reset")
    soon(lambda: all(record["bytes_up"] is not None for record in engine.records()), "the records are finished")


def test_ended_tunnels_free_their_slots(engine: Engine) -> None:
    """HTTP-08"""
    tunnels = [engine.tunnel() for _ in range(MAX_CONNECTIONS)]
    over = engine.ask(connect_to("allowed.test:443"))
    assert status(over) == 503
    assert engine.records()[-1]["reason"].startswith("limit")

    for sock in tunnels[: MAX_CONNECTIONS // 2]:
        sock.sendall(b"RESET")
    again = []
    soon(lambda: status(engine.ask(connect_to("allowed.test:443"))) == 200, "a slot is free", timeout_s=2)
    soon(lambda: again.append(engine.tunnel()) or len(again) == MAX_CONNECTIONS // 2, "the slots are free")

    tunnels[-1].sendall(b"ECHO still")
    assert tunnels[-1].recv(100) == b"ECHO still"
    for sock in [*tunnels, *again]:
        sock.close()


def test_a_client_that_resets_while_it_is_dialled_frees_its_slot(engine: Engine) -> None:
    """HTTP-08"""
    engine.resolves(**{"allowed.test": ["silence"]})
    socks = []
    for _ in range(MAX_CONNECTIONS):
        sock = engine.connect()
        sock.sendall(connect_to("allowed.test:443") + b"more")
        socks.append(sock)
    # Who has not been heard yet makes room for another.
    soon(lambda: engine.unread() == [0] * MAX_CONNECTIONS, "the door has read all heads")
    assert status(engine.ask(connect_to("b.test:8443"))) == 503
    for sock in socks:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()

    # Well before the door gives a dial up.
    soon(lambda: status(engine.ask(connect_to("evil.test:8443"))) == 403, "the slots are free", timeout_s=5)


def test_clients_that_reset_before_they_are_looked_at_leave_no_descriptor(engine: Engine) -> None:
    """Whatever is left of them must not wait for a garbage collection."""
    with engine.connect() as kept:
        assert status(engine.ask(get("http://allowed.test/"))) == 200
        before = engine.fds()

        for _ in range(20):
            batch = [engine.connect() for _ in range(20)]
            for sock in batch:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.close()

        soon(lambda: engine.fds() <= before, f"there are no more than {before} descriptors: {engine.fds()}")
        kept.sendall(get("http://allowed.test/"))
        assert status(answer(kept)) == 200


def test_slow_and_fat_clients(engine: Engine) -> None:
    """HTTP-09"""
    silent = [engine.connect() for _ in range(500)]
    time.sleep(0.2)
    began = time.monotonic()
    assert status(engine.ask(get("http://allowed.test/"))) == 200
    assert time.monotonic() - began < 1 * PATIENCE
    for sock in silent:
        sock.close()

    for fat in (
        b"GET http://allowed.test/" + b"a" * 64_000 + b" HTTP/1.1\r\n\r\n",
        b"GET http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"G" * 1_000_000,
    ):
        assert status(engine.ask(fat)) in (400, 431), fat[:30]
        assert status(engine.ask(get("http://allowed.test/"))) == 200
    assert engine.rss_kb() < 120_000

    with engine.connect(timeout_s=20) as sock:
        sock.sendall(b"GET http://allowed.test/")
        began = time.monotonic()
        while not readable(sock, 1.0):
            sock.sendall(b"a")
        assert status(answer(sock)) == 408
        assert 8 < time.monotonic() - began < 13 * PATIENCE
    assert engine.records()[-1]["reason"].startswith("limit: no request within")


@pytest.mark.parametrize(("path", "expected"), [("100", 200), ("413", 413), ("quiet", 200)])
def test_expect_100_continue(engine: Engine, path: str, expected: int) -> None:
    """HTTP-10"""
    upload = engine.host.directory / "upload"
    upload.write_bytes(bytes(2_000_000))
    command = ["curl", "-sS", "-m", "6", "-o", "/dev/null", "-w", "%{http_code}", "-T", str(upload), "-H", "Expect: 100-continue"]

    done = engine.in_box(*command, "-x", f"http://{GATEWAY}:{PORT}", f"http://allowed.test/{path}")

    assert done.stdout == str(expected), (done.stdout, done.stderr)
    assert "expect: 100-continue" in engine.dialled()[-1].get("head", str(engine.dialled())).lower()


def test_an_answer_that_has_no_body_has_no_length(engine: Engine) -> None:
    """RFC 9110 8.6 and 15.2, RFC 9112 6.1: a length in an interim response or a 204 makes another message of what follows."""
    with engine.connect() as sock:
        heads = []
        for path in ("103", "204", "a"):
            sock.sendall(get(f"http://allowed.test/{path}"))
            got = b""
            while not got.endswith({"103": b"after", "204": b"\r\n\r\n", "a": b"/a"}[path]):
                got += sock.recv(65536)
            heads += got.lower().split(b"\r\n\r\n")[: 2 if path == "103" else 1]
    hints, after, nothing, plain = (head.split(b"\r\n") for head in heads)

    assert hints == [b"http/1.1 103 early hints", b"link: </a>", b"via: 1.1 sealnet"]
    assert b"content-length: 5" in after
    assert b"content-length: 2" in plain
    assert nothing[0].startswith(b"http/1.1 204")
    assert b"x-seen: 1" in nothing
    assert not [line for line in nothing if line.startswith((b"content-length", b"transfer-encoding"))]


@pytest.mark.parametrize("path", ["101", "403"])
@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
def test_upgrade(engine: Engine, path: str, upgrade: str) -> None:
    """HTTP-11"""
    request = get(
        f"http://allowed.test/{path}", "allowed.test", f"Upgrade: {upgrade}", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMA"
    )
    with engine.connect() as sock:
        sock.sendall(request)
        got = answer(sock)
        assert status(got) == (403 if path == "403" else 502)
        assert b"upgrade" not in got.lower()
        try:
            sock.sendall(get("http://evil.test/", "evil.test"))
            second = answer(sock)
        except ConnectionError:
            second = b""
        assert status(second) in (0, 403)

    heads = [each["head"].lower() for each in engine.dialled() if "head" in each]
    assert len(heads) == 1
    assert "upgrade" not in heads[0]
    assert "http2" not in heads[0]
    assert "evil.test" not in engine.asked_names()
    assert not any(each.get("after") for each in engine.dialled())


@pytest.mark.parametrize("nominated", ["close, Content-Length", "Host", "Transfer-Encoding, x-a", "keep-alive,CONTENT-LENGTH"])
def test_connection_nominated_framing(engine: Engine, nominated: str) -> None:
    """HTTP-12"""
    assert_refused(engine, POST + f"Connection: {nominated}\r\nContent-Length: 5\r\n\r\nhello".encode(), 400)


def test_hop_by_hop_headers_stay_here(engine: Engine) -> None:
    """HTTP-12"""
    mine = ["Connection: x-a, keep-alive", "X-A: 1", "X-B: 2", "Proxy-Authorization: Basic SECRET", "Proxy-Connection: keep-alive"]
    mine += ["Keep-Alive: timeout=5", "TE: trailers", "Trailer: X-T", "Proxy-Whatever: 1"]
    assert_allowed(engine, get("http://allowed.test/", "allowed.test", *mine))

    head = engine.dialled()[-1]["head"].lower()
    assert "x-b: 2" in head
    assert not re.search(r"x-a|proxy|keep-alive|te:|trailer|secret", head), head
    got = engine.ask(get("http://allowed.test/chunked"))
    assert got.count(b"hello") <= 1
    assert b"forged" not in got
    assert b"x-b" not in got.lower()


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 501, 505)),
        (records_of(client_hello("allowed.test")), (400,)),
        (b"\x05\x01\x00", (400,)),
        (b"\x04\x01\x01\xbb\x5d\xb8\xd8\x22\x00", (400,)),
        (b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n", (400,)),
        (b"OPTIONS * HTTP/1.1\r\nHost: allowed.test\r\n\r\n", (400,)),
        (b"TRACE http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n", (405,)),
        (get("https://allowed.test/"), (400, 501)),
        (get("ftp://allowed.test/"), (400, 501)),
        (b"CONNECT allowed.test HTTP/1.1\r\nHost: allowed.test\r\n\r\n", (400,)),
        (b"CONNECT http://allowed.test:443 HTTP/1.1\r\nHost: allowed.test:443\r\n\r\n", (400,)),
        (b"CONNECT allowed.test:443/ HTTP/1.1\r\nHost: allowed.test:443\r\n\r\n", (400,)),
        (b"CONNECT allowed.test:443 HTTP/1.1\r\nHost: allowed.test:443\r\nContent-Length: 3\r\n\r\nabc", (400,)),
        (b"GET http://allowed.test/ HTTP/3.0\r\nHost: allowed.test\r\n\r\n", (400, 505)),
        (b"GET http://allowed.test/\r\n\r\n", (400,)),
        (b"\r\n\r\n", (400,)),
    ],
    ids=itertools.count(),
)
def test_not_http_1(engine: Engine, data: bytes, statuses: tuple[int, ...]) -> None:
    """HTTP-13"""
    assert_refused(engine, data, *statuses)
    assert_allowed(engine, b"CONNECT allowed.test:443 HTTP/1.0\r\n\r\n")


def test_sustained_load(engine: Engine) -> None:
    """HTTP-14"""
    fds = engine.fds()
    for _ in range(250):
        engine.tunnel().close()
        assert status(engine.ask(get("http://allowed.test/"))) == 200
    socks = [engine.connect() for _ in range(100)]
    for index, sock in enumerate(socks):
        sock.sendall(connect_to("allowed.test:443") if index % 2 else get("http://allowed.test/"))
    assert {status(answer(sock)) for sock in socks} == {200}
    for sock in socks:
        sock.close()

    # The resolver's threads have none, and idle pipes are kept.
    soon(lambda: engine.fds() <= fds + 4, f"descriptors are closed: {engine.fds()} of {fds}")


def test_credentials_stop_at_the_proxy(engine: Engine) -> None:
    """HTTP-15"""
    done = engine.in_box("curl", "-sS", "-m", "5", "-x", f"http://u:SECRET@{GATEWAY}:{PORT}", "http://allowed.test/")

    assert done.stdout == "/", done.stderr
    assert "dTpTRUNSRVQ" not in engine.book.read_text() + engine.log.read_text()  # base64 of u:SECRET
    assert "SECRET" not in engine.book.read_text() + engine.log.read_text()
    assert "proxy-authorization" not in engine.book.read_text().lower()


def test_keep_alive_judges_each_request(engine: Engine) -> None:
    with engine.connect() as sock:
        for path in ("/a", "/chunked", "/b"):
            sock.sendall(get(f"http://allowed.test{path}"))
            got = answer(sock)
            assert status(got) == 200
            if path == "/chunked":
                while not got.endswith(b"0\r\n\r\n"):
                    got += sock.recv(1000)
            sock.sendall(get("http://evil.test/", "evil.test"))
            assert status(answer(sock)) == 403
        sock.sendall(get("http://allowed.test/1") + get("http://evil.test/2", "evil.test") + get("http://allowed.test/3"))
        assert [status(answer(sock)) for _ in range(3)] == [200, 403, 200]
        sock.sendall(connect_to("evil.test:443"))
        assert status(answer(sock)) == 403
        sock.sendall(connect_to("allowed.test:443"))
        assert status(answer(sock)) == 200
    assert [record["verdict"] for record in engine.records()] == ["ALLOW", "DENY"] * 3 + ["ALLOW", "DENY", "ALLOW", "DENY", "ALLOW"]


@pytest.mark.parametrize("path", ["short", "nothing"])
def test_an_origin_that_breaks_off(engine: Engine, path: str) -> None:
    got = engine.ask(get(f"http://allowed.test/{path}"))

    assert got.endswith(b"RESET") if path == "short" else status(got) == 502
    record = engine.records()[-1]
    assert (record["verdict"], record["reason"].split(":")[0]) == ("ALLOW", "failed")


# H. Destinations


NEVER = [
    *("127.0.0.2", "0.0.0.0", "10.1.0.2", "169.254.169.254", "100.64.0.1", LAN_HOST, LAN_PEER, "::1", "::ffff:127.0.0.1"),
    *("64:ff9b::7f00:1", "fd00::2", "fe80::1", "255.255.255.255", "224.0.0.1", "198.18.0.2", "2002:7f00:1::", "fd77::1", "::ffff:10.0.0.1"),
    *("192.0.2.1", "2001:db8::1", "fec0::1", "ff02::1", "::", "2001:0:7f00:1::", "64:ff9b::a00:1"),
]


@pytest.mark.parametrize("address", NEVER)
def test_addresses_that_are_never_public(engine: Engine, address: str) -> None:
    """DST-02"""
    engine.resolves(**{"allowed.test": [address]})
    got = engine.ask(connect_to("allowed.test:443"))
    assert status(got) == 403
    record = engine.records()[-1]
    assert record["verdict"] == "DENY"
    assert record["reason"].startswith("private address")
    assert record["address"] is not None
    assert engine.reached() == []

    engine.resolves(**{"allowed.test": [address, PUBLIC]})
    assert assert_allowed(engine, connect_to("allowed.test:443"))["address"] == PUBLIC
    soon(lambda: engine.reached() == [PUBLIC], "the public one was reached")


def test_the_hosts_own_addresses_are_refused_as_they_are_now(engine: Engine) -> None:
    """DST-02: public ones too, and one that came after the start."""
    assert_allowed(engine, connect_to("allowed.test:443"))
    engine.host.run("ip", "addr", "add", "93.184.218.1/32", "dev", "lo")
    try:
        engine.resolves(**{"allowed.test": ["93.184.218.1"]})
        got = engine.ask(connect_to("allowed.test:443"))
    finally:
        engine.host.run("ip", "addr", "del", "93.184.218.1/32", "dev", "lo")

    assert status(got) == 403
    assert engine.records()[-1]["reason"] == "private address: the host's own"


def test_allow_private_opens_private_addresses_and_no_more(bare: Engine) -> None:
    """DST-02: the ruling."""
    bare.serve_proxy(allow=[{"host": "allowed.test", "port": 443, "private": True}])
    bare.resolves(**{"allowed.test": [LAN_PEER]})
    assert assert_allowed(bare, connect_to("allowed.test:443"))["address"] == LAN_PEER
    for address in (LAN_HOST, "127.0.0.1", "169.254.169.254", GATEWAY, SANDBOX, "::1", "fe80::1", "fd77::1"):
        bare.resolves(**{"allowed.test": [address]})
        assert status(bare.ask(connect_to("allowed.test:443"))) == 403, address


def test_another_runs_sandbox_is_refused_though_private(bare: Engine) -> None:
    """DST-02"""
    bare.serve_proxy(allow=[{"host": "allowed.test", "port": 443, "private": True}])
    bare.resolves(**{"allowed.test": ["10.1.0.2"]})
    bare.host.run("ip", "link", "add", "sealabcdefghijk", "type", "veth", "peer", "name", "other")
    try:
        bare.host.run("ip", "addr", "add", "10.1.0.1/30", "dev", "sealabcdefghijk")
        bare.host.run("ip", "link", "set", "sealabcdefghijk", "up")
        got = bare.ask(connect_to("allowed.test:443"))
    finally:
        bare.host.run("ip", "link", "del", "sealabcdefghijk")

    assert status(got) == 403
    assert bare.records()[-1]["reason"] == "private address: another run's"


@pytest.mark.parametrize(
    "addresses",
    [[BLACK_HOLE, SECOND], [PUBLIC_6, SECOND], ["2606:dead::1", PUBLIC], [BLACK_HOLE, BLACK_HOLE, PUBLIC], [PUBLIC]],
)
def test_first_address_dead(engine: Engine, addresses: list[str]) -> None:
    """DST-04"""
    engine.resolves(**{"allowed.test": addresses})
    began = time.monotonic()

    with engine.tunnel() as sock:
        sock.sendall(b"ECHO")
        assert sock.recv(10) == b"ECHO"

    assert time.monotonic() - began < 2


def test_all_addresses_dead(engine: Engine) -> None:
    """DST-04"""
    log = engine.log = engine.host.directory / "b.jsonl"
    engine.serve_proxy("run-b", [{"host": "allowed.test", "port": 444}, {"host": "none.test", "port": 443}], port=PORT + 5, log=log)
    for authority, addresses, reason in (
        ("allowed.test:444", [PUBLIC, SECOND], "failed: Connection refused"),
        ("none.test:443", [], "failed: no address"),
    ):
        engine.resolves(**{authority.partition(":")[0]: addresses})

        got = engine.ask(connect_to(authority), port=PORT + 5)

        assert status(got) == 502
        assert f"X-Sealnet-Reason: {reason}".encode() in got
        record = engine.records()[-1]
        assert record["verdict"] == "ALLOW"
        assert record["reason"].startswith(reason)
    denied = engine.ask(connect_to("evil.test:444"), port=PORT + 5)
    assert b"X-Sealnet-Reason: not declared" in denied


def test_a_black_hole_is_given_up_in_time(engine: Engine) -> None:
    """DST-04"""
    engine.host.run("ip", "-n", "lan", "route", "del", "blackhole", f"{BLACK_HOLE}/32")
    for command in (
        "link add hole type veth peer name bottom",
        "link set bottom up",
        "link set hole up",
        f"route add {BLACK_HOLE}/32 dev hole",
        f"neigh add {BLACK_HOLE} lladdr 02:00:00:00:00:01 dev hole",
    ):
        engine.host.run("ip", "-n", "lan", *command.split())
    engine.host.in_lan("sysctl", "-qw", "net.ipv4.ip_forward=1")
    engine.resolves(**{"allowed.test": [BLACK_HOLE]})
    began = time.monotonic()

    with engine.connect(timeout_s=20) as sock:
        sock.sendall(connect_to("allowed.test:443"))
        got = answer(sock)

    assert status(got) == 504, got
    assert time.monotonic() - began < 12 * PATIENCE
    assert engine.records()[-1]["reason"].startswith("failed")


def test_the_name_is_asked_once_and_as_it_is(engine: Engine) -> None:
    """DST-02: once for each connection (A and AAAA), without the search list; a denied one never."""
    assert_allowed(engine, connect_to("allowed.test:443"))
    assert engine.asked_names() == ["allowed.test"] * 2
    engine.serve_proxy("run-b", [{"host": "none.test", "port": 443}], port=PORT + 5, log=engine.host.directory / "b")
    assert status(engine.ask(connect_to("none.test:443"), port=PORT + 5)) == 502
    assert set(engine.asked_names()) == {"allowed.test", "none.test"}
    assert_refused(engine, connect_to("evil.test:443"))


@pytest.mark.parametrize("size", [16384, 70, 40, 3, 1])
def test_domain_fronting(engine: Engine, size: int) -> None:
    """DST-05"""
    with engine.tunnel() as sock:
        hello = records_of(client_hello("Allowed.test"), size)
        for at in range(0, len(hello), 30):
            sock.sendall(hello[at : at + 30])
            time.sleep(0.001)
        got = b""
        while len(got) < 5 + len(hello):
            got += sock.recv(65536)
        assert got == b"SEEN " + hello
    with engine.tunnel() as sock:
        sock.sendall(records_of(client_hello("evil.test"), size))
        assert ended(sock) == "reset"
    record = engine.records()[-1]
    assert (record["verdict"], record["host"], record["port"]) == ("DENY", "allowed.test", 443)
    assert record["reason"] == "sni mismatch: evil.test"
    soon(lambda: engine.dialled()[-1].get("error") == "ConnectionResetError", "the origin was reset")
    assert len([each for each in engine.dialled() if "data" in each]) == 1
    soon(lambda: engine.records()[-2]["bytes_up"] == 0, "its line is finished")


def test_a_hello_that_does_not_wait_for_the_answer(engine: Engine) -> None:
    """DST-05"""
    for name, expected in (("allowed.test", b"SEEN "), ("evil.test", b"")):
        with engine.connect() as sock:
            hello = records_of(client_hello(name))
            sock.sendall(connect_to("allowed.test:443") + hello)
            got = answer(sock)
            assert status(got) == 200 or got == b"RESET"
            if expected:
                assert sock.recv(5) == expected
            elif got != b"RESET":
                assert ended(sock) == "reset"
    assert engine.records()[-1]["reason"] == "sni mismatch: evil.test"


def test_no_server_name_and_no_tls_pass(engine: Engine) -> None:
    """DST-05"""
    for data in (records_of(client_hello(None)), b"SSH-2.0-OpenSSH_9.2\r\n", b"\x00\x01\x02\x03\x04\x05"):
        with engine.tunnel() as sock:
            sock.sendall(data)
            got = b""
            while len(got) < 5 + len(data):
                got += sock.recv(1000)
            assert got == b"SEEN " + data
    assert {record["verdict"] for record in engine.records()} == {"ALLOW"}


@pytest.mark.parametrize(
    "data",
    [
        b"\x15\x03\x01\x00\x02\x01\x00" + records_of(client_hello("evil.test")),
        b"\x14\x03\x01\x00\x01\x01" + records_of(client_hello("evil.test")),
        b"\x16\x03\x01\x00\x00" + records_of(client_hello("evil.test")),
        records_of(b"\x00\x00\x00\x00" + client_hello("evil.test")),
        records_of(client_hello("allowed.test", extra=b"\0\0\0\x0e\0\x0c\0\0\x09evil.test")),
        records_of(client_hello("allowed.test")) + records_of(client_hello("evil.test")),
        records_of(client_hello("allowed.test")) + b"\x14\x03\x03\x00\x01\x01" + records_of(client_hello("evil.test"), 50),
    ],
    ids=itertools.count(),
)
def test_a_hello_that_hides_another_is_cut(engine: Engine, data: bytes) -> None:
    """DST-05"""
    with engine.tunnel() as sock:
        sock.sendall(data)
        assert ended(sock) == "reset"
    assert engine.records()[-1]["reason"].startswith("sni mismatch")


def test_relayed_connect(engine: Engine) -> None:
    """DST-07: the verdict depends on the authority only."""
    wanted = []
    with engine.connect() as kept:
        for index in range(20):
            for authority, expected in (("evil.test:443", 403), ("b.test:8443", 200)):
                assert status(engine.ask(connect_to(authority))) == expected
                wanted.append("DENY" if expected == 403 else "ALLOW")
            kept.sendall(connect_to("evil.test:443") if index % 2 else get("http://allowed.test/"))
            assert status(answer(kept)) == (403 if index % 2 else 200)
            wanted.append("DENY" if index % 2 else "ALLOW")
    assert [record["verdict"] for record in engine.records()] == wanted


# J. Logs


@pytest.mark.parametrize(
    "data",
    [
        b"CONNECT x%0d%0aALLOW:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x\r\nALLOW evil.test:443 HTTP/1.1\r\n\r\n",
        b"CONNECT x\rALLOW:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT \x1b[2J:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b'CONNECT "a\\":443 HTTP/1.1\r\nHost: x\r\n\r\n',
        "CONNECT a\u2028b:443 HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        "CONNECT a\u0085b:443 HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
        b"CONNECT \xff\x7f:443 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT " + b"\x1b" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"CONNECT " + b"a" * 20_000 + b":443 HTTP/1.1\r\n\r\n",
        b"\x1b[2J\xff http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
        b"GET http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\nX: \x1b[2J\x00\r\n\r\n",
    ],
    ids=itertools.count(),
)
def test_forged_lines(engine: Engine, data: bytes) -> None:
    """LOG-01"""
    record = assert_refused(engine, data)

    raw = engine.log.read_bytes()
    assert raw.count(b"\n") == 1
    assert re.fullmatch(rb"[\x20-\x7e]*\n", raw), raw
    assert all(len(value) <= 256 for value in record.values() if isinstance(value, str))
    assert not re.search(r"[\x00-\x1f\x7f-\uffff]", "".join(str(value) for value in record.values()))
    assert_allowed(engine, connect_to("allowed.test:443"))


def test_a_field_that_is_too_long_is_marked(engine: Engine) -> None:
    """LOG-01"""
    record = assert_refused(engine, b"CONNECT " + b"a" * 10_000 + b":443 HTTP/1.1\r\nHost: x\r\n\r\n", 400)
    assert record["host"].endswith("...")
    assert len(record["host"]) == 256


def test_both_verdicts(engine: Engine) -> None:
    """LOG-02"""
    engine.resolves(**{"b.test": ["10.0.0.1"]})
    requests = [connect_to("allowed.test:443"), get("http://allowed.test/")] * 25 + [get("http://evil.test/", "evil.test")] * 50
    requests += [b"GET / HTTP/1.1\r\n\r\n"] * 10 + [connect_to("b.test:8443")] * 10
    socks = [(engine.connect(), request) for request in requests]
    for sock, request in reversed(socks):
        sock.sendall(request)
    statuses = [status(answer(sock)) for sock, _ in socks]
    for sock, _ in socks:
        sock.close()
    with engine.connect() as kept:
        for request in [get("http://allowed.test/"), get("http://evil.test/", "evil.test")] * 5:
            kept.sendall(request)
            answer(kept)

    assert statuses == [200] * 50 + [403] * 50 + [400] * 10 + [403] * 10
    soon(lambda: all(each["bytes_up"] is not None for each in engine.records() if each["verdict"] == "ALLOW"), "all are finished")
    records = engine.records()
    assert [record["seq"] for record in records] == list(range(1, 131))
    reasons = [(record["verdict"], (record["reason"] or "").split(":")[0]) for record in records]
    counts = {each: reasons.count(each) for each in set(reasons)}
    assert counts == {("ALLOW", ""): 55, ("DENY", "not declared"): 55, ("DENY", "bad request"): 10, ("DENY", "private address"): 10}
    assert all({"run_id", "time", "method", "host", "port", "verdict", "reason"} <= record.keys() for record in records)
    assert engine.stop() == {"run": "run-1", "records": 130, "open": 0, "failed": None, "denied": 75, "strangers": 0}


@pytest.mark.parametrize(
    "request_",
    [
        get("http://allowed.test/p?token=SEKRET", "allowed.test", "Authorization: Bearer SEKRET", "Cookie: a=SEKRET"),
        get("http://evil.test/SEKRET?SEKRET", "evil.test", "Cookie: SEKRET"),
        get("http://u:SEKRET@allowed.test/"),
        get("http://u:SEKRET@allowed.test:x/"),
        get("http:/u:SEKRET@allowed.test/"),
        get("HTTP://U%40:SEKRET@allowed.test/"),
        get("http://u:SEK/SEKRET@allowed.test/"),
        get("/p?token=SEKRET"),
        get("//u:SEKRET@allowed.test/"),
        connect_to("u:SEKRET@allowed.test:443"),
        get("http://allowed.test\\SEKRET"),
        get("http://allowed.test/#SEKRET"),
        b"GET http://allowed.test/SEKRET HTTP/1.1\r\nX SEKRET\r\n\r\n",
        b"SEKRET: x\r\n\r\n",
        get("http://allowed.test/hello", "SEKRET.test", "X: SEKRET"),
        get("http://allowed.test/nothing?SEKRET"),
    ],
    ids=itertools.count(),
)
def test_secrets_in_urls(engine: Engine, request_: bytes) -> None:
    """LOG-04"""
    got = engine.ask(request_)

    assert engine.records()
    assert b"SEKRET" not in engine.log.read_bytes()
    if status(got) != 200:
        assert b"SEKRET" not in got
    assert "SEKRET" not in (engine.host.directory / "door.stderr").read_text()


def test_what_cannot_be_recorded_is_not_done(engine: Engine) -> None:
    """LOG-02: a full file system, and a log that has grown too large."""
    assert_allowed(engine, connect_to("allowed.test:443"))
    soon(lambda: engine.reached() == [PUBLIC], "the control was reached")
    small = engine.host.directory / "small"
    small.mkdir()
    engine.host.run("mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(small))
    engine.serve_proxy("run-full", port=PORT + 5, log=small / "log")
    with open(engine.host.directory / "long", "wb") as long:
        long.truncate(MAX_LOG_BYTES - 10)
    engine.serve_proxy("run-long", port=PORT + 6, log=engine.host.directory / "long")

    got = [status(engine.ask(get("http://evil.test/", "evil.test"), port=PORT + 5)) for _ in range(40)]
    assert got == [403] * got.count(403) + [503] * got.count(503)
    assert 0 < got.count(503) < 40
    for port in (PORT + 5, PORT + 6):
        refused = engine.ask(connect_to("allowed.test:443"), port=port)
        assert status(refused) == 503
        assert b"cannot record" in refused
    assert engine.reached() == [PUBLIC]
    lines = (small / "log").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == got.count(403)
    assert engine.stop("run-full")["failed"] == "No space left on device"
    assert engine.stop("run-long")["failed"] == "File too large"
    assert_allowed(engine, connect_to("allowed.test:443"))


# The relay


def test_a_relay_to_a_tcp_target(bare: Engine) -> None:
    bare.host.broker(8080, "127.0.0.1")
    bare.serve_relay({"tcp": ["localhost", 8080]})

    done = bare.in_box("curl", "-sS", "-m", "5", f"http://{GATEWAY}:{PORT + 1}/hello")

    assert done.stdout == "/hello", done.stderr
    assert bare.stop("run-2") == {"run": "run-2", "records": 0, "open": 0, "failed": None, "denied": 0, "strangers": 0}
    with pytest.raises(ConnectionRefusedError):
        bare.connect(PORT + 1)


def test_a_relay_whose_target_refuses_resets(bare: Engine) -> None:
    bare.serve_relay({"tcp": ["127.0.0.1", 8081]})
    assert outcome("box", PORT + 1) == "reset"
    bare.host.broker(8081, "127.0.0.1")
    assert status(bare.ask(b"GET / HTTP/1.0\r\n\r\n", port=PORT + 1).replace(b"HTTP/1.0", b"HTTP/1.1")) == 200


def test_a_relay_to_a_unix_target_asks_for_the_socket(bare: Engine) -> None:
    bare.serve_relay({"unix": True})
    ours, theirs = socket.socketpair()
    with bare.connect(PORT + 1) as sock:
        asked = bare.hear()
        assert (asked["op"], asked["run"]) == ("dial", "run-2")
        bare.tell({"op": "dialled", "id": asked["id"]}, theirs.fileno())
        theirs.close()
        sock.sendall(b"hello")
        assert ours.recv(10) == b"hello"
        ours.sendall(b"x" * 100_000)
        ours.shutdown(socket.SHUT_WR)
        got = b""
        while more := sock.recv(65536):
            got += more
        assert got == b"x" * 100_000
        sock.sendall(b"more")
        assert ours.recv(10) == b"more"
        sock.shutdown(socket.SHUT_WR)
        assert ours.recv(10) == b""
    with bare.connect(PORT + 1) as sock:
        bare.tell({"op": "dialled", "id": bare.hear()["id"], "error": "Connection refused"})
        assert ended(sock) == "reset"


def test_dials_that_nobody_answers_end_no_door(bare: Engine) -> None:
    """One that connects and resets, over and over, has more of them waiting than the control socket holds."""
    bare.serve_relay({"unix": True})
    for _ in range(1000):
        with contextlib.suppress(ConnectionResetError), bare.connect(PORT + 1) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    waiting = 0
    assert bare.control is not None
    while readable(bare.control, 0.2):
        waiting += bare.hear()["op"] == "dial"
    assert 0 < waiting < 1000
    with bare.connect(PORT + 1) as sock:
        bare.tell({"op": "dialled", "id": bare.hear()["id"], "error": "Connection refused"})
        assert ended(sock) == "reset"


def test_the_end_of_a_run_cuts_what_is_open(engine: Engine) -> None:
    sock = engine.tunnel()
    sock.sendall(b"ECHO")
    assert sock.recv(10) == b"ECHO"

    told = engine.stop()

    assert (told["open"], told["records"]) == (1, 1)
    assert ended(sock) == "reset"
    with pytest.raises(ConnectionRefusedError):
        engine.connect()
    engine.serve_proxy("run-1")


def test_what_the_end_of_a_run_cuts_is_recorded_whole(bare: Engine) -> None:
    """A request under way or a dial is no gap in the log; one that had ended before is left as it is."""
    bare.resolves(**{"hole.test": [BLACK_HOLE]})
    bare.serve_proxy("run-1", [{"host": "b.test", "port": 8081}, {"host": "hole.test", "port": 443}, {"host": "none.test", "port": 443}])
    with in_netns("lan"):
        listener = socket.create_server(("0.0.0.0", 8081))
    with listener, bare.connect() as plain, bare.connect() as dialling, bare.connect() as idle:
        plain.sendall(get("http://b.test:8081/", "b.test:8081"))
        origin, _ = listener.accept()
        origin.recv(1000)
        origin.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        assert b"200 OK" in plain.recv(1000)
        idle.sendall(connect_to("none.test:443"))
        assert status(answer(idle)) == 502
        dialling.sendall(connect_to("hole.test:443"))
        soon(lambda: len(bare.records()) == 3, "it is dialled")

        told = bare.stop()

        origin.close()
    found = {record["host"]: (record["reason"], record["bytes_down"]) for record in bare.records()}
    assert told["records"] == 3
    assert found.pop("none.test")[0].startswith("failed: no address")
    assert found == {"b.test": ("cut", 44), "hole.test": ("cut", 0)}


# Real clients


def test_curl_over_tls(engine: Engine) -> None:
    """ENV-02: the client's own TLS, end to end."""
    for host, expected in (("b.test", "/x"), ("evil.test", "")):
        done = engine.in_box(
            *("curl", "-sS", "-m", "5", "--cacert", str(engine.certificate), "-x", f"http://{GATEWAY}:{PORT}", f"https://{host}:8443/x")
        )
        assert done.stdout == expected, done.stderr
    assert "403" in done.stderr


@pytest.mark.tool("git")
def test_git(engine: Engine) -> None:
    """ENV-02"""
    environment = os.environ | {"http_proxy": f"http://{GATEWAY}:{PORT}", "HOME": str(engine.host.directory)}
    for host in ("allowed.test", "evil.test"):
        engine.in_box("git", "ls-remote", f"http://{host}/repo.git", env=environment)
    assert {(record["verdict"], record["host"]) for record in engine.records()} == {("ALLOW", "allowed.test"), ("DENY", "evil.test")}


@pytest.mark.tool("node")
def test_node(engine: Engine) -> None:
    """ENV-02: what an agent in JavaScript does."""
    script = """
    const http = require("http");
    const [name, host, port] = process.argv.slice(1);
    const options = {host, port, path: `http://${name}/n`, headers: {Host: name}};
    http.get(options, (answer) => {
      let body = "";
      answer.on("data", (part) => (body += part));
      answer.on("end", () => console.log(answer.statusCode, body));
    });
    """
    where = (GATEWAY, str(PORT))
    assert engine.in_box("node", "-e", script, "allowed.test", *where).stdout == "200 /n\n"
    denied = engine.in_box("node", "-e", script, "evil.test", *where).stdout
    assert denied.startswith("403 ")
    assert "--allow evil.test:80" in denied


def test_python_over_tls_with_the_right_name_only(engine: Engine) -> None:
    """DST-05: a real TLS stack's hello."""
    context = ssl.create_default_context(cafile=str(engine.certificate))
    context.check_hostname = False
    for name, expected in (("b.test", True), ("allowed.test", False)):
        sock = engine.tunnel("b.test", 8443)
        try:
            with context.wrap_socket(sock, server_hostname=name) as secret:
                secret.sendall(b"GET /tls HTTP/1.1\r\n\r\n")
                got = answer(secret)
                assert expected
                assert got.endswith(b"/tls")
        except (ConnectionError, ssl.SSLError):
            assert not expected
