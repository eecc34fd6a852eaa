"""Machines that are not there: network namespaces, joined by links of a given rate. Needs root.

    machine ══ veth, tbf both ways ══ switch (a bridge in a namespace of its own)      `Network.machine`
    machine ══ veth, tbf both ways ══ machine                                          `Network.link`
    machine ── tun ── this process holds every packet for a while ── tun ── machine    `Network.far_link`, see delay.py

All names begin with one prefix, and all of them are removed at the end, whatever happens: a namespace takes its links
along.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

BURST_BYTES = 128 * 1024
QUEUE_MS, QUEUE_BYTES = 50, 256 * 1024  # whichever is more: slow access links have long queues
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/var/run/netns")


class Network:
    """Namespaces and links; a context manager that removes them."""

    def __init__(self, prefix: str = f"cast{os.getpid()}") -> None:
        self._prefix = prefix
        self._machines: list[str] = []
        self._links = 0

    def __enter__(self) -> Network:
        self._namespace("switch")
        self._run("switch", "link add bridge type bridge", "link set bridge up")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._machines:
            subprocess.run(["ip", "netns", "del", self._name(name)], check=False, capture_output=True)

    def machine(self, name: str, address: str, mbit: float | None) -> None:
        """A machine with one link to the switch; `mbit` bounds each direction, None does not."""
        self._namespace(name)
        inner, outer = self._pair(name, "switch")
        self._run(name, f"addr add {address}/16 dev {inner}", f"link set {inner} up")
        self._run("switch", f"link set {outer} master bridge", f"link set {outer} up")
        if mbit is not None:
            self._limit(name, inner, mbit)
            self._limit("switch", outer, mbit)

    def link(self, one: str, address_one: str, other: str, address_other: str, mbit: float) -> None:
        """A link of their own between two machines."""
        near, far = self._pair(one, other)
        self._run(one, f"addr add {address_one}/30 dev {near}", f"link set {near} up")
        self._run(other, f"addr add {address_other}/30 dev {far}", f"link set {far} up")
        self._limit(one, near, mbit)
        self._limit(other, far, mbit)

    def lonely(self, name: str) -> None:
        """A machine without any link yet."""
        self._namespace(name)

    def run(self, name: str, command: str) -> None:
        self._run(name, command)

    def prefix(self, name: str) -> tuple[str, ...]:
        """What starts a command that runs in this machine."""
        return ("ip", "netns", "exec", self._name(name))

    def sent_bytes(self, name: str) -> int:
        """All bytes that this machine has sent, headers included."""
        command = [*self.prefix(name), "cat", "/proc/net/dev"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[2:]
        fields = [line.replace(":", " ").split() for line in lines]
        return sum(int(field[9]) for field in fields if field[0] != "lo")

    def enter(self, name: str) -> None:
        """Move the calling thread, and the threads that it will start, into this machine."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (NAMESPACES / self._name(name)).open("rb") as file:
            if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace of {name}")

    def _name(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _namespace(self, name: str) -> None:
        subprocess.run(["ip", "netns", "add", self._name(name)], check=True)
        self._machines.append(name)
        self._run(name, "link set lo up")

    def _pair(self, one: str, other: str) -> tuple[str, str]:
        self._links += 1
        near, far = f"a{self._links}", f"b{self._links}"
        add = f"link add {near} type veth peer name {far} netns {self._name(other)}"
        self._run(one, add)
        return near, far

    def _limit(self, name: str, device: str, mbit: float) -> None:
        tbf = ["qdisc", "add", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", str(BURST_BYTES)]
        queue_ms = max(QUEUE_MS, round(QUEUE_BYTES / (mbit * 125)))
        subprocess.run(["tc", "-n", self._name(name), *tbf, "latency", f"{queue_ms}ms"], check=True)

    def _run(self, name: str, *commands: str) -> None:
        lines = "\n".join(commands) + "\n"
        subprocess.run(["ip", "-n", self._name(name), "-batch", "-"], input=lines, check=True, text=True)


def in_machine(network: Network, name: str, target: threading.Thread) -> None:
    """Start a thread inside a machine: from a thread that has gone there, because children inherit the place."""

    def start() -> None:
        network.enter(name)
        target.start()

    starter = threading.Thread(target=start)
    starter.start()
    starter.join()


def why_not(needed: Sequence[str] = ("ip", "tc")) -> str:
    """Why namespaces cannot be used here, or nothing."""
    if os.geteuid() != 0:
        return "this benchmark makes network namespaces and needs root; run it as root (sudo)"
    missing = [tool for tool in needed if subprocess.run(["which", tool], capture_output=True, check=False).returncode]
    return f"this benchmark needs {' and '.join(missing)} (the package iproute2)" if missing else ""
