"""The options that say what a run is to be: `run` takes them, and `plan` freezes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from sealnet.cli import once
from sealnet.errors import UsageError
from sealnet.model import environment

_Command = TypeVar("_Command", bound=Callable[..., Any])

_MOST_PROFILE = 1 << 20


class _Number(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """A number as people write it: int() and float() also take `8_080`, ` 80` and other alphabets' digits."""

    def __init__(self, name: str, pattern: str, kind: Callable[[str], Any], what: str) -> None:
        self.name, self._pattern, self._kind, self._what = name, re.compile(pattern, re.ASCII), kind, what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and self._pattern.fullmatch(value) is None:
            option = param.opts[0] if param is not None else self.name
            raise UsageError(f"cannot use {option} {value!r}: {self._what}", hint=f"{option} {'8080' if self is PORT else '600'}")
        return self._kind(value)


PORT = _Number("port", r"-?(0|[1-9][0-9]{0,5})", int, "a TCP port is a whole number from 1 to 65535")
SECONDS = _Number("seconds", r"-?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,3})?|-?inf|nan", float, "it is a number of seconds")

_OPTIONS = (
    once("--lease-port", type=PORT, metavar="PORT", help="A broker listens on this host at this TCP port: sealed."),
    once("--broker", metavar="TARGET", help="A broker at tcp:HOST:PORT or unix:/PATH, which a relay leads to: sealed."),
    click.option("--allow", multiple=True, metavar="HOST[:PORT]", help="A host that a proxy leads to; port 443 by default. Repeatable."),
    click.option(
        "--allow-private", multiple=True, metavar="HOST:PORT", help="The same, and its name may mean a private address. Repeatable."
    ),
    once("--network", metavar="MODE", help="severed, sealed, allowlist or open; derived from the other options when not given."),
    click.option("--allow-unenforced-egress", is_flag=True, help="Permit --network open, which enforces nothing."),
    click.option("--broker-env", multiple=True, metavar="NAME", help="Also set NAME to the broker's URL. Repeatable."),
    click.option("--pass-env", multiple=True, metavar="GLOB", help="Hand on the caller's variables that match. Repeatable."),
    click.option("--setenv", multiple=True, metavar="N=V", help="Set a variable. Repeatable."),
    click.option("--bind", multiple=True, metavar="SRC[:DEST]", help="Show a path of the host, writable and as it is. Repeatable."),
    click.option("--ro-bind", multiple=True, metavar="SRC[:DEST]", help="Show a path of the host, read-only. Repeatable."),
    click.option("--tmpfs", multiple=True, metavar="DEST", help="An empty writable directory. Repeatable."),
    once("--chdir", metavar="DIR", help="Working directory in the sandbox. Default: the caller's, which is bound writable."),
    once("--bwrap-args", metavar="FILE", help="Extra bwrap arguments, NUL- or newline-separated."),
    once("--user", metavar="NAME|UID", help="Whom the command runs as. Default: SUDO_UID, else the caller."),
    once("--timeout", type=SECONDS, metavar="SECONDS", help="End the command after that time, status 124."),
    once("--grace", type=SECONDS, metavar="SECONDS", help="From TERM to KILL. Default: 5."),
    once("--fallback", metavar="sever", help="'sever': if this host cannot seal, run severed instead of not at all."),
    once("--on-tamper", metavar="restore|kill", help="When others change the seal: put it back (default), or end the command."),
    click.option("--allow-userns", is_flag=True, help="Let the command make user namespaces."),
    click.option("--no-preflight", is_flag=True, help="Start even when the broker or a declared host does not answer."),
)
NAMES = (
    "lease_port", "broker", "allow", "allow_private", "network", "allow_unenforced_egress", "broker_env", "pass_env", "setenv", "bind",
    "ro_bind", "tmpfs", "chdir", "bwrap_args", "user", "timeout", "grace", "fallback", "on_tamper", "allow_userns", "no_preflight",
)  # fmt: skip


def plan_options(function: _Command) -> _Command:
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def request(options: dict[str, Any]) -> dict[str, Any]:
    """What was given of these options, as arguments of `sealnet.request.plan`."""
    # A number that was given may be 0.
    given = {name: value for name in NAMES if (value := options[name]) is not None and value is not False and value != ()}
    if "setenv" in given:
        given["set_env"] = [environment.assignment(text) for text in given.pop("setenv")]
    if "bwrap_args" in given:
        given["bwrap_args"] = _read(given["bwrap_args"])
    if given.pop("no_preflight", False):
        given["preflight"] = False
    for name in ("timeout", "grace"):
        if name in given:
            given[f"{name}_s"] = given.pop(name)
    return given


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_PROFILE + 1)
    except OSError as e:
        raise UsageError(f"cannot read --bwrap-args {path}: {e.strerror}", hint="name a file of bwrap's arguments") from e
    if len(text) > _MOST_PROFILE:
        raise UsageError(f"cannot use --bwrap-args {path}: it is longer than {_MOST_PROFILE} bytes", hint="name a shorter file")
    return text
