"""Runs a part of sealnet as a program of its own: `python -IS part.py PATH... -- MODULE WORD...`. See `sealnet.kernel.owncode.program`."""

import importlib
import sys


def main() -> None:
    """Import MODULE by the PATHs, and run its main(), or that of its __main__."""
    at = sys.argv.index("--")
    sys.path += sys.argv[1:at]
    module = sys.argv[at + 1]
    sys.argv[:] = sys.argv[at + 1 :]
    found = importlib.import_module(module)
    (found if hasattr(found, "main") else importlib.import_module(f"{module}.__main__")).main()


if __name__ == "__main__":
    main()
