"""/etc/sealnet/config.toml: defaults, every key, and every mistake named."""

from __future__ import annotations

import re
from ipaddress import IPv4Network

import pytest

from sealnet.errors import UsageError
from sealnet.model.config import Config, parse
from sealnet.model.subnets import DEFAULT_POOL


@pytest.mark.parametrize("text", ["", "\n# nothing\n"])
def test_an_empty_file_is_the_defaults(text: str) -> None:
    assert parse(text) == Config()
    assert Config() == Config(
        pool=DEFAULT_POOL, lease_ttl_s=90, max_runs=4096, group="sealnet", door_ports=(29400, 29407), door_user="65533"
    )


def test_every_key_is_read() -> None:
    config = parse(
        'pool = ["172.16.0.0/12", "10.9.0.0/30"]\nlease_ttl = 30\nmax_runs = 7\ngroup = "agents"\n'
        'door_ports = "5000-5001"\ndoor_user = "sealnet-door"\nmax_runs_per_user = 3\nlaunch_rate = 4\n'
    )

    assert config == Config(
        pool=(IPv4Network("172.16.0.0/12"), IPv4Network("10.9.0.0/30")),
        lease_ttl_s=30,
        max_runs=7,
        group="agents",
        door_ports=(5000, 5001),
        door_user="sealnet-door",
        max_runs_per_user=3,
        launch_rate=4,
    )
    assert parse("door_user = 990").door_user == "990"


def test_a_lease_is_renewed_three_times_in_its_life() -> None:
    assert parse("lease_ttl = 30").refresh_s == 10.0


@pytest.mark.parametrize("text", ["lease_ttl = 10", "lease_ttl = 86400", "max_runs = 1", "max_runs = 65536"])
def test_the_edges_of_a_range_are_in_it(text: str) -> None:
    key, _, value = text.partition(" = ")

    assert getattr(parse(text), key.replace("ttl", "ttl_s")) == int(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pools = []", "cannot use key 'pools' in /x.toml: it is not one of pool, lease_ttl, max_runs, group, door_ports, door_user"),
        ("[pool]\na = 1", "cannot use pool in /x.toml: it must be a list of prefixes"),
        ('pool = "10.0.0.0/8"', "cannot use pool in /x.toml: it must be a list of prefixes"),
        ("lease_ttl = 9", "cannot use lease_ttl = 9 in /x.toml: it must be a whole number from 10 to 86400"),
        ("lease_ttl = 86401", "cannot use lease_ttl = 86401 in /x.toml"),
        ("lease_ttl = 90.0", "cannot use lease_ttl = 90.0 in /x.toml"),
        ("lease_ttl = true", "cannot use lease_ttl = True in /x.toml"),
        ('lease_ttl = "90"', "cannot use lease_ttl = '90' in /x.toml"),
        ("max_runs = 0", "cannot use max_runs = 0 in /x.toml: it must be a whole number from 1 to 65536"),
        ("max_runs = 65537", "cannot use max_runs = 65537 in /x.toml"),
        ("max_runs_per_user = 0", "cannot use max_runs_per_user = 0 in /x.toml: it must be a whole number from 1 to 65536"),
        ("launch_rate = 10001", "cannot use launch_rate = 10001 in /x.toml: it must be a whole number from 1 to 10000"),
        ('group = ""', "cannot use group = '' in /x.toml: it must be the name of a group"),
        ("group = 7", "cannot use group = 7 in /x.toml: it must be the name of a group"),
        *(
            (f"door_ports = {value}", f"cannot use door_ports = {shown} in /x.toml: it must be a range of two ports or more")
            for value, shown in (
                ("29400", "29400"),
                *((f'"{text}"', f"'{text}'") for text in ("", "1", "0-5", "5-4", "5-5", "1-65536", "1-2-3", "1 - 2", "+1-2", "01-2")),
            )
        ),
        *(
            (f"door_user = {value}", f"cannot use door_user = {shown} in /x.toml: it must be a uid or the name of an account")
            for value, shown in (("-1", "-1"), ("true", "True"), ("1.5", "1.5"), ('""', "''"), ('"a b"', "'a b'"), ('"-x"', "'-x'"))
        ),
        ("lease_ttl = ", "cannot read /x.toml: Invalid value"),
        ("lease_ttl = 30\nlease_ttl = 30", "cannot read /x.toml: Cannot overwrite a value"),
        ("pool = []", "/x.toml"),
        ('pool = ["10.0.0.0/31"]', "/x.toml"),
        ("pool = [7]", "/x.toml"),
    ],
)
def test_a_mistake_is_a_usage_error_that_names_the_file(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        parse(text, "/x.toml")
