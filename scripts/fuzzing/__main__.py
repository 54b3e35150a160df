"""`scripts/fuzz`: feeds what a door parses with bytes that a fuzzer thinks of, and holds each answer against another parser's.

usage: python -m scripts.fuzzing heads|hello SECONDS DIR, with atheris (libFuzzer) installed; what failed is kept in DIR.
"""

from __future__ import annotations

import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["sealnet", "h11"]):
    import h11

    from sealnet.door.heads import MAX_HEAD, BadRequest, Head, first_words, read, short
    from sealnet.model.hello import Hello, State

_PLAIN = b"CONNECT allowed.test:443 HTTP/1.1\r\nHost: allowed.test:443\r\nUser-Agent: curl/8\r\n\r\n"
_HEADS = (
    _PLAIN,
    b"GET http://allowed.test/a?b HTTP/1.1\r\nHost: allowed.test\r\nConnection: x\r\n\r\n",
    b"POST http://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 5\r\n\r\nhello",
    b"POST http://allowed.test:80 HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
)


class Differs(Exception):
    """Two parsers that must agree do not."""


def heads(data: bytes) -> None:
    """The short way and h11 read the same; nothing but a refusal is raised; what is shown of it is printable."""
    method, host = first_words(data)
    if not (method + host).isprintable() or not host.isascii():
        raise Differs(f"{data!r} is shown as {method!r} {host!r}")
    taken, asked = short(data), h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
    asked.receive_data(data)
    found: Head | None = None
    try:
        event = asked.next_event()
        found = read(event) if isinstance(event, h11.Request) else None
    except (h11.RemoteProtocolError, BadRequest):
        pass
    if found is not None and (found.path or "/").isascii() is False:
        raise Differs(f"{data!r} leads to {found.path!r}")
    if taken is not None and (found is None or asked.trailing_data[0] or taken[:3] != found[:3] or found.has_body):
        raise Differs(f"{data!r} is {taken} and {found}")


class _Reader:
    """Which server name OpenSSL reads."""

    def __init__(self) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._names: list[str] = []
        self._context.sni_callback = lambda _secret, name, _context: self._names.append(name) if name is not None else None
        with tempfile.TemporaryDirectory() as directory:
            both = Path(directory, "both.pem")
            make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x -keyout - -out -"
            both.write_bytes(subprocess.run(make.split(), capture_output=True, check=True).stdout)
            self._context.load_cert_chain(both)

    def names(self, data: bytes) -> list[str]:
        self._names.clear()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        incoming.write(data)
        try:
            self._context.wrap_bio(incoming, outgoing, server_side=True).do_handshake()
        except ssl.SSLError:
            pass
        return list(self._names)


def _fed(data: bytes, size: int) -> Hello:
    hello = Hello()
    for at in range(0, len(data), size):
        hello.feed(data[at : at + size])
    return hello


def hello(reader: _Reader, data: bytes) -> None:
    """In whatever pieces, it is the same; and what passes asks OpenSSL for no other server than was told."""
    whole = Hello()
    state = whole.feed(data)
    for size in (1, 7, 64) if len(data) < 1024 else (97, 1024):
        pieces = _fed(data, size)
        if data and (pieces.feed(b""), pieces.names) != (state, whole.names):
            raise Differs(f"{data!r} in pieces of {size} is {pieces.feed(b'')} {pieces.names}, whole {state} {whole.names}")
    if state in (State.PASS, State.DONE):
        missed = {name.lower() for name in reader.names(data)} - {name.lower() for name in whole.names}
        if missed:
            raise Differs(f"{data!r} asks for {missed}, and was told as {whole.names}")


def _client_hello(name: str | None, version: ssl.TLSVersion) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = version
    try:
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


def main() -> None:
    if len(sys.argv) != 4 or sys.argv[1] not in ("heads", "hello") or not sys.argv[2].isdecimal():
        sys.exit("usage: python -m scripts.fuzzing heads|hello SECONDS DIR")
    what, seconds, kept = sys.argv[1:]
    target: Callable[[bytes], None] = heads
    seeds = list(_HEADS)
    if what == "hello":
        reader = _Reader()

        def target(data: bytes) -> None:
            hello(reader, data)

        whole = [_client_hello(name, one) for name in ("allowed.test", None) for one in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)]
        seeds = [*whole, whole[0] + whole[0], b"\x14\x03\x03\x00\x01\x01" + whole[1], whole[0][:5] + whole[0][5:40]]
    corpus = Path(kept, f"{what}-corpus")
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    # A name that is no ASCII is none that OpenSSL tells of.
    sys.unraisablehook = lambda _told: None
    atheris.enabled_hooks.add("RegEx")
    limits = (f"-max_total_time={seconds}", f"-max_len={MAX_HEAD + 64 if what == 'heads' else 4096}", "-timeout=5")
    # It does not return: libFuzzer ends the process.
    atheris.Setup([sys.argv[0], str(corpus), f"-artifact_prefix={kept}/", *limits, "-print_final_stats=1"], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
