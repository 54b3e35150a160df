"""The one bwrap command line: every flag is pinned by a golden test, so that a dropped one is a diff someone has to sign."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sealnet.model import environment
from sealnet.model.plan import Plan

# What OCI runtimes mask: files become /dev/null, directories an empty tmpfs. A uid 0 without capabilities can read or write some.
MASKED_FILES = (
    "interrupts", "kallsyms", "kcore", "keys", "kmsg", "kpagecgroup", "kpagecount", "kpageflags", "latency_stats", "mtrr", "sched_debug",
    "slabinfo", "timer_list", "timer_stats", "vmallocinfo",
)  # fmt: skip
MASKED_DIRECTORIES = ("acpi", "asound", "scsi")
READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
MASKED_SYS = ("/sys/firmware", "/sys/devices/virtual/dmi", "/sys/devices/virtual/powercap")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fds:
    """Descriptor numbers that bwrap inherits."""

    args: int
    info: int
    status: int
    block: int
    alive: int
    seccomp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Programs by path: bwrap and sh as the launch executes them, the others as they stand in the payload's file system."""

    sh: str
    bwrap: str
    setsid: str
    setpriv: str
    env: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What this host has of the paths that are masked: names under /proc, paths under /sys."""

    proc: frozenset[str]
    sysfs: frozenset[str]


def render_options(
    plan: Plan, root: str, dev: str, seen: Seen, fds: Fds, variables: Mapping[str, str], *, die_with_parent: bool
) -> list[str]:
    """bwrap's options, as they go through `--args`: in no process list, so a --setenv value is in none either.

    `root` and `dev` are where the payload's file system and its /dev have been put together.
    """
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup"]
    options += ["--die-with-parent"] if die_with_parent else []
    # What setpriv needs to become the payload's user; it drops them all.
    options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    options += ["--info-fd", str(fds.info), "--json-status-fd", str(fds.status), "--block-fd", str(fds.block)]
    options += ["--sync-fd", str(fds.alive), "--seccomp", str(fds.seccomp)]
    options += ["--bind", root, "/", "--dev-bind", dev, "/dev", "--proc", "/proc"]
    options += plan.bwrap_args
    options += _locked_down(seen)
    # env(1) changes to the working directory, as the payload's user: root without capabilities may not enter a 0700 directory.
    options += ["--chdir", "/", "--clearenv"]
    for name, value in variables.items():
        if not environment.is_loader(name):
            options += ["--setenv", name, value]
    return options


def _locked_down(seen: Seen) -> list[str]:
    options = []
    for name in READ_ONLY:
        if name in seen.proc:
            options += ["--ro-bind", f"/proc/{name}", f"/proc/{name}"]
    for name in MASKED_FILES:
        if name in seen.proc:
            options += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    directories = [f"/proc/{name}" for name in MASKED_DIRECTORIES if name in seen.proc]
    for path in (*directories, *(path for path in MASKED_SYS if path in seen.sysfs)):
        options += ["--perms", "0555", "--tmpfs", path, "--remount-ro", path]
    return options


def render_command(
    plan: Plan, cgroup: str | None, fds: Fds, variables: Mapping[str, str], tools: Tools, *, controlling_terminal: bool
) -> list[str]:
    """`bwrap --args FD -- setsid ... setpriv ... env ... COMMAND`, by a shell that joins the `cgroup` first, where there is one.

    The payload leads a session of its own, without a terminal or with the run's own on its standard input: it shares none with the
    caller, and its process group holds nothing but what it started.
    """
    user = plan.user
    groups = ["--groups", ",".join(map(str, user.groups))] if user.groups else ["--clear-groups"]
    command = [] if cgroup is None else [tools.sh, "-c", JOIN, "sealnet", cgroup]
    command += [tools.bwrap, "--args", str(fds.args), "--"]
    command += [tools.setsid, *(["--ctty"] if controlling_terminal else [])]
    command += [tools.setpriv, "--reuid", str(user.uid), "--regid", str(user.gid), *groups]
    command += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all"]
    directory = plan.chdir or plan.cwd
    command += [tools.env, f"--chdir={directory}", "--"]
    # bwrap says "/" whatever its --setenv says, and env(1) leaves it at that: only a shell would mend it.
    command += [f"PWD={variables.get('PWD', directory)}"]
    command += [f"{name}={value}" for name, value in variables.items() if environment.is_loader(name)]
    if _is_misread(plan):
        command += ["/bin/sh", "-c", 'exec "$0" "$@"']
    return [*command, *plan.argv]


# Who becomes the payload by execve(2), in this order.
CHAIN = ("bwrap", "setsid", "setpriv", "env")


# Of these, bwrap's child is root's when it has executed so many: it is about to be setpriv(1).
AS_ROOT = 2


def executions(plan: Plan) -> int:
    """How many programs bwrap's child executes, the payload's the last: setsid, setpriv, env, and a shell where env would misread it."""
    return 5 if _is_misread(plan) else 4


def _is_misread(plan: Plan) -> bool:
    """env(1) would take it for an assignment, or for -i."""
    return "=" in plan.argv[0] or plan.argv[0] == "-"


# Joins the cgroup, then becomes bwrap.
JOIN = 'echo 0 >"$1/cgroup.procs" || exit 125; shift; exec "$@"'
