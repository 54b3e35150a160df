"""Looking after a live run, over a fake kernel: what is put back, what is written down, and when it is enough."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sealnet import guard as guards
from sealnet import seal as sealing
from sealnet.errors import KernelRefused
from sealnet.guard import MOST_EVENTS, MOST_RESTORES, Guard, Upkeep
from sealnet.kernel import sysctl
from sealnet.model.check import Check, Seen
from sealnet.model.plan import Seal
from sealnet.records import Claim, State
from tests.fake import FakeKernel, Inside
from tests.model.build import a_record, sealed, severed

TTL_S = 90


@dataclass
class Clock:
    """Stands still until it is set."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


@dataclass
class Scene:
    """A run that stands, the one who looks after it, and what has become of its payload."""

    kernel: FakeKernel
    claim: Claim
    inside: Inside
    seal: Seal

    def guard(self, on_tamper: str = "restore") -> Guard:
        return Guard(self.kernel, self.claim, self.seal, self.inside, ttl_s=TTL_S, on_tamper=on_tamper)

    @property
    def kills(self) -> list[str]:
        return [call for call in self.kernel.calls if call == "kill"]

    @property
    def events(self) -> list[str]:
        return [event["event"] for event in self.claim.record.events]

    @property
    def details(self) -> list[str]:
        return [event["detail"] for event in self.claim.record.events]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(guards, "time", clock)
    return clock


@pytest.fixture(params=[sealed, severed], ids=["sealed", "severed"])
def any_scene(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Scene]:
    yield from a_scene(tmp_path, request.param())


@pytest.fixture
def scene(tmp_path: Path, clock: Clock) -> Iterator[Scene]:
    yield from a_scene(tmp_path, sealed())


def a_scene(directory: Path, seal: Seal) -> Iterator[Scene]:
    kernel, state = FakeKernel(), State(directory / "state")
    state.prepare()
    applied = sealing.apply(kernel, seal, alias="x", sysctls=sysctl.expected())
    kernel.grant(seal, ttl_s=TTL_S)
    kernel.change(processes={7: (applied.inside.inode, None)})
    claim = state.claim(a_record(confinement="sealed" if seal.subnet else "severed", rulesets=dict(applied.seen.rulesets)))
    yield Scene(kernel, claim, applied.inside, seal)
    claim.close()


def flush_gate(scene: Scene) -> None:
    scene.kernel.change(gate=None, leases={})


def change_gate(scene: Scene) -> None:
    scene.kernel.change(gate="table inet sealnet { accept }")


def revoke(scene: Scene) -> None:
    scene.kernel.change(leases={})


def down(scene: Scene) -> None:
    scene.kernel.change_link(scene.seal.ifname, up=False)


def eth0_down(scene: Scene) -> None:
    scene.kernel.change_eth0(scene.inside.inode, up=False)


def strip(scene: Scene) -> None:
    scene.kernel.change_link(scene.seal.ifname, addresses=())


def enslave(scene: Scene) -> None:
    scene.kernel.change_link(scene.seal.ifname, master=7)


def flip(name: str, value: str) -> Callable[[Scene], None]:
    return lambda scene: scene.kernel.change_link(scene.seal.ifname, sysctls={**sysctl.expected(), name: value})


def flush_filter(scene: Scene) -> None:
    scene.kernel.change_netns(scene.inside.inode, filter=None)


def lo_down(scene: Scene) -> None:
    scene.kernel.change_netns(scene.inside.inode, lo_up=False)


def shadow(scene: Scene) -> None:
    scene.kernel.change(shadowed=True)


def change_mac(scene: Scene) -> None:
    scene.kernel.change_link(scene.seal.ifname, mac="02:00:5e:00:53:01")


def remove_link(scene: Scene) -> None:
    scene.kernel.change(links={})


def change_mark(scene: Scene) -> None:
    scene.kernel.change_netns(scene.inside.inode, mark="mine")


RESTORED = [
    (flush_gate, "gate-restored"),
    (change_gate, "gate-restored"),
    (revoke, "lease-restored"),
    (down, "link-down"),
    (eth0_down, "link-down"),
    (strip, "address-lost"),
    (enslave, "enslaved"),
    (flip("ipv4/conf/{link}/route_localnet", "1"), "sysctl-changed"),
    (flip("ipv6/conf/{link}/disable_ipv6", "0"), "ipv6-back"),
    (flush_filter, "filter-changed"),
    (lo_down, "sink-changed"),
]
STAYS = [(shadow, "route-changed"), (change_mac, "link-changed"), (remove_link, "link-gone"), (change_mark, "mark-changed")]
KIND = {flush_gate: "gate-lost", change_gate: "gate-changed", revoke: "lease-lost"}


