"""The doors that an address or a path leads to: this host, IPv6, other runs, what is beyond the host, Unix sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from ipaddress import IPv4Network, ip_address
from pathlib import Path
from typing import Any

from sealnet.attack.ends import Ends, Lines, goes_to, is_ipv6, is_lookup
from sealnet.attack.lab import INTERNET, INTERNET6, METADATA, NEIGHBOUR
from sealnet.attack.ways import By, Place, Way
from sealnet.kernel import links
from sealnet.kernel.netlink import Netlink
from sealnet.model import names

_GROUP = "239.255.77.77"
# Where daemons listen that a payload would like to talk to: name lookups, message buses, service managers, container engines.
_DAEMONS = (
    "/run/nscd/socket /run/systemd/resolve/io.systemd.Resolve /run/dbus/system_bus_socket /run/systemd/private /run/docker.sock",
    "/run/containerd/containerd.sock /run/podman/podman.sock /run/crio/crio.sock /run/snapd.socket /run/libvirt/libvirt-sock",
    "/tmp/.X11-unix/X0 /run/avahi-daemon/socket /run/cups/cups.sock /run/lvm/lvmpolld.socket /run/udev/control /run/sshd.sock",
)


def ways(ends: Ends, place: Place) -> Iterator[Way]:
    """Each with its other end up and listening from here on."""
    yield from _this_host(ends, place)
    yield from _ipv6(ends, place)
    yield from _other_runs(ends, place)
    yield from _beyond(ends, place)
    yield from _unix_sockets(ends, place)


def _this_host(ends: Ends, place: Place) -> Iterator[Way]:
    gateway, group = place.gateway, "this host"

    def tcp(name: str, label: str, address: str, **options: Any) -> Way:
        port, ear = ends.listen(address)
        target = f"::ffff:{address}" if options.pop("mapped", False) else address
        attempt = ("tcp", target, port, options)
        return Way(name=name, group=group, tried=f"{label}, tcp {target}:{port}", attempt=attempt, control=("tcp", target, port), ear=ear)

    yield tcp("gateway-tcp", "another port of the gateway", gateway)
    yield tcp("gateway-mapped", "the same from an IPv6 socket", gateway, mapped=True)
    port, ear = ends.receive(gateway, "gateway-udp")
    yield Way(
        name="gateway-udp",
        group=group,
        tried=f"a port of the gateway, udp {gateway}:{port}",
        attempt=("udp", gateway, port, "gateway-udp"),
        ear=ear,
    )
    _, ear = ends.receive(gateway, "lease-udp", place.port)
    yield Way(
        name="lease-udp",
        group=group,
        tried=f"the lease's number, udp {gateway}:{place.port}",
        attempt=("udp", gateway, place.port, "lease-udp"),
        ear=ear,
    )
    # A ping socket is off where net.ipv4.ping_group_range is empty, for root too.
    by_socket = By.NOBODY if place.lab is None else By.USER
    for name, label, kind, lacking, plain in (
        ("ping-dgram", "a ping socket", socket.SOCK_DGRAM, frozenset({"EACCES"}), by_socket),
        ("ping-raw", "a raw socket", socket.SOCK_RAW, frozenset[str](), By.ROOT),
    ):
        yield Way(
            name=name,
            group=group,
            tried=f"ICMP echo to {gateway} by {label}",
            attempt=("ping", gateway, kind, name),
            ear=ends.echoes(name),
            lacking=lacking,
            plain=plain,
        )
    yield tcp("loopback", "the host's loopback", "127.0.0.1")
    yield tcp("loopback-by-link", "the host's loopback by the link", "127.0.0.1", device=place.device if place.sealed else "lo")
    if address := _own_address():
        yield tcp("host-address", "another address of the host", address)
        yield tcp(
            "host-address-by-link", "another address of the host by the link", address, **({"device": place.device} if place.sealed else {})
        )
    else:
        yield Way(name="host-address", group=group, tried="another address of the host", absent="this host has no other IPv4 address")
    # The host's own broadcasts come back by the run's link, and the gate drops those too: it is reached another way.
    port, ear = ends.receive(gateway, "multicast", group=_GROUP)
    by_lo = {"interface": "127.0.0.1"}
    yield Way(
        name="multicast",
        group=group,
        tried=f"multicast, udp {_GROUP}:{port}",
        attempt=("udp", _GROUP, port, "multicast", {"device": place.device} if place.sealed else by_lo),
        control=("udp", _GROUP, port, "multicast", by_lo),
        ear=ear,
    )
    own = None if place.sealed else _own_subnet()
    subnet, device = own or (place.subnet, place.device)
    for name, address in (("broadcast", str(subnet.broadcast_address)), ("broadcast-all", "255.255.255.255")):
        port, ear = ends.receive("", name)
        yield Way(
            name=name,
            group=group,
            tried=f"broadcast, udp {address}:{port}",
            attempt=("udp", address, port, name, {"broadcast": True, "device": device}),
            control=("udp", "127.0.0.1", port, name),
            ear=ear,
            # Not every link can; that of the throw-away host does.
            plain=By.USER if own and place.lab is not None else By.NOBODY,
        )
    yield from _published(ends, place)


def _published(ends: Ends, place: Place) -> Iterator[Way]:
    """Ports that rules of the host lead elsewhere: only where the host is thrown away."""
    group, gateway = "this host", place.gateway
    if place.lab is None:
        absent = "it would change the host's rules; see --lab"
        yield Way(name="dnat-neighbour", group=group, tried="a published port that leads to a neighbour", absent=absent)
        yield Way(name="dnat-loopback", group=group, tried="a published port that leads to the host's loopback", absent=absent)
        return
    for name, label, address, inside in (
        ("dnat-neighbour", "to a neighbour", NEIGHBOUR, place.lab.neighbour),
        ("dnat-loopback", "to the host's loopback", "127.0.0.1", None),
    ):
        to_port, ear = ends.listen(address, inside=inside)
        # A number that nothing of the host's has.
        port = 60001 if inside is not None else 60002
        place.lab.forward(port, address, to_port)
        yield Way(
            name=name,
            group=group,
            tried=f"a published port that leads {label}, tcp {gateway}:{port}",
            attempt=("tcp", gateway, port),
            ear=ear,
        )


def _ipv6(ends: Ends, place: Place) -> Iterator[Way]:
    group = "IPv6"
    if not os.path.exists("/proc/sys/net/ipv6"):
        yield Way(name="ipv6", group=group, tried="any IPv6 address", absent="this kernel has no IPv6")
        return
    own, link_local = _own_address6(), _own_link_local()
    rows: list[tuple[str, str, str | None, str, int]] = [
        ("ipv6-loopback", "the host's loopback", "::1", "", 0),
        ("ipv6-address", "an address of the host", own, "", 0),
        ("ipv6-link-local", "the host's link-local address", *(link_local or (None, "", 0))),
    ]
    for name, label, address, link, scope in rows:
        if address is None:
            yield Way(name=name, group=group, tried=label, absent="this host has none")
            continue
        try:
            port, ear = ends.listen(address, scope=scope)
        except OSError as error:
            yield Way(name=name, group=group, tried=label, absent=f"nothing can listen at {address}: {error.strerror}")
            continue
        here, there = address, address
        if link:
            here, there = f"{address}%{link}", f"{address}%{place.device if place.sealed else link}"
        attempt, control = ("tcp", there, port), ("tcp", here, port)
        yield Way(name=name, group=group, tried=f"{label}, tcp [{there}]:{port}", attempt=attempt, control=control, ear=ear)
    if not place.sealed:
        return
    # The addresses that the host end has not: what is left is to see that nothing leaves.
    for name, label, target in (
        ("ipv6-host-end", "the link-local address of the host end", names.link_local(names.mac(place.run_id, end=0))),
        ("ipv6-all-nodes", "all nodes on the link", "ff02::1"),
    ):
        yield Way(
            name=name,
            group=group,
            tried=f"{label}, udp [{target}]:9",
            attempt=("udp", f"{target}%{place.device}", 9, name),
            ear=place.wire.ear(is_ipv6),
            wire=True,
        )


def _other_runs(ends: Ends, place: Place) -> Iterator[Way]:
    group, peer = "other runs", place.peer
    yield Way(
        name="peer-broker",
        group=group,
        tried=f"another run's broker, tcp {peer.gateway}:{peer.port}",
        attempt=("tcp", peer.gateway, peer.port),
        ear=peer.broker,
    )
    yield Way(
        name="peer-sandbox",
        group=group,
        tried=f"another run's payload, udp {peer.sandbox}:{peer.receives}",
        attempt=("udp", peer.sandbox, peer.receives, "peer-sandbox"),
        ear=Lines(peer.told, "peer-sandbox"),
    )
    port, ear = ends.receive(place.gateway, "as-peer")
    options = {"foreign": True, "source": peer.sandbox}
    yield Way(
        name="as-peer",
        group=group,
        tried=f"passing for another run ({peer.sandbox}, IP_TRANSPARENT), udp {place.gateway}:{port}",
        attempt=("udp", place.gateway, port, "as-peer", options),
        ear=ear,
        plain=By.ROOT,
    )


def _beyond(ends: Ends, place: Place) -> Iterator[Way]:
    """The LAN and the internet: real neighbours in a throw-away host, else the wire, which nothing may leave by."""
    group, lab, wire = "beyond the host", place.lab, place.wire
    targets = [
        ("internet-tcp", "the internet", "tcp", INTERNET, 443),
        ("internet-udp", "the internet (QUIC)", "udp", INTERNET, 443),
        ("internet-ipv6", "the internet", "tcp", INTERNET6, 443),
        ("metadata", "cloud metadata", "tcp", METADATA, 80),
        ("resolver", "a resolver of the internet", "udp", INTERNET, 53),
    ]
    neighbour = NEIGHBOUR if lab is not None else _default_gateway()
    if neighbour is not None:
        targets.append(("neighbour", "a neighbour of the host's", "tcp", neighbour, 9))
    else:
        yield Way(name="neighbour", group=group, tried="a neighbour of the host's", absent="this host has no default gateway to try")
    has_ipv6 = os.path.exists("/proc/sys/net/ipv6")
    for name, label, kind, address, port in targets:
        tried = f"{label}, {kind} {f'[{address}]' if ':' in address else address}:{port}"
        if ":" in address and not has_ipv6:
            yield Way(name=name, group=group, tried=tried, absent="this kernel has no IPv6")
            continue
        attempt = (kind, address, port, *([name] if kind == "udp" else []))
        if lab is None:
            ear = wire.ear(goes_to(address, port))
            yield Way(name=name, group=group, tried=tried, attempt=attempt, ear=ear, wire=True, plain=By.NOBODY)
        elif kind == "udp":
            yield Way(name=name, group=group, tried=tried, attempt=attempt, ear=ends.receive(address, name, port, inside=lab.neighbour)[1])
        else:
            yield Way(name=name, group=group, tried=tried, attempt=attempt, ear=ends.listen(address, port, inside=lab.neighbour)[1])
    yield Way(
        name="name",
        group=group,
        tried="a name lookup, example.com",
        attempt=("name", "example.com"),
        ear=wire.ear(is_lookup),
        wire=True,
        plain=By.NOBODY,
    )


def _unix_sockets(ends: Ends, place: Place) -> Iterator[Way]:
    group = "Unix sockets"
    for name, label, parent in (
        ("unix-run", "in /run", "/run"),
        ("unix-tmp", "in /tmp", "/tmp"),
        ("unix-shown", "that it sees", "/var/lib"),
    ):
        path = f"{ends.directory(parent)}/host.sock"
        yield Way(name=name, group=group, tried=f"a host socket {label}", attempt=("unix", path), ear=ends.listen_path(path))
    path = f"@sealnet-attack-{os.getpid()}"
    yield Way(name="unix-abstract", group=group, tried="an abstract host socket", attempt=("unix", path), ear=ends.listen_path(path))
    listening = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if line.split()[3] == "00010000"}
    # /var/run is what some still call it.
    found = [path for path in " ".join(_DAEMONS).split() if {path, f"/var{path}"} & listening and os.path.exists(path)]
    absent = None if found else "none of those that are known listens here"
    if found and not place.sealed:
        absent = "not asked without a seal, for some would be started by it"
    yield Way(
        name="unix-daemons",
        group=group,
        tried=f"daemons of this host ({', '.join(map(os.path.basename, found)) or 'none'})",
        attempt=("unix", *found),
        witnessed="they listen (/proc/net/unix)",
        absent=absent,
        plain=By.NOBODY,
    )


def _own_addresses() -> Iterator[tuple[str, int, str]]:
    """Link, its index, and address with prefix length, of what is up, and neither loopback nor a run's."""
    with Netlink() as nl:
        for link in links.see_all(nl):
            if link.name != "lo" and link.running and not link.name.startswith(names.LINK_PREFIX):
                yield from ((link.name, link.ifindex, address) for address in links.see_addresses(nl, link.ifindex))


def _own_address() -> str | None:
    return next((address.partition("/")[0] for _link, _index, address in _own_addresses() if ":" not in address), None)


def _own_address6() -> str | None:
    found = (address.partition("/")[0] for _link, _index, address in _own_addresses())
    return next((address for address in found if ":" in address and not ip_address(address).is_link_local), None)


def _own_link_local() -> tuple[str, str, int] | None:
    """A link-local address of the host's, its link and that one's index."""
    return next(
        ((address.partition("/")[0], link, index) for link, index, address in _own_addresses() if address.startswith("fe80:")), None
    )


def _own_subnet() -> tuple[IPv4Network, str] | None:
    """A subnet with a broadcast address that the host is in, and by which link."""
    found = ((IPv4Network(address, strict=False), link) for link, _index, address in _own_addresses() if ":" not in address)
    return next(((subnet, link) for subnet, link in found if subnet.prefixlen < 31), None)


def _default_gateway() -> str | None:
    for line in Path("/proc/net/route").read_text().splitlines()[1:]:
        _link, destination, gateway, *_rest = line.split()
        if destination == "00000000" and gateway != "00000000":
            return socket.inet_ntoa(bytes.fromhex(gateway)[::-1])
    return None
