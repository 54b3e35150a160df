"""Commands through the worker: what `sealnet run` does with a run that is not its own, and the way in for the others."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from sealnet import asking, client
from sealnet.asking import Files
from sealnet.cli import complain
from sealnet.client import Connection, RemoteRun
from sealnet.errors import CannotSeal, SealnetError, UsageError
from sealnet.model import plan as plans


def reach(*, always: bool) -> Connection | None:
    """The worker; or None where there is none, or none that lets us in. Raises UsageError or CannotSeal: it must be there, and is not."""
    return asking.reach(client.path(os.environ), always=always, is_configured=bool(os.environ.get("SEALNET_CONFIG")))


def for_user() -> Connection | None:
    """The worker, for a command that only root can do by itself; None where we are root, or there is no worker for us."""
    return None if os.geteuid() == 0 else reach(always=False)


def needed() -> Connection:
    """The worker, for a command that is about its runs. Raises CannotSeal."""
    where = client.path(os.environ)
    try:
        return Connection(where)
    except OSError as error:
        raise client.unreachable(where, error) from error


def run(
    connection: Connection,
    argv: Sequence[str],
    given: dict[str, Any],
    *,
    report: bool,
    receipt: str | None,
    evidence: str | None,
) -> int:
    """Have the worker run it, and stay with it to its end, as if it were ours; the exit status."""
    from sealnet import terminal
    from sealnet.cli.table import event_lines, tried_lines
    from sealnet.supervise import Signals, Supervisor

    uid, parameters = asking.parameters(argv, given, evidence=evidence is not None)
    with connection, Signals() as signals, contextlib.ExitStack() as held:
        files = Files(receipt, evidence, prefix="--")
        held.callback(files.close)
        own = held.enter_context(terminal.own(terminal.streams(), uid=uid))
        fds = [own.slave if own is not None and fd in own.streams else asking.opened_stream(fd, held) for fd in (0, 1, 2)]
        fds += held.enter_context(asking.opened_paths(given))
        remote = RemoteRun(client.path(os.environ), given["run_id"], grace_s=given.get("grace_s", plans.GRACE_S), tied=True)
        held.callback(remote.close)
        try:
            remote.start(connection, parameters, fds, signals.fd, signals.checkpoint)
        except SealnetError as error:
            files.refused(remote, given, uid, error)
            raise
        started = remote.started or {}
        files.started(remote)
        if own is not None:
            own.spawned()
        status = Supervisor(remote, signals, own).run()
        ended = remote.ended or {}
        try:
            files.ended(remote)
        except CannotSeal as error:
            # The status is the payload's all the same.
            complain(error)
    # Who hears nothing of it has the command's status all the same.
    with contextlib.suppress(OSError):
        if started.get("severed") is not None:
            click.echo(f"sealnet: ran severed, without its broker: {started['severed']}", err=True)
        tell_end(given["run_id"], ended)
        if report:
            if not started.get("cwd_is_shared", True):
                click.echo("sealnet: the working directory was read-only in the run: sealnet itself is in it", err=True)
            tried = [tuple(row.values()) for row in ended["tried"]]
            for line in (*event_lines(ended["events"]), *tried_lines(tried, ended["tally"])):
                click.echo(line, err=True)
    return status


def detached(connection: Connection, argv: Sequence[str], given: dict[str, Any], *, output: str | None) -> int:
    """Start it and leave it alone; its id on stdout."""
    # Now: a payload may be able to write where sealnet itself lies.
    import sealnet.cli.table  # noqa: F401
    from sealnet.kernel.output import emptied

    with connection, contextlib.ExitStack() as held:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        held.callback(os.close, null)
        out = null
        if output is not None:
            out = emptied(output, "--output")
            held.callback(os.close, out)
        _uid, parameters = asking.parameters(argv, given, detach=True, output=None if output is None else os.path.abspath(output))
        fds = [null, out, out, *held.enter_context(asking.opened_paths(given))]
        try:
            connection.send("Run", parameters, fds)
            replies = connection.receive()
            while not replies:
                replies = connection.receive()
        except (OSError, EOFError) as e:
            raise CannotSeal("cannot tell whether the run has started: the worker has gone", hint=f"sealnet wait {given['run_id']}") from e
        started = client.answer(replies[0])["started"]
    if started["severed"] is not None:
        click.echo(f"sealnet: runs severed, without its broker: {started['severed']}", err=True)
    click.echo(started["run_id"])
    return 0


def follow(run_id: str, path: str | None, *, owner: int) -> int:
    """Stay with a run that somebody has started, and print what it writes to `path` meanwhile; its exit status."""
    from sealnet.supervise import Signals, Supervisor

    with Signals() as signals, contextlib.ExitStack() as held:
        remote = RemoteRun(client.path(os.environ), run_id, grace_s=plans.GRACE_S, tied=False)
        held.callback(remote.close)
        remote.attach()
        if path is not None:
            remote.upkeep.follow = held.enter_context(_following(path, owner))
        status = Supervisor(remote, signals, None).run()
        remote.upkeep.serve()
    tell_end(run_id, remote.ended or {})
    return status


@contextlib.contextmanager
def _following(path: str, owner: int) -> Iterator[Callable[[], None]]:
    """Copies what has been added to a file to our standard output, each time it is called.

    It must be a file of the run's owner's: who may read more than that must not be shown what its owner only names.
    """
    hint = "sealnet wait RUN"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        raise UsageError(f"cannot follow the output of the run, {path}: {e.strerror}", hint=hint) from e
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
        os.close(fd)
        raise UsageError(f"cannot follow the output of the run, {path}: it is no file of its owner's", hint=hint)

    def copy() -> None:
        while chunk := os.read(fd, 65536):
            sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()

    try:
        yield copy
    finally:
        os.close(fd)


def tell_end(run_id: str, ended: Mapping[str, Any]) -> None:
    """What is to be said of a run that has ended, beside its status."""
    if ended.get("fault") is not None:
        click.echo(f"sealnet: {ended['fault']}", err=True)
    if ended.get("killed") is not None:
        click.echo(f"sealnet: ended run {run_id}: {ended['killed']}", err=True)
