"""Other doors out of a run than packets: capabilities, namespaces, sockets of the host, files of the kernel."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import SEALNET, Host

pytestmark = pytest.mark.root

SEALED = ("--lease-port", "8080")
# Whom payloads run as: root, an account, a bare uid.
USERS = ("root", "nobody", "1234")

# Does each named thing and prints what came of it: `done` or the errno's name.
_TRY = """
    import ctypes, errno, json, os, socket, struct, sys

    libc = ctypes.CDLL(None, use_errno=True)

    def call(name, *arguments):
        if getattr(libc, name)(*arguments) < 0:
            raise OSError(ctypes.get_errno(), name)

    def connect(kind, name):
        socket.socket(socket.AF_UNIX, kind).connect(name)

    def reconnect(name):
        one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        one.connect(name)
        one.send(b"x")

    DOES = {
        "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0300),
        "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 6),
        "raw6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58),
        "vsock": lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).connect((2, 22)),
        "nfnetlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12),
        "stream": lambda name: connect(socket.SOCK_STREAM, name),
        "datagram": lambda name: connect(socket.SOCK_DGRAM, name),
        "reconnect": reconnect,
        "open": lambda path: os.close(os.open(path, os.O_RDONLY)),
        "write": lambda path: os.close(os.open(path, os.O_WRONLY)),
        "unshare": lambda flags: call("unshare", int(flags, 16)),
        "setns": lambda path: call("setns", os.open(path, os.O_RDONLY), 0),
    }
    told = {}
    for what in json.loads(sys.argv[1]):
        name, *arguments = what.split(" ")
        pid = os.fork() if name in ("unshare", "setns") else 0
        if pid:
            told[what] = errno.errorcode.get(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "done")
            continue
        try:
            DOES[name](*(argument.replace("@", chr(0)) for argument in arguments))
            found, code = "done", 0
        except OSError as error:
            found, code = errno.errorcode.get(error.errno, str(error)), error.errno
        if name in ("unshare", "setns"):
            os._exit(code)
        told[what] = found
    print(json.dumps(told))
"""


def tried(host: Host, *what: str, prefix: tuple[str, ...] = ()) -> dict[str, str]:
    """What came of each thing that a process started by `prefix` did."""
    done = host.run(*prefix, "/usr/bin/python3", "-c", textwrap.dedent(_TRY), json.dumps(what), check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sealed(*options: str, user: str = "root") -> tuple[str, ...]:
    return (*SEALNET, "run", "--user", user, *(() if user == "root" else ("--chdir", "/")), *options, "--")


def inside(host: Host, *command: str, user: str = "root", options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return host.run(*sealed(*options, user=user), *command, check=False)


def listen(path: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A daemon of the host's at a pathname (or, with @, an abstract) socket, open to everybody."""
    sock = socket.socket(socket.AF_UNIX, kind)
    sock.bind(path.replace("@", "\0"))
    if kind == socket.SOCK_STREAM:
        sock.listen(8)
    if not path.startswith("@"):
        os.chmod(path, 0o666)
    return sock


