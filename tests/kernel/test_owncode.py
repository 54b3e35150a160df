"""Where sealnet's own code lies, and how a part of it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sealnet
from sealnet.errors import UsageError
from sealnet.kernel import owncode

PACKAGE = Path(os.path.realpath(sealnet.__file__)).parent


@pytest.mark.parametrize("path", [PACKAGE, PACKAGE / "kernel", PACKAGE.parent, PACKAGE.parent / "scripts", Path("/")])
def test_what_root_runs_next_is_its_own_code(path: Path) -> None:
    assert owncode.is_own_code(str(path))
    with pytest.raises(UsageError, match="sealnet itself is in it"):
        owncode.require_not_in([str(PACKAGE.parent / "other"), str(path)])


def test_a_virtual_environment_is_known_by_its_interpreter_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As without site: sys.prefix is the system's then."""
    inside, beside = str(tmp_path / "venv" / "lib"), str(tmp_path / "venvs")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/venv/bin/python")
    assert not owncode.is_own_code(inside)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()

    assert [owncode.is_own_code(path) for path in (inside, str(tmp_path), beside)] == [True, True, False]


def test_each_link_on_the_way_is_its_own_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever can put another in its place decides what runs."""
    for name in ("real/venv/bin", "real/packages", "project", "further", "beside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "real/venv/pyvenv.cfg").touch()
    (tmp_path / "project/.venv").symlink_to("../further/venv")
    (tmp_path / "further/venv").symlink_to(tmp_path / "real/venv")
    (tmp_path / "project/site-packages").symlink_to("../real/packages")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/project/.venv/bin/python")
    monkeypatch.setattr(sys, "path", [*sys.path, f"{tmp_path}/project/site-packages"])

    own = {name: owncode.is_own_code(str(tmp_path / name)) for name in ("real/venv", "real/packages", "project", "further", "beside")}

    assert own == {"real/venv": True, "real/packages": True, "project": True, "further": True, "beside": False}
    (tmp_path / "project/.venv").unlink()
    (tmp_path / "project/.venv").symlink_to(".venv")
    assert owncode.is_own_code(str(tmp_path / "project"))
    monkeypatch.setattr(sys, "executable", None)
    assert owncode.is_own_code(str(PACKAGE))


def test_a_part_imports_what_its_program_does_and_runs_no_pth_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages, planted = tmp_path / "site-packages", tmp_path / "here"
    for directory in (packages, planted):
        directory.mkdir()
    (packages / "one.py").write_text("import json, sys\ndef main(): print(json.dumps([sys.argv, 'PTH' in globals()]))\n")
    (packages / "zz.pth").write_text("import builtins; builtins.PTH = print('pth')\n")
    (planted / "json.py").write_text("print('planted')\n")
    monkeypatch.setattr(sys, "path", [str(planted), "", *sys.path, str(packages)])

    done = subprocess.run([*owncode.program("one"), "a", "--"], capture_output=True, text=True, cwd=planted, check=True)
    control = subprocess.run(
        [sys.executable, "-c", f"import site; site.addsitedir({str(packages)!r}); import json"], capture_output=True, text=True, cwd=planted
    )

    assert (done.stdout, done.stderr) == ('[["one", "a", "--"], false]\n', "")
    assert control.stdout == "pth\nplanted\n"
