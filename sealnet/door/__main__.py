"""A door: `python -I -m sealnet.door UID GID FD [MEETING]`, started as root, with its control socket as descriptor FD.

It gives up everything before it reads a byte that anybody sent. All that it runs is imported by then: its user need not be able to read it.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading

from sealnet.door import control
from sealnet.kernel import identity, seccomp
from sealnet.model.plan import User

# Of one log: beyond it every request is refused, and the payload has not filled the host's /run.
MAX_LOG_BYTES = 64 * 1024 * 1024
_MAX_FDS = 65536
# Of private memory, a tenth of which a busy one may have: one that was taken over does not take all of the host's.
_MAX_DATA = 1 << 30
# Of each of the resolver's threads; else it is what the caller's limit for stacks happens to be, which may be large.
_STACK_BYTES = 2 << 20
# Names are looked up as they are written, without the host's search list, and a resolver that is down is given up in time.
_ENVIRONMENT = {"LOCALDOMAIN": "", "RES_OPTIONS": "timeout:2 attempts:2"}


def main() -> None:
    words = sys.argv[1:]
    if len(words) not in (3, 4) or not all(word.isdecimal() for word in words) or not all(0 < int(word) < 2**32 - 1 for word in words[:2]):
        sys.exit("usage: sealnet.door UID GID FD [MEETING]")
    uid, gid, *given = map(int, words)
    os.chdir("/")
    os.umask(0o077)
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    first = 3
    for fd in (*sorted(given), os.sysconf("SC_OPEN_MAX")):
        os.closerange(first, fd)
        first = fd + 1
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fds = _MAX_FDS if hard == resource.RLIM_INFINITY else min(hard, _MAX_FDS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fds, fds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MAX_DATA, _MAX_DATA))
    threading.stack_size(_STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_LOG_BYTES, MAX_LOG_BYTES))
    user = User(name="door", uid=uid, gid=gid, groups=(), home="/", shell="/bin/false")  # noqa: S604 - it never has a shell
    # Whoever holds the other end of the control socket keeps it alive, not the thread that started it.
    identity.assume(user, seccomp.render_door_filter(), outlives_starter=True)
    # What is imported is no garbage.
    gc.freeze()
    gc.set_threshold(50_000)
    control.serve(given[0], given[1] if given[1:] else None)


if __name__ == "__main__":
    main()
