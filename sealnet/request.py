"""From what a caller asks for to a plan: every option checked, nothing touched."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sealnet import caller
from sealnet.errors import UsageError
from sealnet.kernel import owncode, process
from sealnet.model import authority, buildargv, environment, names, policy
from sealnet.model import plan as plans
from sealnet.model.config import PATH, Config, parse
from sealnet.model.plan import GRACE_S, Bind, Plan, User
from sealnet.model.view import cwd_is_bound


def config(path: str | None = None) -> Config:
    """The configuration of `path`, $SEALNET_CONFIG or /etc/sealnet/config.toml; the defaults where there is no file."""
    named = path or os.environ.get("SEALNET_CONFIG")
    file = Path(named or PATH)
    try:
        return parse(file.read_text(encoding="utf-8"), str(file))
    except FileNotFoundError as e:
        if named:
            raise UsageError(f"cannot read {file}: {e.strerror}", hint="unset SEALNET_CONFIG to use the defaults") from e
        return Config()
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"cannot read {file}: {e}") from e


def plan(
    argv: Sequence[str],
    *,
    run_id: str | None = None,
    network: str | None = None,
    lease_port: int | None = None,
    broker: str | None = None,
    allow: Iterable[str] = (),
    allow_private: Iterable[str] = (),
    allow_unenforced_egress: bool = False,
    broker_env: Iterable[str] = (),
    pass_env: Iterable[str] = (),
    set_env: Iterable[tuple[str, str]] = (),
    bind: Iterable[str] = (),
    ro_bind: Iterable[str] = (),
    tmpfs: Iterable[str] = (),
    chdir: str | None = None,
    bwrap_args: bytes = b"",
    user: str | User | None = None,
    timeout_s: float | None = None,
    grace_s: float = GRACE_S,
    fallback: str | None = None,
    allow_userns: bool = False,
    preflight: bool = True,
    on_tamper: str = plans.RESTORE,
    share_cwd: bool = True,
    cwd: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Plan:
    """A frozen plan. Raises UsageError for whatever is wrong with the request."""
    inherited = os.environ if environ is None else environ
    allow, allow_private = tuple(allow), tuple(allow_private)
    broker_names = tuple(environment.variable_name(name, "--broker-env") for name in broker_env)
    confinement = policy.derive(
        network=network,
        lease_port=lease_port if lease_port is None else policy.port(lease_port, "--lease-port"),
        broker=broker,
        allow=[*allow, *allow_private],
        broker_env=broker_names,
        allow_unenforced_egress=allow_unenforced_egress,
    )
    who = caller.default_user(inherited) if user is None else user if isinstance(user, User) else process.user(user)
    here = caller.working_directory() if cwd is None else os.path.realpath(cwd)
    if not os.path.isdir(here):
        raise UsageError(f"cannot use the working directory {here}: it is no directory", hint="make it, or work in another")
    # The source by its real name: it is opened later only if it still is what that says.
    binds = tuple(
        replace(one, source=_existing(one))
        for one in (
            *(plans.bind(text, writable=False, cwd=here) for text in ro_bind),
            *(plans.bind(text, writable=True, cwd=here) for text in bind),
        )
    )
    if chdir is None and here.startswith(("/dev/", "/proc/", "/sys/")):
        raise UsageError(f"cannot use the working directory {here}: a run has /dev, /proc and /sys of its own", hint="--chdir /")
    is_shared = share_cwd and not (cwd_is_bound(here) and owncode.is_own_code(here))
    given = [(environment.variable_name(name, "--setenv"), value) for name, value in set_env]
    globs = tuple(pass_env)
    environment.require_one_meaning([name for name, _value in given], broker_names, has_proxy=confinement is policy.Confinement.ALLOWLIST)
    if fallback is not None and confinement is policy.Confinement.OPEN:
        raise UsageError("cannot use --fallback with --network open: nothing is sealed in an open run", hint="leave one of the two out")
    if "" in globs:
        raise UsageError("cannot use --pass-env '': it names no variable", hint="--pass-env 'CI_*'")
    if chdir == "":
        raise UsageError("cannot use --chdir '': it is no directory", hint="--chdir .")
    mounted = tuple(plans.mount_point(text, "--tmpfs") for text in tmpfs)
    plans.require_own_places(binds, mounted)
    return Plan(
        run_id=caller.new_run_id() if run_id is None else names.run_id(run_id),
        confinement=confinement,
        argv=tuple(argv),
        user=who,
        environment=environment.environment(inherited, passed=globs, given=given, user=who.name, home=who.home, shell=who.shell),
        pass_env=globs,
        set_env=tuple(name for name, _value in given),
        lease_port=lease_port,
        broker=None if broker is None else policy.target(broker),
        allow=authority.entries(allow, allow_private),
        broker_env=broker_names,
        cwd=here,
        cwd_is_shared=is_shared,
        chdir=None if chdir is None else os.path.normpath(os.path.join(here, chdir)),
        binds=binds,
        tmpfs=mounted,
        bwrap_args=plans.profile(
            bwrap_args, shared=[*([here] if cwd_is_bound(here, is_shared=is_shared) else []), *(one.dest for one in binds if one.writable)]
        ),
        timeout_s=timeout_s,
        grace_s=grace_s,
        fallback=fallback,
        allow_userns=allow_userns,
        preflight=preflight,
        on_tamper=on_tamper,
    )


def build_plan(words: Sequence[str], *, cwd: str | None = None, **options: Any) -> Plan:
    """The plan of an image build: `words` are for `buildah bud`, `options` those of `plan` that say what may be reached, and for how long.

    Raises UsageError for whatever is wrong with the request.
    """
    checked = buildargv.checked(words, cwd=caller.working_directory() if cwd is None else cwd)
    if not os.path.isdir(checked[-1]):
        raise UsageError(f"cannot build {checked[-1]}: it is no directory", hint="the context is a directory on this host")
    store = buildargv.store(checked)
    if not os.path.isdir(store):
        raise UsageError(f"cannot build: there is no store {store}", hint="buildah images makes it, or name another with --root")
    made = plan(("buildah", "bud", *checked), user="0", cwd="/", environ={}, bind=[store], ro_bind=buildargv.shown(checked), **options)
    return replace(made, build=checked, environment=dict(buildargv.VARIABLES))


def frozen_plan(path: str, argv: Sequence[str], given: Mapping[str, Any]) -> Plan:
    """What the frozen plan in the file says; see `frozen_request`."""
    return frozen_request(path, argv, given)[0]


def frozen_request(path: str, argv: Sequence[str], given: Mapping[str, Any]) -> tuple[Plan, dict[str, Any]]:
    """What the frozen plan in the file says, and the arguments of `plan` that mean it.

    `argv` and `given` stand beside it, and may only repeat it; a run id, and the values of the variables that it sets, are theirs alone.
    Raises UsageError for whatever differs, on the caller's side or on this host.
    """
    from sealnet.model import lock

    frozen = lock.parse(_read(path, lock.MOST_BYTES + 1), path)
    if frozen.build:
        raise UsageError(f"cannot use --plan {path}: it is of a build", hint="sealnet build ... -- CONTEXT")
    asked = {**frozen.request(), **given}
    if frozen.set_env and "set_env" not in given:
        raise UsageError(
            f"cannot use --plan {path}: it sets {', '.join(frozen.set_env)}, and a plan holds no values",
            hint=" ".join(f"--setenv {name}=VALUE" for name in frozen.set_env),
        )
    made = plan(argv or frozen.argv, **asked)
    lock.hold(frozen, lock.freeze(made), path=path, given={*given, *(["argv"] if argv else [])})
    return made, asked


def _read(path: str, most: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except OSError as e:
        raise UsageError(f"cannot read --plan {path}: {e.strerror}") from e


def _existing(bind: Bind) -> str:
    """A source by its real path. A link on the way is refused, but in / (a merged /usr): an earlier payload may have planted it."""
    option = "--bind" if bind.writable else "--ro-bind"
    path = ""
    for part in bind.source.strip("/").split("/"):
        parent, path = path, f"{path}/{part}"
        try:
            is_link = stat.S_ISLNK(os.lstat(path).st_mode)
        except OSError as e:
            raise UsageError(f"cannot use {option} {bind.source}: {e.strerror} ({path})") from e
        if is_link and parent:
            raise UsageError(
                f"cannot use {option} {bind.source}: {path} is a symbolic link, and a payload may have made it",
                hint=f"name the real path, if that is what you mean: {os.path.realpath(bind.source)}",
            )
    return os.path.realpath(bind.source)
