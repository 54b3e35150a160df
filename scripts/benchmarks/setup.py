"""Set-up and teardown of one run while 1, 100, 1,000 and 4,000 others live."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from scripts.benchmarks.figures import in_turns
from scripts.benchmarks.floor import Floor
from scripts.benchmarks.lab import Holders, Sealnet, Started, available_bytes, broker, start_bwrap
from scripts.benchmarks.packets import Packets
from scripts.benchmarks.result import Effort, Result
from sealnet.kernel.netns import Inside

_LEVELS, _QUICK_LEVELS = (0, 99, 999, 3999), (0, 19)
# Of user and kernel memory together; `memory` measures it.
_RUN_BYTES = 3 << 20


def measure(effort: Effort) -> Result:
    result = Result()
    levels = _QUICK_LEVELS if effort.quick else _LEVELS
    keep = available_bytes() * 3 // 4 > levels[-1] * _RUN_BYTES
    if not keep:
        result.notes.append("Memory was short: of the runs held beside, the seals stood, and their payloads had ended.")
    with broker() as port, Holders(port=port, keep_payloads=keep) as holders, Inside.new("idle") as idle:
        sealnet, floor = Sealnet(), Floor()
        quiet, own = idle.call(Packets), Packets()
        for level in levels:
            held = holders.hold(level)
            if held < level:
                result.missing[f"{level:,} other runs alive"] = f"only {held:,} had been started when time was up"
            measures: dict[str, Callable[[], dict[str, float]]] = {
                "sealed": partial(_cycle, "sealed", partial(sealnet.start, port=port)),
                "severed": partial(_cycle, "severed", sealnet.start),
                "bwrap": partial(_cycle, "bwrap", start_bwrap),
                "floor": floor.measure,
                "idle packet": partial(_packet, "idle packet", quiet),
                "packet": partial(_packet, "packet", own),
            }
            told = in_turns(measures, rounds=effort.rounds(60), warm_up=2)
            group = result.group(f"with {held:,} other runs alive" if held else "the first run")
            group.add("bwrap alone: call to exec", told["bwrap exec"])
            for kind in ("severed", "sealed"):
                group.add(f"{kind}: claim to held", told[f"{kind} held"], control="bwrap alone: call to exec")
                group.add(f"{kind}: claim to exec", told[f"{kind} exec"], control="bwrap alone: call to exec")
            group.add("kernel's floor: up", told["floor up"])
            group.add("sealed: claim to built", told["sealed built"], control="kernel's floor: up")
            group.add("kernel's floor: down", told["floor down"])
            for kind in ("severed", "sealed"):
                group.add(f"{kind}: teardown", told[f"{kind} end"], control="kernel's floor: down")
            group.add("bwrap alone: kill to gone", told["bwrap end"])
            group.add("loopback packet of an idle host", told["idle packet"], unit="us")
            group.add("loopback packet of this host", told["packet"], unit="us", control="loopback packet of an idle host")
    return result


def _cycle(name: str, start: Callable[[], Started]) -> dict[str, float]:
    started = start()
    return {f"{name} {mark}": took for mark, took in {**started.marks, "end": started.end()}.items()}


def _packet(name: str, packets: Packets) -> dict[str, float]:
    return {name: packets.measure()}
