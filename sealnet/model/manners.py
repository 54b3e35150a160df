"""What is installed beside a host's network managers so that they leave sealnet's links alone: each file as text, and whose it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from sealnet.errors import UsageError
from sealnet.model import names

MARKER = "Installed by `sealnet host install`; `sealnet host remove` takes it away."
_LINKS = f"{names.LINK_PREFIX}*"


class File(NamedTuple):
    """`path` is absolute, on the host that it is for."""

    path: str
    text: str


class Manager(NamedTuple):
    """A program that configures links. It is on a host that has one of `programs`; `alive` succeeds when it runs."""

    name: str
    programs: tuple[str, ...]
    paths: tuple[str, ...]
    alive: tuple[str, ...]
    reload: tuple[str, ...]


# The first file that matches a link is the one that counts, for .network and .link alike: hence 00.
_NETWORK = "/etc/systemd/network/00-sealnet.network"
_LINK = "/etc/systemd/network/00-sealnet.link"
# The last one counts: `unmanaged-devices=` in a later file would take back what an earlier one added.
_NETWORK_MANAGER = "/etc/NetworkManager/conf.d/99-sealnet.conf"
# Behind 99-systemd.rules, whose RUN it replaces.
_UDEV = "/etc/udev/rules.d/99-zz-sealnet.rules"
_FIREWALLD = "/etc/firewalld/zones/sealnet.xml"

MANAGERS = (
    Manager(
        "systemd-networkd",
        ("/usr/lib/systemd/systemd-networkd", "/lib/systemd/systemd-networkd"),
        (_NETWORK,),
        ("systemctl", "is-active", "--quiet", "systemd-networkd.service"),
        ("networkctl", "reload"),
    ),
    Manager(
        "NetworkManager",
        ("/usr/sbin/NetworkManager", "/usr/bin/NetworkManager"),
        (_NETWORK_MANAGER,),
        ("nmcli", "general", "status"),
        ("nmcli", "general", "reload", "conf"),
    ),
    Manager(
        "udev",
        ("/usr/bin/udevadm", "/bin/udevadm", "/sbin/udevadm"),
        (_LINK, _UDEV),
        ("udevadm", "control", "--ping"),
        ("udevadm", "control", "--reload"),
    ),
    Manager(
        "firewalld",
        ("/usr/sbin/firewalld", "/usr/bin/firewalld"),
        (_FIREWALLD,),
        ("firewall-cmd", "--state"),
        ("firewall-cmd", "--reload"),
    ),
)

_TEXTS = {
    # networkd.conf(5) ManageForeignRoutes= and ManageForeignRoutingPolicyRules= are for the whole host, and not ours to set.
    _NETWORK: f"""# {MARKER}
[Match]
Name={_LINKS}

[Link]
Unmanaged=yes
""",
    # A link's name and address are derived from its run id, and teardown knows it by them (systemd.link(5)).
    _LINK: f"""# {MARKER}
[Match]
OriginalName={_LINKS}

[Link]
NamePolicy=keep
AlternativeNamesPolicy=
MACAddressPolicy=none
""",
    _NETWORK_MANAGER: f"""# {MARKER}
[keyfile]
unmanaged-devices+=interface-name:{_LINKS}

[device-sealnet]
match-device=interface-name:{_LINKS}
managed=0
""",
    # RUN:= throws away what other rules would run for the link: systemd-sysctl, which writes sysctl.d's settings over the link's own,
    # ifupdown, and the like. It cannot be emptied (udev refuses an empty command). SYSTEMD_READY=0: no .device unit for each run.
    _UDEV: f"""# {MARKER}
SUBSYSTEM=="net", KERNEL=="{_LINKS}", ENV{{NM_UNMANAGED}}="1", ENV{{SYSTEMD_READY}}="0", RUN:="/bin/true"
""",
}


def files(manager: Manager, ports: Sequence[int], doors: tuple[int, int]) -> tuple[File, ...]:
    """What is installed for a manager; `ports` are those of leases, `doors` the first and the last of those of doors."""
    if manager.name == "firewalld":
        return (File(_FIREWALLD, render_zone(ports, doors)),)
    return tuple(File(path, _TEXTS[path]) for path in manager.paths)


def render_zone(ports: Sequence[int], doors: tuple[int, int]) -> str:
    """firewalld's zone for the links: the ports of leases and doors, and nothing else (firewalld.zone(5)).

    Its target is a refusal: should the gate be lost, this zone alone lets in no more than was named here.
    """
    named = [*map(str, sorted(set(ports))), "{}-{}".format(*doors)]
    told = "".join(f'  <port port="{port}" protocol="tcp"/>\n' for port in named)
    return f"""<?xml version="1.0" encoding="utf-8"?>
<!-- {MARKER} -->
<zone target="%%REJECT%%">
  <short>sealnet</short>
  <description>Links of sealed runs. Leases and doors are let in; which run may use one is decided by table inet sealnet.</description>
  <interface name="{names.LINK_PREFIX}+"/>
{told}</zone>
"""


def ports_of(zone: str) -> list[int]:
    """The ports of leases that a zone of `render_zone` lets in; a range is that of doors."""
    return [int(port) for port in re.findall(r'<port port="(\d+)" protocol="tcp"/>', zone)]


def is_own(text: str) -> bool:
    """Whether a file was installed by sealnet: it says so in one of its first two lines."""
    return any(MARKER in line for line in text.splitlines()[:2])


def refuse_foreign(paths: Sequence[str]) -> None:
    """Refuse to write over what somebody else has put there."""
    if paths:
        raise UsageError(
            f"cannot install {', '.join(paths)}: a file of that name is there, and sealnet did not write it",
            hint=f"look at it, then move it away: mv {paths[0]} {paths[0]}.old",
        )
