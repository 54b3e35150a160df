"""/etc/sealnet/config.toml as a value; an unknown key is an error, so that a misspelt one is never ignored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Network

from sealnet.errors import UsageError
from sealnet.model import endpoint, plan
from sealnet.model.endpoint import Endpoint
from sealnet.model.subnets import DEFAULT_POOL, parse_pool

PATH = "/etc/sealnet/config.toml"
# (key, field, least, most)
_NUMBERS = (
    ("lease_ttl", "lease_ttl_s", 10, 86400),
    ("max_runs", "max_runs", 1, 65536),
    ("max_runs_per_user", "max_runs_per_user", 1, 65536),
    ("launch_rate", "launch_rate", 1, 10_000),
)
_KEYS = ("pool", "lease_ttl", "max_runs", "group", "door_ports", "door_user", "max_runs_per_user", "launch_rate", "metrics")
# Nobody's (IANA has not assigned them), and below the ports that the kernel gives to clients (from 32768) and Kubernetes to nodes (30000).
DOOR_PORTS = (29400, 29407)
# Nobody's: it owns no file and no other process.
DOOR_USER = "65533"
_RANGE = re.compile(r"([1-9][0-9]{0,4})-([1-9][0-9]{0,4})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """`pool`: where subnets come from. `lease_ttl_s`: how long a lease lives without its supervisor. `group`: who may use the worker.

    `max_runs_per_user`, and `launch_rate` (a second, ten times as many at once): what one user but root may have of the worker.
    `door_ports`: the first and the last of those at which doors listen. `door_user`: whom they run as, by name or uid.
    `metrics`: where the worker tells its own; None: nowhere.
    """

    pool: tuple[IPv4Network, ...] = DEFAULT_POOL
    lease_ttl_s: int = plan.LEASE_TTL_S
    max_runs: int = plan.MAX_RUNS
    group: str = "sealnet"
    max_runs_per_user: int = 256
    launch_rate: int = 50
    door_ports: tuple[int, int] = DOOR_PORTS
    door_user: str = DOOR_USER
    metrics: Endpoint | None = None

    @property
    def refresh_s(self) -> float:
        """A lease is renewed three times in its life."""
        return self.lease_ttl_s / 3


def parse(text: str, path: str = PATH) -> Config:
    """Raises UsageError naming the file and the key."""
    # Most hosts have no file, and then a run need not wait for the parser.
    import tomllib

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise UsageError(f"cannot read {path}: {e}") from e
    for key in data:
        if key not in _KEYS:
            raise UsageError(f"cannot use key {key!r} in {path}: it is not one of {', '.join(_KEYS)}")
    given: dict[str, object] = {}
    if "pool" in data:
        if not isinstance(data["pool"], list):
            raise UsageError(f"cannot use pool in {path}: it must be a list of prefixes", hint='for example pool = ["198.18.0.0/15"]')
        try:
            given["pool"] = parse_pool(data["pool"])
        except UsageError as e:
            raise UsageError(f"{e.message} ({path})", hint=e.hint) from e
    for key, name, low, high in _NUMBERS:
        if key in data:
            value = data[key]
            if type(value) is not int or not low <= value <= high:
                raise UsageError(f"cannot use {key} = {value!r} in {path}: it must be a whole number from {low} to {high}")
            given[name] = value
    if "group" in data:
        if not isinstance(data["group"], str) or not data["group"]:
            raise UsageError(f"cannot use group = {data['group']!r} in {path}: it must be the name of a group")
        given["group"] = data["group"]
    if "door_ports" in data:
        given["door_ports"] = _door_ports(data["door_ports"], path)
    if "door_user" in data:
        # Whether there is such a user, and may be one of doors, is asked when one starts.
        if type(data["door_user"]) not in (int, str) or not re.fullmatch(r"[\w][\w.-]*\$?", str(data["door_user"]), re.ASCII):
            raise UsageError(f"cannot use door_user = {data['door_user']!r} in {path}: it must be a uid or the name of an account")
        given["door_user"] = str(data["door_user"])
    if "metrics" in data:
        if not isinstance(data["metrics"], str):
            raise UsageError(f"cannot use metrics = {data['metrics']!r} in {path}: it must be a text", hint='for example "127.0.0.1:9464"')
        given["metrics"] = endpoint.parse(data["metrics"], f"metrics in {path}:") if data["metrics"] else None
    return Config(**given)  # type: ignore[arg-type]


def _door_ports(value: object, path: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(value) if isinstance(value, str) else None
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    # A run may have a relay and a proxy.
    if not 0 < low < high <= 65535:
        raise UsageError(
            f"cannot use door_ports = {value!r} in {path}: it must be a range of two ports or more",
            hint='for example door_ports = "{}-{}"'.format(*DOOR_PORTS),
        )
    return low, high
