"""A program that uses the Python API, for tests to start as one user or another.

usage: apiuser.py DEED [JSON]; prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import sealnet
from sealnet import aio

GIVEN: Any = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
USER = str(GIVEN.get("user", os.getuid()))


def completed() -> Any:
    """What a completed run tells; what each run has of its own is left out."""
    script = "cat; echo told >&2; id -u; curl -s -m 2 http://192.0.2.9/; curl -fsS $URL/x; touch written; exit 3"
    done = sealnet.run(
        ["sh", "-c", script], input="hello", capture_output=True, text=True, lease_port=8080, broker_env=["URL"], user=USER,
        receipt="proof.json", evidence="bundle", run_id="completed",
    )  # fmt: skip
    try:
        done.check_returncode()
    except subprocess.CalledProcessError as error:
        raised = (error.returncode, error.cmd)
    receipt = done.receipt
    own = ("started", "gateway", "sandbox", "subnet", "ifname", "ifindex", "mac", "netns_inode", "rulesets", "proof_ms", "checks")
    proof = json.loads(Path("proof.json").read_text())
    return {
        **{name: getattr(done, name) for name in ("run_id", "args", "returncode", "stdout", "stderr", "tried", "events")},
        "raised": raised,
        "receipt": {name: value for name, value in dataclasses.asdict(receipt).items() if name not in own},
        "checks": [(one.name, one.kind, one.ok) for one in receipt.checks],
        "verdict": (receipt.verdict, receipt.egress_sealed, sealnet.fold([receipt, receipt]).verdict),
        "is the file's": proof == json.loads(receipt.render()),
        "bundle": (sorted(os.listdir("bundle")), sealnet.fold_evidence(["bundle"]).egress_enforced),
        "hashable": len({done.args, done.tried}),
    }


def others() -> Any:
    """Streams, ends, timeouts."""
    with open("out", "wb") as out:
        merged = sealnet.run(["sh", "-c", "echo a; echo b >&2"], stdout=out, stderr=subprocess.STDOUT, user=USER)
    big = bytes(range(256)) * 4096
    through = sealnet.run(["cat"], input=big, capture_output=True, user=USER)
    return {
        "merged": (merged.stdout, Path("out").read_text()),
        "big": through.stdout == big,
        "deaf": sealnet.run(["true"], input=big, user=USER).returncode,
        "null": sealnet.run(
            [Path("/bin/cat")], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=Path.cwd(), user=int(USER)
        ).stdout.decode(),
        "child keeps the pipe": sealnet.run(["sh", "-c", "sleep 600 & echo told"], capture_output=True, text=True, user=USER).stdout,
        "timeout": sealnet.run(["sh", "-c", "echo said; exec sleep 600"], timeout_s=0.3, capture_output=True, user=USER).returncode,
        "signal": sealnet.run(["sh", "-c", "kill -USR1 $$"], user=USER).returncode,
    }


def live() -> Any:
    """A run that is alive, from its launch to its end."""
    sealer, seen = sealnet.Sealer(), {}
    script = "trap 'echo usr1' USR1; read line; echo got $line; curl -s -m 2 http://192.0.2.9/; echo ready; while :; do sleep 0.05; done"
    with sealer.launch(["sh", "-c", script], run_id="live", stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=USER) as run:
        assert isinstance(run, sealnet.Run)
        run.stdin.write(b"words\n")
        seen["said"] = [run.stdout.readline().decode() for _ in range(2)]
        seen["listed"] = [(record.run_id, record.state, record.uid) for record in sealer.runs()]
        seen["record"] = (run.record.run_id, run.record.state, run.record.command)
        seen["tried"] = run.tried()
        found = run.check(), sealer.check("live")
        seen["checks"] = [sorted(one) for one in found]
        seen["verdicts"] = (*(one["verdict"] for one in found), run.receipt.verdict)
        seen["taken"] = refusal(lambda: sealer.launch(["true"], run_id="live", user=USER))
        try:
            run.wait(0.05)
        except TimeoutError:
            seen["goes on"] = run.poll() is None
        seen["signalled"] = run.send_signal(10)
        seen["trapped"] = run.stdout.readline().decode()
        run.kill()
        seen["status"] = run.wait(60)
        seen["after"] = (run.poll(), run.send_signal(10), run.tried())
    seen["left"] = (sealer.runs(), sealer.reap("live"))
    with sealer.launch(["sleep", "600"], run_id="live", user=USER):
        seen["reaped"] = sealer.reap("live")
    with sealer.launch(["sleep", "600"], run_id="live", user=USER):
        pass
    seen["closed"] = sealer.runs()
    return seen


def refusal(call: Any) -> Any:
    try:
        call()
    except (sealnet.SealnetError, TypeError) as error:
        return type(error).__name__, str(error), getattr(error, "exit_status", None)


def refused() -> Any:
    run = sealnet.run
    return [
        refusal(lambda: run(["touch", "ran"], lease_port=1, run_id="refused", user=USER)),
        refusal(lambda: run(["touch", "ran"], lease_port=1, network="severed", user=USER)),
        refusal(lambda: run(["touch", "ran"], tmpfs=["x"], user=USER)),
        refusal(lambda: run(["touch", "ran"], colour="red", user=USER)),
        refusal(lambda: run(["touch", "ran"], worker="perhaps", user=USER)),
        refusal(lambda: run(["touch", "ran"], receipt="/none/x", user=USER)),
        refusal(lambda: run(["touch", "ran", "a\0b"], user=USER)),
        refusal(lambda: run(["touch", "ran"], chdir="a\0b", user=USER)),
        refusal(lambda: run(["touch", 7], user=USER)),
        refusal(lambda: run("touch ran", user=USER)),
        refusal(lambda: run(["touch", "ran"], pass_env="HOME", user=USER)),
        refusal(lambda: sealnet.Sealer().check("none")),
        os.path.exists("ran"),
        sealnet.Sealer().can_seal().ok,
    ]


def ways() -> Any:
    """Where a run is made, by what was asked for."""
    can = sealnet.Sealer(worker=GIVEN["way"]).can_seal()
    found = refusal(lambda: sealnet.run(["true"], worker=GIVEN["way"]))
    return [found[:2] if found else None, can.ok, can.reason]


def threads() -> Any:
    sealer, said = sealnet.Sealer(), {}

    def one(number: int) -> None:
        said[number] = sealer.run(["echo", str(number)], capture_output=True, text=True, user=USER).stdout

    started = [threading.Thread(target=one, args=(number,)) for number in range(5)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return said == {number: f"{number}\n" for number in range(5)}


def tasks() -> Any:
    return asyncio.run(_tasks())


async def _tasks() -> Any:
    sealer, seen = aio.Sealer(), {}

    async def one(number: int) -> str:
        return (await sealer.run(["echo", str(number)], capture_output=True, text=True, user=USER)).stdout

    seen["many"] = await asyncio.gather(*(one(number) for number in range(6)))
    seen["alone"] = (await aio.run(["sh", "-c", "exit 7"], user=USER)).returncode
    try:
        await aio.run(["true"], lease_port=1, run_id="refused", user=USER)
    except sealnet.NoBroker as error:
        seen["refused"] = error.message
    # Cancelled while it runs, and while it is made: nothing of it is left when the task goes on.
    running = asyncio.create_task(sealer.run(["sleep", "600"], run_id="running", user=USER))
    while "running" not in [record.state for record in await sealer.runs()]:
        await asyncio.sleep(0.02)
    made = asyncio.create_task(sealer.run(["sh", "-c", "sleep 9; touch ran"], run_id="made", user=USER))
    await asyncio.sleep(0)
    for task in (running, made):
        task.cancel()
    seen["cancelled"] = [type(error).__name__ for error in await asyncio.gather(running, made, return_exceptions=True)]
    seen["left"] = await sealer.runs()
    seen["ran"] = os.path.exists("ran")
    try:
        async with asyncio.timeout(0.5):
            await sealer.run(["sleep", "600"], user=USER)
    except TimeoutError:
        seen["timed out"] = await sealer.runs()
    return seen


def streams() -> Any:
    return asyncio.run(_streams())


async def _streams() -> Any:
    sealer, seen = aio.Sealer(), {}
    script = "trap 'echo usr1' USR1; while read line; do echo got $line; done; echo end; while :; do sleep 0.05; done"
    async with sealer.launch(["sh", "-c", script], run_id="live", stdin=subprocess.PIPE, stdout=subprocess.PIPE, user=USER) as run:
        run.stdin.write(b"words\n")
        await run.stdin.drain()
        seen["said"] = (await run.stdout.readline()).decode()
        # Others go on while one waits.
        waiting = asyncio.create_task(run.wait())
        run.stdin.close()
        seen["end"] = (await run.stdout.readline()).decode()
        seen["signalled"] = await run.send_signal(10)
        seen["trapped"] = (await run.stdout.readline()).decode()
        seen["seen"] = [(await run.check())["verdict"], run.receipt.verdict, await run.tried(), (await run.record()).state, run.run_id]
        try:
            await run.wait(0.05)
        except TimeoutError:
            seen["goes on"] = not waiting.done()
        await run.kill()
        seen["status"] = [await waiting, await run.wait()]
    seen["left"] = await sealer.runs()
    try:
        async with sealer.launch(["sleep", "600"], user=USER) as run:
            raise KeyError("ours")
    except KeyError:
        seen["raised"] = await sealer.runs()
    for call in (run.kill, run.wait):
        try:
            await call()
        except RuntimeError as error:
            seen[call.__name__] = str(error)

    async def start() -> None:
        async with sealer.launch(["touch", "ran"], run_id="started", user=USER) as started:
            await started.wait()

    # Given up at any point of its start, and after it.
    for looks in (0, 1, 5, 60):
        starting = asyncio.create_task(start())
        for _look in range(looks):
            await asyncio.sleep(0.005)
        starting.cancel()
        await asyncio.wait([starting])
        seen["cancelled"] = [starting.cancelled() or starting.exception() is None, await sealer.runs()]
    try:
        async with sealer.launch(["true"], lease_port=1, run_id="refused", user=USER):
            pass
    except sealnet.NoBroker as error:
        seen["refused"] = error.message
    return seen


def leave() -> Any:
    """And go: nobody closes it."""
    sealnet.Sealer().launch(
        ["sh", "-c", "until [ -e stop ]; do sleep 0.05; done; exit 7"],
        run_id="lasting",
        durable=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
    )
    return True


def adopt() -> Any:
    sealer = sealnet.Sealer()
    found = sealer.adopt()
    seen: list[Any] = [[run.run_id for run in found]]
    for run in found:
        seen.append(run.check()["verdict"])
        Path("stop").touch()
        seen.append(run.wait())
    return [*seen, [run.run_id for run in asyncio.run(aio.Sealer().adopt())]]


def long() -> Any:
    print("started", flush=True)
    with sealnet.Sealer().launch(["sleep", "600"], run_id="long") as run:
        print("running", flush=True)
        return run.wait()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](), default=str))
