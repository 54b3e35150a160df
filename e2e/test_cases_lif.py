"""Field cases of namespace and veth life: what is left when a piece is killed, stuck, half-built or taken by somebody else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sealnet
from sealnet import SealnetError
from sealnet.errors import KernelRefused
from sealnet.kernel import cgroup, libc, sysctl
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.nft import Nft
from sealnet.model import names
from tests.lab import LAN_PEER, PATIENCE, SEALNET, Host, Probe, is_ours, wait_for

pytestmark = pytest.mark.root

LEASE = ("--lease-port", "8080")


def sleepers(marker: str) -> list[int]:
    """The processes that have `marker` in their argv."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if marker.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(int(pid))
    return found


def kill(process: subprocess.Popen[Any]) -> None:
    process.kill()
    process.wait(60)


def status_of(done: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    return done.returncode, done.stderr


@pytest.mark.parametrize("options", [(), LEASE], ids=["severed", "sealed"])
def test_a_killed_supervisor_leaves_nothing_that_reap_does_not_take(host: Host, options: tuple[str, ...]) -> None:
    """LIF-01, https://github.com/google/gvisor/issues/2539 and https://github.com/kata-containers/tests/issues/1765"""
    host.broker(8080)
    run_ids = [f"lif01-{number}-{len(options)}" for number in range(3)]
    processes = [host.spawn_run(run_id, "sleep", f"600.{run_id[6:].replace('-', '')}", options=options) for run_id in run_ids]
    assert all(len(sleepers(f"600.{run_id[6:].replace('-', '')}")) >= 1 for run_id in run_ids)
    for process in processes:
        kill(process)
    # Without this, that nothing is left afterwards would say nothing of reap.
    left = "\n".join(host.left_over())
    assert all(f"runs/{run_id}" in left and f"netns name sealnet-{run_id}" in left for run_id in run_ids)

    first = [status_of(host.sealnet("reap", run_id)) for run_id in run_ids]

    assert first == [(0, "")] * 3
    assert host.left_over() == []
    assert [pid for run_id in run_ids for pid in sleepers(f"600.{run_id[6:].replace('-', '')}")] == []
    again = [host.sealnet("reap", run_id) for run_id in run_ids]
    assert [(done.returncode, done.stdout, done.stderr) for done in again] == [(0, "", "")] * 3


def test_the_supervisor_and_both_bwraps_killed_leave_nothing_that_reap_does_not_take(host: Host) -> None:
    """LIF-01, https://github.com/google/gvisor/issues/2539"""
    host.broker(8080)
    process = host.spawn_run("lif01-all", "sh", "-c", "setsid sleep 601.5 & exec sleep 601.5", options=LEASE)
    wait_for(lambda: len(sleepers("601.5")) >= 2, what="both sleeps are there")
    group = host.record("lif01-all")["cgroup"]
    bwraps = [pid for pid in cgroup.pids(Path(group)) if Path(f"/proc/{pid}/exe").readlink().name == "bwrap"]
    assert len(bwraps) == 2

    kill(process)
    for pid in bwraps:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    assert status_of(host.sealnet("reap", "lif01-all")) == (0, "")
    assert host.left_over() == []
    assert sleepers("601.5") == []


# LIF-03 (a run id used again at once) is in test_stress.py.


def test_a_stale_file_in_run_netns_does_not_keep_a_run_from_working(host: Host) -> None:
    """LIF-05, https://github.com/pelagos-containers/pelagos/issues/183"""
    host.broker(8080)
    stale, junk = Path("/run/netns/sealnet-lif05"), Path("/run/netns/junk")
    stale.touch()
    junk.write_text("somebody's\n")
    before = junk.stat()

    probe = host.probe_run("lif05", *LEASE)
    record = host.record("lif05")
    answers = probe.ask(("tcp", record["gateway"], 8080))
    listed = json.loads(host.sealnet("ls", "--json").stdout)
    others = host.sealnet("reap", "--orphans")
    ended = probe.end()

    assert answers == ["answered"]
    assert [shown["run_id"] for shown in listed] == ["lif05"]
    assert (others.returncode, others.stdout, others.stderr) == (0, "", "")
    assert ended == 0
    assert status_of(host.sealnet("reap", "lif05")) == (0, "")
    assert host.left_over() == []
    after = junk.stat()
    assert (after.st_ino, after.st_mode, junk.read_text()) == (before.st_ino, before.st_mode, "somebody's\n")


def _namespace(path: Path) -> None:
    subprocess.run(["ip", "netns", "add", path.name], check=True)


def _link_to_namespace(path: Path) -> None:
    path.symlink_to("/run/netns/lan")


def _link_to_file(path: Path) -> None:
    path.with_name("junk").touch()
    path.symlink_to("/run/netns/junk")


@pytest.mark.parametrize("make", [_namespace, _link_to_namespace, _link_to_file, Path.mkdir, os.mkfifo])
def test_a_strangers_thing_of_the_runs_name_in_run_netns_is_left_alone(host: Host, make: Callable[[Path], object]) -> None:
    """LIF-05, https://github.com/pelagos-containers/pelagos/issues/183"""
    host.broker(8080)
    mine = Path("/run/netns/sealnet-lif05-mine")
    make(mine)
    before, lan = mine.lstat(), os.stat("/run/netns/lan").st_ino

    argv = ("timeout", "--signal=KILL", "5", *SEALNET, "run", "--run-id", "lif05-mine", *LEASE, "--", "touch", "ran")
    done = host.run(*argv, check=False)
    listed = host.sealnet("ls", "--json")
    reaped = host.sealnet("reap", "lif05-mine")

    after = mine.lstat() if os.path.lexists(mine) else None
    try:
        assert os.stat("/run/netns/lan").st_ino == lan, "somebody else's namespace has lost its name"
        assert done.returncode == 125, done.stderr
        assert "sealnet-lif05-mine" in done.stderr
        assert "Traceback" not in done.stderr
        assert not Path("ran").exists()
        assert (listed.returncode, json.loads(listed.stdout)) == (0, [])
        assert status_of(reaped) == (0, "")
        if make is _namespace:
            assert after is not None
            assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    finally:
        if make is _namespace:
            host.run("ip", "netns", "del", mine.name, check=False)
        elif stat.S_ISDIR(before.st_mode):
            mine.rmdir()
        else:
            mine.unlink(missing_ok=True)
    assert host.left_over() == []
    assert host.sealnet("run", "--run-id", "lif05-mine", *LEASE, "--", "true").returncode == 0


@pytest.mark.parametrize("options", [(), LEASE], ids=["severed", "sealed"])
def test_a_background_child_does_not_keep_the_namespace(host: Host, options: tuple[str, ...]) -> None:
    """LIF-06, https://github.com/moby/moby/issues/32090 and https://github.com/moby/moby/issues/41136"""
    host.broker(8080)
    inodes: list[int] = []

    script = 'setsid sh -c "echo ready >ready; sleep 9999.5" & until [ -e ready ]; do :; done; readlink /proc/self/ns/net; exit 0'
    done = host.sealnet("run", *options, "--", "sh", "-c", script)
    inodes.append(int(done.stdout.strip()[5:-1]))

    assert (done.returncode, done.stderr) == (0, "")
    assert Path("ready").exists()
    assert inodes[0] not in [os.stat(f"/proc/{pid}/ns/net").st_ino for pid in os.listdir("/proc") if pid.isdigit() and _alive(pid)]
    assert sleepers("9999.5") == []
    assert host.left_over() == []


def _alive(pid: str) -> bool:
    try:
        os.stat(f"/proc/{pid}/ns/net")
    except OSError:
        return False
    return True


def open_namespaces(pid: int | str = "self") -> list[str]:
    """Every descriptor of a network namespace that a process holds."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return [target for target in found if target.startswith("net:[") or "/ns/net" in target]


def test_a_program_that_starts_runs_keeps_no_descriptor_of_a_finished_one(host: Host) -> None:
    """LIF-06, https://github.com/moby/moby/issues/32090"""
    host.broker(8080)
    sealer = sealnet.Sealer()
    # What the first run opens for good (libraries' own) is no part of a run.
    sealer.run(["true"], lease_port=8080)
    descriptors, namespaces = len(os.listdir("/proc/self/fd")), sorted(open_namespaces())

    with sealer.launch(["sleep", "600"], lease_port=8080, run_id="lif06-fd") as run:
        while_alive = sorted(open_namespaces())
        run.kill()
        assert run.wait() == 137
    del run

    assert len(while_alive) == len(namespaces) + 1
    assert sorted(open_namespaces()) == namespaces
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_namespace_that_an_outsider_holds_is_cut_off_all_the_same(host: Host) -> None:
    """LIF-06, https://github.com/moby/moby/issues/41136: the zombie still answered for the old address."""
    host.broker(8080)
    listening = "import socket; s = socket.create_server(('0.0.0.0', 7000)); print('up', flush=True); s.accept(); s.accept()"
    process = host.spawn_run("lif06-held", "/usr/bin/python3", "-c", listening, options=LEASE)
    assert process.stdout.readline() == "up\n"
    record = host.record("lif06-held")
    holder = os.open("/run/netns/sealnet-lif06-held", os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert host.run("ip", "route", "get", record["sandbox"]).stdout.split()[2] == record["ifname"]

        assert status_of(host.sealnet("reap", "lif06-held")) == (0, "")

        assert host.left_over() == []
        assert host.run("ip", "link", "show", record["ifname"], check=False).returncode != 0
        # The same /30 is given out again while the old namespace still stands; the new run is the one that it leads to.
        again = host.probe_run("lif06-next", *LEASE)
        assert host.record("lif06-next")["subnet"] == record["subnet"]
        assert again.ask(("tcp", record["gateway"], 8080)) == ["answered"]
        assert again.end() == 0
        inside = host.run("nsenter", f"--net=/proc/self/fd/{holder}", "ip", "-o", "link", pass_fds=(holder,)).stdout
        assert [line.split(":")[1].strip() for line in inside.splitlines()] == ["lo"]
    finally:
        os.close(holder)


# LIF-07: each request to the kernel fails once, at each place where a run makes one.


class Requests:
    """Counts sealnet's requests to the kernel; `strike` happens instead of number `at`, or right after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, strike: Callable[[str], None]) -> None:
        self.count, self.at, self.late, self.what = 0, 0, False, ""
        self._strike = strike
        for owner, name in (
            (Netlink, "exchange"),
            (Netlink, "dump"),
            (Nft, "apply"),
            (sysctl, "set_link"),
            (cgroup, "add"),
            (os, "setxattr"),
            (libc, "unshare"),
            (libc, "setns"),
            (libc, "mount"),
            (subprocess, "Popen"),
        ):
            monkeypatch.setattr(owner, name, self._wrapped(getattr(owner, name), name))

    def _wrapped(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            struck = self.count == self.at
            if struck and not self.late:
                self.what = f"{name}{arguments[-1:]}"
                self._strike(name)
            result = function(*arguments, **options)
            if struck:
                self.what = f"after {name}{arguments[-1:]}"
                self._strike(name)
            return result

        return counted


def refuse(name: str) -> None:
    """As the kernel refuses: the codec's own error, libnftables' own, or the errno of a system call."""
    if name in ("exchange", "dump", "apply"):
        raise KernelRefused(f"cannot {name}: {os.strerror(errno.ENOMEM)}", errno=errno.ENOMEM)
    if name == "set_link":
        raise KernelRefused(f"cannot set a sysctl: {os.strerror(errno.EROFS)}", errno=errno.EROFS)
    if name == "add":
        raise sealnet.CannotSeal("cannot add a cgroup")
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def seal_one(run_id: str) -> int:
    return sealnet.run(["touch", "ran"], run_id=run_id, lease_port=8080).returncode


def test_a_request_that_fails_leaves_nothing_whichever_it_is(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """LIF-07, https://github.com/moby/moby/issues/31414"""
    host.broker(8080)
    assert host.sealnet("run", *LEASE, "--", "true").returncode == 0
    ran, baseline, sealer = Path("ran"), host.snapshot(), sealnet.Sealer()
    faults, endured = [], []
    with monkeypatch.context() as patches:
        kernel = Requests(patches, refuse)
        with sealer.launch(["true"], run_id="lif07", lease_port=8080) as run:
            requests = kernel.count
            run.wait()

        for number in range(1, requests + 1):
            kernel.count, kernel.at = 0, number
            failed: BaseException | None = None
            try:
                seal_one("lif07")
            except Exception as error:  # noqa: BLE001 - which one it is, is what the test looks at
                failed = error
            kernel.at = 0
            if failed is None:
                endured.append(kernel.what)
            elif ran.exists():
                faults.append(f"{kernel.what}: the payload ran, and then {failed!r}")
            elif not isinstance(failed, SealnetError):
                faults.append(f"{kernel.what}: {failed!r}")
            ran.unlink(missing_ok=True)
            if left := host.left_over():
                faults.append(f"{kernel.what}: left {left}")
                sealer.reap("lif07")

    assert requests > 30
    assert faults == []
    # What may fail and the run goes on, less open than before: the sink of IPv6, and the view of one more file system.
    assert [what for what in endured if "sink" not in what and not what.startswith("mount")] == []
    assert host.snapshot() == baseline
    assert seal_one("lif07") == 0
    assert ran.exists()


@contextlib.contextmanager
def forked(function: Callable[[], object]) -> Iterator[int]:
    """A child that runs `function` and ends; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
        finally:
            os._exit(1)
    yield pid


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_a_kill_at_any_request_leaves_nothing_that_the_next_run_does_not_take(
    host: Host, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """LIF-07, https://github.com/moby/moby/issues/31414"""
    host.broker(8080)
    assert host.sealnet("run", *LEASE, "--", "true").returncode == 0
    ran, faults, baseline, requests, traces = Path("ran"), [], host.snapshot(), 0, 0
    sealer = sealnet.Sealer()
    while True:
        requests += 1
        run_id = f"lif07-{os.getpid()}-{requests}"

        def dying(at: int = requests, run_id: str = run_id) -> None:
            with monkeypatch.context() as patches:
                kernel = Requests(patches, lambda _name: os.kill(os.getpid(), signal.SIGKILL))
                kernel.at, kernel.late = at, late
                seal_one(run_id)

        with forked(dying) as pid:
            _pid, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) or ran.exists():
            break
        traces += bool(host.left_over())
        # A helper that was forked in that moment holds the run's lock, until it executes its program or sees that it is alone.
        deadline = time.monotonic() + 2 * PATIENCE
        sealer.reap_orphans()
        while (left := host.left_over()) and time.monotonic() < deadline:
            time.sleep(0.05)
            sealer.reap_orphans()
        if left:
            faults.append(f"request {requests}: {left}")
            sealer.reap(run_id)
        # One that does not say whose it is, nobody else would count.
        for directory, below, _files in os.walk(cgroup.root()):
            if run_id in below:
                faults.append(f"request {requests}: left cgroup {run_id}")
                cgroup.remove(Path(directory) / run_id)

    sealer.reap_orphans()
    assert requests > 30
    assert traces > 20, "the kills came too early to leave anything"
    assert faults == []
    assert host.snapshot() == baseline
    assert host.sealnet("run", "--run-id", "lif07-after", *LEASE, "--", "true").returncode == 0


def _no_cgroup_tree(host: Host) -> Callable[[], object]:
    tree = str(cgroup.root())
    libc.umount(tree, libc.MNT_DETACH)
    return lambda: libc.mount("none", tree, "cgroup2")


def _read_only_sysctls(host: Host) -> Callable[[], object]:
    libc.mount("/proc/sys", "/proc/sys", None, libc.MS_BIND)
    libc.mount("none", "/proc/sys", None, libc.MS_BIND | libc.MS_RDONLY | 32)
    return lambda: libc.umount("/proc/sys")


def _owned_table(host: Host) -> Callable[[], object]:
    """A table of the gate's name that another program owns: the kernel refuses every change of it by anybody else."""
    owner = host.spawn("nft", "-i", stdin=subprocess.PIPE)
    assert owner.stdin is not None
    owner.stdin.write("add table inet sealnet { flags owner; }\nadd chain inet sealnet gate\n")
    owner.stdin.flush()
    wait_for(lambda: "chain gate" in host.run("nft", "list", "ruleset").stdout, what="the owned table is there")
    return lambda: host.stop(owner)


def _strangers_link(host: Host) -> Callable[[], object]:
    name = names.ifname("lif07-host")
    host.run("ip", "link", "add", name, "type", "bridge")
    return lambda: host.run("ip", "link", "del", name)


def _strangers_altname(host: Host) -> Callable[[], object]:
    host.run("ip", "link", "property", "add", "dev", "lan0", "altname", "sealnet-lif07-host")
    return lambda: host.run("ip", "link", "property", "del", "dev", "lan0", "altname", "sealnet-lif07-host")


def _shadowing_rule(host: Host) -> Callable[[], object]:
    host.run("ip", "rule", "add", "pref", "99", "prohibit")
    return lambda: host.run("ip", "rule", "del", "pref", "99")


def _covered(host: Host, path: str, script: str) -> Callable[[], object]:
    """`path` is another root-owned program from now on, on this throw-away host alone."""
    cover = host.directory / f"cover-{Path(path).name}"
    cover.write_text(script)
    cover.chmod(0o755)
    libc.mount(str(cover), path, None, libc.MS_BIND)
    return lambda: libc.umount(path, libc.MNT_DETACH)


def _failing_bwrap(host: Host) -> Callable[[], object]:
    return _covered(host, "/usr/bin/bwrap", "#!/bin/sh\nexit 1\n")


def _failing_setpriv(host: Host) -> Callable[[], object]:
    return _covered(host, "/usr/bin/setpriv", "#!/bin/sh\nexit 1\n")


def _no_broker(host: Host) -> Callable[[], object]:
    host.run("nft", "add table inet wall; add chain inet wall in { type filter hook input priority 0; }")
    host.run("nft", 'add rule inet wall in iifname "seal*" drop')
    return lambda: host.run("nft", "delete table inet wall")


@pytest.mark.parametrize(
    "arrange",
    [
        _no_cgroup_tree,
        _read_only_sysctls,
        _owned_table,
        _strangers_link,
        _strangers_altname,
        _shadowing_rule,
        _failing_bwrap,
        _failing_setpriv,
        _no_broker,
    ],
)
def test_a_host_that_fails_half_way_is_left_as_it_was(host: Host, arrange: Callable[[Host], Callable[[], object]]) -> None:
    """LIF-07, https://github.com/moby/moby/issues/31414: later starts failed, too."""
    host.broker(8080)
    restore = arrange(host)
    try:
        strangers = host.run("ip", "-o", "link").stdout.splitlines()
        before = host.snapshot(), host.run("nft", "list", "table", "inet", "sealnet", check=False).stdout

        done = host.sealnet("run", "--run-id", "lif07-host", *LEASE, "--", "touch", "ran")

        left = [found for found in host.left_over() if not any(found == f"link {line}" for line in strangers)]
        after = host.snapshot(), host.run("nft", "list", "table", "inet", "sealnet", check=False).stdout
    finally:
        restore()
    assert done.returncode != 0
    if arrange is not _failing_setpriv:
        # What setpriv says is the payload's, by its status.
        assert done.returncode == 125, done.stderr
        assert done.stderr.startswith(("sealnet: cannot ", "bwrap: ")), done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("ran").exists()
    assert left == []
    assert after[0] == before[0]
    assert arrange is not _owned_table or after[1] == before[1]
    assert host.left_over() == []
    # The same run works once the cause is gone: the positive control of the failure.
    again = host.sealnet("run", "--run-id", "lif07-host", *LEASE, "--", "touch", "ran")
    assert status_of(again) == (0, "")
    assert Path("ran").exists()


def test_a_supervisor_killed_while_bwrap_starts_is_taken_away_by_the_next_run(host: Host) -> None:
    """LIF-07, https://github.com/moby/moby/issues/31414"""
    host.broker(8080)
    # $PPID of what the launch has started is sealnet itself. What this leaves sleeping has no --die-with-parent.
    restore = _covered(host, "/usr/bin/bwrap", "#!/bin/sh\nkill -9 $PPID\nexec sleep 9998.5 >/dev/null 2>&1\n")
    done = host.sealnet("run", "--run-id", "lif07-mid", *LEASE, "--", "touch", "ran", stdin=subprocess.DEVNULL)
    restore()
    assert done.returncode == -signal.SIGKILL
    assert sleepers("9998.5") != []
    assert any("runs/lif07-mid" in found for found in host.left_over())

    again = host.sealnet("run", "--run-id", "lif07-mid", *LEASE, "--", "true")

    assert status_of(again) == (0, "")
    assert not Path("ran").exists()
    assert sleepers("9998.5") == []
    assert host.left_over() == []


_PING_PONG = """
import os, socket, sys
sock = socket.create_connection((sys.argv[1], 9000), 10)
rounds = 0
print("connected", flush=True)
while not os.path.exists("stop"):
    sock.sendall(b"x")
    if sock.recv(1) != b"x":
        sys.exit("the transfer broke off")
    rounds += 1
    with open("rounds.new", "w") as file:
        file.write(str(rounds))
    os.replace("rounds.new", "rounds")
"""

_ECHO = """
import socket, threading

def echo(sock):
    while data := sock.recv(4096):
        sock.sendall(data)

listener = socket.create_server(("0.0.0.0", 9000))
print("listening", flush=True)
while True:
    sock, _ = listener.accept()
    threading.Thread(target=echo, args=(sock,), daemon=True).start()
"""


@pytest.mark.parametrize("reaped_by", ["run", "reap"])
def test_an_orphan_is_swept_beside_a_live_transfer(host: Host, reaped_by: str) -> None:
    """LIF-09, https://github.com/vm0-ai/vm0/pull/10841"""
    assert host.python(_ECHO).stdout.readline() == "listening\n"
    host.broker(8080)
    script = ("/usr/bin/python3", "-c", _PING_PONG, "broker.sealnet")
    live = host.spawn_run("lif09-a", *script, options=("--lease-port", "9000"))
    assert live.stdout.readline() == "connected\n"

    def rounds() -> int:
        return int(Path("rounds").read_text()) if Path("rounds").exists() else 0

    wait_for(lambda: rounds() > 0, what="the transfer runs")
    orphan = host.spawn_run("lif09-b", "sleep", "600.9", options=LEASE)
    kill(orphan)
    assert "lif09-b" in "\n".join(host.left_over())

    if reaped_by == "reap":
        reaped = host.sealnet("reap", "--orphans", "--json")
        assert json.loads(reaped.stdout) == {"reaped": ["lif09-b"]}
        assert not any("lif09-b" in found for found in host.left_over())
    third = host.probe_run("lif09-c", *LEASE)

    assert not any("lif09-b" in found or names.ifname("lif09-b") in found for found in host.left_over())
    assert sleepers("600.9") == []
    a, c = host.record("lif09-a"), host.record("lif09-c")
    assert a["subnet"] != c["subnet"]
    assert third.ask(("tcp", c["gateway"], 8080)) == ["answered"]
    so_far = rounds()
    wait_for(lambda: rounds() > so_far + 10, what="the transfer goes on")
    assert third.end() == 0
    Path("stop").touch()
    assert live.wait(60) == 0, live.stderr.read()


@contextlib.contextmanager
def other_mounts(host: Host) -> Iterator[int]:
    """A process in another, private mount namespace of this host; its pid."""
    process = host.spawn("unshare", "-m", "--propagation", "private", "sh", "-c", "echo there; exec sleep 600")
    assert process.stdout.readline() == "there\n"
    yield process.pid
    host.stop(process)


def in_mounts(pid: int | None, *argv: str) -> tuple[str, ...]:
    return argv if pid is None else ("nsenter", f"--mount=/proc/{pid}/ns/mnt", f"--wd={os.getcwd()}", *argv)


@pytest.mark.parametrize("alive", [False, True], ids=["killed", "alive"])
@pytest.mark.parametrize("way", ["there-here", "here-there", "here-there-with-a-copy"])
def test_reap_works_from_another_mount_namespace(host: Host, way: str, alive: bool) -> None:
    """LIF-10, https://github.com/svinota/pyroute2/pull/641 and https://github.com/kata-containers/tests/pull/1766"""
    host.broker(8080)
    with contextlib.ExitStack() as stack:
        there = None if way.endswith("copy") else stack.enter_context(other_mounts(host))
        starter, reaper = (there, None) if way == "there-here" else (None, there)
        argv = in_mounts(starter, *SEALNET, "run", "--run-id", "lif10", *LEASE, "--", "sleep", "600.10")
        process = host.spawn(*argv)
        host.wait_running("lif10", process)
        if way.endswith("copy"):
            reaper = there = stack.enter_context(other_mounts(host))
        name = " /run/netns/sealnet-lif10 "
        mounts = [Path(f"/proc/{pid}/mountinfo") for pid in (os.getpid(), there)]
        seen = [name in path.read_text() for path in mounts]
        assert seen == {"there-here": [False, True], "here-there": [True, False], "here-there-with-a-copy": [True, True]}[way]
        record = host.record("lif10")
        if not alive:
            # nsenter has become sealnet.
            kill(process)
        assert host.run("ip", "link", "show", record["ifname"]).returncode == 0

        reaped = host.run(*in_mounts(reaper, *SEALNET, "reap", "lif10"), check=False)

        assert status_of(reaped) == (0, "")
        assert not alive or process.wait(60) == 137
        assert host.left_over() == []
        assert sleepers("600.10") == []
        assert [name in path.read_text() for path in mounts] == [False, False]
        # The number may be a namespace of another test's by now.
        ours = [pid for pid in os.listdir("/proc") if _is_there(pid) and is_ours(int(pid))]
        assert record["netns_inode"] not in [os.stat(f"/proc/{pid}/ns/net").st_ino for pid in ours]


def _is_there(pid: str) -> bool:
    return pid.isdigit() and _alive(pid)


# LIF-11 (thirty at once) is in test_stress.py.


def _flush(host: Host, ifname: str) -> None:
    host.run("ip", "addr", "flush", "dev", ifname)


def _down(host: Host, ifname: str) -> None:
    host.run("ip", "link", "set", ifname, "down")


def _enslave(host: Host, ifname: str) -> None:
    host.run("ip", "link", "set", ifname, "master", "br0")


def _strip_and_enslave(host: Host, ifname: str) -> None:
    _flush(host, ifname)
    _enslave(host, ifname)


def _elsewhere(host: Host, probe: Probe, gateway: str) -> list[str]:
    return probe.ask(
        ("tcp", gateway, 8081), ("tcp", LAN_PEER, 8080), ("tcp", "192.168.88.1", 8080), ("udp", gateway, 8080), ("ping", gateway, 0)
    )


@pytest.mark.parametrize(
    ("take", "missing"),
    [
        (_flush, "has address none, not {gateway}/30"),
        (_down, "is down"),
        (_enslave, "is enslaved to link br0"),
        (_strip_and_enslave, "is enslaved to link br0"),
    ],
)
def test_another_manager_that_takes_the_link_takes_the_access_and_gives_none(
    host: Host, take: Callable[[Host, str], None], missing: str
) -> None:
    """LIF-12, https://github.com/containernetworking/cni/issues/77, https://github.com/systemd/systemd/pull/4228 and
    https://github.com/canonical/lxd/issues/15766"""
    host.broker(8080)
    host.broker(8081)
    host.broker(8080, netns="lan")
    host.run("ip", "link", "add", "br0", "type", "bridge")
    host.run("ip", "addr", "add", "192.168.88.1/24", "dev", "br0")
    host.run("ip", "link", "set", "br0", "up")
    probe = host.probe_run("lif12", *LEASE)
    record = host.record("lif12")
    gateway, ifname = record["gateway"], record["ifname"]
    assert probe.ask(("tcp", gateway, 8080)) == ["answered"]
    assert host.sealnet("check", "lif12").returncode == 0

    host.unattended("lif12")
    take(host, ifname)
    lost = probe.ask(("tcp", gateway, 8080))
    elsewhere = _elsewhere(host, probe, gateway)
    checked = host.sealnet("check", "lif12")
    if take in (_enslave, _strip_and_enslave):
        # What the filter inside still holds back, the host's side must hold back as well.
        host.inside("lif12", "nft", "flush", "ruleset")
        elsewhere += _elsewhere(host, probe, gateway)

    host_side = host.probe()
    assert host_side.ask(("tcp", "127.0.0.1", 8081), ("tcp", LAN_PEER, 8080), ("tcp", "192.168.88.1", 8080)) == ["answered"] * 3
    assert "answered" not in elsewhere
    assert checked.returncode == 1
    assert missing.format(gateway=gateway) in checked.stdout
    assert ifname in checked.stdout
    assert lost != ["answered"]
    assert status_of(host.sealnet("reap", "lif12")) == (0, "")
    # The bridge itself is the other manager's, and stays; its own traces of the port go with the link.
    host.run("ip", "link", "del", "br0")
    assert host.left_over() == []
    probe.process.send_signal(signal.SIGCONT)
    assert probe.process.wait(60) == 137


def test_reap_tells_of_what_it_took_and_of_what_it_may_not(host: Host) -> None:
    process = host.spawn_run("lost", "sleep", "600")
    kill(process)
    shutil.rmtree(host.state / "runs" / "lost")

    assert host.sealnet("reap", "lost").stdout == "reaped  lost\n"
    assert host.sealnet("reap", "lost").stdout == ""

    host.broker(8080)
    other = host.spawn_run("strange", "sleep", "600", options=LEASE)
    elsewhere = {**os.environ, "SEALNET_STATE_DIR": str(host.directory / "other")}
    done = host.sealnet("reap", "strange", env=elsewhere)
    assert (done.returncode, "the mark of another state directory" in done.stderr) == (125, True), done.stderr
    assert host.sealnet("check", "strange").returncode == 0
    host.sealnet("reap", "strange")
    assert other.wait(60) == 137
