"""The program: `sealnet`, or `python -m sealnet`."""

from __future__ import annotations

import contextlib
import gc
import os
import sys


def main() -> None:
    """The command line, started and ended as fast as Python can: `sealnet run -- true` is start-up for the most part."""
    # Nothing of what is imported is garbage, and looking for some costs 5 ms. A long run is still looked through, now and then.
    gc.set_threshold(50_000)
    from sealnet.cli import main as command_line

    _open_streams()
    try:
        command_line()
    except SystemExit as ended:
        # The interpreter would take 7 ms to take itself apart.
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        try:
            sys.stdout.flush()
        except OSError as error:
            # What was asked for is not there. A command's own status stands all the same.
            status = status or (141 if isinstance(error, BrokenPipeError) else 1)
            with contextlib.suppress(OSError, ValueError):
                print(f"sealnet: cannot write the output: {error.strerror}", file=sys.stderr)
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(status)


def _open_streams() -> None:
    """Python has none for a descriptor that the caller has closed, and the next file that is opened would be taken for it."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd, inheritable=True)
                os.close(null)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115 - for as long as the process lives


if __name__ == "__main__":
    main()
