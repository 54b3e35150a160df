"""A frozen plan: what a run is to be, as a file that a reviewer reads, and that `run --plan` takes everything from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from sealnet.errors import UsageError
from sealnet.model.plan import Bind, Plan
from sealnet.model.policy import Confinement

SCHEMA = "sealnet.plan/1"
MOST_BYTES = 1 << 20
_HINT = "make it anew: sealnet plan [OPTIONS] -- COMMAND"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """What a plan fixes, each field as it stands in the file.

    Not in it: the run id, which is each run's own; addresses, which are chosen when the host is looked at; the values of variables. A
    reviewer reads the file and it is kept beside code, so no secret may stand in it, and the hash of a short one gives it away.
    """

    confinement: str
    argv: tuple[str, ...]
    user: Mapping[str, Any]
    cwd: str
    chdir: str | None
    lease_port: int | None
    broker: str | None
    broker_env: tuple[str, ...]
    allow: tuple[str, ...]
    allow_private: tuple[str, ...]
    pass_env: tuple[str, ...]
    set_env: tuple[str, ...]
    binds: tuple[Mapping[str, Any], ...]
    tmpfs: tuple[str, ...]
    bwrap_args: tuple[str, ...]
    timeout_s: float | None
    grace_s: float
    fallback: str | None
    allow_userns: bool
    preflight: bool
    on_tamper: str
    build: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {one.name: _plain(getattr(self, one.name)) for one in fields(self)}

    @property
    def sha256(self) -> str:
        """Of the canonical form: sorted keys, no space, ASCII."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def allowlist(self) -> list[str]:
        """Every declared host, HOST:PORT."""
        return sorted({*self.allow, *self.allow_private})

    def render(self) -> bytes:
        """The file: the same bytes for the same plan."""
        return json.dumps({"schema": SCHEMA, "sha256": self.sha256, "plan": self.to_json()}, indent=1, sort_keys=True).encode() + b"\n"

    def request(self) -> dict[str, Any]:
        """The arguments of `sealnet.request.plan` that mean this plan, without the command: it is checked as if a caller had asked."""
        opened = self.confinement == Confinement.OPEN
        bind_texts = {
            flag: [f"{bind['source']}:{bind['dest']}" for bind in self.binds if bind["writable"] is flag] for flag in (True, False)
        }
        return {
            # Any other follows from what the run may reach.
            "network": self.confinement if opened else None,
            "allow_unenforced_egress": opened,
            "user": self.user["name"],
            "bind": bind_texts[True],
            "ro_bind": bind_texts[False],
            "bwrap_args": "\0".join(self.bwrap_args).encode("utf-8", "surrogateescape") + (b"\0" if self.bwrap_args else b""),
            **{
                name: getattr(self, name)
                for name in (
                    "cwd", "chdir", "lease_port", "broker", "broker_env", "allow", "allow_private", "pass_env", "tmpfs", "timeout_s",
                    "grace_s", "fallback", "allow_userns", "preflight", "on_tamper",
                )
            },
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: object) -> Self:
        """Raises ValueError for what is no plan's body."""
        if not isinstance(data, dict):
            raise ValueError("its plan is no object")
        known = [one.name for one in fields(cls)]
        if strange := sorted(data.keys() - set(known)):
            raise ValueError(f"unknown field {strange[0]!r} of its plan")
        if missing := [name for name in known if name not in data]:
            raise ValueError(f"its plan has no field {missing[0]!r}")
        for name in known:
            if not _KINDS[name](data[name]):
                raise ValueError(f"field {name!r} of its plan cannot be {json.dumps(data[name])[:80]}")
        values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
        return cls(**values)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return dict(sorted(value.items())) if isinstance(value, Mapping) else value


