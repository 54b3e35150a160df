"""The sealed run as a person uses it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from tests.lab import SEALNET, Host, wait_for

pytestmark = pytest.mark.root


def test_a_sealed_run_reaches_its_broker_and_nothing_else(host: Host) -> None:
    host.broker(8080)
    host.broker(8081)

    reached = host.sealnet("run", "--lease-port", "8080", "--", "curl", "-fsS", "http://broker.sealnet:8080/hello")
    other = host.sealnet("run", "--lease-port", "8080", "--", "curl", "-sS", "-m", "3", "http://broker.sealnet:8081/")

    assert (reached.returncode, reached.stdout) == (0, "/hello")
    assert host.run("curl", "-fsS", "http://127.0.0.1:8081/x").stdout == "/x"
    assert other.returncode == 7
    assert "onnect" in other.stderr


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 1"), 1),
        (("sh", "-c", "exit 42"), 42),
        (("sh", "-c", "exit 255"), 255),
        (("sh", "-c", "kill -TERM $$"), 143),
        (("sh", "-c", "kill -SEGV $$"), 139),
        (("sh", "-c", "kill -KILL $$"), 137),
        (("no-such-command",), 127),
        (("/etc/passwd",), 126),
    ],
)
def test_the_exit_status_is_the_payloads_own(host: Host, command: tuple[str, ...], status: int) -> None:
    assert host.sealnet("run", "--", *command).returncode == status


@pytest.mark.parametrize("options", [(), ("--chdir", "/usr"), ("--chdir", "/usr", "--pass-env", "*")])
def test_pwd_is_the_working_directory_for_a_program_that_is_no_shell(host: Host, options: tuple[str, ...]) -> None:
    done = host.sealnet("run", *options, "--", "/usr/bin/python3", "-c", "import os; print(os.environ['PWD'] == os.getcwd(), os.getcwd())")

    assert done.stdout == f"True {'/usr' if options else Path.cwd()}\n"


# A connected socket is let go of (AF_UNSPEC) and led elsewhere, in the namespace that it was made in.
ELSEWHERE = """
import ctypes, os, socket, struct, sys
try:
    sock = socket.socket(fileno=0)
    ctypes.CDLL(None).connect(0, struct.pack("=H14x", 0), 16)
    sock.connect(("127.0.0.1", 8081))
    sock.sendall(b"GET /out HTTP/1.0\\r\\n\\r\\n")
    print(sock.recv(4096))
except OSError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["tcp", "udp", "netlink", "abstract", "namespace"])
def test_no_stream_is_a_way_out(host: Host, kind: str) -> None:
    host.broker(8081)
    opened: list[socket.socket] = []
    if kind == "namespace":
        fd = os.open("/proc/self/ns/net", os.O_RDONLY)
    else:
        made = {"tcp": (socket.AF_INET,), "udp": (socket.AF_INET, socket.SOCK_DGRAM), "netlink": (socket.AF_NETLINK, socket.SOCK_RAW),
                "abstract": (socket.AF_UNIX, socket.SOCK_DGRAM)}  # fmt: skip
        opened.append(socket.socket(*made[kind]))
        if kind == "tcp":
            opened[0].connect(("127.0.0.1", 8081))
        fd = os.dup(opened[0].fileno())
    words = ("run", "--worker", "never", "--", "/usr/bin/python3", "-c", ELSEWHERE)
    ours, theirs = socket.socketpair()

    try:
        refused = [host.sealnet(*words, stdin=fd)]
        refused.append(host.run("sh", "-c", 'exec "$@" >&0 </dev/null', "sh", *SEALNET, *words, stdin=fd, check=False))
        with ours, theirs:
            allowed = host.sealnet("run", "--worker", "never", "--", "sh", "-c", "echo said >&0", stdin=theirs)
            said = ours.recv(100)
    finally:
        os.close(fd)
        for sock in opened:
            sock.close()

    assert {done.returncode for done in refused} == {2}, refused
    assert all("cannot use the standard " in done.stderr for done in refused)
    assert (allowed.returncode, said) == (0, b"said\n")


def test_inspect_tells_what_a_run_tried_to_reach(host: Host) -> None:
    host.broker(8080)
    script = "curl -s -m 2 http://192.0.2.7:81/; curl -s -m 2 'http://[2001:db8::7]:82/'; echo done; exec sleep 60"
    process = host.spawn_run("curious", "sh", "-c", script, options=("--lease-port", "8080"))
    assert process.stdout.readline() == "done\n"

    shown = json.loads(host.sealnet("inspect", "curious", "--json").stdout)
    people = host.sealnet("inspect", "curious").stdout

    tried = {(row["address"], row["protocol"], row["port"]) for row in shown["tried"]}
    assert tried == {("192.0.2.7", "tcp", 81), ("2001:db8::7", "tcp", 82)}
    assert "192.0.2.7" in people
    assert host.sealnet("reap", "curious").returncode == 0
    assert wait_for(lambda: process.poll() is not None or None)


