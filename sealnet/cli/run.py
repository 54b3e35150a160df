"""`sealnet run`."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import click

from sealnet.cli import complain, once, wants_json
from sealnet.cli.options import plan_options
from sealnet.cli.options import request as asked
from sealnet.errors import CannotSeal, CannotTearDown, UsageError


@click.command(
    "run",
    short_help="Run a command with no network but its broker.",
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS] [--]",
    epilog="""
    \b
    Exit status: the command's own; 128+n when signal n ended it; 124 timeout; 125 sealnet failed and nothing ran;
    126 not executable; 127 not found; 2 usage.

    \b
    Examples:
      sealnet run -- pip --version
      sealnet run --lease-port 8080 --broker-env ANTHROPIC_BASE_URL -- ./agent
      sealnet run --lease-port 8080 --user build --timeout 600 -- make test
      sealnet run --receipt /var/tmp/seal.json -- ./untrusted && jq .wording /var/tmp/seal.json
      sealnet run --plan plan.lock.json --evidence /var/tmp/evidence
    """,
)
@once("--run-id", metavar="ID", help="Name of the run. Default: a new ULID.")
@plan_options
@once("--receipt", metavar="FILE", help="Write the proof that the seal held when the command started, as JSON; see docs/receipt.md.")
@once("--evidence", metavar="DIR", help="Write plan, proof, what went out and what was refused there, as files; see docs/evidence.md.")
@once("--plan", "plan_file", metavar="FILE", help="Take everything from a frozen plan; whatever differs is refused.")
@click.option("--dry-run", is_flag=True, help="Print the plan and the rulesets; change nothing.")
@once("--worker", metavar="auto|always|never", help="Let the worker run it: where there is one (default), always, or never.")
@click.option("--detach", is_flag=True, help="Have the worker start it, print its id, and leave it; see wait, attach, kill.")
@once("--output", metavar="FILE", help="With --detach: where its output goes. Default: nowhere.")
@click.option("--report", is_flag=True, help="After the end, list on stderr what was done to the seal and what the command tried.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON document.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="COMMAND [ARG]...")
@click.pass_context
def command(ctx: click.Context, /, argv: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Run COMMAND in bubblewrap, in a network namespace of its own in which one TCP port of this host answers, or nothing.

    The working directory is writable, the rest of the file system read-only, /tmp, /run and /dev are private.
    """
    worker = "auto" if (worker := options.pop("worker")) is None else worker
    dry_run, report = options.pop("dry_run"), options.pop("report")
    receipt, evidence = options.pop("receipt"), options.pop("evidence")
    detach, output = options.pop("detach"), options.pop("output")
    for option, path in (("--receipt", receipt), ("--evidence", evidence)):
        if path == "":
            raise UsageError(f"cannot use {option} '': it names no file", hint=f"{option} /var/tmp/{option[2:]}")
    if dry_run and (report or receipt is not None or evidence is not None):
        raise UsageError(
            "cannot use --report, --receipt or --evidence with --dry-run: there is no run to tell of", hint="leave --dry-run out"
        )
    if output is not None and not detach:
        raise UsageError("cannot use --output without --detach: the output is the command's own", hint="> FILE")
    if detach and (dry_run or report or receipt is not None or evidence is not None):
        raise UsageError("cannot use --detach with --dry-run, --report, --receipt or --evidence: nobody is there at the end to write them")
    if detach and worker == "never":
        raise UsageError("cannot use --detach with --worker never: it is the worker that stays with the run")
    if worker not in ("auto", "always", "never"):
        raise UsageError(f"cannot use --worker {worker!r}: it is one of auto, always, never", hint="--worker auto")
    connection = None
    if not dry_run and (detach or worker == "always" or (worker == "auto" and _may_have_worker())):
        from sealnet.cli import remote

        connection = remote.reach(always=detach or worker == "always")
    if connection is not None:
        with connection:
            if wants_json(ctx, as_json):
                raise UsageError("cannot use --json with run: its output is the command's own", hint="--json goes with --dry-run")
            words, given = _request(argv, options)
            if detach:
                return remote.detached(connection, words, given, output=output)
            return remote.run(connection, words, given, report=report, receipt=receipt, evidence=evidence)
    plan = _plan(argv, options)
    if dry_run:
        from sealnet.cli.dry_run import show

        return show(plan, as_json=wants_json(ctx, as_json))
    if wants_json(ctx, as_json):
        raise UsageError("cannot use --json with run: its output is the command's own", hint="--json goes with --dry-run")
    return supervised(plan, report=report, receipt=receipt, evidence=evidence)