def _text(value: object) -> bool:
    """What a caller could have given: no NUL, and surrogates only where they stand for a byte."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _sorted(value: object) -> bool:
    return isinstance(value, list) and _texts(value) and value == sorted(set(value))


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    # An int may be larger than any float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 63


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _or_none(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or kind(value)


def _shaped(**kinds: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, dict) and value.keys() == kinds.keys() and all(kind(value[name]) for name, kind in kinds.items())


_BIND = _shaped(source=_text, dest=_text, writable=_flag)
_KINDS: dict[str, Callable[[object], bool]] = {
    "confinement": lambda value: isinstance(value, str) and value in tuple(Confinement),
    "argv": _texts,
    "user": _shaped(name=_text, uid=_whole, gid=_whole),
    "cwd": _text,
    "chdir": _or_none(_text),
    "lease_port": _or_none(_whole),
    "broker": _or_none(_text),
    "broker_env": _sorted,
    "allow": _sorted,
    "allow_private": _sorted,
    "pass_env": _sorted,
    "set_env": _sorted,
    "binds": lambda value: isinstance(value, list) and all(map(_BIND, value)),
    "tmpfs": _texts,
    "bwrap_args": _texts,
    "timeout_s": _or_none(_number),
    "grace_s": _number,
    "fallback": _or_none(_text),
    "allow_userns": _flag,
    "preflight": _flag,
    "on_tamper": _text,
    "build": _texts,
}


def freeze(plan: Plan) -> Frozen:
    """The plan without what is one run's own. Lists whose order means nothing are sorted; the order of mounts and arguments is kept."""
    return Frozen(
        confinement=str(plan.confinement),
        argv=plan.argv,
        user={"name": plan.user.name, "uid": plan.user.uid, "gid": plan.user.gid},
        cwd=plan.cwd,
        chdir=plan.chdir,
        lease_port=plan.lease_port,
        broker=None if plan.broker is None else str(plan.broker),
        broker_env=_set(plan.broker_env),
        allow=_set([f"{entry.host}:{entry.port}" for entry in plan.allow if not entry.private]),
        allow_private=_set([f"{entry.host}:{entry.port}" for entry in plan.allow if entry.private]),
        pass_env=_set(plan.pass_env),
        set_env=_set(plan.set_env),
        binds=tuple(_bind(bind) for bind in plan.binds),
        tmpfs=plan.tmpfs,
        bwrap_args=plan.bwrap_args,
        timeout_s=plan.timeout_s,
        grace_s=plan.grace_s,
        fallback=plan.fallback,
        allow_userns=plan.allow_userns,
        preflight=plan.preflight,
        on_tamper=plan.on_tamper,
        build=plan.build,
    )


def _set(values: Collection[str]) -> tuple[str, ...]:
    return tuple(sorted(set(values)))


def _bind(bind: Bind) -> dict[str, Any]:
    return {"source": bind.source, "dest": bind.dest, "writable": bind.writable}


def parse(data: bytes, where: str) -> Frozen:
    """A plan from its file. UsageError for another schema, a field that is unknown, missing or of the wrong kind, and a wrong hash."""
    refused = f"cannot use plan {where}"
    if len(data) > MOST_BYTES:
        raise UsageError(f"{refused}: it is longer than {MOST_BYTES} bytes")
    try:
        told = json.loads(data, object_pairs_hook=_once, parse_constant=_no_number)
        if not isinstance(told, dict) or "schema" not in told:
            raise ValueError("it is no plan")
        if told["schema"] != SCHEMA:
            raise ValueError(f"its schema is {told['schema']!r}, and this version reads {SCHEMA}")
        if strange := sorted(told.keys() - {"schema", "sha256", "plan"}):
            raise ValueError(f"unknown field {strange[0]!r}")
        frozen = Frozen.from_json(told.get("plan"))
        if told.get("sha256") != frozen.sha256:
            raise ValueError(f"it was changed by hand: its sha256 is {told.get('sha256')!r}, and what it fixes has {frozen.sha256}")
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{refused}: {e}", hint=_HINT) from e
    return frozen


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A field that stands twice is read in one way by a reviewer and in another by a program."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name in found if sum(name == other for other, _value in pairs) > 1)
        raise ValueError(f"field {twice!r} stands in it twice")
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


# What a caller calls a field, and how `request.plan` does where that is another word.
_OPTIONS = {
    "confinement": "--network",
    "argv": "COMMAND",
    "binds": "--bind, --ro-bind",
    "set_env": "--setenv",
    "cwd": "the working directory",
    "timeout_s": "--timeout",
    "grace_s": "--grace",
    "preflight": "--no-preflight",
}
_GIVEN = {"confinement": {"network", "allow_unenforced_egress"}, "binds": {"bind", "ro_bind"}}


def hold(frozen: Frozen, asked: Frozen, *, path: str, given: Collection[str]) -> None:
    """Refuse drift: UsageError unless what is asked for is what the plan fixes. `given` are the arguments that stood beside it."""
    differing = [one.name for one in fields(frozen) if getattr(frozen, one.name) != getattr(asked, one.name)]
    if not differing:
        return
    beside = [name for name in differing if _GIVEN.get(name, {name}) & set(given)]
    name = (beside or differing)[0]
    option = _OPTIONS.get(name, f"--{name.replace('_', '-')}")
    planned, found = _told(getattr(frozen, name)), _told(getattr(asked, name))
    if beside:
        raise UsageError(
            f"cannot use {option} with --plan {path}: the plan has {planned}, not {found}", hint="leave it out, or make another plan"
        )
    raise UsageError(f"cannot use --plan {path} here: for {option} it has {planned}, and on this host that is {found}", hint=_HINT)


def _told(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True)[:200]
