"""What lies beyond an allowlist run: names and the hosts they mean, out on the LAN, with an index, a registry and a repository."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from sealnet.kernel import libc
from tests.lab import LAN_PEER, Host

PUBLIC, EVIL = "93.184.216.34", "93.184.216.35"
NAMES = {"allowed.test": PUBLIC, "pypi.test": PUBLIC, "npm.test": PUBLIC, "git.test": PUBLIC, "evil.test": EVIL, "lan.test": LAN_PEER}

# Port 53: names. Ports 80 and 443 (TLS): files, a git repository, and the path of whatever else is asked for. argv: directory, address of
# the name server, names as JSON. `book` tells each request, each TLS connection and (`broken`) each that came to nothing; `questions` each
# name that was asked for.
_SERVE = r"""
import http.server, ipaddress, json, os, socket, socketserver, ssl, struct, subprocess, sys, threading

root, resolver, names = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
lock = threading.Lock()

def note(book, text):
    with lock, open(f"{root}/{book}", "a") as file:
        file.write(text + "\n")

def resolve(sock):
    while True:
        data, peer = sock.recvfrom(4096)
        at, labels = 12, []
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1"))
            at += 1 + data[at]
        kind, name = struct.unpack_from("!H", data, at + 1)[0], ".".join(labels).lower()
        note("questions", name)
        found = [ipaddress.ip_address(names[name]).packed] if kind == 1 and name in names else []
        answer = data[:2] + struct.pack("!HHHHH", 0x8180 | (0 if name in names else 3), 1, len(found), 0, 0) + data[12 : at + 5]
        for packed in found:
            answer += b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + packed
        sock.sendto(answer, peer)

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def setup(self):
        if self.server.server_address[1] == 443:
            self.request.do_handshake()
            note("book", f"TLS {self.request.getsockname()[0]}")
        super().setup()

    def do_GET(self):
        own = self.request.getsockname()[0]
        note("book", f"{self.server.server_address[1]} {own} {self.command} {self.headers['host']} {self.path.partition('?')[0]}")
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = f"{root}/files{self.path}"
        if self.path.startswith("/git/"):
            self.git(body)
        elif os.path.isdir(path):
            self.say("text/html", open(f"{path}/index.html", "rb").read())
        elif os.path.exists(path):
            self.say("application/octet-stream", open(path, "rb").read())
        else:
            self.say("text/plain", self.path.encode())

    do_POST = do_GET

    def say(self, kind, body, status="200"):
        self.send_response(int(status[:3]))
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def git(self, body):
        path, _, query = self.path.partition("?")
        variables = {
            "GIT_PROJECT_ROOT": f"{root}/files", "GIT_HTTP_EXPORT_ALL": "1", "PATH_INFO": path, "QUERY_STRING": query,
            "REQUEST_METHOD": self.command, "CONTENT_TYPE": self.headers.get("content-type", ""), "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("content-encoding", ""), "GIT_PROTOCOL": self.headers.get("git-protocol", ""),
            "PATH": os.environ["PATH"], "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        }
        done = subprocess.run(["git", "http-backend"], input=body, env=variables, capture_output=True, check=False)
        head, _, rest = done.stdout.partition(b"\r\n\r\n")
        fields = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.say(fields["Content-Type"], rest, fields.get("Status", "200"))

    def log_message(self, *_):
        pass

class Server(socketserver.ThreadingTCPServer):  # http.server's own would look up its name.
    allow_reuse_address = daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, address):
        note("book", f"broken {request.getsockname()[0]}")

udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind((resolver, 53))
context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
context.load_cert_chain(f"{root}/both.pem")
plain, secret = Server(("0.0.0.0", 80), Handler), Server(("0.0.0.0", 443), Handler)
secret.socket = context.wrap_socket(secret.socket, server_side=True, do_handshake_on_connect=False)
for target in (lambda: resolve(udp), plain.serve_forever, secret.serve_forever):
    threading.Thread(target=target).start()
