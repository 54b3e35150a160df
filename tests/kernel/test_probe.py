"""A real throw-away seal: it tells what a host lacks, and whatever becomes of it nothing is left."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

import sealnet
from sealnet import probe, prove
from sealnet.errors import CannotSeal, KernelRefused
from sealnet.kernel import cgroup, links
from sealnet.kernel.host import Host
from sealnet.model import names
from sealnet.model.config import Config
from sealnet.records import State
from tests import lab
from tests.crash import descriptors

pytestmark = pytest.mark.root

LAUNCHED = ("claimed", "allocated", "built", "proved", "started")
STEPS = ["look", "claim", "allocate", "build", "prove", "start", "run", "remove"]
NFT = next(str(path) for path in Path("/usr/lib").glob("*/libnftables.so.1"))
ASK = "import sealnet; can = sealnet.Sealer().can_seal(); print(can.ok, can.step, can.reason, can.hint, sep='|')"


def ready(host: lab.Host, config: Config | None = None) -> Callable[[], tuple[State, Config]]:
    def answer() -> tuple[State, Config]:
        state = State(host.state)
        state.prepare()
        return state, config or Config()

    return answer


def asked_anew(host: lab.Host, *prefix: str) -> list[str]:
    """What a process of its own is told, in which nothing has been loaded yet."""
    root = str(Path(sealnet.__file__).parents[1])
    done = host.run(*prefix, sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {root!r}); {ASK}")
    return done.stdout.rstrip("\n").split("|")


@pytest.fixture
def settled(host: lab.Host) -> Iterator[lab.Host]:
    """A host on which a first seal has been tried: libnftables keeps a socket from its first use on."""
    first = probe.attempt(ready(host))
    assert first, first
    yield host
    # The control: whatever was in the way is gone, and it works.
    last = probe.attempt(ready(host))
    assert last, last


def test_a_host_that_can_seal_is_told_with_every_step_and_nothing_is_left(host: lab.Host) -> None:
    can = probe.attempt(ready(host))

    assert can, can
    assert (can.step, can.reason, can.hint) == (None, None, None)
    assert [step for step, _took in can.steps] == STEPS
    assert can.took_ms >= sum(took for _step, took in can.steps) * 0.99
    assert host.left_over() == []


def test_the_probe_leaves_no_descriptor_and_no_thread(settled: lab.Host) -> None:
    before, threads = descriptors(), threading.active_count()

    assert probe.attempt(ready(settled))

    assert descriptors() == before
    assert threading.active_count() == threads


def test_the_probes_port_is_open_on_the_gateway_alone(settled: lab.Host) -> None:
    told = []

    def look(step: str) -> None:
        if step == "built":
            state = State(settled.state)
            record = state.read(probe.run_id(state))
            port = record.lease_ports[0]
            told.extend(lab.connect(address, port) for address in (record.gateway, "127.0.0.1", lab.LAN_HOST))

    assert probe.attempt(ready(settled), checkpoint=look)

    assert told == ["connected", "ConnectionRefusedError", "ConnectionRefusedError"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (lambda: CannotSeal("cannot go on"), "cannot go on"),
        (lambda: OSError(errno.ENOSPC, "No space left on device"), "cannot start run {run}: No space left on device"),
    ],
    ids=["told", "errno"],
)
@pytest.mark.parametrize("after", LAUNCHED)
def test_a_probe_that_fails_after_a_step_leaves_nothing(settled: lab.Host, after: str, error: Callable[[], Exception], reason: str) -> None:
    before, threads = descriptors(), threading.active_count()

    def stop(step: str) -> None:
        if step == after:
            raise error()

    can = probe.attempt(ready(settled), checkpoint=stop)

    assert not can
    assert can.step == STEPS[LAUNCHED.index(after) + 2]
    assert can.reason == reason.format(run=probe.run_id(State(settled.state)))
    assert settled.left_over() == []
    assert descriptors() == before
    assert threading.active_count() == threads


def test_a_probe_that_is_interrupted_leaves_nothing(settled: lab.Host) -> None:
    before, threads = descriptors(), threading.active_count()

    def stop(step: str) -> None:
        if step == "started":
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        probe.attempt(ready(settled), checkpoint=stop)
        pytest.fail("the interruption is not handed on")

    assert settled.left_over() == []
    assert descriptors() == before
    assert threading.active_count() == threads


def test_a_bug_is_not_dressed_up_as_a_host_that_cannot_seal(settled: lab.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(prove, "network", lambda *_, **__: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            probe.attempt(ready(settled))

    assert settled.left_over() == []


def test_what_a_killed_probe_left_is_taken_away_by_the_next_one(settled: lab.Host) -> None:
    state = State(settled.state)
    own = probe.run_id(state)
    code = f"""
        import os, sys
        sys.path.insert(0, {str(Path(sealnet.__file__).parents[1])!r})
        from sealnet import probe
        from sealnet.model.config import Config
        from sealnet.records import State

        def die(step):
            if step == "proved":
                os.kill(os.getpid(), 9)

        probe.attempt(lambda: (State({str(settled.state)!r}), Config()), checkpoint=die)
    """
    for _ in range(2):
        assert settled.python(code).wait(60) == -9
        lab.wait_for(lambda: not state.is_held(own), what="its lock is free")
    netns = [name for name in os.listdir("/run/netns") if name.startswith("sealnet-")]

    can = probe.attempt(ready(settled))

    assert netns == [f"sealnet-{own}"]
    assert can, can
    assert settled.left_over() == []


@pytest.mark.parametrize("trace", ["reservation", "cgroup"])
def test_a_trace_without_a_record_is_taken_away_as_well(settled: lab.Host, trace: str) -> None:
    state = State(settled.state)
    own = probe.run_id(state)
    if trace == "reservation":
        state.reserve(IPv4Network("198.18.0.0/30"), own)
    else:
        cgroup.add(own, state.tag)

    assert probe.attempt(ready(settled))

    assert settled.left_over() == []


def test_what_a_probe_could_not_take_away_is_told(settled: lab.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise KernelRefused("cannot remove link x: Operation not permitted", errno=errno.EPERM)

    with monkeypatch.context() as patch:
        # The look for leftovers, at the start, has no link to remove.
        real = Host.remove_link
        patch.setattr(Host, "remove_link", lambda self, run: refused() if _has_link(self, run) else real(self, run))
        can = probe.attempt(ready(settled))

    assert not can
    assert can.step == "remove"
    assert "cannot remove link x: Operation not permitted" in (can.reason or "")


def _has_link(host: Host, run: str) -> bool:
    return links.see(host.netlink, names.ifname(run)) is not None


# What a host lacks


def test_bwrap_is_missing(settled: lab.Host) -> None:
    with lab.without(settled, "/usr/bin/bwrap"):
        can = probe.attempt(ready(settled))

    assert not can
    assert can.step == "claim"
    assert "cannot find tool bwrap" in (can.reason or "")
    assert can.hint == "apt-get install bubblewrap"


def test_bwrap_fails_and_what_it_said_is_told(settled: lab.Host) -> None:
    cover = settled.directory / "bwrap"
    cover.write_text("#!/bin/sh\necho no such luck >&2\nexit 3\n")
    cover.chmod(0o755)
    settled.run("mount", "--bind", str(cover), "/usr/bin/bwrap")
    try:
        can = probe.attempt(ready(settled))
    finally:
        settled.run("umount", "/usr/bin/bwrap")

    assert not can
    assert can.step == "start"
    assert "it said: no such luck" in (can.reason or "")


@pytest.mark.parametrize(("path", "words"), [(NFT, "libnftables"), ("nftables", "Python binding"), ("seccomp", "Python binding")])
def test_a_library_is_missing(settled: lab.Host, path: str, words: str) -> None:
    if "/" not in path:
        import importlib.util

        origin = Path(importlib.util.find_spec(path).origin)
        path = str(origin.parent if origin.name == "__init__.py" else origin)
    with lab.without(settled, path):
        ok, _step, reason, hint = asked_anew(settled)

    assert ok == "False"
    assert words in reason
    assert hint.startswith("apt-get install")
    assert asked_anew(settled)[0] == "True"


def test_it_is_not_root(settled: lab.Host) -> None:
    ok, step, reason, hint = asked_anew(settled, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")

    assert (ok, step) == ("False", "look")
    assert reason == "cannot try a seal: only root may"
    assert hint == "sudo sealnet worker, or run this as root"


@pytest.mark.parametrize("capability", ["net_admin", "sys_admin"])
def test_a_root_that_lacks_a_capability(settled: lab.Host, capability: str) -> None:
    ok, step, reason, _hint = asked_anew(settled, "setpriv", f"--bounding-set=-{capability}", f"--inh-caps=-{capability}")

    assert (ok, step) == ("False", "look")
    assert reason == f"cannot try a seal: this root lacks CAP_{capability.upper()}"


def test_the_pool_is_exhausted(settled: lab.Host) -> None:
    settled.run("ip", "route", "add", "198.51.100.0/24", "via", lab.LAN_PEER)
    can = probe.attempt(ready(settled, Config(pool=(IPv4Network("198.51.100.0/24"),))))
    settled.run("ip", "route", "del", "198.51.100.0/24")

    assert not can
    assert can.step == "allocate"
    assert "the host routes all of it (198.51.100.0/24 via 192.168.77.2" in (can.reason or "")


def test_a_firewall_lets_in_one_port_only(settled: lab.Host) -> None:
    settled.run("nft", "add table inet strict; add chain inet strict input { type filter hook input priority 0; policy drop; }")
    settled.run("nft", "add", "rule", "inet", "strict", "input", "iifname", "seal*", "tcp", "dport", "8080", "accept")
    shut, let_in = probe.attempt(ready(settled)), probe.attempt(ready(settled), 8080)
    settled.run("nft", "delete", "table", "inet", "strict")

    assert not shut
    assert shut.step == "prove"
    assert "cannot reach the broker of run can-seal-" in (shut.reason or "")
    assert "sealnet doctor --lease-port PORT" in (shut.reason or "")
    assert let_in, let_in


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_a_port_that_somebody_listens_on_may_be_tried(settled: lab.Host, address: str) -> None:
    with socket.create_server((address, 8080)):
        can = probe.attempt(ready(settled), 8080)

    assert can, can


# Through the API


def test_sixteen_threads_build_one_probe(settled: lab.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real, built = Host.add_netns, []
    monkeypatch.setattr(Host, "add_netns", lambda *arguments: (built.append(1), real(*arguments))[1])
    sealer, told, together = sealnet.Sealer(), [], threading.Barrier(16)

    def ask() -> None:
        together.wait(60)
        told.append(sealer.can_seal())

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(told) == 16
    assert all(told)
    assert len(built) == 1


def test_two_processes_may_ask_at_once(settled: lab.Host) -> None:
    root = str(Path(sealnet.__file__).parents[1])
    code = f"import sys; sys.path.insert(0, {root!r}); {ASK}"
    processes = [settled.spawn(sys.executable, "-I", "-c", code, stdout=subprocess.PIPE) for _ in range(4)]

    assert [process.communicate(timeout=90)[0].split("|")[0] for process in processes] == ["True"] * 4


def test_a_host_that_was_mended_is_found_to_seal_after_a_minute(settled: lab.Host) -> None:
    now = [0.0]
    answers = probe.Answers(lambda port: probe.attempt(ready(settled), port), clock=lambda: now[0])
    with lab.without(settled, "/usr/bin/bwrap"):
        missing = answers.ask()
    too_early = answers.ask()
    now[0] += probe.RETRY_S

    assert not missing
    assert too_early is missing
    assert answers.ask()


def test_a_launch_that_could_not_be_sealed_puts_a_kept_answer_in_doubt(settled: lab.Host) -> None:
    sealer = sealnet.Sealer()
    first = sealer.can_seal()
    kept = sealer.can_seal()
    with lab.without(settled, "/usr/bin/bwrap"):
        with pytest.raises(CannotSeal):
            sealer.launch(["true"])
        doubted = sealer.can_seal()

    assert first
    assert kept is first
    assert not doubted
    assert not sealer.can_seal()
    assert sealer.can_seal(again=True)
