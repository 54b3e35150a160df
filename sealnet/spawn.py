"""Starts bwrap for one run: its file system, its streams, its arguments; the payload is held until it may start."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

from sealnet import builder
from sealnet.errors import CannotSeal, NotSealed
from sealnet.kernel import cgroup, libc, locks, netns, process, seccomp
from sealnet.kernel.host import RESOLVER
from sealnet.kernel.mounts import DEVICES, Stage
from sealnet.kernel.netns import Inside
from sealnet.kernel.ownthread import Pending
from sealnet.kernel.starter import Starter
from sealnet.model import argv, buildargv, environment
from sealnet.model.argv import Fds, Tools
from sealnet.model.plan import profile_places
from sealnet.model.policy import Confinement
from sealnet.model.view import layout, replaces_programs
from sealnet.records import ALIVE
from sealnet.running import Held, Laid, Run, Spawned, Stdio, Streams, no_bwrap

_HOSTS = "# A sealed run: no resolver answers here.\n"
# A name server at a documentation address (RFC 5737): a lookup is refused at once, and stands in the tally of what was tried.
_RESOLV_CONF = f"# A sealed run has no resolver: what it may reach is in /etc/hosts.\nnameserver {RESOLVER}\noptions timeout:1 attempts:1\n"


def prepare(run: Run) -> None:
    """Begin with the payload's file system, beside what is reserved and made for the run: the thread moves to a mount namespace of its
    own.
    """
    run.starter = Starter(run.seal.netns)
    run.staging = run.starter.begin(Stage, str(run.claim.state.stage))


def lay_out(run: Run, streams: Streams, inside: Inside) -> None:
    """Have it put together in the run's namespace, where nothing lives yet."""
    if run.starter is None or run.staging is None:
        raise RuntimeError("a run's file system is prepared first")
    run.laying = run.starter.begin(_lay_out, run, run.staging, streams, os.dup(inside.fd))


def hold(run: Run, streams: Streams) -> None:
    """Have bwrap spawned, as early as there is a namespace to spawn it in: to move it to the run's cgroup waits for a grace period of RCU,
    and its view and mounts take their time. While the seal is being built it goes on until its child is about to be setpriv(1), and that
    is held: it is root's still. Once it is its user's, any process of that user could write into it (/proc/PID/mem), so that comes after
    the proof. `Run.settle` waits for bwrap itself.

    What has run by then, bwrap and setsid(1), is the host's own, out of a view that only root can have put other programs into. Where root
    has, they wait as well.
    """
    if run.starter is None or run.laying is None:
        raise RuntimeError("a run's file system is laid out first")
    plan = run.plan
    program = seccomp.render_builder_filter() if plan.build else seccomp.filter_for(plan.user, allow_userns=plan.allow_userns)
    # The thread closes these, once bwrap has them.
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        info, info_write = os.pipe2(os.O_CLOEXEC)
        theirs.callback(os.close, info_write)
        ours.callback(os.close, info)
        go = _pipe()
        ours.callback(os.close, go)
        status = run.claim.open_status()
        theirs.callback(os.close, status)
        filters = _memory("seccomp", program)
        theirs.callback(os.close, filters)
        arguments = os.memfd_create("bwrap-args", os.MFD_CLOEXEC)
        theirs.callback(os.close, arguments)
        run.held = Held(info, go)
        # From here on the run closes these.
        ours.pop_all()
        fds = Fds(args=arguments, info=info_write, status=status, block=go, alive=-1, seccomp=filters)
        run.spawning = Pending()
        run.starter.do(run.spawning, _spawn_with, theirs.pop_all(), run, run.laying, fds, streams)
    if run.mover is not None:
        # What is not there yet is in the run's namespace, and found by that. An open run has none, so a shell joins first.
        run.joining = run.mover.begin(_join, run.spawning, Path(str(run.record.cgroup)))
    run.starter.follow(info)
    if not replaces_programs(plan):
        run.begin()


def start(run: Run) -> None:
    """Wait for bwrap, and write down that it is there; it is held before it starts the payload, or that is."""
    if run.starter is None or run.inside is None:
        raise RuntimeError("a run is started when it is built")
    durable = run.record.durable
    try:
        run.init_pid = run.starter.init_pid()
    except (TimeoutError, ValueError) as e:
        raise no_bwrap(run, "bwrap ended before it was ready") from e
    if durable is not None:
        starts = {"bwrap_start": process.start_time(run.spawned.pid), "init_start": process.start_time(run.init_pid)}
        durable = {**durable, "bwrap_pid": run.spawned.pid, **starts}
    run.claim.update(state="started", init_pid=run.init_pid, durable=durable)
    if run.seal_stands and netns.inode_of(run.init_pid) not in (run.inside.inode, None):
        raise NotSealed(f"cannot seal run {run.run_id}: bwrap is not in the run's namespace")


