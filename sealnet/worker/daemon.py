"""The worker's life: begin, say so, serve until told to end, leave durable runs to the next one."""

from __future__ import annotations

import asyncio
import gc
import grp
import os
import signal
import socket
import time
import traceback
from typing import Any

from sealnet import caller, request
from sealnet.errors import SealnetError
from sealnet.kernel import libc, process
from sealnet.model.config import Config
from sealnet.model.endpoint import Endpoint
from sealnet.model.version import VERSION
from sealnet.records import State
from sealnet.worker import first, notify, scrape, server
from sealnet.worker.first import Forked
from sealnet.worker.log import log
from sealnet.worker.notify import Notifier
from sealnet.worker.runs import Runs, crew_size
from sealnet.worker.scrape import Scrapes
from sealnet.worker.server import Server
from sealnet.worker.service import Service

# Beside a connection for each run: for what is asked meanwhile.
_MORE_CONNECTIONS = 64
# A heap of a thousand runs is not looked through at every other request.
_GARBAGE = 50_000


def serve(state: State, *, metrics: Endpoint | None = None) -> int:
    """Serve until SIGTERM or SIGINT; the exit status. `metrics` is instead of the configuration's.

    Raises SealnetError where it cannot begin.
    """
    caller.require_root("start the worker", "sealnet worker")
    notifier, config = Notifier(os.environ), request.config()
    state.prepare()
    lock = server.only_one(state.path)
    try:
        libc.use_one_arena()
        members = first.fork(state, crew_size())
        sock = notify.listening(os.environ) or server.bind(state.path, _gid(config))
        gc.set_threshold(_GARBAGE)
        asyncio.run(_serve(state, config, sock, notifier, metrics or config.metrics, members))
    finally:
        os.close(lock)
    return 0


async def _serve(
    state: State, config: Config, sock: socket.socket, notifier: Notifier, metrics: Endpoint | None, members: list[Forked]
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(_complain)
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    runs = Runs(state, config, members=members)
    adopted = await runs.begin()
    service = Service(state, config, runs)
    service.adopted(adopted)
    listener = Server(sock, service, 2 * config.max_runs_per_user + _MORE_CONNECTIONS)
    loop.add_signal_handler(signal.SIGHUP, _reload, service, notifier)
    listener.start()
    scrapes = None if metrics is None else _scrapes(metrics, runs, state, config)
    beats = None if notifier.watchdog_s is None else loop.create_task(_beat(notifier, notifier.watchdog_s / 2))
    log("info", "ready", version=VERSION, pid=os.getpid(), state=state.path, adopted=len(adopted))
    notifier.tell("READY=1", f"STATUS=serving {state.path}")
    await stop.wait()
    log("info", "stopping", runs=len(runs.records()))
    notifier.tell("STOPPING=1", "STATUS=leaving runs to the next worker")
    if beats is not None:
        beats.cancel()
    if scrapes is not None:
        scrapes.close()
    await listener.close()
    await service.close()
    await runs.close(end=False)
    log("info", "stopped")


def _scrapes(at: Endpoint, runs: Runs, state: State, config: Config) -> Scrapes | None:
    """None where it cannot listen, which is told: anybody may have taken the port, and runs do not wait for it."""
    try:
        made = Scrapes(scrape.listen(at), runs, state, most=config.max_runs, shut_out=process.user(config.door_user).uid)
    except SealnetError as error:
        log("error", "no-metrics", at=at, reason=error.message)
        return None
    made.start()
    log("info", "metrics", at=at)
    return made


def _reload(service: Service, notifier: Notifier) -> None:
    notifier.tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
    try:
        service.reload(request.config())
        log("info", "reloaded")
    except SealnetError as error:
        # What it has is better than nothing.
        log("error", "not-reloaded", reason=error.message)
    notifier.tell("READY=1")


def _complain(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What nobody waited for: on one line, like all else."""
    error = context.get("exception")
    trace = "".join(traceback.format_exception(error))[-380:] if error is not None else None
    log("error", "bug", what=context.get("message"), error=None if error is None else repr(error), trace=trace)


async def _beat(notifier: Notifier, every_s: float) -> None:
    """From the loop that everything waits in: where that hangs, nothing is told."""
    while True:
        notifier.tell("WATCHDOG=1")
        await asyncio.sleep(every_s)


def _gid(config: Config) -> int | None:
    try:
        return grp.getgrnam(config.group).gr_gid
    except KeyError:
        log("warning", "no-group", group=config.group, reason="only root may use the worker; groupadd --system makes it")
        return None
