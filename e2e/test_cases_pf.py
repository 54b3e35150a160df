"""The packet filter: what leaves a run, what comes into it, and what others do to the host's rules meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import textwrap
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any

import pytest

from tests.lab import LAN_HOST, LAN_PEER, SEALNET, Host, Probe, wait_for

pytestmark = pytest.mark.root

SEALED = ("--lease-port", "8080")
# Whom payloads run as beside root: an account, a bare uid.
OTHER_USERS = ("nobody", "1234")
CONTAINER = "172.30.0.2"

# Answers over TCP and UDP and writes down who came.
_SERVICE = """
    import json, selectors, socket, sys

    log = open(sys.argv[1], "a", buffering=1)
    selector = selectors.DefaultSelector()
    for kind, address, port in json.loads(sys.argv[2]):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IP, 15, 1)  # IP_FREEBIND
        sock.bind((address, port))
        if kind == "tcp":
            sock.listen(64)
        selector.register(sock, selectors.EVENT_READ, (kind, port))
    print("listening", flush=True)
    held = {}
    while True:
        for key, _ in selector.select():
            kind, port = key.data
            if kind == "tcp":
                sock, peer = key.fileobj.accept()
                log.write(f"tcp {port} {peer[0]}\\n")
                held[sock] = peer
                selector.register(sock, selectors.EVENT_READ, ("connection", port))
            elif kind == "connection":
                try:
                    data = key.fileobj.recv(4096)
                    end = "eof"
                except OSError as error:
                    data, end = b"", type(error).__name__
                if not data:
                    log.write(f"{end} {port} {held.pop(key.fileobj)[0]}\\n")
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
            else:
                data, peer = key.fileobj.recvfrom(4096)
                log.write(f"udp {port} {peer[0]}\\n")
                key.fileobj.sendto(data, peer)
"""

# Writes down each packet that comes in on a link, as [protocol, source, destination, destination port].
_SNIFFER = """
    import json, socket, struct, sys

    sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
    sock.bind((sys.argv[2], 3))
    log = open(sys.argv[1], "a", buffering=1)
    print("listening", flush=True)
    while True:
        packet, (_, ethertype, kind, *_) = sock.recvfrom(65535)
        if kind == socket.PACKET_OUTGOING:
            continue
        if ethertype != 0x0800:
            log.write(json.dumps([f"{ethertype:#06x}", "", "", 0]) + "\\n")
            continue
        payload = packet[(packet[0] & 15) * 4 :]
        port = struct.unpack("!H", payload[2:4])[0] if packet[9] in (6, 17) else 0
        log.write(json.dumps([packet[9], *map(socket.inet_ntoa, (packet[12:16], packet[16:20])), port]) + "\\n")
"""


class Log:
    """Lines that a helper process of the test writes."""

    def __init__(self, path: Path, process: subprocess.Popen[Any]) -> None:
        self.path, self.process = path, process

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def came(self) -> int:
        """How often somebody has connected or sent; the ends of connections come when they come."""
        return sum(not line.startswith("eof ") for line in self.lines())

    def wait(self, line: str) -> None:
        wait_for(lambda: line in self.lines(), what=f"{line!r} in {self.path.name}")


def serve(host: Host, name: str, *sockets: tuple[str, str, int], netns: str | None = None) -> Log:
    """TCP and UDP services at (kind, address, port), and the log of who came."""
    path = host.directory / name
    process = host.python(_SERVICE, str(path), json.dumps(sockets), netns=netns)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n", process.stderr and process.stderr.read()
    return Log(path, process)


def sniff(host: Host, name: str, link: str, *, netns: str | None = None) -> Log:
    path = host.directory / name
    process = host.python(_SNIFFER, str(path), link, netns=netns)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n", process.stderr and process.stderr.read()
    return Log(path, process)


def add_container(host: Host) -> None:
    """What a container engine has on a host: a bridge, a container behind it with a service at port 80, a masquerade rule."""
    host.run("ip", "link", "add", "br0", "type", "bridge")
    host.run("ip", "addr", "add", "172.30.0.1/24", "dev", "br0")
    host.run("ip", "link", "set", "br0", "up")
    host.run("ip", "netns", "add", "ctr")
    host.run("ip", "-n", "ctr", "link", "set", "lo", "up", "alias", "throw-away host of a test")
    host.run("ip", "link", "add", "ctr0", "type", "veth", "peer", "name", "eth0", "netns", "ctr")
    host.run("ip", "link", "set", "ctr0", "up", "master", "br0")
    host.run("ip", "-n", "ctr", "addr", "add", f"{CONTAINER}/24", "dev", "eth0")
    host.run("ip", "-n", "ctr", "link", "set", "eth0", "up")
    host.run("ip", "-n", "ctr", "route", "add", "default", "via", "172.30.0.1")
    wait_for(lambda: "lladdr" in host.run("ip", "neigh", "get", CONTAINER, "dev", "br0", check=False).stdout or _pings(host, CONTAINER))
    serve(host, "container", ("tcp", "0.0.0.0", 80), netns="ctr")
    # The bridge's and the container's own IPv6 addresses come late and bring routes.
    wait_for(lambda: host.run("ip", "-6", "addr", "show", "dev", "br0", "scope", "link", "-tentative").stdout)
    wait_for(lambda: host.run("ip", "-6", "addr", "show", "dev", "ctr0", "scope", "link", "-tentative").stdout)


def _pings(host: Host, address: str) -> bool:
    return Probe.ask(host.probe(), ("tcp", address, 9)) == ["ECONNREFUSED"]


def sysctl(name: str, value: str) -> None:
    """A setting of this host's network namespace."""
    Path(f"/proc/sys/net/{name}").write_text(value)


def link_local(mac: str) -> str:
    """The address that Linux gives a link of that MAC (RFC 4291, appendix A)."""
    octets = [int(part, 16) for part in mac.split(":")]
    octets[0] ^= 2
    return str(IPv6Address(bytes([0xFE, 0x80, *[0] * 6, *octets[:3], 0xFF, 0xFE, *octets[3:]])))


def record(host: Host, run_id: str) -> dict[str, Any]:
    found = host.record(run_id)
    assert found is not None
    return found


