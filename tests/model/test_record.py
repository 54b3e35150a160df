"""Records: what is written is what is read, by another version too, and what is no record is said to be none."""

from __future__ import annotations

import json
from ipaddress import IPv4Network
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealnet.model.plan import Seal
from sealnet.model.record import SCHEMA, STATES, Record, seal_of

BARE: dict[str, Any] = {
    "run_id": "run-1",
    "confinement": "sealed",
    "asked": "sealed",
    "user": "nobody",
    "command": "true",
    "started": 1.5,
    "boot_id": "b",
    "supervisor": 7,
    "supervisor_start": 8,
    "ifname": "sealjzs5h67ivvs",
    "netns": "sealnet-run-1",
}
WHOLE = BARE | {
    "state": "running",
    "subnet": "198.18.0.0/30",
    "gateway": "198.18.0.1",
    "sandbox": "198.18.0.2",
    "lease_ports": (8080,),
    "ifindex": 12,
    "mac": "22:28:b1:28:67:87",
    "netns_inode": 4026532300,
    "rulesets": {"gate": "aa", "inside": "bb"},
    "cgroup": "/sys/fs/cgroup/sealnet/run-1",
    "init_pid": 9,
    "pid": 10,
    "why_severed": "x",
    "events": ({"time": 1.0, "event": "gate-restored", "detail": "x"},),
}


def again(record: Record) -> Record:
    return Record.from_json(json.loads(record.render()))


@pytest.mark.parametrize("values", [BARE, WHOLE])
def test_what_is_written_is_what_is_read(values: dict[str, Any]) -> None:
    record = Record(**values)

    assert again(record) == record
    assert json.loads(record.render())["schema"] == SCHEMA


@settings(max_examples=30)
@given(
    st.text(alphabet=st.characters()),
    st.floats(allow_nan=False, allow_infinity=False),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3),
    st.lists(st.integers(1, 65535), max_size=3).map(tuple),
)
def test_whatever_the_command_is_the_record_reads_back(
    command: str, started: float, rulesets: dict[str, str], lease_ports: tuple[int, ...]
) -> None:
    record = Record(**BARE | {"command": command, "started": started, "rulesets": rulesets, "lease_ports": lease_ports})

    assert again(record) == record
    assert record.render().isascii()


def test_a_change_makes_another_record() -> None:
    record = Record(**BARE)

    changed = record.with_(state="built", netns_inode=5)

    assert (changed.state, changed.netns_inode) == ("built", 5)
    assert (record.state, record.netns_inode) == (STATES[0], None)


def test_a_field_that_this_version_does_not_know_is_passed_over() -> None:
    data = json.loads(Record(**WHOLE).render()) | {"invented_tomorrow": {"a": [1]}}

    assert Record.from_json(data) == Record(**WHOLE)


def test_a_field_that_an_older_version_did_not_write_has_its_default() -> None:
    data = {"schema": SCHEMA, **BARE}

    assert Record.from_json(data) == Record(**BARE)


@pytest.mark.parametrize("data", [None, [], "x", 7, {}, BARE, {**BARE, "schema": "sealnet.record/2"}, {**BARE, "schema": None}])
def test_what_does_not_say_that_it_is_a_record_is_none(data: object) -> None:
    with pytest.raises(ValueError, match="not a record"):
        Record.from_json(data)


@pytest.mark.parametrize("missing", sorted(BARE))
def test_a_record_without_a_field_that_every_record_has_is_none(missing: str) -> None:
    data = {"schema": SCHEMA, **BARE}
    del data[missing]

    with pytest.raises(ValueError, match=f"not a record: .*{missing}"):
        Record.from_json(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("started", None),
        ("sandbox", "nowhere"),
        ("subnet", "198.18.0.0/99"),
        ("netns_inode", "x"),
        ("lease_ports", "8080"),
        ("confinement", {}),
        ("state", ["running"]),
        ("events", "gone"),
        ("events", [1]),
        ("events", [{"event": []}]),
        ("events", [{"detail": "x"}]),
    ],
)
def test_a_record_whose_field_is_garbled_is_none(name: str, value: object) -> None:
    """Whoever reads it goes by it: a run with such a record could not even be reaped."""
    with pytest.raises(ValueError, match="not a record"):
        Record.from_json({"schema": SCHEMA, **WHOLE, name: value})


def test_the_seal_of_a_record_is_the_one_that_was_built() -> None:
    assert seal_of(Record(**WHOLE)) == Seal(run_id="run-1", subnet=IPv4Network("198.18.0.0/30"), lease_port=8080)
    assert seal_of(Record(**BARE | {"confinement": "severed"})) == Seal(run_id="run-1")
