"""Field cases of host compatibility: old tools, missing tools, somebody else's tools, a resolver that is not there."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sealnet.kernel import libc
from tests.lab import SEALNET, Host, wait_for, without

pytestmark = pytest.mark.root

LEASE = ("--lease-port", "8080")
HELLO = ("curl", "-fsS", "http://broker.sealnet:8080/hello")


@contextlib.contextmanager
def covered(host: Host, path: str, text: str, mode: int = 0o755) -> Iterator[None]:
    """Another root-owned file stands at `path`, on this throw-away host alone."""
    target = os.path.realpath(path)
    cover = host.directory / f"cover-{Path(path).name}"
    cover.write_text(textwrap.dedent(text))
    cover.chmod(mode)
    libc.mount(str(cover), target, None, libc.MS_BIND)
    try:
        yield
    finally:
        libc.umount(target, libc.MNT_DETACH)


def gate(host: Host) -> str:
    """The gate as nft tells it; empty when there is none."""
    return host.run("nft", "list", "table", "inet", "sealnet", check=False).stdout


def hello(host: Host, run_id: str) -> None:
    done = host.sealnet("run", "--run-id", run_id, *LEASE, "--", *HELLO)
    assert (done.returncode, done.stdout, done.stderr) == (0, "/hello", "")


def test_set_up_and_reap_are_the_same_with_the_gate_there_and_not(host: Host) -> None:
    """COMP-01, https://github.com/cyberstorm-dev/infralink-ops/issues/204"""
    host.broker(8080)
    assert gate(host) == ""
    absent = [host.sealnet("reap", "comp01").returncode for _ in range(2)]

    hello(host, "comp01")
    fresh = gate(host)
    hello(host, "comp01")
    again = gate(host)
    present = [host.sealnet("reap", "comp01").returncode for _ in range(2)]
    host.run("nft", "delete", "table", "inet", "sealnet")
    removed = [host.sealnet("reap", "comp01").returncode for _ in range(2)]
    hello(host, "comp01")
    anew = gate(host)

    assert absent == present == removed == [0, 0]
    assert fresh.count("\t\tdrop\n") == 1
    assert fresh == again == anew


def test_a_live_run_is_reaped_without_its_gate(host: Host) -> None:
    """COMP-01, https://github.com/cyberstorm-dev/infralink-ops/issues/204"""
    host.broker(8080)
    for _ in range(2):
        probe = host.probe_run("comp01-live", *LEASE)
        assert probe.ask(("tcp", host.record("comp01-live")["gateway"], 8080)) == ["answered"]
        host.run("nft", "delete", "table", "inet", "sealnet")

        reaped = [host.sealnet("reap", "comp01-live") for _ in range(2)]

        assert [(done.returncode, done.stderr) for done in reaped] == [(0, ""), (0, "")]
        assert probe.process.wait(60) == 137
        assert host.left_over() == []


def test_a_table_of_the_gates_name_and_another_content_is_replaced_whole(host: Host) -> None:
    """COMP-01, https://github.com/cyberstorm-dev/infralink-ops/issues/204"""
    host.broker(8080)
    hello(host, "comp01-foreign")
    fresh = gate(host)
    host.run("nft", "add rule inet sealnet prerouting accept; insert rule inet sealnet gate accept")
    host.run("nft", "add table inet others; add chain inet others c; add rule inet others c counter")
    host.settled()
    assert gate(host) != fresh

    hello(host, "comp01-foreign")

    assert gate(host) == fresh


def test_each_change_of_the_ruleset_is_one_transaction(host: Host) -> None:
    """COMP-01, https://github.com/cyberstorm-dev/infralink-ops/issues/204: the gate is never seen half-built."""
    host.broker(8080)
    seen = host.directory / "monitor"
    with open(seen, "w") as file:
        host.spawn("stdbuf", "-oL", "nft", "monitor", stdout=file)

    def watching() -> bool:
        host.run("nft", "add table inet others; delete table inet others")
        return "others" in seen.read_text()

    wait_for(watching, what="nft monitor tells of changes")

    hello(host, "comp01-once")
    host.run("nft", "add table inet last; delete table inet last")
    wait_for(lambda: "add table inet last" in seen.read_text(), what="nft monitor has told everything")

    transactions = [text for text in re.split(r"# new generation \d+ by process .*\n", seen.read_text()) if "sealnet" in text]
    building = [text for text in transactions if "chain inet sealnet" in text or "rule inet sealnet" in text]
    assert len(building) == 1, "\n---\n".join(transactions)
    assert building[0].count("add chain inet sealnet") == 6
    assert building[0].count("add rule inet sealnet") == 16
    # What goes is added first, so that a transaction that takes it away succeeds where it is gone already.
    granting = [
        text for text in transactions if text.rfind("add element inet sealnet leases") > text.rfind("delete element inet sealnet leases")
    ]
    assert len(granting) == 1, "\n---\n".join(granting)


