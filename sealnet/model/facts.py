"""What `sealnet doctor` saw of a host: values, so that the judgement of them needs no host."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from sealnet.model import manners

Status = Literal["ok", "note", "warn", "fail"]

# What is found of a feature that there is, and of whatever an ordinary user may not look at.
WORKS = "works"
ROOT_ONLY = "not looked at, for that takes root"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One judgement. `does` is what sealnet does about it, `fix` one command or one setting; empty where there is nothing to say."""

    name: str
    status: Status
    found: str
    does: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something of the kernel's. `found` is None where it could not be looked for, and `said` why, or what the kernel answered."""

    name: str
    found: bool | None
    said: str = ""
    module: str = ""
    """What brings it, where that is a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A program or library. `path` is None where it is missing; `version` where it does not tell."""

    name: str
    package: str
    path: str | None
    version: str | None = None
    needed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A base chain of nf_tables, or (`legacy`) of a table of iptables-legacy. `hook` and `kind` are nft's own words."""

    family: str
    table: str
    name: str
    kind: str
    hook: str
    priority: int
    drops: bool
    legacy: bool = False

    def __str__(self) -> str:
        policy = "drop" if self.drops else "accept"
        if self.legacy:
            return f"iptables-legacy table {self.table}, chain {self.name}, policy {policy}"
        return f"table {self.family} {self.table}, chain {self.name} ({self.kind}, priority {self.priority}, policy {policy})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A running service. `sure` is false where only its name could be read."""

    name: str
    pid: int
    sure: bool = True

    def __str__(self) -> str:
        return f"{self.name} runs (pid {self.pid})" if self.sure else f"pid {self.pid} is called {self.name}; only root can tell what it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was seen. None, where it may be, is what could not be looked at."""

    release: str
    machine: str = "x86_64"
    root: bool
    has_worker: bool = False
    """A worker seals for who is not root."""
    lacking: tuple[str, ...] = ()
    """Capabilities that this root has not."""
    container: str | None = None
    """The mark of a container that was found."""
    sysctls_writable: bool | None = None
    features: tuple[Feature, ...] = ()
    tools: tuple[Tool, ...] = ()
    modules: Literal["here", "of another kernel", "none"] = "here"
    """Whether the modules of the running kernel are on disk."""
    modules_disabled: bool = False
    max_net_namespaces: int | None = None
    max_user_namespaces: int | None = None
    max_runs: int = 0

    chains: tuple[Chain, ...] | None = None
    chain_names: frozenset[str] = frozenset()
    """Names of chains of other tables that are only jumped to."""
    daemons: tuple[Daemon, ...] = ()
    installed: frozenset[str] = frozenset()
    """The services of `INSTALLED` that have all of their files."""
    ip_forward: bool = False
    rp_filter: int = 0

    pool: str = ""
    free: str | None = None
    exhausted: str = ""
    exhausted_hint: str = ""
    covering: tuple[str, ...] = ()
    """Wide routes that reach into the pool."""
    broad: tuple[str, ...] = ()
    """Routes broader than /8 that are no default."""
    rules: tuple[str, ...] = ()
    """Policy rules beside the kernel's own that can match a run's packets."""

    config_fault: str | None = None
    state_path: str = ""
    state_fault: str | None = None
    state_fix: str = "make room, or name another: SEALNET_STATE_DIR"
    gate: str | None = None
    """What is wrong with the gate; empty when it stands or is still to be put up."""
    orphans: tuple[str, ...] | None = None


# What `sealnet host install` writes, by service; udev's own program goes by another name than its tool.
INSTALLED = {"systemd-udevd" if one.name == "udev" else one.name: one.paths for one in manners.MANAGERS}
