"""What a caller may ask of the worker: its request for a run as options of `sealnet.request.plan`, checked by who calls."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sealnet.errors import NotPermitted, UsageError
from sealnet.model.plan import Bind, Plan, profile_words
from sealnet.model.view import is_systems

MOST_FDS = 64
_MOST_BINDS = MOST_FDS - 4
_MOST_WORDS, _MOST_VARIABLES = 65_536, 4096
# Each is a mount, or stands in the record, which stays in memory (/run).
_MOST_OF = {"tmpfs": 60, "allow": 1000, "allow_private": 1000}
_LONGEST_PATH = 4096

# The part of /run/sealnet that callers see.
SOCKET = "worker.sock"
INTERFACE = "io.sealnet.Worker"

# `sealnet.request.plan` takes these under the same name.
_SAME = (
    "run_id", "network", "lease_port", "broker", "allow", "allow_private", "allow_unenforced_egress", "broker_env", "pass_env", "bind",
    "ro_bind", "tmpfs", "chdir", "user", "timeout_s", "grace_s", "fallback", "allow_userns", "preflight", "on_tamper",
    "share_cwd",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Who is at the other end of a connection, as the kernel tells (SO_PEERCRED, socket(7)): when it connected."""

    uid: int
    gid: int
    pid: int

    @property
    def is_root(self) -> bool:
        return self.uid == 0

    def may_touch(self, owner: int) -> bool:
        """Whether a run is this caller's to see, signal and end."""
        return self.is_root or self.uid == owner


def options(peer: Peer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `sealnet.request.plan` in the parameters of a Run call, whose types have been checked. The payload's user is a uid.

    Raises UsageError or NotPermitted.
    """
    given = {name: value for name, value in asked["options"].items() if value is not None}
    made = {name: given[name] for name in _SAME if name in given}
    if "set_env" in given:
        made["set_env"] = [(one["name"], one["value"]) for one in given["set_env"]]
    if "bwrap_args" in given:
        if not peer.is_root:
            raise NotPermitted(
                "cannot use --bwrap-args: only root may bring a profile of its own", hint="--bind, --ro-bind and --tmpfs remain"
            )
        made["bwrap_args"] = "".join(f"{word}\0" for word in given["bwrap_args"]).encode("utf-8", "surrogateescape")
    if not peer.is_root:
        if made.get("user", str(peer.uid)) != str(peer.uid):
            raise NotPermitted(f"cannot run as {made['user']}: only root may run as somebody else", hint="leave --user out")
        made["user"] = str(peer.uid)
    if len(asked["argv"]) > _MOST_WORDS or len(asked["environ"]) > _MOST_VARIABLES:
        raise UsageError(f"cannot run: at most {_MOST_WORDS} arguments and {_MOST_VARIABLES} variables")
    if len(made.get("bind", ())) + len(made.get("ro_bind", ())) > _MOST_BINDS:
        raise UsageError(f"cannot use more than {_MOST_BINDS} of --bind and --ro-bind through the worker")
    for name, most in _MOST_OF.items():
        if len(made.get(name, ())) > most:
            raise UsageError(f"cannot use more than {most} of --{name.replace('_', '-')} through the worker")
    if len(asked.get("output") or "") > _LONGEST_PATH:
        raise UsageError("cannot use --output: it is longer than any path")
    if posixpath.normpath("/" + asked["cwd"].lstrip("/")) != asked["cwd"]:
        raise UsageError(f"cannot use the working directory {asked['cwd']}: it is no real path")
    return made


def fds_of(asked: Mapping[str, Any]) -> int:
    """How many descriptors belong to a Run call: the streams, the working directory, each source."""
    return 4 + len(asked["options"].get("ro_bind") or ()) + len(asked["options"].get("bind") or ())


def require_own_places(plan: Plan, peer: Peer) -> None:
    """A caller that is not root shows things at their own path or away from the system's directories. Raises NotPermitted."""
    if peer.is_root:
        return
    for bind in plan.binds:
        if bind.dest != bind.source and is_systems(bind.dest):
            raise _not_there("--bind" if bind.writable else "--ro-bind", bind)
    for dest in plan.tmpfs:
        if is_systems(dest):
            raise _not_there("--tmpfs", dest)


def _not_there(option: str, what: Bind | str) -> NotPermitted:
    told = what if isinstance(what, str) else f"{what.source}:{what.dest}"
    return NotPermitted(
        f"cannot use {option} {told}: only root may put something into the system's directories",
        hint="name another destination, for example below /mnt",
    )


def render(
    argv: Sequence[str],
    given: Mapping[str, Any],
    *,
    cwd: str,
    environ: Mapping[str, str],
    detach: bool = False,
    evidence: bool = False,
    output: str | None = None,
) -> dict[str, Any]:
    """The parameters of a Run call, of the options of `sealnet.request.plan` that were given."""
    told = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items() if name in _SAME}
    if left := given.keys() - told.keys() - {"set_env", "bwrap_args"}:
        raise ValueError(f"no option of a run: {', '.join(sorted(left))}")
    if "set_env" in given:
        told["set_env"] = [{"name": name, "value": value} for name, value in given["set_env"]]
    if "bwrap_args" in given:
        told["bwrap_args"] = profile_words(given["bwrap_args"])
    return {
        "argv": list(argv),
        "cwd": cwd,
        "environ": dict(environ),
        "options": told,
        "detach": detach,
        "evidence": evidence,
        "output": output,
    }
