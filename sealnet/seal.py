"""The seal of one run on one page: apply, verify, teardown."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Protocol

from sealnet.errors import CannotTearDown, NotSealed, SealnetError
from sealnet.model import check, names
from sealnet.model.check import Check, Seen
from sealnet.model.plan import Seal

# For whoever finds that a new link is not left as it was made.
KEEP_OFF = "another program changes new links; keep this host's network managers off those of runs: sealnet host install"


class Kernel(Protocol):
    """What the seal asks of the kernel: sealnet.kernel.host.Host, or a fake. `inside` is the kernel's own handle of a namespace."""

    tag: str

    def add_gate(self) -> str: ...
    def add_netns(self, seal: Seal, born: Callable[[Any], None] | None = None) -> Any: ...
    def add_filter(self, seal: Seal, inside: Any) -> None: ...
    def add_link(self, seal: Seal, inside: Any, alias: str) -> int: ...
    def bring_up(self, seal: Seal, inside: Any, index: int) -> None: ...
    def see(self, seal: Seal, inside: Any) -> Seen: ...
    def check_routes(self, seal: Seal) -> list[Check]: ...
    def grant(self, seal: Seal, *, ttl_s: int) -> bool: ...
    def add_cgroup(self, run_id: str) -> Path: ...

    def has_lease(self, seal: Seal) -> bool: ...
    def has_gateway(self, seal: Seal) -> bool: ...
    def see_sink(self, inside: Any) -> str | None: ...
    def see_settings(self, seal: Seal, inside: Any) -> list[dict[str, str]]: ...
    def restore_gate(self, *, ttl_s: int) -> None: ...
    def restore_filter(self, seal: Seal, inside: Any) -> None: ...
    def restore_link(self, seal: Seal, inside: Any) -> None: ...
    def restore_sink(self, inside: Any) -> None: ...

    def join(self, run_id: str, hint: int | None = None) -> Any | None: ...
    def kill(self, run_id: str, inside: Any | None) -> None: ...
    def sandbox_of(self, ifname: str) -> IPv4Address | None: ...
    def settle(self, sandbox: IPv4Address | None) -> None: ...
    def revoke(self, seal: Seal) -> None: ...
    def withdraw(self, seal: Seal, ports: Sequence[int]) -> None: ...
    def remove_link(self, run_id: str) -> None: ...
    def remove_netns(self, run_id: str, *, inode: int | None = None, everywhere: bool = False) -> None: ...
    def remove_cgroup(self, run_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Applied:
    """A seal that stands and was read back. The lease is not granted yet."""

    inside: Any
    ifindex: int | None
    seen: Seen
    checks: list[Check]


def apply(
    kernel: Kernel,
    seal: Seal,
    *,
    alias: str,
    sysctls: dict[str, str],
    born: Callable[[Any], None] | None = None,
    begin: Callable[[Any], None] = lambda _inside: None,
) -> Applied:
    """Build the seal, read it back, compare; on any failure what was made is taken away again.

    For what takes its time beside the rest: `born` is given the namespace as soon as there is one, and is to put nothing into it that could
    outlive us; `begin` is given it once it is marked and has its name, by which whatever is in it can be found.
    """
    with ExitStack() as undo:
        index = None
        # The gate is first: a link that is up before it would be open.
        if seal.subnet is not None:
            kernel.add_gate()
        inside = kernel.add_netns(seal, born)
        undo.callback(inside.close)
        undo.callback(kernel.remove_netns, seal.run_id)
        begin(inside)
        kernel.add_filter(seal, inside)
        if seal.subnet is not None:
            undo.callback(kernel.remove_link, seal.run_id)
            index = kernel.add_link(seal, inside, alias)
            kernel.bring_up(seal, inside, index)
        seen, checks = verify(kernel, seal, inside, sysctls=sysctls)
        undo.pop_all()
        return Applied(inside, index, seen, checks)


def verify(kernel: Kernel, seal: Seal, inside: Any, *, sysctls: dict[str, str]) -> tuple[Seen, list[Check]]:
    """Read everything back; NotSealed names each difference and each route that does not lead where it must."""
    began = time.perf_counter()
    seen = kernel.see(seal, inside)
    faults = check.faults(
        seal,
        seen,
        mark=names.mark(seal.run_id, kernel.tag),
        sysctls=sysctls,
        macs=(names.mac(seal.run_id, end=0), names.mac(seal.run_id, end=1)),
        group=names.LINK_GROUP,
    )
    found = [fault.text for fault in faults]
    whole = check.read_back(seal, found, took_ms=(time.perf_counter() - began) * 1e3)
    checks = kernel.check_routes(seal) if seal.subnet is not None else []
    wrong = check.told_once([one for one in checks if not one.ok])
    found += wrong
    if seal.subnet is not None and not checks:
        found.append(f"no route of link {seal.ifname} could be looked up")
    if found:
        hint = "a policy rule or another program has its hand on the link: repeat the command quoted above" if wrong else None
        if any(fault.kind in check.OF_THE_LINK for fault in faults):
            hint = KEEP_OFF
        raise NotSealed(f"cannot seal run {seal.run_id}: {'; '.join(found)}", hint=hint)
    return seen, [whole, *checks]


def teardown(
    kernel: Kernel,
    seal: Seal,
    *,
    inside: Any | None,
    release: Callable[[str], None],
    everywhere: bool = False,
) -> None:
    """Take a run away. Every step is tried whatever became of the others; what failed is raised as one CannotTearDown.

    Processes are first: a lease or link that goes before them leaves the broker with connections that nobody will ever end.
    """
    run_id = seal.run_id
    failures: list[Exception] = []

    def step(what: str) -> Any:
        return _gathered(what, failures)

    with step("end its processes"):
        kernel.kill(run_id, inside)
    with step("end its connections"):
        kernel.settle(seal.sandbox if seal.sandbox is not None else kernel.sandbox_of(seal.ifname))
    with step("revoke its lease"):
        kernel.revoke(seal)
    with step("remove its link"):
        kernel.remove_link(run_id)
    with step("remove its netns"):
        if inside is not None:
            inside.close()
        kernel.remove_netns(run_id, inode=inside.inode if inside is not None else None, everywhere=everywhere)
    with step("remove its cgroup"):
        kernel.remove_cgroup(run_id)
    if not failures:
        with step("release its subnet"):
            release(run_id)
    if failures:
        raise CannotTearDown(
            f"cannot tear down run {run_id}: {'; '.join(map(str, failures))}", hint=f"try again: sealnet reap {run_id}"
        ) from ExceptionGroup("teardown", failures)


@contextmanager
def _gathered(what: str, failures: list[Exception]) -> Iterator[None]:
    try:
        yield
    except SealnetError as error:
        failures.append(error)
    except Exception as error:  # noqa: BLE001 - a bug in one step must not keep the other steps from being tried
        error.add_note(f"while sealnet tried to {what}")
        failures.append(error)
