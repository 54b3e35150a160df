"""The installed tool with doors: relays to brokers, and the proxy of declared hosts with real clients."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sealnet.kernel import identity, libc, process
from sealnet.model.config import DOOR_USER
from tests.lab import LAN_HOST, SEALNET, Host, end, wait_for
from tests.upstream import PUBLIC, Upstream

pytestmark = [pytest.mark.root, pytest.mark.tool("curl", "openssl")]

# No other test's on this machine: cgroups are everybody's.
RUN = "doors"
UID = int(DOOR_USER)
RELAY = ("--broker", "tcp:127.0.0.1:8080")
# curl's words for a connection that is reset, before or after it has seen that it stands.
CUT = (7, 52, 56)
SEALED = {"network_severed": False, "egress_sealed": True, "egress_enforced": True}


@pytest.fixture
def host(host: Host) -> Iterator[Host]:
    """In the end no door is left, either."""
    yield host
    wait_for(lambda: not doors(), what="no door is left")


@pytest.fixture
def upstream(host: Host) -> Upstream:
    return Upstream(host)


def doors() -> list[int]:
    """The door processes of this throw-away host."""
    here, found = os.stat("/proc/self/ns/net").st_ino, []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if b"\0sealnet.door\0" in Path(f"/proc/{pid}/cmdline").read_bytes() and os.stat(f"/proc/{pid}/ns/net").st_ino == here:
                found.append(int(pid))
    return found


def held(host: Host, port: int) -> str:
    """The connections that a server of this host's has at a port."""
    return host.run("ss", "-Htn", "state", "established", f"sport = :{port}").stdout


def fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def events(host: Host, run_id: str) -> list[str]:
    record = host.record(run_id)
    return [event["event"] for event in record["events"]] if record else []


class Shell:
    """A payload that does what it is told, a command at a time. `door` is its run's."""

    def __init__(self, host: Host, *options: str, run_id: str = RUN) -> None:
        self.process = host.spawn_run(run_id, "sh", options=options, stdin=subprocess.PIPE)
        self.record = host.record(run_id) or {}
        found = [pid for pid in process.children(self.record["supervisor"]) if pid in doors()]
        self.door = found[0] if found else 0

    def ask(self, command: str) -> str:
        """What it says, and its status on the last line."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f'{command}\nstatus=$?; echo; echo "= $status"\n')
        stdin.flush()
        said: list[str] = []
        while not said or not said[-1].startswith("= "):
            line = stdout.readline()
            assert line, self.process.stderr and self.process.stderr.read()
            said.append(line.rstrip("\n"))
        return "\n".join(line for line in said if line)

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)


def told(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# Relays


def test_a_broker_on_loopback_is_reached_through_a_relay(host: Host) -> None:
    host.broker(8080, "127.0.0.1")
    host.broker(8081, "127.0.0.1")

    done = host.sealnet("run", *RELAY, "--broker-env", "URL", "--", "sh", "-c", "curl -fsS $URL/hello; echo; echo $SEALNET_BROKER_URL $URL")
    leased = host.sealnet("run", "--lease-port", "8080", "--", "true")
    shell = Shell(host, *RELAY, "--receipt", str(host.directory / "receipt.json"))
    port = shell.record["lease_ports"][0]

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"/hello\n(http://198\.18\.0\.1:\d+) \1\n", done.stdout)
    assert leased.returncode == 125
    assert "listens on 127.0.0.1 alone" in leased.stderr
    assert shell.ask(f"curl -fsS http://broker.sealnet:{port}/x") == "/x\n= 0"
    for shut in (f"127.0.0.1:{port}", "198.18.0.1:8080", "198.18.0.1:8081", f"{LAN_HOST}:8080", f"198.18.0.1:{port + 1}"):
        assert shell.ask(f"curl -sS -m 3 http://{shut}/").endswith("= 7"), shut
    assert shell.ask("env | grep -ic proxy") == "0\n= 1"

    receipt = json.loads((host.directory / "receipt.json").read_text())
    assert (receipt["verdict"], receipt["lease_ports"]) == ("sealed", [port])
    assert receipt["wording"] == f"network: off - egress sealed to the run's broker at 198.18.0.1:{port}"
    assert {name: receipt[name] for name in SEALED} == SEALED
    assert told(host.sealnet("check", RUN, "--json"))["verdict"] == "sealed"
    seen = told(host.sealnet("inspect", RUN, "--json"))
    assert (seen["lease_ports"], seen["proxy_port"], seen["confinement"]) == ([port], None, "sealed")
    assert [run["run_id"] for run in told(host.sealnet("ls", "--json"))] == [RUN]
    assert f"198.18.0.1:{port}" in host.sealnet("ls").stdout
    assert shell.end() == 0


# Tells who its peers are, by the credentials of their sockets.
_UNIX = """
    import os, socket, struct, sys, time
    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[1])
    os.chmod(sys.argv[1], int(sys.argv[2], 8))
    server.listen(int(sys.argv[3]))
    print("listening", flush=True)
    while True:
        peer, _ = server.accept()
        with peer:
            time.sleep(float(sys.argv[4]))
            pid, uid, gid = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if peer.recv(4096):
                peer.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\nyou are %d %d" % (uid, gid))
