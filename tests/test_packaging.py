"""What the Debian package's files say again is what the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sealnet.cli import COMMANDS
from sealnet.model import config, manners, names, version

ROOT = Path(__file__).resolve().parents[1]
PACKAGING = ROOT / "scripts/packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_it_has_one_version() -> None:
    assert PROJECT["version"] == version.VERSION


def test_it_depends_on_what_the_project_depends_on() -> None:
    depends = (PACKAGING / "debian/control").read_text().partition("\nDepends:")[2].partition("\nRecommends:")[0]
    bounds = set(re.findall(r"^ python3-(\w+) \((.*)\),$", depends, re.MULTILINE))

    assert bounds == {
        (name, bound.replace(">=", ">= ").replace("<", "<< "))
        for name, both in (re.fullmatch(r"(\w+)(.*)", one).groups() for one in PROJECT["dependencies"])  # type: ignore[union-attr]
        for bound in both.split(",")
    }


def test_the_example_configuration_is_what_there_is_without_one() -> None:
    text = (PACKAGING / "config.toml").read_text()

    assert config.parse(text) == config.Config()
    assert tomllib.loads(text).keys() == set(config._KEYS)


def test_purging_knows_the_files_of_sealnet_host() -> None:
    text = (PACKAGING / "debian/sealnet.postrm").read_text()
    written = {path for path in re.findall(r"/etc/[\w./-]+", text) if not path.startswith("/etc/sealnet")}

    assert written == {path for manager in manners.MANAGERS for path in manager.paths}
    assert re.search("grep -qF '(.*)'", text)[1] in manners.MARKER  # type: ignore[index]


def test_its_scripts_know_the_links_of_runs() -> None:
    for name in ("prerm", "postinst"):
        assert f"group {names.LINK_GROUP} " in (PACKAGING / f"debian/sealnet.{name}").read_text()


def test_each_command_has_a_manual_page_with_its_options(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-I", PACKAGING / "manpages.py", tmp_path], check=True)

    pages = {page.stem: page.read_text() for page in tmp_path.iterdir()}
    assert pages.keys() == {"sealnet", "sealnet-host-install", "sealnet-host-remove", *(f"sealnet-{name}" for name in COMMANDS)}
    assert "\\fB\\-\\-lease\\-port PORT\\fR\n" in pages["sealnet-run"]
    assert "\\fB\\-\\-worker auto|always|never\\fR\n" in pages["sealnet-run"]
    assert "sealnet run \\-\\-lease\\-port 8080 \\-\\- ./agent " in pages["sealnet"]
    for name, page in pages.items():
        assert page.startswith(f".TH {name.upper()} 1 1970-01-01 "), name
        assert not [line for line in page.splitlines() if line.startswith("'") or "\b" in line], name


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_command_is_completed_and_what_an_option_takes(shell: str) -> None:
    def completed(*words: str) -> str:
        line = " ".join(("sealnet", *words))
        asked = {"_SEALNET_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words))}
        asked |= {"COMP_CWORD": words[-1]} if shell == "fish" else {}
        argv = (sys.executable, "-m", "sealnet")
        return subprocess.run(argv, env={**os.environ, **asked}, capture_output=True, text=True, check=False, cwd=ROOT).stdout

    def word(name: str) -> re.Pattern[str]:
        return re.compile(rf"^(plain[,\t])?{re.escape(name)}\b", re.MULTILINE)

    shown = completed("")
    assert [name for name in COMMANDS if not word(name).search(shown)] == []
    assert word("confinement").search(completed("ls", "--sort", "conf"))
    assert word("--metrics").search(completed("worker", "--me"))
    assert not word("top").search(completed("worker", "to"))
