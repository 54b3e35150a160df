"""Image builds with the real buildah: what a RUN step reaches, what a Dockerfile cannot undo, and what is left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import sealnet
from tests.doors import Doors
from tests.engine import PUBLIC, Engine
from tests.lab import SEALNET, Host, end, wait_for

pytestmark = [pytest.mark.root, pytest.mark.tool("buildah", "runc")]

DOCS = Path(__file__).parents[1] / "docs"
LIBRARY = Path("/usr/lib/python3.11")

# What a container has not, with every way to have it: each line is what came of one.
_DEEDS = r"""
import errno, os, socket, subprocess

def deed(name, act):
    try:
        act()
        print("DEED", name, "done", flush=True)
    except OSError as error:
        print("DEED", name, errno.errorcode.get(error.errno, error), flush=True)

def busybox(*words):
    done = subprocess.run(["/bin/busybox", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(errno.EPERM if "not permitted" in done.stderr else errno.EIO, done.stderr)

deed("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
deed("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
deed("netfilter", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12))
deed("route", lambda: busybox("ip", "route", "add", "203.0.113.0/24", "dev", "lo"))
deed("address", lambda: busybox("ip", "addr", "add", "203.0.113.1/32", "dev", "lo"))
deed("link", lambda: busybox("ip", "link", "set", "lo", "mtu", "1400"))
deed("forward", lambda: open("/proc/sys/net/ipv4/ip_forward", "w").write("0"))
"""

# One request to a host's port 80, straight or as the variable says, and what came of it.
_GET = r"""
import errno, os, socket, sys

way, host, path = sys.argv[1:]
proxy = os.environ["http_proxy"].split("/")[2].split(":") if way == "proxy" else [host, "80"]
try:
    with socket.create_connection((proxy[0], int(proxy[1])), 5) as sock:
        name = f"http://{host}{path}" if way == "proxy" else path
        sock.sendall(f"GET {name} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        print("GET", path, sock.recv(512).split(b" ")[1].decode(), flush=True)
except OSError as error:
    print("GET", path, errno.errorcode.get(error.errno, error), flush=True)
"""

# What a RUN step that sees the builder's files at sys.argv[1] could do with them.
_BROKEN_OUT = r"""
import errno, os, socket, sys

def deed(name, act):
    try:
        act()
        print("DEED", name, "done", flush=True)
    except OSError as error:
        print("DEED", name, errno.errorcode.get(error.errno, error), flush=True)

root = sys.argv[1]
deed("shadow", lambda: open(root + "/etc/shadow").read())
deed("write", lambda: os.close(os.open(root + "/usr/bin/env", os.O_WRONLY | os.O_APPEND)))
deed("socket", lambda: socket.socket(socket.AF_UNIX).connect(root + "/srv/daemon"))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one image, localhost/base, that was made without a registry: busybox, and as much of Python as sockets need."""
    top = tmp_path_factory.mktemp("builds")
    root = top / "context" / "root"
    linked = re.findall(r"(/\S+) \(0x", subprocess.run(["ldd", "/usr/bin/python3.11"], capture_output=True, text=True, check=True).stdout)
    for path in ("/bin/busybox", "/usr/bin/python3.11", *linked):
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])
    (root / "bin/sh").symlink_to("busybox")
    (root / "usr/bin/python3").symlink_to("python3.11")
    library = root / str(LIBRARY)[1:]
    library.mkdir(parents=True)
    for source in LIBRARY.glob("*.py"):
        shutil.copy(source, library)
    for name in ("collections", "encodings", "importlib", "json", "re", "lib-dynload"):
        shutil.copytree(LIBRARY / name, library / name, ignore=shutil.ignore_patterns("__pycache__"))
    (top / "context/Dockerfile").write_text("FROM scratch\nCOPY root /\n")
    # Away from the machine's own network and /run.
    make = shlex.join(
        ["buildah", "--root", f"{top}/store", "--storage-driver", "overlay", "bud", "-q", "-t", "localhost/base", f"{top}/context"]
    )
    inner = f"mount -t tmpfs none /run && exec {make}"
    subprocess.run(["unshare", "-n", "-m", "--propagation", "private", "sh", "-c", inner], check=True, capture_output=True, timeout=120)
    return top / "store"


class Builds:
    def __init__(self, host: Host, store: Path) -> None:
        self.host = host
        self.context = host.directory / "context"
        self.context.mkdir()
        self.words = ("--root", str(store), "--storage-driver", "overlay", "--pull-never", "--no-cache", str(self.context))

    def dockerfile(self, *steps: str) -> None:
        (self.context / "Dockerfile").write_text("\n".join(["FROM localhost/base", *steps]) + "\n")

    def build(self, *options: str, words: tuple[str, ...] = (), **popen: Any) -> subprocess.CompletedProcess[str]:
        return self.host.sealnet("build", *options, "--", *words, *self.words, **popen)

    def spawn(self, run_id: str, *options: str) -> subprocess.Popen[Any]:
        process = self.host.spawn(*SEALNET, "build", "--run-id", run_id, *options, "--", *self.words)
        self.host.wait_running(run_id, process)
        return process


@pytest.fixture
def builds(host: Host, store: Path) -> Builds:
    return Builds(host, store)


def step(*argv: str, option: str = "") -> str:
    """A RUN step that is executed as it stands."""
    return f"RUN {option} {json.dumps(list(argv))}"


def shell(text: str, option: str = "") -> str:
    return step("/bin/busybox", "sh", "-c", text, option=option)


def test_a_run_step_reaches_the_broker_and_nothing_else_whatever_the_dockerfile_says(host: Host, builds: Builds) -> None:
    doors = Doors(host)
    host.directory.chmod(0o755)
    there = doors.payload(leased=True, rounds=1)
    proxies = [f"ENV {name}=http://192.168.77.2:7000" for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY")]
    builds.dockerfile("ARG SEALNET_BROKER_URL", *proxies, step(*there), shell("/bin/busybox cat /told"))

    done = builds.build("--lease-port", "8080", "--receipt", str(host.directory / "receipt.json"))

    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith(("OPEN", "round", "the broker", "no broker"))]
    assert told == ["the broker answered", "round"]
    assert doors.strangers() == []
    doors.assert_open_to_the_host()


@pytest.mark.parametrize("network", ["host", "none"])
def test_a_run_step_that_asks_for_another_network_gets_none(host: Host, builds: Builds, network: str) -> None:
    """Debian 12's buildah refuses such a step; to a later one `host` is the run's namespace."""
    doors = Doors(host)
    there = doors.payload(leased=True, rounds=1)
    builds.dockerfile("ARG SEALNET_BROKER_URL", step(*there, option=f"--network={network}"), shell("cat /told"))

    done = builds.build("--lease-port", "8080")

    told = {line for line in done.stdout.splitlines() if line.startswith(("OPEN", "the broker"))}
    assert "RUN only supports the --mount flag" in done.stderr or told <= {"the broker answered"}
    assert told <= {"the broker answered"}
    assert doors.strangers() == []
    doors.assert_open_to_the_host()


def test_a_run_step_cannot_change_its_network(host: Host, builds: Builds) -> None:
    host.broker(8080)
    builds.dockerfile(step("/usr/bin/python3", "-I", "-S", "-c", _DEEDS.replace("\n\n", "\n")))

    done = builds.build("--lease-port", "8080")
    free = host.run("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "-", "/usr/bin/python3", "-I", "-S", "-c", _DEEDS)

    found = dict(re.findall(r"^DEED (\S+) (\S+)$", done.stdout, re.MULTILINE))
    control = dict(re.findall(r"^DEED (\S+) (\S+)$", free.stdout, re.MULTILINE))
    assert control == dict.fromkeys(control, "done")
    assert found == {
        "packet": "EAFNOSUPPORT",
        "raw": "EPERM",
        "netfilter": "EPROTONOSUPPORT",
        "route": "EPERM",
        "address": "EPERM",
        "link": "EPERM",
        "forward": "EROFS",
    }
    assert found.keys() == control.keys()


def test_a_run_step_reaches_a_declared_host_and_no_other(host: Host, builds: Builds) -> None:
    engine = Engine(host)
    get = ("/usr/bin/python3", "-I", "-S", "-c", _GET)
    builds.dockerfile(
        step(*get, "proxy", "allowed.test", "/declared"),
        step(*get, "proxy", "evil.test", "/evil"),
        step(*get, "straight", PUBLIC, "/straight"),
        f"ENV http_proxy=http://{PUBLIC}:80",
        step(*get, "proxy", "allowed.test", "/undone"),
    )

    done = builds.build("--allow", "allowed.test:80", "--evidence", str(host.directory / "evidence"))
    reached = [one["head"].split()[1] for one in engine.dialled() if "head" in one]
    control = host.run(*get, "straight", PUBLIC, "/straight").stdout
    engine.close()

    assert done.returncode == 0, done.stderr
    told = dict(re.findall(r"^GET (\S+) (\S+)$", done.stdout, re.MULTILINE))
    assert told == {"/declared": "200", "/evil": "403", "/straight": "ECONNREFUSED", "/undone": "ECONNREFUSED"}
    assert control == "GET /straight 200\n"
    assert reached == ["/declared"]
    assert sealnet.fold_evidence([host.directory / "evidence"]).egress_enforced
    environment = json.loads((host.directory / "evidence/environment.json").read_text())
    assert (environment["allowlist"], environment["allowed"], environment["denied"]) == (["allowed.test:80"], 1, 1)
    tried = [(one["address"], one["port"]) for one in environment["tried"]]
    assert tried == [(PUBLIC, 80)]


def test_what_the_builder_itself_fetches_is_declared_as_well(host: Host, builds: Builds) -> None:
    engine = Engine(host)
    builds.dockerfile("ADD http://allowed.test/declared /declared", shell("busybox cat /declared; echo"))
    allowed = builds.build("--allow", "allowed.test:80")
    builds.dockerfile(f"ADD http://{PUBLIC}/straight /straight")
    straight = builds.build("--allow", "allowed.test:80")
    builds.dockerfile("ADD http://evil.test/evil /evil")
    evil = builds.build("--allow", "allowed.test:80")
    reached = {one["head"].split()[1] for one in engine.dialled() if "head" in one}
    engine.close()

    assert allowed.returncode == 0, allowed.stderr
    assert "/declared" in allowed.stdout.splitlines()
    assert (straight.returncode, evil.returncode) == (125, 125)
    assert reached == {"/declared"}


def test_a_relay_leads_a_run_step_to_a_broker_on_loopback(host: Host, builds: Builds) -> None:
    host.broker(9000, "127.0.0.1")
    text = 'url=${SEALNET_BROKER_URL#http://}; printf "GET /hello HTTP/1.0\\r\\n\\r\\n" | busybox nc ${url%:*} ${url#*:}; echo'
    builds.dockerfile("ARG SEALNET_BROKER_URL", shell(text))

    done = builds.build("--broker", "tcp:127.0.0.1:9000")

    assert done.returncode == 0, done.stderr
    assert "/hello" in done.stdout.splitlines()


@pytest.mark.parametrize(
    "mount",
    ["type=bind,source=/link", "type=bind,from=localhost/linked,source=/link", "type=cache,id=../../../../.."],
    ids=["context", "image", "cache"],
)
def test_a_step_that_mounts_the_builders_root_gets_a_view_in_which_it_is_nobody(host: Host, builds: Builds, mount: str) -> None:
    """CVE-2024-1753 and CVE-2024-9675, where this buildah has them: a fixed one refuses the step, or shows nothing."""
    daemon = socket.socket(socket.AF_UNIX)
    shown = Path("/srv/daemon")
    with daemon, contextlib.ExitStack() as undo:
        host.run("mount", "-t", "tmpfs", "none", "/srv")
        undo.callback(host.run, "umount", "-l", "/srv")
        daemon.bind(str(shown))
        shown.chmod(0o777)
        daemon.listen(8)
        (builds.context / "link").symlink_to("/")
        builds.dockerfile(shell("busybox ln -s / /link"))
        assert builds.build(words=("-t", "localhost/linked")).returncode == 0
        get = ("/usr/bin/python3", "-I", "-S", "-c", _BROKEN_OUT)
        builds.dockerfile(step(*get, "/host", option=f"--mount={mount},target=/host,rw".replace(",rw", "" if "cache" in mount else ",rw")))

        done = builds.build()
        control = host.run(*get, "")

    found = dict(re.findall(r"^DEED (\S+) (\S+)$", done.stdout, re.MULTILINE))
    assert dict(re.findall(r"^DEED (\S+) (\S+)$", control.stdout, re.MULTILINE)) == dict.fromkeys(("shadow", "write", "socket"), "done")
    assert found.keys() == {"shadow", "write", "socket"} or done.returncode != 0
    assert "done" not in found.values()


@pytest.mark.tool("docker-registry")
def test_a_base_image_comes_from_a_declared_registry_through_the_door(host: Host, builds: Builds, store: Path) -> None:
    engine = Engine(host)
    engine.resolves(**{"registry.test": [PUBLIC]})
    config = host.directory / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {host.directory}/registry}}}}\nhttp: {{addr: '0.0.0.0:5000'}}\n"
    )
    host.spawn("ip", "netns", "exec", "lan", shutil.which("docker-registry") or "", "serve", str(config))
    wait_for(lambda: host.run("curl", "-fs", f"http://{PUBLIC}:5000/v2/", check=False).returncode == 0, what="the registry answers")
    image = "registry.test:5000/base"
    base = ("buildah", "--root", str(store), "--storage-driver", "overlay")
    host.run(*base, "push", "-q", "--tls-verify=false", "localhost/base", f"docker://{image}")
    (builds.context / "Dockerfile").write_text(f"FROM {image}\n{shell('echo built')}\n")
    for name in ("store", "other"):
        (host.directory / name).mkdir()
    words = ("--root", str(host.directory / "store"), "--storage-driver", "overlay", "--tls-verify=false", str(builds.context))

    done = host.sealnet("build", "--allow", "registry.test:5000", "--", *words)
    other = host.sealnet("build", "--allow", "allowed.test:80", "--", "--root", str(host.directory / "other"), *words[2:])
    engine.close()

    assert done.returncode == 0, done.stderr
    assert "built" in done.stdout.splitlines()
    assert other.returncode == 125
    assert "built" not in other.stdout.splitlines()
    assert "403" in other.stderr or "Forbidden" in other.stderr


def test_a_build_is_proved_and_recorded_as_one(host: Host, builds: Builds) -> None:
    host.broker(8080)
    builds.dockerfile(shell("sleep 60"))
    receipt = host.directory / "receipt.json"
    process = builds.spawn("mine", "--lease-port", "8080", "--receipt", str(receipt))

    # The receipt is given out once it is whole, which may be after the record says that the build runs.
    wait_for(receipt.exists, what="the receipt is there")
    told = json.loads(receipt.read_text())
    jsonschema.validate(told, json.loads((DOCS / "receipt.schema.json").read_text()))
    record = host.record("mine")
    wait_for(lambda: "sleep 60" in commands(host), what="the RUN step runs")
    again = host.sealnet("check", "mine", "--json")
    end(process)

    assert record is not None
    assert (record["kind"], record["user"]) == ("build", "root")
    assert (told["verdict"], told["egress_sealed"]) == ("sealed", True)
    # Of the payload's own checks there is none, for there is no payload of that kind.
    names = {one["name"] for one in told["checks"]}
    assert "builder" in names
    assert not names & {"capabilities", "user", "payload"}
    assert (again.returncode, json.loads(again.stdout)["verdict"]) == (0, "sealed"), again.stdout


def test_a_build_whose_supervisor_is_killed_leaves_nothing_that_reap_does_not_take(host: Host, builds: Builds) -> None:
    host.broker(8080)
    # As deep as a container may nest its own part of the tree.
    nest = "cd /sys/fs/cgroup; i=0; while mkdir a && cd a; do i=$((i+1)); done 2>/dev/null; echo nested $i; sleep 61"
    builds.dockerfile(shell(nest))
    process = builds.spawn("mine", "--lease-port", "8080")
    wait_for(lambda: "sleep 61" in commands(host), what="the RUN step runs")

    process.kill()
    process.wait(60)
    done = host.sealnet("reap", "mine")

    assert done.returncode == 0, done.stderr
    assert "sleep 61" not in commands(host)
    assert host.left_over() == []


def test_a_build_ends_at_its_timeout_and_on_a_signal(host: Host, builds: Builds) -> None:
    builds.dockerfile(shell("sleep 62"))

    late = builds.build("--timeout", "3")
    process = builds.spawn("mine")
    wait_for(lambda: "sleep 62" in commands(host), what="the RUN step runs")
    status = end(process, signal.SIGTERM)

    assert late.returncode == 124
    assert status != 0
    assert "sleep 62" not in commands(host)


def test_a_step_that_fails_is_the_builds_status(host: Host, builds: Builds) -> None:
    builds.dockerfile(shell("exit 7"))

    assert builds.build().returncode == 7


@pytest.mark.parametrize("word", ["--network=none", "--isolation=chroot", "--cap-add=NET_ADMIN", "-v=/:/host", "--userns=host"])
def test_what_would_undo_it_is_refused_before_anything_is_touched(host: Host, builds: Builds, word: str) -> None:
    builds.dockerfile()

    done = builds.build(words=(word,))

    assert done.returncode == 2
    assert f"cannot use {word.partition('=')[0]} in a sealed build: " in done.stderr
    assert not Path("/run/sealnet").exists()


def test_a_frozen_plan_of_a_build_is_none_for_a_run(host: Host, builds: Builds) -> None:
    builds.dockerfile()
    directory = host.directory / "evidence"
    done = builds.build("--evidence", str(directory))

    refused = host.sealnet("run", "--plan", str(directory / "plan.lock.json"))

    assert done.returncode == 0, done.stderr
    jsonschema.validate(json.loads((directory / "plan.lock.json").read_text()), json.loads((DOCS / "plan.schema.json").read_text()))
    assert refused.returncode == 2
    assert "it is of a build" in refused.stderr


def commands(host: Host) -> str:
    """Every command line that runs in a namespace of a run's."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip())
        except OSError:
            continue
    return "\n".join(line for line in found if line.startswith("sleep"))
