"""A sealed build's command lines: which of a caller's words reach `buildah bud`, and the options that are sealnet's own and stay."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sealnet.errors import UsageError
from sealnet.model import environment
from sealnet.model.argv import Fds

_HINT = "sealnet build [OPTIONS] -- [BUILDAH-BUD-OPTIONS] CONTEXT"
_SHORT = {"-t": "--tag", "-f": "--file", "-q": "--quiet"}
_FLAGS = frozenset("--force-rm --layers --no-cache --pull --pull-always --pull-never --quiet --rm --squash --tls-verify".split())
_VALUES = frozenset(
    "--annotation --authfile --build-arg --file --format --ignorefile --jobs --label --root --storage-driver --tag --target "
    "--timestamp".split()
)
_PATHS = frozenset("--authfile --file --ignorefile --root".split())
# Of buildah itself; they stand before `bud`.
_STORE = "/var/lib/containers/storage"
_GLOBAL = frozenset({"--root", "--storage-driver"})
# Everything that is not named above is refused; of these it is known why.
_UNDOES = (
    (re.compile(r"--(network|net|isolation|cni-|cgroup|ipc|pid|uts|userns|runtime|add-host|dns)"), "a RUN step is in the run's namespace"),
    (re.compile(r"--(cap-add|cap-drop|device|security-opt|decryption-key|no-hosts|no-hostname)"), "what a RUN step may do is fixed"),
    (re.compile(r"--(volume|ssh|secret|build-context|mount)|-v"), "a RUN step sees nothing of the host"),
    (re.compile(r"--(http-proxy|env)"), "the run's proxy is handed on, and no other"),
    (re.compile(r"--(storage-opt|registries-conf|signature-policy|hooks-dir|default-mounts-file|log)"), "it is the host's to set"),
)
_REMOTE = re.compile(r"[a-z0-9+.-]+://|git@|github\.com/|-$", re.IGNORECASE)

# What buildah and its runtime need of root: mounts, other users' files, the way down to what a RUN step has. That CAP_NET_ADMIN,
# CAP_NET_RAW, CAP_BPF and CAP_SYS_MODULE are not in the bounding set takes them from all below it, whatever else goes wrong: in a user
# namespace of its own a RUN step may have them again, but not over the run's network.
CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
    "NET_BIND_SERVICE": 10, "SYS_CHROOT": 18, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_RESOURCE": 24, "MKNOD": 27, "AUDIT_WRITE": 29,
    "SETFCAP": 31,
}  # fmt: skip
BOUNDING = sum(1 << bit for bit in CAPABILITIES.values())
# The rest, as setpriv(1) calls them: bwrap leaves the bounding set as it is. One that a newer kernel adds is seen before the build starts.
_UNBOUND = (
    "linux_immutable", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner", "sys_module", "sys_rawio", "sys_pacct",
    "sys_boot", "sys_nice", "sys_time", "sys_tty_config", "lease", "audit_control", "mac_override", "mac_admin", "syslog", "wake_alarm",
    "block_suspend", "audit_read", "perfmon", "bpf", "checkpoint_restore",
)  # fmt: skip

# What no RUN step has, whatever the host's configuration gives to containers.
_DROPPED = ("NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_PTRACE", "SYS_RESOURCE", "DAC_READ_SEARCH", "MKNOD", "AUDIT_WRITE")
# For convenience: a RUN step that reads none of them reaches nothing. The last is for a Dockerfile that has an ARG of that name.
_HANDED_ON = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SEALNET_BROKER_URL")
# No engine's configuration, login or runtime directory of root's but those that a caller names; the builder's /run is its own.
VARIABLES = {"CONTAINERS_CONF": "/dev/null", "HOME": "/run", "LANG": "C.UTF-8", "PATH": environment.DEFAULT_PATH}
# The ids of a RUN step on this host, above those that systemd gives to containers: to the host its root is nobody.
FIRST_ID = 0x70000000
# A user namespace may mount /proc only where one is seen that nothing covers. The run's part of the cgroup tree is put where the runtime
# looks for one, so that what it makes is the run's.
ENTER = 'mount -t proc proc /proc && mount -t cgroup2 cgroup2 /sys/fs/cgroup || exit 125; exec "$@"'
# Who becomes the builder by execve(2): it is looked at when the shell starts.
CHAIN = ("bwrap", "setsid", "setpriv")
EXECUTIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Programs by path."""

    sh: str
    bwrap: str
    setsid: str
    setpriv: str
    buildah: str
    runc: str


def checked(words: Sequence[str], *, cwd: str) -> tuple[str, ...]:
    """The caller's words, each option as `--name=value`, paths absolute, the context directory last. UsageError for what may not be."""
    options: list[str] = []
    context: list[str] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if "\0" in word:
            raise UsageError("cannot build: an argument has a NUL byte")
        if not word.startswith("-") or word == "-":
            context.append(word)
            continue
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name)
        if name in _FLAGS:
            options.append(_flag(name, value if equals else None))
        elif name in _VALUES:
            if not equals:
                if position == len(words):
                    raise UsageError(f"cannot build: {word} has no value", hint=_HINT)
                value = words[position]
                position += 1
            options.append(f"{name}={_value(name, value, cwd)}")
        else:
            raise _refused(word)
    if len(context) != 1:
        raise UsageError(f"cannot build: {'no' if not context else 'more than one'} context directory was given", hint=_HINT)
    return (*options, _path("the context", context[0], cwd))