def sandbox_of(recorded: dict[str, Any]) -> str:
    return str(IPv4Address(recorded["gateway"]) + 1)


def as_others(host: Host, *options: str) -> list[Probe]:
    """Beside root's run, the same payload as other users."""
    return [host.probe_run(f"pf-{user}", *options, "--user", user, "--chdir", "/") for user in OTHER_USERS]


def unlocked(host: Host, run_id: str) -> Probe:
    """A process with every capability in a run's namespace, after it has thrown the filter in there away, which nobody puts back."""
    host.unattended(run_id)
    host.inside(run_id, "nft", "flush", "ruleset")
    host.inside(run_id, "ip", "route", "del", "default", "dev", "lo", check=False)
    return host.probe_inside(run_id)


def no_answer(found: list[str]) -> bool:
    return not {"answered", "silent"} & set(found)


def test_ipv6_link_local_does_not_lead_around_the_filter(host: Host) -> None:
    """PF-02, https://github.com/golang/vulndb/issues/2737"""
    service = serve(host, "service", ("tcp", "::", 7000), ("tcp", "::", 8080), ("udp", "::", 7000))
    run = host.probe_run("pf-six", *SEALED)
    recorded = record(host, "pf-six")
    gateway, ifname = recorded["gateway"], recorded["ifname"]
    lan_link_local = json.loads(host.run("ip", "-j", "-6", "addr", "show", "dev", "lan0").stdout)[0]["addr_info"][0]["local"]
    mac = json.loads(host.run("ip", "-j", "link", "show", ifname).stdout)[0]["address"]
    own = link_local(mac)
    wait_for(lambda: host.run("ip", "-n", "lan", "-6", "addr", "show", "dev", "eth0", "scope", "link", "-tentative").stdout)

    assert host.probe_lan().ask(("tcp", f"{lan_link_local}%eth0", 7000), ("udp", f"{lan_link_local}%eth0", 7000)) == ["answered"] * 2
    assert run.ask(("tcp", gateway, 8080), ("tcp", f"::ffff:{gateway}", 8080)) == ["answered"] * 2
    targets = [
        (kind, f"{address}%eth0", port)
        for address in (own, lan_link_local, "ff02::1")
        for kind, port in (("tcp", 7000), ("tcp", 8080), ("udp", 7000))
    ]
    targets += [("tcp", f"::ffff:{gateway}", 7000), ("tcp", "::ffff:127.0.0.1", 8080), ("tcp", "::1", 7000)]
    assert no_answer(run.ask(*targets))
    assert "inet6" not in host.run("ip", "addr", "show", "dev", ifname).stdout
    assert "inet6" not in host.inside("pf-six", "ip", "addr", "show", "dev", "eth0").stdout

    # Somebody turns IPv6 on at both ends; it still leads nowhere.
    host.unattended("pf-six")
    sysctl(f"ipv6/conf/{ifname}/disable_ipv6", "0")
    host.run("ip", "-6", "addr", "add", f"{own}/64", "dev", ifname, "nodad")
    host.inside("pf-six", "sh", "-c", "echo 0 >/proc/sys/net/ipv6/conf/eth0/disable_ipv6")
    host.inside("pf-six", "ip", "-6", "addr", "add", "fe80::2/64", "dev", "eth0", "nodad")
    assert host.probe().ask(("tcp", f"{own}%{ifname}", 7000)) == ["answered"]
    assert no_answer(run.ask(*targets))
    # Not even to root in the namespace, without the filter in there.
    assert set(unlocked(host, "pf-six").ask(*targets[:2], *targets[6:8])) <= {"ETIMEDOUT", "EHOSTUNREACH", "EINVAL", "ENETUNREACH"}
    assert not [line for line in service.lines() if line.split()[2].split("%")[0] == "fe80::2"]
    assert run.ask(("tcp", gateway, 8080)) == ["answered"]
    assert run.end() == 0


def test_a_host_that_forwards_forwards_nothing_of_a_run(host: Host) -> None:
    """PF-05, https://github.com/moby/moby/issues/11508"""
    sysctl("ipv4/ip_forward", "1")
    add_container(host)
    host.run("nft", "add table ip nat; add chain ip nat post { type nat hook postrouting priority 100; }; add rule ip nat post masquerade")
    host.in_lan("ip", "route", "add", "198.18.0.0/15", "via", LAN_HOST)
    host.in_lan("ip", "route", "add", "172.30.0.0/24", "via", LAN_HOST)
    peer = serve(host, "peer", ("tcp", "0.0.0.0", 9000), ("udp", "0.0.0.0", 9000), netns="lan")
    serve(host, "broker", ("tcp", "0.0.0.0", 8080))
    host.settled()
    listener = "import socket, time; s = socket.create_server(('0.0.0.0', 7777)); print('up', flush=True); time.sleep(600)"
    other = host.spawn_run("pf-other", "/usr/bin/python3", "-c", listener, options=SEALED)
    assert other.stdout is not None
    assert other.stdout.readline() == "up\n"
    run = host.probe_run("pf-run", *SEALED)
    gateway, neighbour = record(host, "pf-run")["gateway"], sandbox_of(record(host, "pf-other"))
    targets = [("tcp", CONTAINER, 80), ("tcp", LAN_PEER, 9000), ("udp", LAN_PEER, 9000), ("tcp", neighbour, 7777)]

    # Forwarding works, and each of them answers somebody.
    assert host.probe_lan().ask(("tcp", CONTAINER, 80)) == ["answered"]
    assert host.probe("ip", "netns", "exec", "ctr").ask(("tcp", LAN_PEER, 9000), ("udp", LAN_PEER, 9000)) == ["answered"] * 2
    assert host.probe_inside("pf-other").ask(("tcp", neighbour, 7777)) == ["answered"]
    came = wait_for(lambda: peer.came() == 2 and 2, what="both controls are seen")

    assert run.ask(("tcp", gateway, 8080)) == ["answered"]
    for payload in (run, *as_others(host, *SEALED)):
        assert no_answer(payload.ask(*targets))
    # With every capability, a route and no filter of its own, the gate alone is left.
    inside = unlocked(host, "pf-run")
    host.inside("pf-run", "ip", "route", "add", "default", "via", gateway)
    assert inside.ask(("tcp", gateway, 8080)) == ["answered"]
    assert set(inside.ask(*targets)) <= {"ECONNREFUSED", "ETIMEDOUT", "silent"}
    assert peer.came() == came
    # Nor the other way.
    sandbox = sandbox_of(record(host, "pf-run"))
    assert set(host.probe_lan().ask(("tcp", neighbour, 7777), ("tcp", sandbox, 22))) <= {"ETIMEDOUT", "EHOSTUNREACH", "ENETUNREACH"}
    assert host.sealnet("reap", "--all").returncode == 0


