"""Several hosts on one machine: network namespaces whose links may be slow, late or cut. Needs root, `ip` and `tc`."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

# Of the networks that this process makes. Other processes may have some at the same time.
_numbers = itertools.count()


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Host:
    """A network namespace, which reaches the bridge over its `eth0`.

    Attributes:
        network: the beginning of all names of its network.
        number: from 0.
    """

    network: str
    number: int

    @property
    def name(self) -> str:
        """Of the namespace."""
        return f"{self.network}-{self.number}"

    @property
    def switch(self) -> str:
        """The namespace that has the bridge."""
        return f"{self.network}-switch"

    @property
    def port(self) -> str:
        """The bridge's end of its link."""
        return f"port{self.number}"

    @property
    def namespace(self) -> str:
        """The file to give to setns."""
        return f"/run/netns/{self.name}"

    @property
    def address(self) -> str:
        """Of eth0."""
        return f"10.99.0.{self.number + 1}"

    @property
    def prefix(self) -> list[str]:
        """The words before a command that runs on the host."""
        return ["ip", "netns", "exec", self.name]

    @property
    def unplug(self) -> list[str]:
        """The command that takes its link down, at the bridge's end."""
        return ["ip", "-n", self.switch, "link", "set", self.port, "down"]

    @property
    def mute(self) -> list[str]:
        """The command that loses all that it sends; what others send still arrives."""
        return ["tc", "-n", self.name, "qdisc", "replace", "dev", "eth0", "root", "blackhole"]

    def received_bytes(self) -> int:
        """By eth0, until now."""
        counter = [*self.prefix, "cat", "/sys/class/net/eth0/statistics/rx_bytes"]
        return int(subprocess.run(counter, check=True, capture_output=True, text=True).stdout)

    def _plug_in(self, megabits_per_s: float | None, delay_ms: float) -> None:
        _run("ip", "netns", "add", self.name)
        peer = ["peer", "name", "eth0", "netns", self.name]
        _run("ip", "-n", self.switch, "link", "add", self.port, "type", "veth", *peer)
        _run("ip", "-n", self.switch, "link", "set", self.port, "master", "bridge", "up")
        _run("ip", "-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _run("ip", "-n", self.name, "link", "set", device, "up")
        parent = ["root"]
        if megabits_per_s is not None:
            rate = ["rate", f"{megabits_per_s:g}mbit", "burst", "256kb", "latency", "500ms"]
            _run("tc", "-n", self.name, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "tbf", *rate)
            parent = ["parent", "1:1"]
        if delay_ms:
            late = ["netem", "delay", f"{delay_ms:g}ms", "limit", "100000"]
            _run("tc", "-n", self.name, "qdisc", "add", "dev", "eth0", *parent, *late)


def _make(switch: str) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")


def _remove(made: list[Host]) -> None:
    # Links first: a namespace lives as long as a process in it.
    commands = [["ip", "-n", host.switch, "link", "del", host.port] for host in made]
    commands += [["ip", "netns", "del", name] for name in (made[0].switch, *(host.name for host in made))]
    for command in commands:
        subprocess.run(command, check=False, capture_output=True)


@contextmanager
def hosts(nodes: int, megabits_per_s: float | None = None, delay_ms: float = 0.0) -> Iterator[list[Host]]:
    """Makes so many hosts on one bridge; each sends at most at that rate, and so many milliseconds late.

    Raises:
        subprocess.CalledProcessError: this process may not, or the kernel cannot.
    """
    network = f"rp{os.getpid()}-{next(_numbers)}"
    made = [Host(network, number) for number in range(nodes)]
    try:
        _make(made[0].switch)
        for host in made:
            host._plug_in(megabits_per_s, delay_ms)
        yield made
    finally:
        _remove(made)


@cache
def obstacle(delay_ms: float = 0.0) -> str:
    """Why there can be no hosts here, with links that are late if asked for; empty if there can be."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"there is no {' and no '.join(missing)}, which iproute2 has"
    try:
        with hosts(1, delay_ms=delay_ms):
            return ""
    except subprocess.CalledProcessError as error:
        return f"'{' '.join(error.cmd)}' says {error.stderr.strip()}"
