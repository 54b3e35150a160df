"""TCP sockets of the calling thread's namespace by sock_diag(7): who listens on a port, who is connected with a sandbox, and its end."""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from sealnet.errors import KernelRefused
from sealnet.kernel import netlink

_NETLINK_SOCK_DIAG, _OF_BOTH, _BY_FAMILY, _DESTROY = 4, 18, 20, 21
_AF_INET, _AF_INET6, _TCP = 2, 10, 6
_LISTEN, _CLOSE_WAIT = 10, 8
# INET_DIAG_REQ_BYTECODE; INET_DIAG_BC_JMP, INET_DIAG_BC_D_COND (linux/inet_diag.h).
_BYTECODE, _JUMP, _DST = 1, 1, 8
# Every state in which the other end may still believe that the connection lives: not LISTEN, TIME_WAIT, CLOSE, and not CLOSE_WAIT,
# LAST_ACK and CLOSING, which have seen its FIN and may still hold data that nobody has read.
_LIVE = sum(1 << state for state in (1, 2, 3, 4, 5, 12))


class Listener(NamedTuple):
    """A listening TCP socket; `uid` is its owner's."""

    address: IPv4Address | IPv6Address
    uid: int


def _dump_family(family: int, states: int, filters: bytes, port: int) -> list[bytes]:
    # struct inet_diag_req_v2: family, protocol, ext, pad, states, then inet_diag_sockid (ports, addresses, interface, cookie).
    body = struct.pack("=BBBBI", family, _TCP, 0, 0, states) + struct.pack("!HH", port, 0) + bytes(36) + b"\xff" * 8
    with netlink.Netlink(_NETLINK_SOCK_DIAG) as nl:
        try:
            datagrams = nl.dump(netlink.Message(_BY_FAMILY, 0, body + filters, "list TCP sockets"))
        except KernelRefused as error:
            # A kernel without IPv6.
            if family == _AF_INET6 and error.errno == errno.ENOENT:
                return []
            raise
    found = [reply for datagram in datagrams for kind, _flags, _sequence, reply in netlink.messages(datagram) if kind == _BY_FAMILY]
    return [reply for reply in found if len(reply) >= 72]


def listeners(port: int) -> list[Listener]:
    """Every socket that listens on TCP `port`, IPv4 and IPv6."""
    found = []
    for family, size in ((_AF_INET, 4), (_AF_INET6, 16)):
        for body in _dump_family(family, 1 << _LISTEN, b"", port):
            if struct.unpack_from("!H", body, 4)[0] == port:
                found.append(Listener(ip_address(body[8 : 8 + size]), struct.unpack_from("=I", body, 64)[0]))
    return found


def owner(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    """The uid of whose socket at `local` is connected with `remote`, here; None where there is none, or none that anybody holds open.

    Raises KernelRefused: it cannot be told.
    """
    source, target = ip_address(local[0]), ip_address(remote[0])
    family = _AF_INET if source.version == 4 else _AF_INET6
    ports = struct.pack("!HH", local[1], remote[1])
    addresses = source.packed.ljust(16, b"\0") + target.packed.ljust(16, b"\0")
    # inet_diag_sockid: the cookie of ones is INET_DIAG_NOCOOKIE.
    request = struct.pack("=BBBBI", family, _TCP, 0, 0, 0xFFFF_FFFF) + ports + addresses + bytes(4) + b"\xff" * 8
    with netlink.Netlink(_NETLINK_SOCK_DIAG) as nl:
        try:
            replies = nl.exchange([netlink.Message(_BY_FAMILY, 0, request, "look for a TCP socket")])
        except KernelRefused as error:
            if error.errno == errno.ENOENT:
                return None
            raise
    for _kind, body in replies:
        # One without an inode has no file any more, and its uid would be root's.
        if len(body) >= 72 and body[4:8] == ports and body[1] != _LISTEN and struct.unpack_from("=I", body, 68)[0]:
            return int(struct.unpack_from("=I", body, 64)[0])
    return None


def _connected(addresses: Sequence[IPv4Address]) -> list[bytes]:
    # struct inet_diag_bc_op{code, yes, no} and inet_diag_hostcond{family, prefix_len, pad, port, addr}: destination is one of `addresses`.
    # Whatever jumps to the end is told of, and what jumps 4 bytes beyond it is not. A `yes` is one byte, so it jumps to a jump.
    code = b""
    for address in reversed(addresses):
        condition = struct.pack("=BBHi", _AF_INET, 32, 0, -1) + address.packed
        length = 4 + len(condition)
        jump = struct.pack("=BBH", _JUMP, 4, 4 + len(code)) if code else b""
        code = struct.pack("=BBH", _DST, length, length + 4) + condition + jump + code
    filters = netlink.attribute(_BYTECODE, code)
    # For IPv6 sockets the kernel compares an IPv4 condition with the mapped address (inet_diag_bc_run).
    try:
        return _dump_both(filters)
    except KernelRefused as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT, errno.EOPNOTSUPP):
            raise
    return [body for family in (_AF_INET, _AF_INET6) for body in _dump_family(family, _LIVE, filters, 0)]


def _dump_both(filters: bytes) -> list[bytes]:
    """The live sockets of both families, by the request of before sock_diag: the only one that goes through the kernel's table once for
    both (1 ms where that has a quarter of a million places).
    """
    # struct inet_diag_req: family, lengths, ext, then inet_diag_sockid, states, dbs. The family is not looked at (inet_diag_dump_compat()).
    body = bytes(4) + bytes(40) + b"\xff" * 8 + struct.pack("=II", _LIVE, 0)
    with netlink.Netlink(_NETLINK_SOCK_DIAG) as nl:
        datagrams = nl.dump(netlink.Message(_OF_BOTH, 0, body + filters, "list TCP sockets"))
    return [reply for datagram in datagrams for kind, _flags, _sequence, reply in netlink.messages(datagram) if kind == _OF_BOTH]


def connected(addresses: Sequence[IPv4Address]) -> list[IPv4Address]:
    """Those with which a socket here still believes in a connection. All are asked for in one: the kernel looks through its whole table."""
    # struct inet_diag_msg: family, state, timer, retransmissions, then inet_diag_sockid; a mapped address is the last 4 of 16 bytes.
    found = {body[24:28] if body[0] == _AF_INET else body[36:40] for body in _connected(addresses)}
    return [address for address in addresses if address.packed in found]


def destroy(address: IPv4Address) -> int:
    """End those sockets (`ss -K dst ADDRESS`); their owners see ECONNABORTED. How many there were.

    A kernel without CONFIG_INET_DIAG_DESTROY answers EOPNOTSUPP: then the owner learns of it when it next sends.
    """
    bodies = _connected([address])
    with netlink.Netlink(_NETLINK_SOCK_DIAG) as nl:
        for body in bodies:
            request = struct.pack("=BBBBI", body[0], _TCP, 0, 0, _LIVE) + body[4:52]
            try:
                nl.exchange([netlink.Message(_DESTROY, 0, request, f"end a connection with {address}")])
            except KernelRefused as error:
                if error.errno not in (errno.ENOENT, errno.EOPNOTSUPP):
                    raise
    return len(bodies)
