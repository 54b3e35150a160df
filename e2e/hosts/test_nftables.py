"""nftables.service, whose configuration begins with `flush ruleset`: the gate goes with everything else."""

from __future__ import annotations

from e2e.hosts.machine import LEASE, Machine

_CONF = """#!/usr/sbin/nft -f
flush ruleset
table inet filter {
  chain input {
    type filter hook input priority filter; policy drop
    iifname { "lo", "lan0" } accept
    iifname "seal*" accept
    ct state established,related accept
  }
  chain forward { type filter hook forward priority filter; policy accept; }
  chain output { type filter hook output priority filter; policy accept; }
}
"""


def test_a_flush_by_the_service_opens_nothing_and_no_answer_is_missing(machine: Machine) -> None:
    with machine.file("/etc/nftables.conf", _CONF), machine.unit("nftables"), machine.sysctls(net__ipv4__ip_forward="1"):
        before = machine.looks()
        machine.control()
        live = machine.live("flushed")

        for verb in ("restart", "reload", "stop", "start"):
            machine.run("systemctl", verb, "nftables")
            live.sealed()

        assert machine.gate()
        assert {"gate-restored"} <= set(live.events()) <= {"gate-restored", "lease-restored"}
        assert live.refused() == []
        machine.control()
        live.end()
        machine.same(before)


def test_neither_an_allowlist_nor_a_severed_run_is_opened_by_a_flush(machine: Machine) -> None:
    machine.in_lan_web()
    with machine.file("/etc/nftables.conf", _CONF), machine.unit("nftables"), machine.sysctls(net__ipv4__ip_forward="1"):
        machine.control()
        allowed = machine.live("allowed", *machine.web, host="web.test:9002")
        severed = machine.live("severed", "--network", "severed", asks=False)

        for verb in ("restart", "stop"):
            machine.run("systemctl", verb, "nftables")
            allowed.sealed()
            severed.sealed()

        assert (allowed.refused(), severed.events()) == ([], [])
        assert "gate-restored" in allowed.events()
        machine.control()
        allowed.end()
        severed.end()


def test_a_configuration_that_shuts_the_lease_shuts_it_and_the_next_run_is_refused_with_the_reason(machine: Machine) -> None:
    shut = _CONF.replace('    iifname "seal*" accept\n', "")
    with machine.file("/etc/nftables.conf", _CONF), machine.unit("nftables"):
        machine.control()
        live = machine.live("shut")

        with machine.file("/etc/nftables.conf", shut):
            machine.run("systemctl", "reload", "nftables")
            live.silent()
            code, told = live.check()
            refused = machine.sealnet("run", *LEASE, "--", "true")
        machine.run("systemctl", "reload", "nftables")
        live.sealed()

        assert (code, told["verdict"]) != (0, "sealed"), told
        assert refused.returncode == 125
        assert "table inet filter, chain input drops it" in refused.stderr
        assert "hint: let it in: nft insert rule inet filter input iifname" in refused.stderr
        live.end()
