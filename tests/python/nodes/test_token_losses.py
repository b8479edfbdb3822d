"""A language model's own loss is the mean over the labels of all nodes, however unevenly they lie there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from node_processes import NodeProcesses
from node_programs import SHORT, Tokens
from reference_loops import assert_same
from roundpipe.data.collate import count_label_tokens


def step_of_plain_model(tokens: Tokens) -> dict[str, Any]:
    """The losses of every node, and the weights after a step with the sum of all nodes' gradients."""
    model = tokens.model()
    batches = [tokens.batches(node) for node in range(len(tokens.lengths))]
    losses: list[list[float]] = [[] for _ in batches]
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    items = sum(node[0]["num_items_in_batch"] for node in batches if node) if tokens.items else None
    for node, calls in enumerate(batches):
        model.zero_grad()
        for call, batch in enumerate(calls):
            own = count_label_tokens(batch["labels"])
            if items is None:
                counts = [count_label_tokens(other[call]["labels"]) for other in batches if call < len(other)]
                loss = model(**batch).loss * (own / sum(counts))
                losses[node].append(float(loss.detach() * (sum(counts) / own)))
            else:
                loss = model(**{**batch, "num_items_in_batch": items}).loss
                losses[node].append(float(loss.detach() * (items / batch["num_items_in_batch"])))
            loss.backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                sums[name] += p.grad
    with torch.no_grad():
        weights = {name: p - sums[name] for name, p in model.named_parameters()}
    return {"losses": losses, "weights": weights}


CASES = {
    "uneven rows": Tokens((((30, 7), (4,)), ((12,), (25, 3)))),
    "uneven calls, and a node without rows": Tokens((((9, 5), (21,)), ((14,),), ())),
    "num_items_in_batch": Tokens((((9, 5), (21,)), ((14,),)), items=True),
}


@pytest.mark.parametrize("tokens", CASES.values(), ids=CASES)
def test_equals_the_plain_model_over_all_rows(nodes: NodeProcesses, tokens: Tokens) -> None:
    expected = step_of_plain_model(tokens)
    for node, said in enumerate(nodes.results(len(tokens.lengths), "train_on_tokens", tokens)):
        assert said["losses"] == expected["losses"][node]
        for name, weight in expected["weights"].items():
            assert_same(said["weights"][name], weight, f"node {node}: {name}")


KINDS = "; expected one kind, as a user's loss is averaged over the nodes and the model's own is added"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (
                f"both{ways} on a rank",
                "[distributed] this call uses a loss of the user and an earlier one since the last step the model's "
                "own loss, expected one kind: ",
            )
            for ways in ("", " ways")
        ),
        *(
            (
                f"both{ways} on two ranks",
                "[distributed] the ranks use losses of several kinds in one step: rank 0 has the model's own loss, "
                f"rank 1 has a loss of the user{KINDS}",
            )
            for ways in ("", " ways")
        ),
        (
            "items on a rank",
            "[distributed] the ranks use losses of several kinds in one step: rank 0 has the model's own loss, rank 1 "
            f"has the model's own loss with num_items_in_batch{KINDS}",
        ),
        (
            "items of all ranks",
            "[distributed] num_items_in_batch was 10 on every rank, which is how many labels they have together, "
            "expected each rank's own number: ",
        ),
        (
            "failed call",
            "[distributed] a call of model 1 (LlamaForCausalLM) failed on rank 1 (IndexError: ",
        ),
    ],
)
def test_refused_and_the_next_step_is_right(nodes: NodeProcesses, name: str, message: str) -> None:
    expected = step_of_plain_model(SHORT)["weights"]
    for said in nodes.results(2, "go_on_after", name):
        assert said["error"].startswith(message)
        for parameter, weight in expected.items():
            assert_same(said["weights"][parameter], weight, parameter)
