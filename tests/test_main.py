"""How the program ends: nothing that it printed is lost, and what could not be written is no success."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SEALNET = [sys.executable, "-I", "-m", "sealnet"]


@pytest.mark.parametrize(("argv", "status"), [(["--version"], 0), (["run", "--help"], 0), (["no-such-command"], 2)])
def test_all_that_was_printed_arrives_and_the_status_is_kept(argv: list[str], status: int) -> None:
    done = subprocess.run([*_SEALNET, *argv], capture_output=True, text=True, check=False)

    assert done.returncode == status
    assert (done.stdout if status == 0 else done.stderr).endswith("\n")
    assert (done.stderr if status == 0 else done.stdout) == ""


def test_what_an_error_quotes_moves_no_cursor() -> None:
    asked = [*_SEALNET, "run", "--fallback", "\x1b[2J\nall is well\udc80", "--", "true"]

    done = subprocess.run(asked, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (2, "sealnet: cannot use --fallback ?[2J?all is well?: the only one is 'sever'\n")


def test_what_cannot_be_written_is_no_success() -> None:
    with open("/dev/full", "wb") as full, open("/dev/null", "wb") as null:
        assert subprocess.run([*_SEALNET, "--version"], stdout=null, stderr=null, check=False).returncode == 0
        assert subprocess.run([*_SEALNET, "--version"], stdout=full, stderr=null, check=False).returncode != 0


def test_a_bug_traces_back() -> None:
    code = "import sealnet.cli, sealnet.__main__; sealnet.cli.main = lambda: 1 / 0; sealnet.__main__.main()"

    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
