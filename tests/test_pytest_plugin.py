"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TEST = """
import sys

def test_it_is_cheap():
    loaded = [name for name in sys.modules if name.startswith("sealnet")]
    assert "sealnet.pytest_plugin" in loaded
    assert set(loaded) <= {"sealnet", "sealnet.errors", "sealnet.model", "sealnet.model.version", "sealnet.pytest_plugin"}

def test_sealed(sealed_run):
    done = sealed_run(["sh", "-c", "touch made; echo told; echo said >&2; exit 3"])
    assert (done.returncode, done.stdout, done.stderr) == (3, "told\\n", "said\\n")
    assert done.receipt.network_severed
    assert sealed_run(["ls"]).stdout == "made\\n"

def test_stream(sealed_run, tmp_path):
    with (tmp_path / "out").open("w") as out:
        assert sealed_run(["echo", "told"], stdout=out).stdout is None
    assert (tmp_path / "out").read_text() == "told\\n"
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(TEST)
    return pytester


@pytest.mark.parametrize(("setting", "outcome"), [("", {"passed": 1, "errors": 2}), ("sealnet_skip = true", {"passed": 1, "skipped": 2})])
def test_where_the_host_cannot_seal_a_test_fails_unless_it_may_be_skipped(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, setting: str, outcome: dict[str, int]
) -> None:
    monkeypatch.setenv("SEALNET_STATE_DIR", "/none")
    project.makeini(f"[pytest]\nsealnet_worker = always\n{setting}\n")

    done = project.runpytest_subprocess("-rs")

    done.assert_outcomes(**outcome)
    done.stdout.fnmatch_lines("*sealnet cannot seal here: cannot reach the worker at /none/worker.sock: No such file*")


@pytest.mark.root
def test_a_test_runs_sealed(host: object, project: pytest.Pytester) -> None:
    project.path.chmod(0o755)
    for parent in (*Path(project.path).parents,)[:-2]:
        parent.chmod(parent.stat().st_mode | 0o055)

    done = project.runpytest_subprocess(f"--basetemp={project.path}/base")

    done.assert_outcomes(passed=3)
