"""A service is what it is, not what it calls itself."""

from __future__ import annotations

import stat
from typing import Any

import pytest

from sealnet.kernel.daemons import Candidate, is_genuine

OURS = 4026531840
GENUINE = Candidate(name="dockerd", pid=7, uid=0, netns=OURS, program="/usr/bin/dockerd", owner=0, mode=stat.S_IFREG | 0o755)


def test_a_service_of_the_system_is_genuine() -> None:
    assert is_genuine(GENUINE, OURS)
    assert is_genuine(GENUINE._replace(uid=998), OURS)
    assert is_genuine(GENUINE._replace(name="systemd-udevd", program="/usr/bin/udevadm"), OURS)


@pytest.mark.parametrize(
    "changed",
    [
        {"uid": 1000},
        {"netns": OURS + 1},
        {"netns": None},
        {"program": "/usr/bin/sleep"},
        {"program": "/usr/bin/udevadm"},
        {"owner": 1000},
        {"mode": stat.S_IFREG | 0o775},
    ],
    ids=["an-ordinary-users", "in-a-container", "gone", "renamed", "another-services", "of-another-owner", "writable-by-others"],
)
def test_what_only_has_the_name_is_not(changed: dict[str, Any]) -> None:
    assert not is_genuine(GENUINE._replace(**changed), OURS)
