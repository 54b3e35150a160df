"""`sealnet build`."""

from __future__ import annotations

from typing import Any

import click

from sealnet.cli import once
from sealnet.cli.options import PORT, SECONDS
from sealnet.cli.run import supervised


@click.command(
    "build",
    short_help="Build an image whose RUN steps have the network of a run.",
    context_settings={"allow_interspersed_args": False},
    epilog="""
    \b
    Exit status: buildah's own; 128+n when signal n ended it; 124 timeout; 125 sealnet failed and nothing ran; 2 usage.

    \b
    Examples:
      sealnet build -- -t localhost/app .
      sealnet build --allow pypi.org --allow files.pythonhosted.org -- -t localhost/app -f Containerfile .
      sealnet build --lease-port 8080 --receipt /var/tmp/seal.json -- --build-arg VERSION=3 --pull-never .
    """,
)
@once("--run-id", metavar="ID", help="Name of the run. Default: a new ULID.")
@once("--lease-port", type=PORT, metavar="PORT", help="A broker listens on this host at this TCP port: sealed.")
@once("--broker", metavar="TARGET", help="A broker at tcp:HOST:PORT or unix:/PATH, which a relay leads to: sealed.")
@click.option("--allow", multiple=True, metavar="HOST[:PORT]", help="A host that a proxy leads to; port 443 by default. Repeatable.")
@click.option("--allow-private", multiple=True, metavar="HOST:PORT", help="The same, and its name may mean a private address. Repeatable.")
@once("--timeout", type=SECONDS, metavar="SECONDS", help="End the build after that time, status 124.")
@once("--receipt", metavar="FILE", help="Write the proof that the seal held when the builder started, as JSON; see docs/receipt.md.")
@once("--evidence", metavar="DIR", help="Write plan, proof, what went out and what was refused there, as files; see docs/evidence.md.")
@click.option("--no-preflight", is_flag=True, help="Start even when the broker or a declared host does not answer.")
@click.option("--report", is_flag=True, help="After the end, list on stderr what was done to the seal and what the build tried.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[BUILDAH-BUD-OPTIONS] CONTEXT")
def command(words: tuple[str, ...], **options: Any) -> int:
    """Build an image with buildah in a network namespace of its own, in which one TCP port of this host answers, or nothing.

    RUN steps, and buildah itself, reach the broker, or declared hosts through the run's proxy. What a Dockerfile says of proxies and
    networks changes nothing of that. See docs/builds.md for what is and is not covered.
    """
    from sealnet import request

    report, receipt, evidence = options.pop("report"), options.pop("receipt"), options.pop("evidence")
    options["preflight"], options["timeout_s"] = not options.pop("no_preflight"), options.pop("timeout")
    return supervised(request.build_plan(words, **options), report=report, receipt=receipt, evidence=evidence)
