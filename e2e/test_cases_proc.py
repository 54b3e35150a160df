"""Processes of a run: exit statuses, signals, terminals, and that none of them is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sealnet import CompletedRun, Sealer
from sealnet.errors import CannotSeal
from tests.lab import PATIENCE, SEALNET, Host, netns_inodes, wait_for

pytestmark = pytest.mark.root

SEALED = ("--lease-port", "8080")
# Whom payloads run as: root, and a bare uid, which may not enter the test's own directory.
USERS = {"root": ("--user", "root"), "1234": ("--user", "1234", "--chdir", "/")}


def commands_with(word: str) -> list[str]:
    """Command lines on this machine that have the word among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            argv = path.read_text(errors="replace").split("\0")
            found += [" ".join(argv)] if word in argv else []
    return found


def inside(inode: int) -> bool:
    """Whether any process is in that network namespace."""
    return inode in netns_inodes()


def inode_of(host: Host, run_id: str) -> int:
    recorded = host.record(run_id)
    assert recorded is not None
    return recorded["netns_inode"]


@pytest.mark.parametrize(
    "script",
    [
        "sleep {} & exit 7",
        "setsid sleep {} & exit 7",
        "(setsid sh -c '(sleep {} &) &' &); exit 7",
        "trap '' HUP TERM INT; sleep {} & exit 7",
        "nohup setsid sleep {} 3>&1 >/dev/null 2>&1 </dev/null & exit 7",
    ],
    ids=["background", "setsid", "double fork", "ignores signals", "holds stdout"],
)
def test_a_child_in_the_background_ends_with_the_command(host: Host, script: str) -> None:
    """PROC-03, https://github.com/containers/bubblewrap/issues/105"""
    nap = f"4321.{os.getpid()}"

    for options in USERS.values():
        process = host.spawn(*SEALNET, "run", *options, "--", "sh", "-c", script.replace("exit 7", "echo ending; exit 7").format(nap))
        assert process.stdout is not None
        assert process.stdout.readline() == "ending\n"
        began = time.monotonic()
        # The pipe ends as well, which a child that is left would hold open.
        assert process.communicate(timeout=90)[0] == ""
        took_s = time.monotonic() - began

        assert process.returncode == 7
        assert took_s < 2 * PATIENCE
        assert commands_with(nap) == []