print("listening", flush=True)
"""


class Upstream:
    """`ca` is the authority of every TLS host out there."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.directory = host.directory / "upstream"
        self.directory.mkdir()
        self.ca = self.directory / "ca.pem"
        for address in (PUBLIC, EVIL):
            host.run("ip", "-n", "lan", "addr", "add", f"{address}/32", "dev", "lo")
            host.run("ip", "route", "add", f"{address}/32", "via", LAN_PEER)
        host.settled()
        self._name_server()
        self._certificate()
        self._fill()
        for book in ("book", "questions"):
            (self.directory / book).touch()
        serving = host.python(_SERVE, str(self.directory), LAN_PEER, json.dumps(NAMES), netns="lan")
        assert serving.stdout is not None
        assert serving.stdout.readline() == "listening\n", serving.stderr and serving.stderr.read()

    def _name_server(self) -> None:
        for name, text in (("resolv.conf", f"nameserver {LAN_PEER}\n"), ("hosts", "127.0.0.1 localhost\n")):
            path = self.directory / name
            path.write_text(text)
            libc.mount(str(path), os.path.realpath(f"/etc/{name}"), None, libc.MS_BIND)

    def _certificate(self) -> None:
        named = ",".join(f"DNS:{name}" for name in NAMES)
        key, leaf, ca_key = (self.directory / name for name in ("key.pem", "leaf.pem", "ca.key"))
        make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split()
        self.host.run(*make, "-subj", "/CN=authority.test", "-keyout", str(ca_key), "-out", str(self.ca))
        # An authority's certificate is refused as a server's by some (rustls).
        self.host.run(
            *(*make, "-subj", "/CN=upstream.test", "-CA", str(self.ca), "-CAkey", str(ca_key)),
            *(
                "-addext",
                f"subjectAltName={named}",
                "-addext",
                "basicConstraints=critical,CA:FALSE",
                "-keyout",
                str(key),
                "-out",
                str(leaf),
            ),
        )
        (self.directory / "both.pem").write_text(key.read_text() + leaf.read_text())

    def _fill(self) -> None:
        """One package for pip, one for npm, one repository."""
        files = self.directory / "files"
        for name in ("simple/sealdemo", "wheels", "git"):
            (files / name).mkdir(parents=True)
        wheel = "sealdemo-1.0-py3-none-any.whl"
        info = "sealdemo-1.0.dist-info"
        with zipfile.ZipFile(files / "wheels" / wheel, "w") as archive:
            archive.writestr("sealdemo.py", "")
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: sealdemo\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        (files / "simple/sealdemo/index.html").write_text(f'<a href="../../wheels/{wheel}">{wheel}</a>')
        packed = _packed({"package/package.json": json.dumps({"name": "sealpkg", "version": "1.2.3"})})
        (files / "sealpkg.tgz").write_bytes(packed)
        dist = {"tarball": "https://allowed.test/sealpkg.tgz", "shasum": hashlib.sha1(packed).hexdigest()}
        package: dict[str, Any] = {"name": "sealpkg", "version": "1.2.3", "dist": dist}
        known = {"name": "sealpkg", "dist-tags": {"latest": "1.2.3"}, "versions": {"1.2.3": package}}
        (files / "sealpkg").write_text(json.dumps(known))
        self._fill_crates(files)
        work = self.directory / "work"
        self.host.run("git", "init", "-q", str(work))
        (work / "README").write_text("cloned\n")
        by = ("-c", "user.name=test", "-c", "user.email=test@example.test")
        self.host.run("git", "-C", str(work), "add", "README")
        self.host.run("git", "-C", str(work), *by, "commit", "-q", "-m", "first")
        self.host.run("git", "clone", "-q", "--bare", str(work), str(files / "git" / "demo.git"))

    def _fill_crates(self, files: Path) -> None:
        """A sparse index of cargo's with one crate."""
        manifest = '[package]\nname = "sealcrate"\nversion = "1.0.0"\nedition = "2021"\n'
        packed = _packed({"sealcrate-1.0.0/Cargo.toml": manifest, "sealcrate-1.0.0/src/lib.rs": ""})
        known = {
            "name": "sealcrate",
            "vers": "1.0.0",
            "deps": [],
            "cksum": hashlib.sha256(packed).hexdigest(),
            "features": {},
            "yanked": False,
        }
        index = files / "index"
        (index / "se" / "al").mkdir(parents=True)
        (index / "config.json").write_text(json.dumps({"dl": "https://allowed.test/{crate}-{version}.crate"}))
        (index / "se" / "al" / "sealcrate").write_text(json.dumps(known) + "\n")
        (files / "sealcrate-1.0.0.crate").write_bytes(packed)

    def book(self) -> list[str]:
        return _lines(self.directory / "book")

    def questions(self) -> list[str]:
        return _lines(self.directory / "questions")

    def connections(self) -> int:
        """What a proxy has to record: one plain request, one TLS connection."""
        return sum(line.startswith(("TLS ", "80 ")) for line in self.book())

    def forget(self) -> None:
        for book in ("book", "questions"):
            (self.directory / book).write_text("")


def _packed(files: dict[str, str]) -> bytes:
    """A .tar.gz."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return held.getvalue()


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