def _may_have_worker() -> bool:
    """Whether it is worth its imports to try."""
    return os.path.exists(f"{os.environ.get('SEALNET_STATE_DIR') or '/run/sealnet'}/worker.sock")


def _plan(argv: tuple[str, ...], options: dict[str, Any]) -> Any:
    from sealnet import request

    given, run_id, file = asked(options), options["run_id"], options["plan_file"]
    if run_id is not None:
        given["run_id"] = run_id
    return request.plan(argv, **given) if file is None else request.frozen_plan(file, argv, given)


def _request(argv: tuple[str, ...], options: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The command and the arguments of `sealnet.request.plan`, for somebody else to make the plan of."""
    given, run_id, file = asked(options), options["run_id"], options["plan_file"]
    if run_id is not None:
        given["run_id"] = run_id
    if file is None:
        return argv, given
    from sealnet import request

    plan, meant = request.frozen_request(file, argv, given)
    return plan.argv, meant


def supervised(plan: Any, *, report: bool, receipt: str | None, evidence: str | None) -> int:
    """Launch what a plan says and stay with it to its end; the exit status."""
    from sealnet import caller, reap, request, terminal
    from sealnet import launch as launching

    # All of it before the payload: that may be able to write where sealnet itself lies (a checkout that it works in).
    from sealnet.cli.table import event_lines, tried_lines
    from sealnet.kernel.host import Host
    from sealnet.kernel.output import Output, Sink, Sinks
    from sealnet.model import tally
    from sealnet.records import State
    from sealnet.supervise import Signals, Supervisor

    caller.require_root(f"run {plan.argv[0]}", f"sealnet {'build' if plan.build else 'run'} ...")
    with Signals() as signals, contextlib.ExitStack() as given:
        sinks: list[Sink] = [Output(receipt, "--receipt")] if receipt is not None else []
        bundle = None
        if evidence is not None:
            from sealnet.evidence import Evidence

            bundle = given.enter_context(Evidence(evidence, "--evidence", plan))
            sinks.append(bundle)
        state, config = State(), request.config()
        launching.to_hide(plan, state)
        state.prepare()
        host = Host(state.path, state.tag)
        try:
            reap.reap_orphans(host, state)
        except CannotTearDown as error:
            # Another run's leftovers must not keep this one from running; its own subnet is chosen beside them.
            complain(error)
        own = given.enter_context(terminal.own(terminal.streams(), uid=plan.user.uid))
        run = launching.launch(
            plan,
            host=host,
            state=state,
            config=config,
            streams=_streams(own),
            checkpoint=signals.checkpoint,
            receipt_to=Sinks(*sinks),
        )
        if bundle is not None:
            run.before_end = bundle.finish
        status = None
        try:
            if own is not None:
                own.spawned()
            status = Supervisor(run, signals, own).run()
            found = run.counted_attempts() if report else None
        finally:
            try:
                run.close(status)
            except (CannotTearDown, CannotSeal) as error:
                # The status is the payload's all the same; the record stays, so that reap can be tried again.
                complain(error)
    # Who hears nothing of it has the command's status all the same.
    with contextlib.suppress(OSError):
        if run.record.why_severed is not None:
            click.echo(f"sealnet: ran severed, without its broker: {run.record.why_severed}", err=True)
        if run.killed is not None:
            click.echo(f"sealnet: ended run {run.run_id}: {run.killed}", err=True)
        if report:
            if not plan.cwd_is_shared:
                click.echo("sealnet: the working directory was read-only in the run: sealnet itself is in it", err=True)
            told = tally.told(tally.counted(run.record.confinement, found), run.record.events)
            for line in (*event_lines(run.record.events), *tried_lines(() if found is None else found.rows, told)):
                click.echo(line, err=True)
    return status


def _streams(own: Any) -> Any:
    """The caller's streams, and for those that are terminals the run's own."""
    from sealnet.running import Streams

    if own is None:
        return Streams()
    slaves = [own.slave if fd in own.streams else None for fd in (0, 1, 2)]
    return Streams(slaves[0], slaves[1], slaves[2], controlling_terminal=own.controlling, console=own.console)
