"""The command line: a group whose subcommands are imported when they are used."""

from __future__ import annotations

import errno
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from sealnet.errors import CannotSeal, SealnetError, UsageError

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


_CANNOT_WRITE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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
    if as_json and ctx.invoked_subcommand in COMMANDS:
        _refuse_json(ctx.invoked_subcommand)


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
        sys.exit(complain(UsageError(_told(error), hint=f"{'sealnet' if context is None else context.command_path} --help")))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except OSError as error:
        # Of a print: whoever has opened a file knows its name, and says it.
        if error.filename is not None or error.errno not in _CANNOT_WRITE:
            raise
        if error.errno != errno.EPIPE:
            sys.exit(complain(SealnetError(f"cannot write the output: {error.strerror}", hint="see whether there is room: df")))
        # Whoever read our output has gone; say nothing, but do not claim success.
        sys.stderr.close()
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)


def _general_hint(error: SealnetError) -> str:
    """Where to look, for an error that does not say more."""
    return "see what this host lacks: sealnet doctor" if isinstance(error, CannotSeal) else f"{_asked()} --help"


def _asked() -> str:
    """The command that was given, as far as it is one: its help says what may be asked."""
    return next((f"sealnet {word}" for word in sys.argv[1:] if word in COMMANDS), "sealnet")


def _told(error: click.ClickException) -> str:
    """What click has found wrong with the command line, in the words of all other errors."""
    if isinstance(error, click.NoSuchOption):
        near = f" (is it {' or '.join(error.possibilities)}?)" if error.possibilities else ""
        return f"cannot use {error.option_name}: there is no such option{near}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"cannot go on without {error.param.metavar or error.param.opts[0]}: it is missing"
    if isinstance(error, click.BadParameter) and error.param is not None:
        return f"cannot use {error.param.opts[0]}: {error.message.rstrip('.')}"
    if isinstance(error, click.BadOptionUsage):
        return f"cannot use {error.option_name}: {error.message.rstrip('.')}"
    return f"cannot read the command line: {error.format_message().rstrip('.')}"


def _refuse_json(name: str) -> None:
    """`sealnet --json NAME`, where that prints nothing that could be JSON."""
    command = importlib.import_module(f"sealnet.cli.{name}").command
    takes = [param.opts for one in (command, *getattr(command, "commands", {}).values()) for param in one.params]
    if not any("--json" in opts for opts in takes):
        raise UsageError(f"cannot use --json with {name}: it prints no document", hint=f"sealnet {name} --help")


def complain(error: SealnetError) -> int:
    """Print an error the way every command does; its exit status. What it quotes may be a plan's or a payload's."""
    from sealnet.cli.table import clean

    lines = [f"sealnet: {error.message}"]
    lines += [f"  note: {note}" for note in getattr(error, "__notes__", [])]
    lines.append(f"  hint: {error.hint or _general_hint(error)}")
    print("\n".join(map(clean, lines)), file=sys.stderr)
    return error.exit_status