@pytest.mark.parametrize("user", USERS)
def test_the_exit_status_is_the_commands_own(host: Host, user: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PROC-04, https://github.com/netblue30/firejail/issues/4474"""
    plain = host.directory / "plain"
    plain.write_text("no program")
    plain.chmod(0o644)
    expected = {
        **{("sh", "-c", f"exit {status}"): status for status in (0, 1, 42, 125, 126, 127, 128, 200, 255)},
        **{
            ("sh", "-c", f"kill -{name} $$"): 128 + number
            for name, number in (("TERM", 15), ("SEGV", 11), ("KILL", 9), ("HUP", 1), ("INT", 2))
        },
        ("no-such-command",): 127,
        ("/no/such/command",): 127,
        ("/etc/passwd",): 126,
        ("/etc",): 126,
    }
    if user != "root":
        expected = dict(list(expected.items())[1::3])

    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")

    # Side by side: each is a start of its own.
    started = {command: host.spawn(*SEALNET, "run", *USERS[user], "--", *command) for command in expected}
    found = {command: process.wait(60) for command, process in started.items()}

    assert found == expected


def test_a_command_that_is_nowhere_is_127_also_where_the_path_names_a_closed_directory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """PROC-04, https://github.com/rootless-containers/PRoot/pull/11"""
    closed = host.directory / "closed"
    closed.mkdir(mode=0o700)
    monkeypatch.setenv("PATH", f"{closed}:/usr/sbin:/usr/bin:/sbin:/bin")

    statuses = [host.sealnet("run", *USERS["1234"], "--", *command).returncode for command in (("no-such-command",), ("true",))]

    # As a shell of that user's has it.
    shell_status = host.run("setpriv", "--reuid=1234", "--clear-groups", "sh", "-c", "no-such-command", check=False).returncode
    assert shell_status == 127
    assert statuses == [127, 0]


def test_the_commands_125_is_told_from_sealnets_own(host: Host) -> None:
    """PROC-05, https://github.com/containers/bubblewrap/issues/257"""
    profile = host.directory / "profile"
    profile.write_text("--bind\n/no/such/directory\n/mnt\n")
    own = host.sealnet("run", "--", "sh", "-c", "exit 125")

    failures = {
        "no broker": host.sealnet("run", "--lease-port", "9", "--", "true"),
        "bwrap fails after fork": host.sealnet("run", "--bwrap-args", str(profile), "--", "true"),
        "no such directory": host.sealnet("run", "--chdir", "/no/such/directory", "--", "true"),
        "a closed directory": host.sealnet("run", "--user", "1234", "--chdir", "/root", "--", "true"),
    }

    # To a program at the command line: sealnet speaks on stderr when, and only when, it failed.
    assert (own.returncode, own.stderr) == (125, "")
    assert {name: done.returncode for name, done in failures.items()} == dict.fromkeys(failures, 125)
    assert {name: "sealnet: cannot " in done.stderr for name, done in failures.items()} == dict.fromkeys(failures, True)


def test_a_bwrap_that_fails_after_the_fork_is_125_every_time(host: Host) -> None:
    """PROC-05, https://github.com/containers/bubblewrap/issues/701"""
    profile = host.directory / "profile"
    profile.write_text("--bind\n/no/such/directory\n/mnt\n")

    # It dies about when it is let go, so both orders are met.
    statuses = [host.sealnet("run", "--bwrap-args", str(profile), "--", "true").returncode for _ in range(12)]

    assert statuses == [125] * 12


@pytest.mark.parametrize(
    "options",
    [{"lease_port": 9}, {"bwrap_args": b"--bind\n/no/such/directory\n/mnt\n"}, {"chdir": "/no/such/directory"}],
    ids=["no broker", "bwrap fails after fork", "no such directory"],
)
def test_a_program_is_told_the_difference_by_an_exception(host: Host, options: dict[str, object]) -> None:
    """PROC-05, https://github.com/containers/bubblewrap/issues/701"""
    own = Sealer().run(["sh", "-c", "exit 125"])

    outcome: CompletedRun | Exception
    try:
        outcome = Sealer().run(["true"], stderr=subprocess.DEVNULL, **options)
    except Exception as error:  # noqa: BLE001 - which one is what is asked
        outcome = error

    assert isinstance(own, CompletedRun)
    assert own.returncode == 125
    assert not isinstance(outcome, CompletedRun), "a failure of sealnet's looks like the payload's own status"
    assert type(outcome).__module__ == CannotSeal.__module__


# Tells each signal that it gets, and how often it has had it; ends at TERM with 5.
_COUNTING = """
    import signal, sys

    signals = {signal.Signals["SIG" + name] for name in ("HUP", "INT", "QUIT", "USR1", "USR2", "TERM", "WINCH")}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    got = []
    print("ready", flush=True)
    while True:
        got.append(signal.sigwait(signals))
        print(got[-1].name, got.count(got[-1]), flush=True)
        if got[-1] == signal.SIGTERM:
            sys.exit(5)
"""
COUNTING = ("/usr/bin/python3", "-c", textwrap.dedent(_COUNTING))


@pytest.mark.parametrize("user", USERS)
def test_each_signal_reaches_the_command_once(host: Host, user: str) -> None:
    """PROC-06, https://github.com/containers/bubblewrap/pull/586"""
    process = host.spawn_run("proc-signals", *COUNTING, options=(*USERS[user], "--grace", "30"))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    for name in ("USR1", "USR2", "WINCH", "INT", "QUIT", "HUP", "USR1", "INT"):
        process.send_signal(signal.Signals[f"SIG{name}"])
        assert process.stdout.readline().split()[0] == f"SIG{name}"
    process.send_signal(signal.SIGTERM)
    said = process.stdout.read().split("\n")

    # Anything delivered twice would have told a higher number, or stood before its next.
    assert said == ["SIGTERM 1", ""]
    assert process.wait(60) == 5


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"])
def test_a_trap_of_the_commands_runs_and_its_status_counts(host: Host, name: str) -> None:
    """PROC-06, https://github.com/util-linux/util-linux/issues/1086"""
    file = host.directory / "trapped"
    script = f"trap 'echo x >>{file}; exit 5' {name}; echo ready; while :; do sleep 0.05; done"
    process = host.spawn_run("proc-trap", "sh", "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    process.send_signal(signal.Signals[f"SIG{name}"])

    assert process.wait(60) == 5
    assert file.read_text() == "x\n"


@pytest.mark.parametrize("user", USERS)
def test_a_command_that_ignores_term_is_killed_after_the_grace_time(host: Host, user: str) -> None:
    """PROC-06, https://github.com/containers/bubblewrap/pull/402"""
    script = "trap '' TERM INT HUP; (trap '' TERM; sleep 600) & echo ready; while :; do sleep 0.05; done"
    process = host.spawn_run("proc-deaf", "sh", "-c", script, options=(*USERS[user], "--grace", "1"))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    # Neither of these asks for the end at once.
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 137
    assert time.monotonic() - began > 0.9


def test_a_signal_during_the_start_leaves_nothing_and_runs_nothing_after_it(host: Host) -> None:
    """PROC-06, https://github.com/containers/bubblewrap/pull/586"""
    host.broker(8080)
    # Most of them about when the command is let go.
    for at, wanted in enumerate(["allocated", "built", "proved", *["started"] * 9]):
        process = host.spawn(*SEALNET, "run", "--run-id", f"proc-early-{at}", *SEALED, "--", "sleep", "600")
        wait_for(lambda run_id=f"proc-early-{at}": host.record(run_id), what="it is claimed")
        deadline = time.monotonic() + 5
        while (
            (recorded := host.record(f"proc-early-{at}")) and recorded["state"] not in (wanted, "running") and time.monotonic() < deadline
        ):
            pass

        process.send_signal((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)[at % 3])

        said = process.communicate(timeout=90)[1]
        assert process.returncode in (143, 130, 129), f"state {wanted}: {said}"
        assert host.record(f"proc-early-{at}") is None


def test_a_timeout_ends_the_command_with_124(host: Host) -> None:
    """`--timeout`: TERM, after the grace time KILL, status 124."""
    file = host.directory / "trapped"
    polite = f"trap 'echo x >>{file}; exit 5' TERM; while :; do sleep 0.05; done"
    deaf = "trap '' TERM; while :; do sleep 0.05; done"

    began = time.monotonic()
    polite_done = host.sealnet("run", "--timeout", "0.5", "--grace", "30", "--", "sh", "-c", polite)
    polite_s = time.monotonic() - began
    deaf_done = host.sealnet("run", "--timeout", "0.3", "--grace", "0.3", "--", "sh", "-c", deaf)
    in_time = host.sealnet("run", "--timeout", "30", "--", "sh", "-c", "exit 3")

    assert (polite_done.returncode, deaf_done.returncode, in_time.returncode) == (124, 124, 3)
    assert file.read_text() == "x\n"
    assert 0.5 < polite_s < 20


class Terminal:
    """A terminal with a program in its foreground, as a person has it."""

    def __init__(self, host: Host, *argv: str) -> None:
        self.master, slave = pty.openpty()
        self.text = ""
        self.resize(24, 80)
        self.process = host.spawn(
            *argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "PS1": "prompt> ", "TERM": "dumb", "HISTFILE": ""},
        )
        os.close(slave)
        os.set_blocking(self.master, False)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read(self) -> str:
        """All that was ever shown."""
        with contextlib.suppress(BlockingIOError, OSError):
            while data := os.read(self.master, 65536):
                self.text += data.decode(errors="replace").replace("\r", "")
        return self.text

    def expect(self, pattern: str, *, timeout_s: float = 15) -> str:
        """Wait until it shows the pattern; what stood before is not looked at again."""
        try:
            found = wait_for(lambda: re.search(pattern, self.read(), re.M), timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"not in {timeout_s:g} s: {pattern!r} on the terminal: {self.text!r}") from error
        self.text = self.text[found.end() :]
        return found.group()

    def wait(self) -> int:
        def ended() -> bool:
            self.read()
            return self.process.poll() is not None

        wait_for(ended, timeout_s=20, what=f"the program has ended: {self.text!r}")
        self.read()
        return self.process.returncode

    def close(self) -> None:
        if self.master >= 0:
            os.close(self.master)
            self.master = -1


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def shell(host: Host, terminals: list[Terminal]) -> Terminal:
    """An interactive bash on a terminal of its own, with job control."""
    terminals.append(Terminal(host, "bash", "--norc", "--noprofile", "--noediting", "-i"))
    terminals[-1].expect("^prompt> ")
    return terminals[-1]


def sealed(*command: str, options: tuple[str, ...] = ()) -> tuple[str, ...]:
    return (*SEALNET, "run", *options, "--", *command)


@pytest.mark.parametrize("user", USERS)
def test_a_new_window_size_is_seen_and_nothing_can_be_typed_into_the_callers_terminal(
    host: Host, terminals: list[Terminal], user: str
) -> None:
    """PROC-08, https://github.com/containers/bubblewrap/issues/573"""
    script = "trap 'stty size; n=$((n + 1))' WINCH; stty size; while :; do read -t 0.1 line && break; done; echo winch $n"
    terminal = Terminal(host, *sealed("bash", "-c", script, options=USERS[user]))
    terminals.append(terminal)
    terminal.expect("^24 80$")

    terminal.resize(40, 120)
    terminal.expect("^40 120$")
    terminal.type("end\n")

    terminal.expect("^winch 1$")
    assert terminal.wait() == 0

    # TIOCSTI: to the caller's shell it would be typed by the person.
    push = "import fcntl; print('pushed', fcntl.ioctl(0, 0x5412, b'X'))"
    refused, control = (
        Terminal(host, *sealed("/usr/bin/python3", "-c", push, options=USERS[user])),
        Terminal(host, "/usr/bin/python3", "-c", push),
    )
    terminals += [refused, control]
    assert (refused.wait(), control.wait()) == (1, 0)
    assert "[Errno 1] Operation not permitted" in refused.text
    assert "pushed" in control.text


@pytest.mark.parametrize("user", USERS)
def test_a_key_that_sends_a_signal_sends_it_once(host: Host, terminals: list[Terminal], user: str) -> None:
    """PROC-06, https://github.com/containers/bubblewrap/pull/586"""
    terminal = Terminal(host, *sealed(*COUNTING, options=USERS[user]))
    terminals.append(terminal)
    terminal.expect("^ready$")

    for round_ in (1, 2):
        terminal.type("\x03")
        terminal.expect(rf"SIGINT {round_}$")
        terminal.type("\x1c")
        terminal.expect(rf"SIGQUIT {round_}$")
    terminal.process.send_signal(signal.SIGTERM)

    assert terminal.wait() == 5
    assert re.findall(r"SIG\w+ \d+", terminal.text) == ["SIGTERM 1"]


@pytest.mark.parametrize("user", USERS)
def test_after_an_interrupt_the_broker_still_serves_the_child_that_goes_on(host: Host, terminals: list[Terminal], user: str) -> None:
    """PROC-09, https://github.com/RisorseArtificiali/lince/pull/275"""
    host.broker(8080)
    script = "trap 'curl -fsS http://broker.sealnet:8080/after-int; echo; exit 3' INT; echo ready; while :; do sleep 0.05; done"
    terminal = Terminal(host, *sealed("bash", "-c", script, options=(*USERS[user], *SEALED)))
    terminals.append(terminal)
    terminal.expect("^ready$")

    terminal.type("\x03")

    terminal.expect("/after-int$")
    assert terminal.wait() == 3


@pytest.mark.parametrize("below", ["terminal", "shell"])
@pytest.mark.parametrize("deaf", [False, True], ids=["plain", "ignores HUP"])
def test_a_terminal_that_closes_ends_the_run(host: Host, terminals: list[Terminal], below: str, deaf: bool) -> None:
    """PROC-09, https://github.com/containers/bubblewrap/issues/726"""
    trap = "trap '' HUP TERM; " if deaf else ""
    script = f"{trap}setsid sleep 4322.{os.getpid()} & echo re''ady; while :; do sleep 0.05; done"
    if below == "shell":
        terminal = shell(host, terminals)
        terminal.type(" ".join((*SEALNET, "run", "--run-id", "proc-pane", "--", "bash", "-c", f'"{script}"\n')))
    else:
        terminal = Terminal(host, *sealed("bash", "-c", script, options=("--run-id", "proc-pane")))
        terminals.append(terminal)
    terminal.expect("^ready$")
    host.wait_running("proc-pane")
    inode = inode_of(host, "proc-pane")
    assert inside(inode)

    terminal.close()

    wait_for(lambda: not inside(inode) and host.record("proc-pane") is None, timeout_s=5, what="everything is gone")
    assert commands_with(f"4322.{os.getpid()}") == []
    assert terminal.process.wait(60) != 0


@pytest.mark.parametrize("user", USERS)
def test_a_run_is_a_job_like_any_other(host: Host, terminals: list[Terminal], user: str) -> None:
    """^Z and fg in an interactive shell: https://github.com/containers/bubblewrap/issues/369"""
    echo = "trap 'echo got int' INT; echo ready; while read line; do echo \"said $line\"; done"
    (host.directory / "payload").write_text(echo)
    terminal = shell(host, terminals)

    terminal.type(" ".join(sealed("bash", "-c", '"$(cat payload)"', options=USERS[user])) + "\n")
    terminal.expect("^ready$")
    for round_ in range(2):
        terminal.type("\x1a")
        terminal.expect("Stopped")
        terminal.expect("^prompt> ")
        terminal.type(f"echo shell{round_} is here\n")
        terminal.expect(rf"^shell{round_} is here$")
        terminal.expect("^prompt> ")
        terminal.type("fg\n")
        terminal.expect("sealnet run")
        terminal.type(f"round{round_}\n")
        terminal.expect(rf"^said round{round_}$")
    terminal.type("\x03")
    terminal.expect("got int")
    terminal.type("\x04")
    terminal.expect("^prompt> ")
    terminal.type("echo status $?\n")

    terminal.expect(r"^status 0$")
    assert terminal.read().count("got int") == 0
    terminal.type("exit 0\n")
    assert terminal.wait() == 0


def test_a_run_in_the_background_reads_what_is_typed_only_after_fg(host: Host, terminals: list[Terminal]) -> None:
    """`sealnet run ... &`, then fg: https://github.com/containers/bubblewrap/issues/369"""
    terminal = shell(host, terminals)

    terminal.type(" ".join(sealed("bash", "-c", '"read line; echo said \\$line"', options=("--run-id", "proc-back"))) + " &\n")
    terminal.expect("^prompt> ")
    host.wait_running("proc-back")
    for round_ in range(3):
        terminal.type(f"echo shell$(({round_} + 10))\n")
        terminal.expect(f"^shell{round_ + 10}$")
        # What is typed before it is there stands before it, and the answer on its line.
        terminal.expect("^prompt> ")
    terminal.type("fg\n")
    terminal.expect("sealnet run.*\n")
    terminal.type("words\n")

    terminal.expect("^said words$")
    terminal.type("exit 0\n")
    assert terminal.wait() == 0


@pytest.mark.parametrize("user", USERS)
def test_an_interactive_shell_in_a_run_has_job_control(host: Host, terminals: list[Terminal], user: str) -> None:
    """DOOR-13, https://github.com/openai/codex/issues/39140"""
    terminal = shell(host, terminals)
    terminal.type(
        " ".join(sealed("bash", "--norc", "--noprofile", "--noediting", "-i", options=("--setenv", "PS1='in> '", *USERS[user]))) + "\n"
    )
    terminal.expect("^in> ")

    terminal.type("sleep 600\n")
    terminal.expect("sleep 600\n")
    wait_for(lambda: commands_with("600"), what="it sleeps")
    wait_for(lambda: (terminal.type("\x1a"), time.sleep(0.1), "Stopped" in terminal.read())[-1], what="it is stopped")
    terminal.expect("Stopped")
    terminal.type("jobs; fg\n")
    terminal.expect("Stopped(.|\n)*sleep 600\n")
    wait_for(lambda: (terminal.type("\x03"), time.sleep(0.1), "in> " in terminal.read())[-1], what="it is interrupted")
    terminal.type("echo inner $?\n")
    terminal.expect(r"^inner (130|0)$")
    terminal.type("exit 9\n")
    terminal.expect("^prompt> ")
    terminal.type("echo outer $?\n")

    terminal.expect("^outer 9$")
    terminal.type("exit 0\n")
    assert terminal.wait() == 0


# Forks all the time, each into a session of its own, and some that never stand still.
_STORM = """
    import os, signal, time

    for number in (1, 2, 3, 15):
        signal.signal(number, signal.SIG_IGN)

    def comet():
        os.setsid()
        while True:
            if os.fork():
                os._exit(0)
            time.sleep(0.01)

    for _ in range(10):
        if os.fork() == 0:
            comet()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    born = 0
    while True:
        if os.fork() == 0:
            os.setsid()
            time.sleep(0.7)
            os._exit(0)
        born += 1
        if born == 100:
            print("storm", flush=True)
        time.sleep(1 / 300)
"""


@pytest.mark.parametrize("ending", ["TERM", "reap", "SIGKILL and reap", "SIGKILL"])
def test_a_fork_storm_does_not_outrun_the_end(host: Host, ending: str) -> None:
    """PROC-11, https://github.com/hashicorp/nomad/issues/14371"""
    process = host.spawn_run("proc-storm", "/usr/bin/python3", "-c", textwrap.dedent(_STORM), options=("--grace", "0.2"))
    assert process.stdout is not None
    assert process.stdout.readline() == "storm\n"
    inode = inode_of(host, "proc-storm")
    assert inside(inode)

    if ending == "TERM":
        process.terminate()
        assert process.wait(60) == 137
    elif ending == "reap":
        assert host.sealnet("reap", "proc-storm").returncode == 0
    else:
        process.kill()
        process.wait(60)
        assert ending == "SIGKILL" or host.sealnet("reap", "proc-storm").returncode == 0

    wait_for(lambda: not inside(inode), timeout_s=2, what="all are dead")
    if ending == "SIGKILL":
        assert host.sealnet("reap", "--orphans").returncode == 0


def test_the_recorded_pid_is_the_commands_own(host: Host) -> None:
    """PROC-13, https://github.com/containers/bubblewrap/pull/576"""
    sealer = Sealer()
    command = ["sleep", "600"]

    for _ in range(100):
        with sealer.launch(command) as run:
            pid = run.record.pid
            assert pid is not None
            namespace = os.readlink(f"/proc/{pid}/ns/net")
            numbers = re.search(r"^NSpid:\t(.*)$", Path(f"/proc/{pid}/status").read_text(), re.M)
            listed = next(record.pid for record in sealer.runs() if record.run_id == run.run_id)

            assert namespace == f"net:[{run.record.netns_inode}]"
            assert listed == pid
            # bwrap's init is 1 in there, and never becomes the command.
            assert numbers is not None
            assert numbers[1].split()[-1] != "1"
            wait_for(lambda pid=pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1] == command, what="it is the command")


def test_the_pid_that_inspect_tells_is_the_commands_own(host: Host) -> None:
    """PROC-13, https://github.com/containers/bubblewrap/issues/634"""
    process = host.spawn(*SEALNET, "run", "--run-id", "proc-pid", "--", "sh", "-c", "echo $$ in $(readlink /proc/self/ns/net); sleep 600")
    host.wait_running("proc-pid", process)
    assert process.stdout is not None

    told = host.sealnet("inspect", "proc-pid", "--json")

    pid = re.search(r'"pid": (\d+)', told.stdout)
    assert pid is not None
    status = Path(f"/proc/{pid[1]}/status").read_text()
    # Its own number in there stands last.
    assert process.stdout.readline().split()[0] == re.search(r"^NSpid:.*\t(\d+)$", status, re.M)[1]
    assert host.sealnet("reap", "proc-pid").returncode == 0
