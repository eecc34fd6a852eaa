"""A long link without netem: two tun devices, and a process that holds every packet for a while.

    machine ─ tun ─► read ─► wait its turn (rate) ─► wait (delay) ─► write ─► tun ─ machine        both directions alike

The devices take whole segments of up to 64 KiB (with the kernel's own header that says how to cut them), so that a
gigabit per second is two thousand packets, which Python can carry. A packet that would wait for its turn for longer
than the queue allows is dropped, as on a real link, so that TCP finds the rate by itself.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cast_parts.namespaces import Network

TUNSETIFF, TUNSETOFFLOAD, TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
HEADER_BYTES = 10
PACKET_BYTES = 65536 + HEADER_BYTES
QUEUE_S = 0.1
QUEUE_PACKETS = 20_000


class Delay:
    """Holds the links' processes; a context manager that ends them."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Delay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
            process.wait()

    def link(
        self, network: Network, one: tuple[str, str], other: tuple[str, str], mbit: float, delay_ms: float
    ) -> None:
        """A link between two (machine, address)."""
        descriptors = [self._device(network, *one, other[1]), self._device(network, *other, one[1])]
        command = [sys.executable, __file__, *map(str, descriptors), str(mbit), str(delay_ms)]
        self._processes.append(subprocess.Popen(command, pass_fds=descriptors))
        for descriptor in descriptors:
            os.close(descriptor)

    def _device(self, network: Network, machine: str, address: str, peer: str) -> int:
        """A tun device inside a machine; its descriptor works from anywhere."""
        made: list[int] = []
        name = f"far{peer.split('.')[-2]}"

        def make() -> None:
            network.enter(machine)
            made.append(open_tun(name))

        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        network.run(machine, f"addr add {address} peer {peer} dev {name}")
        network.run(machine, f"link set {name} up txqueuelen 1000")
        return made[0]


def open_tun(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(descriptor, TUNSETVNETHDRSZ, struct.pack("i", HEADER_BYTES))
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return descriptor


class Direction:
    """Packets one way."""

    def __init__(self, source: int, target: int, bytes_s: float, delay_s: float) -> None:
        self.source, self._target = source, target
        self._bytes_s, self._delay_s = bytes_s, delay_s
        self._free_at_s = 0.0
        self._held: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read what is there; each packet leaves when the line is free, and arrives a delay later."""
        while True:
            try:
                packet = os.read(self.source, PACKET_BYTES)
            except BlockingIOError:
                return
            now = time.monotonic()
            begin = max(now, self._free_at_s)
            if begin - now > QUEUE_S or len(self._held) > QUEUE_PACKETS:
                continue
            self._free_at_s = begin + len(packet) / self._bytes_s
            self._held.append((self._free_at_s + self._delay_s, packet))

    def deliver(self) -> float:
        """Write what has arrived; seconds until the next does."""
        while self._held:
            wait_s = self._held[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            os.write(self._target, self._held.popleft()[1])
        return 1.0


def carry(one: int, other: int, mbit: float, delay_ms: float) -> None:
    """Carry packets both ways until ended."""
    directions = [
        Direction(source, target, mbit * 125_000, delay_ms / 1000) for source, target in ((one, other), (other, one))
    ]
    poll = select.epoll()
    for direction in directions:
        poll.register(direction.source, select.EPOLLIN)
    while True:
        wait_s = min(direction.deliver() for direction in directions)
        ready = {descriptor for descriptor, _ in poll.poll(wait_s)}
        for direction in directions:
            if direction.source in ready:
                direction.take()


if __name__ == "__main__":
    carry(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
