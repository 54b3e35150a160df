"""Taking runs away by run id over a fake kernel: whatever is left of them, and nobody else's."""

from __future__ import annotations

import os
from collections.abc import Callable
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from sealnet import reap
from sealnet import seal as sealing
from sealnet.errors import CannotTearDown
from sealnet.kernel import sysctl
from sealnet.records import Claim, State
from tests.crash import elsewhere, steps_of
from tests.fake import FakeKernel
from tests.model.build import a_record, sealed, severed

SUBNET, OTHER = IPv4Network("198.18.0.0/30"), IPv4Network("198.18.0.4/30")
ADDRESSES = {"subnet": str(SUBNET), "gateway": "198.18.0.1", "sandbox": "198.18.0.2", "lease_ports": (8080,)}


@pytest.fixture
def state(tmp_path: Path) -> State:
    state = State(tmp_path / "state")
    state.prepare()
    return state


@pytest.fixture
def kernel() -> Any:
    """`Any`, for reap asks for the real one by name."""
    return FakeKernel()


def a_run(kernel: FakeKernel, state: State) -> Claim:
    """A sealed run, all of it, and alive."""
    claim = state.claim(a_record(confinement="sealed"))
    state.reserve(SUBNET, "run-1")
    claim.update(**ADDRESSES, cgroup=str(kernel.add_cgroup("run-1")))
    inside = sealing.apply(kernel, sealed(), alias="x", sysctls=sysctl.expected()).inside
    claim.update(state="running", netns_inode=inside.inode)
    kernel.grant(sealed(), ttl_s=90)
    kernel.change(processes={7: (inside.inode, "run-1")})
    inside.close()
    return claim


def a_dead_run(kernel: FakeKernel, state: State) -> None:
    a_run(kernel, state).close()


def left(kernel: FakeKernel, state: State) -> list[str]:
    """Everything there is of any run."""
    return [*kernel.left.splitlines(), *os.listdir(state.runs), *os.listdir(state.subnets)]


def test_everything_of_a_run_is_taken_away_by_its_id(kernel: Any, state: State) -> None:
    a_dead_run(kernel, state)

    assert reap.teardown(kernel, state, "run-1")

    assert left(kernel, state) == []
    assert kernel.text() == "gate\n"


def test_a_run_that_never_was_is_taken_away_with_success(kernel: Any, state: State) -> None:
    assert not reap.teardown(kernel, state, "run-1")
    assert not reap.teardown(kernel, state, "run-1")

    assert left(kernel, state) == []


HALVES: dict[str, Callable[[FakeKernel, State], None]] = {
    "its record": lambda _kernel, state: (state.directory("run-1") / "record.json").unlink(),
    "its directory": lambda _kernel, state: state.forget("run-1"),
    "its reservation": lambda _kernel, state: state.release("run-1"),
    "its lease": lambda kernel, _state: kernel.change(leases={}),
    "the gate": lambda kernel, _state: kernel.change(gate=None, leases={}),
    "its link": lambda kernel, _state: kernel.remove_link("run-1"),
    "its netns name": lambda kernel, _state: kernel.change(names={}),
    "its processes": lambda kernel, _state: kernel.change(processes={}),
    "its cgroup": lambda kernel, _state: kernel.change(cgroups={}, processes={}),
}


@pytest.mark.parametrize("lose", HALVES.values(), ids=HALVES.keys())
def test_what_is_gone_already_is_not_missed(kernel: Any, state: State, lose: Callable[[FakeKernel, State], None]) -> None:
    a_dead_run(kernel, state)
    lose(kernel, state)

    reap.teardown(kernel, state, "run-1")

    assert left(kernel, state) == []


GARBLED = {
    "empty": lambda _text: "",
    "cut short": lambda text: text[:100],
    "no record": lambda _text: "[]",
    "a sandbox that is no address": lambda text: text.replace('"198.18.0.2"', '"nowhere"'),
    "a subnet that is no prefix": lambda text: text.replace('"198.18.0.0/30"', '"198.18.0.0/99"'),
    "no lease port": lambda text: text.replace("8080", ""),
}


@pytest.mark.parametrize("garble", GARBLED.values(), ids=GARBLED.keys())
def test_a_run_whose_record_is_garbled_is_taken_away(kernel: Any, state: State, garble: Callable[[str], str]) -> None:
    a_dead_run(kernel, state)
    record = state.directory("run-1") / "record.json"
    record.write_text(garble(record.read_text()))

    reap.teardown(kernel, state, "run-1")

    assert left(kernel, state) == []


