"""The fixture `sealed_run`, for tests of what a program does in a seal. Part of pytest wherever sealnet is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Unpack

import pytest

if TYPE_CHECKING:
    from sealnet.interface import CompletedOptions, CompletedRun, Word
    from sealnet.sealer import Sealer

_WORKER, _SKIP = "sealnet_worker", "sealnet_skip"


class SealedRun(Protocol):
    """The type of the fixture."""

    def __call__(self, argv: Sequence[Word], **options: Unpack[CompletedOptions]) -> CompletedRun: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(_WORKER, "who makes the runs of sealed_run: auto, always or never the worker", default="auto")
    parser.addini(_SKIP, "skip, and do not fail, tests with sealed_run where this host cannot seal", type="bool", default=False)


@pytest.fixture(scope="session")
def sealer(pytestconfig: pytest.Config) -> Sealer:
    """The `sealnet.Sealer` of the session. Fails, or with `sealnet_skip` skips, where this host cannot seal."""
    # Not before somebody asks for it: every start of pytest imports this module.
    from sealnet.sealer import Sealer

    made = Sealer(worker=pytestconfig.getini(_WORKER))
    can = made.can_seal()
    if not can:
        told = f"sealnet cannot seal here: {can.reason}{'' if can.hint is None else f' ({can.hint})'}"
        if pytestconfig.getini(_SKIP):
            pytest.skip(told)
        pytest.fail(told, pytrace=False)
    return made


@pytest.fixture
def sealed_run(sealer: Sealer, tmp_path: Path) -> SealedRun:
    """`sealnet.run`, in `tmp_path`, its output captured as text."""

    def run(argv: Sequence[Word], **options: Unpack[CompletedOptions]) -> CompletedRun:
        options.setdefault("cwd", str(tmp_path))
        options.setdefault("text", True)
        if "stdout" not in options and "stderr" not in options:
            options.setdefault("capture_output", True)
        return sealer.run(argv, **options)

    return run
