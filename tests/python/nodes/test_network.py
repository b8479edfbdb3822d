"""Nodes on hosts of their own: if the network of one is cut, all of them end with an error that names who is missing. A
slow network changes no bit."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from node_processes import Network, NodeProcesses, Request, silent_ranks
from node_programs import Training
from reference_loops import assert_same

sys.path[:0] = [str(Path(__file__).resolve().parents[3] / "bench")]

from support.node_network import Host, hosts, obstacle  # noqa: E402

pytestmark = pytest.mark.long

PATIENCE_S = 20.0  # of the process group: how long a rank waits for another one, also to connect


def skip_without_hosts(delay_ms: float = 0.0) -> None:
    if reason := obstacle(delay_ms):
        pytest.skip(f"no hosts can be made on this machine: {reason}")


def between(made: Sequence[Host]) -> Network:
    return Network(tuple(host.namespace for host in made), made[0].address, "eth0")


# The rank that is cut off, and the moment of a step: before the nodes agree on it, and while they exchange.
CUTS = [(cut, at) for cut in (0, 2) for at in (("step", 0), ("stepped", 2))]
# All that a rank knows whose way to the store, which rank 0 has, was cut together with that to a rank.
NO_STORE = "the store of the process group does not answer: the process that serves it, rank 0 or the launcher"


@pytest.mark.parametrize("how", ["unplug", "mute"])
def test_a_cut_ends_all_of_them(nodes: NodeProcesses, how: str) -> None:
    skip_without_hosts()
    training = Training(3, steps=6, width=512, max_grad_norm=1.0)
    with ExitStack() as stack:
        requests = []
        for cut, at in CUTS:
            made = stack.enter_context(hosts(3))
            arguments = training, cut, getattr(made[cut], how), at
            requests.append(Request(3, "train_with_a_silent_rank", arguments, PATIENCE_S, between(made)))
        all_ended = nodes.end_together(requests)
    for (cut, at), ended in zip(CUTS, all_ended, strict=True):
        for rank, node in enumerate(ended):
            where = f"rank {rank}, after a cut of rank {cut} at {at}: {node.result}"
            assert node.status == 0, f"{where}\n{node.errors}"
            missing = {0, 1, 2} - {cut} if rank == cut else {cut}
            without_store = at[0] == "stepped" and (cut == 0 or rank == cut)
            assert missing & silent_ranks(node.result) or (without_store and NO_STORE in node.result), where


BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("delay_ms", [0, 10])
def test_a_slow_network_changes_no_bit(nodes: NodeProcesses, delay_ms: float) -> None:
    skip_without_hosts(delay_ms)
    trainings = [
        Training(2, width=512, dtype=BF16, rows=(6, 3), max_grad_norm=0.02),
        Training(2, width=512, devices=2, is_async=False, calls=(2, 1)),
        Training(2, width=512, dtype=FP16, scaled=True, infinite=((1, 1),)),
    ]
    with hosts(2, 200, delay_ms) as made:
        request = Request(2, "train_all", (trainings,))
        slow, fast = nodes.results_together([Request(2, "train_all", (trainings,), network=between(made)), request])
        received = [host.received_bytes() for host in made]
    # In each step, half of the gradients; then the weights, if it is not skipped.
    gradients = [3 * 512 * 512 * training.dtype.itemsize // 2 * training.steps for training in trainings]
    assert min(received) > sum(gradients)
    for rank in range(2):
        for ours, theirs in zip(slow[rank], fast[rank], strict=True):
            for name, value in theirs.pop("weights").items():
                assert_same(ours["weights"][name], value, f"rank {rank}: {name}")
            del ours["weights"]
            assert repr(ours) == repr(theirs)
