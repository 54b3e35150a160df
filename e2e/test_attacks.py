"""What hostile payloads found, so that it stays shut. Each attack has a control that shows what it would reach."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import sealnet
from tests.lab import PATIENCE, SEALNET, Host, end, wait_for

pytestmark = pytest.mark.root


def program(text: str) -> tuple[str, ...]:
    return ("/usr/bin/python3", "-c", textwrap.dedent(text))


def test_a_payload_of_roots_cannot_write_the_program_that_holds_it(host: Host) -> None:
    """/proc/1/exe is bwrap: executed from the host's own mount, it could be opened for writing once nobody executed it any more."""
    script = """
        import ctypes, os, errno
        libc = ctypes.CDLL(None, use_errno=True)
        print(os.readlink("/proc/1/exe"))
        # A descriptor of the file itself: by it, the mount is asked whether it may be written.
        held = os.open("/proc/1/exe", os.O_RDONLY)
        print(bool(os.fstatvfs(held).f_flag & os.ST_RDONLY))
        for fd in os.listdir("/proc/1/fd"):
            try:
                where = os.readlink(f"/proc/1/fd/{fd}")
                if where.startswith("/"):
                    writable = os.open(f"/proc/1/fd/{fd}", os.O_WRONLY)
                    print("WRITABLE", where)
            except OSError as error:
                print(errno.errorcode[error.errno], where)
    """

    sealed = host.sealnet("run", "--user", "0", "--", *program(script), stdin=subprocess.DEVNULL)
    plain = host.run(
        "bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid", "--", *program(script), check=False
    )

    lines = sealed.stdout.splitlines()
    assert lines[0].endswith("/bwrap"), sealed.stderr
    assert lines[1] == "True"
    assert not [line for line in lines if line.startswith("WRITABLE") and not line.endswith("/null")]
    assert any(line.startswith("EROFS") and line.endswith("/alive") for line in lines)
    assert plain.stdout.splitlines()[1] == "False"


@contextlib.contextmanager
def swapping(first: Path, second: Path, uid: int) -> Iterator[None]:
    """Another payload's part: exchange two names over and over."""
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setresuid(uid, uid, uid)
        libc = ctypes.CDLL(None)
        while True:
            libc.renameat2(-100, os.fsencode(first), -100, os.fsencode(second), 2)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_path_that_is_swapped_for_a_link_leads_root_nowhere(host: Host, area: Path, tmp_path: Path) -> None:
    """Two payloads share a directory: one exchanges the other's working directory for a link to what only root may enter."""
    secret = area / "closed" / "inner"
    secret.mkdir(parents=True)
    secret.parent.chmod(0o700)
    (secret / "secret").write_text("SECRET")
    shared = area / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "work").mkdir()
    (shared / "link").symlink_to(secret)
    host.settled()
    nobody = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--")
    assert host.run(*nobody, "cat", str(secret / "secret"), check=False).returncode != 0
    assert host.run("cat", str(shared / "link" / "secret")).stdout == "SECRET"

    told = []
    with swapping(shared / "work", shared / "link", 65534):
        deadline = time.monotonic() + 60
        while len(told) < 12 and time.monotonic() < deadline:
            # A caller that stands in the directory; what its name leads to changes under it.
            with contextlib.suppress(OSError):
                os.chdir(shared / "work")
            if os.getcwd() == str(shared / "work"):
                told.append(host.sealnet("run", "--user", "nobody", "--", "sh", "-c", f"cat {shared}/work/secret ./secret; pwd"))
            os.chdir(tmp_path)

    assert told
    assert not [run for run in told if "SECRET" in run.stdout]
    assert {run.returncode for run in told} <= {0, 2, 125}, [run.stderr for run in told if run.returncode not in (0, 2, 125)]
    assert os.listdir(secret) == ["secret"]


