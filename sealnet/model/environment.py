"""The payload's environment: a short allowlist of the caller's, what was asked for, and what sealnet tells it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from sealnet.errors import UsageError

PASSED = ("PATH", "LANG", "LANGUAGE", "LC_*", "TZ", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# JAVA_TOOL_OPTIONS, _JAVA_OPTIONS, JAVA_OPTS, MAVEN_OPTS: a value may name a proxy.
_JAVA = "JAVA_"
# What a payload reaches on its own loopback is its own.
_OWN = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

# What the dynamic loader and the C library obey (glibc's unsecvars.h), and what names files of translations, for a LANGUAGE may hold a path
# (gettext's dcigettext.c). setpriv still has privileges when it starts, so these reach the payload one step later, through env(1).
_LOADER = frozenset(
    "GCONV_PATH GETCONF_DIR GLIBC_TUNABLES HOSTALIASES LANG LANGUAGE LOCALDOMAIN LOCPATH NIS_PATH NLSPATH OUTPUT_CHARSET RESOLV_HOST_CONF "
    "RES_OPTIONS TMPDIR TZDIR".split()
)
_LOADER_PREFIXES = ("LC_", "LD_", "MALLOC_")


def is_proxy(name: str) -> bool:
    """Any spelling in any case: http_proxy, No_Proxy, npm_config_https_proxy, NODE_USE_ENV_PROXY, ..."""
    return "proxy" in name.lower()


def is_loader(name: str) -> bool:
    return name in _LOADER or name.startswith(_LOADER_PREFIXES)


# What sealnet itself tells the payload.
OWN = frozenset(("SEALNET", "SEALNET_RUN_ID", "SEALNET_BROKER_URL"))


def require_one_meaning(given: Sequence[str], broker_env: Sequence[str], *, has_proxy: bool) -> None:
    """Nothing that was asked for is to be written over by something else: UsageError for a variable that would have two values."""
    for option, chosen in (("--setenv", given), ("--broker-env", broker_env)):
        for name in chosen:
            if name in OWN:
                raise UsageError(f"cannot use {option} {name}: that variable is sealnet's own", hint="choose another name")
            if has_proxy and is_proxy(name) and (option == "--broker-env" or name.lower() != "no_proxy"):
                raise UsageError(f"cannot use {option} {name}: an allowlist run has a proxy of its own", hint="leave it out")
    if twice := sorted({name for name in given if given.count(name) > 1}):
        raise UsageError(f"cannot use --setenv {twice[0]} twice: a variable has one value", hint="leave one of the two out")
    if both := sorted({*given} & {*broker_env}):
        raise UsageError(
            f"cannot use --setenv {both[0]} with --broker-env {both[0]}: a variable has one value", hint="leave one of the two out"
        )


def variable_name(text: str, option: str) -> str:
    if not _NAME.fullmatch(text):
        raise UsageError(f"cannot use {option} {text!r}: a variable name is letters, digits and '_', and does not begin with a digit")
    return text


def assignment(text: str) -> tuple[str, str]:
    """`N=V` as (name, value)."""
    name, equals, value = text.partition("=")
    if equals and not name:
        raise UsageError(f"cannot use --setenv {text!r}: it has no name before the '='")
    if not equals:
        raise UsageError(
            f"cannot use --setenv {text!r}: it must be NAME=VALUE", hint=f"to hand on the caller's own value: --pass-env {name}"
        )
    if "\0" in value:
        raise UsageError(f"cannot use --setenv {name}: its value has a NUL byte")
    return variable_name(name, "--setenv"), value


def environment(
    inherited: Mapping[str, str],
    *,
    passed: Sequence[str] = (),
    given: Iterable[tuple[str, str]] = (),
    user: str,
    home: str,
    shell: str,
) -> dict[str, str]:
    """What a payload of `user` gets, before anything that depends on its address.

    An inherited proxy variable never passes, whatever the glob: it would name a host that the seal refuses. Nor does PWD, which is where
    the payload starts, nor what an outer run of sealnet's was told. `given` is explicit and passes as it is.
    """
    kept = handed_on(inherited, passed)
    kept.setdefault("PATH", DEFAULT_PATH)
    kept |= {"USER": user, "LOGNAME": user, "HOME": home, "SHELL": shell}
    return dict(sorted((kept | dict(given)).items()))


def handed_on(inherited: Mapping[str, str], passed: Sequence[str]) -> dict[str, str]:
    """The caller's variables that a run may see."""
    # git's own are counted, so they go together or not at all.
    hidden = any(name.startswith("GIT_CONFIG") and is_proxy(value) for name, value in inherited.items())
    return {
        name: value
        for name, value in inherited.items()
        if any(fnmatchcase(name, glob) for glob in (*PASSED, *passed))
        and not is_proxy(name)
        and not (is_proxy(value) and (_JAVA in name or name.endswith("_OPTS")))
        and not (hidden and name.startswith("GIT_CONFIG"))
        and name != "PWD"
        and name not in OWN
        and _NAME.fullmatch(name)
    }


def proxied(variables: Mapping[str, str], *, host: str, port: int, exempt: Sequence[str]) -> dict[str, str]:
    """`variables`, and the run's proxy as each client wants to hear of it; `exempt` are addresses that answer beside it.

    curl obeys http_proxy in lower case alone, Java a variable of its own, Node only when told to. What is never proxied differs, too: a `*`
    turns the proxy off for curl, Python and undici only where it stands alone, while Go and reqwest read what stands beside it.
    """
    url = f"http://{host}:{port}"
    told = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), url) | {"NODE_USE_ENV_PROXY": "1"}
    given = [part.strip() for name in ("NO_PROXY", "no_proxy") for part in variables.get(name, "").split(",")]
    direct = list(dict.fromkeys(part for part in (*given, *_OWN, *exempt) if part))
    told["NO_PROXY"] = ",".join(direct)
    told["no_proxy"] = "*" if "*" in direct else told["NO_PROXY"]
    java = [f"-D{scheme}.proxy{what}={value}" for scheme in ("http", "https") for what, value in (("Host", host), ("Port", port))]
    java.append(f"-Dhttp.nonProxyHosts={'|'.join(['localhost', '127.*', '[::1]', *exempt])}")
    told["JAVA_TOOL_OPTIONS"] = " ".join([*filter(None, [variables.get("JAVA_TOOL_OPTIONS")]), *java])
    return dict(sorted((dict(variables) | told).items()))


def sealed(variables: Mapping[str, str], *, run_id: str, broker_url: str | None, broker_env: Sequence[str]) -> dict[str, str]:
    """`variables`, and what sealnet tells the payload of its run."""
    told = {"SEALNET": "1", "SEALNET_RUN_ID": run_id}
    if broker_url is not None:
        told |= {"SEALNET_BROKER_URL": broker_url, **dict.fromkeys(broker_env, broker_url)}
    return dict(sorted((dict(variables) | told).items()))
