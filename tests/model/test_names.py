"""Names: from the run id alone, within the kernel's limits, and never taken for somebody else's."""

from __future__ import annotations

import re
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealnet.errors import UsageError
from sealnet.model import names

FEW = settings(max_examples=25)

run_ids = st.text(alphabet="az09-", min_size=1, max_size=63).filter(lambda text: not text.startswith("-") and not text.endswith("-"))
tags = st.builds("{:x}:{:x}".format, st.integers(0, 1 << 32), st.integers(0, 1 << 64))
# What looks like a run id and is none, beside what is one.
nearly = st.text(alphabet="ab09--_.A/\n é²٣", max_size=66)
anything = st.text(alphabet=st.characters(), max_size=300)


# Run ids


@FEW
@given(run_ids)
def test_what_the_contracts_pattern_matches_is_a_run_id(text: str) -> None:
    assert names.run_id(text) == text


@settings(max_examples=100)
@given(nearly)
def test_nothing_else_is_a_run_id(text: str) -> None:
    allowed = set(string.ascii_lowercase + string.digits + "-")

    assert names.is_run_id(text) == (1 <= len(text) <= 63 and set(text) <= allowed and text[0] != "-" and text[-1] != "-")


@pytest.mark.parametrize("text", ["", "-a", "a-", "A", "a_b", "a.b", "../a", "a/b", "a b", "a\n", "\na", "é", "٣", "a" * 64])
def test_a_bad_run_id_is_a_usage_error_that_shows_it(text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(repr(text))) as caught:
        names.run_id(text)

    assert caught.value.exit_status == 2


@pytest.mark.parametrize("text", ["a", "0", "a" * 63, "a--b", "0-0"])
def test_the_edges_of_the_pattern_are_run_ids(text: str) -> None:
    assert names.run_id(text) == text


# ULIDs


def test_a_made_up_run_id_is_a_ulid() -> None:
    # The time is the example of https://github.com/ulid/spec, 01ARYZ6S41TSV4RRFFQ69G5FAV.
    made = names.ulid(time_ms=1469918176385, random=bytes(10))

    assert made == "01aryz6s41" + "0" * 16
    assert names.ulid(time_ms=(1 << 48) - 1, random=b"\xff" * 10) == "7" + "z" * 25


@FEW
@given(*[st.tuples(st.integers(0, (1 << 48) - 1), st.binary(min_size=10, max_size=10))] * 2)
def test_run_ids_sort_by_time_and_then_by_their_random_part(one: tuple[int, bytes], other: tuple[int, bytes]) -> None:
    first, second = (names.ulid(time_ms=time_ms, random=random) for time_ms, random in (one, other))

    assert (first < second) == (one < other)
    assert len(first) == 26
    assert names.is_run_id(first)


# Links


@FEW
@given(run_ids)
def test_names_are_within_the_kernels_limits_and_lead_back_to_their_run(run_id: str) -> None:
    # IFNAMSIZ is 16 with the NUL, ALTIFNAMSIZ 128.
    assert re.fullmatch(r"seal[a-z2-7]{11}", names.ifname(run_id))
    assert len(names.netns(run_id)) < 128
    assert names.run_of_netns(names.netns(run_id)) == run_id


def test_no_two_runs_of_a_sample_share_a_link_or_mac() -> None:
    sample = [f"run-{n}" for n in range(2000)]

    assert len({names.ifname(run_id) for run_id in sample}) == len(sample)
    assert len({names.mac(run_id, end=end) for run_id in sample for end in (0, 1)}) == 2 * len(sample)


def test_the_names_of_a_run_never_change() -> None:
    """A newer sealnet must find what an older one has left."""
    assert names.ifname("run-1") == "sealjzs5h67ivvs"
    assert names.netns("run-1") == "sealnet-run-1"
    assert names.mac("run-1", end=0) == "22:28:b1:28:67:87"
    assert names.mac("run-1", end=1) == "6e:51:7a:0a:ed:cf"
    assert names.mark("run-1", "fd01:2a") == "sealnet run-1 fd01:2a"
    assert names.link_alias("run-1", "fd01:2a", "nobody: true") == "sealnet run-1 fd01:2a nobody: true"


def test_a_mac_is_locally_administered_and_unicast() -> None:
    for mac in (names.mac(f"run-{n}", end=end) for n in range(100) for end in (0, 1)):
        assert re.fullmatch(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", mac)
        assert int(mac[:2], 16) & 0b11 == 0b10


# Marks


@pytest.mark.parametrize("name", ["", "sealnet", "sealnet-", "sealnet--a", "sealnet-A", "sealnet-a/b", "run-1", "Sealnet-run-1", "lan"])
def test_a_strangers_netns_leads_to_no_run(name: str) -> None:
    assert names.run_of_netns(name) is None


@FEW
@given(run_ids, tags, anything)
def test_an_alias_fits_is_printable_and_leads_back_to_its_run_whatever_the_command(run_id: str, tag: str, told: str) -> None:
    alias = names.link_alias(run_id, tag, told)

    # IFALIASZ is 256 with the NUL.
    assert len(alias.encode()) <= 255
    assert alias.isascii()
    assert alias.isprintable()
    assert names.run_of_alias(alias, tag) == run_id
    assert names.run_of_alias(alias, tag + "0") is None


def test_a_mark_leads_back_to_its_run_in_its_own_state_directory_alone() -> None:
    assert names.run_of_alias(names.mark("run-1", "fd01:2a"), "fd01:2a") == "run-1"
    assert names.run_of_alias(names.mark("run-1", "fd01:2a"), "fd01:2b") is None


@pytest.mark.parametrize(
    "alias", ["", "sealnet", "sealnet run-1", "sealnet Run-1 0:0", "Sealnet run-1 0:0", " sealnet run-1 0:0", "uplink"]
)
def test_a_strangers_alias_leads_to_no_run(alias: str) -> None:
    assert names.run_of_alias(alias, "0:0") is None


@pytest.mark.parametrize("text", ["", ".", "..", "../subnets", "a/b", "A", "-a", "a" * 64, "a\n", b"a", None, 7])
def test_what_is_no_run_id_is_refused_wherever_a_run_is_named(text: Any) -> None:
    for check in (names.run_id, names.known_run_id):
        with pytest.raises(UsageError, match="cannot use run id"):
            check(text)