def test_other_tables_are_left_as_they_are(host: Host) -> None:
    """PF-09, https://github.com/openwrt/openwrt/issues/11620"""
    rules = """
        table ip nat {
            counter hits { }
            chain prerouting { type nat hook prerouting priority dstnat; tcp dport 9 counter name hits dnat to 192.168.77.9
            }
            chain postrouting { type nat hook postrouting priority srcnat; oifname "eth9" counter masquerade
            }
        }
        table ip6 filter {
            set guests { type ipv6_addr; flags timeout; elements = { 2001:db8::1 timeout 1h, 2001:db8::2 timeout 2h } }
            chain input { type filter hook input priority filter; ip6 saddr @guests counter drop
            }
        }
        table inet other {
            map ports { type inet_service : verdict; elements = { 81 : drop, 82 : accept } }
            map marks { type ipv4_addr : mark; elements = { 203.0.113.1 : 7 } }
            set blocked { type ipv4_addr; flags interval; elements = { 203.0.113.0/24, 198.51.100.7 } }
            chain input { type filter hook input priority -5; tcp dport vmap @ports; ip saddr @blocked counter drop
            }
            chain sealnet { tcp dport 83 counter comment "sealnet"
            }
        }
        table ip sealnet {
            chain x { counter
            }
        }
    """
    host.run("nft", "-f", "-", input=rules)
    host.broker(8080)
    host.settled()
    before = json.loads(host.run("nft", "-j", "-a", "list", "ruleset").stdout)["nftables"]

    first = host.probe_run("pf-first", *SEALED)
    second = host.probe_run("pf-second", *SEALED)
    third = host.sealnet("run", *SEALED, "--", "curl", "-fsS", "http://broker.sealnet:8080/third")
    reaped = host.sealnet("reap", "pf-second")
    alone = first.ask(("tcp", record(host, "pf-first")["gateway"], 8080))
    first.end()

    assert (third.returncode, third.stdout, reaped.returncode, alone) == (0, "/third", 0, ["answered"])
    assert second.process.wait(60) != 0
    after = json.loads(host.run("nft", "-j", "-a", "list", "ruleset").stdout)["nftables"]
    assert [_timeless(entry) for entry in after if not _is_gate(entry)] == [_timeless(entry) for entry in before]
    assert any(_is_gate(entry) for entry in after)


def _is_gate(entry: dict[str, Any]) -> bool:
    body = next(iter(entry.values()))
    return (body.get("family"), body.get("table", body.get("name"))) == ("inet", "sealnet")


def _timeless(entry: dict[str, Any]) -> str:
    return re.sub(r'"expires": \d+', "", json.dumps(entry))


# Stands in for the bindings to libnftables: {lie} decides which commands it only pretends to have run.
_LYING_NFT = """
import importlib.util, sys

place = importlib.util.spec_from_file_location("real_nftables", "/usr/lib/python3/dist-packages/nftables/__init__.py",
    submodule_search_locations=["/usr/lib/python3/dist-packages/nftables"])
real = importlib.util.module_from_spec(place)
sys.modules["real_nftables"] = real
place.loader.exec_module(real)

class Nftables(real.Nftables):
    def cmd(self, text):
        if {lie}:
            return {answer}
        return super().cmd(text)
"""


@pytest.mark.parametrize(
    ("lie", "answer"),
    [
        ("True", (1, "", "Error: Could not process rule: Operation not permitted")),
        ("True", (0, "", "")),
        ("'hook output priority filter' in text", (0, "", "")),
        ("'hook prerouting' in text", (0, "", "")),
        ("'leases {' in text and 'table' not in text", (0, "", "")),
    ],
    ids=["fails", "lies", "lies about the filter inside", "lies about the gate", "lies about the lease"],
)
def test_without_a_filter_nothing_runs(host: Host, lie: str, answer: tuple[int, str, str]) -> None:
    """PF-10, https://github.com/NVIDIA/OpenShell/issues/586"""
    host.broker(8080)
    shim = host.directory / "shim"
    shim.mkdir()
    (shim / "nftables.py").write_text(_LYING_NFT.format(lie=lie, answer=answer))
    monitor = host.spawn("ip", "-o", "monitor", "link")
    ran = host.directory / "ran"

    failed = host.sealnet("run", *SEALED, "--", "touch", str(ran), env={**os.environ, "PYTHONPATH": str(shim)})

    assert failed.returncode == 125, failed.stderr
    assert failed.stderr.startswith("sealnet: cannot ")
    assert not ran.exists()
    monitor.terminate()
    came_up = [line for line in monitor.communicate()[0].splitlines() if ": seal" in line and "LOWER_UP" in line]
    # Both rulesets stand before the link comes up; the lease is granted after it.
    assert not came_up or "leases" in lie
    # The same command runs where nobody lies.
    assert host.sealnet("run", *SEALED, "--", "touch", str(ran)).returncode == 0
    assert ran.exists()


def test_the_link_is_up_only_after_both_rulesets_stand(host: Host) -> None:
    """PF-10, https://github.com/linkerd/linkerd2-proxy-init/pull/388"""
    host.broker(8080)
    # Asks at the very moment a link comes up.
    watcher = host.python(
        """
        import socket, struct, subprocess

        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        sock.bind((0, 1))
        print("listening", flush=True)
        while True:
            data = sock.recv(65535)
            kind, flags = struct.unpack_from("=H", data, 4)[0], struct.unpack_from("=I", data, 24)[0]
            if kind == 16 and flags & 1 and b"seal" in data:
                told = subprocess.run(["nft", "list", "chain", "inet", "sealnet", "gate"], capture_output=True)
                print(told.returncode, "drop" in told.stdout.decode(), flush=True)
        """
    )
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "listening\n"

    for run_id in ("pf-one", "pf-two"):
        run = host.probe_run(run_id, *SEALED)
        assert watcher.stdout.readline() == "0 True\n"
        assert "policy drop" in host.inside(run_id, "nft", "list", "chain", "inet", "sealnet", "output").stdout
        assert run.end() == 0


