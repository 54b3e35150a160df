"""Which module may import which: arrows point down only, effects stay in the kernel package, and starting up is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up: each part imports only what stands above it in this list. `sealnet` is the public API in sealnet/__init__.py.
ORDER = (
    "errors",
    "model",
    "kernel",
    "manners",
    "door",
    "doors",
    "records",
    "ended",
    "seal",
    "prove",
    "reap",
    "caller",
    "request",
    "guard",
    "running",
    "adopt",
    "looking",
    "evidence",
    "builder",
    "spawn",
    "launch",
    "probe",
    "terminal",
    "supervise",
    "attack",
    "demo",
    "doctor",
    "worker",
    "client",
    "asking",
    "stay",
    "interface",
    "workerrun",
    "sealer",
    "aio",
    "sealnet",
    "pytest_plugin",
    "inspect_sandbox",
    "cli",
    "__main__",
)
# Narrower than the order: what talks to the worker does not bring the kernel along.
ONLY = {"client": {"model", "errors"}}

KERNEL_ONLY = {"nftables", "psutil", "pyroute2", "seccomp"}
HEAVY = KERNEL_ONLY | {"asyncio", "rich"}

# What a pure function can need. No clock, no randomness, no file, no process, no socket: those are arguments.
PURE = {
    "__future__",
    "abc",
    "base64",
    "binascii",
    "bisect",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "enum",
    "errno",
    "fnmatch",
    "functools",
    "hashlib",
    "hmac",
    "ipaddress",
    "itertools",
    "json",
    "math",
    "operator",
    "posixpath",
    "re",
    "shlex",
    "signal",
    "stat",
    "string",
    "struct",
    "textwrap",
    "tomllib",
    "types",
    "typing",
    "unicodedata",
    "urllib.parse",
}
PURE_NAMES = {
    "pathlib": {"PurePath", "PurePosixPath"},
    "termios": {"TIOCCONS", "TIOCLINUX", "TIOCSETD", "TIOCSTI"},
    "urllib": {"parse"},
}
# A run id that nobody gave is made of the time and randomness; tests give both.
EXCEPTIONS = {("model/names.py", "secrets"), ("model/names.py", "time")}
# The rest of posixpath asks the file system.
LEXICAL = {"basename", "commonpath", "commonprefix", "dirname", "isabs", "join", "normpath", "relpath", "sep", "split", "splitext"}
IMPURE_CALLS = {"__import__", "breakpoint", "eval", "exec", "input", "open", "print"}


class Import(NamedTuple):
    """`from module import name` (or `import module`, name ""), in line `line` of `path` below sealnet/."""

    path: Path
    line: int
    module: str
    name: str = ""

    @property
    def where(self) -> str:
        return f"sealnet/{self.path}:{self.line}"

    @property
    def part(self) -> str:
        return part_of(self.path)

    @property
    def target(self) -> str | None:
        """The part of sealnet that is imported, None for anything else."""
        if self.module == "sealnet":
            is_part = (ROOT / "sealnet" / self.name).is_dir() or (ROOT / "sealnet" / f"{self.name}.py").is_file()
            return self.name if self.name in ORDER or (self.name and is_part) else "sealnet"
        head, _, rest = self.module.partition(".")
        return rest.partition(".")[0] if head == "sealnet" else None


def part_of(relative: Path) -> str:
    return "sealnet" if relative.parts == ("__init__.py",) else relative.parts[0].removesuffix(".py")


def imports_in(source: str, relative: Path) -> Iterator[Import]:
    """Every import in the text, those inside functions and under TYPE_CHECKING too. `relative` is its path below sealnet/."""
    package = ("sealnet", *relative.parent.parts)
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Import(names=names):
                yield from (Import(relative, line, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else ()
                whole = ".".join((*base, *([module] if module else [])))
                yield from (Import(relative, line, whole, alias.name) for alias in names)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(relative, line, module)


def upward(found: Import) -> str | None:
    target = found.target
    if target is None or target == found.part:
        return None
    for part in (found.part, target):
        if part not in ORDER:
            return f"{found.where}: {part} has no place in the order of this test"
    if target not in ONLY.get(found.part, set(ORDER[: ORDER.index(found.part)])):
        return f"{found.where}: {found.part} imports {target}"
    return None


def impure(found: Import) -> str | None:
    if found.part != "model" or found.target is not None or (str(found.path), found.module) in EXCEPTIONS:
        return None
    if found.module == "posixpath" and found.name and found.name not in LEXICAL:
        return f"{found.where}: model imports posixpath {found.name}"
    allowed = found.name in PURE_NAMES.get(found.module, set()) or found.module in PURE or found.module.partition(".")[0] in PURE
    return None if allowed else f"{found.where}: model imports {found.module} {found.name}".rstrip()


def misplaced(found: Import) -> str | None:
    package = found.module.partition(".")[0]
    if package in KERNEL_ONLY and found.part != "kernel":
        return f"{found.where}: {found.part} imports {package}"
    return None


def sources() -> list[tuple[str, Path]]:
    package = ROOT / "sealnet"
    return [(path.read_text(), path.relative_to(package)) for path in sorted(package.rglob("*.py"))]


RULES = (upward, impure, misplaced)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_no_import_breaks_the_rule(rule) -> None:
    found = [each for source, relative in sources() for each in imports_in(source, relative)]

    broken = [text for text in map(rule, found) if text]

    assert found
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("rule", "path", "line"),
    [
        (upward, "model/plan.py", "from sealnet.kernel import links"),
        (upward, "model/plan.py", "from ..kernel import links"),
        (upward, "kernel/nft.py", "from sealnet import seal"),
        (upward, "kernel/nft.py", "from sealnet import run"),
        (upward, "client.py", "def f():\n    import sealnet.kernel.nft"),
        (upward, "seal.py", "import importlib\nimportlib.import_module('sealnet.worker')"),
        (upward, "errors.py", "from .model import names"),
        (upward, "novelty.py", "from sealnet import errors"),
        (impure, "model/plan.py", "import os.path"),
        (impure, "model/plan.py", "from pathlib import Path"),
        (impure, "model/plan.py", "import socket"),
        (impure, "model/plan.py", "import urllib.request"),
        (misplaced, "worker/monitor.py", "from pyroute2 import IPRoute"),
        (misplaced, "__init__.py", "import psutil"),
    ],
)
def test_the_rule_sees_a_breach(rule, path, line) -> None:
    assert any(map(rule, imports_in(line, Path(path))))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("model/plan.py", "from sealnet.model.names import RunId\nfrom ..errors import UsageError\nfrom urllib.parse import urlsplit"),
        ("model/argv.py", "from pathlib import PurePosixPath\nfrom collections.abc import Iterator"),
        ("kernel/nft.py", "import nftables\nfrom sealnet import errors\nfrom . import netns"),
        ("worker/daemon.py", "import asyncio\nfrom sealnet import launch, reap"),
        ("cli/run.py", "import sealnet\nfrom sealnet import client"),
    ],
)
def test_the_rules_leave_what_is_right_alone(path, line) -> None:
    found = list(imports_in(line, Path(path)))

    assert found
    assert [text for each in found for rule in RULES if (text := rule(each))] == []


def impure_use(node: ast.AST) -> str | None:
    match node:
        case ast.Call(func=ast.Name(id=name)) if name in IMPURE_CALLS:
            return name
        case ast.Attribute(value=ast.Name(id="posixpath"), attr=name) if name not in LEXICAL:
            return f"posixpath.{name}"
    return None


def test_an_impure_use_is_seen() -> None:
    nodes = ast.walk(ast.parse("open(path); posixpath.exists(path); posixpath.join(path)"))

    assert {use for node in nodes if (use := impure_use(node))} == {"open", "posixpath.exists"}


def test_the_model_opens_prints_and_asks_nothing() -> None:
    uses = [
        f"sealnet/{relative}: {use}"
        for source, relative in sources()
        if part_of(relative) == "model"
        for node in ast.walk(ast.parse(source))
        if (use := impure_use(node))
    ]

    assert not uses, "\n".join(uses)


@pytest.mark.parametrize("module", ["sealnet", "sealnet.cli"])
def test_importing_it_loads_nothing_heavy(module) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}; print(*sys.modules)"

    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)

    loaded = set(result.stdout.split())
    assert module in loaded
    assert loaded & HEAVY == set()
