"""Cuts a batch into microbatches of even work, where rows differ in length."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.data.samples import IGNORED

if TYPE_CHECKING:
    from roundpipe.call.run_config import RoundPipeRunConfig


def balance(lengths: Sequence[int], parts: int, *, quadratic: float = 0.0) -> list[list[int]]:
    """Deals samples out so that the parts cost about the same: the dearest first, each to the part that has least.

    The costliest part is within 4/3 - 1/(3 parts) of the best possible. Equal costs go by number, so the result depends
    on the arguments only. No part is empty unless there are fewer samples than parts.

    Args:
        lengths: tokens of each sample.
        parts: how many parts.
        quadratic: a sample costs `n + quadratic * n * n`, for n tokens. 0 counts tokens; attention over long rows adds
            about 1 / (12 * hidden size) for a plain causal transformer.

    Returns:
        The samples of each part by their numbers, ascending.

    Raises:
        ValueError: no parts, or negative lengths or costs.
    """
    if parts < 1:
        raise ValueError(f"[balance] parts is {parts}, expected at least 1")
    if not quadratic >= 0:
        raise ValueError(f"[balance] quadratic is {quadratic}, expected 0 or more")
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"[balance] length {index} is {length}, expected 0 or more")
    costs = [length + quadratic * length * length for length in lengths]
    result: list[list[int]] = [[] for _ in range(parts)]
    # Of parts that cost the same the one with fewer samples is next: none stays empty when samples cost nothing.
    heap = [(0.0, 0, part) for part in range(parts)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, held, part = heapq.heappop(heap)
        result[part].append(index)
        heapq.heappush(heap, (load + costs[index], held + 1, part))
    return [sorted(part) for part in result]


class BalancedSplit:
    """Cuts one padded batch by rows into microbatches of even token counts, each trimmed to its own longest row.

        split = BalancedSplit(batch["attention_mask"])
        config = RoundPipeRunConfig(split_input=split.inputs, split_label=split.labels)

    Every tensor whose first dimension is the batch goes along by rows, and loses its last columns where its second
    dimension is the tokens'; anything else is handed to every microbatch. Padding on the left stays, as cutting it off
    would move positions. Rows come in another order than in the batch, so outputs that are kept for each row need
    `merge_output=False` and `parts(n)`.

    Args:
        attention_mask: [rows, tokens], 0 where there is padding.
        quadratic: see `balance`.

    Raises:
        ValueError: a mask of another shape.
    """

    def __init__(self, attention_mask: torch.Tensor, *, quadratic: float = 0.0) -> None:
        if attention_mask.dim() != 2 or not attention_mask.numel():
            raise ValueError(
                f"[BalancedSplit] attention_mask has shape {tuple(attention_mask.shape)}, expected [rows, tokens]; "
                "prepared masks of four dimensions cannot be cut"
            )
        kept = attention_mask.bool()
        self._shape = tuple(attention_mask.shape)
        self._lengths: list[int] = kept.sum(dim=1).tolist()
        columns = torch.arange(1, kept.shape[1] + 1, device=kept.device)
        self._ends: list[int] = (kept * columns).amax(dim=1).tolist()
        self._quadratic = quadratic

    def parts(self, n: int) -> list[list[int]]:
        """The rows of each of `n` microbatches."""
        rows = self._shape[0]
        if n > rows:
            raise ValueError(
                f"[BalancedSplit] the batch has {rows} rows, fewer than the {n} microbatches; expected at least one "
                f"row for each: set num_microbatch to {rows} or less"
            )
        return balance(self._lengths, n, quadratic=self._quadratic)

    def inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], n: int
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """For `RoundPipeRunConfig.split_input`."""
        cut = [self._cut((args, kwargs), rows) for rows in self.parts(n)]
        return [args for args, _ in cut], [kwargs for _, kwargs in cut]

    def labels(self, label: Any, n: int) -> list[Any]:
        """For `RoundPipeRunConfig.split_label`: the same rows and columns of a tensor, or of a tree of tensors."""
        return [self._cut(label, rows) for rows in self.parts(n)]

    def _cut(self, tree: Any, rows: list[int]) -> Any:
        batch, tokens = self._shape
        end = max(1, *(self._ends[row] for row in rows))

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim():
                return leaf
            if leaf.dim() > 1 and leaf.shape[1] == tokens and leaf.shape[0] in (1, batch):
                leaf = leaf[:, :end]
            return leaf[torch.tensor(rows, device=leaf.device)] if leaf.shape[0] == batch else leaf

        return pytree.tree_map(cut, tree)


def split_balanced(
    args: tuple[Any, ...], kwargs: dict[str, Any], n: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
    """A `RoundPipeRunConfig.split_input` for every batch that comes with its `attention_mask`, or, as packed rows do,
    with its `labels` alone. See `BalancedSplit`.

    Without a mask a row ends at its last label: in a causal model nothing is learnt from what stands behind it.
    Labels have to be among the keyword arguments, or they would be cut otherwise; for labels of their own use a
    `BalancedSplit` for each batch.

    Raises:
        ValueError: there are neither attention_mask nor labels, or too few rows.
    """
    return BalancedSplit(_kept(kwargs, "split_balanced")).inputs(args, kwargs, n)


def balanced_config(batch: Mapping[str, Any], num_microbatch: int | None = None) -> RoundPipeRunConfig:
    """The options of a call that cuts this batch into microbatches of even token counts, by `split_balanced`.

    Args:
        batch: the call's keyword arguments.
        num_microbatch: how many microbatches, or as many as the batch has rows if these are fewer. None: one more than
            there are devices.

    Raises:
        ValueError: there are neither attention_mask nor labels.
    """
    from roundpipe.call.run_config import RoundPipeRunConfig
    from roundpipe.device.pool import devices

    rows = _kept(batch, "balanced_config").shape[0]
    wanted = len(devices()) + 1 if num_microbatch is None else num_microbatch
    return RoundPipeRunConfig(num_microbatch=min(wanted, rows), split_input=split_balanced)


def _kept(batch: Mapping[str, Any], where: str) -> torch.Tensor:
    """[rows, tokens], True for what has to be computed."""
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if isinstance(mask, torch.Tensor):
        return mask
    if isinstance(labels, torch.Tensor) and labels.dim() == 2:
        return (labels != IGNORED).flip(1).cummax(dim=1).values.flip(1)
    raise ValueError(
        f"[{where}] the keyword arguments are {sorted(batch)}, expected an attention_mask or labels of [rows, tokens] "
        "among them; they say how long each row is"
    )