def test_a_run_works_on_the_distributions_bwrap(host: Host) -> None:
    """COMP-02, https://github.com/openai/codex/issues/15260"""
    assert host.run("bwrap", "--version").stdout.startswith("bubblewrap ")
    host.broker(8080)

    hello(host, "comp02")


# Knows the options of 0.4.0, and takes them from --args as that does.
_OLD_BWRAP = """\
    #!/bin/sh
    newer='--perms --clearenv --chmod --size --argv0 --disable-userns --assert-userns-disabled --overlay-src --overlay --tmp-overlay'
    check() {
        for option in $newer; do
            if [ "$1" = "$option" ]; then
                echo "bwrap: Unknown option $1" >&2
                exit 1
            fi
        done
    }
    case $1 in
        --version) echo 'bubblewrap 0.4.0'; exit 0 ;;
        --args) for word in $(tr '\\0' '\\n' <"/proc/self/fd/$2"); do check "$word"; done ;;
    esac
    for word; do check "$word"; done
    echo 'bwrap: this one only looks at its options' >&2
    exit 1
    """


def test_an_old_bwrap_is_named_with_the_version_it_takes(host: Host) -> None:
    """COMP-02, https://github.com/openai/codex/issues/15260 and https://github.com/openai/codex/issues/21516"""
    host.broker(8080)
    hello(host, "comp02")
    with covered(host, "/usr/bin/bwrap", _OLD_BWRAP):
        assert host.run("bwrap", "--version").stdout == "bubblewrap 0.4.0\n"

        done = host.sealnet("run", "--run-id", "comp02-old", *LEASE, "--", "touch", "ran")

    assert done.returncode == 125
    assert not Path("ran").exists()
    assert host.left_over() == []
    assert "0.4.0" in done.stderr, done.stderr
    assert re.search(r"\b0\.([5-8]|1[01])\.\d\b", done.stderr), done.stderr
    hello(host, "comp02-old")


_LOCAL_SERVER = """
import os, socket, sys, time

for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    for port in (0, 7999):
        listener = socket.create_server((address, port), family=family)
        here = socket.create_connection(listener.getsockname()[:2], 5)
        there, _ = listener.accept()
        here.sendall(sys.argv[1].encode())
        print(there.recv(99).decode(), flush=True)
        if port:
            held = listener if family == socket.AF_INET else held
print("holding", flush=True)
while not os.path.exists("stop"):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("options", [(), LEASE], ids=["severed", "sealed"])
def test_local_servers_work_and_do_not_meet_each_other(host: Host, options: tuple[str, ...]) -> None:
    """COMP-04, https://github.com/openperouter/openperouter/issues/466 and https://github.com/aristanetworks/bst/pull/3"""
    host.broker(8080)
    host.broker(7999, "127.0.0.1")

    runs = [host.spawn_run(name, "/usr/bin/python3", "-c", _LOCAL_SERVER, name, options=options) for name in ("comp04-a", "comp04-b")]
    told = [[run.stdout.readline().strip() for _ in range(5)] for run in runs]

    assert told == [["comp04-a"] * 4 + ["holding"], ["comp04-b"] * 4 + ["holding"]]
    assert host.run("curl", "-fsS", "http://127.0.0.1:7999/host").stdout == "/host"
    Path("stop").touch()
    assert [run.wait(60) for run in runs] == [0, 0]


# Answers every question with the address 192.0.2.9.
_RESOLVER = """
import socket

sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind(("127.0.0.53", 53))
print("listening", flush=True)
while True:
    question, peer = sock.recvfrom(4096)
    end = question.index(0, 12) + 5
    wanted = question[end - 4 : end - 2] == b"\\0\\1"
    answer = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\x3c\\0\\4" + bytes((192, 0, 2, 9)) if wanted else b""
    sock.sendto(question[:2] + b"\\x81\\x80\\0\\1\\0" + bytes([wanted]) + b"\\0\\0\\0\\0" + question[12:end] + answer, peer)
"""

