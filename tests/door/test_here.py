"""What the host itself says of an address, where it does not say a route."""

from __future__ import annotations

import errno
import struct
from ipaddress import ip_address

import pytest

from sealnet.door.here import Here


class _Kernel:
    """Answers each request with an error."""

    def __init__(self, code: int) -> None:
        self._code = code
        self._sequence = 0

    def send(self, request: bytes) -> None:
        self._sequence = struct.unpack_from("=I", request, 8)[0]

    def recv(self, _size: int) -> bytes:
        return struct.pack("=IHHIIi", 36, 2, 0, self._sequence, 0, -self._code) + bytes(16)


@pytest.mark.parametrize("code", [errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EINVAL, errno.EACCES, errno.ENOBUFS, errno.ENOMEM])
def test_an_address_of_which_the_kernel_could_not_tell_is_refused(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No route fails by itself. A lookup that failed says nothing of whose the address is."""
    here = Here()
    monkeypatch.setattr(here, "_socket", _Kernel(code))

    assert here.refusal(ip_address("192.0.2.1")) == ("unreachable" if code in (errno.ENOBUFS, errno.ENOMEM) else None)
