"""A machine with IPv6 alone, and one with both: the lease is IPv4, whatever the machine has."""

from __future__ import annotations

from e2e.hosts.machine import ETH0, FORBIDDEN, LAN_PEER6, Machine
from tests.lab import LAN_HOST

_LEASED_AT = "198.18.0.1"


def test_a_machine_with_ipv6_alone_seals_and_a_relay_leads_to_an_ipv6_broker(machine: Machine) -> None:
    undo = (f"ip addr add {ETH0}/24 dev eth0", "ip route add default via 10.0.2.2", f"ip addr add {LAN_HOST}/24 dev lan0")
    targets = (("tcp", LAN_PEER6, 9002), ("udp", "fe80::1%eth0", FORBIDDEN), ("udp", "ff02::1%eth0", FORBIDDEN))
    machine.control()
    with machine.undoing(*undo):
        machine.run("ip", "-4", "addr", "flush", "dev", "eth0")
        machine.run("ip", "-4", "addr", "flush", "dev", "lan0")
        machine.python(
            "import http.server as h, socket, socketserver as s\n"
            "class S(s.ThreadingTCPServer):\n    address_family = socket.AF_INET6\n    allow_reuse_address = daemon_threads = True\n"
            f"S(('{LAN_PEER6}', 9003), h.SimpleHTTPRequestHandler).serve_forever()\n",
            netns="lan",
        )
        before = machine.looks()
        live = machine.live("ipv6-alone", targets=targets)
        doctor = machine.sealnet("doctor")
        live.sealed()
        live.end()
        machine.same(before)
        relayed = machine.sealnet(
            "run", "--broker", f"tcp:[{LAN_PEER6}]:9003", "--", "sh", "-c", 'curl -fsS -o /dev/null "$SEALNET_BROKER_URL/"'
        )

        assert live.record["gateway"] == _LEASED_AT
        assert (live.refused(), live.events()) == ([], [])
        assert doctor.returncode == 0, doctor.stdout
        assert relayed.returncode == 0, relayed.stderr
    machine.control()


def test_router_advertisements_and_renumbering_do_not_reach_a_run(machine: Machine) -> None:
    """Both families; addresses come and go, forwarding of both is on, and IPv6 is off and on for all links."""
    settings = {"net__ipv6__conf__all__forwarding": "1", "net__ipv4__ip_forward": "1"}
    with machine.sysctls(**settings), machine.undoing("ip addr del fd88::1/64 dev lan0"):
        machine.control()
        live = machine.live("dual-stack")

        machine.run("ip", "addr", "add", "fd88::1/64", "dev", "lan0", "nodad")
        live.sealed()
        # Writing `all` is writing every link's.
        machine.run("sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=1")
        machine.run("sysctl", "-w", "net.ipv6.conf.all.disable_ipv6=0")
        live.until("ipv6-back")
        live.sealed()

        assert live.refused() == []
        machine.run("ip", "addr", "add", "fd77::1/64", "dev", "lan0", "nodad", check=False)
        machine.control()
        live.end()
