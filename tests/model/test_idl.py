"""Interface definitions: read, and held against values; the worker's own is one that another implementation understands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from asyncvarlink.serviceinterface import VarlinkServiceInterface

import sealnet
from sealnet.model import idl

WORKER = Path(sealnet.__file__).parent / "worker"
EXAMPLE = """
# About it.
interface org.example.thing

type Kind (one, two)
type Pair (name: string, kinds: []Kind) # behind it
method Ask(pair: Pair, many: ?[]int, named: [string]float, any: ?object, nested: ?(flag: bool)) -> (answer: string)
method None() -> ()
error Wrong (why: string)
"""
GOOD: dict[str, Any] = {"pair": {"name": "a", "kinds": ["one", "two"]}, "named": {"a": 1, "b": 1.5}}


def check(**changes: Any) -> None:
    known = idl.parse(EXAMPLE)
    known.check(known.methods["Ask"][0], {**GOOD, **changes}, "parameters")


@pytest.mark.parametrize(
    "changes", [{}, {"many": None}, {"many": [1, -1]}, {"any": {"x": [None]}}, {"nested": {"flag": True}}, {"named": {}}]
)
def test_what_fits_is_taken(changes: dict[str, Any]) -> None:
    check(**changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pair": None}, "pair"),
        ({"pair": []}, "pair"),
        ({"pair": {"name": "a"}}, "kinds"),
        ({"pair": {"name": None, "kinds": []}}, "name"),
        ({"pair": {"name": "a", "kinds": ["three"]}}, "kinds"),
        ({"pair": {"name": "a", "kinds": {"0": "one"}}}, "kinds"),
        ({"pair": {"name": "a", "kinds": [], "more": 1}}, "more"),
        ({"many": [True]}, "many"),
        ({"many": [1.0]}, "many"),
        ({"many": ["1"]}, "many"),
        ({"named": {"a": "1"}}, "named"),
        ({"named": {"a": True}}, "named"),
        ({"named": [1]}, "named"),
        ({"any": []}, "any"),
        ({"nested": {"flag": 1}}, "flag"),
        ({"other": 1}, "other"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}$"):
        check(**changes)


def test_a_field_that_is_needed_is_missed() -> None:
    known = idl.parse(EXAMPLE)

    with pytest.raises(ValueError, match=r"^named$"):
        known.check(known.methods["Ask"][0], {"pair": GOOD["pair"]}, "parameters")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "interface",
        "interface a.b type X",
        "interface a.b type X (a: nothing)",
        "interface a.b type X (a: Missing)",
        "interface a.b type X (a: int, b)",
        "interface a.b type X (a: int, a: int)",
        "interface a.b type X (a) type X (b)",
        "interface a.b method X() (a: int)",
        "interface a.b error X (a: int",
        "interface a.b struct X ()",
        "interface a.b type X (a: int) %",
    ],
)
def test_what_is_no_definition_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        idl.parse(text)


def test_the_service_interface_is_what_the_other_implementation_says() -> None:
    ours = idl.parse((WORKER / "org.varlink.service.varlink").read_text())
    theirs = idl.parse(VarlinkServiceInterface.render_interface_description())

    assert (ours.name, ours.methods, ours.errors) == (theirs.name, theirs.methods, theirs.errors)


def test_the_workers_interface_has_its_methods() -> None:
    known = idl.parse((WORKER / "io.sealnet.Worker.varlink").read_text())

    assert set(known.methods) == {
        "Run", "Cancel", "Wait", "List", "Inspect", "Check", "Kill", "Freeze", "Reap", "Log", "Events", "Doctor",
    }  # fmt: skip
    assert set(known.errors) == {"Failed"}