@pytest.mark.parametrize("step", ["kill", "settle", "revoke", "remove_link", "remove_netns", "remove_cgroup"])
def test_what_could_not_be_taken_away_keeps_its_record_and_can_be_tried_again(kernel: Any, state: State, step: str) -> None:
    a_dead_run(kernel, state)
    kernel.fail_in = {step}

    with pytest.raises(CannotTearDown):
        reap.teardown(kernel, state, "run-1")

    assert state.read("run-1").subnet == str(SUBNET)
    assert state.reservations() == {SUBNET: "run-1"}

    kernel.fail_in = set()
    assert reap.teardown(kernel, state, "run-1")
    assert left(kernel, state) == []


def test_another_run_is_left_alone(kernel: Any, state: State) -> None:
    a_dead_run(kernel, state)
    sealing.apply(kernel, severed("run-2"), alias="x", sysctls=sysctl.expected())
    state.reserve(OTHER, "run-2")
    other = state.claim(a_record("run-2"))

    reap.teardown(kernel, state, "run-1")

    assert state.reservations() == {OTHER: "run-2"}
    assert state.run_ids() == ["run-2"]
    assert "netns sealnet-run-2" in kernel.left
    other.close()


def test_nothing_is_done_when_the_caller_changes_its_mind(kernel: Any, state: State) -> None:
    claim = a_run(kernel, state)
    before = kernel.world

    assert not reap.teardown(kernel, state, "run-1", unless=lambda: state.is_held("run-1"))
    assert not reap.teardown(kernel, state, "run-2", unless=lambda: True)

    assert kernel.world == before
    assert state.run_ids() == ["run-1"]
    claim.close()


# Orphans


def test_a_run_whose_supervisor_lives_is_no_orphan(kernel: Any, state: State) -> None:
    claim = a_run(kernel, state)

    assert reap.orphans(kernel, state) == []
    assert reap.reap_orphans(kernel, state) == []
    assert state.read("run-1").state == "running"

    claim.close()
    assert reap.orphans(kernel, state) == ["run-1"]
    assert reap.reap_orphans(kernel, state) == ["run-1"]
    assert left(kernel, state) == []


def test_a_live_run_of_another_versions_is_no_orphan_and_can_be_ended(kernel: Any, state: State) -> None:
    """After an upgrade, whatever the new version makes of the old one's records."""
    claim = a_run(kernel, state)
    record = state.directory("run-1") / "record.json"
    record.write_text(record.read_text().replace("sealnet.record/1", "sealnet.record/0"))

    assert reap.reap_orphans(kernel, state) == []
    assert left(kernel, state) != []
    assert reap.teardown(kernel, state, "run-1")
    assert left(kernel, state) == []
    claim.close()


@pytest.mark.parametrize(
    "leave",
    [
        lambda _kernel, state: state.claim(a_record()).close(),
        lambda _kernel, state: state.reserve(SUBNET, "run-1"),
        lambda _kernel, state: elsewhere(lambda: state.teardown_lock("run-1").__enter__()),
        lambda kernel, _state: kernel.add_cgroup("run-1"),
        lambda kernel, _state: sealing.apply(kernel, severed(), alias="x", sysctls=sysctl.expected()).inside.close(),
    ],
    ids=["a record", "a reservation", "a teardown that died", "a cgroup", "a netns"],
)
def test_an_orphan_is_found_by_whatever_is_left_of_it(kernel: Any, state: State, leave: Callable[[Any, State], object]) -> None:
    leave(kernel, state)

    assert reap.reap_orphans(kernel, state) == ["run-1"]

    assert left(kernel, state) == []


def test_a_reservation_whose_maker_died_is_given_back(kernel: Any, state: State) -> None:
    """Before it had written its name as well: nobody else will ever give it back."""

    def after() -> None:
        reap.reap_orphans(kernel, state)
        assert left(kernel, state) == []

    assert steps_of(lambda: state.reserve(SUBNET, "run-1"), after) > 1


def test_a_claim_that_was_never_finished_is_swept_up(kernel: Any, state: State) -> None:
    (state.runs / ".run-1.0badcafe").mkdir()

    reap.reap_orphans(kernel, state)

    assert left(kernel, state) == []


def test_an_orphan_that_cannot_be_taken_away_keeps_no_other_from_it(kernel: Any, state: State) -> None:
    for run_id in ("run-1", "run-2"):
        state.claim(a_record(run_id)).close()
    # The calls are traces, then join and kill of the first.
    kernel.fail_at = {2}

    with pytest.raises(CannotTearDown, match=r"^cannot tear down run run-1: cannot kill: Operation not permitted$") as caught:
        reap.reap_orphans(kernel, state)

    assert caught.value.hint == "try again: sealnet reap --orphans"
    assert state.run_ids() == ["run-1"]