@pytest.mark.parametrize("user", USERS)
def test_no_capability_is_left(host: Host, user: str) -> None:
    """DOOR-01, https://github.com/containers/bubblewrap/issues/287"""
    host.broker(8080)
    script = """
        grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status
        gateway=${SEALNET_BROKER_URL#http://}
        ip link set eth0 mtu 1300; echo mtu $?
        ip link set eth0 down; echo down $?
        ip addr add 198.18.9.9/32 dev eth0; echo addr $?
        ip route add default via ${gateway%:*}; echo route $?
        ip route del default; echo unroute $?
        nft add table inet x; echo nft $?
        nft flush ruleset; echo flush $?
        ip link show eth0
        curl -fsS "$SEALNET_BROKER_URL/still"
    """

    done = inside(host, "sh", "-c", script, user=user, options=SEALED)

    lines = done.stdout.splitlines()
    assert {line for line in lines if line.startswith("Cap")} == {f"Cap{name}:\t{0:016x}" for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")}
    assert {"NoNewPrivs:\t1", "Seccomp:\t2"} <= set(lines)
    failed = dict(line.split() for line in lines if re.fullmatch(r"[a-z]+ \d+", line))
    assert set(failed) == {"mtu", "down", "addr", "route", "unroute", "nft", "flush"}
    assert "0" not in failed.values()
    assert done.stderr.count("Operation not permitted") >= 5
    assert "mtu 1500" in done.stdout
    assert "state UP" in done.stdout
    assert lines[-1] == "/still"
    # The same commands do work for root outside.
    assert host.run("ip", "link", "set", "lan0", "mtu", "1400").returncode == 0
    assert host.run("ip", "link", "set", "lan0", "mtu", "1500").returncode == 0


@pytest.mark.parametrize("user", USERS)
def test_no_socket_family_leads_around_the_filter(host: Host, user: str) -> None:
    """DOOR-01, https://github.com/openai/codex/pull/13624"""
    what = ("packet", "raw", "raw6", "nfnetlink")

    assert set(tried(host, *what).values()) == {"done"}
    assert set(tried(host, *what, "vsock", prefix=sealed(user=user)).values()) <= {"EPERM", "EAFNOSUPPORT", "EPROTONOSUPPORT"}


@pytest.mark.parametrize("user", USERS)
def test_the_kernels_files_are_closed(host: Host, user: str) -> None:
    """Promised: /proc/sys read-only, and what OCI runtimes mask or make read-only is so here, also for uid 0."""
    # What uid 0 may open outside, with nothing done to it: it is never written.
    write = [
        f"write /proc/{name}"
        for name in ("sys/net/ipv4/ip_forward", "sys/kernel/core_pattern", "sysrq-trigger", "irq/default_smp_affinity")
    ]
    read = [
        f"open /proc/{name}"
        for name in ("kcore", "kmsg", "keys", "timer_list", "kallsyms", "sched_debug", "slabinfo", "vmallocinfo", "interrupts")
    ]
    write, read = ([line for line in lines if os.path.exists(line.split()[1])] for lines in (write, read))

    outside = tried(host, *write, *read)
    found = tried(host, *write, *read, prefix=sealed(user=user))

    assert set(outside.values()) == {"done"}
    assert {found[what] for what in write} <= {"EROFS", "EACCES", "EPERM"}
    script = 'for name; do if [ -d "$name" ]; then ls -A "$name"; else head -c 100 "$name"; fi; done 2>&1 | grep -v "ermission denied"'
    names = [line.split()[1] for line in read] + [path for path in ("/proc/acpi", "/proc/scsi", "/sys/firmware") if os.path.isdir(path)]
    assert inside(host, "sh", "-c", script, "sh", *names, user=user).stdout == ""
    mounted = inside(host, "touch", "/sys/x", "/proc/sys/net/x", "/etc/x", user=user)
    assert (
        mounted.stderr.count("Read-only file system") + mounted.stderr.count("ermission denied") + mounted.stderr.count("No such file") == 3
    )


@pytest.mark.parametrize("user", USERS)
def test_no_descriptor_is_inherited(host: Host, user: str) -> None:
    """Promised: none but 0, 1 and 2. Also https://github.com/golang/vulndb/issues/2491"""
    opened = ("bash", "-c", 'exec 7</run 63</run 200>/dev/null; exec "$@"', "bash")
    script = "import os; print(*sorted(map(int, os.listdir('/proc/self/fd')))[3:])"

    done = host.run(*opened, *sealed(user=user), "/usr/bin/python3", "-c", script)

    # The first one is the directory that is being listed.
    assert done.stdout.split() == ["3"]
    assert host.run(*opened, "/usr/bin/python3", "-c", script).stdout.split() == ["3", "7", "63", "200"]


@pytest.mark.parametrize("user", USERS)
def test_nested_user_namespaces_are_refused(host: Host, user: str) -> None:
    """DOOR-03, https://github.com/containers/bubblewrap/pull/554"""
    flags = {"user": 0x10000000, "net": 0x40000000, "mount": 0x20000, "user and net": 0x50000000}
    what = [f"unshare {flag:x}" for flag in flags.values()]

    assert set(tried(host, *what).values()) == {"done"}
    assert set(tried(host, *what, prefix=sealed(user=user)).values()) == {"EPERM"}
    done = inside(host, "unshare", "-Urn", "ip", "-br", "link", user=user)
    assert done.returncode != 0
    assert "Operation not permitted" in done.stderr


@pytest.mark.parametrize("user", USERS)
def test_a_user_namespace_that_was_asked_for_owns_nothing_of_the_seal(host: Host, user: str) -> None:
    """DOOR-03, https://github.com/containers/bubblewrap/pull/488"""
    host.broker(8080)
    host.broker(8081)
    script = """
        unshare -Urn ip -br link; echo ---
        unshare -Ur sh -c 'ip link set eth0 mtu 1300; nsenter --net=/proc/1/ns/net ip link; nft flush ruleset; ip route del default' >&2
        unshare -Urn sh -c 'nsenter --net=/proc/$PPID/ns/net ip link set eth0 down' >&2
        ip -br link; curl -sS -m 3 http://broker.sealnet:8080/lease http://broker.sealnet:8081/other
    """

    done = inside(host, "sh", "-c", script, user=user, options=(*SEALED, "--allow-userns"))

    nested, own = done.stdout.split("---\n")
    # The kernel maps uid 0 only for somebody with CAP_SETFCAP (user_namespaces(7)), so to root without capabilities it is refused.
    assert [line.split()[:2] for line in nested.splitlines()] == ([] if user == "root" else [["lo", "DOWN"]]), done.stderr
    assert [line.split()[:2] for line in own.splitlines()[:2]] == [
        ["lo", "UNKNOWN"],
        ["eth0@if" + own.split("eth0@if")[1].split()[0], "UP"],
    ]
    assert own.splitlines()[2] == "/lease"
    assert "/other" not in own
    # Linux 5.10 calls the way back into the seal's namespace an invalid argument.
    refusals = re.findall("not permitted|ermission denied|Invalid argument", done.stderr)
    assert len(refusals) >= (3 if user == "root" else 4), done.stderr


@pytest.fixture
def home() -> Iterator[Path]:
    """A home directory that its owner may enter, outside of what is private in a run."""
    path = Path(tempfile.mkdtemp(prefix="sealnet-home-", dir="/var/lib"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("user", USERS)
def test_no_daemon_of_the_host_answers_at_a_pathname(host: Host, home: Path, user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DOOR-04, https://github.com/trpc-group/trpc-agent-go/pull/2426"""
    given, project = home / "given", home / "project"
    for directory in (given, project, Path("/run/dbus"), Path("/run/systemd")):
        directory.mkdir(mode=0o755)
    paths = ["/run/docker.sock", "/run/dbus/system_bus_socket", "/run/systemd/private", f"/tmp/sealnet-{os.getpid()}.sock"]
    paths += [f"/var/tmp/sealnet-{os.getpid()}.sock", f"/dev/shm/sealnet-{os.getpid()}.sock"]
    paths += [f"{home}/x.sock", f"{given}/x.sock", f"{project}/x.sock"]
    daemons = [listen(path) for path in paths] + [listen(f"{path}.d", socket.SOCK_DGRAM) for path in paths]
    stream = [f"stream {path}" for path in paths]
    datagram = [f"{how} {path}.d" for path in paths for how in ("datagram", "reconnect")]
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(project)

    outside = tried(host, *stream, *datagram)
    prefix = (*SEALNET, "run", "--user", user, "--ro-bind", str(given), "--")
    found = tried(host, *stream, *datagram, prefix=prefix)

    assert set(outside.values()) == {"done"}
    assert set(found.values()) <= {"ENOENT", "ECONNREFUSED", "EACCES"}, found
    for daemon in daemons:
        daemon.close()
    for path in paths:
        if not path.startswith(str(home)):
            os.unlink(path)
            os.unlink(f"{path}.d")
    shutil.rmtree("/run/dbus")
    shutil.rmtree("/run/systemd")


@pytest.mark.parametrize("place", ["home", "project"])
def test_a_daemon_that_starts_while_the_run_lives_answers_in_the_shared_directory_alone(
    host: Host, home: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DOOR-04, https://github.com/GreyhavenHQ/greywall/issues/55

    The working directory is bound as it is, and what comes into it later is shared: the documented limit.
    """
    project = home / "project"
    project.mkdir(mode=0o755)
    monkeypatch.chdir(project)
    path = f"{home if place == 'home' else project}/late.sock"
    script = f'echo ready; read go; exec "$@"; {path}'
    command = ("/usr/bin/python3", "-c", textwrap.dedent(_TRY), json.dumps([f"stream {path}"]))
    process = host.spawn_run("door-late", "sh", "-c", script, "sh", *command, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    daemon = listen(path)
    out, _ = process.communicate("go\n", timeout=90)

    assert tried(host, f"stream {path}") == {f"stream {path}": "done"}
    assert json.loads(out) == {f"stream {path}": "done" if place == "project" else "ECONNREFUSED"}
    daemon.close()


@pytest.mark.parametrize("user", USERS)
def test_abstract_sockets_are_each_runs_own(host: Host, user: str) -> None:
    """DOOR-06, https://github.com/containers/bubblewrap/issues/330"""
    probe = listen("@probe")
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + 'a'); s.listen(); print('up', flush=True); sys.stdin.read()"
    )
    options = ("--user", user, *(() if user == "root" else ("--chdir", "/")))
    a = host.spawn_run("door-a", "/usr/bin/python3", "-c", script, options=options, stdin=subprocess.PIPE)
    assert a.stdout is not None
    assert a.stdout.readline() == "up\n"

    in_a = ("nsenter", "--net=/run/netns/sealnet-door-a")
    assert tried(host, "stream @probe") == {"stream @probe": "done"}
    assert tried(host, "stream @a", "stream @probe", prefix=in_a) == {"stream @a": "done", "stream @probe": "ECONNREFUSED"}
    found = tried(host, "stream @a", "stream @probe", prefix=sealed(user=user))
    assert set(found.values()) == {"ECONNREFUSED"}
    inode = inside(host, "readlink", "/proc/self/ns/net", user=user).stdout
    recorded = host.record("door-a")
    assert recorded is not None
    assert inode.strip() not in (f"net:[{recorded['netns_inode']}]", os.readlink("/proc/self/ns/net"))
    probe.close()
    a.communicate("", timeout=90)


@pytest.mark.parametrize("user", USERS)
def test_the_hosts_namespaces_and_environments_are_out_of_reach(host: Host, user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """DOOR-10, https://github.com/containers/bubblewrap/issues/157"""
    monkeypatch.setenv("SEKRET", "of-the-host")
    lives = host.spawn("sleep", "600")
    own = os.readlink("/proc/self/ns/net")
    script = """
        nsenter --net=/proc/1/ns/net true && echo entered
        ls -A /run/netns
        for name in /run/netns/*; do nsenter --net=$name true && echo entered; done
        cat /proc/*/environ | tr '\\0' '\\n' | grep -c '^SEKRET='
        readlink /proc/[0-9]*/ns/net | sort -u
        echo pids $(ls -d /proc/[0-9]* | wc -l)
    """

    done = inside(host, "sh", "-c", script, user=user)

    *lines, pids = done.stdout.splitlines()
    assert "SEKRET=of-the-host" in Path(f"/proc/{lives.pid}/environ").read_text()
    assert lines[0] == "0"
    assert own not in lines
    assert len(lines) == 2, done.stdout
    assert re.fullmatch(r"net:\[\d+\]", lines[1])
    assert int(pids.split()[1]) < 10
    assert set(tried(host, "setns /proc/self/ns/net", "setns /proc/self/ns/user", prefix=sealed(user=user)).values()) == {"EPERM"}
    assert tried(host, "setns /proc/self/ns/net") == {"setns /proc/self/ns/net": "done"}


@pytest.mark.parametrize(("options", "links"), [((), {"lo"}), (SEALED, {"lo", "eth0"})], ids=["severed", "sealed"])
def test_sys_lists_the_runs_links_alone(host: Host, options: tuple[str, ...], links: set[str]) -> None:
    """DOOR-12, https://github.com/containers/bubblewrap/issues/157"""
    host.broker(8080)
    script = (
        "ls /sys/class/net; echo; find /sys/devices -path '*/net/*' -prune -printf '%f\\n'; echo; cut -d: -f1 /proc/net/dev | tail -n +3"
    )
    here = {"lan0", "lo"}

    for user in ("root", "1234"):
        listed, devices, known = inside(host, "sh", "-c", script, user=user, options=options).stdout.split("\n\n")

        assert set(listed.split()) == links
        assert set(devices.split()) == links
        assert set(known.split()) == links
    assert set(host.run("sh", "-c", "cut -d: -f1 /proc/net/dev | tail -n +3").stdout.split()) == here


_PYTHON = """
    import asyncio, multiprocessing, socket, subprocess

    def square(number):
        return number * number

    async def shell():
        process = await asyncio.create_subprocess_exec("echo", "async", stdout=asyncio.subprocess.PIPE)
        return (await process.communicate())[0].decode().strip()

    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.send(b"pair")
    with multiprocessing.Pool(2) as pool, multiprocessing.Manager() as manager:
        given = manager.dict(a=1)
        print(pool.map(square, [1, 2, 3]), given["a"], asyncio.run(shell()), other.recv(9).decode())
"""

_NODE = """
    const { fork, execSync } = require("child_process");
    if (process.argv[2] === "child") {
      process.on("message", (text) => { process.send(text + "!"); process.disconnect(); });
    } else {
      const child = fork(__filename, ["child"]);
      child.on("message", (text) => console.log(text, execSync("echo shell").toString().trim()));
      child.send("forked");
    }
"""


@pytest.mark.tool("node", "git", "ssh")
@pytest.mark.parametrize("user", ["root", "nobody"])
def test_ordinary_programs_work(host: Host, user: str) -> None:
    """DOOR-13, https://github.com/openai/codex/pull/26625"""
    script = f"""
        set -e; cd /tmp; export HOME=/tmp
        cat >x.py <<'END'\n{textwrap.dedent(_PYTHON)}\nEND
        cat >x.js <<'END'\n{_NODE}\nEND
        /usr/bin/python3 x.py
        node x.js
        git init -q repository; cd repository; touch file; git status --short; cd ..
        ssh -V 2>&1 | cut -c1-7
        bash -ic 'set -m; sleep 60 & kill %1; wait %1; echo job $?' 2>/dev/null
        echo text | tee >(cat >copy) >/dev/null; sh -c 'trap "echo trapped" USR1; kill -USR1 $$'
        mkfifo fifo; (echo fifo >fifo &); cat fifo
    """

    done = inside(host, "bash", "-c", script, user=user)

    said = ["[1, 4, 9] 1 async pair", "forked! shell", "?? file", "OpenSSH", "job 143", "trapped", "fifo"]
    assert done.stdout.splitlines() == said, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("user", ["root", "1234"])
def test_a_local_server_in_the_run_works(host: Host, user: str) -> None:
    """DOOR-13, https://github.com/openai/codex/issues/39140"""
    script = """
        import socket, threading
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            server = socket.create_server((address, 0), family=family)
            threading.Thread(target=lambda: server.accept()[0].sendall(b"local"), daemon=True).start()
            print(socket.create_connection(server.getsockname()[:2], 5).recv(9).decode())
    """

    assert inside(host, "/usr/bin/python3", "-c", textwrap.dedent(script), user=user).stdout.split() == ["local"] * 2


def test_a_working_directory_that_is_gone_is_refused(host: Host) -> None:
    """DOOR-14, https://github.com/golang/vulndb/issues/2491"""
    gone = host.directory / "gone"
    script = 'mkdir "$1"; cd "$1"; rmdir "$1"; shift; exec "$@"'

    done = host.run("sh", "-c", script, "sh", str(gone), *SEALNET, "run", "--", "ls", "../../../..", check=False)

    assert done.returncode == 2
    assert done.stderr.startswith("sealnet: cannot use the working directory: No such file or directory")
    assert done.stdout == ""


def test_a_working_directory_shows_nothing_beside_it(host: Host) -> None:
    """DOOR-14, https://github.com/golang/vulndb/issues/2491"""
    here = Path("/run/apart/here")
    here.mkdir(parents=True)
    (here / "own").touch()
    (here.parent / "secret").touch()
    Path("/run/secret").touch()
    script = "pwd; ls; echo; ls -A ..; echo; ls -A ../..; echo; ls -A ../../../..; echo; ls -A /"

    done = subprocess.run([*SEALNET, "run", "--", "sh", "-c", script], cwd=here, capture_output=True, text=True, timeout=90)

    own, above, run, root, slash = done.stdout.split("\n\n")
    assert own.split() == [str(here), "own"]
    assert above.split() == ["here"]
    assert "secret" not in run.split()
    assert root.split() == slash.split()
    assert host.run("ls", "-A", "/run/apart").stdout.split() == ["here", "secret"]


def test_a_working_directory_that_a_mount_covers_is_refused(host: Host) -> None:
    """DOOR-14, https://github.com/golang/vulndb/issues/2491"""
    script = 'mkdir /run/covered; cd /run/covered; touch under; mount -t tmpfs none /run/covered; exec "$@"'

    done = host.run("sh", "-c", script, "sh", *SEALNET, "run", "--", "ls", "-A", ".", check=False)

    host.run("umount", "/run/covered")
    assert done.returncode == 2
    assert done.stderr.startswith("sealnet: cannot use the working directory: ")
    assert done.stdout == ""


@pytest.mark.parametrize("how", ["cwd", "chdir"])
def test_a_working_directory_through_a_descriptor_shows_nothing_beside_it(host: Host, how: str) -> None:
    """DOOR-14, https://github.com/golang/vulndb/issues/2491"""
    Path("/run/secret").touch()
    Path("/run/below").mkdir()
    move, options = ("cd -P /proc/self/fd/7", ()) if how == "cwd" else ("true", ("--chdir", "/proc/self/fd/7"))
    opened = ("bash", "-c", f'exec 7</run/below; {move}; exec "$@"', "bash")

    done = host.run(*opened, *SEALNET, "run", *options, "--", "sh", "-c", "ls -A .. ../../../..; exit 3", check=False)
    outside = host.run(*opened, "sh", "-c", "cd -P /proc/self/fd/7; ls -A ..")

    assert "secret" in outside.stdout.split()
    assert "secret" not in done.stdout.split()
    if how == "cwd":
        assert done.returncode == 3
    else:
        assert done.returncode in (2, 125)
        assert "/proc/self/fd/7" in done.stderr
        assert done.stdout == ""
