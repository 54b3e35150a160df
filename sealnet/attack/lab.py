"""A throw-away host for the kit: what would harm the user's own (forwarding, DNAT, loose sysctls) is done there."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from sealnet.errors import CannotSeal
from sealnet.kernel import libc, process
from sealnet.kernel.netns import Inside
from sealnet.kernel.nft import Nft

# Stands for the internet, a metadata service and a LAN, all on one neighbour that really answers.
INTERNET, INTERNET6, METADATA = "203.0.113.1", "2001:db8::1", "169.254.169.254"
NEIGHBOUR = "172.31.255.2"
_HOST, _HOST6, _NEIGHBOUR6, _LINK = "172.31.255.1", "2001:db8:77::1", "2001:db8:77::2", "lan0"

# As loose as a host gets: it forwards, routes loopback addresses, and believes any source.
_LOOSE = {"forwarding": "1", "route_localnet": "1", "rp_filter": "0", "accept_local": "1", "arp_ignore": "0", "proxy_arp": "1"}


@dataclass(frozen=True, slots=True)
class Lab:
    """The throw-away host that this process is in, and the namespace of its neighbour."""

    neighbour: Inside

    def forward(self, port: int, to: str, to_port: int) -> None:
        """As docker publishes a port: on every local address, for what comes in and for the host itself."""
        rule = f"fib daddr type local tcp dport {port} dnat to {to}:{to_port}"
        chains = "".join(
            f"\tchain {hook} {{\n\t\ttype nat hook {hook} priority -100;\n\t\t{rule}\n\t}}\n" for hook in ("prerouting", "output")
        )
        # The answers come back to the host's own link, and not by another to a gateway, where the gate would drop them.
        chains += f"\tchain postrouting {{\n\t\ttype nat hook postrouting priority 100;\n\t\tip daddr {NEIGHBOUR} masquerade\n\t}}\n"
        Nft().apply(f"table ip lab-{port} {{\n{chains}}}\n", f"publish port {port} in the throw-away host")

    def loosen(self, link: str) -> None:
        """Undo every sysctl that guards a run's link, as others do without knowing."""
        for name in (link, "all"):
            for key, value in _LOOSE.items():
                Path(f"/proc/sys/net/ipv4/conf/{name}/{key}").write_text(value, encoding="ascii")
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1", encoding="ascii")


def enter(stack: contextlib.ExitStack) -> Lab:
    """Move this process, which must have one thread yet, to a host of its own for the rest of its life."""
    libc.unshare(libc.CLONE_NEWNS | libc.CLONE_NEWNET)
    libc.mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
    libc.mount("tmpfs", "/run", "tmpfs", 0, "mode=0755")
    for name in ("netns", "lock"):
        os.mkdir(f"/run/{name}", 0o755)
    Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 2147483647", encoding="ascii")
    neighbour = stack.enter_context(Inside.new("neighbour"))
    here = ["link set lo up", f"link add {_LINK} type veth peer name eth0 netns /proc/{os.getpid()}/fd/{neighbour.fd}"]
    here += [f"address add {_HOST}/30 dev {_LINK}", f"link set {_LINK} up", f"route add default via {NEIGHBOUR}"]
    there = ["link set lo up", f"address add {INTERNET}/32 dev lo", f"address add {METADATA}/32 dev lo"]
    there += [f"address add {NEIGHBOUR}/30 dev eth0", "link set eth0 up", f"route add default via {_HOST}"]
    if os.path.exists("/proc/sys/net/ipv6"):
        # An address that is still being probed for duplicates cannot be listened at.
        Path("/proc/sys/net/ipv6/conf/default/accept_dad").write_text("0", encoding="ascii")
        here += [f"address add {_HOST6}/64 dev {_LINK} nodad", f"-6 route add default via {_NEIGHBOUR6}"]
        there += [
            f"address add {_NEIGHBOUR6}/64 dev eth0 nodad",
            f"address add {INTERNET6}/128 dev lo",
            f"-6 route add default via {_HOST6}",
        ]
    _ip(*here[:2])
    neighbour.call(_ip, *there)
    _ip(*here[2:])
    return Lab(neighbour)


def _ip(*commands: str) -> None:
    ip = process.tool("ip")
    for command in commands:
        done = subprocess.run([ip, *command.split()], capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotSeal(f"cannot build the throw-away host: ip {command}: {done.stderr.strip()}")
