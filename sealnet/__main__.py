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

    try:
        command_line()
    except SystemExit as ended:
        # The interpreter would take 7 ms to take itself apart. What a stream cannot write is its own end's to tell.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        raise


if __name__ == "__main__":
    main()
