"""A door that is told what no client would say: heads and hellos with bytes changed, in pieces, over real sockets, before real origins."""

from __future__ import annotations

import json
import os
import socket
import ssl
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine import PUBLIC, Engine, answer, ended, in_netns, records_of, status
from tests.lab import Host

pytestmark = [pytest.mark.root, pytest.mark.tool("openssl", "ip", "bash"), pytest.mark.timeout(600)]

# More is for a night: SEALNET_FUZZ=20000.
fuzz = settings(max_examples=int(os.environ.get("SEALNET_FUZZ", "150")), suppress_health_check=[HealthCheck.function_scoped_fixture])
TLS_PORT = 9443

_HEADS = [
    b"CONNECT allowed.test:443 HTTP/1.1\r\nHost: allowed.test:443\r\n\r\nhello",
    b"GET http://allowed.test/a?b HTTP/1.1\r\nHost: allowed.test\r\nAccept: */*\r\n\r\n",
    b"POST http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 5\r\n\r\nhello",
    b"POST http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b"GET http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\nGET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n",
]
_WORDS = [
    *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"@", b"/", b"#", b"?", b"\\", b".", b"[", b"]", b",", b"\xff", b"\xc5\xbf", b"%2e"),
    *(b"evil.test", b"http://evil.test/", b"Host: evil.test\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.0"),
    *(b"Connection: host\r\n", b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n", b"allowed.test", b":443", b"0\r\n\r\n"),
]

# Tells each server name that OpenSSL has read (null: none) in a line, and when somebody came who was no client of TLS.
_TLS_ORIGIN = r"""
import json, socket, ssl, sys, threading

def note(name):
    with open(sys.argv[1], "a") as book:
        book.write(json.dumps(name) + "\n")

context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[2])
context.sni_callback = lambda secret, name, _: note(name)

def serve(sock):
    try:
        sock.settimeout(5)
        context.wrap_socket(sock, server_side=True).close()
    except OSError:
        pass
    finally:
        sock.close()

listener = socket.create_server(("0.0.0.0", int(sys.argv[3])), backlog=128)
print("listening", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


@pytest.fixture
def engine(host: Host) -> Iterator[Engine]:
    made = Engine(host)
    made.serve_proxy(allow=[{"host": "allowed.test", "port": port} for port in (80, 443, TLS_PORT)])
    try:
        yield made
        assert made.door.poll() is None, "the door has ended"
        assert (host.directory / "door.stderr").read_text() == ""
    finally:
        made.close()


@st.composite
def changed(draw: st.DrawFn, bases: list[bytes]) -> list[bytes]:
    """One of them with a few bytes taken out, words put in or bytes set, in up to four pieces."""
    data = bytearray(draw(st.sampled_from(bases)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("put", "put", "take", "set"))):
            case "put":
                data[at:at] = draw(st.sampled_from(_WORDS))
            case "take":
                del data[at : at + draw(st.integers(1, 12))]
            case _:
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=3)))
    return [bytes(data[one:other]) for one, other in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def say(sock: socket.socket, pieces: list[bytes]) -> str:
    """Everything, and then nothing more; how it ended."""
    try:
        for piece in pieces:
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
    except (BrokenPipeError, ConnectionResetError, OSError):
        return "reset"
    return ended(sock, 8.0)


def test_a_head_whose_bytes_were_changed_leads_nowhere_else(engine: Engine) -> None:
    @fuzz
    @given(changed(_HEADS))
    def each(pieces: list[bytes]) -> None:
        with engine.connect() as sock:
            assert say(sock, pieces) in ("closed", "reset")

    each()

    assert status(engine.ask(_HEADS[1])) == 200
    assert "evil.test" not in engine.asked_names()
    assert {each["address"] for each in engine.dialled() if "address" in each} == {PUBLIC}
    heads = [seen["head"].split("\r\n")[1:] for seen in engine.dialled() if "head" in seen]
    hosts = [[line.lower() for line in lines if line.lower().startswith("host")] for lines in heads]
    assert {tuple(found) for found in hosts} == {("host: allowed.test",)}
    assert sorted(engine.reached()) == sorted(engine.recorded())
    numbers = [record["seq"] for record in engine.records()]
    assert numbers == list(range(1, len(numbers) + 1))


def hello_of(name: str | None, version: ssl.TLSVersion) -> bytes:
    """What OpenSSL says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = version
    secret = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        secret.do_handshake()
    return outgoing.read()


def test_a_hello_whose_bytes_were_changed_asks_for_no_other_server(engine: Engine) -> None:
    host = engine.host
    book = host.directory / "names-read"
    book.write_text("")
    both = host.directory / "both.pem"
    origin = host.python(_TLS_ORIGIN, str(book), str(both), str(TLS_PORT), netns="lan")
    assert origin.stdout is not None
    assert origin.stdout.readline() == "listening\n"
    hellos = [
        hello_of(name, version)
        for name in ("allowed.test", "evil.test", None)
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    ]
    hellos += [records_of(hello[5:], size) for hello in hellos for size in (60, 7)]
    hellos += [hellos[0] + hellos[2], hellos[4] + hellos[2], b"\x14\x03\x03\x00\x01\x01" + hellos[2]]

    @fuzz
    @given(changed(hellos))
    def each(pieces: list[bytes]) -> None:
        with engine.connect() as sock:
            sock.sendall(f"CONNECT allowed.test:{TLS_PORT} HTTP/1.1\r\nHost: allowed.test:{TLS_PORT}\r\n\r\n".encode())
            assert status(answer(sock)) == 200
            assert say(sock, pieces) in ("closed", "reset")

    each()

    names = [json.loads(line) for line in book.read_text().splitlines()]
    assert {name and name.lower() for name in names} <= {"allowed.test", None}
    assert "allowed.test" in names
    # Without a door between, the origin reads the other name.
    with in_netns("lan"):
        direct = socket.create_connection((PUBLIC, TLS_PORT), 5)
    with direct:
        direct.sendall(hello_of("evil.test", ssl.TLSVersion.TLSv1_3))
        assert direct.recv(1)
    assert json.loads(book.read_text().splitlines()[-1]) == "evil.test"