def _flag(name: str, value: str | None) -> str:
    if value not in (None, "true", "false"):
        raise UsageError(f"cannot use {name}={value}: it is true or false", hint=_HINT)
    return name if value is None else f"{name}={value}"


def _value(name: str, value: str, cwd: str) -> str:
    if "\0" in value:
        raise UsageError("cannot build: an argument has a NUL byte")
    if name in _PATHS:
        return _path(name, value, cwd)
    if name == "--build-arg":
        variable, equals, _ = value.partition("=")
        if not equals:
            raise UsageError(f"cannot use --build-arg {value!r}: it must be NAME=VALUE", hint="a build has nothing of your environment")
        if environment.is_proxy(variable):
            raise UsageError(f"cannot use --build-arg {variable}=...: a build's proxy is the run's own", hint="declare hosts with --allow")
    return value


def _path(what: str, text: str, cwd: str) -> str:
    if not text or _REMOTE.match(text):
        raise UsageError(f"cannot use {what} {text!r}: it must be a path on this host", hint="fetch it first; then name where it is")
    return posixpath.normpath(posixpath.join(cwd, text))


def _refused(word: str) -> UsageError:
    name = word.partition("=")[0]
    for pattern, why in _UNDOES:
        if pattern.match(name):
            return UsageError(f"cannot use {name} in a sealed build: {why}")
    allowed = " ".join(sorted((*_FLAGS, *_VALUES, *_SHORT)))
    return UsageError(f"cannot use {name} in a sealed build: it is not one of the options that leave the seal as it is", hint=allowed)


def store(words: Sequence[str]) -> str:
    """Where the images are, of checked words."""
    return next((word.partition("=")[2] for word in reversed(words) if word.startswith("--root=")), _STORE)


def shown(words: Sequence[str]) -> list[str]:
    """The directories that a build reads, of checked words: what of them lies in the others is seen with those."""
    files = [word.partition("=")[2] for word in words if word.startswith(("--file=", "--ignorefile=", "--authfile="))]
    return sorted({words[-1], *map(posixpath.dirname, files)})


def render_command(words: Sequence[str], fds: Fds, variables: Mapping[str, str], tools: Tools, *, controlling_terminal: bool) -> list[str]:
    """`bwrap --args FD -- setsid setpriv sh ... buildah ... bud ... CONTEXT`; `words` are checked ones."""
    *options, context = words
    command = [tools.bwrap, "--args", str(fds.args), "--"]
    command += [tools.setsid, *(["--ctty"] if controlling_terminal else [])]
    command += [tools.setpriv, "--no-new-privs", f"--bounding-set={','.join(f'-{name}' for name in _UNBOUND)}", "--inh-caps=-all"]
    command += [tools.sh, "-c", ENTER, "sealnet", tools.buildah]
    command += [option for option in options if option.partition("=")[0] in _GLOBAL]
    # Of the builder's namespaces its network is the run's; the rest a RUN step has of its own.
    command += ["bud", "--isolation=oci", f"--runtime={tools.runc}", "--network=host", "--cgroupns=private", "--http-proxy=false"]
    command += [f"--userns-uid-map=0:{FIRST_ID}:65536", f"--userns-gid-map=0:{FIRST_ID}:65536"]
    command += [f"--cap-drop=CAP_{name}" for name in _DROPPED]
    command += [f"--build-arg={name}={variables[name]}" for name in _HANDED_ON if name in variables]
    command += [option for option in options if option.partition("=")[0] not in _GLOBAL]
    return [*command, "--", context]


def render_options(root: str, dev: str, fds: Fds, variables: Mapping[str, str], *, die_with_parent: bool) -> list[str]:
    """bwrap's options. The builder's view is a payload's, read-only but for its store, so that what a hostile Dockerfile talks it into
    showing to a RUN step (CVE-2024-1753 and -9675 are in Debian 12's buildah) is no more than a payload sees.
    """
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup"]
    options += ["--die-with-parent"] if die_with_parent else []
    options += ["--cap-drop", "ALL"]
    for name in CAPABILITIES:
        options += ["--cap-add", f"CAP_{name}"]
    options += ["--info-fd", str(fds.info), "--json-status-fd", str(fds.status), "--block-fd", str(fds.block)]
    options += ["--sync-fd", str(fds.alive), "--seccomp", str(fds.seccomp)]
    options += ["--dev-bind", root, "/", "--dev-bind", dev, "/dev", "--proc", "/proc"]
    options += ["--chdir", "/", "--clearenv"]
    for name, value in variables.items():
        options += ["--setenv", name, value]
    return options