def test_a_run_that_nobody_touches_has_no_event(any_scene: Scene) -> None:
    guard = any_scene.guard("kill")
    world = any_scene.kernel.text()

    assert guard.look()
    guard.glance()
    guard.renew()

    assert any_scene.events == []
    assert any_scene.kills == []
    assert any_scene.kernel.text() == world


@pytest.mark.parametrize(("tamper", "event"), RESTORED)
def test_what_can_be_put_back_is_and_is_written_down_once(scene: Scene, tamper: Callable[[Scene], None], event: str) -> None:
    guard, world = scene.guard(), scene.kernel.world
    tamper(scene)
    assert scene.kernel.world != world

    guard.look()
    guard.look()

    assert scene.kernel.world == world
    assert scene.events == [event]
    assert scene.details[0].endswith("; it was put back")
    assert scene.kills == []


@pytest.mark.parametrize(("tamper", "event"), STAYS)
def test_what_cannot_be_put_back_is_written_down_once_and_again_when_it_comes_again(
    scene: Scene, tamper: Callable[[Scene], None], event: str
) -> None:
    guard, before = scene.guard(), scene.kernel.world
    tamper(scene)

    for _ in range(3):
        guard.look()
    once = scene.events
    scene.kernel.world = before
    guard.look()
    tamper(scene)
    guard.look()

    assert once == [event]
    assert scene.events == [event] * 2
    assert "it stays so" in scene.details[0]
    assert scene.kills == []


@pytest.mark.parametrize(("tamper", "event"), RESTORED + STAYS)
def test_every_one_of_them_ends_a_payload_that_is_to_be_ended_for_it(scene: Scene, tamper: Callable[[Scene], None], event: str) -> None:
    guard = scene.guard("kill")
    tamper(scene)
    world = scene.kernel.world

    guard.look()
    guard.look()
    guard.renew()

    assert scene.kills == ["kill"]
    assert scene.kernel.world == dataclasses.replace(world, processes={})
    assert scene.events == [KIND.get(tamper, event), "killed-by-watch"]
    assert guard.killed is not None
    assert guard.killed in scene.details[1]


def test_the_filter_of_a_severed_run_is_put_back(any_scene: Scene) -> None:
    guard, world = any_scene.guard(), any_scene.kernel.text()
    flush_filter(any_scene)

    guard.look()

    assert any_scene.kernel.text() == world
    assert any_scene.events == ["filter-changed"]


def test_another_who_does_it_again_and_again_is_not_fought_for_ever(scene: Scene, clock: Clock) -> None:
    guard = scene.guard()

    for _ in range(MOST_RESTORES + 3):
        down(scene)
        guard.look()
        clock.now += 1

    assert scene.events[:MOST_RESTORES] == ["link-down"] * MOST_RESTORES
    assert scene.events[MOST_RESTORES] == "gave-up"
    assert scene.events.count("gave-up") == 1
    assert not scene.kernel.world.links[scene.seal.ifname].up


def test_who_does_it_now_and_then_is_put_right_each_time(scene: Scene, clock: Clock) -> None:
    guard = scene.guard()

    for _ in range(3 * MOST_RESTORES):
        down(scene)
        guard.look()
        guard.renew()
        clock.now += 10

    assert set(scene.events) == {"link-down"}
    assert scene.kernel.world.links[scene.seal.ifname].up


def test_the_lease_comes_back_with_the_renewal_even_after_giving_up(scene: Scene) -> None:
    guard = scene.guard()
    for _ in range(MOST_RESTORES + 1):
        flush_gate(scene)
        guard.look()
    assert scene.events[-2:] == ["gave-up", "gate-lost"]

    guard.renew()

    assert scene.kernel.has_lease(scene.seal)
    assert scene.events[-1] == "gate-restored"


def test_the_record_does_not_grow_for_ever(scene: Scene) -> None:
    guard, before = scene.guard(), scene.kernel.world

    for _ in range(MOST_EVENTS + 5):
        change_mac(scene)
        guard.look()
        scene.kernel.world = before
        guard.look()

    assert len(scene.events) == MOST_EVENTS
    # What has not been told of yet is: a tally that begins anew may not be told as whole.
    for _ in range(2):
        flush_filter(scene)
        guard.look()
    assert scene.events[MOST_EVENTS:] == ["filter-changed"]


