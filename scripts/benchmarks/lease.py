"""What the way through a lease costs, beside a bare veth of the same kind without any rules."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from functools import partial
from ipaddress import IPv4Address
from typing import Any

from scripts.benchmarks.figures import in_turns
from scripts.benchmarks.lab import PORT, Sealnet, listen, python
from scripts.benchmarks.pump import CLIENT
from scripts.benchmarks.result import Effort, Result
from sealnet.kernel import links, sysctl
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.netns import Inside
from sealnet.running import Streams

_NEAR, _FAR = IPv4Address("203.0.113.1"), IPv4Address("203.0.113.2")
_BARE, _LEASE, _PAYLOAD = "bare veth", "lease", "lease, from within the sandbox"
_SHOWN = (
    ("echo", "ping-pong of one byte, median of a round", "us"),
    ("up", "up, to the host", "GiB/s"),
    ("down", "down, to the sandbox", "GiB/s"),
)


def measure(effort: Effort) -> Result:
    cpus = sorted(os.sched_getaffinity(0))
    echoes, mib = (400, 64) if effort.quick else (3000, 512)
    result = Result()
    with ExitStack() as stack:
        host, sandbox = (stack.enter_context(Inside.new(name)) for name in ("bare-host", "bare-sandbox"))
        host.call(_bare_link, sandbox)
        listeners = [stack.enter_context(listener) for listener in (listen(PORT), host.call(listen, PORT))]
        fds = [listener.fileno() for listener in listeners]
        stack.enter_context(python("pump", str(cpus[0]), *map(str, fds), pass_fds=fds))
        gateway, client = str(_NEAR), ["/usr/bin/python3", "-I", "-S", "-c", CLIENT]
        bare = sandbox.call(_client, [*client, gateway, str(PORT)])
        stack.callback(bare.kill)
        sealnet = Sealnet()
        run = stack.enter_context(
            sealnet.launch((*client, "broker.sealnet", str(PORT)), port=PORT, streams=Streams(subprocess.PIPE, subprocess.PIPE))
        )
        run.release()
        if run.inside is None:
            raise RuntimeError("the run has no namespace")
        lease = run.inside.call(_client, [*client, str(run.seal.gateway), str(PORT)])
        stack.callback(lease.kill)
        clients: dict[str, Any] = {_BARE: bare, _LEASE: lease, _PAYLOAD: run.spawned}
        for process in clients.values():
            if process.stdout.readline() != b"ready\n":
                raise RuntimeError("a client did not start")
        pids = [bare.pid, lease.pid, run.payload_pid() or 0]
        for what, title, unit in _SHOWN:
            # One byte bounces within one CPU, so that no wake-up of another is measured; a stream has two where there are two.
            for pid in pids:
                os.sched_setaffinity(pid, {cpus[0] if what == "echo" else cpus[-1]})
            amount = echoes if what == "echo" else mib
            measures = {name: partial(_ask, process, what, amount, name) for name, process in clients.items()}
            told = in_turns(measures, rounds=effort.rounds(25, 3))
            group = result.group(title)
            for name, values in told.items():
                group.add(name, values, unit=unit, control=None if name == _BARE else _BARE)
    result.notes.append(
        "`lease` is a process in the run's namespace; `from within the sandbox` is the payload itself, whose system calls are filtered too."
    )
    return result


def _client(argv: list[str]) -> subprocess.Popen[bytes]:
    """Born in the namespace of the calling thread."""
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _ask(process: Any, what: str, amount: int, name: str) -> dict[str, float]:
    process.stdin.write(f"{what} {amount}\n".encode())
    process.stdin.flush()
    return {name: float(process.stdout.readline())}


def _bare_link(sandbox: Inside) -> None:
    """The same kind of link as a run's: one queue, addressed, quiet; and nothing that looks at its packets."""
    with Netlink() as netlink:
        index = links.add_veth(
            netlink, name="bare0", mac="02:00:00:00:00:01", group=0, peer_name="eth0", peer_mac="02:00:00:00:00:02", netns_fd=sandbox.fd
        )
        sysctl.set_link("bare0")
        netlink.exchange([links.quiet(index), links.add_address(index, _NEAR, 30), links.bring_up(index)])
    sandbox.call(_bare_sandbox)


def _bare_sandbox() -> None:
    sysctl.set_link("eth0")
    index = links.SANDBOX_INDEX
    with Netlink() as netlink:
        netlink.exchange([links.quiet(index), links.add_address(index, _FAR, 30), links.bring_up(index)])
