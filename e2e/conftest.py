"""The same throw-away host, and the same cgroup of their own, for the end-to-end tests."""

from tests.conftest import _own_cgroup, host

__all__ = ["_own_cgroup", "host"]
