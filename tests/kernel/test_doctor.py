"""`sealnet doctor` on throw-away hosts that have everything, lack something, or have somebody in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from sealnet import caller
from sealnet.model.facts import INSTALLED
from tests import lab

pytestmark = pytest.mark.root

NOT_ROOT = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


class Told:
    """What one `sealnet doctor --json` said."""

    def __init__(self, host: lab.Host, *argv: str, prefix: tuple[str, ...] = ()) -> None:
        done = host.run(*prefix, *lab.SEALNET, "doctor", "--json", *argv, check=False)
        assert done.stderr == ""
        self.status, self.document = done.returncode, json.loads(done.stdout)
        self.probe: dict[str, Any] = self.document["probe"]
        self.rows: list[dict[str, str]] = self.document["rows"]

    def row(self, name: str) -> dict[str, str] | None:
        return next((row for row in self.rows if row["name"] == name), None)

    def found(self, name: str) -> tuple[str, str]:
        row = self.row(name)
        assert row is not None, [row["name"] for row in self.rows]
        return row["status"], row["found"]


def test_a_host_that_can_seal_is_told_and_nothing_is_left(host: lab.Host) -> None:
    told = Told(host)

    assert told.status == 0
    assert told.document["schema"] == "sealnet.doctor/1"
    assert told.document["can_seal"] is True
    assert told.document["kernel"] == host.run("uname", "-r").stdout.strip()
    assert {"sealnet", "python", "bwrap", "setpriv", "libnftables", "libseccomp"} <= set(told.document["versions"])
    assert [row for row in told.rows if row["status"] in ("warn", "fail")] == []
    assert [step["step"] for step in told.probe["steps"]] == ["look", "claim", "allocate", "build", "prove", "start", "run", "remove"]
    assert (told.probe["ok"], told.probe["reason"]) == (True, None)
    assert host.left_over() == []


def test_the_table_for_people_ends_with_the_answer(host: lab.Host) -> None:
    done = host.sealnet("doctor")

    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert lines[0].split() == ["WHAT", "FOUND"]
    assert lines[1].startswith("ok    kernel features")
    assert "overlay" in lines[1]
    assert lines[-2].startswith("a throw-away seal, in ms: look ")
    assert lines[-1].startswith("this host can seal: ")


def test_help_and_a_port_that_is_none(host: lab.Host) -> None:
    told, refused = host.sealnet("doctor", "--help"), host.sealnet("doctor", "--lease-port", "0")

    assert told.returncode == 0
    assert "--lease-port PORT" in told.stdout
    assert (refused.returncode, refused.stdout) == (2, "")
    assert not host.state.exists()


def test_a_state_directory_that_others_may_write_is_told_with_what_mends_it(host: lab.Host) -> None:
    host.state.mkdir(parents=True, exist_ok=True)
    host.state.chmod(0o1777)

    told = Told(host)
    row = told.row("state directory") or {}
    host.run(*row["fix"].split())

    assert (told.status, row["status"]) == (1, "fail")
    assert row["found"] == f"{host.state}: mode 1777, of uid 0: it must be root's, and nobody else's to write"
    assert row["fix"] == f"chmod 755 {host.state}"
    assert Told(host).found("state directory") == ("ok", str(host.state))


def test_a_host_without_bwrap_names_the_package_and_the_step(host: lab.Host) -> None:
    with lab.without(host, "/usr/bin/bwrap"):
        told, human = Told(host), host.sealnet("doctor")

    assert told.status == human.returncode == 1
    assert told.document["can_seal"] is False
    assert told.row("bwrap") == {
        "name": "bwrap",
        "status": "fail",
        "found": "missing",
        "does": "refuses every run",
        "fix": "apt-get install bubblewrap",
    }
    assert told.probe["step"] == "claim"
    assert told.probe["hint"] == "apt-get install bubblewrap"
    assert human.stdout.splitlines()[-1] == "  hint: apt-get install bubblewrap"
    assert "this host CANNOT seal, at step claim: cannot find tool bwrap" in human.stdout
    assert Told(host).status == 0


@pytest.mark.parametrize("module", ["nftables", "seccomp"])
def test_a_missing_binding_is_a_row_and_no_traceback(host: lab.Host, module: str) -> None:
    found = Told(host).row(f"Python binding {module}")
    assert found is not None
    with lab.without(host, found["found"].removesuffix("/__init__.py")):
        told = Told(host)

    assert told.status == 1
    assert told.found(f"Python binding {module}") == ("fail", "missing")
    assert told.probe["hint"] == f"apt-get install python3-{module}"


def test_whoever_is_not_root_is_told_what_can_be_seen(host: lab.Host) -> None:
    host.sealnet("doctor")

    told = Told(host, prefix=NOT_ROOT)

    assert told.status == 1
    assert told.found("privileges") == ("fail", "not root")
    assert told.found("overlay") == told.found("firewalls") == told.found("orphans") == ("note", "not looked at, for that takes root")
    assert told.found("bwrap")[0] == "ok"
    assert told.found("subnet pool")[0] == "ok"
    assert told.probe["step"] == "look"


def test_a_root_without_a_capability_is_told(host: lab.Host) -> None:
    told = Told(host, prefix=("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"))

    assert told.status == 1
    assert told.found("privileges") == ("fail", "this root lacks CAP_NET_ADMIN")


def test_a_read_only_proc_sys_is_told(host: lab.Host) -> None:
    host.run("mount", "--bind", "/proc/sys", "/proc/sys")
    host.run("mount", "-o", "remount,bind,ro", "/proc/sys")
    told = Told(host)
    host.run("umount", "/proc/sys")

    assert told.status == 1
    assert told.found("/proc/sys/net") == ("fail", "read-only, and a link must be made quiet")
    assert told.probe["step"] == "build"
    assert Told(host).row("/proc/sys/net") is None


def test_a_read_only_state_directory_is_told(host: lab.Host) -> None:
    host.run("mount", "-t", "tmpfs", "-o", "ro", "none", "/run/lock")
    told = Told(host, prefix=("env", "SEALNET_STATE_DIR=/run/lock/sealnet"))
    host.run("umount", "/run/lock")

    assert told.status == 1
    assert told.found("state directory") == ("fail", "/run/lock/sealnet: Read-only file system")
    assert told.probe["reason"] == "cannot make state directory /run/lock/sealnet: Read-only file system"


def test_a_configuration_that_cannot_be_read_is_told(host: lab.Host) -> None:
    config = host.directory / "config.toml"
    config.write_text("pol = []\n")

    told = Told(host, prefix=("env", f"SEALNET_CONFIG={config}"))

    assert told.status == 1
    keys = "pool, lease_ttl, max_runs, group, door_ports, door_user, max_runs_per_user, launch_rate, metrics"
    assert told.found("configuration") == ("fail", f"cannot use key 'pol' in {config}: it is not one of {keys}")
    assert told.probe["reason"] == told.found("configuration")[1]


def test_an_input_policy_that_drops_is_named_and_a_port_that_it_lets_in_may_be_tried(host: lab.Host) -> None:
    host.run("nft", "add table inet strict; add chain inet strict inward { type filter hook input priority 0; policy drop; }")
    host.run("nft", "add", "rule", "inet", "strict", "inward", "iifname", "seal*", "tcp", "dport", "8080", "accept")
    shut, let_in = Told(host), Told(host, "--lease-port", "8080")
    host.run("nft", "delete", "table", "inet", "strict")

    named = "table inet strict, chain inward (filter, priority 0, policy drop)"
    assert (shut.status, shut.found("input policy")) == (1, ("warn", named))
    assert shut.probe["step"] == "prove"
    assert "cannot reach the broker of run can-seal-" in shut.probe["reason"]
    assert (let_in.status, let_in.found("input policy")) == (0, ("note", named))


def test_the_fix_for_an_input_policy_works(host: lab.Host) -> None:
    host.run("nft", "add table inet strict; add chain inet strict inward { type filter hook input priority 0; policy drop; }")
    row = Told(host).row("input policy")
    assert row is not None
    host.run("sh", "-c", row["fix"].replace("PORT", "8080"))
    status = Told(host, "--lease-port", "8080").status
    host.run("nft", "delete", "table", "inet", "strict")

    assert status == 0


@pytest.mark.tool("iptables-legacy")
def test_a_policy_of_iptables_legacy_is_named_and_its_fix_works(host: lab.Host) -> None:
    host.run("iptables-legacy", "-P", "INPUT", "DROP")
    told = Told(host)
    row = told.row("input policy")
    assert row is not None
    host.run("sh", "-c", row["fix"].replace("PORT", "8080"))
    mended = Told(host, "--lease-port", "8080")
    host.run("iptables-legacy", "-F", "INPUT")
    host.run("iptables-legacy", "-P", "INPUT", "ACCEPT")

    assert (told.status, told.found("input policy")) == (1, ("warn", "iptables-legacy table filter, chain INPUT, policy drop"))
    assert mended.status == 0


def test_dockers_dnat_and_its_forward_policy_are_noted_and_do_not_matter(host: lab.Host) -> None:
    host.run("iptables-nft", "-t", "nat", "-N", "DOCKER")
    host.run("iptables-nft", "-t", "nat", "-A", "PREROUTING", "-m", "addrtype", "--dst-type", "LOCAL", "-j", "DOCKER")
    host.run("iptables-nft", "-t", "nat", "-A", "DOCKER", "-p", "tcp", "-j", "DNAT", "--to-destination", f"{lab.LAN_PEER}:80")
    host.run("iptables-nft", "-P", "FORWARD", "DROP")
    told = Told(host)
    for table in ("nat", "filter"):
        host.run("nft", "delete", "table", "ip", table)

    assert told.status == 0
    assert told.found("docker") == ("note", "its chains are loaded")
    assert told.found("forward policy")[0] == "ok"


def test_a_dnat_of_somebody_elses_is_noted(host: lab.Host) -> None:
    host.run("nft", "add table ip mine; add chain ip mine turn { type nat hook prerouting priority dstnat; }")
    host.run("nft", "add", "rule", "ip", "mine", "turn", "tcp", "dport", "1-65535", "dnat", "to", lab.LAN_PEER)
    told = Told(host)
    host.run("nft", "delete", "table", "ip", "mine")

    assert (told.status, told.row("docker")) == (0, None)
    assert told.found("DNAT") == ("note", "table ip mine, chain turn (nat, priority -100, policy accept)")


def test_vpn_routes_are_told_with_what_is_taken_instead(host: lab.Host) -> None:
    for prefix in ("10.0.0.0/8", "0.0.0.0/1", "128.0.0.0/1"):
        host.run("ip", "route", "add", prefix, "via", lab.LAN_PEER, "table", "75")
    told = Told(host)
    host.run("ip", "route", "flush", "table", "75")

    assert told.status == 0
    assert told.found("subnet pool") == ("note", f"10.0.0.0/8 via {lab.LAN_PEER}, table 75")
    assert [row["found"] for row in told.rows if row["name"] == "VPN route"] == [
        f"{prefix} via {lab.LAN_PEER}, table 75" for prefix in ("0.0.0.0/1", "128.0.0.0/1")
    ]


def test_a_pool_that_the_host_routes_all_of_is_a_failure(host: lab.Host) -> None:
    for prefix in ("10.0.0.0/8", "198.18.0.0/15"):
        host.run("ip", "route", "add", prefix, "via", lab.LAN_PEER)
    told = Told(host)
    for prefix in ("10.0.0.0/8", "198.18.0.0/15"):
        host.run("ip", "route", "del", prefix)

    status, found = told.found("subnet pool")
    assert (told.status, status, told.probe["step"]) == (1, "fail", "allocate")
    assert found == told.probe["reason"]
    assert "the host routes all of it" in found


@pytest.mark.parametrize(("astray", "can"), [(False, 0), (True, 1)])
def test_a_policy_rule_is_noted_and_judged_by_what_it_does(host: lab.Host, astray: bool, can: int) -> None:
    if astray:
        host.run("ip", "route", "add", "default", "via", lab.LAN_PEER, "table", "75")
    host.run("ip", "rule", "add", "to", "198.18.0.0/15", "lookup", "75", "priority", "50")
    told = Told(host)
    host.run("ip", "rule", "del", "priority", "50")
    host.run("ip", "route", "flush", "table", "75", check=False)

    assert told.found("policy rule") == ("note", "ip rule 50: from all to 198.18.0.0/15 lookup 75")
    assert told.status == can
    assert ("ip rule 50: from all to 198.18.0.0/15 lookup 75" in (told.probe["reason"] or "")) is astray


def test_forwarding_and_the_reverse_path_filter_are_said_to_be_fine(host: lab.Host) -> None:
    host.run("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward; echo 2 >/proc/sys/net/ipv4/conf/all/rp_filter")
    host.settled()
    told = Told(host)

    assert told.status == 0
    assert told.found("ip_forward")[1].startswith("on: ")
    assert told.found("rp_filter")[1].startswith("loose")


def test_orphans_and_a_gate_that_was_changed_are_told(host: lab.Host) -> None:
    run_id = caller.new_run_id()
    host.broker(8080)
    host.stop(host.spawn_run(run_id, "sleep", "600", options=("--lease-port", "8080")))
    lab.wait_for(lambda: (Told(host).row("orphans") or {})["status"] == "note", what="the orphan is seen")
    orphaned = Told(host)
    host.sealnet("reap", "--orphans")
    host.run("nft", "add", "rule", "inet", "sealnet", "input", "accept")
    changed, after = Told(host), Told(host)

    assert orphaned.found("orphans") == ("note", f"1 without a supervisor: {run_id}")
    assert changed.found("gate") == ("warn", "the gate has been changed (table inet sealnet)")
    # No lease stood in it, so the throw-away seal has put it up anew.
    assert changed.status == after.status == 0
    assert after.row("gate") is None


def test_who_may_adopt_a_link_is_a_warning_until_sealnets_files_stand(host: lab.Host) -> None:
    for name in ("upper", "work", "etc-upper", "etc-work"):
        os.mkdir(f"/run/{name}", 0o755)
    host.run("mount", "-t", "overlay", "-o", "lowerdir=/usr/sbin,upperdir=/run/upper,workdir=/run/work", "none", "/usr/sbin")
    host.run("mount", "-t", "overlay", "-o", "lowerdir=/etc,upperdir=/run/etc-upper,workdir=/run/etc-work", "none", "/etc")
    program = Path("/usr/sbin/NetworkManager")
    program.write_text(f"#!{os.path.realpath('/usr/bin/python3')}\nimport time\ntime.sleep(600)\n")
    program.chmod(0o755)
    process = host.spawn(str(program))
    lab.wait_for(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "NetworkManager\n", what="it has its name")
    untold = Told(host)
    for path in INSTALLED["NetworkManager"]:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        Path(path).write_text("# of sealnet host install\n")
    told = Told(host)
    host.stop(process)
    absent = Told(host)
    for path in ("/etc", "/usr/sbin"):
        host.run("umount", path)

    assert untold.status == told.status == 0
    assert untold.found("NetworkManager") == ("warn", f"NetworkManager runs (pid {process.pid}), and may configure links seal* as its own")
    assert (untold.row("NetworkManager") or {})["fix"] == "sealnet host install"
    assert told.found("NetworkManager")[0] == "ok"
    assert absent.row("NetworkManager") is None
