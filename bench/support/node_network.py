"""Several hosts on one machine: network namespaces whose links have a limited rate. Needs root, `ip` and `tc`."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_BRIDGE = "rpbridge"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _remove(nodes: int) -> None:
    # Links first: a namespace lives as long as a process in it.
    commands = [["link", "del", f"rplink{node}"] for node in range(nodes)]
    commands += [["netns", "del", f"rpnode{node}"] for node in range(nodes)]
    for command in [*commands, ["link", "del", _BRIDGE]]:
        subprocess.run(["ip", *command], check=False, capture_output=True)


def available() -> bool:
    """Whether this process may make network namespaces."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "rpnode0"], check=False, capture_output=True).returncode == 0
    _remove(1)
    return made


@contextmanager
def hosts(nodes: int, megabits_per_s: float, delay_ms: float = 0.0) -> Iterator[list[list[str]]]:
    """Makes so many hosts on one bridge; each sends at most at that rate, and so many milliseconds late.

    Yields:
        for each node, the words before a command that runs on it. Node k has the address 10.99.0.(k + 1) on eth0.
    """
    _remove(nodes)
    try:
        _run("ip", "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "link", "set", _BRIDGE, "up")
        for node in range(nodes):
            name, link = f"rpnode{node}", f"rplink{node}"
            inside = ["ip", "netns", "exec", name]
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", link, "master", _BRIDGE)
            _run("ip", "link", "set", link, "up")
            _run(*inside, "ip", "address", "add", f"10.99.0.{node + 1}/24", "dev", "eth0")
            _run(*inside, "ip", "link", "set", "eth0", "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
            rate = ["rate", f"{megabits_per_s:g}mbit", "burst", "256kb", "latency", "500ms"]
            _run(*inside, "tc", "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "tbf", *rate)
            if delay_ms:
                late = ["parent", "1:1", "netem", "delay", f"{delay_ms:g}ms", "limit", "100000"]
                _run(*inside, "tc", "qdisc", "add", "dev", "eth0", *late)
        yield [["ip", "netns", "exec", f"rpnode{node}"] for node in range(nodes)]
    finally:
        _remove(nodes)