@pytest.mark.parametrize("what", ["absent", "fails", "lies"])
def test_an_nft_on_the_callers_path_is_not_what_the_filter_depends_on(host: Host, what: str) -> None:
    """PF-10, https://github.com/NVIDIA/OpenShell/issues/586"""
    host.broker(8080)
    tools = host.directory / "bin"
    tools.mkdir()
    for name in ("python3", "sh", "env", "bwrap", "setpriv", "ip"):
        (tools / name).symlink_to(f"/usr/bin/{name}" if Path(f"/usr/bin/{name}").exists() else f"/usr/sbin/{name}")
    if what != "absent":
        (tools / "nft").write_text(f"#!/bin/sh\ntouch {host.directory}/called\nexit {int(what == 'fails')}\n")
        (tools / "nft").chmod(0o755)

    done = subprocess.run(
        [*SEALNET, "run", *SEALED, "--", "/usr/bin/curl", "-sS", "-m", "3", "http://broker.sealnet:8080/a", "http://broker.sealnet:8081/"],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )

    # Sealed all the same: the lease answers, the next port refuses.
    assert (done.returncode, done.stdout) == (7, "/a"), done.stderr
    assert not (host.directory / "called").exists()


def test_a_table_of_our_name_that_is_not_the_gate_is_not_taken_for_it(host: Host) -> None:
    """PF-10, https://github.com/NVIDIA/OpenShell/issues/586"""
    host.broker(8080)
    host.broker(8081)
    host.run("nft", "add table inet sealnet; add chain inet sealnet input { type filter hook input priority 0; policy accept; }")

    run = host.probe_run("pf-mine", *SEALED)
    recorded = record(host, "pf-mine")
    inside = unlocked(host, "pf-mine")

    assert host.probe().ask(("tcp", recorded["gateway"], 8081)) == ["answered"]
    assert inside.ask(("tcp", recorded["gateway"], 8080), ("tcp", recorded["gateway"], 8081)) == ["answered", "ECONNREFUSED"]
    # Changed while leases stand in it, it is refused, and the run that lives is not cut off.
    host.run("nft", "insert rule inet sealnet gate accept")
    refused = host.sealnet("run", *SEALED, "--", "true")
    assert refused.returncode == 125
    assert "table inet sealnet" in refused.stderr
    assert host.sealnet("check", "pf-mine").returncode == 1
    assert inside.ask(("tcp", recorded["gateway"], 8080)) == ["answered"]
    assert run.end() == 0
    assert host.sealnet("run", *SEALED, "--", "true").returncode == 0


