"""The real kernel, as the stages of a run see it: each method does one thing, and its undo succeeds when there is nothing to undo."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from ipaddress import IPv4Address
from itertools import chain
from pathlib import Path

from sealnet.errors import CannotSeal, CannotTearDown
from sealnet.kernel import cgroup, firewall, links, netns, process, restore, routes, sockets, sysctl, within
from sealnet.kernel.gate import Gate
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.netns import Inside
from sealnet.model import names
from sealnet.model.check import Check, Seen, Side
from sealnet.model.firewall import Blame
from sealnet.model.plan import Seal
from sealnet.model.subnets import Occupant
from sealnet.model.tally import Attempts

# What a payload's resolv.conf names, so that lookups are seen.
RESOLVER = IPv4Address("192.0.2.53")
_CARRIER_S = 2.0
# A second try is only there to be followed; a veth takes microseconds.
_DRAIN_S = 0.25


class Host:
    """The namespace that sealnet itself runs in, and the runs' namespaces seen from there. For one thread at a time.

    `directory` is the state directory and `tag` what marks things outside it as its own.
    """

    def __init__(self, directory: Path, tag: str) -> None:
        self.tag = tag
        self.netlink = Netlink()
        self.gate = Gate(directory)

    def close(self) -> None:
        self.netlink.close()
        self.gate.close()

    # Looking

    def see_taken(self, runs: frozenset[int]) -> list[Occupant]:
        """Every IPv4 range in use, but what lies within the `runs`' blocks."""
        return routes.see_taken(self.netlink, runs)

    def see_taken_anew(self, runs: frozenset[int]) -> list[Occupant]:
        """The same where `see_taken` may count what has gone meanwhile."""
        return self.see_taken(runs)

    def an_address(self) -> str | None:
        """An IPv4 address of this host that is neither loopback nor a gateway."""
        return links.an_address(self.netlink, but=names.LINK_PREFIX)

    def listeners(self, port: int) -> list[sockets.Listener]:
        return sockets.listeners(port)

    def see(self, seal: Seal, inside: Inside) -> Seen:
        """Read everything of a seal back."""
        mark, inner_links, inner, filter_fault, filter_hash = within.see(inside, seal)
        rulesets = {"inside": filter_hash}
        host, gate_fault = Side(exists=False), None
        if seal.subnet is not None:
            host = within.see_side(self.netlink, seal.ifname)
            gate_fault, rulesets["gate"] = self.gate.see()
        return Seen(
            netns_inode=inside.inode,
            mark=mark,
            host=host,
            inside=inner,
            links_inside=inner_links,
            gate_fault=gate_fault,
            filter_fault=filter_fault,
            rulesets=rulesets,
        )

    def check_routes(self, seal: Seal) -> list[Check]:
        """The kernel's own answers to `ip route get` for each way that a packet of the run can take."""
        link = links.see(self.netlink, seal.ifname)
        if link is None or seal.sandbox is None or seal.gateway is None:
            return []
        rules: list[routes.Rule] | None = None

        def ask(name: str, expected: str, good: Callable[[routes.Found], bool], **lookup: object) -> Check:
            nonlocal rules
            began = time.perf_counter()
            found = routes.lookup(self.netlink, **lookup)  # type: ignore[arg-type]
            ok = good(found)
            told = str(found)
            if not ok:
                rules = routes.see_rules(self.netlink) if rules is None else rules
                suspects = routes.suspects(rules, found, destination=lookup["destination"], source=lookup.get("source"))  # type: ignore[arg-type]
                told += "".join(f"; ip rule {rule}" for rule in suspects[:2])
            text = routes.command(**lookup)  # type: ignore[arg-type]
            return Check(
                name=name, kind="state", asked=text, expected=expected, found=told, ok=ok, took_ms=(time.perf_counter() - began) * 1e3
            )

        def leaves_by_link(found: routes.Found) -> bool:
            return found.kind == "unicast" and found.oif == link.ifindex and found.gateway is None

        way = f"unicast dev {seal.ifname}"
        checks = [ask("route-to-sandbox", way, leaves_by_link, destination=seal.sandbox, source=seal.gateway)]
        for port in seal.ports:
            for uid in sorted({listener.uid for listener in self.listeners(port)}):
                answer = {"destination": seal.sandbox, "source": seal.gateway, "uid": uid, "tcp_sport": port}
                checks.append(ask("route-of-broker", way, leaves_by_link, **answer))
        checks.append(
            ask(
                "route-to-gateway",
                "local",
                lambda found: found.kind == "local",
                destination=seal.gateway,
                source=seal.sandbox,
                iif=link.ifindex,
            )
        )
        checks.append(
            ask(
                "route-to-canary",
                "a refusal",
                lambda found: found.refusal is not None,
                destination=within.CANARY,
                source=seal.sandbox,
                iif=link.ifindex,
            )
        )
        return checks

    # Building

    def add_gate(self) -> str:
        return self.gate.add()

    def add_netns(self, seal: Seal, born: Callable[[Inside], None] | None = None) -> Inside:
        """A new namespace with its name, marked as the run's, everything in it down. `born` is given it before that."""
        try:
            inside = Inside.new(seal.netns)
        except OSError as e:
            raise CannotSeal(f"cannot add netns {seal.netns}: {os.strerror(e.errno or 0)}") from e
        try:
            if born is not None:
                born(inside)
            mark = names.mark(seal.run_id, self.tag)
            inside.kept = inside.call(partial(within.begin, mark, is_linked=seal.subnet is not None))
            netns.add_name(seal.netns, inside.fd)
        except BaseException:
            inside.close()
            raise
        return inside

    def add_filter(self, seal: Seal, inside: Inside) -> None:
        """The filter inside the namespace, then lo and the sink. Nothing in there is up before the filter stands."""
        within.add_filter(inside, seal)

    def add_link(self, seal: Seal, inside: Inside, alias: str) -> int:
        """Both ends of the link, addressed and quiet but down; the host end's index."""
        if seal.subnet is None or seal.gateway is None:
            raise ValueError("a severed run has no link")
        index = links.add_veth(
            self.netlink,
            name=seal.ifname,
            mac=names.mac(seal.run_id, end=0),
            group=names.LINK_GROUP,
            peer_name=names.SANDBOX_LINK,
            peer_mac=names.mac(seal.run_id, end=1),
            netns_fd=inside.fd,
        )
        sysctl.set_link(seal.ifname)
        self.netlink.exchange(
            [
                links.quiet(index, alias=names.link_alias(seal.run_id, self.tag, alias)),
                links.add_altname(index, seal.netns),
                links.add_address(index, seal.gateway, seal.subnet.prefixlen),
            ]
        )
        within.set_up_sandbox(inside, seal)
        return index

    def bring_up(self, seal: Seal, inside: Inside, index: int) -> None:
        """Both ends up, and carrier on both: a SYN sent before that is lost, and TCP repeats it only a second later."""
        if seal.sandbox is None:
            raise ValueError("a severed run has no link")
        # A link that goes down forgets its neighbours, so they come after it is up.
        self.netlink.exchange([links.bring_up(index), links.add_neighbour(index, seal.sandbox, names.mac(seal.run_id, end=1))])
        within.bring_up_sandbox(inside, seal)
        deadline = time.monotonic() + _CARRIER_S
        while not ((link := links.see(self.netlink, seal.ifname)) and link.running):
            if time.monotonic() > deadline:
                raise CannotSeal(f"cannot bring up link {seal.ifname}: no carrier after {_CARRIER_S:g} s")
            time.sleep(0.0005)

    def grant(self, seal: Seal, *, ttl_s: int) -> bool:
        return self.gate.grant(seal, ttl_s=ttl_s)

    def has_lease(self, seal: Seal) -> bool:
        return self.gate.has(seal)

    def has_gateway(self, seal: Seal) -> bool:
        return self.gate.guards(seal)

    # Putting back

    def restore_gate(self, *, ttl_s: int) -> None:
        self.gate.restore(ttl_s=ttl_s)

    def restore_filter(self, seal: Seal, inside: Inside) -> None:
        inside.call(restore.put_back_filter, seal)

    def restore_link(self, seal: Seal, inside: Inside) -> None:
        """Both ends of the run's link."""
        if seal.subnet is not None and seal.gateway is not None:
            restore.put_back_side(self.netlink, seal.ifname, seal.gateway, seal.subnet.prefixlen)
            inside.call(restore.put_back_sandbox, seal)

    def restore_sink(self, inside: Inside) -> None:
        inside.call(restore.put_back_sink)

    def see_sink(self, inside: Inside) -> str | None:
        """Where packets of the run to strangers would go, when that is not the sink."""
        return inside.call(restore.see_sink)

    def see_settings(self, seal: Seal, inside: Inside) -> list[dict[str, str]]:
        """The settings of both ends, which the kernel mostly changes without telling anybody."""
        if seal.subnet is None:
            return []
        if inside.netnsid is None:
            # The link between the two namespaces has given the run's a number here, which stays. Where there never was one, there is none.
            inside.netnsid = links.netnsid(self.netlink, inside.fd)
        if inside.netnsid is None:
            return [{}, {}]
        ends = links.see_both(self.netlink, seal.ifname, names.SANDBOX_LINK, inside.netnsid)
        return [{} if link is None else sysctl.told(link.specific) for link in ends]

    def blame(self, seal: Seal, port: int, probe: Callable[[], bool]) -> Blame:
        """Who keeps the broker from a run that could not reach it: `probe`, one more try, with its packets traced."""
        return firewall.blame(seal.ifname, port, probe)

    def tried(self, inside: Inside, probed: Mapping[tuple[str, str, int], int]) -> Attempts:
        """Everything that the payload tried to reach beside its lease; `probed` are proofs' own."""
        return within.tried(inside, probed)

    def denied(self, seal: Seal) -> list[tuple[str, str, int, int]]:
        return self.gate.denied(seal.ifname)

    def counters(self, seal: Seal) -> dict[str, int]:
        """What came from the payload (received) and went to it (sent), at the host end."""
        return links.see_counters(self.netlink, seal.ifname) if seal.subnet is not None else {}

    def add_cgroup(self, run_id: str) -> Path:
        return cgroup.add(run_id, self.tag)

    # Ending

    def join(self, run_id: str, hint: int | None = None) -> Inside | None:
        """A thread in the run's namespace, found by name or by any process in it, and proved by its mark; None when there is none."""
        fd = netns.open_name(names.netns(run_id))
        # One at a time: whoever is found first leaves the others unopened.
        for candidate in chain([fd] if fd is not None else [], self._namespaces(hint)):
            try:
                if self._is_own(candidate, run_id):
                    return Inside.joined(candidate, names.netns(run_id))
            except OSError:
                continue
            finally:
                os.close(candidate)
        return None

    def _namespaces(self, hint: int | None) -> Iterator[int]:
        """A descriptor of each network namespace that a process is in, but our own; the one of inode `hint` alone when it is there."""
        seen: dict[int, list[int]] = {}
        own = netns.inode_of("self")
        for pid in process.pids():
            inode = netns.inode_of(pid)
            if inode is not None and inode != own:
                seen.setdefault(inode, []).append(pid)
        for inode in [hint] if hint in seen else list(seen):
            # Some may have ended meanwhile, and others be in it still.
            for pid in seen[inode]:
                with contextlib.suppress(OSError):
                    yield os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
                    break

    def kill(self, run_id: str, inside: Inside | None) -> None:
        """End every process of the run: its cgroup, then whoever else is in its namespace, by inode."""
        group = self._own_cgroup(run_id)
        if group is not None:
            cgroup.kill(group)
        if inside is not None:
            _kill_inside(inside.inode)

    def _own_cgroup(self, run_id: str) -> Path | None:
        try:
            return cgroup.find(run_id, self.tag)
        except CannotSeal:
            return None

    def settle(self, sandbox: IPv4Address | None) -> None:
        """Let the broker's ends of the run's connections see their end; after a moment cut what still believes it lives."""
        if sandbox is None:
            return
        deadline = time.monotonic() + _DRAIN_S
        while self.is_connected(sandbox):
            if time.monotonic() > deadline:
                sockets.destroy(sandbox)
                return
            time.sleep(0.005)

    def is_connected(self, sandbox: IPv4Address) -> bool:
        """Whether a socket of this host's still believes in a connection with a sandbox."""
        return bool(sockets.connected([sandbox]))

    def revoke(self, seal: Seal) -> None:
        self.gate.forget(seal)

    def withdraw(self, seal: Seal, ports: Sequence[int]) -> None:
        self.gate.withdraw(seal, ports)

    def sandbox_of(self, ifname: str) -> IPv4Address | None:
        """The sandbox address that a link's lease names, for when nothing else tells it."""
        return self.gate.sandbox_of(ifname)

    def remove_link(self, run_id: str) -> None:
        """Delete the run's link, and what the gate has counted of it, when it is the run's: its MAC is given in one with its creation."""
        name = names.ifname(run_id)
        link = links.see(self.netlink, name) or links.see(self.netlink, names.netns(run_id))
        if link is not None:
            # One that was made and not yet marked is told by its MAC; another state directory's run of that id has the same.
            unmarked = not link.alias.startswith("sealnet ") and link.mac == names.mac(run_id, end=0)
            if not unmarked and names.run_of_alias(link.alias, self.tag) != run_id:
                return
            self.delete_link(link.ifindex, link.name)
        self.gate.forget_denied(name)

    def delete_link(self, index: int, name: str) -> None:
        links.remove(self.netlink, index, name)

    def remove_netns(self, run_id: str, *, inode: int | None = None, everywhere: bool = False) -> None:
        """Take the name away here and, when asked, in every other mount namespace that has a copy of it.

        The name is the run's when it leads to the namespace of that `inode`, which the caller still held a moment ago, or to the mark.
        """
        name = names.netns(run_id)
        fd = netns.open_name(name)
        if fd is not None:
            try:
                if os.fstat(fd).st_ino != inode and not self._is_own(fd, run_id):
                    return
            finally:
                os.close(fd)
        netns.remove_name(name)
        if everywhere:
            netns.remove_name_elsewhere(name, lambda fd: self._is_own(fd, run_id))

    def _is_own(self, fd: int, run_id: str) -> bool:
        """Whether a network namespace carries the run's mark."""
        try:
            with Inside.joined(fd, names.netns(run_id)) as inside:
                return inside.call(within.read_mark) == names.mark(run_id, self.tag)
        except OSError:
            return False

    def remove_cgroup(self, run_id: str) -> None:
        group = self._own_cgroup(run_id)
        if group is not None:
            cgroup.remove(group)

    # Orphans

    def traces(self) -> set[str]:
        """The run id of everything here that carries this state directory's mark: links, netns names, cgroups."""
        found = {run_id for link in links.see_all(self.netlink) if (run_id := names.run_of_alias(link.alias, self.tag))}
        found |= set(cgroup.run_ids(self.tag))
        for name in netns.names():
            run_id = names.run_of_netns(name)
            # Whose name it is matters only where nothing else has told of the run: to ask costs a thread.
            fd = netns.open_name(name) if run_id and run_id not in found else None
            if run_id and fd is not None:
                if self._is_own(fd, run_id):
                    found.add(run_id)
                os.close(fd)
        return found

    def stranger(self, run_id: str) -> str | None:
        """The link that has this run's name and another state directory's mark, if there is one."""
        for link in links.see_all(self.netlink):
            words = link.alias.split(" ")
            if names.netns(run_id) in link.altnames and words[:2] == ["sealnet", run_id] and words[2:3] != [self.tag]:
                return link.name
        return None


