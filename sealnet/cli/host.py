"""`sealnet host`: what is installed beside a host's network managers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sealnet.cli import complain, json_option, wants_json
from sealnet.errors import SealnetError, UsageError

if TYPE_CHECKING:
    from sealnet.manners import Change, Reload, Skipped

SCHEMA = "sealnet.host/1"

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _options(function: _Command) -> _Command:
    root = click.option("--root", metavar="DIR", default="/", help="The host's file system is below DIR: for builds of images.")
    dry_run = click.option("--dry-run", is_flag=True, help="Show each path and content; change nothing.")
    reload = click.option("--reload", is_flag=True, help="Let the managers that run read their files again.")
    return root(dry_run(reload(json_option(function))))


@click.group("host", short_help="Keep this host's network managers off the links of runs.")
def command() -> None:
    """Keep this host's network managers off the links of runs (names seal*).

    \b
    sealnet host install --dry-run                      what would be written, and where
    sealnet host install --reload                       firewalld lets in the ports of doors from the links, and nothing else
    sealnet host install --lease-port 8080 --reload     and that port
    sealnet host install --root ./image --all           for an image, whichever managers it will have
    sealnet host remove --reload                        take all of it away
    """


@command.command("install", short_help="Write what keeps them off.")
@click.option(
    "--lease-port",
    "ports",
    type=click.IntRange(1, 65535),
    multiple=True,
    metavar="PORT",
    help="A port that firewalld lets in from the links (repeatable), beside those of doors and those given before.",
)
@click.option("--all", "everything", is_flag=True, help="For managers that are not on this host, too.")
@_options
@click.pass_context
def install(ctx: click.Context, ports: tuple[int, ...], everything: bool, root: str, dry_run: bool, reload: bool, as_json: bool) -> int:
    """Write a small file for each network manager on this host: systemd-networkd, NetworkManager, udev, and firewalld.

    The first three leave the links of runs alone then. firewalld gets a zone of its own for them, which refuses all but the
    ports that --lease-port has named and those of doors (door_ports in /etc/sealnet/config.toml, below DIR where that is given).
    Files that sealnet did not write are never overwritten.

    Exit 2: such a file is in the way, and nothing was written; 125: DIR is missing, or a file cannot be written, or a reload failed.

    \b
    sealnet host install --dry-run
    sealnet host install --lease-port 8080 --lease-port 9090 --reload
    """
    from sealnet import manners, request

    root = os.path.abspath(root)
    _refuse(root, dry_run=dry_run, reload=reload)
    doors = request.config().door_ports if root == "/" else manners.door_ports(root)
    changes, skipped = manners.install(root, ports=ports, doors=doors, everything=everything, dry_run=dry_run)
    return _finish(ctx, changes, skipped, root=root, dry_run=dry_run, reload=reload, as_json=as_json)


@command.command("remove", short_help="Take it away.")
@_options
@click.pass_context
def remove(ctx: click.Context, root: str, dry_run: bool, reload: bool, as_json: bool) -> int:
    """Take away every file that `sealnet host install` has written. Others are left alone, also where they have the same name.

    \b
    sealnet host remove --reload
    """
    from sealnet import manners

    root = os.path.abspath(root)
    _refuse(root, dry_run=dry_run, reload=reload)
    changes = manners.remove(root, dry_run=dry_run)
    if not changes and not wants_json(ctx, as_json):
        click.echo("nothing to remove")
    return _finish(ctx, changes, [], root=root, dry_run=dry_run, reload=reload, as_json=as_json)


def _refuse(root: str, *, dry_run: bool, reload: bool) -> None:
    if reload and dry_run:
        raise UsageError("cannot use --reload with --dry-run: nothing is changed then")
    if reload and root != "/":
        raise UsageError("cannot use --reload with --root: the managers that run are this host's")


def _finish(
    ctx: click.Context, changes: Sequence[Change], skipped: Sequence[Skipped], *, root: str, dry_run: bool, reload: bool, as_json: bool
) -> int:
    """Let the managers read again, when asked; tell what was done, or would be."""
    from sealnet import manners

    behind = manners.managers_of(changes) if root == "/" and not dry_run else []
    reloads = [manners.reload(manager) if reload else manners.Reload(manager.name, manager.reload) for manager in behind]
    if wants_json(ctx, as_json):
        told = {
            "schema": SCHEMA,
            "root": root,
            "dry_run": dry_run,
            "files": [change._asdict() for change in changes],
            "skipped": [one._asdict() for one in skipped],
            "reload": [one._asdict() for one in reloads],
        }
        click.echo(json.dumps(told, indent=1))
    else:
        for line in [
            *_lines(changes, root, dry_run=dry_run),
            *_reload_lines(reloads),
            *[f"skipped       {left.manager}: {left.why}" for left in skipped],
        ]:
            click.echo(line)
    faults = [SealnetError(f"cannot reload {one.manager}: {one.fault}", hint=" ".join(one.command)) for one in reloads if one.fault]
    return max((complain(fault) for fault in faults), default=0)


_WOULD = {
    "new": "would write",
    "changed": "would change",
    "removed": "would remove",
    "kept": "kept",
    "unchanged": "unchanged",
    "unseen": "not seen",
}
_BECAUSE = {"kept": ", which sealnet did not write", "unseen": ", for that takes root"}


def _lines(changes: Sequence[Change], root: str, *, dry_run: bool) -> Iterator[str]:
    from sealnet import manners

    for change in changes:
        word = _WOULD[change.state] if dry_run else change.state
        yield f"{word:<12}  {manners.below(root, change.path)}{_BECAUSE.get(change.state, '')}"
        if dry_run:
            yield from (f"    {line}".rstrip() for line in change.text.splitlines())


def _reload_lines(reloads: Sequence[Reload]) -> Iterator[str]:
    for one in reloads:
        if one.state == "due":
            yield f"then          {' '.join(one.command)}"
        elif one.state != "failed":
            yield f"{one.state:<12}  {one.manager}"
