"""The runs that may be seen, in an order: what `sealnet ls` and `sealnet top` have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address
from typing import Any

import click

from sealnet.cli import once, remote
from sealnet.looking import views
from sealnet.records import State

View = Mapping[str, Any]
Key = Callable[[View], Any]

KEYS: dict[str, Key] = {
    "run": lambda view: view["run_id"],
    "state": lambda view: view["state"],
    "confinement": lambda view: view["confinement"],
    "lease": lambda view: (int(IPv4Address(view["gateway"] or 0)), *view["lease_ports"][:1]),
    "user": lambda view: view["user"],
    "pid": lambda view: view["pid"] or 0,
    "started": lambda view: view["started"],
    "command": lambda view: view["command"],
}


def sort_options(keys: Sequence[str], default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`--sort` and `--reverse`."""

    def options(function: Callable[..., Any]) -> Callable[..., Any]:
        function = click.option("--reverse", is_flag=True, help="The other way round.")(function)
        told = f"In the order of one of {', '.join(keys)}; {default} without it."
        return once("--sort", "key", type=click.Choice(keys), metavar="KEY", help=told)(function)

    return options


def found() -> list[dict[str, Any]]:
    """As root every run there is, else the caller's own of the worker's; the oldest first. Raises NoSuchRun or CannotSeal."""
    worker = remote.for_user()
    if worker is None:
        return views(State())
    with worker:
        told: list[dict[str, Any]] = worker.ask("List")["runs"]
        return told


def lease(view: View) -> str:
    return f"{view['gateway']}:{view['lease_ports'][0]}" if view["gateway"] else "-"


def cpu_s(view: View) -> float | None:
    """Processor time of everything in the run's cgroup so far; None where that cannot be seen (cgroups(7): anybody may, on the host)."""
    for line in (_read(view, "cpu.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == "usage_usec":
            return int(value) / 1e6
    return None


def memory_bytes(view: View) -> int | None:
    """Of everything in the run's cgroup; None where its memory is not counted."""
    text = _read(view, "memory.current")
    return None if text is None else int(text)


def _read(view: View, name: str) -> str | None:
    if view.get("cgroup") is None:
        return None
    try:
        fd = os.open(os.path.join(view["cgroup"], name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(fd, 4096).decode("ascii")
    except OSError:
        # It has been removed meanwhile.
        return None
    finally:
        os.close(fd)