def _join(spawning: Pending[Spawned], group: Path) -> None:
    """Move bwrap to the run's cgroup, once it is there. Its pid is nobody else's: it has not been waited for."""
    try:
        bwrap = spawning.wait()
    except Exception:  # noqa: BLE001 - it is told to whoever waits for bwrap
        return
    cgroup.join(group, bwrap.process.pid)


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


def _lay_out(run: Run, staging: Pending[Stage], streams: Streams, netns_fd: int) -> Laid:
    """In a thread that lives in the mount namespace of the view, and from here on in the run's network namespace: what it spawns is born in
    both.
    """
    try:
        # Before the view is made: a sysfs shows the links of the namespace that it was mounted in.
        libc.setns(netns_fd, libc.CLONE_NEWNET)
    finally:
        os.close(netns_fd)
    plan, stage = run.plan, staging.wait()
    stage.build(layout(plan), _files(run), profile_places(plan.bwrap_args), run.rights, run.hidden)
    dev = stage.devices(streams.console)
    tools = None if plan.build else _tools(run, stage)
    if tools is not None:
        _enter(run, stage)
    # What bwrap holds must lead to nothing, for a payload of root's can take it apart; a builder is not that.
    return Laid(stage, dev, tools, str(run.claim.directory) if tools is None else stage.read_only(str(run.claim.directory)))


def _spawn_with(theirs: contextlib.ExitStack, run: Run, laying: Pending[Laid], fds: Fds, streams: Streams) -> Spawned:
    with theirs:
        process = _spawn(run, laying.wait(), fds, streams)
        try:
            # Before anybody waits for it: a child that has been waited for has no pidfd any more.
            return Spawned(process, os.pidfd_open(process.pid))
        except OSError:
            process.kill()
            process.wait()
            raise


def _spawn(run: Run, laid: Laid, fds: Fds, streams: Streams) -> subprocess.Popen[bytes]:
    plan, root, die_with_parent = run.plan, laid.stage.root, run.record.durable is None
    variables = _variables(run)
    alive = locks.hold(Path(laid.records) / ALIVE)
    opened = [alive]
    fds = replace(fds, alive=alive)
    try:
        if laid.tools is None:
            _tell(fds.args, buildargv.render_options(root, laid.dev, fds, variables, die_with_parent=die_with_parent))
            return builder.spawn(run, fds, streams, variables)
        _tell(fds.args, argv.render_options(plan, root, laid.dev, _seen(), fds, variables, die_with_parent=die_with_parent))
        group = str(run.record.cgroup) if plan.confinement is Confinement.OPEN else None
        stdin, stdout, stderr = (
            _fresh(stream, fd, laid.dev, opened) for fd, stream in enumerate((streams.stdin, streams.stdout, streams.stderr))
        )
        return subprocess.Popen(
            argv.render_command(plan, group, fds, variables, laid.tools, controlling_terminal=streams.controlling_terminal),
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


def _tools(run: Run, stage: Stage) -> Tools:
    """A payload that runs as root can take apart bwrap's init, which is of its own kind. What that holds must lead to nothing: it runs from
    the read-only view, or where somebody's own programs stand in that, from a read-only mount of the host's.
    """
    own, paths = replaces_programs(run.plan), run.tools
    sh, bwrap = (_read_only(stage, paths[name]) if own else stage.root + paths[name] for name in ("sh", "bwrap"))
    return Tools(sh=sh, bwrap=bwrap, setsid=paths["setsid"], setpriv=paths["setpriv"], env=paths["env"])


def _read_only(stage: Stage, path: str) -> str:
    """Where one of the host's programs is, by a read-only mount of its directory."""
    directory, name = os.path.split(os.path.realpath(path))
    return f"{stage.read_only(directory)}/{name}"


def _tell(fd: int, options: list[str]) -> None:
    """Write bwrap's options where its --args reads them."""
    os.write(fd, b"\0".join(os.fsencode(option) for option in options) + b"\0")
    os.lseek(fd, 0, os.SEEK_SET)


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