_LOOKUPS = """
import socket, subprocess, sys, time

for name in sys.argv[1:]:
    began = time.monotonic()
    try:
        found = socket.gethostbyname(name)
    except OSError as error:
        found = type(error).__name__
    print(name, found, time.monotonic() - began, flush=True)
    began = time.monotonic()
    found = subprocess.run(["getent", "hosts", name], capture_output=True, text=True).stdout.split()[:1] or ["none"]
    print(name, *found, time.monotonic() - began, flush=True)
"""


@pytest.mark.parametrize("options", [(), LEASE], ids=["severed", "sealed"])
def test_a_lookup_fails_at_once_whatever_the_hosts_resolver_is(host: Host, options: tuple[str, ...]) -> None:
    """COMP-05, https://github.com/crasm/vpnshift.sh/issues/7 and https://github.com/systemd/systemd/issues/28694"""
    assert host.python(_RESOLVER).stdout.readline() == "listening\n"
    host.broker(8080)
    known = ["broker.sealnet"] if options else []
    with covered(host, "/etc/resolv.conf", "nameserver 127.0.0.53\noptions edns0 trust-ad\n", 0o644):
        assert host.run("getent", "hosts", "x.test").stdout.split() == ["192.0.2.9", "x.test"]

        done = host.sealnet("run", *options, "--", "/usr/bin/python3", "-c", _LOOKUPS, "x.test", "localhost", *known)
        fetched = host.sealnet("run", *options, "--", *HELLO)

    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    found = {(name, address) for name, address, _took_s in rows}
    assert {("x.test", "gaierror"), ("x.test", "none"), ("localhost", "127.0.0.1")} <= found
    assert not any(address == "192.0.2.9" for _name, address in found)
    assert not options or ("broker.sealnet", "198.18.0.1") in found
    # A resolver that is waited for takes 5 s (resolv.conf(5)).
    assert all(float(took_s) < 4 for _name, _address, took_s in rows)
    # What has a broker reaches it without any resolver.
    assert (fetched.returncode == 0 and fetched.stdout == "/hello") is bool(options)


TOOLS = (
    "bwrap",
    "cat",
    "chown",
    "curl",
    "env",
    "id",
    "ip",
    "mount",
    "nft",
    "nsenter",
    "python3",
    "setpriv",
    "sh",
    "sysctl",
    "umount",
    "unshare",
)


