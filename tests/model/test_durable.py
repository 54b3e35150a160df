"""What a record says of a run that outlives its supervisor: whole, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sealnet.model.durable import Doorway, Durable, of
from sealnet.model.record import Record
from tests.model.build import a_record

DOOR = Doorway(name="1000.sock", pid=7, start=70, ports=(4000, 4001), broker="/run/broker.sock")
WHOLE = Durable(
    owner=1000, on_tamper="kill", grace_s=1.5, gid=5, groups=(5, 6), ends_at=12.5, bwrap_pid=3, bwrap_start=30, init_start=40, door=DOOR
)


@pytest.mark.parametrize("durable", [WHOLE, Durable(owner=0, on_tamper="restore", grace_s=0, gid=0, groups=())])
def test_it_reads_back_from_a_record(durable: Durable) -> None:
    record = a_record(durable=durable.to_json())

    assert of(Record.from_json(json.loads(record.render()))) == durable


def test_a_run_that_is_not_durable_has_none() -> None:
    assert of(a_record()) is None
    with pytest.raises(ValueError, match="durable"):
        Record.from_json(json.loads(a_record().render()) | {"durable": [1]})


@pytest.mark.parametrize(
    "change",
    [
        {"owner": "root"},
        {"owner": True},
        {"gid": 1.5},
        {"groups": ["5"]},
        {"groups": 5},
        {"grace_s": "long"},
        {"ends_at": [1]},
        {"bwrap_pid": "1"},
        {"door": {"name": "x"}},
        {"door": 3},
        {"door": DOOR.__class__.__name__},
    ],
)
def test_one_that_is_not_what_it_should_be_is_none(change: dict[str, Any]) -> None:
    assert of(a_record(durable=WHOLE.to_json() | change)) is None


def test_a_door_is_a_name_in_its_directory() -> None:
    values = WHOLE.to_json()
    assert of(a_record(durable=values)) is not None
    values["door"] = values["door"] | {"name": "../../etc/sock"}
    assert of(a_record(durable=values)) is None
