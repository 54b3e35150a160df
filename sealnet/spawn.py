"""Starts bwrap for one run: its file system, its streams, its arguments; held until the payload may start."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import stat
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from sealnet import builder
from sealnet.errors import CannotSeal, NotSealed
from sealnet.kernel import locks, netns, process, seccomp
from sealnet.kernel.host import RESOLVER
from sealnet.kernel.mounts import DEVICES, Stage
from sealnet.kernel.netns import Inside
from sealnet.model import argv, buildargv, environment
from sealnet.model.argv import Fds
from sealnet.model.plan import profile_places
from sealnet.model.view import layout
from sealnet.records import ALIVE
from sealnet.running import Held, Run, Stdio, Streams, no_bwrap

_START_S = 30.0
_HOSTS = "# A sealed run: no resolver answers here.\n"
# A name server at a documentation address (RFC 5737): a lookup is refused at once, and stands in the tally of what was tried.
_RESOLV_CONF = f"# A sealed run has no resolver: what it may reach is in /etc/hosts.\nnameserver {RESOLVER}\noptions timeout:1 attempts:1\n"


def hold(run: Run, streams: Streams, inside: Inside) -> None:
    """Spawn what will become bwrap, as early as there is a namespace to spawn it in: joining a cgroup waits for a grace period of RCU."""
    info, info_write = os.pipe2(os.O_CLOEXEC)
    word, go = _pipe(), _pipe()
    status = run.claim.open_status()
    plan = run.plan
    program = seccomp.render_builder_filter() if plan.build else seccomp.filter_for(plan.user, allow_userns=plan.allow_userns)
    filters = _memory("seccomp", program)
    arguments = os.memfd_create("bwrap-args", os.MFD_CLOEXEC)
    fds = Fds(args=arguments, info=info_write, status=status, block=go, alive=-1, seccomp=filters)
    try:
        run.process, fds, root, dev = inside.call(_spawn, run, fds, word, streams)
    except BaseException as error:
        for fd in (info, word, go, arguments):
            os.close(fd)
        if isinstance(error, OSError):
            raise CannotSeal(f"cannot start bwrap for run {run.run_id}: {os.strerror(error.errno or 0)}") from error
        raise
    finally:
        for fd in (info_write, status, filters):
            os.close(fd)
    run.held = Held(fds, root, dev, info, word, go)
    # Before anybody waits for it: a child that has been waited for has no pidfd any more.
    run.pidfd = os.pidfd_open(run.process.pid)


def start(run: Run) -> None:
    """Tell bwrap what to do and let it start; it is held before it starts the payload."""
    held = run.held
    if held is None or run.inside is None:
        raise RuntimeError("a run is started when it is built")
    variables, durable = _variables(run), run.record.durable
    die_with_parent = durable is None
    if run.plan.build:
        options = buildargv.render_options(held.root, held.dev, held.fds, variables, die_with_parent=die_with_parent)
    else:
        options = argv.render_options(run.plan, held.root, held.dev, _seen(), held.fds, variables, die_with_parent=die_with_parent)
    os.write(held.fds.args, b"\0".join(os.fsencode(option) for option in options) + b"\0")
    os.lseek(held.fds.args, 0, os.SEEK_SET)
    try:
        os.write(held.word, argv.GO)
        run.init_pid = _child_pid(held.info)
    except (TimeoutError, ValueError) as e:
        raise no_bwrap(run, "bwrap ended before it was ready") from e
    if durable is not None:
        starts = {"bwrap_start": process.start_time(run.spawned.pid), "init_start": process.start_time(run.init_pid)}
        durable = {**durable, "bwrap_pid": run.spawned.pid, **starts}
    run.claim.update(state="started", init_pid=run.init_pid, durable=durable)
    if run.seal_stands and netns.inode_of(run.init_pid) not in (run.inside.inode, None):
        raise NotSealed(f"cannot seal run {run.run_id}: bwrap is not in the run's namespace")


def _variables(run: Run) -> dict[str, str]:
    plan = run.plan
    variables = plan.environment if run.path is None else {**plan.environment, "PATH": run.path}
    if run.seal.proxy_port is not None and run.seal.gateway is not None:
        gateway = str(run.seal.gateway)
        exempt = [gateway, "broker.sealnet"] if run.seal.lease_port is not None else []
        variables = environment.proxied(variables, host=gateway, port=run.seal.proxy_port, exempt=exempt)
    return environment.sealed(variables, run_id=plan.run_id, broker_url=run.seal.broker_url, broker_env=plan.broker_env)


def _pipe() -> int:
    """A pipe in one descriptor, for both ways: whoever has it and reads waits for what is written, and never sees an end.

    To bwrap an end is as good as a word: a sealnet that is killed would start the payload that it holds.
    """
    ends = os.pipe2(os.O_CLOEXEC)
    try:
        return os.open(f"/proc/self/fd/{ends[0]}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        for fd in ends:
            os.close(fd)


def _memory(name: str, data: bytes) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _child_pid(fd: int) -> int:
    """The pid of bwrap's init, from --info-fd."""
    deadline, text = time.monotonic() + _START_S, b""
    # Not select(2): a process with a thousand runs has descriptors that it cannot name.
    told = select.poll()
    told.register(fd, select.POLLIN)
    while True:
        if not told.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            raise TimeoutError("bwrap told nothing")
        chunk = os.read(fd, 4096)
        text += chunk
        with contextlib.suppress(ValueError):
            return int(json.loads(text)["child-pid"])
        if not chunk:
            raise ValueError("bwrap told nothing")


