"""What a run is to be: frozen values that cannot be invalid, made before anything is touched."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network

from sealnet.errors import UsageError
from sealnet.model import names, policy
from sealnet.model.authority import Entry
from sealnet.model.policy import Confinement, Target

GRACE_S = 5.0
LEASE_TTL_S = 90
MAX_RUNS = 4096
# It stands in records, logs and listings.
_LONGEST_COMMAND = 4096
RESTORE, KILL = "restore", "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """Who the payload runs as."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """A host path in the payload's view. `source` and `dest` are absolute."""

    source: str
    dest: str
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run as it was asked for. The address is not in it: that is chosen when the host is looked at."""

    run_id: str
    confinement: Confinement
    argv: tuple[str, ...]
    user: User
    environment: dict[str, str]
    pass_env: tuple[str, ...] = ()
    set_env: tuple[str, ...] = ()
    """Names; the values stand in `environment`."""
    lease_port: int | None = None
    broker: Target | None = None
    allow: tuple[Entry, ...] = ()
    broker_env: tuple[str, ...] = ()
    cwd: str
    # False where sealnet's own code is in it: what root runs next must not be the payload's to write.
    cwd_is_shared: bool = True
    chdir: str | None = None
    binds: tuple[Bind, ...] = ()
    tmpfs: tuple[str, ...] = ()
    bwrap_args: tuple[str, ...] = ()
    timeout_s: float | None = None
    grace_s: float = GRACE_S
    allow_userns: bool = False
    preflight: bool = True
    fallback: str | None = None
    on_tamper: str = RESTORE
    build: tuple[str, ...] = ()
    """Of an image build: what `sealnet.model.buildargv.checked` has made of the words for buildah. The builder runs as root."""

    def __post_init__(self) -> None:
        names.run_id(self.run_id)
        if not self.argv or not self.argv[0]:
            raise UsageError("cannot run: no command was given", hint="put it last: -- COMMAND [ARG]...")
        if any("\0" in word for word in self.argv):
            raise UsageError("cannot run the command: an argument has a NUL byte")
        if any("\0" in value for value in self.environment.values()):
            # It would end the value and begin an option of bwrap's.
            raise UsageError("cannot run the command: a variable's value has a NUL byte")
        if self.lease_port is not None:
            policy.port(self.lease_port, "--lease-port")
        if self.lease_port is not None and self.broker is not None:
            raise UsageError("cannot use a lease port and a relay: a run has one broker")
        meant = Confinement.ALLOWLIST if self.allow else Confinement.SEALED if self.has_broker else Confinement.SEVERED
        if self.confinement not in ((meant,) if self.has_broker or self.allow else (meant, Confinement.OPEN)):
            raise UsageError(f"cannot make a {self.confinement} run: its broker and hosts make it {meant}")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise UsageError(f"cannot use --timeout {self.timeout_s:g}: it is a number of seconds, more than 0", hint="--timeout 600")
        if not 0 <= self.grace_s < float("inf"):
            raise UsageError(f"cannot use --grace {self.grace_s:g}: it is a number of seconds, 0 or more", hint="--grace 5")
        if self.fallback not in (None, "sever"):
            raise UsageError(f"cannot use --fallback {self.fallback}: the only one is 'sever'")
        if self.on_tamper not in (RESTORE, KILL):
            raise UsageError(f"cannot use --on-tamper {self.on_tamper}: it is {RESTORE} or {KILL}")

    @property
    def has_broker(self) -> bool:
        return self.lease_port is not None or self.broker is not None

    @property
    def is_leased(self) -> bool:
        """Whether anything of the host is reachable: a broker, or a proxy."""
        return self.has_broker or bool(self.allow)

    @property
    def has_door(self) -> bool:
        """Whether a process of ours stands between it and what it may reach."""
        return self.broker is not None or bool(self.allow)

    @property
    def command(self) -> str:
        """The command for people, on one line: its beginning, where it is long."""
        text = " ".join(self.argv)
        return text if len(text) <= _LONGEST_COMMAND else f"{text[: _LONGEST_COMMAND - 3]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The network side of one run, all of it: its names and, when it has leases, its addresses.

    `lease_port` leads to the run's broker, `proxy_port` to its proxy.
    """

    run_id: str
    subnet: IPv4Network | None = None
    lease_port: int | None = None
    proxy_port: int | None = None
    ifname: str = field(init=False)
    netns: str = field(init=False)

    def __post_init__(self) -> None:
        if (self.subnet is None) != (not self.ports):
            raise ValueError("a subnet goes with a lease port")
        if self.lease_port == self.proxy_port and self.ports:
            raise ValueError("a port leads to one door")
        object.__setattr__(self, "ifname", names.ifname(self.run_id))
        object.__setattr__(self, "netns", names.netns(self.run_id))

    @property
    def gateway(self) -> IPv4Address | None:
        return self.subnet.network_address + 1 if self.subnet is not None else None

    @property
    def sandbox(self) -> IPv4Address | None:
        return self.subnet.network_address + 2 if self.subnet is not None else None

    @property
    def ports(self) -> tuple[int, ...]:
        """Every leased port, the broker's first."""
        return tuple(port for port in (self.lease_port, self.proxy_port) if port is not None)

    @property
    def broker_url(self) -> str | None:
        return f"http://{self.gateway}:{self.lease_port}" if self.lease_port is not None else None

    @property
    def proxy_url(self) -> str | None:
        return f"http://{self.gateway}:{self.proxy_port}" if self.proxy_port is not None else None


