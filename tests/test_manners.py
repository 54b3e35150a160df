"""Installing beside network managers: whole files or none, nobody else's touched, and back again."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from sealnet import manners
from sealnet.errors import SealnetError, UsageError
from sealnet.model.config import DOOR_PORTS
from sealnet.model.manners import MANAGERS, MARKER, Manager
from tests.crash import steps_of
from tests.lab import SEALNET

ZONE = "etc/firewalld/zones/sealnet.xml"
PATHS = sorted(path.lstrip("/") for manager in MANAGERS for path in manager.paths)


def files_in(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("*")) if path.is_file()}


def install(root: Path, *ports: int, everything: bool = True, dry_run: bool = False) -> list[manners.Change]:
    return manners.install(str(root), ports=ports, doors=DOOR_PORTS, everything=everything, dry_run=dry_run)[0]


def states(changes: list[manners.Change]) -> set[str]:
    return {change.state for change in changes}


def test_what_is_installed_is_removed_and_nothing_else(tmp_path: Path) -> None:
    other = tmp_path / "etc/systemd/network/10-lan.network"
    other.parent.mkdir(parents=True)
    other.write_text("[Match]\nName=eth0\n")

    first = install(tmp_path, 8080)
    installed = files_in(tmp_path)
    again = install(tmp_path, 8080)
    removed = manners.remove(str(tmp_path), dry_run=False)

    assert states(first) == {"new"}
    assert states(again) == {"unchanged"}
    assert sorted(installed) == sorted([*PATHS, "etc/systemd/network/10-lan.network"])
    assert (states(removed), len(removed)) == ({"removed"}, len(PATHS))
    assert files_in(tmp_path) == {"etc/systemd/network/10-lan.network": "[Match]\nName=eth0\n"}
    assert manners.remove(str(tmp_path), dry_run=False) == []


def test_everybody_may_read_what_is_installed_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        install(tmp_path, 8080)
    finally:
        os.umask(before)

    modes = {str(path.relative_to(tmp_path)): path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {modes[path] for path in PATHS} == {0o644}
    assert {mode for path, mode in modes.items() if path not in PATHS} == {0o755}


def test_a_manager_that_is_not_there_is_skipped_and_named(tmp_path: Path) -> None:
    (tmp_path / "usr/lib/systemd").mkdir(parents=True)
    (tmp_path / "usr/lib/systemd/systemd-networkd").touch()
    (tmp_path / "usr/sbin").mkdir()
    (tmp_path / "usr/sbin/firewalld").touch()

    changes, skipped = manners.install(str(tmp_path), ports=(), doors=DOOR_PORTS, everything=False, dry_run=False)

    assert [change.manager for change in changes] == ["systemd-networkd", "firewalld"]
    assert [(one.manager, one.why.split(",")[0]) for one in skipped] == [
        ("NetworkManager", "it is not on this host"),
        ("udev", "it is not on this host"),
    ]


def test_ports_are_added_to_those_that_were_let_in_before(tmp_path: Path) -> None:
    install(tmp_path, 8080)

    added = install(tmp_path, 9090)
    again = install(tmp_path)

    assert [change.manager for change in added if change.state == "changed"] == ["firewalld"]
    assert states(again) == {"unchanged"}
    assert (tmp_path / ZONE).read_text().count("<port ") == 3


def test_the_ports_of_doors_are_those_of_the_hosts_configuration(tmp_path: Path) -> None:
    """Of the host below DIR, and those of before are shut when it has changed."""
    configuration = tmp_path / "etc/sealnet/config.toml"
    configuration.parent.mkdir(parents=True)
    host = ("host", "install", "--all", "--root", str(tmp_path), "--json")

    for text, ports in (("", "29400-29407"), ('door_ports = "5000-5001"\n', "5000-5001")):
        configuration.write_text(text)
        assert sealnet(*host, "--lease-port", "8080").returncode == 0
        zone = (tmp_path / ZONE).read_text()
        assert re.findall('port="([^"]+)"', zone) == ["8080", ports]
    configuration.write_text("door_ports = 1\n")
    refused = sealnet(*host)

    assert refused.returncode == 2
    assert f"cannot use door_ports = 1 in {configuration}" in refused.stderr
    assert (tmp_path / ZONE).read_text() == zone


@pytest.mark.parametrize("kind", ["text", "link to nowhere", "link to null", "directory", "fifo"])
def test_somebody_elses_file_is_neither_overwritten_nor_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "etc/udev/rules.d/99-zz-sealnet.rules"
    path.parent.mkdir(parents=True)
    match kind:
        case "text":
            path.write_text("# mine\n")
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case _:
            path.symlink_to("/dev/null" if "null" in kind else "/no/such/file")
    before = os.lstat(path)

    with pytest.raises(UsageError) as caught:
        install(tmp_path, 8080)
    removed = manners.remove(str(tmp_path), dry_run=False)

    assert caught.value.message.startswith(f"cannot install {path}: a file of that name is there")
    assert str(caught.value.hint).endswith(f"mv {path} {path}.old")
    assert os.lstat(path) == before
    assert [(change.path, change.state) for change in removed] == [("/etc/udev/rules.d/99-zz-sealnet.rules", "kept")]
    # Nor was anything of the others written.
    assert [one for one in files_in(tmp_path) if "udev" not in one] == []


def test_a_link_to_the_mark_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"# {MARKER}\n")
    (tmp_path / "root/etc/udev/rules.d").mkdir(parents=True)
    (tmp_path / "root/etc/udev/rules.d/99-zz-sealnet.rules").symlink_to(secret)

    with pytest.raises(UsageError):
        install(tmp_path / "root")
    manners.remove(str(tmp_path / "root"), dry_run=False)

    assert secret.read_text() == f"# {MARKER}\n"
    assert (tmp_path / "root/etc/udev/rules.d/99-zz-sealnet.rules").is_symlink()


def test_a_link_in_an_image_leads_nowhere_but_into_the_image(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (root / str(outside).lstrip("/")).mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "etc/udev").symlink_to(outside)
    (root / "etc/systemd").symlink_to("../../outside")
    (root / "outside").mkdir()

    install(root, 8080)

    assert files_in(outside) == {}
    assert (root / str(outside).lstrip("/") / "rules.d/99-zz-sealnet.rules").is_file()
    assert (root / "outside/network/00-sealnet.network").is_file()


def test_a_dry_run_tells_all_and_writes_nothing(tmp_path: Path) -> None:
    told = install(tmp_path, 8080, dry_run=True)
    assert list(tmp_path.iterdir()) == []

    install(tmp_path, 8080)
    before = files_in(tmp_path)
    would = manners.remove(str(tmp_path), dry_run=True)

    assert {change.path.lstrip("/"): change.text for change in told} == before
    assert states(would) == {"removed"}
    assert files_in(tmp_path) == before


def test_whenever_an_installation_is_killed_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    for name in ("whole", "root"):
        for manager in MANAGERS:
            if manager.name in ("systemd-networkd", "firewalld"):
                program = tmp_path / name / manager.programs[0].lstrip("/")
                program.parent.mkdir(parents=True)
                program.touch()
    install(tmp_path / "whole", 8080, everything=False)
    whole = files_in(tmp_path / "whole")
    root, seen = tmp_path / "root", set()

    def look() -> None:
        found = {path: text for path, text in files_in(root).items() if not path.endswith(".new")}
        assert found.items() <= whole.items()
        seen.add(len(found))
        manners.remove(str(root), dry_run=False)

    steps = steps_of(lambda: install(root, 8080, everything=False), look)

    assert steps > 20
    # The two programs, and none or one of the two files.
    assert {2, 3} <= seen
    # What a killed one left is in nobody's way, and gone afterwards.
    assert files_in(root) == whole


def test_a_directory_that_is_none_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "etc").write_text("")

    with pytest.raises(SealnetError, match=rf"cannot (read|write) {tmp_path}/etc/systemd/network/00-sealnet.network: Not a directory"):
        install(tmp_path)
    with pytest.raises(SealnetError, match=r"cannot open .*/none: No such file or directory"):
        install(tmp_path / "none")


def manager(alive: str, reload: str) -> Manager:
    return Manager("theirs", (), (), ("env", alive), ("env", reload))


@pytest.mark.parametrize(
    ("alive", "reload", "state", "fault"),
    [("true", "true", "reloaded", ""), ("false", "false", "not running", ""), ("true", "false", "failed", "status 1")],
)
def test_only_a_manager_that_runs_is_reloaded(alive: str, reload: str, state: str, fault: str) -> None:
    done = manners.reload(manager(alive, reload))

    assert (done.state, done.fault) == (state, fault)


def sealnet(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SEALNET, *argv], capture_output=True, text=True, check=False)


def test_the_command_tells_people_and_programs_the_same(tmp_path: Path) -> None:
    root = ("--root", str(tmp_path), "--all", "--lease-port", "8080")

    shown = sealnet("host", "install", *root, "--dry-run")
    told = sealnet("--json", "host", "install", *root)
    removed = sealnet("host", "remove", "--root", str(tmp_path), "--json")
    again = sealnet("host", "remove", "--root", str(tmp_path))

    document = json.loads(told.stdout)
    assert document["schema"] == "sealnet.host/1"
    assert (again.returncode, again.stdout) == (0, "nothing to remove\n")
    assert [file["state"] for file in document["files"]] == ["new"] * len(PATHS)
    assert (document["root"], document["dry_run"], document["skipped"], document["reload"]) == (str(tmp_path), False, [], [])
    for file in document["files"]:
        assert f"would write   {tmp_path}{file['path']}\n" in shown.stdout
        assert all(f"    {line}".rstrip() in shown.stdout.splitlines() for line in file["text"].splitlines())
    assert [file["state"] for file in json.loads(removed.stdout)["files"]] == ["removed"] * len(PATHS)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--root", "/tmp", "--reload"), "cannot use --reload with --root"),
        (("--dry-run", "--reload"), "cannot use --reload with --dry-run"),
        (("--lease-port", "0"), "0 is not in the range"),
    ],
)
def test_a_contradiction_is_refused_before_anything_is_touched(argv: tuple[str, ...], words: str) -> None:
    done = sealnet("host", "install", *argv)

    assert done.returncode == 2
    assert words in done.stderr


def test_a_command_of_commands_alone_shows_its_help() -> None:
    done, asked = sealnet("host"), sealnet("host", "--help")

    assert asked.returncode == 0
    assert (done.stdout + done.stderr).strip() == asked.stdout.strip()


def test_a_root_that_is_missing_and_a_file_in_the_way_are_told_by_their_paths_here(tmp_path: Path) -> None:
    mine = tmp_path / "etc/systemd/network/00-sealnet.link"
    mine.parent.mkdir(parents=True)
    mine.write_text("# mine\n")

    missing = sealnet("host", "install", "--root", f"{tmp_path}/none", "--all")
    in_the_way = sealnet("host", "install", "--root", str(tmp_path), "--all")

    assert (missing.returncode, missing.stderr) == (
        125,
        f"sealnet: cannot open {tmp_path}/none: No such file or directory\n  hint: sealnet host --help\n",
    )
    assert in_the_way.returncode == 2
    assert f"cannot install {mine}: " in in_the_way.stderr


@pytest.mark.root
def test_whoever_may_not_look_is_told_so_in_a_dry_run() -> None:
    """firewalld's directory is root's alone on Debian."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        root.chmod(0o755)
        (root / "etc/firewalld").mkdir(parents=True)
        (root / "etc/firewalld").chmod(0o750)

        done = as_nobody(root)

    installed, removed = done.stdout.splitlines()
    assert "('systemd-networkd', 'new')" in installed
    assert "('firewalld', 'unseen')" in installed
    assert removed == "[('firewalld', 'unseen')]"
    assert f"cannot read {root}/{ZONE}: Permission denied" in done.stderr


def as_nobody(root: Path) -> subprocess.CompletedProcess[str]:
    """Dry runs, and then a removal that is meant."""
    ask = f"""
        import os
        from sealnet import manners
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        told = manners.install({str(root)!r}, ports=(), doors=(1, 2), everything=True, dry_run=True)[0]
        print([(one.manager, one.state) for one in told])
        print([(one.manager, one.state) for one in manners.remove({str(root)!r}, dry_run=True)])
        manners.remove({str(root)!r}, dry_run=False)
    """
    return subprocess.run([sys.executable, "-I", "-c", textwrap.dedent(ask)], capture_output=True, text=True, check=False)


def test_help_has_examples() -> None:
    for argv in (("host",), ("host", "install"), ("host", "remove")):
        assert "    sealnet host " in sealnet(*argv, "--help").stdout.replace("  sealnet", "    sealnet")
