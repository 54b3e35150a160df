"""What the payload's file system is put together from, in order: a pure list of steps, carried out by sealnet.kernel.mounts."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sealnet.model.plan import Plan, profile_places


class Kind(enum.Enum):
    """`view`: read-only, no host socket answers in it. `bind`: the real thing, writable. `tmpfs`: empty. `sysfs`: the run's own."""

    VIEW = "view"
    BIND = "bind"
    TMPFS = "tmpfs"
    SYSFS = "sysfs"


@dataclass(frozen=True, slots=True)
class Step:
    """One mount at `dest`; `mode` is a tmpfs's. `sockets` is False where those of the host are covered, as far as they are found."""

    kind: Kind
    dest: str
    source: str = ""
    mode: int = 0o755
    sockets: bool = True

    def __str__(self) -> str:
        told = {Kind.TMPFS: f"{self.mode:04o}", Kind.SYSFS: ""}.get(self.kind, self.source)
        return f"{self.kind.value} {self.dest} {told}".rstrip()


_CWD_NEVER_BOUND = frozenset(
    "/ /bin /boot /dev /etc /home /lib /lib32 /lib64 /libx32 /lost+found /media /mnt /opt /proc /run /sbin /srv /sys /tmp /usr /var "
    "/var/run /var/tmp".split()
)


def cwd_is_bound(cwd: str, *, is_shared: bool = True) -> bool:
    """A system directory, and one that is not shared, is entered as it stands in the view; any other is the payload's to write."""
    return is_shared and cwd not in _CWD_NEVER_BOUND and not cwd.startswith(("/dev/", "/proc/", "/sys/"))


# What executes as root in the payload's file system, before it becomes the payload, reads here: loader, libraries, accounts, name services'
# sockets (an nscd of the caller's own could tell it that the caller is root).
_SYSTEM = frozenset("bin boot dev etc gnu lib lib32 lib64 libx32 lost+found nix opt proc run sbin snap sys usr var".split())
_OPEN = ("/var/tmp",)


def is_systems(path: str) -> bool:
    """Whether root's programs could read something at `path` or below before they have become the payload."""
    if any(path == place or path.startswith(f"{place}/") for place in _OPEN):
        return False
    return path.split("/")[1] in _SYSTEM


def replaces_programs(plan: Plan) -> bool:
    """Whether something of somebody's own may stand where those programs are, or what they read."""
    others = [*(bind.dest for bind in plan.binds if bind.dest != bind.source), *plan.tmpfs]
    return any(map(is_systems, [*others, *(dest for dest, _source in profile_places(plan.bwrap_args))]))


def layout(plan: Plan) -> tuple[Step, ...]:
    """The payload's file system but for /dev and /proc: the first has nodes of its own, the second belongs to bwrap's pid namespace."""
    steps = [
        Step(Kind.VIEW, "/", "/"),
        Step(Kind.SYSFS, "/sys"),
        Step(Kind.TMPFS, "/tmp", mode=0o1777),
        Step(Kind.TMPFS, "/var/tmp", mode=0o1777),
        Step(Kind.TMPFS, "/run"),
        Step(Kind.TMPFS, "/run/lock", mode=0o1777),
    ]
    if cwd_is_bound(plan.cwd, is_shared=plan.cwd_is_shared):
        steps.append(Step(Kind.BIND, plan.cwd, plan.cwd, sockets=False))
    elif cwd_is_bound(plan.cwd):
        steps.append(Step(Kind.VIEW, plan.cwd, plan.cwd))
    steps += [Step(Kind.BIND if bind.writable else Kind.VIEW, bind.dest, bind.source) for bind in plan.binds]
    steps += [Step(Kind.TMPFS, dest, mode=0o1777) for dest in plan.tmpfs]
    return tuple(steps)
