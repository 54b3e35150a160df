"""What scripts/sealnet starts, with -IS: only this checkout, its virtual environment and the distribution's modules are imported.

No .pth file is read: whatever lies in a site-packages directory would run as root at every start, and take its time.
"""

import os
import sys

_venv, _version = os.path.dirname(os.path.dirname(sys.executable)), f"python{sys.version_info.major}.{sys.version_info.minor}"
sys.path += [os.path.dirname(os.path.dirname(__file__)), f"{_venv}/lib/{_version}/site-packages", "/usr/lib/python3/dist-packages"]

from sealnet.__main__ import main  # noqa: E402 - only now can it be found

main()
