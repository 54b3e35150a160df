"""What is seen of a real host: features by use, chains by a dump, services by what they are."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from sealnet.errors import KernelRefused
from sealnet.kernel import daemons, firewalls, libc, nfnetlink, routes, survey
from sealnet.kernel.netlink import Netlink
from sealnet.kernel.nft import Nft
from sealnet.kernel.seccomp import ARCHITECTURES
from sealnet.model.requirements import MACHINES
from tests import lab
from tests.crash import descriptors

pytestmark = pytest.mark.root


# Features


def test_every_feature_works_here_and_trying_leaves_nothing(host: lab.Host) -> None:
    survey.features(root=True)
    before, threads = descriptors(), threading.active_count()

    found = survey.features(root=True)

    assert [feature for feature in found if not feature.found] == []
    assert {"openat2", "overlay", "network namespaces", "veth", "nft fib", "nft notrack", "the gate"} <= {feature.name for feature in found}
    assert descriptors() == before
    assert threading.active_count() == threads
    assert host.run("nft", "list", "tables").stdout == ""


def test_a_rule_that_the_kernel_refuses_is_a_feature_that_is_missing(host: lab.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Nft.apply

    def apply(self: Nft, text: str, what: str) -> None:
        if "notrack" in text:
            raise KernelRefused(f"cannot {what}: Could not process rule: No such file or directory", errno=errno.ENOENT)
        real(self, text, what)

    monkeypatch.setattr(Nft, "apply", apply)

    missing = {feature.name: feature for feature in survey.features(root=True) if not feature.found}

    assert set(missing) == {"nft notrack", "the gate"}
    assert (missing["nft notrack"].found, missing["nft notrack"].module) == (False, "nft_ct")
    assert "No such file or directory" in missing["nft notrack"].said


def test_a_file_system_that_the_kernel_has_not_is_told_by_errno() -> None:
    os.close(libc.fsopen("overlay"))

    with pytest.raises(OSError, match="No such device"):
        libc.fsopen("nosuchfs")


def test_no_namespace_is_a_feature_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_flags: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(libc, "unshare", refused)

    found = {feature.name: feature for feature in survey.features(root=True)}

    assert (found["network namespaces"].found, found["network namespaces"].said) == (False, "No space left on device")


def test_every_tool_is_found_with_its_version(host: lab.Host) -> None:
    found = {tool.name: tool for tool in survey.tools()}
    with lab.without(host, "/usr/bin/bwrap"):
        hidden = {tool.name: tool for tool in survey.tools()}

    assert [tool.name for tool in found.values() if tool.path is None] == []
    assert all(found[name].version for name in ("bwrap", "setpriv", "libnftables", "libseccomp"))
    assert found["bwrap"].version == host.run("bwrap", "--version").stdout.split()[1]
    assert [tool.name for tool in hidden.values() if tool.path is None] == ["bwrap"]


@pytest.mark.parametrize(
    ("options", "fill", "fault"),
    [
        ("size=16m", False, None),
        ("size=16m,ro", False, "Read-only file system"),
        ("size=2m", True, "No space left on device"),
        ("size=16m,nr_inodes=2", True, "No space left on device"),
        ("size=0", False, None),
    ],
)
def test_a_place_that_cannot_be_written_is_told(host: lab.Host, options: str, fill: bool, fault: str | None) -> None:
    place = host.directory / "place"
    place.mkdir()
    host.run("mount", "-t", "tmpfs", "-o", options, "none", str(place))
    try:
        if fill:
            (place / "full").write_bytes(b"" if "inodes" in options else bytes(1536 << 10))
        assert survey.storage_fault(place / "not" / "yet") == fault
    finally:
        host.run("umount", str(place))


def test_the_architectures_that_are_told_are_those_that_a_filter_is_made_for() -> None:
    assert set(MACHINES) == set(ARCHITECTURES)


# Firewalls


def test_every_base_chain_is_seen_as_nft_tells_it(host: lab.Host) -> None:
    text = """
        table inet fw { chain in { type filter hook input priority filter + 3; policy drop; }; chain jumped { } ; }
        table ip nat { chain DOCKER { } ; chain PREROUTING { type nat hook prerouting priority dstnat; } ; }
        table ip6 fw { chain out { type filter hook output priority -5; } ; }
        table arp fw { chain in { type filter hook input priority 0; } ; }
    """
    host.run("nft", "-f", "-", input=text.replace(";", "\n").replace("{", "{\n").replace("}", "\n}\n"))
    chains, names = firewalls.see()
    everything = nfnetlink.see_chains()
    for family, table in (("inet", "fw"), ("ip", "nat"), ("ip6", "fw"), ("arp", "fw")):
        host.run("nft", "delete", "table", family, table)

    assert [(chain.family, chain.table, chain.name, chain.kind, chain.hook, chain.priority, chain.drops) for chain in chains] == [
        ("inet", "fw", "in", "filter", "input", 3, True),
        ("ip", "nat", "PREROUTING", "nat", "prerouting", -100, False),
        ("ip6", "fw", "out", "filter", "output", -5, False),
        ("arp", "fw", "in", "filter", "0", 0, False),
    ]
    assert names == {"jumped", "DOCKER"}
    assert len(everything) == 6
    assert firewalls.see() == ((), frozenset())


@pytest.mark.tool("iptables-legacy")
def test_the_policies_of_iptables_legacy_are_seen_and_not_made(host: lab.Host) -> None:
    names = Path("/proc/net/ip_tables_names")
    before = firewalls.see(), names.read_text()
    host.run("iptables-legacy", "-A", "INPUT", "-p", "tcp", "--dport", "22", "-j", "ACCEPT")
    host.run("iptables-legacy", "-P", "FORWARD", "DROP")
    host.run("iptables-legacy", "-N", "mine")
    forward = firewalls.see()[0]
    host.run("iptables-legacy", "-P", "INPUT", "DROP")
    both = firewalls.see()[0]

    assert before == (((), frozenset()), "")
    assert [(chain.name, chain.hook, chain.drops) for chain in forward if chain.legacy] == [
        ("INPUT", "input", False),
        ("FORWARD", "forward", True),
        ("OUTPUT", "output", False),
    ]
    assert [chain.name for chain in both if chain.drops] == ["INPUT", "FORWARD"]


# Services


@pytest.fixture
def usr_sbin(host: lab.Host) -> Path:
    """/usr/sbin of this throw-away host, to be written to."""
    for name in ("upper", "work"):
        os.mkdir(f"/run/{name}", 0o755)
    host.run("mount", "-t", "overlay", "-o", "lowerdir=/usr/sbin,upperdir=/run/upper,workdir=/run/work", "none", "/usr/sbin")
    return Path("/usr/sbin")


SCRIPT = f"#!{os.path.realpath('/usr/bin/python3')}\nimport time\ntime.sleep(600)\n"


def started(host: lab.Host, path: Path, *prefix: str) -> subprocess.Popen[str]:
    """`path`, once the kernel has given the process its name."""
    process = host.spawn(*prefix, str(path))
    lab.wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == f"{path.name}\n", what=f"{path} runs")
    return process


def test_a_service_that_runs_is_found_a_script_and_a_program(host: lab.Host, usr_sbin: Path) -> None:
    (usr_sbin / "firewalld").write_text(SCRIPT)
    (usr_sbin / "firewalld").chmod(0o755)
    (usr_sbin / "dockerd").write_bytes(Path("/usr/bin/yes").read_bytes())
    (usr_sbin / "dockerd").chmod(0o755)
    before = daemons.see()
    processes = {name: started(host, usr_sbin / name) for name in ("firewalld", "dockerd")}

    found = daemons.see()

    assert before == []
    assert {daemon.name: (daemon.pid, daemon.sure) for daemon in found} == {name: (one.pid, True) for name, one in processes.items()}


@pytest.mark.parametrize("how", ["in-tmp", "renamed", "ordinary-user", "writable", "another-netns", "an-argument"])
def test_what_only_has_the_name_of_a_service_is_not_found(host: lab.Host, usr_sbin: Path, how: str) -> None:
    path, prefix = usr_sbin / "firewalld", ()
    path.write_text(SCRIPT)
    path.chmod(0o755)
    genuine = started(host, path)
    told = [daemon.pid for daemon in daemons.see()]
    host.stop(genuine)
    if how in ("in-tmp", "renamed"):
        # Anybody may have a program of that name, and any process may call itself so.
        path = host.directory / "firewalld"
        path.write_text("#!/bin/sh\nsleep 600\n" if how == "renamed" else SCRIPT)
        os.chown(path, 65534, 65534)
        path.chmod(0o755)
    elif how == "ordinary-user":
        prefix = ("setpriv", "--reuid=12345", "--clear-groups")
    elif how == "writable":
        path.chmod(0o777)
    elif how == "another-netns":
        prefix = ("ip", "netns", "exec", "lan")

    if how == "an-argument":
        host.spawn("/usr/bin/python3", "-c", "import time; time.sleep(600)", str(path))
    else:
        started(host, path, *prefix)

    assert told == [genuine.pid]
    assert daemons.see() == []


# Routes


def test_routes_that_are_nearly_a_default_are_seen(host: lab.Host) -> None:
    for prefix in ("0.0.0.0/1", "128.0.0.0/1", "10.0.0.0/8", "default"):
        host.run("ip", "route", "add", prefix, "via", lab.LAN_PEER)
    with Netlink() as netlink:
        found = routes.see_broad(netlink)
    for prefix in ("0.0.0.0/1", "128.0.0.0/1", "10.0.0.0/8", "default"):
        host.run("ip", "route", "del", prefix, "via", lab.LAN_PEER)

    assert found == [f"{prefix} via {lab.LAN_PEER}, table main" for prefix in ("0.0.0.0/1", "128.0.0.0/1")]


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        ("to 198.18.0.0/16 lookup 75", True),
        ("from 198.18.7.0/24 lookup 75", True),
        ("lookup 75", True),
        ("not fwmark 0xca6c lookup 51820", True),
        ("iif lo lookup 75", True),
        ("to 172.16.0.0/12 lookup 75", False),
        ("from 192.168.77.0/24 lookup 75", False),
        ("iif lan0 lookup 75", False),
        ("oif lan0 lookup 75", False),
    ],
)
def test_a_policy_rule_that_can_match_a_run_is_named(host: lab.Host, rule: str, matches: bool) -> None:
    pool = [IPv4Network("198.18.0.0/15")]
    host.run("ip", "rule", "add", *rule.split(), "priority", "50")
    with Netlink() as netlink:
        found = routes.bending(routes.see_rules(netlink), pool)
    host.run("ip", "rule", "del", "priority", "50")
    with Netlink() as netlink:
        without = routes.bending(routes.see_rules(netlink), pool)

    assert [one.priority for one in found] == ([50] if matches else [])
    assert without == []
