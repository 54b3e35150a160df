"""The confinement that a request means, and the requests that contradict themselves."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from sealnet.errors import UsageError
from sealnet.model import policy
from sealnet.model.policy import Confinement, target

HOSTS = ("pypi.org",)


@pytest.mark.parametrize(
    ("request_", "confinement"),
    [
        ({}, "severed"),
        ({"network": "severed"}, "severed"),
        ({"lease_port": 8080}, "sealed"),
        ({"lease_port": 8080, "network": "sealed"}, "sealed"),
        ({"lease_port": 8080, "broker_env": ["OPENAI_BASE_URL"]}, "sealed"),
        ({"broker": "unix:/run/broker"}, "sealed"),
        ({"broker": "tcp:127.0.0.1:9", "broker_env": ["OPENAI_BASE_URL"]}, "sealed"),
        ({"allow": HOSTS}, "allowlist"),
        ({"allow": HOSTS, "network": "allowlist"}, "allowlist"),
        ({"allow": HOSTS, "lease_port": 8080}, "allowlist"),
        ({"allow": iter(HOSTS), "broker": "tcp:127.0.0.1:9"}, "allowlist"),
        ({"network": "open", "allow_unenforced_egress": True}, "open"),
    ],
)
def test_the_options_of_a_request_say_how_confined_it_is(request_: dict[str, Any], confinement: str) -> None:
    assert policy.derive(**request_) is Confinement(confinement)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"lease_port": 8080, "broker": "tcp:127.0.0.1:9"}, "cannot use --lease-port with --broker"),
        ({"network": "severed", "allow": HOSTS}, "cannot use --network severed here: the other options make the run allowlist"),
        ({"network": "severed", "lease_port": 8080}, "cannot use --network severed here: the other options make the run sealed"),
        ({"network": "sealed"}, "a sealed run has a broker"),
        ({"network": "sealed", "lease_port": 8080, "allow": HOSTS}, "a sealed run has a broker (--lease-port PORT) and no --allow"),
        ({"network": "allowlist"}, "an allowlist run needs at least one --allow HOST"),
        ({"network": "allowlist", "lease_port": 8080}, "an allowlist run needs at least one --allow HOST"),
        ({"network": "open"}, "cannot use --network open: it enforces nothing"),
        ({"network": "open", "lease_port": 8080, "allow_unenforced_egress": True}, "cannot use --network open with a broker or --allow"),
        ({"network": "open", "allow": HOSTS, "allow_unenforced_egress": True}, "cannot use --network open with a broker or --allow"),
        ({"network": "open", "broker_env": ["X"], "allow_unenforced_egress": True}, "cannot use --broker-env: the run has no broker"),
        ({"allow_unenforced_egress": True}, "cannot use --allow-unenforced-egress alone"),
        ({"allow_unenforced_egress": True, "lease_port": 8080}, "cannot use --allow-unenforced-egress alone"),
        ({"allow_unenforced_egress": True, "network": "severed"}, "cannot use --allow-unenforced-egress with --network severed"),
        ({"network": "none"}, "cannot use --network none: it is not one of severed, sealed, allowlist, open"),
        ({"network": "SEVERED"}, "cannot use --network SEVERED"),
        ({"network": ""}, "cannot use --network "),
        ({"broker_env": ["OPENAI_BASE_URL"]}, "cannot use --broker-env: the run has no broker"),
        ({"broker_env": ["OPENAI_BASE_URL"], "allow": HOSTS}, "cannot use --broker-env: the run has no broker"),
    ],
)
def test_a_contradiction_is_a_usage_error(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        policy.derive(**request_)


def test_no_request_is_open_without_both_words_for_it() -> None:
    options = {
        "network": (None, *Confinement),
        "lease_port": (None, 8080),
        "broker": (None, "tcp:127.0.0.1:9"),
        "allow": ((), HOSTS),
        "allow_unenforced_egress": (False, True),
    }
    opened = []

    for values in itertools.product(*options.values()):
        request_ = dict(zip(options, values, strict=True))
        try:
            if policy.derive(**request_) is Confinement.OPEN:
                opened.append(request_)
        except UsageError:
            continue

    assert opened == [{"network": "open", "lease_port": None, "broker": None, "allow": (), "allow_unenforced_egress": True}]


@pytest.mark.parametrize(
    ("members", "least"),
    [
        ((), "severed"),
        (("severed",), "severed"),
        (("severed", "sealed"), "sealed"),
        (("allowlist", "sealed", "severed"), "allowlist"),
        (("sealed", "open", "severed"), "open"),
    ],
)
def test_a_set_of_runs_is_as_confined_as_its_least_confined_member(members: tuple[str, ...], least: str) -> None:
    assert policy.least_confined(map(Confinement, members)) is Confinement(least)


@pytest.mark.parametrize("value", [1, 80, 65535])
def test_a_tcp_port_is_1_to_65535(value: int) -> None:
    assert policy.port(value, "--lease-port") == value


@pytest.mark.parametrize("value", [-1, 0, 65536, 1 << 40])
def test_what_is_no_port_is_a_usage_error_that_names_the_option(value: int) -> None:
    with pytest.raises(UsageError, match=f"cannot use --lease-port {value}: a TCP port is 1 to 65535"):
        policy.port(value, "--lease-port")


@pytest.mark.parametrize("number", ["", "+1", "1.5", "\u0663", "9" * 6, "9" * 5000])
def test_the_port_of_a_broker_is_a_short_number(number: str) -> None:
    with pytest.raises(UsageError, match="neither tcp:HOST:PORT nor"):
        target(f"tcp:127.0.0.1:{number}")
    assert target("tcp:127.0.0.1:65535").port == 65535