"""


def unix_broker(host: Host, name: str, mode: str, *, backlog: int = 64, takes_s: float = 0) -> str:
    path = f"/run/{name}"
    broker = host.python(_UNIX, path, mode, str(backlog), str(takes_s))
    assert broker.stdout is not None
    assert broker.stdout.readline() == "listening\n"
    return f"unix:{path}"


def test_a_unix_broker_is_opened_with_the_rights_of_the_runs_user(host: Host) -> None:
    opened, shut = unix_broker(host, "open.sock", "666"), unix_broker(host, "shut.sock", "600")
    script = "curl -fsS $SEALNET_BROKER_URL/"

    for user, status, words in (("root", 0, "you are 0 0"), ("nobody", 0, "you are 65534 65534")):
        done = host.sealnet("run", "--broker", opened, "--user", user, "--", "sh", "-c", script)
        assert (done.returncode, done.stdout) == (status, words), done.stderr
    mine = host.sealnet("run", "--broker", shut, "--", "sh", "-c", script)
    refused = host.sealnet("run", "--broker", shut, "--user", "nobody", "--", "touch", "ran")
    anyway = host.sealnet("run", "--broker", shut, "--user", "nobody", "--no-preflight", "--", "sh", "-c", script)

    assert (mine.returncode, mine.stdout) == (0, "you are 0 0"), mine.stderr
    assert refused.returncode == 125
    assert refused.stderr.startswith(f"sealnet: cannot reach the broker at {shut}: Permission denied\n"), refused.stderr
    assert not Path("ran").exists()
    assert (anyway.returncode in CUT, anyway.stdout) == (True, ""), anyway.stderr


def test_callers_of_a_slow_unix_broker_wait_for_their_turn(host: Host) -> None:
    shell = Shell(host, "--broker", unix_broker(host, "slow.sock", "666", backlog=0, takes_s=0.05))
    ask = "for i in 1 2 3 4 5 6 7 8; do curl -fsS $SEALNET_BROKER_URL/ >>told & done; wait; cat told"

    assert shell.ask(ask) == 8 * "you are 0 0" + "\n= 0"
    assert shell.end() == 0


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("tcp:127.0.0.1:8080", "cannot reach the broker at tcp:127.0.0.1:8080: Connection refused"),
        ("tcp:localhost:8080", "cannot reach the broker at tcp:localhost:8080: Connection refused"),
        ("unix:/run/no-such.sock", "cannot reach the broker at unix:/run/no-such.sock: No such file or directory"),
        ("unix:/etc/hosts", "Connection refused"),
    ],
)
def test_a_broker_that_is_down_is_named(host: Host, target: str, words: str) -> None:
    receipt = host.directory / "receipt.json"

    refused = host.sealnet("run", "--broker", target, "--", "touch", "ran")
    done = host.sealnet("run", "--broker", target, "--no-preflight", "--receipt", str(receipt), "--", "touch", "ran")

    assert refused.returncode == 125
    assert words in refused.stderr
    assert refused.stderr.splitlines()[1].startswith("  hint: ")
    assert (done.returncode, done.stdout, Path("ran").exists()) == (0, "", True), done.stderr
    assert json.loads(receipt.read_text())["preflight"] is False


def test_a_broker_that_dies_and_comes_back_is_a_broker_again(host: Host) -> None:
    broker = host.broker(8080, "127.0.0.1")
    shell = Shell(host, *RELAY)
    ask = "curl -fsS -m 5 $SEALNET_BROKER_URL/x"

    assert shell.ask(ask) == "/x\n= 0"
    host.stop(broker)
    gone = shell.ask(ask)
    host.broker(8080, "127.0.0.1")

    assert int(gone.removeprefix("= ")) in CUT
    assert shell.ask(ask) == "/x\n= 0"
    assert shell.end() == 0


def test_a_dead_doors_port_that_somebody_else_has_got_is_shut(host: Host, upstream: Upstream) -> None:
    """The supervisor is halted until somebody listens there, which the host reaches."""
    shell = Shell(host, *ALLOWED)
    (port,) = shell.record["lease_ports"]
    host.unattended(RUN)

    os.kill(shell.door, signal.SIGKILL)
    wait_for(lambda: not doors() or Path(f"/proc/{shell.door}/stat").read_text().split()[2] == "Z", what="the door is dead")
    host.broker(port)
    os.kill(shell.record["supervisor"], signal.SIGCONT)
    wait_for(lambda: "door-ended" in events(host, RUN), what="it is written down")

    assert host.run("curl", "-fsS", f"http://198.18.0.1:{port}/y").stdout == "/y"
    assert shell.ask(f"curl -sS -m 3 http://198.18.0.1:{port}/y").endswith("= 7")
    assert shell.ask("curl -sS -m 3 http://allowed.test/y").endswith("= 7")
    assert shell.record["ifname"] not in host.run("nft", "list", "set", "inet", "sealnet", "leases").stdout
    assert shell.end() == 0


def test_a_lease_beside_a_proxy_outlives_its_door(host: Host, upstream: Upstream) -> None:
    host.broker(8080)
    shell = Shell(host, "--lease-port", "8080", *ALLOWED)

    os.kill(shell.door, signal.SIGKILL)
    wait_for(lambda: "door-ended" in events(host, RUN), what="it is written down")
    host.run("nft", "flush", "ruleset")
    wait_for(lambda: "gate-restored" in events(host, RUN), timeout_s=15, what="the gate is back")

    assert shell.ask("curl -fsS http://198.18.0.1:8080/x") == "/x\n= 0"
    assert shell.ask("curl -sS -m 3 http://allowed.test/y").endswith("= 7")
    assert shell.end() == 0


# Reads to the end, then answers with as many bytes as it has got: only a half-close can tell it to.
_COUNT = """
    import socket, sys
    is_unix = sys.argv[1].startswith("/")
    where, family = (sys.argv[1], socket.AF_UNIX) if is_unix else (("127.0.0.1", 8080), socket.AF_INET)
    server = socket.create_server(where, family=family, backlog=512)
    print("listening", flush=True)
    while True:
        peer, _ = server.accept()
        with peer:
            count = 0
            while data := peer.recv(65536):
                count += len(data)
            # To a Unix socket whose peer is gone even nothing cannot be sent.
            if count:
                peer.sendall(bytes(count))