@pytest.mark.parametrize("step", ["restore_gate", "restore_filter"])
def test_a_link_comes_up_only_behind_a_gate_and_a_filter_that_stand(scene: Scene, step: str) -> None:
    guard = scene.guard()
    down(scene)
    flush_gate(scene)
    flush_filter(scene)
    scene.kernel.fail_in = {step}

    guard.look()

    assert not scene.kernel.world.links[scene.seal.ifname].up
    assert not scene.kernel.has_lease(scene.seal)
    assert any(f"it stays so: cannot {step}: Operation not permitted" in detail for detail in scene.details)
    # Nothing failing any more, the next change brings everything back.
    scene.kernel.fail_in = set()
    enslave(scene)
    guard.look()
    assert scene.kernel.world.links[scene.seal.ifname].up
    assert scene.kernel.has_lease(scene.seal)


def test_what_a_teardown_takes_away_is_not_put_back(scene: Scene) -> None:
    guard = scene.guard()
    fd = os.open(scene.claim.directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    revoke(scene)

    meanwhile = guard.look()
    guard.renew()
    leased = scene.kernel.has_lease(scene.seal)
    os.close(fd)
    guard.look()

    assert not meanwhile
    assert not leased
    # The teardown was given up (a test, after all): what is missing now is missing.
    assert scene.events == ["lease-restored"]


def test_a_run_that_was_reaped_is_not_put_back(scene: Scene) -> None:
    guard = scene.guard("kill")
    scene.kernel.remove_link("run-1")
    scene.claim.state.forget("run-1")
    flush_gate(scene)

    looked = guard.look()
    guard.renew()

    assert not looked
    assert scene.kernel.world.gate is None
    assert scene.kills == []


def test_a_run_whose_record_was_removed_keeps_its_lease(scene: Scene) -> None:
    guard = scene.guard()
    shutil.rmtree(scene.claim.directory)
    revoke(scene)

    guard.renew()

    assert scene.kernel.has_lease(scene.seal)


def test_what_was_put_back_and_cannot_be_read_back_is_written_down_all_the_same(scene: Scene) -> None:
    guard = scene.guard()
    down(scene)

    def unreadable(seen: Seen) -> Seen:
        if "restore_link" in scene.kernel.calls:
            raise KernelRefused("cannot list addresses: it changed during each of 20 reads", errno=errno.EAGAIN)
        return seen

    scene.kernel.lie = unreadable
    guard.look()
    scene.kernel.lie = lambda seen: seen
    guard.look()

    assert scene.kernel.world.links[scene.seal.ifname].up
    assert scene.events == ["link-down"]
    assert "cannot be read back" in scene.details[0]


def test_a_lease_that_ran_out_while_the_supervisor_was_suspended_is_no_tampering(scene: Scene, clock: Clock) -> None:
    guard = scene.guard("kill")
    clock.now += TTL_S + 1
    scene.kernel.change(now=scene.kernel.world.now + TTL_S + 1)
    assert not scene.kernel.has_lease(scene.seal)

    guard.renew()
    renewed = scene.kernel.has_lease(scene.seal)
    events, kills = scene.events, scene.kills
    revoke(scene)
    guard.look()

    assert renewed
    assert (events, kills) == ([], [])
    assert scene.kills == ["kill"]


def test_what_cannot_be_read_is_no_tampering(scene: Scene) -> None:
    guard = scene.guard("kill")
    scene.kernel.fail_in = {"see"}
    scene.kernel.error = lambda name: KernelRefused(f"cannot {name}: it changed during each of 20 reads", errno=11)
    down(scene)

    missed = guard.look()
    scene.kernel.fail_in = set()
    guard.look()

    assert not missed
    assert scene.kills == ["kill"]


def test_a_kill_that_failed_is_tried_again(scene: Scene) -> None:
    guard = scene.guard("kill")
    scene.kernel.fail_in = {"kill"}
    down(scene)

    looks = [guard.look()]
    scene.kernel.fail_in = set()
    looks += [guard.look(), guard.look()]
    alive = dict(scene.kernel.world.processes)

    assert looks == [False, True, True]
    assert scene.kills == ["kill"] * 2
    assert alive == {}
    assert scene.events == ["link-down", "killed-by-watch"]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptor is left to listen with."""

    def refuse() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(guards, "Watch", refuse)


def test_a_run_that_cannot_be_watched_is_looked_at_now_and_then(scene: Scene, clock: Clock, full: None) -> None:
    upkeep = Upkeep(scene.guard(), refresh_s=30)

    for _ in range(100):
        clock.now = max(clock.now, upkeep.next_at())
        upkeep.serve()
        if clock.now > 1020 and "link-down" not in scene.events:
            down(scene)

    assert upkeep.fds == []
    assert clock.now > 1060
    assert scene.events[:2] == ["not-watched", "link-down"]
    assert scene.kernel.world.links[scene.seal.ifname].up


def test_a_look_that_has_to_be_repeated_is_not_forgotten_over_a_glance(scene: Scene, clock: Clock, full: None) -> None:
    upkeep = Upkeep(scene.guard(), refresh_s=1000)
    fd = os.open(scene.claim.directory, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    revoke(scene)
    while clock.now < 1005:
        clock.now = upkeep.next_at()
        upkeep.serve()

    os.close(fd)
    clock.now = upkeep.next_at()
    upkeep.serve()

    assert clock.now < 1006
    assert scene.events == ["not-watched", "lease-restored"]


def test_a_run_without_a_seal_needs_nothing() -> None:
    upkeep = Upkeep(None, refresh_s=30)

    upkeep.serve()
    upkeep.renew()

    assert (upkeep.fds, upkeep.next_at()) == ([], float("inf"))


def test_a_glance_looks_when_a_setting_has_changed_and_only_then(scene: Scene) -> None:
    guard = scene.guard()
    scene.kernel.calls.clear()

    guard.glance()
    quiet = list(scene.kernel.calls)
    flip("ipv4/conf/{link}/accept_local", "1")(scene)
    guard.glance()

    assert quiet == ["see_settings"]
    assert scene.events == ["sysctl-changed"]


def test_other_rules_of_the_same_shape_inside_are_seen(scene: Scene) -> None:
    guard = scene.guard()
    scene.kernel.lie = lambda seen: dataclasses.replace(seen, rulesets={**seen.rulesets, "inside": "00"})

    # What is there once more after it was put back is put back a few times, and then written down.
    assert [guard.look() for _ in range(5)] == [False] * 3 + [True] * 2

    assert scene.events == ["filter-changed"]
    assert "other rules than when the run started" in scene.details[0]


def test_what_is_taken_away_again_while_it_is_put_back_is_put_back_the_next_time(scene: Scene) -> None:
    """`ip address flush` deletes until nothing is left."""
    guard, real, flushed = scene.guard(), scene.kernel.restore_link, []

    def restore(seal: Any, inside: Any) -> None:
        real(seal, inside)
        if not flushed:
            flushed.append(seal)
            scene.kernel.change_link(seal.ifname, addresses=())

    scene.kernel.restore_link = restore
    scene.kernel.change_link(guard._seal.ifname, addresses=())

    assert [guard.look(), guard.look(), guard.look()] == [False, True, True]

    assert scene.events == ["address-lost"]
    assert "it was put back" in scene.details[0]


def test_a_rule_that_has_gone_at_the_second_look_was_not_put_back_by_sealnet(scene: Scene) -> None:
    """`wg-quick up` bends every route for the moment between two of its rules."""
    guard, before = scene.guard(), scene.kernel.world
    shadow(scene)

    def gone(checks: list[Check]) -> list[Check]:
        scene.kernel.world = before
        return checks

    scene.kernel.lie_on_routes = gone
    guard.look()

    assert scene.events == ["route-changed"]
    assert scene.details[0].endswith("; it has passed by itself")


def test_one_rule_that_bends_every_route_is_one_event(scene: Scene) -> None:
    guard = scene.guard()
    shadow(scene)

    guard.look()

    assert scene.events == ["route-changed"]
    assert "(and 1 more)" in scene.details[0]


def test_a_dead_door_takes_its_lease_with_it(scene: Scene, clock: Clock) -> None:
    guard = scene.guard()

    guard.lost_door(scene.seal.ports)
    guard.renew()
    guard.look()

    assert not scene.kernel.has_lease(scene.seal)
    assert [event["event"] for event in scene.claim.record.events] == ["door-ended"]


def test_the_lease_of_another_port_outlives_a_door(scene: Scene, clock: Clock) -> None:
    guard = scene.guard()

    guard.lost_door([1])
    guard.renew()

    assert scene.kernel.has_lease(scene.seal)
