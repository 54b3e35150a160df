"""A frozen plan says the same in the same bytes, comes back as it went, and holds against whatever differs from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sealnet.errors import UsageError
from sealnet.model import authority
from sealnet.model.authority import Entry
from sealnet.model.lock import MOST_BYTES, SCHEMA, Frozen, freeze, hold, parse
from sealnet.model.plan import Bind
from sealnet.model.policy import Confinement, Target, target
from tests.golden import assert_golden
from tests.model.build import NOBODY, a_plan

PUBLISHED = json.loads((Path(__file__).parents[2] / "docs/plan.schema.json").read_text())
FULL = a_plan(
    run_id="run-7",
    lease_port=8080,
    argv=("sh", "-c", "echo \u00e9 \udcff\n"),
    user=NOBODY,
    environment={"TOKEN": "s3cr3t", "PATH": "/bin"},
    pass_env=("LC_*", "CI"),
    set_env=("TOKEN", "A", "TOKEN"),
    broker_env=("URL",),
    cwd="/srv/work",
    chdir="/srv/work/a",
    binds=(Bind(source="/b", dest="/b", writable=False), Bind(source="/a", dest="/c", writable=True)),
    tmpfs=("/z", "/y"),
    timeout_s=1.5,
    fallback="sever",
    preflight=False,
)


def edited(data: bytes, change: dict[str, Any], *, top: dict[str, Any] | None = None, rehash: bool = True) -> bytes:
    """The file with other fields, and the hash that belongs to them."""
    told = json.loads(data)
    told["plan"] |= change
    if rehash:
        told["sha256"] = hashlib.sha256(json.dumps(told["plan"], sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return json.dumps(told | (top or {})).encode()


def test_a_plan_comes_back_as_it_went() -> None:
    frozen = freeze(FULL)

    assert parse(frozen.render(), "x") == frozen
    assert frozen.render().endswith(b"}\n")
    jsonschema.Draft202012Validator(PUBLISHED).validate(json.loads(frozen.render()))


def test_the_file_is_pinned() -> None:
    """A reviewer's plan of yesterday is the same plan today."""
    assert_golden(Path(__file__).with_name("golden") / "plan.lock.json", freeze(FULL).render().decode())


def test_the_hash_is_of_the_canonical_body() -> None:
    told = json.loads(freeze(FULL).render())

    body = json.dumps(told["plan"], sort_keys=True, separators=(",", ":")).encode()
    assert told["sha256"] == hashlib.sha256(body).hexdigest()


def test_neither_a_value_nor_a_run_id_stands_in_it() -> None:
    data = freeze(FULL).render()

    assert b"TOKEN" in data
    assert b"s3cr3t" not in data
    assert hashlib.sha256(b"s3cr3t").hexdigest().encode() not in data
    assert b"run-7" not in data
    assert freeze(dataclasses.replace(FULL, run_id="run-8", environment={"TOKEN": "other"})).render() == data


def test_declared_hosts_and_the_broker_stand_in_it_as_they_are_asked_for() -> None:
    allow = (Entry("b.test", 443), Entry("a.test", 80), Entry("wiki", 8443, private=True))
    plan = a_plan(confinement=Confinement.ALLOWLIST, allow=allow, broker=Target(path="/run/b.sock"))

    frozen = freeze(plan)

    assert (frozen.allow, frozen.allow_private, frozen.broker) == (("a.test:80", "b.test:443"), ("wiki:8443",), "unix:/run/b.sock")
    assert frozen.allowlist == ["a.test:80", "b.test:443", "wiki:8443"]
    asked = frozen.request()
    assert authority.entries(asked["allow"], asked["allow_private"]) == (allow[1], allow[0], allow[2])
    assert target(asked["broker"]) == plan.broker
    assert parse(frozen.render(), "x") == frozen


@pytest.mark.parametrize("text", ["tcp:127.0.0.1:8080", "tcp:[::1]:8080", "tcp:broker.test:1", "unix:/run/a b:c.sock"])
def test_a_broker_is_written_as_it_is_read(text: str) -> None:
    frozen = freeze(a_plan(confinement=Confinement.SEALED, broker=target(text)))

    assert frozen.broker == text


def test_an_order_that_means_nothing_changes_nothing_and_one_that_does_is_kept() -> None:
    again = freeze(dataclasses.replace(FULL, pass_env=("CI", "LC_*", "CI"), set_env=("A", "TOKEN")))
    swapped = freeze(dataclasses.replace(FULL, binds=FULL.binds[::-1]))

    assert again.render() == freeze(FULL).render()
    assert swapped.sha256 != freeze(FULL).sha256


# What an argv can hold: bytes, as Python decodes them.
WORDS = st.binary().map(lambda word: os.fsdecode(word.replace(b"\0", b"")))


@given(st.lists(WORDS, min_size=1).filter(lambda words: bool(words[0])), st.floats(0.001, 1e9))
@settings(max_examples=50)
def test_any_command_comes_back(argv: list[str], timeout_s: float) -> None:
    frozen = freeze(a_plan(argv=tuple(argv), timeout_s=timeout_s))

    assert parse(frozen.render(), "x") == frozen


