"""The Python API for asyncio: `run` for one command, `Sealer` for a program that runs many at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any, TypeVar, Unpack

from sealnet import sealer
from sealnet.interface import CompletedOptions, CompletedRun, LaunchOptions, Word, Worker
from sealnet.model.config import Config
from sealnet.model.receipt import Receipt
from sealnet.model.record import Record
from sealnet.probe import CanSeal
from sealnet.stay import until_end

if TYPE_CHECKING:
    from sealnet.sealer import Launched

T = TypeVar("T")


async def run(argv: Sequence[Word], *, worker: Worker = "auto", **options: Unpack[CompletedOptions]) -> CompletedRun:
    """`sealnet.run`. A task that is cancelled ends its run: it goes on when nothing of that is left."""
    return await Sealer(worker=worker).run(argv, **options)


class Sealer:
    """`sealnet.Sealer`, for any number of tasks. Each run has a thread of its own, and what a task does while it waits holds up none."""

    def __init__(self, *, state_dir: str | os.PathLike[str] | None = None, config: Config | None = None, worker: Worker = "auto") -> None:
        self._sealer = sealer.Sealer(state_dir=state_dir, config=config, worker=worker)

    async def run(self, argv: Sequence[Word], **options: Unpack[CompletedOptions]) -> CompletedRun:
        """Run one sealed command to its end. A task that is cancelled ends its run, at once: it goes on when nothing of that is left."""
        return await _in_thread(lambda stop: self._sealer.run_unless(stop, argv, **options))

    @contextlib.asynccontextmanager
    async def launch(self, argv: Sequence[Word], **options: Unpack[LaunchOptions]) -> AsyncIterator[Run]:
        """Start one sealed command: `async with sealer.launch(...) as run`. However the block ends, nothing of the run is left after it.

        A stream that is subprocess.PIPE becomes a StreamWriter or StreamReader of asyncio's.
        """
        started = Run(asyncio.get_running_loop(), lambda stop: self._sealer.launch_unless(stop, argv, **options))
        try:
            await started.begin()
            yield started
        finally:
            await started.end()

    async def can_seal(self, *, lease_port: int | None = None, again: bool = False) -> CanSeal:
        return await _in_thread(lambda _stop: self._sealer.can_seal(lease_port=lease_port, again=again))

    async def runs(self) -> list[Record]:
        return await _in_thread(lambda _stop: self._sealer.runs())

    async def check(self, run_id: str) -> dict[str, Any]:
        return await _in_thread(lambda _stop: self._sealer.check(run_id))

    async def reap(self, run_id: str) -> bool:
        return await _in_thread(lambda _stop: self._sealer.reap(run_id))

    async def adopt(self) -> list[Run]:
        """As `sealnet.Sealer.adopt`; whoever is done with one of them awaits its `end`."""
        loop = asyncio.get_running_loop()
        adopted = []
        for one in await _in_thread(lambda _stop: self._sealer.adopt()):
            run = Run(loop, lambda _stop, one=one: one)  # type: ignore[misc]
            await run.begin()
            adopted.append(run)
        return adopted

    async def reap_orphans(self) -> list[str]:
        return await _in_thread(lambda _stop: self._sealer.reap_orphans())


class Run:
    """A run that was started, for the tasks of one event loop. Its thread sees to lease and seal, whether or not anybody waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop, start: Callable[[int], Launched]) -> None:
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self.stderr: asyncio.StreamReader | None = None
        self.run_id = ""
        self._loop, self._start = loop, start
        self._transports: list[asyncio.BaseTransport] = []
        self._asked: deque[tuple[Callable[[Launched], Any], asyncio.Future[Any]]] = deque()
        self._receipt: Receipt | None = None
        self._started: asyncio.Future[Launched] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._left: asyncio.Future[None] = loop.create_future()
        self._has_ended = self._is_leaving = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._keep, daemon=True, name="sealnet-run")

    @property
    def receipt(self) -> Receipt:
        """The proof that was made before the payload started."""
        if self._receipt is None:
            raise RuntimeError("the run was not started")
        return self._receipt

    async def wait(self, timeout_s: float | None = None) -> int:
        """The exit status, at the end. Raises TimeoutError; the run then goes on, as it does when the task that waits is cancelled."""
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._ended)

    async def send_signal(self, signum: int) -> bool:
        """To the payload's first process; False when that is gone."""
        return await self._ask(lambda run: run.send_signal(signum))

    async def kill(self) -> None:
        """End every process of the run at once."""
        await self._ask(lambda run: run.kill())

    async def freeze(self, *, frozen: bool) -> None:
        """Halt every process of the run, or let them go on."""
        await self._ask(lambda run: run.freeze(frozen=frozen))

    async def tried(self) -> list[tuple[str, str, int, int]]:
        """(address, protocol, port, packets) of what the payload tried to reach beside its lease."""
        return await self._ask(lambda run: run.tried())

    async def check(self) -> dict[str, Any]:
        """Prove the seal again, now."""
        return await self._ask(lambda run: run.check())

    async def record(self) -> Record:
        """What is written down of it."""
        return await self._ask(lambda run: run.record)

    # For the Sealer

    async def begin(self) -> None:
        self._thread.start()
        run = await asyncio.shield(self._started)
        self.run_id, self._receipt = run.run_id, run.receipt
        if run.stdin is not None:
            transport, protocol = await self._loop.connect_write_pipe(
                lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), run.stdin
            )
            self._transports.append(transport)
            self.stdin = asyncio.StreamWriter(transport, protocol, None, self._loop)
        self.stdout, self.stderr = await self._reader(run.stdout), await self._reader(run.stderr)

    async def _reader(self, pipe: IO[bytes] | None) -> asyncio.StreamReader | None:
        if pipe is None:
            return None
        reader = asyncio.StreamReader()
        transport, _protocol = await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._transports.append(transport)
        return reader

    async def end(self) -> None:
        """Raises what closing the run raises."""
        self._is_leaving = True
        for transport in self._transports:
            transport.close()
        os.eventfd_write(self._wake, 1)
        try:
            await _whatever_happens(self._left)
        finally:
            os.close(self._wake)
        self._left.result()

    async def _ask(self, look: Callable[[Launched], T]) -> T:
        if self._is_leaving:
            raise RuntimeError("the run was closed")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._asked.append((look, answer))
        os.eventfd_write(self._wake, 1)
        return await answer

    # In its thread

    def _keep(self) -> None:
        try:
            run = self._start(self._wake)
        except BaseException as error:  # noqa: BLE001 - it is raised where the run was asked for
            _tell(self._loop, self._started, error=error)
            _tell(self._loop, self._left)
            return
        _tell(self._loop, self._started, run)
        try:
            while not self._is_leaving:
                self._wait(run)
                os.eventfd_read(self._wake)
                self._answer(run)
        finally:
            failed: BaseException | None = None
            try:
                run.close()
            except BaseException as error:  # noqa: BLE001 - it is raised where the block ends
                failed = error
            _tell(self._loop, self._ended, error=RuntimeError("the run was closed"))
            for _look, answer in self._asked:
                _tell(self._loop, answer, error=RuntimeError("the run was closed"))
            _tell(self._loop, self._left, error=failed)

    def _wait(self, run: Launched) -> None:
        """Until something is asked, or the run is to be left."""
        if not self._has_ended:
            try:
                status = until_end(run, stop=self._wake)
            except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
                _tell(self._loop, self._ended, error=error)
            else:
                if status is None:
                    return
                try:
                    run.conclude(status)
                except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
                    _tell(self._loop, self._ended, error=error)
                _tell(self._loop, self._ended, status)
            self._has_ended = True
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.poll()

    def _answer(self, run: Launched) -> None:
        while self._asked:
            look, answer = self._asked.popleft()
            try:
                _tell(self._loop, answer, look(run))
            except BaseException as error:  # noqa: BLE001 - it is raised where it was asked
                _tell(self._loop, answer, error=error)


async def _in_thread(call: Callable[[int], T]) -> T:
    """What `call` returns or raises, in a thread of its own; the descriptor that it gets is readable when the task is cancelled."""
    loop = asyncio.get_running_loop()
    told: asyncio.Future[T] = loop.create_future()
    stop = os.eventfd(0, os.EFD_CLOEXEC)

    def work() -> None:
        try:
            _tell(loop, told, call(stop))
        except BaseException as error:  # noqa: BLE001 - it is raised in the task
            _tell(loop, told, error=error)

    try:
        threading.Thread(target=work, daemon=True, name="sealnet-call").start()
        try:
            return await asyncio.shield(told)
        except asyncio.CancelledError as cancelled:
            os.eventfd_write(stop, 1)
            await _whatever_happens(told)
            raise cancelled from told.exception()
    finally:
        os.close(stop)


async def _whatever_happens(future: asyncio.Future[Any]) -> None:
    """Return when it is done, and not before: what is on its way out must not be left half done. Raises CancelledError then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any = None, *, error: BaseException | None = None) -> None:
    # The loop may be closed: then nobody is left to be told.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(partial(_settle, future, result, error))


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        # Nobody need ask.
        future.exception()
