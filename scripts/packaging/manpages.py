#!/usr/bin/python3
"""Writes the manual pages, sealnet.1 and one of each command, from the command line's own help.

usage: scripts/packaging/manpages.py DIRECTORY
"""

from __future__ import annotations

import datetime
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import click  # noqa: E402

from sealnet import __version__  # noqa: E402
from sealnet.cli import COMMANDS, cli  # noqa: E402

FILES = (
    (
        "/etc/sealnet/config.toml",
        "Configuration, optional; /usr/share/doc/sealnet/examples/config.toml has every key. $SEALNET_CONFIG names another.",
    ),
    ("/run/sealnet", "The runs that are live, for root alone. $SEALNET_STATE_DIR moves it."),
    ("/usr/share/doc/sealnet", "Threat model, design, operations and the other pages."),
)
STATUS = (
    ("0", "Done. Of run and build: the command's own status."),
    ("1", "Of check, demo, attack, doctor and evidence: not sealed, cannot seal, or not enforced."),
    ("2", "The request is wrong; nothing was touched."),
    ("125", "sealnet could not do it; the reason stands on standard error. Of a run nothing was started, and nothing is left."),
    ("124, 126, 127, 128+n", "Of run: timeout, not executable, not found, ended by signal n."),
)


def main() -> None:
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    top = click.Context(cli, info_name="sealnet", **cli.context_settings)
    for context in (top, *below(top)):
        name = context.command_path.replace(" ", "-")
        (target / f"{name}.1").write_text("\n".join(page(context)) + "\n", encoding="utf-8")


def below(context: click.Context) -> Iterator[click.Context]:
    """Every command that is shown, and those of each group after it."""
    group = context.command
    if not isinstance(group, click.Group):
        return
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            inner = click.Context(command, info_name=name, parent=context, **command.context_settings)
            yield inner
            yield from below(inner)


def page(context: click.Context) -> Iterator[str]:
    """The lines of one page; man(7)."""
    command, name = context.command, context.command_path.replace(" ", "-")
    date = datetime.datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), datetime.UTC).date()
    yield f'.TH {name.upper()} 1 {date} "sealnet {__version__}" "User Commands"'
    yield ".SH NAME"
    yield f"{text(name)} \\- {text(summary(context))}"
    yield ".SH SYNOPSIS"
    yield f".B {text(context.command_path)}"
    pieces = " ".join(command.collect_usage_pieces(context))
    yield text(pieces)
    yield ".SH DESCRIPTION"
    yield from paragraphs(command.help or "")
    yield ".SH OPTIONS"
    for parameter in command.get_params(context):
        # A newer click tells of arguments too, which the synopsis has.
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context)) is not None:
            yield from item(*record)
    if isinstance(command, click.Group):
        yield ".SH COMMANDS"
        for inner in below(context):
            if inner.parent is context:
                yield from item(inner.command_path.replace(" ", "-") + "(1)", summary(inner))
    if command.epilog:
        yield ".SH NOTES"
        yield from paragraphs(command.epilog)
    if context.parent is None:
        yield ".SH EXIT STATUS"
        for status in STATUS:
            yield from item(*status)
        yield ".SH FILES"
        for file in FILES:
            yield from item(*file)
    yield ".SH SEE ALSO"
    yield from see_also(context)


def summary(context: click.Context) -> str:
    """A short sentence without its full stop."""
    if context.parent is None:
        return "run untrusted commands with no network but one door"
    told = COMMANDS.get(context.info_name or "") if context.parent.parent is None else None
    told = told or context.command.get_short_help_str(200)
    return (told[0].lower() + told[1:] if told[1:2].islower() else told).rstrip(".")


def see_also(context: click.Context) -> Iterator[str]:
    named = [context.parent] if context.parent is not None else [inner for inner in below(context) if inner.parent is context]
    pages = [one.command_path.replace(" ", "-") for one in named]
    yield from (f".BR {text(page)} (1)," for page in pages)
    yield ".BR bwrap (1)"


def item(term: str, told: str) -> Iterator[str]:
    yield ".TP"
    yield f"\\fB{text(term)}\\fR"
    yield text(told)


def paragraphs(told: str) -> Iterator[str]:
    """click's help: paragraphs, of which those after a line with a backspace keep their lines."""
    for paragraph in inspect.cleandoc(told).split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        if lines[0].strip() == "\b":
            yield ".PP"
            yield ".nf"
            yield from map(text, lines[1:])
            yield ".fi"
        else:
            yield ".PP"
            yield text(" ".join(lines))


def text(told: str) -> str:
    """What troff would take for its own is written as it reads: backslashes, hyphens, and a control character at the start of a line."""
    told = (
        told.replace("\\", "\\e")
        .replace("-", "\\-")
        .replace("'", "\\(aq")
        .replace("`", "\\(ga")
        .replace("^", "\\(ha")
        .replace("~", "\\(ti")
    )
    return f"\\&{told}" if told.startswith(".") else told


if __name__ == "__main__":
    main()