def on_a_terminal(argv: list[str]) -> tuple[int, int]:
    """Start a command as the leader of a session on a new terminal; its pid and our end."""
    pid, master = os.forkpty()
    if pid == 0:
        os.execvp(argv[0], argv)
    return pid, master


def read_until(master: int, text: bytes, timeout_s: float = 15.0) -> bytes:
    deadline, seen = time.monotonic() + timeout_s, b""
    while text not in seen:
        ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"no {text!r} in {seen!r}")
        seen += os.read(master, 65536)
    return seen


THIEF = """
    import os, signal, termios, time
    for signum in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGTSTP):
        signal.signal(signum, signal.SIG_IGN)
    told = []
    try:
        fd = os.open("/dev/tty", os.O_RDWR)
        told.append("opened")
        os.tcsetpgrp(fd, os.getpgrp())
        told.append("foreground")
        modes = termios.tcgetattr(fd)
        modes[3] &= ~termios.ECHO
        termios.tcsetattr(fd, termios.TCSANOW, modes)
        told.append("silent")
    except OSError as error:
        told.append(type(error).__name__)
    open("told", "w").write(" ".join(told))
    time.sleep(60)
"""


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "control"])
def test_a_payload_in_the_background_cannot_take_the_callers_terminal(host: Host, sealed: bool) -> None:
    thief = " ".join(f"'{word}'" for word in program(THIEF))
    command = f"{' '.join(SEALNET)} run --run-id thief --" if sealed else ""
    Path("start").write_text(f"set -m\n{command} {thief} </dev/null >/dev/null 2>&1 &\nwait\n")

    pid, master = on_a_terminal(["bash", "start"])
    told = wait_for(lambda: Path("told").exists() and Path("told").read_text(), what="the thief has tried")

    assert told == ("OSError" if sealed else "opened foreground silent")
    if sealed:
        assert host.sealnet("reap", "thief").returncode == 0
    os.kill(pid, signal.SIGKILL)
    os.close(master)
    os.waitpid(pid, 0)
    host.run("pkill", "-KILL", "-f", "time.sleep(60)", check=False)


def test_a_payload_that_stops_its_group_does_not_stop_its_timeout(host: Host) -> None:
    script = "import os, signal, time; os.kill(0, signal.SIGSTOP); time.sleep(60)"
    began = time.monotonic()

    done = host.sealnet("run", "--user", "0", "--timeout", "1", "--grace", "0.5", "--", "/usr/bin/python3", "-c", script)

    assert done.returncode == 124
    assert time.monotonic() - began < 50


def test_the_callers_terminal_is_as_it_was_after_any_end(host: Host) -> None:
    """Raw modes are for the run alone, however it ends."""
    script = f"""
        import os, subprocess, sys, termios
        before = termios.tcgetattr(0)
        for ending in ("exit 3", "kill -9 $$", "kill -9 -1; sleep 9", "stty raw -echo; exit 0"):
            subprocess.run([*{SEALNET!r}, "run", "--", "sh", "-c", ending])
            print("same" if termios.tcgetattr(0) == before else f"CHANGED by {{ending}}", flush=True)
        print("end", flush=True)
    """
    pid, master = on_a_terminal([sys.executable, "-c", textwrap.dedent(script)])

    seen = read_until(master, b"end\r\n", timeout_s=30)

    assert seen.count(b"same") == 4, seen
    os.waitpid(pid, 0)
    os.close(master)


def test_a_socket_in_the_working_directory_does_not_answer(host: Host) -> None:
    """The directory is bound as it is; what listens in it when the run starts is covered, by whatever name it was bound."""
    Path("deep/er").mkdir(parents=True)
    listener = socket.socket(socket.AF_UNIX)
    os.chdir("deep/er")
    listener.bind("relative.sock")
    os.chdir("../..")
    listener.listen(8)
    Path("deep/er/relative.sock").chmod(0o777)
    os.link("deep/er/relative.sock", "hard.sock")
    script = """
        import socket
        for path in ("deep/er/relative.sock", "hard.sock"):
            try:
                socket.socket(socket.AF_UNIX).connect(path)
                print("connected")
            except OSError as error:
                print(type(error).__name__)
    """

    sealed = host.sealnet("run", "--user", "0", "--", *program(script))
    control = host.run(*program(script))

    assert sealed.stdout.split() == ["PermissionError"] * 2
    assert control.stdout.split() == ["connected"] * 2
    listener.close()