def test_how_the_file_is_laid_out_does_not_matter() -> None:
    frozen = freeze(FULL)

    assert parse(json.dumps(json.loads(frozen.render())).encode(), "x") == frozen


PLAN = freeze(FULL).render()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "cannot use plan p: "),
        (b"[]", "it is no plan"),
        (b"[" * 100_000, "cannot use plan p: "),
        (b" " * (MOST_BYTES + 1), "it is longer than"),
        (edited(PLAN, {}, top={"schema": "sealnet.plan/2"}), "its schema is 'sealnet.plan/2'"),
        (edited(PLAN, {}, top={"comment": "x"}), "unknown field 'comment'"),
        (edited(PLAN, {"proxy": "x"}), "unknown field 'proxy' of its plan"),
        (edited(PLAN, {"lease_port": 9090}, rehash=False), "it was changed by hand"),
        (edited(PLAN, {}, top={"sha256": None}), "it was changed by hand"),
        (edited(PLAN, {}, top={"plan": []}), "its plan is no object"),
        (edited(PLAN, {"lease_port": "8080"}), "field 'lease_port' of its plan cannot be \"8080\""),
        (edited(PLAN, {"lease_port": True}), "field 'lease_port'"),
        (edited(PLAN, {"argv": "true"}), "field 'argv'"),
        (edited(PLAN, {"pass_env": ["b", "a"]}), "field 'pass_env'"),
        (edited(PLAN, {"confinement": "tight"}), "field 'confinement'"),
        (edited(PLAN, {"confinement": []}), "field 'confinement'"),
        (edited(PLAN, {"user": {"name": "root", "uid": 0}}), "field 'user'"),
        (edited(PLAN, {"binds": [{"source": "/", "dest": "/x", "writable": 1}]}), "field 'binds'"),
        (edited(PLAN, {"timeout_s": float("nan")}), "NaN is no number of JSON"),
        (edited(PLAN, {"timeout_s": 10**400}), "field 'timeout_s'"),
        (edited(PLAN, {"cwd": "/\0"}), "field 'cwd'"),
        (edited(PLAN, {"bwrap_args": ["\ud800"]}), "field 'bwrap_args'"),
        (edited(PLAN, {"binds": [{"source": "/\ud800", "dest": "/x", "writable": True}]}), "field 'binds'"),
        (PLAN.replace(b'"lease_port"', b'"lease_port": 1, "lease_port"'), "field 'lease_port' stands in it twice"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(data: bytes, words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(data, "p")

    assert words in refused.value.message
    assert refused.value.message.startswith("cannot use plan p: ")


def test_a_field_that_is_missing_is_named() -> None:
    told = json.loads(PLAN)
    del told["plan"]["fallback"]

    with pytest.raises(UsageError, match="its plan has no field 'fallback'"):
        parse(json.dumps(told).encode(), "p")


def test_the_schema_names_every_field_and_this_version() -> None:
    assert set(PUBLISHED["properties"]["plan"]["properties"]) == {one.name for one in dataclasses.fields(Frozen)}
    assert PUBLISHED["$id"] == SCHEMA


# Drift


def test_what_is_the_same_is_no_drift() -> None:
    hold(freeze(FULL), freeze(FULL), path="p", given={"timeout_s", "argv"})


@pytest.mark.parametrize(
    ("changes", "beside", "words"),
    [
        ({"timeout_s": 9.0}, {"timeout_s"}, "cannot use --timeout with --plan p: the plan has 1.5, not 9.0"),
        ({"argv": ("true",)}, {"argv"}, "cannot use COMMAND with --plan p"),
        ({"preflight": True}, {"preflight"}, "cannot use --no-preflight with --plan p"),
        ({"binds": ()}, {"ro_bind"}, "cannot use --bind, --ro-bind with --plan p"),
        ({"set_env": ("B",)}, {"set_env"}, "cannot use --setenv with --plan p"),
        ({"lease_port": None, "confinement": Confinement.SEVERED}, {"lease_port"}, "cannot use --lease-port with --plan p"),
        ({"user": dataclasses.replace(NOBODY, uid=7)}, set(), "cannot use --plan p here: for --user it has"),
        ({"cwd": "/real"}, {"timeout_s"}, 'for the working directory it has "/srv/work", and on this host that is "/real"'),
    ],
)
def test_drift_is_refused_and_named(changes: dict[str, Any], beside: set[str], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        hold(freeze(FULL), freeze(dataclasses.replace(FULL, **changes)), path="p", given=beside)

    assert words in refused.value.message


def test_a_change_of_any_field_is_drift() -> None:
    frozen = freeze(FULL)
    for one in dataclasses.fields(Frozen):
        with pytest.raises(UsageError):
            hold(frozen, dataclasses.replace(frozen, **{one.name: "something else"}), path="p", given=())
