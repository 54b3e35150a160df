"""What one packet over lo costs: sent and received by one thread, so that no scheduler has a hand in it."""

from __future__ import annotations

import socket
import time

from scripts.benchmarks.figures import median
from sealnet.kernel import links
from sealnet.kernel.netlink import Netlink


class Packets:
    """A UDP socket connected to itself, in the network namespace of the thread that makes it."""

    def __init__(self) -> None:
        with Netlink() as netlink:
            netlink.exchange([links.bring_up(links.LOOPBACK_INDEX)])
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.connect(self._socket.getsockname())

    def measure(self, count: int = 200, batches: int = 11) -> float:
        """Microseconds for a packet, with the two system calls that it takes: the median of batches, for some are preempted."""
        return median([self._batch(count) for _ in range(batches)])

    def _batch(self, count: int) -> float:
        send, receive = self._socket.send, self._socket.recv
        began = time.perf_counter()
        for _ in range(count):
            send(b"x")
            receive(1)
        return (time.perf_counter() - began) / count * 1e6