@pytest.fixture
def area(host: Host) -> Iterator[Path]:
    """A place that everybody can see, with mounts of the test's own."""
    path = Path(tempfile.mkdtemp(prefix="sealnet-area-", dir="/var/lib"))
    host.run("mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(path))
    yield path
    os.chdir("/")
    host.run("umount", "--recursive", str(path))
    path.rmdir()


def as_nobody(host: Host, *argv: str) -> subprocess.CompletedProcess[str]:
    return host.run("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--", *argv, check=False)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_the_view_shows_no_more_than_the_host(host: Host, area: Path, umask: int) -> None:
    """A mount whose root is closed stays closed in the view, and so does what an access list closes, whatever the caller's umask is."""
    for name in ("mine", "listed"):
        (area / name).mkdir()
    host.run("mount", "-t", "tmpfs", "-o", "mode=0700,uid=1000", "tmpfs", str(area / "mine"))
    (area / "mine" / "notes").write_text("NOTES")
    (area / "open").write_text("open")
    (area / "open").chmod(0o644)
    before = os.umask(umask)
    try:
        sealed = host.sealnet("run", "--user", "nobody", "--chdir", "/", "--", "cat", f"{area}/open", f"{area}/mine/notes")
        given = host.sealnet("run", "--user", "nobody", "--chdir", "/", "--ro-bind", f"{area}/mine:/opt", "--", "cat", "/opt/notes")
    finally:
        os.umask(before)

    assert as_nobody(host, "cat", f"{area}/mine/notes").returncode != 0
    assert (sealed.returncode, sealed.stdout) == (1, "open"), sealed.stderr
    assert "ermission denied" in sealed.stderr
    assert given.returncode == 1
    assert "ermission denied" in given.stderr


def test_what_the_host_has_hidden_by_a_mount_stays_hidden(host: Host, area: Path) -> None:
    """Over a file /dev/null, over a directory a file system that is not shown: beneath them is what nobody was to see."""
    (area / "file").write_text("BENEATH")
    (area / "tree").mkdir()
    (area / "tree" / "file").write_text("BENEATH")
    control = host.sealnet("run", "--user", "0", "--chdir", "/", "--", "cat", f"{area}/file", f"{area}/tree/file")
    host.run("mount", "--bind", "/dev/null", f"{area}/file")
    host.run("mount", "-t", "mqueue", "mqueue", f"{area}/tree")

    sealed = host.sealnet("run", "--user", "0", "--chdir", "/", "--", "sh", "-c", f"cat {area}/file; ls {area}/tree; echo end")
    given = host.sealnet(
        "run", "--user", "0", "--chdir", "/", "--ro-bind", f"{area}:/opt", "--", "sh", "-c", "cat /opt/file; ls /opt/tree; echo end"
    )

    assert control.stdout == "BENEATH" * 2
    assert sealed.stdout == "end\n", sealed.stderr
    assert given.stdout == "end\n", given.stderr


def test_a_mount_below_what_is_bound_read_only_is_shown_read_only(host: Host, area: Path) -> None:
    (area / "inner").mkdir()
    host.run("mount", "-t", "tmpfs", "tmpfs", f"{area}/inner")
    (area / "inner" / "file").write_text("inner")

    done = host.sealnet(
        "run", "--user", "0", "--chdir", "/", "--ro-bind", f"{area}:/opt", "--", "sh", "-c", "cat /opt/inner/file; touch /opt/inner/new"
    )

    assert done.stdout == "inner"
    assert "Read-only file system" in done.stderr
    assert os.listdir(area / "inner") == ["file"]


def test_the_hosts_devices_are_not_the_runs(host: Host) -> None:
    """A payload of root's owns the nodes that it sees; the host's would change with them."""
    before = os.stat("/dev/null").st_mode

    named = host.sealnet("run", "--user", "0", "--", "sh", "-c", "chmod 600 /dev/null && stat -c %a /dev/null")
    with open("/dev/null") as null:
        script = "import os; os.fchmod(0, 0o600); print(oct(os.stat(0).st_mode & 0o777))"
        inherited = host.sealnet("run", "--user", "0", "--", "/usr/bin/python3", "-c", script, stdin=null)

    assert (named.stdout, inherited.stdout) == ("600\n", "0o600\n")
    assert os.stat("/dev/null").st_mode == before


@pytest.mark.parametrize("option", ["--bind", "--ro-bind"])
def test_a_link_that_a_payload_has_planted_leads_nowhere(host: Host, area: Path, option: str) -> None:
    """Run 1 leaves a link; run 2 is given it, as always."""
    (area / "victim").mkdir()
    (area / "work").mkdir()
    os.chdir(area / "work")
    assert host.sealnet("run", "--user", "0", "--", "ln", "-s", f"{area}/victim", "out").returncode == 0

    refused = host.sealnet("run", "--user", "0", option, "out:/out", "--", "sh", "-c", "echo overwritten >/out/file; touch ran")
    named = host.sealnet("run", "--user", "0", option, f"{area}/victim:/out", "--", "ls", "/out")

    assert refused.returncode == 2
    assert "symbolic link" in refused.stderr
    assert not Path("ran").exists()
    assert os.listdir(area / "victim") == []
    assert named.returncode == 0


def test_the_kernels_file_systems_below_the_working_directory_are_covered(host: Host, area: Path) -> None:
    """A chroot's /proc shows every process of the user's, and their memory."""
    chroot = area / "chroot"
    (chroot / "proc").mkdir(parents=True)
    host.run("mount", "-t", "proc", "proc", str(chroot / "proc"))
    os.chdir(chroot)

    below = host.sealnet("run", "--user", "0", "--", "sh", "-c", "ls proc; echo end")
    given = host.sealnet("run", "--user", "0", "--chdir", "/", "--bind", f"{chroot}:/opt", "--", "sh", "-c", "ls /opt/proc; echo end")
    itself = host.sealnet("run", "--user", "0", "--bind", f"{chroot}/proc:/opt", "--", "true")

    assert "self" in os.listdir("proc")
    assert (below.stdout, given.stdout) == ("end\n", "end\n"), below.stderr
    assert itself.returncode == 125
    assert "the kernel's own (proc)" in itself.stderr


def test_a_payload_cannot_suspend_its_supervisor(host: Host) -> None:
    """It makes the key that suspends one that its terminal sends by itself."""
    script = """
        import os, signal, sys, termios, time
        modes = termios.tcgetattr(0)
        modes[6][termios.VSUSP] = b"x"
        termios.tcsetattr(0, termios.TCSANOW, modes)
        print("type", flush=True)
        time.sleep(60)
    """
    argv = [*SEALNET, "run", "--timeout", "3", "--grace", "0.5", "--", *program(script)]
    pid, master = on_a_terminal(["bash", "-c", 'set -m; "$@"; echo status $?', "bash", *argv])
    read_until(master, b"type")

    os.write(master, b"x")

    assert b"status 124" in read_until(master, b"status 124")
    os.close(master)
    os.waitpid(pid, 0)


def test_a_directory_full_of_sockets_does_not_stop_the_next_run(host: Host) -> None:
    script = """
        import socket
        for number in range(3000):
            socket.socket(socket.AF_UNIX).bind(f"{number}.sock")
    """
    assert host.sealnet("run", "--user", "0", "--", *program(script)).returncode == 0

    began = time.monotonic()
    done = host.sealnet("run", "--user", "0", "--", "true")

    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 10 * PATIENCE


def test_the_records_of_the_runs_cannot_be_bound(host: Host) -> None:
    assert host.sealnet("run", "--", "true").returncode == 0
    os.chdir("/run/sealnet")

    inside = host.sealnet("run", "--user", "0", "--", "touch", "ran")
    os.chdir("/")
    paths = ("/run/sealnet/runs:/opt", "/run:/opt", "/:/opt")
    bound = [host.sealnet("run", "--user", "0", "--bind", path, "--", "true") for path in paths]

    assert [run.returncode for run in (inside, *bound)] == [2] * 4
    assert "the records of the runs" in inside.stderr
    assert not Path("/run/sealnet/ran").exists()


def test_a_killed_sealnet_takes_its_payload_with_it(host: Host) -> None:
    process = host.spawn_run("alone", "sleep", "600")
    pid = host.record("alone")["pid"]  # type: ignore[index]
    assert Path(f"/proc/{pid}").exists()

    assert end(process, signal.SIGKILL) == -signal.SIGKILL

    wait_for(lambda: not Path(f"/proc/{pid}").exists(), timeout_s=5, what="the payload is gone")
    assert host.sealnet("reap", "--orphans").stdout == "reaped  alone\n"


def test_a_payload_cannot_write_the_environment_or_the_scripts_of_a_checkout(host: Host) -> None:
    """scripts/start.py runs without site, so Python itself does not tell of a virtual environment (SEALNET_VENV: anywhere)."""
    venv, installed = host.directory / "venv", Path(click.__file__).parents[1]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", venv], check=True)
    packages = venv / "lib" / installed.parent.name / "site-packages"
    packages.rmdir()
    packages.symlink_to(installed)
    scripts = Path(sealnet.__file__).parents[1] / "scripts"

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return host.run(str(venv / "bin/python"), "-IS", str(scripts / "start.py"), "run", *argv, check=False, cwd=host.directory)

    written = run("--report", "--user", "root", "--", "sh", "-c", "touch venv/pyvenv.cfg venv/planted; echo done")
    bound = [run("--bind", str(path), "--chdir", "/", "--", "true") for path in (venv, venv / "bin", host.directory, scripts)]
    (host.directory / "other").mkdir()
    control = run("--bind", str(host.directory / "other"), "--user", "root", "--", "touch", "other/written")

    assert (written.returncode, written.stdout) == (0, "done\n"), written.stderr
    assert "the working directory was read-only in the run: sealnet itself is in it" in written.stderr
    assert not (venv / "planted").exists()
    assert [(one.returncode, "sealnet itself is in it" in one.stderr) for one in bound] == [(2, True)] * 4
    assert control.returncode == 0, control.stderr
    assert (host.directory / "other/written").exists()


def test_a_payload_cannot_write_what_root_runs_next(host: Host) -> None:
    """sealnet's own code, in a checkout that is the working directory, above it, or bound."""
    package = Path(sealnet.__file__).parent
    script = f"echo evil >> {package}/errors.py; echo evil > {package.parent}/planted; mv {package} {package}.old"
    before = (package / "errors.py").read_text()

    for directory in (package.parent, package):
        done = host.sealnet("run", "--report", "--user", "root", "--", "sh", "-c", f"{script}; echo done", cwd=directory)
        assert done.stdout == "done\n", done.stderr
        assert "the working directory was read-only in the run: sealnet itself is in it" in done.stderr
    bound = host.sealnet("run", "--bind", str(package.parent), "--", "true")

    assert (package / "errors.py").read_text() == before
    assert not (package.parent / "planted").exists()
    assert bound.returncode == 2
    assert "sealnet itself is in it" in bound.stderr
    # The control: elsewhere the working directory is the payload's.
    assert host.sealnet("run", "--user", "root", "--", "touch", "written").returncode == 0
    assert Path("written").exists()
