"""One launch of the worker's: from a plan to a payload that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sealnet.doors import Door, Doorkeeper
from sealnet.errors import SealnetError
from sealnet.evidence import Evidence
from sealnet.kernel.host import Host
from sealnet.kernel.netns import Visit
from sealnet.kernel.output import Sink, Sinks
from sealnet.launch import launch
from sealnet.model.config import Config
from sealnet.model.durable import Durable
from sealnet.model.plan import Plan, User
from sealnet.records import State
from sealnet.running import Run, Streams, Ways


def start(
    plan: Plan,
    *,
    host: Host,
    state: State,
    config: Config,
    streams: Streams,
    durable: Durable | None,
    checkpoint: Callable[[str], None],
    rights: User | None,
    ways: Ways,
    door: Callable[[User, Plan], Doorkeeper] = lambda user, _plan: Door(user),
    evidence: Evidence | None = None,
    refused_to: Sink | None = None,
) -> Run:
    """Launch a run and let its payload go; of one that is durable nothing is kept that only a launch needs.

    Raises SealnetError: nothing of it ran and nothing is left. `evidence` is closed then, else at the end of the run.
    """
    try:
        run = launch(
            plan,
            host=host,
            state=state,
            config=config,
            streams=streams,
            durable=durable,
            checkpoint=checkpoint,
            receipt_to=Sinks(*(sink for sink in (evidence, refused_to) if sink is not None)),
            rights=rights,
            ways=ways,
            door=door,
        )
    except BaseException as error:
        if evidence is not None:
            evidence.__exit__(None, error, None)
        raise
    run.receipt_to = evidence
    if evidence is not None:
        run.before_end, run.at_end = evidence.finish, evidence.close
    try:
        run.release()
        if durable is not None and run.starter is not None:
            # Nothing needs its threads any more; what dies with its parent dies with one of them.
            run.starter.close()
            if run.inside is not None and run.seal_stands:
                inside, run.inside = run.inside, Visit(run.inside.fd)
                inside.close()
        # They stand in the record's receipt, and there are a thousand runs, each of which may have been asked for in a megabyte.
        if evidence is None:
            run.checks.clear()
            run.plan = replace(run.plan, argv=run.plan.argv[:1], environment={})
            run.spawned.args = ()
    except BaseException as error:
        try:
            run.close()
        except SealnetError as left:
            error.add_note(str(left))
        raise
    return run
