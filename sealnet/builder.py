"""Starts the builder of a sealed build: buildah as root, in the run's namespaces and cgroup, with what no RUN step may have taken away."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sealnet.kernel import cgroup, process
from sealnet.model import buildargv
from sealnet.model.argv import Fds
from sealnet.model.buildargv import Tools
from sealnet.running import Run, Streams

TOOLS = ("sh", "bwrap", "setsid", "setpriv", "buildah", "runc", "mount")
# Of cgroups: one for each container, and what an init system in one may make.
_DEPTH, _DESCENDANTS = 8, 256


def spawn(run: Run, fds: Fds, streams: Streams, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    """In the thread that lives in the run's namespace, and in the mount namespace of its view. `fds.alive` is open."""
    cgroup.bound(Path(str(run.record.cgroup)), depth=_DEPTH, descendants=_DESCENDANTS)
    tools = Tools(**{name: run.tools[name] for name in TOOLS if name != "mount"})
    command = buildargv.render_command(run.plan.build, fds, variables, tools, controlling_terminal=streams.controlling_terminal)
    return subprocess.Popen(
        command,
        stdin=streams.stdin,
        stdout=streams.stdout,
        stderr=streams.stderr,
        pass_fds=(fds.args, fds.info, fds.status, fds.block, fds.alive, fds.seccomp),
        cwd="/",
        env={"PATH": ":".join(process.TOOL_PATH)},
        start_new_session=True,
    )
