"""A process of the worker's crew: it launches and ends runs, beside the worker's own interpreter, which runs one thread at a time.

`python -I -m sealnet.worker.member FD WORKER STATE` is the first of them, where the worker has not forked that (`sealnet.worker.first`).
All of them end with the process WORKER.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from typing import Any

from sealnet import ended as ends
from sealnet.ended import Ended
from sealnet.errors import Interrupted
from sealnet.kernel import identity, libc, messages
from sealnet.model.version import VERSION
from sealnet.records import State
from sealnet.running import Run, Streams
from sealnet.worker import ending, handover, launching
from sealnet.worker.handover import TAKEN, Code, End, Gone, Launch, Launched, Refused
from sealnet.worker.log import log
from sealnet.worker.shared import SharedHost

# What top(1) and ps(1) call each of them.
NAME = "sealnet-crew"
_CODE_S = 5.0
_MOST_CODES = 4096
# Once nothing has begun or ended for so long, what was allocated meanwhile is given back.
_RESTS_MS = 1000


class _Last:
    """The last receipt that was written."""

    path = "receipt"

    def __init__(self) -> None:
        self.data: bytes | None = None

    def write(self, data: bytes) -> None:
        self.data = data

    def is_there(self) -> bool:
        return True


class Member:
    """Each connection that comes over `control` is served by a thread of its own: one order after the other."""

    def __init__(self, state: State, control: socket.socket) -> None:
        self._state, self._control = state, control
        self._host = SharedHost(state.path, state.tag)
        # The bwraps that were started here, for the worker to be told how they end: nobody else can wait for them.
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._codes: dict[int, int] = {}

    def serve(self) -> None:
        """Until the worker has no use for it any more."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda _signum, _frame: None)
        threading.excepthook = lambda told: complain(told.exc_value)
        own = os.pidfd_open(os.getpid())
        messages.send(self._control, pickle.dumps((VERSION, os.getpid())), [own])
        os.close(own)
        poller = select.poll()
        for fd in (self._control.fileno(), woken):
            poller.register(fd, select.POLLIN)
        has_worked = False
        while True:
            ready = {fd for fd, _ in poller.poll(_RESTS_MS if has_worked else None)}
            has_worked = bool(ready)
            if not has_worked:
                libc.give_back_memory()
            if woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                self._reap()
            if self._control.fileno() in ready:
                try:
                    _data, fds = messages.receive(self._control)
                except (EOFError, ConnectionResetError):
                    return
                except OSError:
                    # No descriptor is left: who has asked sees its own end closed.
                    continue
                for fd in fds:
                    connection = socket.socket(fileno=fd)
                    try:
                        threading.Thread(target=self._obey, args=(connection,), name="sealnet-orders", daemon=True).start()
                    except RuntimeError:
                        connection.close()

    def _obey(self, connection: socket.socket) -> None:
        """Once a connection ends, nothing goes on that was asked for over it."""
        with connection:
            try:
                while True:
                    data, fds = messages.receive(connection)
                    # From the worker: nobody else has the other end.
                    order = pickle.loads(data)  # noqa: S301
                    if isinstance(order, Launch):
                        self._launch(connection, order, fds)
                    else:
                        messages.send(connection, pickle.dumps(self._answer(order, fds)))
            except (EOFError, OSError):
                # The worker has gone, or does without: it sees the end of the connection.
                return
            finally:
                self._host.forget()

    def _answer(self, order: object, fds: list[int]) -> Gone | int | None:
        """None: it could not be done."""
        try:
            if isinstance(order, End):
                return self._end(order, fds)
            return self._code(order.pid) if isinstance(order, Code) else None
        except Exception as error:  # noqa: BLE001 - what is wrong with one run is no other's trouble; the worker does it itself
            complain(error)
            return None

    def _launch(self, connection: socket.socket, order: Launch, fds: list[int]) -> None:
        def checkpoint(_step: str) -> None:
            # UNWANTED, or there is no worker any more.
            if _is_readable(connection):
                raise Interrupted(signal.SIGTERM)

        receipt = _Last()
        try:
            stdin, stdout, stderr = (subprocess.DEVNULL if at is None else fds[at] for at in order.streams)
            run = launching.start(
                order.plan,
                host=self._host,
                state=self._state,
                config=order.config,
                streams=Streams(stdin, stdout, stderr, order.controlling_terminal, order.console),
                durable=order.durable,
                checkpoint=checkpoint,
                rights=order.rights,
                ways=order.ways,
                refused_to=receipt,
            )
        except Exception as error:  # noqa: BLE001 - it is the worker's to say what it means
            messages.send(connection, pickle.dumps(Refused(error=handover.told(error), receipt=receipt.data)))
        else:
            self._hand_over(connection, run)
        finally:
            # Last: it may wait for whoever has passed them.
            for fd in fds:
                os.close(fd)

    def _hand_over(self, connection: socket.socket, run: Run) -> None:
        process = run.spawned
        # Whoever had its pid before is nobody's to ask about any more.
        self._codes.pop(process.pid, None)
        self._children[process.pid] = process
        try:
            messages.send(connection, pickle.dumps(Launched(record=run.record)), handover.descriptors(run))
            while (word := connection.recv(1)) != TAKEN:
                if not word:
                    raise EOFError
        except BaseException:
            # Nobody has it.
            self._children.pop(process.pid, None)
            run.close()
            raise
        run.leave()
        # It may have ended before it was there to be waited for.
        if process.poll() is not None:
            self._ended(process)

    def _end(self, order: End, fds: list[int]) -> Gone:
        run = handover.take(self._host, self._state, order.config, order.record, fds)

        def keep(end: Ended) -> None:
            # A full /run keeps nobody from being told now.
            with contextlib.suppress(OSError):
                ends.keep(self._state, end)

        try:
            ended = ending.finish(run, order.ended, keep)
        finally:
            run.let_go()
        return Gone(tried=ended.tried, counted=ended.counted, fault=ended.fault)

    # How what was started here has ended

    def _code(self, pid: int) -> int | None:
        process = self._children.get(pid)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_CODE_S)
                self._ended(process)
        return self._codes.pop(pid, None)

    def _reap(self) -> None:
        """Wait for those that have ended. What a launch has started is its own to wait for until it is handed over."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            if (known := self._children.get(found.si_pid)) is None:
                break
            known.wait()
            self._ended(known)
        # It is a launch's, and as long as that does not wait for it no other is seen.
        for process in list(self._children.values()):
            if process.poll() is not None:
                self._ended(process)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        # The oldest go; other threads take theirs out meanwhile.
        for oldest in list(self._codes)[: max(0, len(self._codes) - _MOST_CODES + 1)]:
            self._codes.pop(oldest, None)
        # In this order: somebody may ask meanwhile.
        self._codes[process.pid] = process.returncode
        self._children.pop(process.pid, None)


def complain(error: BaseException | None) -> None:
    log("error", "bug", what="in the crew", error=repr(error), trace="".join(traceback.format_exception(error))[-380:])


def _is_readable(connection: socket.socket) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))


def main() -> None:
    if len(sys.argv) != 4 or not all(word.isdecimal() for word in sys.argv[1:3]):
        sys.exit("usage: sealnet.worker.member FD WORKER STATE")
    control, state = socket.socket(fileno=int(sys.argv[1])), State(sys.argv[3])
    identity.die_with(int(sys.argv[2]))
    gc.collect()
    gc.freeze()
    serve(control, state)


def serve(control: socket.socket, state: State) -> None:
    """The first of them: fork a member for each connection that comes over `control`, until its other end is closed."""
    identity.call_itself(NAME)
    # Members that have ended are waited for by nobody.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    first = os.getpid()
    while True:
        try:
            _data, fds = messages.receive(control)
        except (EOFError, ConnectionResetError):
            return
        except OSError:
            continue
        # Where there can be none more, the worker sees that its other end is closed: those that there are go on.
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                _live(state, control, fds, first)
        for fd in fds:
            os.close(fd)


def _live(state: State, control: socket.socket, fds: list[int], first: int) -> Any:
    """In a member; it does not come back."""
    try:
        identity.die_with(first)
        control.close()
        Member(state, socket.socket(fileno=fds[0])).serve()
    except BaseException as error:  # noqa: BLE001 - what the first of them is for goes on elsewhere
        complain(error)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
