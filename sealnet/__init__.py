"""Runs a command in bubblewrap with no network but one door.

>>> import sealnet
>>> sealnet.run(["curl", "-fsS", "http://broker.sealnet:8080/"], lease_port=8080).returncode  # doctest: +SKIP
0
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sealnet.errors import (
    CannotSeal,
    CannotTearDown,
    KernelRefused,
    NoBroker,
    NoSuchRun,
    NotPermitted,
    NotSealed,
    PoolExhausted,
    RunExists,
    SealnetError,
    TooMany,
    UsageError,
)
from sealnet.model.version import VERSION

if TYPE_CHECKING:
    from sealnet import aio
    from sealnet.evidence import fold_evidence
    from sealnet.interface import CompletedRun, Run
    from sealnet.model.evidence import EvidenceFold
    from sealnet.model.receipt import Fold, Receipt, fold
    from sealnet.model.record import Record
    from sealnet.probe import CanSeal
    from sealnet.sealer import Sealer, run

__version__ = VERSION
__all__ = [
    "CanSeal",
    "CannotSeal",
    "CannotTearDown",
    "CompletedRun",
    "EvidenceFold",
    "Fold",
    "KernelRefused",
    "NoBroker",
    "NoSuchRun",
    "NotPermitted",
    "NotSealed",
    "PoolExhausted",
    "Receipt",
    "Record",
    "Run",
    "RunExists",
    "Sealer",
    "SealnetError",
    "TooMany",
    "UsageError",
    "aio",
    "fold",
    "fold_evidence",
    "run",
]


# The kernel modules are imported by the first use alone: `import sealnet` stays cheap and needs none of them.
_LATER = {
    "CanSeal": "probe",
    "CompletedRun": "interface",
    "EvidenceFold": "model.evidence",
    "Fold": "model.receipt",
    "Receipt": "model.receipt",
    "Record": "model.record",
    "Run": "interface",
    "Sealer": "sealer",
    "fold": "model.receipt",
    "fold_evidence": "evidence",
    "run": "sealer",
}


def __getattr__(name: str) -> Any:
    if name == "aio":
        return import_module("sealnet.aio")
    if name in _LATER:
        return getattr(import_module(f"sealnet.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