def _kill_inside(inode: int) -> None:
    deadline = time.monotonic() + 5.0
    while found := _CENSUS.take().get(inode, []):
        if time.monotonic() > deadline:
            raise CannotTearDown(f"cannot end processes {found}: they are still in the run's namespace")
        for pid in found:
            # A pidfd names one process for good, so a reused pid is never hit.
            with contextlib.suppress(OSError), contextlib.closing(_Pidfd(pid)) as pidfd:
                if netns.inode_of(pid) == inode:
                    signal.pidfd_send_signal(pidfd.fd, signal.SIGKILL)
        time.sleep(0.002)


_LISTINGS = 4


class _Census:
    """Which processes are in each network namespace. One look at them all serves everybody who had asked before it began.

    When a hundred runs end together, each of them looks: 5 us for every process of the host, and every run has three.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0
        self._taken: tuple[int, dict[int, list[int]]] = (0, {})

    def take(self) -> dict[int, list[int]]:
        """By inode, as of some moment after this call; but our own process."""
        # One that goes on has begun too early for us.
        wanted = self._begun + 1
        with self._lock:
            if self._taken[0] < wanted:
                self._begun += 1
                self._taken = (self._begun, self._look())
            return self._taken[1]

    @staticmethod
    def _look() -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        seen: set[int] = set()
        # One that has died since they were listed may have had a child by then, which was not there to be listed: who has come meanwhile
        # is looked at as well. Whoever goes on so for long is ended by his cgroup.
        for _ in range(_LISTINGS):
            new = [pid for pid in process.pids() if pid not in seen]
            if not _sort(new, found):
                break
            seen.update(new)
        return found


def _sort(pids: Iterable[int], found: dict[int, list[int]]) -> bool:
    """Each process but our own by the inode of its namespace; whether one of them is dead."""
    own, is_one_dead = os.getpid(), False
    for pid in pids:
        inode = netns.inode_of(pid)
        if inode is None:
            is_one_dead = True
        elif pid != own:
            found.setdefault(inode, []).append(pid)
    return is_one_dead


_CENSUS = _Census()


class _Pidfd:
    def __init__(self, pid: int) -> None:
        self.fd = os.pidfd_open(pid)

    def close(self) -> None:
        os.close(self.fd)
