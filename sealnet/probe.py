"""Whether this host can seal, found out by building a real seal around `true` and taking it away again."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from sealnet.errors import CannotSeal, NoBroker, SealnetError
from sealnet.kernel import cgroup, links, locks, netns
from sealnet.model import names

if TYPE_CHECKING:
    from sealnet.kernel.host import Host
    from sealnet.model.config import Config
    from sealnet.records import State

RETRY_S = 60.0
# Answers for so many ports.
_MOST_KEPT = 64
_PAYLOAD_S = 20.0
_SAID_BYTES = 400
# An ordinary user's payload takes the whole way, setpriv's part of it included.
_USER = "65534"
# linux/in.h. An address may be bound before any link has it.
_IP_FREEBIND = 15

# What follows each checkpoint of a launch; the steps in their order are `look`, these, and `remove`.
_NEXT = {"claimed": "allocate", "allocated": "build", "built": "prove", "proved": "start", "started": "run"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CanSeal:
    """Whether this host can seal; true or false as a bool.

    `step` is the one that failed (`look`, `claim`, `allocate`, `build`, `prove`, `start`, `run`, `remove`), `reason` why, `hint` what to do
    about it; None when it can. `at` is when the seal was tried (seconds since the epoch), `took_ms` how long that took, and `steps` how
    long each step did, in ms.
    """

    ok: bool
    step: str | None = None
    reason: str | None = None
    hint: str | None = None
    took_ms: float
    at: float
    steps: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return self.ok


class Answers:
    """What `attempt` answered, by the port that it was asked for. From any thread: whoever asks meanwhile waits for the one attempt.

    That the host can seal is kept until somebody has reason to `doubt` it: to ask costs a daemon nothing, and every run proves its own
    seal anyway. That it cannot is kept for `RETRY_S` by a clock that nobody sets, so that a host that was mended is found to be. An
    attempt that raises (a bug, ^C) is no answer.
    """

    def __init__(self, attempt: Callable[[int | None], CanSeal], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._attempt, self._clock = attempt, clock
        self._lock = threading.Lock()
        self._kept: dict[int | None, tuple[CanSeal, float]] = {}

    def ask(self, port: int | None = None) -> CanSeal:
        # Before the lock: what is known waits for no attempt at another port, which may be somebody else's.
        if (known := self._known(port)) is not None:
            return known
        with self._lock:
            if (known := self._known(port)) is not None:
                return known
            self._kept.pop(port, None)
            answer = self._attempt(port)
            if len(self._kept) >= _MOST_KEPT:
                # Not the one that is asked for without a port, which is everybody's.
                del self._kept[next(port for port in self._kept if port is not None)]
            self._kept[port] = answer, self._clock()
            return answer

    def _known(self, port: int | None) -> CanSeal | None:
        kept = self._kept.get(port)
        return None if kept is None or not (kept[0].ok or self._clock() - kept[1] < RETRY_S) else kept[0]

    def doubt(self) -> None:
        """A run could not be sealed: what was good until now is tried again by the next who asks."""
        with self._lock:
            self._kept = {port: kept for port, kept in self._kept.items() if not kept[0].ok}

    def forget(self) -> None:
        """The next who asks has it tried again, whatever was found before."""
        with self._lock:
            self._kept.clear()


def run_id(state: State) -> str:
    """The probe's run, one for each state directory: what a killed probe left is found, and never two of them are left."""
    return f"can-seal-{state.tag.replace(':', '-')}"


def attempt(
    ready: Callable[[], tuple[State, Config]], port: int | None = None, *, checkpoint: Callable[[str], None] = lambda _step: None
) -> CanSeal:
    """Build, prove and run one sealed `true`, whose broker is a socket of our own; take it away. A host that cannot is told, not raised.

    `ready` hands out the prepared state directory and the configuration. `port` is the lease's, where a firewall lets in some ports only;
    what listens there already is the broker then. `checkpoint` is told each step of the launch that was done, and may raise to stop there.
    """
    steps = _Steps()
    at, began = time.time(), time.perf_counter()
    step = reason = hint = None
    try:
        state, config = ready()
        with locks.locked(state.path / "probe.lock"):
            _build(state, config, port, steps, checkpoint)
    except (SealnetError, OSError) as error:
        step, (reason, hint) = steps.now, _told(error)
    steps.end()
    took_ms = (time.perf_counter() - began) * 1e3
    return CanSeal(ok=step is None, step=step, reason=reason, hint=hint, took_ms=took_ms, at=at, steps=tuple(steps.took))


