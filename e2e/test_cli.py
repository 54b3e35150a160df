"""Options, refusals and words of the command line."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.lab import SEALNET, Host, wait_for

pytestmark = pytest.mark.root


def test_a_dry_run_tells_everything_and_changes_nothing(host: Host) -> None:
    host.run("ip", "route", "add", "198.18.0.0/24", "dev", "lan0")
    host.settled()

    shown = json.loads(host.sealnet("run", "--lease-port", "8080", "--dry-run", "--json", "--", "true").stdout)
    people = host.sealnet("run", "--lease-port", "8080", "--dry-run", "--", "true").stdout

    assert shown["subnet"] == "198.18.1.0/30"
    assert shown["gateway"] == "198.18.1.1"
    assert "policy drop" in shown["rulesets"]["inside"]
    assert f'"{shown["ifname"]}" . 198.18.1.2 . 198.18.1.1 . 8080' in shown["rulesets"]["gate"]
    assert "198.18.1.1" in people
    assert not Path("/run/sealnet").exists()
    assert host.run("nft", "list", "tables").stdout == ""


@pytest.mark.parametrize("argv", [("--json", "ls"), ("ls", "--json")])
def test_json_may_stand_before_or_after_the_command(host: Host, argv: tuple[str, ...]) -> None:
    host.spawn_run("one", "sleep", "60")

    told = json.loads(host.sealnet(*argv).stdout)

    assert [(run["run_id"], run["state"], run["confinement"]) for run in told] == [("one", "running", "severed")]
    assert host.sealnet("reap", "one", "--json").stdout == '{"reaped": ["one"]}\n'
    assert json.loads(host.sealnet(*argv).stdout) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--run-id", "Bad"), "cannot use run id 'Bad'"),
        (("--run-id", "-a"), "cannot use run id '-a'"),
        (("--lease-port", "0"), "a TCP port is 1 to 65535"),
        (("--lease-port", "x"), "a TCP port is a whole number"),
        (("--lease-port", "80", "--lease-port", "81"), "cannot use --lease-port twice"),
        (("--user", "root", "--user", "nobody"), "cannot use --user twice"),
        (("--lease-port", "80", "--broker", "tcp:a:1"), "cannot use --lease-port with --broker"),
        (("--lease-port", "80", "--network", "severed"), "cannot use --network severed here"),
        (("--network", "sealed"), "cannot use --network sealed here"),
        (("--network", "tight"), "it is not one of severed, sealed, allowlist, open"),
        (("--network", "open"), "cannot use --network open: it enforces nothing"),
        (("--allow-unenforced-egress",), "it only permits --network open"),
        (("--allow", "a.test", "--network", "severed"), "cannot use --network severed here"),
        (("--allow", "192.0.2.1"), "cannot use --allow '192.0.2.1': an address is not a host name"),
        (("--allow", "a.test", "--setenv", "Http_Proxy=x"), "cannot use --setenv Http_Proxy: an allowlist run has a proxy of its own"),
        (("--broker", "unix:x"), "cannot use --broker 'unix:x'"),
        (("--plan", "/nonexistent/x"), "cannot read --plan /nonexistent/x: No such file or directory"),
        (("--plan", "/dev/null"), "cannot use plan /dev/null: "),
        (("--receipt", "/nonexistent/x"), "cannot use --receipt /nonexistent/x: /nonexistent: No such file or directory"),
        (("--receipt", "/"), "it names no file"),
        (("--receipt", "/dev/null"), "it is there and no plain file"),
        (("--receipt", "/proc/self/cwd/x"), "/proc/self: it is a symbolic link"),
        (("--evidence", "/nonexistent/x"), "cannot use --evidence /nonexistent/x: /nonexistent: No such file or directory"),
        (("--evidence", "/dev/null"), "cannot use --evidence /dev/null: /dev/null: Not a directory"),
        (("--evidence", "x", "--dry-run"), "there is no run to tell of"),
        (("--broker-env", "URL"), "the run has no broker"),
        (("--setenv", "A"), "it must be NAME=VALUE"),
        (("--timeout", "0"), "it is a number of seconds, more than 0"),
        (("--user", "nobody-of-that-name"), "there is no such account"),
        (("--fallback", "open"), "the only one is 'sever'"),
        (("--on-tamper", "ignore"), "it is restore or kill"),
        (("--bind", "/nonexistent"), "No such file or directory"),
        (("--tmpfs", "relative"), "a destination is an absolute path"),
        (("--bwrap-args", "/nonexistent"), "cannot read --bwrap-args"),
        (("--no-such-option",), "there is no such option"),
    ],
)
def test_a_wrong_request_is_one_clear_error_before_anything_is_touched(host: Host, argv: tuple[str, ...], words: str) -> None:
    done = host.sealnet("run", *argv, "--", "touch", "ran")

    assert done.returncode == 2
    assert words in done.stderr
    assert re.match(r"sealnet: [^\n]+\n(  hint: [^\n]+\n)?$", done.stderr), done.stderr
    assert done.stdout == ""
    assert not Path("ran").exists()
    assert not Path("/run/sealnet").exists()


def test_a_wrong_configuration_is_named(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("config.toml").write_text("pol = []\n")
    monkeypatch.setenv("SEALNET_CONFIG", str(Path("config.toml").absolute()))

    done = host.sealnet("run", "--", "true")

    assert done.returncode == 2
    assert "cannot use key 'pol' in" in done.stderr


def test_somebody_who_is_not_root_is_told_what_to_do(host: Host) -> None:
    done = host.run("setpriv", "--reuid", "65534", "--clear-groups", *SEALNET, "run", "--", "true", check=False, cwd="/")

    assert done.returncode == 125
    assert done.stderr == "sealnet: cannot run true: only root may\n  hint: sudo sealnet run ...\n"


def test_an_open_run_has_the_hosts_network_and_says_so(host: Host) -> None:
    options = ("--network", "open", "--allow-unenforced-egress")

    done = host.sealnet("run", *options, "--", "ip", "-br", "link", "show", "lan0")
    host.spawn_run("wide", "sleep", "60", options=options)

    assert done.returncode == 0
    assert done.stdout.startswith("lan0")
    assert host.record("wide")["confinement"] == "open"  # type: ignore[index]
    assert host.sealnet("reap", "wide").returncode == 0


def test_a_host_that_cannot_seal_severs_only_when_it_is_asked(host: Host) -> None:
    """The host routes all that the pool has."""
    host.broker(8080)
    Path("config.toml").write_text('pool = ["10.0.0.0/8"]\n')
    host.run("ip", "route", "add", "10.0.0.0/8", "dev", "lan0")
    host.settled()
    os.environ["SEALNET_CONFIG"] = str(Path("config.toml").absolute())
    try:
        refused = host.sealnet("run", "--lease-port", "8080", "--", "touch", "ran")
        severed = host.sealnet("run", "--lease-port", "8080", "--fallback", "sever", "--", "sh", "-c", "ls /sys/class/net; env")
    finally:
        del os.environ["SEALNET_CONFIG"]

    assert refused.returncode == 125
    assert "10.0.0.0/8" in refused.stderr
    assert not Path("ran").exists()
    assert severed.returncode == 0
    assert severed.stdout.startswith("lo\n")
    assert "SEALNET_BROKER_URL" not in severed.stdout
    assert "sealnet: ran severed, without its broker: cannot allocate" in severed.stderr


def test_a_report_lists_what_was_tried_after_the_end(host: Host) -> None:
    host.broker(8080)
    script = "curl -s -m 2 http://192.0.2.7:81/; curl -s -m 2 http://name.test/; curl -s http://broker.sealnet:8080/x; exit 3"

    done = host.sealnet("run", "--lease-port", "8080", "--report", "--", "sh", "-c", script)

    assert (done.returncode, done.stdout) == (3, "/x")
    assert re.search(r"1 +tcp +192\.0\.2\.7 +81\n", done.stderr)
    assert re.search(r"udp +192\.0\.2\.53 \(name lookups\) +53\n", done.stderr)
    assert "8080" not in done.stderr


def test_the_environment_is_short_and_names_the_broker(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.broker(8080)
    for name, value in {"no_proxy": "*", "Https_Proxy": "http://u:S3CR3T@corp:3128", "KEEP_ME": "1", "DROP_ME": "2"}.items():
        monkeypatch.setenv(name, value)

    done = host.sealnet(
        *("run", "--run-id", "env", "--lease-port", "8080", "--broker-env", "OPENAI_BASE_URL", "--pass-env", "*_ME"),
        *("--pass-env", "*roxy", "--setenv", "GIVEN=x y", "--", "env", "-0"),
    )

    told = dict(entry.split("=", 1) for entry in done.stdout.rstrip("\0").split("\0"))
    assert told["SEALNET"] == "1"
    assert told["SEALNET_RUN_ID"] == "env"
    assert told["SEALNET_BROKER_URL"] == told["OPENAI_BASE_URL"] == "http://198.18.0.1:8080"
    assert (told["GIVEN"], told["KEEP_ME"], told["DROP_ME"]) == ("x y", "1", "2")
    assert not [name for name in told if "proxy" in name.lower()]
    assert "S3CR3T" not in done.stdout


def test_a_value_that_is_set_is_in_no_process_list(host: Host) -> None:
    process = host.spawn_run("quiet", "sleep", "60", options=("--setenv", "TOKEN=S3CR3T"))
    own = f"/proc/{process.pid}"

    found = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(path.parent) != own and b"S3CR3T" in (path.read_bytes() if path.exists() else b"")
    ]

    assert found == []
    assert b"S3CR3T" in Path(f"{own}/cmdline").read_bytes()
    assert "S3CR3T" not in (host.state / "runs" / "quiet" / "record.json").read_text()
    assert host.sealnet("reap", "quiet").returncode == 0
    assert wait_for(lambda: process.poll() is not None or None)


def test_the_demo_is_sealed_and_tells_it(host: Host) -> None:
    done = host.sealnet("demo", "--json")

    shown = json.loads(done.stdout)
    assert done.returncode == 0
    assert shown["sealed"] is True
    assert shown["schema"] == "sealnet.demo/1"
    assert all(round(ms, 3) == ms for ms in (shown["seal_ms"], *(row["ms"] for row in shown["rows"])))
    assert len(shown["rows"]) >= 15
    assert [row["got"] for row in shown["rows"] if row["tried"].startswith("the broker")] == ["200 OK"]
    assert all(row["ok"] for row in shown["rows"])
    assert sum(row["control"] in ("the host reaches it", "the host can") for row in shown["rows"]) >= 13


@pytest.mark.parametrize("command", ["demo", "attack"])
def test_a_firewall_that_lets_in_some_ports_only_is_no_obstacle_where_one_is_named(host: Host, command: str) -> None:
    host.run("nft", "add table inet theirs")
    host.run("nft", "add chain inet theirs in { type filter hook input priority 0; policy drop; }")
    host.run("nft", "add rule inet theirs in iif lo accept")

    shut = host.sealnet(command)
    host.run("nft", 'add rule inet theirs in iifname "seal*" tcp dport 8080 accept')
    named = host.sealnet(command, "--lease-port", "8080", "--json")
    host.broker(8080)
    taken = host.sealnet(command, "--lease-port", "8080")
    host.run("nft", "delete table inet theirs")

    assert shut.returncode == 125
    assert "table inet theirs, chain in drops it (policy)" in shut.stderr
    assert shut.stderr.endswith("  hint: name a port that this host's firewall lets in from links seal*: --lease-port PORT\n")
    assert json.loads(named.stdout)["rows"], named.stderr
    assert named.returncode == 0
    assert (taken.returncode, taken.stderr.splitlines()[0]) == (2, "sealnet: cannot use --lease-port 8080: Address already in use")


def test_the_demo_says_when_something_is_open(host: Host) -> None:
    """Its own judgement can fail: with a broker that somebody holds back, the first row is not 200."""
    script = """
        from sealnet.attack import ends
        ends.Broker.do_GET = lambda self: self.send_error(503)
        from sealnet.cli import main
        main()
    """
    import sys
    import textwrap

    done = host.run(sys.executable, "-I", "-c", textwrap.dedent(script), "demo", check=False)

    assert done.returncode == 1
    assert "NOT sealed" in done.stdout
    assert "503" in done.stdout


def test_a_profile_of_bwraps_own_arguments_adds_to_the_view(host: Host) -> None:
    words = ("--unshare-pid", "--tmpfs", "/opt/empty", "--symlink", "/usr", "/opt/empty/usr", "--ro-bind", "/etc/hosts", "/opt/hosts")
    Path("lines").write_text("\n".join(words) + "\n")
    Path("nuls").write_bytes("\0".join(words).encode())

    for name in ("lines", "nuls"):
        done = host.sealnet("run", "--chdir", "/", "--bwrap-args", name, "--", "sh", "-c", "readlink /opt/empty/usr; cat /opt/hosts")

        assert (done.returncode, done.stdout) == (0, "/usr\n" + Path("/etc/hosts").read_text()), done.stderr


def test_a_directory_of_somebody_elses_is_not_emptied_for_a_virtual_environment(host: Host) -> None:
    script, theirs = str(Path(__file__).parents[1] / "scripts/sealnet"), host.directory / "venv"
    theirs.mkdir()
    for name in ("pyvenv.cfg", "notes", ".sealnet-notes"):
        (theirs / name).touch()

    refused, relative = (
        host.run(script, "--version", check=False, env={**os.environ, "SEALNET_VENV": venv}) for venv in (str(theirs), "venv")
    )
    control = host.run(script, "--version", check=False, env={name: value for name, value in os.environ.items() if name != "SEALNET_VENV"})

    assert (refused.returncode, "the directory has something else in it" in refused.stderr) == (125, True)
    assert sorted(os.listdir(theirs)) == [".sealnet-notes", "notes", "pyvenv.cfg"]
    assert (relative.returncode, "it is relative" in relative.stderr) == (125, True)
    assert (control.returncode, control.stdout.startswith("sealnet ")) == (0, True), control.stderr