# Mounting here would undo what the view guarantees.
_FIXED = ("/dev", "/proc", "/sys")


def mount_point(text: str, option: str, *, device: bool = False) -> str:
    """A normalised absolute destination that may be mounted on; below /dev only when it is for a `device` of a profile's."""
    if not text.startswith("/") or "\0" in text:
        raise UsageError(f"cannot use {option} {text!r}: a destination is an absolute path")
    path = posixpath.normpath("/" + text.lstrip("/"))
    if path == "/":
        raise UsageError(f"cannot use {option} /: the root of the view stays", hint="mount over /usr, /etc, ... one by one")
    if any(path == fixed or path.startswith(fixed + "/") for fixed in _FIXED) and not (device and path.startswith("/dev/")):
        raise UsageError(f"cannot use {option} {path}: /dev, /proc and /sys stay as they are in a run")
    return path


def bind(text: str, *, writable: bool, cwd: str) -> Bind:
    """`SRC[:DEST]`; a relative SRC is taken from `cwd`."""
    option = "--bind" if writable else "--ro-bind"
    source, colon, dest = text.partition(":")
    if not source or (colon and not dest) or "\0" in text:
        raise UsageError(f"cannot use {option} {text!r}: it must be SRC or SRC:DEST")
    source = posixpath.normpath(posixpath.join(cwd, source))
    return Bind(source=source, dest=mount_point(dest or source, option), writable=writable)


def require_own_places(binds: Sequence[Bind], tmpfs: Sequence[str]) -> None:
    """One thing stands at one place: UsageError where the second would hide the first."""
    stands: dict[str, str] = {}
    for place, what in (
        *((one.dest, f"--bind {one.source}" if one.writable else f"--ro-bind {one.source}") for one in binds),
        *((dest, "--tmpfs") for dest in tmpfs),
    ):
        if place in stands:
            raise UsageError(
                f"cannot put {stands[place]} and {what} at {place}: one would hide the other", hint="give one of the two another DEST"
            )
        stands[place] = what


# bwrap options that a profile may use, with the number of their arguments. Everything else could open what the seal shuts.
_PROFILE = {
    "--bind": 2, "--bind-try": 2, "--ro-bind": 2, "--ro-bind-try": 2, "--dev-bind": 2, "--dev-bind-try": 2, "--remount-ro": 1,
    "--tmpfs": 1, "--dir": 1, "--symlink": 2, "--chmod": 2, "--perms": 1, "--size": 1, "--mqueue": 1,
    "--hostname": 1, "--new-session": 0, "--die-with-parent": 0,
    "--unshare-ipc": 0, "--unshare-pid": 0, "--unshare-uts": 0, "--unshare-cgroup": 0, "--unshare-cgroup-try": 0,
}  # fmt: skip
_NO_DEVICE = (
    "/",
    "/dev",
    "/dev/net",
    "/dev/net/tun",
    "/dev/vhost-net",
    "/dev/vhost-vsock",
    "/dev/vsock",
    "/dev/mem",
    "/dev/kmem",
    "/dev/port",
)


def profile(data: bytes, *, shared: Sequence[str] = ()) -> tuple[str, ...]:
    """The arguments of a --bwrap-args file, NUL- or newline-separated. An option that could weaken the seal is a UsageError.

    `shared` are the directories that are bound writable.
    """
    words = profile_words(data)
    position = 0
    while position < len(words):
        option = words[position]
        count = _PROFILE.get(option)
        if count is None:
            raise UsageError(
                f"cannot use {option!r} in --bwrap-args: it is not one of the options that leave the seal as it is",
                hint="allowed: " + " ".join(sorted(_PROFILE)),
            )
        arguments = words[position + 1 : position + 1 + count]
        if len(arguments) < count:
            raise UsageError(f"cannot use {option} in --bwrap-args: it takes {count} arguments")
        _check_profile(option, arguments, shared)
        position += 1 + count
    return tuple(words)


def profile_words(data: bytes) -> list[str]:
    text = data.decode("utf-8", "surrogateescape")
    return [word for word in (text.split("\0") if "\0" in text else text.splitlines()) if word]


def profile_places(words: Sequence[str]) -> list[tuple[str, str]]:
    """(destination, source or nothing) of everything that a profile mounts, for the view has to have a place for it."""
    found, position = [], 0
    while position < len(words):
        option = words[position]
        arguments = words[position + 1 : position + 1 + _PROFILE[option]]
        if option in ("--tmpfs", "--dir", "--mqueue"):
            found.append((posixpath.normpath(arguments[0]), ""))
        elif "bind" in option:
            found.append((posixpath.normpath(arguments[1]), arguments[0]))
        position += 1 + len(arguments)
    return found


def _check_profile(option: str, arguments: list[str], shared: Sequence[str]) -> None:
    if not arguments or option in ("--hostname", "--perms", "--size"):
        return
    dest = mount_point(arguments[-1], f"{option} in --bwrap-args:", device=option.startswith("--dev-bind"))
    for path in shared:
        if dest == path or dest.startswith(path + "/"):
            raise UsageError(
                f"cannot use {option} {dest} in --bwrap-args: payloads may write in {path}, and could lead bwrap elsewhere",
                hint="--bind, --ro-bind and --tmpfs are safe there",
            )
    if option.startswith("--dev-bind"):
        source = posixpath.normpath("/" + arguments[0].lstrip("/"))
        if source in _NO_DEVICE:
            raise UsageError(f"cannot use {option} {source} in --bwrap-args: that device leads out of the seal")