# Connects, leaves a child behind that holds the connection and will not end, and says so.
_CLINGING = """
    import os, signal, socket, sys, time

    sock = socket.create_connection((sys.argv[1], 8080))
    sock.sendall(b"x")
    if os.fork() == 0:
        os.setsid()
        for number in (1, 2, 3, 10, 12, 15):
            signal.signal(number, signal.SIG_IGN)
        if os.fork():
            os._exit(0)
        while True:
            time.sleep(600)
    print("connected", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("ending", ["its own end", "reap", "SIGKILL and reap"])
def test_a_connection_does_not_outlive_its_run(host: Host, ending: str) -> None:
    """PF-11, https://github.com/tailscale/tailscale/issues/2816"""
    broker = serve(host, "broker", ("tcp", "0.0.0.0", 8080))
    command = ("/usr/bin/python3", "-c", textwrap.dedent(_CLINGING), "broker.sealnet")
    process = host.spawn_run("pf-old", *command, options=SEALED, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "connected\n"
    recorded = record(host, "pf-old")
    sandbox = sandbox_of(recorded)
    # The check before the payload, which connected and went, and the payload.
    wait_for(lambda: sorted(broker.lines()) == [f"eof 8080 {sandbox}", *[f"tcp 8080 {sandbox}"] * 2])
    assert host.run("ss", "-Htn", "state", "established", f"( dst {sandbox} )").stdout.count("\n") == 1
    came = len(broker.lines())

    if ending == "its own end":
        assert process.stdin is not None
        process.stdin.close()
    elif ending == "reap":
        assert host.sealnet("reap", "pf-old").returncode == 0
    else:
        process.kill()
        assert host.sealnet("reap", "pf-old").returncode == 0
    process.wait(60)

    # The broker has seen the end, and holds nothing that believes it lives.
    wait_for(lambda: len(broker.lines()) > came, timeout_s=2, what="the broker has seen the end")
    assert broker.lines()[came].split()[0] != "tcp"
    assert not host.run("ss", "-Htn", "state", "established", f"( dst {sandbox} )").stdout
    # A new run of the same address inherits no flow: nothing but its own checks and connections reaches the broker.
    came = len(broker.lines())
    new = host.probe_run("pf-new", *SEALED)
    assert record(host, "pf-new")["subnet"] == recorded["subnet"]
    assert not host.run("ss", "-Htn", "state", "established", f"( dst {sandbox} )").stdout
    assert new.ask(("tcp", recorded["gateway"], 8080)) == ["answered"]
    wait_for(lambda: sorted(broker.lines()[came:]) == [*[f"eof 8080 {sandbox}"] * 2, *[f"tcp 8080 {sandbox}"] * 2])
    assert new.end() == 0


@pytest.mark.parametrize("user", ["root", *OTHER_USERS])
def test_only_tcp_leaves_a_run(host: Host, user: str) -> None:
    """PF-12, https://github.com/rappdw/sandy/pull/9"""
    udp = [("udp", "0.0.0.0", port) for port in (53, 67, 443, 8080)]
    service = serve(host, "service", ("tcp", "0.0.0.0", 8080), *udp)
    lan = sniff(host, "lan-packets", "eth0", netns="lan")
    run = host.probe_run("pf-run", *SEALED, "--user", user, "--chdir", "/")
    recorded = record(host, "pf-run")
    gateway = recorded["gateway"]
    link = sniff(host, "link-packets", recorded["ifname"])
    broadcast = str(IPv4Address(gateway) + 2)
    targets = [("udp", address, port) for address in (gateway, LAN_HOST, LAN_PEER) for port in (53, 443, 8080)]
    targets += [("udp", broadcast, 67), ("udp", "255.255.255.255", 67), ("udp", "224.0.0.1", 5353), ("udp", "239.255.255.250", 1900)]
    targets += [(kind, address, 0) for address in (gateway, LAN_PEER, "192.0.2.1") for kind in ("ping", "icmp", "gre")]
    targets += [("sctp", gateway, 8080), ("sctp", LAN_PEER, 8080)]

    # The services and the sniffers are awake.
    assert host.probe_lan().ask(("udp", LAN_HOST, 53), ("udp", LAN_HOST, 443), ("udp", LAN_HOST, 8080)) == ["answered"] * 3
    assert host.probe().ask(("udp", LAN_PEER, 53)) == ["ECONNREFUSED"]
    lan.wait(json.dumps([17, LAN_HOST, LAN_PEER, 53]))
    came, seen = len(service.lines()), len(lan.lines())

    assert run.ask(("tcp", gateway, 8080)) == ["answered"]
    found = dict(zip(targets, run.ask(*targets), strict=True))

    link.wait(json.dumps([6, str(IPv4Address(gateway) + 1), gateway, 8080]))
    assert set(found.values()) <= {"EPERM", "EACCES", "EPROTONOSUPPORT", "EHOSTUNREACH", "ENETUNREACH", "ECONNREFUSED"}, found
    assert [line for line in service.lines()[came:] if line.startswith("udp")] == []
    assert _ip_packets(lan)[seen:] == []
    left = {(protocol, destination, port) for protocol, _source, destination, port in _ip_packets(link)}
    assert left == {(6, gateway, 8080)}
    assert run.end() == 0


def test_only_tcp_passes_the_gate_even_with_every_capability(host: Host) -> None:
    """PF-12, https://github.com/rappdw/sandy/pull/9"""
    udp = [("udp", "0.0.0.0", port) for port in (53, 67, 443, 8080)]
    service = serve(host, "service", ("tcp", "0.0.0.0", 8080), *udp)
    run = host.probe_run("pf-run", *SEALED)
    recorded = record(host, "pf-run")
    gateway = recorded["gateway"]
    link = sniff(host, "link-packets", recorded["ifname"])
    inside = unlocked(host, "pf-run")
    host.inside("pf-run", "ip", "route", "add", "default", "via", gateway)
    targets = [("udp", gateway, port) for port in (53, 443, 8080)] + [
        ("udp", "255.255.255.255", 67),
        ("icmp", gateway, 0),
        ("gre", gateway, 0),
    ]
    came = len(service.lines())

    assert host.probe_lan().ask(("udp", LAN_HOST, 53), ("icmp", LAN_HOST, 0)) == ["answered"] * 2
    assert inside.ask(("tcp", gateway, 8080)) == ["answered"]
    assert inside.ask(*targets) == ["silent"] * len(targets)

    # They did leave the namespace; it is the gate that took none of them.
    wait_for(lambda: {(17, gateway, 53), (1, gateway, 0), (47, gateway, 0)} <= {(p, d, port) for p, _s, d, port in _ip_packets(link)})
    sandbox = sandbox_of(recorded)
    assert [line for line in service.lines()[came:] if line.startswith("udp") and line.endswith(sandbox)] == []
    assert run.end() == 0


def _ip_packets(log: Log) -> list[tuple[int, str, str, int]]:
    return [tuple(entry) for entry in map(json.loads, log.lines()) if isinstance(entry[0], int)]


def test_route_localnet_leads_to_no_loopback_service(host: Host) -> None:
    """PF-13, https://github.com/kubernetes/kubernetes/issues/92315"""
    serve(host, "broker", ("tcp", "0.0.0.0", 8080))
    secret = serve(host, "secret", ("tcp", "127.0.0.1", 9100), ("tcp", "127.0.0.2", 8081))
    sysctl("ipv4/conf/all/route_localnet", "1")
    host.settled()
    run = host.probe_run("pf-run", *SEALED)
    recorded = record(host, "pf-run")
    gateway = recorded["gateway"]
    host.unattended("pf-run")
    sysctl(f"ipv4/conf/{recorded['ifname']}/route_localnet", "1")
    targets = [("tcp", "127.0.0.1", 9100), ("tcp", "127.0.0.2", 8081), ("tcp", gateway, 9100), ("tcp", "127.0.0.1", 8080)]

    assert host.probe().ask(*targets[:2]) == ["answered"] * 2
    came = wait_for(lambda: secret.came() == 2 and 2, what="both controls are seen")
    assert run.ask(("tcp", gateway, 8080)) == ["answered"]
    for payload in (run, *as_others(host, *SEALED)):
        assert no_answer(payload.ask(*targets))
    # With every capability it moves 127/8 to the gateway; the gate lets nothing of it in.
    inside = unlocked(host, "pf-run")
    host.inside("pf-run", "sh", "-c", "echo 1 >/proc/sys/net/ipv4/conf/eth0/route_localnet")
    host.inside("pf-run", "ip", "addr", "del", "127.0.0.1/8", "dev", "lo")
    host.inside("pf-run", "ip", "route", "add", "127.0.0.0/8", "via", gateway, "dev", "eth0", "src", sandbox_of(recorded))
    link = sniff(host, "link-packets", recorded["ifname"])
    assert set(inside.ask(*targets)) <= {"ECONNREFUSED", "ETIMEDOUT"}
    assert (6, "127.0.0.1", 9100) in {(protocol, destination, port) for protocol, _source, destination, port in _ip_packets(link)}
    assert secret.came() == came
    assert host.sealnet("reap", "--all").returncode == 0


def test_route_localnet_with_the_lease_port_bound_to_loopback_alone(host: Host) -> None:
    """PF-13, https://github.com/cdk-team/CDK/issues/83"""
    secret = serve(host, "secret", ("tcp", "127.0.0.1", 8080))
    sysctl("ipv4/conf/all/route_localnet", "1")
    host.settled()
    refused = host.sealnet("run", *SEALED, "--", "true")
    run = host.probe_run("pf-run", *SEALED, "--no-preflight")
    recorded = record(host, "pf-run")

    assert host.probe().ask(("tcp", "127.0.0.1", 8080)) == ["answered"]
    came = wait_for(lambda: secret.came() == 1 and 1, what="the control is seen")
    assert refused.returncode == 125
    assert "127.0.0.1 alone" in refused.stderr
    assert no_answer(run.ask(("tcp", "127.0.0.1", 8080), ("tcp", recorded["gateway"], 8080)))
    inside = unlocked(host, "pf-run")
    host.inside("pf-run", "sh", "-c", "echo 1 >/proc/sys/net/ipv4/conf/eth0/route_localnet")
    host.inside("pf-run", "ip", "addr", "del", "127.0.0.1/8", "dev", "lo")
    host.inside("pf-run", "ip", "route", "add", "127.0.0.0/8", "via", recorded["gateway"], "dev", "eth0", "src", sandbox_of(recorded))
    assert inside.ask(("tcp", "127.0.0.1", 8080))[0] in ("ECONNREFUSED", "ETIMEDOUT")
    assert secret.came() == came
    assert run.end() == 0


# Asks by ARP for each address, over a raw socket, and prints those that somebody answers for.
_ARP = """
    import fcntl, json, socket, struct, sys, time

    source, *wanted = sys.argv[1:]
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0806))
    sock.bind(("eth0", 0x0806))
    mac = fcntl.ioctl(sock, 0x8927, struct.pack("256s", b"eth0"))[18:24]
    for address in wanted:
        body = struct.pack("!HHBBH6s4s6s4s", 1, 0x0800, 6, 4, 1, mac, socket.inet_aton(source), bytes(6), socket.inet_aton(address))
        sock.send(b"\\xff" * 6 + mac + b"\\x08\\x06" + body)
    answered, deadline = set(), time.monotonic() + 1
    while (left := deadline - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            frame = sock.recv(2048)
        except TimeoutError:
            break
        if frame[20:22] == b"\\0\\x02":
            answered.add(socket.inet_ntoa(frame[28:32]))
    print(json.dumps(sorted(answered)))
"""


def test_arp_tells_nothing_but_the_own_gateway(host: Host) -> None:
    """PF-14, https://github.com/moby/moby/issues/31448"""
    host.broker(8080)
    runs = {run_id: host.probe_run(run_id, *SEALED) for run_id in ("pf-one", "pf-two")}
    one, two = record(host, "pf-one"), record(host, "pf-two")
    wanted = [LAN_HOST, LAN_PEER, two["gateway"], sandbox_of(two), "127.0.0.1", one["gateway"]]
    ask = ["/usr/bin/python3", "-c", textwrap.dedent(_ARP)]

    # The payload has no raw socket at all, whoever it is.
    for user in ("root", *OTHER_USERS):
        done = host.sealnet("run", *SEALED, "--user", user, "--chdir", "/", "--", *ask, sandbox_of(one), *wanted)
        assert done.returncode == 1
        assert re.search(r"\[Errno (97|1)\]", done.stderr), done.stderr
    # Somebody who has one hears of the own gateway alone; over the LAN the same question is answered.
    assert json.loads(host.inside("pf-one", *ask, sandbox_of(one), *wanted).stdout) == [one["gateway"]]
    assert json.loads(host.in_lan(*ask, LAN_PEER, LAN_HOST).stdout) == [LAN_HOST]
    for run in runs.values():
        assert run.end() == 0


def test_sealnet_opens_no_listener_of_its_own(host: Host) -> None:
    """PF-15, https://github.com/bytedance/deer-flow/pull/2633"""
    host.broker(8080)
    before = host.run("ss", "-Hltuwn").stdout

    run = host.probe_run("pf-run", *SEALED)

    assert ":8080" in before
    assert sorted(host.run("ss", "-Hltuwn").stdout.splitlines()) == sorted(before.splitlines())
    assert host.inside("pf-run", "ss", "-Hltuwn").stdout == ""
    assert run.end() == 0


def test_a_broker_on_the_gateway_alone_does_not_answer_the_lan(host: Host) -> None:
    """PF-15, https://github.com/Kilo-Org/kilocode/pull/12075"""
    run = host.probe_run("pf-run", *SEALED, "--no-preflight")
    gateway = record(host, "pf-run")["gateway"]
    broker = serve(host, "broker", ("tcp", gateway, 8080))
    serve(host, "elsewhere", ("tcp", LAN_HOST, 8080))
    host.in_lan("ip", "route", "add", "198.18.0.0/15", "via", LAN_HOST)

    lan = host.probe_lan()

    assert lan.ask(("tcp", LAN_HOST, 8080)) == ["answered"]
    assert run.ask(("tcp", gateway, 8080)) == ["answered"]
    broker.wait(f"tcp 8080 {sandbox_of(record(host, 'pf-run'))}")
    assert no_answer(lan.ask(("tcp", gateway, 8080)))
    assert [line for line in broker.lines() if line.endswith(LAN_PEER)] == []
    assert run.end() == 0


# What a seal promises beyond the cases.


def _short_leases(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    config = host.directory / "config.toml"
    config.write_text("lease_ttl = 10\n")
    monkeypatch.setenv("SEALNET_CONFIG", str(config))


# Connects as fast as it can until it is told to end; prints what ever answered, and whether the lease answers again at the end.
_HAMMER = """
    import select, socket, sys

    gateway, *forbidden = sys.argv[1:]
    answered, rounds = set(), 0
    print("hammering", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for target in forbidden:
            address, _, port = target.rpartition(":")
            try:
                socket.create_connection((address, int(port)), timeout=0.2).close()
                answered.add(target)
            except OSError:
                pass
        rounds += 1
    socket.create_connection((gateway, 8080), timeout=5).close()
    print(rounds, sorted(answered), flush=True)
"""


def test_a_flushed_ruleset_opens_nothing_and_the_gate_comes_back(host: Host) -> None:
    """Never open, not even for a moment; the supervisor puts the gate back as soon as it can."""
    serve(host, "services", ("tcp", "0.0.0.0", 8080), ("tcp", "0.0.0.0", 8081))
    serve(host, "peer", ("tcp", "0.0.0.0", 9000), netns="lan")
    sysctl("ipv4/ip_forward", "1")
    host.settled()
    host.probe_run("pf-probe", *SEALED).end()
    gateway = "198.18.0.1"
    hammer = ("/usr/bin/python3", "-c", textwrap.dedent(_HAMMER), gateway, f"{gateway}:8081", f"{LAN_HOST}:8081", f"{LAN_PEER}:9000")
    process = host.spawn_run("pf-run", *hammer, options=SEALED, stdin=subprocess.PIPE)
    assert record(host, "pf-run")["gateway"] == gateway
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "hammering\n"

    host.unattended("pf-run")
    host.run("nft", "flush", "ruleset")
    assert host.sealnet("check", "pf-run").returncode == 1
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: host.sealnet("check", "pf-run").returncode == 0, timeout_s=20, what="the gate is back")
    process.stdin.write("\n")
    process.stdin.flush()
    rounds, answered = process.stdout.readline().split(maxsplit=1)

    assert host.probe().ask(("tcp", "127.0.0.1", 8081), ("tcp", LAN_PEER, 9000)) == ["answered"] * 2
    assert int(rounds) > 50
    assert answered == "[]\n"
    assert process.wait(60) == 0


def test_a_lease_ends_by_itself_when_nobody_renews_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the death of everything of sealnet's the kernel revokes the lease."""
    _short_leases(host, monkeypatch)
    host.broker(8080)
    run = host.probe_run("pf-run", *SEALED)
    gateway = record(host, "pf-run")["gateway"]
    inside = unlocked(host, "pf-run")
    assert inside.ask(("tcp", gateway, 8080)) == ["answered"]

    run.process.kill()
    run.process.wait(60)

    wait_for(lambda: "elements" not in host.run("nft", "list", "set", "inet", "sealnet", "leases").stdout, timeout_s=20)
    # Not by time-out: whoever comes too late is told so.
    assert inside.ask(("tcp", gateway, 8080)) == ["ECONNREFUSED"]
    assert host.probe().ask(("tcp", gateway, 8080)) == ["answered"]
    assert host.sealnet("reap", "pf-run").returncode == 0


# Closes half a second after its client has: the host goes on telling the client's address so.
_LATE = """
    import socket, time
    with socket.create_server(("0.0.0.0", 8080)) as server:
        print("listening", flush=True)
        while True:
            client, _ = server.accept()
            while client.recv(100):
                pass
            time.sleep(0.5)
            client.close()
"""


def test_what_still_comes_for_an_earlier_run_is_no_attempt_of_the_next(host: Host) -> None:
    late = host.python(_LATE)
    assert late.stdout is not None
    assert late.stdout.readline() == "listening\n"
    host.broker(8081)
    script = "import socket; socket.create_connection(('198.18.0.1', 8080)).close()"
    first = host.sealnet("run", *SEALED, "--", "/usr/bin/python3", "-c", script)
    assert first.returncode == 0, first.stderr

    # It has the same addresses.
    script = "sleep 2; curl -s -m 2 http://198.18.0.1:8080/"
    second = host.sealnet("run", "--report", "--lease-port", "8081", "--", "sh", "-c", script)

    assert "198.18.0.1" in second.stderr
    assert [line.split()[0] for line in second.stderr.splitlines() if "198.18.0.1" in line] == ["1"], second.stderr


def _forwarding(host: Host, ifname: str) -> Callable[[], None]:
    before = {name: Path(f"/proc/sys/net/{name}").read_text() for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding")}
    for name in before:
        sysctl(name, "1")
    sysctl(f"ipv4/conf/{ifname}/forwarding", "1")
    sysctl(f"ipv4/conf/{ifname}/rp_filter", "0")
    return lambda: [sysctl(name, value) for name, value in before.items()] and None


def _route_localnet(host: Host, ifname: str) -> Callable[[], None]:
    for link in ("all", ifname):
        sysctl(f"ipv4/conf/{link}/route_localnet", "1")
        sysctl(f"ipv4/conf/{link}/accept_local", "1")
    return lambda: [sysctl(f"ipv4/conf/all/{name}", "0") for name in ("route_localnet", "accept_local")] and None


def _dnat(host: Host, ifname: str) -> Callable[[], None]:
    host.run(
        "nft",
        "add table ip dock; add chain ip dock pre { type nat hook prerouting priority -100; }; "
        f"add rule ip dock pre fib daddr type local tcp dport 9999 dnat to {CONTAINER}:80; "
        f"add rule ip dock pre fib daddr type local tcp dport 9998 dnat to 127.0.0.1:9100; "
        "add chain ip dock out { type nat hook output priority -100; }; "
        f"add rule ip dock out fib daddr type local tcp dport 9999 dnat to {CONTAINER}:80; "
        "add chain ip dock post { type nat hook postrouting priority 100; }; add rule ip dock post masquerade",
    )
    assert host.probe_lan().ask(("tcp", LAN_HOST, 9999)) == ["answered"]
    return lambda: host.run("nft", "delete", "table", "ip", "dock") and None


def _accept_all(host: Host, ifname: str) -> Callable[[], None]:
    hooks = ("prerouting", "input", "forward", "output", "postrouting")
    chains = "".join(
        f"add chain inet zz {hook}{at} {{ type filter hook {hook} priority {priority}; policy accept; }}; "
        f"add rule inet zz {hook}{at} accept; "
        for hook in hooks
        for at, priority in enumerate((-500, -11, 0, 500))
    )
    host.run("nft", f"add table inet zz; {chains}")
    return lambda: host.run("nft", "delete", "table", "inet", "zz") and None


@pytest.mark.parametrize("changes", [(_forwarding,), (_forwarding, _dnat, _accept_all, _route_localnet)], ids=["forwarding", "everything"])
def test_what_others_change_opens_nothing_but_the_lease(host: Host, changes: tuple[Callable[..., Callable[[], None]], ...]) -> None:
    """ip_forward, route_localnet, docker's DNAT on local addresses and accept-all tables, all of them set while the run lives."""
    add_container(host)
    serve(host, "services", ("tcp", "0.0.0.0", 8080), ("tcp", "0.0.0.0", 8081), ("tcp", "127.0.0.1", 9100))
    serve(host, "peer", ("tcp", "0.0.0.0", 9000), netns="lan")
    host.in_lan("ip", "route", "add", "172.30.0.0/24", "via", LAN_HOST)
    host.settled()
    run = host.probe_run("pf-run", *SEALED)
    recorded = record(host, "pf-run")
    gateway = recorded["gateway"]
    targets = [("tcp", address, port) for address in (gateway, LAN_HOST) for port in (8081, 9998, 9999)]
    targets += [
        ("tcp", LAN_HOST, 8080),
        ("tcp", "127.0.0.1", 9100),
        ("tcp", CONTAINER, 80),
        ("tcp", LAN_PEER, 9000),
        ("udp", LAN_PEER, 9000),
    ]

    host.unattended("pf-run")
    restore = [change(host, recorded["ifname"]) for change in changes]

    assert (
        host.probe().ask(("tcp", LAN_HOST, 8081), ("tcp", "127.0.0.1", 9100), ("tcp", CONTAINER, 80), ("tcp", LAN_PEER, 9000))
        == ["answered"] * 4
    )
    assert run.ask(("tcp", gateway, 8080)) == ["answered"]
    for payload in (run, *as_others(host, *SEALED)):
        assert no_answer(payload.ask(*targets))
    # The gate alone, against every capability.
    inside = unlocked(host, "pf-run")
    host.inside("pf-run", "ip", "route", "add", "default", "via", gateway)
    assert inside.ask(("tcp", gateway, 8080)) == ["answered"]
    assert no_answer([found for found in inside.ask(*targets) if found != "silent"])
    for undo in restore:
        undo()
    assert host.sealnet("reap", "--all").returncode == 0


def test_a_run_cannot_pass_for_another(host: Host) -> None:
    """A packet counts only with its own interface and source address."""
    broker = serve(host, "broker", ("tcp", "0.0.0.0", 8080))
    one, two = host.probe_run("pf-one", *SEALED), host.probe_run("pf-two", *SEALED)
    mine, theirs = record(host, "pf-one"), record(host, "pf-two")
    own, spoofed = sandbox_of(mine), sandbox_of(theirs)
    for run, recorded in ((one, mine), (two, theirs)):
        assert run.ask(("tcp", recorded["gateway"], 8080)) == ["answered"]
        broker.wait(f"tcp 8080 {sandbox_of(recorded)}")
    # The payload has neither that address nor a raw socket to write it with.
    assert one.ask(("tcp", mine["gateway"], 8080, spoofed), ("icmp", mine["gateway"], 0)) == ["EADDRNOTAVAIL", "EPERM"]
    # It accepts one after the other: when this one is written down, so are all before it.
    assert host.probe().ask(("tcp", LAN_HOST, 8080)) == ["answered"]
    broker.wait(f"tcp 8080 {LAN_HOST}")
    came = broker.came()
    link = sniff(host, "link-packets", mine["ifname"])
    inside = unlocked(host, "pf-one")
    host.inside("pf-one", "ip", "addr", "add", f"{spoofed}/32", "dev", "eth0")
    host.inside("pf-one", "ip", "route", "add", "default", "via", mine["gateway"])

    found = inside.ask(
        ("tcp", mine["gateway"], 8080, spoofed), ("tcp", theirs["gateway"], 8080, spoofed), ("tcp", theirs["gateway"], 8080, own)
    )

    # No answer goes to an address that somebody has made up.
    assert found == ["ETIMEDOUT", "ETIMEDOUT", "ECONNREFUSED"]
    # They reached this side of the link, and the gate counts what it took away.
    packets = {(source, destination) for _protocol, source, destination, _port in _ip_packets(link)}
    assert {(spoofed, mine["gateway"]), (spoofed, theirs["gateway"]), (own, theirs["gateway"])} <= packets
    shown = json.loads(host.sealnet("inspect", "pf-one", "--json").stdout)
    assert {(row["address"], row["port"]) for row in shown["denied"]} == {(mine["gateway"], 8080), (theirs["gateway"], 8080)}
    assert host.probe().ask(("tcp", LAN_HOST, 8080)) == ["answered"]
    wait_for(lambda: broker.came() > came, what="the next one is written down")
    assert broker.came() == came + 1
    assert inside.ask(("tcp", mine["gateway"], 8080, own)) == ["answered"]
    assert two.ask(("tcp", theirs["gateway"], 8080)) == ["answered"]
    assert (one.end(), two.end()) == (0, 0)


@pytest.mark.parametrize("options", [SEALED, ()], ids=["sealed", "severed"])
def test_a_refused_connection_fails_at_once_with_an_errno(host: Host, options: tuple[str, ...]) -> None:
    """Under 50 ms, never by time-out. ENV-04, https://github.com/nodejs/undici/issues/1650"""
    host.broker(8080)
    run = host.probe_run("pf-run", *options)
    gateway = record(host, "pf-run")["gateway"] or "198.18.0.1"
    addresses = [gateway, LAN_HOST, LAN_PEER, "192.0.2.77", "8.8.8.8", "169.254.169.254", "10.1.0.1", "2001:db8::1", "fd00::1"]
    targets = [("tcp", address, port) for address in addresses for port in (1, 443)] + [("udp", address, 53) for address in addresses]
    allowed = {"ECONNREFUSED", "EHOSTUNREACH", "ENETUNREACH", "EACCES", "EPERM", "EADDRNOTAVAIL"}

    for payload in (run, *as_others(host, *options)):
        took_s = []
        for target in targets:
            assert set(payload.ask(target)) <= allowed, target
            took_s += payload.took_s

        assert statistics.median(took_s) < 0.05
        # A packet that was dropped is sent again after 1 s (RFC 6298).
        assert max(took_s) < 1
    if options:
        assert run.ask(("tcp", gateway, 8080)) == ["answered"]
    assert host.sealnet("reap", "--all").returncode == 0