class _Steps:
    """Which step we are at, and how long each has taken."""

    def __init__(self) -> None:
        self.now, self._since = "look", time.perf_counter()
        self.took: list[tuple[str, float]] = []

    def begin(self, step: str) -> None:
        self.end()
        self.now = step

    def end(self) -> None:
        now = time.perf_counter()
        self.took.append((self.now, (now - self._since) * 1e3))
        self._since = now


def _told(error: SealnetError | OSError) -> tuple[str, str | None]:
    notes = [f" ({note})" for note in getattr(error, "__notes__", [])]
    if isinstance(error, SealnetError):
        return error.message + "".join(notes), error.hint
    where = f" ({error.filename})" if error.filename else ""
    return f"cannot try a seal: {error.strerror or error}{where}" + "".join(notes), None


def _build(state: State, config: Config, port: int | None, steps: _Steps, checkpoint: Callable[[str], None]) -> None:
    # A host without libnftables' or libseccomp's binding is one that cannot seal, and told like any other.
    from sealnet import reap, request
    from sealnet.kernel.host import Host
    from sealnet.launch import launch
    from sealnet.running import Streams

    own = run_id(state)
    host = Host(state.path, state.tag)
    said = os.memfd_create("sealnet-probe", os.MFD_CLOEXEC)
    # An ephemeral port of the loopback's is one that no wildcard listener holds, nor can take while we do.
    with socket.socket() as held, socket.socket() as broker:
        try:
            # Of a probe that was killed: no other lives while we hold the lock. Looking for what has no trace would take every namespace.
            if _is_left(host, state, own):
                reap.teardown(host, state, own, unless=partial(state.is_held, own))
            if port is None:
                held.bind(("127.0.0.1", 0))
            lease_port = held.getsockname()[1] if port is None else port
            plan = request.plan(["true"], run_id=own, lease_port=lease_port, user=_USER, cwd="/", environ={})

            def passed(step: str) -> None:
                if step == "allocated":
                    _listen(broker, state.read(own).gateway or "", lease_port)
                steps.begin(_NEXT.get(step, steps.now))
                checkpoint(step)

            steps.begin("claim")
            streams = Streams(subprocess.DEVNULL, subprocess.DEVNULL, said)
            with launch(plan, host=host, state=state, config=config, streams=streams, checkpoint=passed) as run:
                try:
                    run.release()
                    status = run.wait(_PAYLOAD_S)
                except TimeoutError:
                    raise CannotSeal(f"cannot run the probe's payload: `true` goes on after {_PAYLOAD_S:g} s") from None
                if status != 0:
                    raise CannotSeal(f"cannot run the probe's payload: `true` ended with status {status}")
                steps.begin("remove")
        except SealnetError as error:
            if words := os.pread(said, _SAID_BYTES, 0).decode(errors="replace").split():
                error.add_note(f"it said: {' '.join(words)}")
            if isinstance(error, NoBroker) and port is None:
                error.add_note("a port that the firewall lets in may be tried: sealnet doctor --lease-port PORT")
            raise
        finally:
            os.close(said)
            host.close()


def _is_left(host: Host, state: State, own: str) -> bool:
    return (
        os.path.lexists(state.directory(own))
        or os.path.lexists(netns.NAMES / names.netns(own))
        or links.see(host.netlink, names.ifname(own)) is not None
        or own in cgroup.run_ids(state.tag)
        or own in state.reservations().values()
    )


def _listen(broker: socket.socket, gateway: str, port: int) -> None:
    """Answer at the lease, on the gateway alone: nobody else sees the port open. The address is the link's later."""
    broker.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
    try:
        broker.bind((gateway, port))
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            # A broker listens on all addresses already: it answers.
            return
        raise
    broker.listen(8)