def test_a_full_state_directory_refuses_the_next_run_and_ends_none(host: Host) -> None:
    host.state.mkdir()
    host.run("mount", "-t", "tmpfs", "-o", "size=64k,mode=711", "tmpfs", str(host.state))
    process = host.spawn_run("early", "sh", "-c", "read go; exit 4", stdin=subprocess.PIPE)
    fill = host.run("dd", "if=/dev/zero", f"of={host.state}/fill", "bs=1k", check=False)
    assert "No space left on device" in fill.stderr

    refused = host.sealnet("run", "--", "touch", "ran")
    process.communicate("go\n", timeout=90)

    assert refused.returncode == 125
    assert "No space left on device" in refused.stderr
    assert not Path("ran").exists()
    assert process.returncode == 4
    (host.state / "fill").unlink()
    assert host.sealnet("run", "--", "true").returncode == 0


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_the_status_is_the_payloads_whatever_the_caller_has_closed(host: Host, closed: str) -> None:
    done = host.run("sh", "-c", f'"$@" {closed}', "sh", *SEALNET, "run", "--", "sh", "-c", "exit 7", check=False)

    assert (done.returncode, done.stderr) == (7, "")


def test_the_records_may_lie_in_the_working_directory_and_are_not_the_payloads(host: Host) -> None:
    """As tests of others have it: state directory and working directory in one temporary directory."""
    host.broker(8080)
    work = host.directory / "work"
    (work / "below").mkdir(parents=True)
    connect = "import socket; socket.socket(socket.AF_UNIX).connect('below/host.sock')"
    script = f'/usr/bin/python3 -c "{connect}" 2>&1 | tail -n 1; '
    script += "touch state/planted; rmdir state; mv state elsewhere; ls -A state; ls -A; curl -fsS $SEALNET_BROKER_URL/x"
    # A run before, so that there is something to look through.
    assert host.sealnet("run", "--", "true", cwd=work, env={**os.environ, "SEALNET_STATE_DIR": str(work / "state")}).returncode == 0
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(work / "below" / "host.sock"))
        server.listen()
        _tried(host, work, script)


def _tried(host: Host, work: Path, script: str) -> None:

    done = host.sealnet(
        "run", "--lease-port", "8080", "--", "sh", "-c", script, cwd=work, env={**os.environ, "SEALNET_STATE_DIR": str(work / "state")}
    )
    deeper = host.sealnet("run", "--", "true", cwd=work, env={**os.environ, "SEALNET_STATE_DIR": str(work / "below" / "state")})

    assert (done.returncode, done.stdout) == (0, "PermissionError: [Errno 13] Permission denied\nplanted\nbelow\nstate\n/x"), done.stderr
    assert sorted(path.name for path in (work / "state").iterdir() if path.is_dir()) == ["runs", "stage", "subnets"]
    assert list((work / "state" / "runs").iterdir()) == []
    # A directory in between could be renamed.
    assert (deeper.returncode, "the records of the runs are in" in deeper.stderr) == (2, True)
    assert [path.name for path in (work / "below").iterdir()] == ["host.sock"]
    profile = host.directory / "profile"
    profile.write_text("--dir\n/mnt/x\n")
    around = host.sealnet(
        "run", "--bwrap-args", str(profile), "--", "true", cwd=work, env={**os.environ, "SEALNET_STATE_DIR": str(work / "state")}
    )
    assert (around.returncode, "which it could show" in around.stderr) == (2, True), around.stderr


def test_the_names_of_network_namespaces_are_not_the_payloads_to_write(host: Host) -> None:
    for options, cwd in (((), "/run/netns"), (("--bind", "/run/netns"), "/"), (("--bind", "/run"), "/")):
        done = host.sealnet("run", *options, "--", "true", cwd=cwd)
        assert (done.returncode, "cannot make /run" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("kind", ["bind", "tmpfs"])
def test_a_host_whose_etc_is_a_mount_has_the_broker_in_its_names(host: Host, kind: str) -> None:
    host.broker(8080)
    mount = (
        "mount --bind /etc /etc"
        if kind == "bind"
        else "cp -a /etc/passwd /etc/group /etc/nsswitch.conf . && mount -t tmpfs t /etc && cp -a . /etc"
    )
    (host.directory / "etc").mkdir()
    own = f'cd {host.directory}/etc; {mount}; cd /; exec "$@"'
    asked = "getent hosts broker.sealnet; grep -c nameserver /etc/resolv.conf; curl -fsS http://broker.sealnet:8080/x"

    done = host.run("unshare", "-m", "sh", "-c", own, "sh", *SEALNET, "run", "--lease-port", "8080", "--", "sh", "-c", asked, check=False)

    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0].split()[1:], lines[-1]) == (0, ["broker.sealnet"], "/x"), done.stdout + done.stderr


def test_one_document_is_printed_where_one_was_asked_for(host: Host) -> None:
    script = "for n in 1 2; do curl -s http://other.example/; done; sleep 600"
    run = host.spawn_run("logged", "sh", "-c", script, options=("--allow", "only.example", "--no-preflight"))
    wait_for(lambda: host.sealnet("log", "logged").stdout.count("DENY") == 2, what="two were denied")

    log = json.loads(host.sealnet("log", "logged", "--json").stdout)
    top = json.loads(host.sealnet("--json", "top", "--once").stdout)
    plan = json.loads(host.sealnet("run", "--dry-run", "--json", "--timeout", "7", "--tmpfs", "/opt", "--", "true").stdout)["plan"]

    assert [(one["verdict"], one["host"]) for one in log] == [("DENY", "other.example")] * 2
    assert [one["run_id"] for one in top] == ["logged"]
    assert (plan["timeout_s"], plan["tmpfs"]) == (7.0, ["/opt"])
    host.sealnet("reap", "logged")
    run.wait(60)