def _spawn(run: Run, fds: Fds, word: int, streams: Streams) -> tuple[subprocess.Popen[bytes], Fds, str, str]:
    """In the thread that lives in the run's namespace: what it spawns is born there, and in the mount namespace of the view."""
    stage = Stage(str(run.claim.state.stage))
    stage.build(layout(run.plan), _files(run), profile_places(run.plan.bwrap_args), run.rights, run.hidden)
    dev = stage.devices(streams.console)
    if run.plan.build:
        return *builder.spawn(run, fds, word, streams, _variables(run)), stage.root, dev
    # A payload that runs as root can take apart bwrap's init, which is of its own kind. What that holds must lead to nothing: it runs from
    # the read-only view, and its lock is on a read-only mount.
    paths = run.tools
    tools = argv.Tools(
        sh=stage.root + paths["sh"],
        bwrap=stage.root + paths["bwrap"],
        setsid=paths["setsid"],
        setpriv=paths["setpriv"],
        env=paths["env"],
    )
    _enter(run, stage)
    alive = locks.hold(Path(stage.read_only(str(run.claim.directory))) / ALIVE)
    opened = [alive]
    fds = replace(fds, alive=alive)
    # Not inherited, so that it comes to its end when we do.
    word_path = f"/proc/{os.getpid()}/fd/{word}"
    command = argv.render_command(
        run.plan, str(run.record.cgroup), word_path, fds, _variables(run), tools, controlling_terminal=streams.controlling_terminal
    )
    try:
        stdin, stdout, stderr = (
            _fresh(stream, fd, dev, opened) for fd, stream in enumerate((streams.stdin, streams.stdout, streams.stderr))
        )
        spawned = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(fds.args, fds.info, fds.status, fds.block, fds.alive, fds.seccomp),
            cwd="/",
            env={"PATH": ":".join(process.TOOL_PATH)},
            start_new_session=True,
            umask=-1 if run.ways.umask is None else run.ways.umask,
        )
    finally:
        for fd in opened:
            os.close(fd)
    return spawned, fds, stage.root, dev


def _fresh(stream: Stdio, inherited: int, dev: str, opened: list[int]) -> Stdio:
    """`stream`, or where that is one of the host's devices (/dev/null, mostly) the run's own: fchmod(2) by root's payload would be felt."""
    if stream == subprocess.DEVNULL:
        name = "null"
    elif stream == subprocess.PIPE:
        return stream
    else:
        fd = inherited if stream is None else stream if isinstance(stream, int) else stream.fileno()
        try:
            found = os.fstat(fd)
        except OSError:
            return stream
        number = (os.major(found.st_rdev), os.minor(found.st_rdev))
        known = [name for name, device in DEVICES.items() if device == number and name != "tty"]
        if not stat.S_ISCHR(found.st_mode) or not known:
            return stream
        name = known[0]
    opened.append(os.open(f"{dev}/{name}", os.O_RDWR | os.O_CLOEXEC))
    return opened[-1]


def _enter(run: Run, stage: Stage) -> None:
    """Refuse a working directory that the payload's user may not enter, and leave such directories out of its PATH.

    env(1) would find out, too late: its status cannot be told from the payload's own.
    """
    plan = run.plan
    directory = plan.chdir or plan.cwd
    listed = plan.environment.get("PATH", "").split(":")
    # What bwrap mounts is not there yet.
    known = [
        path for path in (directory, *listed) if path.startswith("/") and not path.startswith(("/dev", "/proc")) and not plan.bwrap_args
    ]
    closed = stage.closed_to(plan.user, known)
    if directory in known and not stage.has(directory):
        raise CannotSeal(f"cannot enter {directory}: it is no directory of the sandbox", hint="name another with --chdir")
    if directory in closed:
        raise CannotSeal(
            f"cannot enter {directory} as {plan.user.name}: {os.strerror(errno.EACCES)}",
            hint="name another with --chdir, or another --user",
        )
    # An empty PATH would mean the working directory.
    run.path = ":".join(path for path in listed if path and path not in closed) or environment.DEFAULT_PATH


def _files(run: Run) -> dict[str, str]:
    """What stands in the view in place of the host's."""
    if not run.seal_stands:
        return {}
    broker = f"{run.seal.gateway} broker.sealnet\n" if run.seal.lease_port is not None else ""
    return {"/etc/hosts": _HOSTS + _text("/etc/hosts") + broker, "/etc/resolv.conf": _RESOLV_CONF}


def _seen() -> argv.Seen:
    masked = (*argv.READ_ONLY, *argv.MASKED_FILES, *argv.MASKED_DIRECTORIES)
    return argv.Seen(
        proc=frozenset(name for name in masked if os.path.exists(f"/proc/{name}")),
        sysfs=frozenset(path for path in argv.MASKED_SYS if os.path.isdir(path)),
    )


def _text(path: str) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = Path(path).read_text(encoding="utf-8")
        return text if text.endswith("\n") or not text else text + "\n"
    return ""