@pytest.mark.parametrize("path", ["{tools}:/usr/bin:/bin", ".:/usr/bin:/bin", ":/usr/bin:/bin", "tools:/usr/bin:/bin", ".", ""])
def test_a_fake_tool_of_the_callers_path_or_directory_is_never_run(host: Host, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """COMP-06, https://github.com/NVIDIA/OpenShell/issues/3281"""
    host.broker(8080)
    tools, traces = host.directory / "tools", Path("/run/traces")
    tools.mkdir()
    traces.mkdir()
    for name in TOOLS:
        for directory in (tools, host.directory):
            fake = directory / name
            # busybox's own words for what it does not know.
            fake.write_text(f"#!/bin/bash\n: >/run/traces/{name}\necho '{name}: invalid argument netns' >&2\nexit 1\n")
            fake.chmod(0o755)
    for name in ("click", "json", "nftables", "pyroute2", "sealnet", "signal"):
        (host.directory / f"{name}.py").write_text(f"open('/run/traces/{name}.py', 'w').close()\nraise SystemExit(1)\n")
    hostile = path.format(tools=tools)
    # By this PATH somebody's shell does find them.
    host.run("/bin/bash", "-c", "ip netns", check=False, env={"PATH": hostile or "."})
    assert os.listdir(traces) == ["ip"]
    (traces / "ip").unlink()
    before = host.directory / "before"
    before.touch()

    monkeypatch.setenv("PATH", hostile)
    done = subprocess.run(
        [*SEALNET, "run", "--run-id", "comp06", *LEASE, "--", "/usr/bin/curl", "-fsS", "http://broker.sealnet:8080/hello"],
        capture_output=True,
        text=True,
    )
    others = [
        subprocess.run([*SEALNET, *words], capture_output=True, text=True) for words in (["ls"], ["reap", "comp06"], ["reap", "--orphans"])
    ]
    monkeypatch.undo()

    assert (done.returncode, done.stdout, done.stderr) == (0, "/hello", "")
    assert [(other.returncode, other.stderr) for other in others] == [(0, "")] * 3
    assert os.listdir(traces) == []


def test_a_run_needs_neither_ip_nor_nft_nor_sysctl(host: Host) -> None:
    """COMP-06, https://github.com/NVIDIA/OpenShell/issues/3281: busybox's `ip` knows no `netns` and no `-json`."""
    host.broker(8080)
    traces = Path("/run/traces")
    traces.mkdir()
    with contextlib.ExitStack() as stack:
        for path in ("/usr/sbin/ip", "/usr/sbin/nft", "/usr/sbin/sysctl", "/usr/bin/nsenter", "/usr/bin/unshare"):
            name = Path(path).name
            stack.enter_context(covered(host, path, f"#!/bin/sh\n: >/run/traces/{name}\necho '{name}: invalid argument' >&2\nexit 1\n"))
        assert host.run("ip", "netns", check=False).returncode == 1
        assert os.listdir(traces) == ["ip"]
        (traces / "ip").unlink()

        hello(host, "comp06-own")
        reaped = host.sealnet("reap", "comp06-own")

    assert reaped.returncode == 0
    assert os.listdir(traces) == []


@pytest.mark.parametrize("tool", ["bwrap", "setpriv", "env"])
def test_a_missing_tool_is_named_before_anything_is_changed(host: Host, tool: str) -> None:
    """COMP-06, https://github.com/NVIDIA/OpenShell/issues/3281: the failure appeared late."""
    host.broker(8080)
    with without(host, f"/usr/bin/{tool}"):
        done = host.sealnet("run", "--run-id", "comp06-none", *LEASE, "--", "touch", "ran")
        changed = gate(host)

    assert done.returncode == 125
    assert re.search(rf"^sealnet: cannot .*\b{tool}\b", done.stderr), done.stderr
    assert "hint: apt-get install" in done.stderr
    assert not Path("ran").exists()
    assert host.left_over() == []
    assert changed == "", "the gate was put up for a run that could never start"
    hello(host, "comp06-none")


@pytest.mark.parametrize(("path", "owner"), [("/usr/bin/bwrap", 65534), ("/usr/bin/bwrap", 0)], ids=["another-users", "writable-by-others"])
def test_a_tool_that_others_may_change_is_not_run_as_root(host: Host, path: str, owner: int) -> None:
    """COMP-06, https://github.com/NVIDIA/OpenShell/issues/3281"""
    host.broker(8080)
    Path("/run/traces").mkdir()
    with covered(host, path, "#!/bin/sh\n: >/run/traces/run\nexit 1\n", 0o777 if owner == 0 else 0o755):
        os.chown(path, owner, owner)
        done = host.sealnet("run", "--run-id", "comp06-theirs", *LEASE, "--", "touch", "ran")

    assert done.returncode == 125
    assert "bwrap" in done.stderr
    assert os.listdir("/run/traces") == []
    assert host.left_over() == []
    hello(host, "comp06-theirs")


def _python_module(name: str) -> str:
    origin = Path(importlib.util.find_spec(name).origin)
    return str(origin.parent if origin.name == "__init__.py" else origin)


@pytest.mark.parametrize(
    ("library", "where"),
    [
        ("nftables", lambda: _python_module("nftables")),
        ("libnftables", lambda: next(str(path) for path in Path("/usr/lib").glob("*/libnftables.so.1"))),
        ("seccomp", lambda: _python_module("seccomp")),
    ],
    ids=["python3-nftables", "libnftables1", "python3-seccomp"],
)
def test_a_missing_library_is_named_before_anything_is_changed(host: Host, library: str, where: Callable[[], str]) -> None:
    """COMP-06, https://github.com/NVIDIA/OpenShell/issues/3281"""
    host.broker(8080)
    with without(host, where()):
        done = host.sealnet("run", "--run-id", "comp06-lib", *LEASE, "--", "touch", "ran")
    changed = gate(host)

    assert done.returncode == 125, done.stderr[-400:]
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("sealnet: cannot "), done.stderr
    assert library in done.stderr
    assert not Path("ran").exists()
    assert host.left_over() == []
    assert changed == ""
    hello(host, "comp06-lib")
