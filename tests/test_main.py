"""How the program ends: nothing that it printed is lost, and what could not be written is no success."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPEN = ["--network", "open", "--allow-unenforced-egress"]
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

    assert (done.returncode, done.stderr) == (
        2,
        "sealnet: cannot use --fallback ?[2J?all is well?: the only one is 'sever'\n  hint: sealnet run --help\n",
    )


def test_what_cannot_be_written_is_no_success() -> None:
    with open("/dev/full", "wb") as full, open("/dev/null", "wb") as null:
        assert subprocess.run([*_SEALNET, "--version"], stdout=null, stderr=null, check=False).returncode == 0
        assert subprocess.run([*_SEALNET, "--version"], stdout=full, stderr=null, check=False).returncode != 0


def test_a_list_that_cannot_be_written_says_so() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*_SEALNET, "plan", "--json", "--", "true"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)

    assert (done.returncode, done.stderr.splitlines()[0]) == (125, "sealnet: cannot write the output: No space left on device")


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_caller_may_have_closed_its_streams(closed: str) -> None:
    for argv, status in ((["--version"], 0), (["run", "--no-such-option"], 2)):
        done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *_SEALNET, *argv], capture_output=True, text=True, check=False)

        assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["run", "--nonsense", "--", "true"], "cannot use --nonsense: there is no such option"),
        (["nonsense"], "cannot read the command line: No such command 'nonsense'"),
        (["check"], "cannot go on without RUN: it is missing"),
        (["run", "--lease-port", "abc", "--", "true"], "cannot use --lease-port 'abc': a TCP port is a whole number from 1 to 65535"),
        (["run", "--lease-port", "08080", "--", "true"], "cannot use --lease-port '08080': a TCP port"),
        (["run", "--lease-port", "\u0668\u0660", "--", "true"], "cannot use --lease-port '"),
        (["run", "--timeout", "1_0", "--", "true"], "cannot use --timeout '1_0': it is a number of seconds"),
        (["run", "--timeout", "inf", "--", "true"], "cannot use --timeout inf: it is a number of seconds, more than 0"),
        (["run", "--evidence", "", "--", "true"], "cannot use --evidence '': it names no file"),
        (["run", "--worker", "", "--", "true"], "cannot use --worker ''"),
        (["run", "--chdir", "", "--", "true"], "cannot use --chdir ''"),
        (["run", "--pass-env", "", "--", "true"], "cannot use --pass-env ''"),
        (["run", "--dry-run", "--receipt", "r", "--", "true"], "cannot use --report, --receipt or --evidence with --dry-run"),
        (
            ["run", "--fallback", "sever", "--network", "open", "--allow-unenforced-egress", "--", "true"],
            "cannot use --fallback with --network open",
        ),
        (["--json", "kill", "x"], "cannot use --json with kill: it prints no document"),
        (["check", "NO"], "cannot use run id 'NO'"),
    ],
)
def test_an_error_says_what_cannot_be_done_and_what_to_do(argv: list[str], words: str) -> None:
    done = subprocess.run([*_SEALNET, *argv], capture_output=True, text=True, check=False)

    first, *rest = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert first.startswith(f"sealnet: {words}")
    assert [line[:8] for line in rest] == ["  hint: "]


def test_a_bug_traces_back() -> None:
    code = "import sealnet.cli, sealnet.__main__; sealnet.cli.main = lambda: 1 / 0; sealnet.__main__.main()"

    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
