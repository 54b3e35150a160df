"""What is installed beside a host's network managers, word by word."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from sealnet.errors import UsageError
from sealnet.model import manners
from tests.golden import assert_golden

GOLDEN = Path(__file__).with_name("golden")
ALL = [file for manager in manners.MANAGERS for file in manners.files(manager, [8080, 53, 8080], (29400, 29407))]


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.path)
def test_each_file_is_pinned_and_known_as_sealnets(file: manners.File) -> None:
    assert_golden(GOLDEN / f"manners-{Path(file.path).name}", file.text)
    assert manners.is_own(file.text)


def test_every_path_of_a_manager_has_its_file() -> None:
    assert [file.path for file in ALL] == [path for manager in manners.MANAGERS for path in manager.paths]


def test_the_zone_lets_in_the_ports_it_is_given_and_refuses_the_rest() -> None:
    zone = ElementTree.fromstring(manners.render_zone([8080, 53], (29400, 29407)))

    assert zone.attrib == {"target": "%%REJECT%%"}
    assert [(one.tag, dict(one.attrib)) for one in zone if one.tag not in ("short", "description")] == [
        ("interface", {"name": "seal+"}),
        ("port", {"port": "53", "protocol": "tcp"}),
        ("port", {"port": "8080", "protocol": "tcp"}),
        ("port", {"port": "29400-29407", "protocol": "tcp"}),
    ]
    assert manners.ports_of(manners.render_zone([8080, 53], (29400, 29407))) == [53, 8080]


@pytest.mark.parametrize("text", ["", "[Match]\nName=seal*\n", f"\n\n\n# {manners.MARKER}\n"])
def test_a_file_without_the_mark_at_its_top_is_somebody_elses(text: str) -> None:
    assert not manners.is_own(text)


def test_a_refusal_names_every_file() -> None:
    manners.refuse_foreign([])
    with pytest.raises(UsageError, match=r"cannot install /a, /b: a file of that name is there"):
        manners.refuse_foreign(["/a", "/b"])
