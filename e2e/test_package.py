"""The Debian package in the oldest and the newest Debian it is for: scripts/packaging/trial, with the package's own dependencies alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.root, pytest.mark.tool("mmdebstrap"), pytest.mark.timeout(900)]

# A machine of its own as far as namespaces go, with that tree as its root.
_ENTER = """
set -e
cd -- "$1"
mount --bind . . && cd -- "$1"
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mkdir -p trial && mount --bind "$2" trial
mkdir -p old && pivot_root . old && umount -l /old && rmdir /old
ip link set lo up
shift 2
exec /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 "$@"
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package, one of a higher version, and the trial."""
    directory = tmp_path_factory.mktemp("packages")
    for name, argv in (("old.deb", ["--check"]), ("new.deb", ["--suffix", "+1"])):
        built = subprocess.run([ROOT / "scripts/deb", *argv], stdout=subprocess.PIPE, text=True, check=True)
        (directory / name).write_bytes(Path(built.stdout.splitlines()[-1]).read_bytes())
    (directory / "trial").write_bytes((ROOT / "scripts/packaging/trial").read_bytes())
    return directory


def dependencies(package: Path) -> list[str]:
    """The first of each alternative."""
    told = subprocess.run(["dpkg-deb", "--field", package, "Depends"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return sorted({re.match(r"[a-z0-9.+-]+", one.strip())[0] for one in told.split(",")})  # type: ignore[index]


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_it_is_installed_used_upgraded_removed_and_purged(suite: str, packages: Path, tmp_path: Path) -> None:
    include = ",".join(dependencies(packages / "old.deb"))
    tree = tmp_path / suite
    subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={include}", suite, tree], check=True)

    namespaces = ["unshare", "--mount", "--propagation=private", "--net", "--pid", "--fork", "--cgroup", "--uts", "--ipc", "--kill-child"]
    trial = ["bash", "/trial/trial", "/trial/old.deb", "/trial/new.deb"]
    said = subprocess.run([*namespaces, "sh", "-c", _ENTER, "sh", tree, packages, *trial], stdout=subprocess.PIPE, text=True, check=False)

    assert said.returncode == 0, said.stdout
    assert said.stdout.splitlines()[-1] == "trial: ok"
