"""Wall time of one whole command, against other tools that run one cut off from the network."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from scripts.benchmarks import peers
from scripts.benchmarks.figures import in_turns
from scripts.benchmarks.lab import PACKAGED, SEALNET, a_worker, broker
from scripts.benchmarks.peers import Missing, Peer, Ptp
from scripts.benchmarks.result import Effort, Result

_WRAPPER = str(Path(__file__).parents[1] / "sealnet")
_CNI = "CNI ptp: ADD and DEL of a namespace"
SRT = "sandbox-runtime (srt)"
_ITSELF, _BY_WORKER = ("run", "--worker", "never"), ("run", "--worker", "always")


def measure(effort: Effort) -> Result:
    result = Result()
    # Tools look through the directory that they are called in.
    os.mkdir("/run/bench/work")
    os.chdir("/run/bench/work")
    found: list[Peer] = []
    wanted: dict[str, Callable[[], Peer]] = {
        "bwrap --unshare-all": partial(peers.bwrap, "--unshare-all"),
        "bwrap --unshare-net": partial(peers.bwrap, "--unshare-net"),
        SRT: partial(peers.srt, Path(effort.cache)),
        "firejail --net=none": peers.firejail,
    }
    for name, get in wanted.items():
        try:
            found.append(get())
        except Missing as error:
            result.missing[name] = str(error)
    with broker() as port, a_worker():
        measures: dict[str, Callable[[], dict[str, float]]] = {}
        severed, sealed = ["--", "true"], ["--lease-port", str(port), "--", "true"]
        for name, argv in (
            ("sealnet run, severed", [*PACKAGED, *_ITSELF, *severed]),
            ("sealnet run, sealed", [*PACKAGED, *_ITSELF, *sealed]),
            ("sealnet run of a worker, severed", [*PACKAGED, *_BY_WORKER, *severed]),
            ("sealnet run of a worker, sealed", [*PACKAGED, *_BY_WORKER, *sealed]),
            ("scripts/sealnet run, sealed", [_WRAPPER, *_ITSELF, *sealed]),
            ("sealnet run, sealed, by pip's entry point", [SEALNET, *_ITSELF, *sealed]),
        ):
            measures[name] = partial(_wall, name, argv)
        for peer in found:
            measures[peer.name] = partial(_wall, peer.name, peer.command("true"))
        try:
            ptp = Ptp(Path("/run/bench"))
            _add_and_delete(ptp)
            measures[_CNI] = partial(_add_and_delete, ptp)
        except Missing as error:
            result.missing[_CNI] = str(error)
        told = in_turns(measures, rounds=effort.rounds(40), warm_up=2)
    group = result.group("`true`, from the call to the end")
    control = SRT if SRT in told else None
    for name, values in told.items():
        group.add(name, values, control=None if name == control else control)
    result.notes += [f"{peer.name}: version {peer.version}." for peer in found]
    result.notes.append("sealnet is started as the package starts it (python3 -IS), where nothing else is said.")
    result.notes.append(f"Ratios are to {SRT}, the rootless tool that is used most, with its defaults (nothing may be reached).")
    return result


def _wall(name: str, argv: list[str]) -> dict[str, float]:
    began = time.perf_counter()
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return {name: (time.perf_counter() - began) * 1e3}


def _add_and_delete(ptp: Ptp) -> dict[str, float]:
    subprocess.run(["ip", "netns", "add", "bench"], check=True)
    try:
        began = time.perf_counter()
        ptp.call("ADD", "/run/netns/bench")
        ptp.call("DEL", "/run/netns/bench")
        return {_CNI: (time.perf_counter() - began) * 1e3}
    finally:
        with suppress(subprocess.CalledProcessError):
            subprocess.run(["ip", "netns", "delete", "bench"], check=True)
