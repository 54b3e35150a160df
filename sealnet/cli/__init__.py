"""The command line: a group whose subcommands are imported when they are used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from sealnet.errors import SealnetError, UsageError

COMMANDS = {
    "run": "Run a command with no network but its broker.",
    "build": "Build an image whose RUN steps have the network of a run.",
    "plan": "Freeze what a run may do, for a reviewer to read.",
    "ls": "List the runs on this host.",
    "top": "Watch the runs on this host.",
    "inspect": "Show one run: record, counters, what it tried to reach.",
    "check": "Prove a live run's seal again.",
    "log": "What a run's proxy let through and what it denied.",
    "evidence": "Whether every one of many runs was enforced, by their bundles.",
    "wait": "Wait for a run of the worker's, and exit as it does.",
    "attach": "Follow a run that was started with --detach.",
    "kill": "Send a signal to a run of the worker's.",
    "reap": "Take runs away.",
    "doctor": "Can this host seal? Each requirement, found, fix.",
    "host": "Keep this host's network managers off the links of runs.",
    "demo": "Show a sealed run and the ways out of it that fail.",
    "attack": "Try every way out of a seal, on this kernel.",
    "worker": "Run sealed commands for callers that are not root.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"sealnet.cli.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"sealnet.cli.{cmd_name} has no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        from sealnet import __version__

        click.echo(f"sealnet {__version__}")
        ctx.exit()


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version.")
@click.pass_context
def cli(ctx: click.Context, as_json: bool) -> None:
    """Run commands that you do not trust in bubblewrap, with no network but one door.

    \b
    sealnet run -- pytest                               nothing is reachable
    sealnet run --lease-port 8080 -- ./agent            one port of this host is, as http://broker.sealnet:8080
    sealnet demo                                        see it work
    """
    ctx.obj = as_json


_Command = TypeVar("_Command", bound=Callable[..., Any])


def once(*declarations: str, **attributes: Any) -> Callable[[_Command], _Command]:
    """An option with one value: given twice it is refused, for one of the two would be ignored."""

    def only(_ctx: click.Context, param: click.Parameter, values: tuple[Any, ...]) -> Any:
        if len(values) > 1:
            raise UsageError(f"cannot use {param.opts[0]} twice: it has one value")
        return values[0] if values else None

    return click.option(*declarations, multiple=True, callback=only, **attributes)


def json_option(function: _Command) -> _Command:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(function)


def wants_json(ctx: click.Context, as_json: bool) -> bool:
    """--json may stand before or after the command's name."""
    return as_json or bool(ctx.obj)


def main() -> None:
    """Entry point; an error is one line and a hint on stderr, and its exit status."""
    try:
        status = cli.main(prog_name="sealnet", standalone_mode=False)
    except SealnetError as error:
        sys.exit(complain(error))
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    # click before 8.2 has none, and prints the help itself.
    except getattr(click.exceptions, "NoArgsIsHelpError", ()) as error:
        print(error.format_message(), file=sys.stderr)
        sys.exit(2)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"\n  hint: {context.command_path} --help" if context is not None else ""
        print(f"sealnet: {error.format_message()}{hint}", file=sys.stderr)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone; say nothing, but do not claim success.
        sys.stderr.close()
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)


def complain(error: SealnetError) -> int:
    """Print an error the way every command does; its exit status. What it quotes may be a plan's or a payload's."""
    from sealnet.cli.table import clean

    lines = [f"sealnet: {error.message}"]
    lines += [f"  note: {note}" for note in getattr(error, "__notes__", [])]
    lines += [f"  hint: {error.hint}"] if error.hint else []
    print("\n".join(map(clean, lines)), file=sys.stderr)
    return error.exit_status