"""
_SEND = """
import os, socket, sys
def ask(count):
    with socket.create_connection(os.environ["SEALNET_BROKER_URL"][7:].split(":"), 10) as sock:
        sock.sendall(bytes(count))
        sock.shutdown(socket.SHUT_WR)
        got = 0
        while data := sock.recv(65536):
            got += len(data)
        assert got == count, (got, count)
for _ in range(int(sys.argv[1])):
    ask(int(sys.argv[2]))
"""


@pytest.mark.parametrize("target", ["tcp:127.0.0.1:8080", "unix:/run/count.sock"])
def test_a_half_close_goes_through_and_many_connections_leave_nothing(host: Host, target: str) -> None:
    """10,000 of them, of all kinds, are `scripts/bench relays`."""
    broker = host.python(_COUNT, target.removeprefix("unix:"))
    assert broker.stdout is not None
    assert broker.stdout.readline() == "listening\n"
    Path("send.py").write_text(_SEND)
    shell = Shell(host, "--broker", target)
    assert shell.ask("python3 send.py 1 3000000; python3 send.py 50 10") == "= 0"
    before = fds(shell.door), fds(shell.record["supervisor"])

    assert shell.ask("python3 send.py 1000 10") == "= 0"

    # Some pipes are kept for the next one.
    wait_for(lambda: fds(shell.door) <= before[0] + 8, what=f"the door's descriptors are closed: {fds(shell.door)} of {before[0]}")
    # It looks after the run meanwhile.
    wait_for(lambda: fds(shell.record["supervisor"]) <= before[1], what="so are its supervisor's")
    assert shell.end() == 0


# The process


def test_a_door_has_nothing_to_lose_and_strangers_are_turned_away(host: Host, upstream: Upstream) -> None:
    host.broker(8080, "127.0.0.1")
    shell = Shell(host, *RELAY, "--allow", "allowed.test:80")
    other = Shell(host, "--allow", "allowed.test:80", run_id="doors-too")
    seen = identity.read(shell.door)

    assert (set(seen.uids), set(seen.gids), seen.groups) == ({UID}, {UID}, ())
    assert set(seen.capabilities.values()) == {0}
    assert (seen.no_new_privs, seen.seccomp) == (True, 2)
    assert os.readlink(f"/proc/{shell.door}/cwd") == "/"
    peek = f"import os; os.setgroups([]); os.setgid({UID}); os.setuid({UID}); print(os.listdir({str(host.state)!r}))"
    assert "PermissionError" in host.run("/usr/bin/python3", "-c", peek, check=False).stderr
    assert host.run("/usr/bin/python3", "-c", f"import os; print(len(os.listdir({str(host.state)!r})))").stdout != "0\n"

    knock = "import socket, sys\ns = socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)\ns.send(b'GET / HTTP/1.0\\r\\n\\r\\n')\n"
    for port in shell.record["lease_ports"]:
        for where in ((), ("ip", "netns", "exec", "lan")):
            came = host.run(*where, "/usr/bin/python3", "-c", f"{knock}print(s.recv(9))", "198.18.0.1", str(port), check=False)
            assert came.returncode == 1
            assert re.search("ConnectionResetError|TimeoutError", came.stderr), came.stderr
        assert other.ask(f"curl -sS -m 3 -x '' http://198.18.0.1:{port}/") == "= 7"
    assert shell.ask("curl -fsS --noproxy '*' $SEALNET_BROKER_URL/x; curl -fsS http://allowed.test/y") == "/x/y\n= 0"
    assert upstream.connections() == 1
    assert shell.end() == other.end() == 0


def test_port_and_user_of_doors_are_the_configurations(host: Host, upstream: Upstream) -> None:
    """The port at which somebody listens at all addresses is left out; a user that may not be is refused before anything is touched."""
    host.broker(5001)
    host.broker(8080, "127.0.0.1")
    path = host.directory / "config.toml"
    environ = {"env": {**os.environ, "SEALNET_CONFIG": str(path)}}

    for user in ("0", "root", "nobody", "65531"):
        path.write_text(f"door_user = {json.dumps(user)}\n")
        done = host.sealnet("run", "--user", "65531", *RELAY, "--", "touch", "ran", **environ)
        assert (done.returncode, f"cannot use door_user {user}: it is" in done.stderr or "that uid" in done.stderr) == (2, True), (
            done.stderr
        )
        assert host.sealnet("run", "--user", "65531", "--", "true", **environ).returncode == 0
    assert not Path("ran").exists()
    path.write_text('door_user = 64991\ndoor_ports = "5000-5002"\n')
    process_ = host.spawn_run(RUN, "sh", options=(*RELAY, *ALLOWED), stdin=subprocess.PIPE, **environ)
    (door,) = doors()
    assert set(identity.read(door).uids) == set(identity.read(door).gids) == {64991}
    assert (host.record(RUN) or {})["lease_ports"] == [5000, 5002]
    said = process_.communicate("curl -fsS $SEALNET_BROKER_URL/x; curl -fsS http://allowed.test/y", timeout=90)
    assert said == ("/x/y", "")
    path.write_text('door_ports = "5001-5002"\n')
    full = host.sealnet("run", *RELAY, *ALLOWED, "--", "true", **environ)
    assert full.returncode == 125
    assert full.stderr.splitlines()[0].endswith("cannot listen at 198.18.0.1 for a door: others listen at each port of 5001-5002"), (
        full.stderr
    )


def test_a_door_ends_with_its_sealnet(host: Host, upstream: Upstream) -> None:
    host.broker(8080, "127.0.0.1")
    shell = Shell(host, *RELAY, "--allow", "allowed.test:80")
    assert doors() == [shell.door]

    end(shell.process, signal.SIGKILL)

    wait_for(lambda: not doors(), what="the door has ended")
    assert host.sealnet("reap", "--orphans").returncode == 0


def test_a_door_that_dies_shuts_what_it_led_to_and_opens_nothing(host: Host, upstream: Upstream) -> None:
    host.broker(8080, "127.0.0.1")
    shell = Shell(host, *RELAY, "--allow", "allowed.test:80", "--evidence", str(host.directory / "evidence"))
    asked = {"broker": "curl -sS -m 5 $SEALNET_BROKER_URL/x", "proxy": "curl -sS -m 5 http://allowed.test/y"}
    assert [shell.ask(command) for command in asked.values()] == ["/x\n= 0", "/y\n= 0"]

    os.kill(shell.door, signal.SIGKILL)
    wait_for(lambda: "door-ended" in events(host, RUN), what="it is written down")

    # Nobody else may listen there while the run lives.
    assert [shell.ask(command) for command in asked.values()] == ["= 7", "= 7"]
    for port in shell.record["lease_ports"]:
        for where in ("0.0.0.0", "198.18.0.1"):
            # It sets SO_REUSEADDR.
            with pytest.raises(OSError, match="in use"):
                socket.create_server((where, port)).close()
    assert shell.ask(f"curl -sS -m 3 -x '' http://{PUBLIC}/").endswith("= 7")
    assert upstream.connections() == 1
    assert not doors()
    assert host.sealnet("check", RUN).returncode != 0
    assert shell.end() == 0
    told_of = json.loads((host.directory / "evidence" / "environment.json").read_text())
    assert told_of["complete"] is False


def test_a_door_that_is_halted_holds_nothing_up(host: Host, upstream: Upstream) -> None:
    """A run whose door is halted ends whole and at once: its tunnel is dead, and its evidence says that the log is not complete."""
    host.broker(8080, "127.0.0.1")
    shell = Shell(host, *RELAY, "--allow", "allowed.test:80", "--evidence", str(host.directory / "evidence"))
    assert shell.ask("curl -fsS $SEALNET_BROKER_URL/x; curl -fsS http://allowed.test/y") == "/x/y\n= 0"
    hold = "import socket, sys, time; s = socket.create_connection(sys.argv[1].split('/')[2].split(':')); time.sleep(100)"
    assert shell.ask(f'python3 -c "{hold}" $SEALNET_BROKER_URL & echo') == "= 0"
    wait_for(lambda: held(host, 8080), what="a tunnel is open")
    os.kill(shell.door, signal.SIGSTOP)

    began = time.monotonic()
    status = shell.end()
    took_s = time.monotonic() - began

    # It would be 10 s and more to wait for an answer.
    assert (status, took_s < 8) == (0, True), took_s
    assert not doors()
    assert held(host, 8080) == ""
    assert host.left_over() == []
    found = json.loads((host.directory / "evidence" / "environment.json").read_text())
    assert (found["complete"], len(decisions(host))) == (False, 1)


# The proxy


_NODE = "fetch(process.argv[1]).then(r => r.text()).then(t => console.log(t), e => { console.log(e.message); process.exit(1) })"
_JAVA = """
import java.net.*;
public class Fetch {
    public static void main(String[] argv) throws Exception {
        System.out.print(new String(((HttpURLConnection) new URL(argv[0]).openConnection()).getInputStream().readAllBytes()));
    }
}
"""
_PYTHON = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())"
# Of each: what it needs, the command with HOST in the place of the host, what it says, the requests that a proxy sees of it.
CLIENTS = {
    "curl": ("curl", "curl -fsS http://HOST/a", "/a", 1),
    "curl-tls": ("curl", "curl -fsS --cacert upstream/ca.pem https://HOST/a", "/a", 1),
    "curl-keep-alive": ("curl", "curl -fsS http://HOST/a http://HOST/b http://HOST/c", "/a/b/c", 3),
    "wget": ("wget", "wget -q -t 1 -O - http://HOST/a", "/a", 1),
    "wget-tls": ("wget", "wget -q -t 1 -O - --ca-certificate upstream/ca.pem https://HOST/a", "/a", 1),
    "git": ("git", "git clone -q http://HOST/git/demo.git d && cat d/README", "cloned", 3),
    "git-tls": ("git", "git -c http.sslCAInfo=upstream/ca.pem clone -q https://HOST/git/demo.git d && cat d/README", "cloned", 1),
    "pip": (
        "python3",
        (
            "python3 -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --retries 0 --cert upstream/ca.pem"
            " --index-url https://HOST/simple/ -d d sealdemo; ls d"
        ),
        "sealdemo-1.0-py3-none-any.whl",
        1,
    ),
    "npm": (
        "npm",
        "npm view sealpkg version --no-update-notifier --fetch-retries 0 --cache /tmp/npm --cafile upstream/ca.pem --registry https://HOST/",
        "1.2.3",
        1,
    ),
    "npm-install": (
        "npm",
        (
            "cd /tmp && npm install sealpkg --no-update-notifier --no-audit --no-fund --silent --fetch-retries 0 --cache /tmp/npm"
            " --cafile $OLDPWD/upstream/ca.pem --registry https://HOST/ && ls node_modules"
        ),
        "sealpkg",
        1,
    ),
    "urllib": ("python3", f"python3 -c '{_PYTHON}' http://HOST/a", "/a", 1),
    "urllib-tls": ("python3", f"SSL_CERT_FILE=upstream/ca.pem python3 -c '{_PYTHON}' https://HOST/a", "/a", 1),
    "java": ("javac", "java Fetch.java http://HOST/a 2>said", "/a", 1),
}
# Python's packages, of the environment that runs the tests.
_SITE = str(Path(str(importlib.util.find_spec("httpx").origin)).parents[1])  # type: ignore[union-attr]
_REQUESTS = (
    "import requests, sys; got = requests.get(sys.argv[1], timeout=5, verify='upstream/ca.pem'); got.raise_for_status(); print(got.text)"
)
_HTTPX = (
    "import httpx, ssl, sys; print(httpx.get(sys.argv[1], timeout=5, verify=ssl.create_default_context(cafile='upstream/ca.pem'))"
    ".raise_for_status().text)"
)
for _name, _text in (("requests", _REQUESTS), ("httpx", _HTTPX)):
    for _scheme in ("http", "https"):
        CLIENTS[f"{_name}-{_scheme}"] = ("python3", f'PYTHONPATH={_SITE} python3 -c "{_text}" {_scheme}://HOST/a', "/a", 1)
# Larger ones, in the bin and node_modules of a directory: docs/development.md says how to make one.
_MORE = os.environ.get("SEALNET_CLIENTS", "")
_UNDICI = (
    "const u = require('undici'); u.setGlobalDispatcher(new u.EnvHttpProxyAgent()); u.fetch(process.argv[1])"
    ".then(r => r.text()).then(t => console.log(t), e => { console.log(e); process.exit(1) })"
)
_CARGO = (
    'mkdir -p c/src && cd c && touch src/lib.rs && printf \'[package]\\nname="c"\\nversion="0.1.0"\\nedition="2021"\\n'
    '[dependencies]\\nsealcrate={version="1",registry="s"}\\n\' >Cargo.toml'
    " && CARGO_REGISTRIES_S_INDEX=sparse+https://HOST/index/ CARGO_HOME=/tmp/cargo CARGO_HTTP_CAINFO=../upstream/ca.pem CARGO_NET_RETRY=0"
    " cargo fetch -q && ls /tmp/cargo/registry/cache/*"
)
if _MORE:
    CLIENTS |= {
        "uv": (
            "python3",
            (
                f"SSL_CERT_FILE=upstream/ca.pem {_MORE}/bin/uv pip install -q --python /usr/bin/python3 --cache-dir /tmp/uv --no-deps"
                " --target d --index-url https://HOST/simple/ sealdemo && ls d/sealdemo.py"
            ),
            "d/sealdemo.py",
            1,
        ),
        "undici": ("node", f'NODE_PATH={_MORE}/node_modules node -e "{_UNDICI}" http://HOST/a', "/a", 1),
        "undici-tls": (
            "node",
            f'NODE_EXTRA_CA_CERTS=upstream/ca.pem NODE_PATH={_MORE}/node_modules node -e "{_UNDICI}" https://HOST/a',
            "/a",
            1,
        ),
        "cargo": ("cargo", f"PATH={_MORE}/bin:$PATH; {_CARGO}", "sealcrate-1.0.0.crate", 1),
    }
_BINDS = [word for path in (_SITE, _MORE) if path for word in ("--ro-bind", path)]
ALLOWED = ("--allow", "allowed.test", "--allow", "allowed.test:80")


def decisions(host: Host, name: str = "evidence") -> list[dict[str, Any]]:
    """What the log of the only run in a bundle says."""
    (path,) = (host.directory / name).glob("*.egress.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_reaches_a_declared_host_through_the_proxy_and_no_other(host: Host, upstream: Upstream, client: str) -> None:
    needed, command, said, requests = CLIENTS[client]
    if subprocess.run(["which", needed], capture_output=True, check=False).returncode:
        pytest.skip(f"needs {needed}")
    Path("Fetch.java").write_text(_JAVA)
    path = {"env": {**os.environ, "PATH": "/usr/local/bin:/usr/bin:/bin"}}

    done = host.sealnet(
        "run", *ALLOWED, *_BINDS, "--evidence", "evidence", "--", "sh", "-c", command.replace("HOST", "allowed.test"), **path
    )
    seen, asked = upstream.connections(), upstream.questions()
    evil = host.sealnet(
        "run", *ALLOWED, *_BINDS, "--evidence", "evil", "--", "sh", "-c", f"rm -rf d; {command}".replace("HOST", "evil.test"), **path
    )

    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr
    found = decisions(host)
    assert {(one["verdict"], one["host"], one["address"]) for one in found} == {("ALLOW", "allowed.test", PUBLIC)}
    assert len(found) == seen == requests, (found, upstream.book())
    assert set(asked) == {"allowed.test"}
    assert all(one["bytes_down"] > 0 for one in found)

    assert evil.returncode != 0 or evil.stdout == "", (evil.stdout, evil.stderr)
    assert {(one["verdict"], one["host"], one["reason"]) for one in decisions(host, "evil")} == {("DENY", "evil.test", "not declared")}
    assert upstream.connections() == seen
    # Nobody has asked for the name, on either side of the door, but the preflight of the second run for its own.
    assert set(upstream.questions()) == {"allowed.test"}


@pytest.mark.tool("node")
def test_node_goes_through_the_proxy_where_it_can_and_nowhere_where_it_cannot(host: Host, upstream: Upstream) -> None:
    """NODE_USE_ENV_PROXY is obeyed from Node 22.21 and 24 on."""
    asks = "process.exit(process.allowedNodeEnvironmentFlags.has('--use-env-proxy') ? 0 : 1)"
    obeys = subprocess.run(["node", "-e", asks], check=False).returncode == 0
    script = f"printenv NODE_USE_ENV_PROXY; node -e '{_NODE}' http://allowed.test/a; curl -fsS http://allowed.test/b"

    done = host.sealnet("run", *ALLOWED, "--", "sh", "-c", script)

    assert done.stdout.splitlines() == ["1", "/a" if obeys else "fetch failed", "/b"], done.stderr
    assert upstream.connections() == 1 + obeys


def test_a_denial_is_told_to_whoever_asked_and_to_whoever_looks(host: Host, upstream: Upstream) -> None:
    shell = Shell(host, *ALLOWED, "--receipt", str(host.directory / "receipt.json"))
    (port,) = shell.record["lease_ports"]

    denied = shell.ask("curl -sS -o said -w '%{http_code} ' http://evil.test/a; cat said; echo; curl -sS https://evil.test/")
    assert denied.startswith("403 ")
    assert "DENY evil.test:80: not declared" in denied
    assert "--allow evil.test:80" in denied
    assert "CONNECT tunnel failed, response 403" in shell.process.stderr.readline()
    assert shell.ask("curl -fsS http://allowed.test/a") == "/a\n= 0"

    logged = host.sealnet("log", RUN)
    assert logged.stdout.splitlines() == [
        "DENY evil.test:80 GET not declared",
        "DENY evil.test:443 CONNECT not declared",
        "ALLOW allowed.test:80 GET",
    ]
    people, seen = host.sealnet("inspect", RUN), told(host.sealnet("inspect", RUN, "--json"))
    assert "--allow evil.test:443" in people.stdout
    assert (seen["confinement"], seen["lease_ports"], seen["proxy_port"]) == ("allowlist", [port], port)
    assert told(host.sealnet("check", RUN, "--json"))["verdict"] == "allowlist"
    receipt = json.loads((host.directory / "receipt.json").read_text())
    assert (receipt["verdict"], receipt["hosts"], receipt["lease_ports"]) == ("allowlist", ["allowed.test:443", "allowed.test:80"], [port])
    assert receipt["wording"] == (
        f"network: limited - egress enforced to allowed.test:443, allowed.test:80 by the run's door at 198.18.0.1:{port}"
    )
    assert {name: receipt[name] for name in SEALED} == {**SEALED, "egress_sealed": False}
    assert shell.end() == 0


@pytest.mark.parametrize("how", [("--lease-port", "8080"), RELAY])
def test_a_run_may_have_a_proxy_and_a_broker(host: Host, upstream: Upstream, how: tuple[str, ...]) -> None:
    """A loopback broker beside a proxy for the relay; one on the gateway for a lease."""
    host.broker(8080, "127.0.0.1" if how is RELAY else "0.0.0.0")
    host.broker(8081)
    shell = Shell(host, *how, *ALLOWED, "--broker-env", "URL", "--receipt", str(host.directory / "receipt.json"))
    broker, proxy = shell.record["lease_ports"]

    assert (broker == 8080) == (how is not RELAY)
    assert shell.ask("curl -fsS $URL/x; curl -fsS http://broker.sealnet:${URL##*:}/z; curl -fsS http://allowed.test/y") == "/x/z/y\n= 0"
    variables = dict(line.split("=", 1) for line in shell.ask("env").splitlines() if "=" in line)
    assert variables["URL"] == f"http://198.18.0.1:{broker}"
    assert variables["HTTPS_PROXY"] == f"http://198.18.0.1:{proxy}"
    assert variables["NO_PROXY"] == variables["no_proxy"] == "localhost,127.0.0.1,::1,198.18.0.1,broker.sealnet"
    for shut in (f"198.18.0.1:{8081}", f"{LAN_HOST}:8081", f"{PUBLIC}:80"):
        assert shell.ask(f"curl -sS -m 3 --noproxy '*' http://{shut}/").endswith("= 7"), shut
    # Neither the broker nor this host is to be had by the other way.
    for name in ("broker.sealnet", "198.18.0.1"):
        assert "= 22" in shell.ask(f"curl -fsS --noproxy '' http://{name}:{broker}/"), name

    receipt = json.loads((host.directory / "receipt.json").read_text())
    assert receipt["lease_ports"] == [broker, proxy]
    assert receipt["wording"].endswith(f"by the run's door at 198.18.0.1:{proxy}, and sealed to its broker at 198.18.0.1:{broker}")
    assert receipt["verdict"] == told(host.sealnet("check", RUN, "--json"))["verdict"] == "allowlist"
    assert [line.split()[1] for line in host.sealnet("log", RUN).stdout.splitlines()] == [
        "allowed.test:80",
        f"broker.sealnet:{broker}",
        f"198.18.0.1:{broker}",
    ]
    assert shell.end() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--allow", "no-such.test"), "no-such.test:443: "),
        (("--allow", "allowed.test:8443"), "allowed.test:8443: Connection refused"),
        (("--allow", "lan.test:80"), "lan.test:80: 192.168.77.2 is refused: private, which --allow-private lan.test:80 would allow"),
        (("--allow", "no-such.test", "--allow", "allowed.test:8443", "--allow", "allowed.test:80"), "; allowed.test:8443: "),
    ],
)
def test_each_declared_host_is_tried_before_the_payload(host: Host, upstream: Upstream, options: tuple[str, ...], words: str) -> None:
    receipt = host.directory / "receipt.json"

    refused = host.sealnet("run", *options, "--receipt", str(receipt), "--", "touch", "ran")
    reason = json.loads(receipt.read_text())["reason"]
    anyway = host.sealnet("run", *options, "--no-preflight", "--receipt", str(receipt), "--", "touch", "ran")

    assert refused.returncode == 125
    assert refused.stderr.startswith("sealnet: cannot reach ")
    assert words in refused.stderr
    assert "allowed.test:80" not in refused.stderr
    assert ("hint: --allow-private lan.test:80 lets" in refused.stderr) == ("lan.test:80" in options)
    assert words in reason
    assert anyway.returncode == 0, anyway.stderr
    assert Path("ran").exists()
    assert json.loads(receipt.read_text())["preflight"] is False
    good = host.sealnet("run", "--allow", "allowed.test:80", "--allow-private", "lan.test:80", "--receipt", str(receipt), "--", "true")
    assert (good.returncode, json.loads(receipt.read_text())["preflight"]) == (0, True), good.stderr


@pytest.mark.parametrize(
    "options",
    [
        *(
            ("--allow", text)
            for text in (
                *(
                    "",
                    " ",
                    "*",
                    "*.a.test",
                    "https://a.test",
                    "a.test/",
                    "a.test/24",
                    "u@a.test",
                    "a.test:0",
                    "a.test:65536",
                    "a.test:",
                    ":443",
                ),
                *("a.test:443:443", "a..test", ".a.test", "-a.test", "a_b.test", "a" * 64 + ".test", "a.test #x", "#a.test", "a.test\r"),
                *("\ufeffa.test", "b\u00fccher.test", "1.2.3.4", "0x7f.1", "2130706433", "[::1]", "::1", "[::1]:443", "single", "a.b.1"),
            )
        ),
        ("--allow-private", "10.0.0.7"),
        ("--allow", "a.test", "--setenv", "http_proxy=http://x"),
        ("--allow", "a.test", "--setenv", "ALL_PROXY=x"),
        ("--allow", "a.test", "--network", "sealed"),
        *(("--broker", text) for text in ("", "tcp:a", "tcp:a:0", "tcp::80", "a:80", "http://a:80", "unix:", "unix:x", "udp:a:1")),
    ],
)
def test_a_door_that_makes_no_sense_is_refused_before_anything_is_touched(host: Host, options: tuple[str, ...]) -> None:
    done = host.sealnet("run", *options, "--", "touch", "ran")

    assert done.returncode == 2, done.stderr
    assert re.match(r"sealnet: cannot use --[^\n]+\n(  hint: [^\n]+\n)?$", done.stderr), done.stderr
    assert done.stderr.isascii()
    assert not Path("ran").exists()
    assert not host.state.exists()


# What happens to it


def test_a_log_leaves_half_of_the_room_and_what_has_none_is_refused(host: Host, upstream: Upstream) -> None:
    """The state directory is a small file system of its own: other runs go on, and this one can reach nothing any more."""
    host.state.mkdir(mode=0o711, exist_ok=True)
    libc.mount("tmpfs", str(host.state), "tmpfs", 0, "mode=0711,size=768k")
    # Between brackets: curl asks for each, on one connection.
    flood = "curl -s -o /dev/null -w '%{http_code}\\n' 'http://evil.test/[1-4000]' | sort | uniq -c"
    try:
        shell = Shell(host, *ALLOWED, "--evidence", str(host.directory / "evidence"))
        before = room(host)
        assert shell.ask("curl -fsS http://allowed.test/y") == "/y\n= 0"

        codes = dict(reversed(line.split()) for line in shell.ask(flood).splitlines()[:-1])
        log, left = host.state / "runs" / RUN / "egress.jsonl", room(host)

        assert int(codes["403"]) > 500, codes
        assert int(codes["503"]) > 500, codes
        # But for a page or two.
        assert before // 4 < log.stat().st_size <= left + 8192
        assert "503" in shell.ask("curl -sS -o /dev/null -w '%{http_code}' http://allowed.test/z")
        assert "/z" not in "".join(upstream.book())
        assert host.sealnet("run", "--run-id", "doors-too", *ALLOWED, "--", "curl", "-fsS", "http://allowed.test/x").stdout == "/x"
        assert shell.end() == 0
        assert json.loads((host.directory / "evidence" / "environment.json").read_text())["complete"] is False
        assert len(decisions(host)) == int(codes["403"]) + 1
        assert host.left_over() == []
    finally:
        libc.umount(str(host.state), libc.MNT_DETACH)


def room(host: Host) -> int:
    """What the file system of the state directory has free, in bytes."""
    found = os.statvfs(host.state)
    return found.f_bavail * found.f_frsize


@pytest.mark.parametrize(
    ("tamper", "event"),
    [
        ("flush ruleset", "gate-restored"),
        ("delete table inet sealnet", "gate-restored"),
        ("delete element inet sealnet leases {{ {ifname} . 198.18.0.2 . 198.18.0.1 . {broker} }}", "lease-restored"),
        ("delete element inet sealnet leases {{ {ifname} . 198.18.0.2 . 198.18.0.1 . {proxy} }}", "lease-restored"),
        ("flush set inet sealnet leases", "lease-restored"),
    ],
)
def test_both_leases_are_put_back(host: Host, upstream: Upstream, tamper: str, event: str) -> None:
    host.broker(8080, "127.0.0.1")
    shell = Shell(host, *RELAY, *ALLOWED)
    broker, proxy = shell.record["lease_ports"]
    ask = "curl -fsS -m 2 $SEALNET_BROKER_URL/x; curl -fsS -m 2 http://allowed.test/y"
    assert shell.ask(ask) == "/x/y\n= 0"

    host.run("nft", tamper.format(ifname=shell.record["ifname"], broker=broker, proxy=proxy))
    wait_for(lambda: events(host, RUN), timeout_s=15, what="an event is written down")
    wait_for(lambda: host.sealnet("check", RUN).returncode == 0, what="the seal is whole again")

    assert events(host, RUN) == [event]
    leases = host.run("nft", "list", "set", "inet", "sealnet", "leases").stdout
    assert f". {broker} " in leases
    assert f". {proxy} " in leases
    assert shell.ask(ask) == "/x/y\n= 0"
    assert shell.ask(f"curl -sS -m 3 --noproxy '*' http://{PUBLIC}/").endswith("= 7")
    assert shell.end() == 0


@pytest.mark.parametrize("which", ["broker", "proxy", "both", "neither"])
def test_whichever_lease_is_taken_away_a_payload_is_ended_for_it_where_that_was_asked_for(
    host: Host, upstream: Upstream, which: str
) -> None:
    host.broker(8080, "127.0.0.1")
    shell = Shell(host, *RELAY, *ALLOWED, "--on-tamper", "kill", "--report")
    ports = dict(zip(("broker", "proxy"), shell.record["lease_ports"], strict=True))
    assert shell.ask("curl -fsS $SEALNET_BROKER_URL/x; curl -fsS http://allowed.test/y") == "/x/y\n= 0"

    element = f"{{ {shell.record['ifname']} . 198.18.0.2 . 198.18.0.1 . {ports.get(which)} }}"
    if which != "neither":
        host.run("nft", "flush set inet sealnet leases" if which == "both" else f"delete element inet sealnet leases {element}")
    else:
        assert shell.ask("sleep 1; curl -fsS $SEALNET_BROKER_URL/x; curl -fsS http://allowed.test/y") == "/x/y\n= 0"
        assert shell.end() == 0
        return

    assert shell.process.wait(60) == 137
    assert shell.process.stderr is not None
    said = shell.process.stderr.read()
    assert said.startswith(f"sealnet: ended run {RUN}: ")
    assert "killed-by-watch: the payload was ended: " in said
    assert host.left_over() == []


@pytest.mark.parametrize("state", ["claimed", "built", "proved", "running", "door"])
def test_a_sealnet_that_is_killed_leaves_no_door_and_nothing_that_one_reap_does_not_take(
    host: Host, upstream: Upstream, state: str
) -> None:
    host.broker(8080, "127.0.0.1")
    process_ = host.spawn(*SEALNET, "run", "--run-id", RUN, *RELAY, *ALLOWED, "--", "sleep", "60")
    moment = (lambda: doors()) if state == "door" else (lambda: (host.record(RUN) or {}).get("state") in (state, "running"))
    wait_for(moment, what=f"the run is {state}")

    end(process_, signal.SIGKILL)

    wait_for(lambda: not doors(), what="no door is left")
    assert host.sealnet("reap", "--orphans").returncode == 0
    assert host.things_left_over() == []
    # And the next one has all it needs.
    assert host.sealnet("run", "--run-id", RUN, *RELAY, *ALLOWED, "--", "curl", "-fsS", "http://allowed.test/y").stdout == "/y"
