"""Starts runs and keeps them until its standard input ends: `holder COUNT PORT|0 keep|end`; with `end` the seals alone, no payloads."""

from __future__ import annotations

import sys

from scripts.benchmarks.lab import SILENT, Sealnet


def main() -> None:
    count, port, payloads = int(sys.argv[1]), int(sys.argv[2]) or None, sys.argv[3]
    sealnet = Sealnet()
    runs = []
    for _ in range(count):
        run = sealnet.launch(("sleep", "3600"), port=port, streams=SILENT)
        run.release()
        if payloads == "end":
            run.kill()
        runs.append(run)
    print("ready", flush=True)
    # Never `close`: the host that they are on is thrown away whole.
    sys.stdin.read()


main()
