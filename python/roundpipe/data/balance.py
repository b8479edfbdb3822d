"""Cuts a batch of rows of different lengths into microbatches of even work."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from roundpipe.data.samples import IGNORED

if TYPE_CHECKING:
    from roundpipe.model.call.run_config import RoundPipeRunConfig


def balance(lengths: Sequence[int], parts: int, *, quadratic: float = 0.0) -> list[list[int]]:
    """Distributes samples over parts of about equal cost: the most expensive sample first, each to the cheapest part.

    The most expensive part is within 4/3 - 1/(3 parts) of the best possible. Ties go by number, so the result depends
    on the arguments only. No part is empty unless there are fewer samples than parts.

    Args:
        lengths: tokens of each sample.
        parts: number of parts.
        quadratic: a sample of n tokens costs `n + quadratic * n * n`. 0 counts tokens; attention over long rows adds
            about 1 / (12 * hidden size) for a plain causal transformer.

    Returns:
        The numbers of each part's samples, ascending.

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
    # Among equally cheap parts, the one with fewer samples is next: no part stays empty when samples cost nothing.
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

    Every tensor whose first dimension is the batch is cut by rows. If its second dimension is the tokens, its last
    columns are trimmed. Every microbatch gets all other values whole. Padding on the left stays, because trimming it
    would shift positions. The rows' order differs from the batch's, so outputs kept for each row need
    `merge_output=False` and `parts(n)`.

    Args:
        attention_mask: [rows, tokens], 0 for padding.
        quadratic: see `balance`.
        group: so many rows, one behind the other, stay together, such as the two of a pair.

    Raises:
        ValueError: the mask has another shape, or its rows are no multiple of a group.
    """

    def __init__(self, attention_mask: torch.Tensor, *, quadratic: float = 0.0, group: int = 1) -> None:
        if attention_mask.dim() != 2 or not attention_mask.numel():
            raise ValueError(
                f"[BalancedSplit] attention_mask has shape {tuple(attention_mask.shape)}, expected [rows, tokens]; "
                "prepared masks of four dimensions cannot be cut"
            )
        if group < 1 or attention_mask.shape[0] % group:
            raise ValueError(
                f"[BalancedSplit] group is {group} and the batch has {attention_mask.shape[0]} rows, expected a "
                "multiple of the group"
            )
        kept = attention_mask.bool()
        self._shape = tuple(attention_mask.shape)
        self._lengths: list[int] = kept.sum(dim=1).tolist()
        columns = torch.arange(1, kept.shape[1] + 1, device=kept.device)
        self._ends: list[int] = (kept * columns).amax(dim=1).tolist()
        self._quadratic, self._group = quadratic, group

    @property
    def rows(self) -> int:
        """Of the batch."""
        return int(self._shape[0])

    @property
    def most(self) -> int:
        """Microbatches that the batch can be cut into."""
        return self.rows // self._group

    def parts(self, n: int) -> list[list[int]]:
        """The rows of each of `n` microbatches."""
        if n > self.most:
            what = "row" if self._group == 1 else f"group of {self._group} rows"
            raise ValueError(
                f"[BalancedSplit] the batch has {self.rows} rows, fewer than the {n} microbatches; expected at least "
                f"one {what} for each: set num_microbatch to {self.most} or less"
            )
        size = self._group
        lengths = [sum(self._lengths[begin : begin + size]) for begin in range(0, self.rows, size)]
        parts = balance(lengths, n, quadratic=self._quadratic)
        return [[size * each + row for each in part for row in range(size)] for part in parts]

    def of_part(self, part: int, parts: int) -> list[int]:
        """The rows of one of several parts, such as nodes, from 0; none if there are fewer rows than parts."""
        rows = self.parts(min(parts, self.most))
        return rows[part] if part < len(rows) else []

    def inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], n: int
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        """For `RoundPipeRunConfig.split_input`."""
        cut = [self.of_rows((args, kwargs), rows) for rows in self.parts(n)]
        return [args for args, _ in cut], [kwargs for _, kwargs in cut]

    def labels(self, label: Any, n: int) -> list[Any]:
        """For `RoundPipeRunConfig.split_label`: cuts a tensor, or a tree of tensors, to the same rows and columns."""
        return [self.of_rows(label, rows) for rows in self.parts(n)]

    def config(self, num_microbatch: int | None = None, **more: Any) -> RoundPipeRunConfig:
        """The options of a call whose arguments and label are cut so.

        Args:
            num_microbatch: number of microbatches, at most as many as there can be. None: devices + 1.
            **more: other options.
        """
        from roundpipe.model.call.run_config import RoundPipeRunConfig

        number = microbatch_count(self.most, num_microbatch)
        return RoundPipeRunConfig(num_microbatch=number, split_input=self.inputs, split_label=self.labels, **more)

    def of_rows(self, tree: Any, rows: list[int]) -> Any:
        """A tree of tensors, each with these rows of the batch, trimmed to the longest of them."""
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
    """A `RoundPipeRunConfig.split_input` for every batch with an `attention_mask` or, like packed rows, with `labels`
    alone. See `BalancedSplit`.

    Without a mask, a row ends at its last label: a causal model learns nothing from the tokens behind it. Labels must
    be among the keyword arguments, or they would be cut differently. If labels are given separately, use a
    `BalancedSplit` for each batch.

    Raises:
        ValueError: there are neither attention_mask nor labels, or too few rows.
    """
    return BalancedSplit(_kept(kwargs, "split_balanced")).inputs(args, kwargs, n)


def balanced_config(batch: Mapping[str, Any], num_microbatch: int | None = None) -> RoundPipeRunConfig:
    """The options of a call that cuts this batch into microbatches of even token counts, with `split_balanced`.

    Args:
        batch: the call's keyword arguments.
        num_microbatch: number of microbatches, at most as many as the batch has rows. None: devices + 1.

    Raises:
        ValueError: there are neither attention_mask nor labels.
    """
    from roundpipe.model.call.run_config import RoundPipeRunConfig

    rows = _kept(batch, "balanced_config").shape[0]
    return RoundPipeRunConfig(num_microbatch=microbatch_count(rows, num_microbatch), split_input=split_balanced)


def microbatch_count(most: int, num_microbatch: int | None = None) -> int:
    """The number of microbatches of a batch that can be cut into so many; None asks for devices + 1."""
    from roundpipe.device.pool import devices

    return min(len(devices()) + 1 if num_microbatch is None else num_microbatch, most)


def rows_of_part(batch: Mapping[str, Any], part: int, parts: int, group: int = 1) -> dict[str, Any] | None:
    """Divides the rows of a batch among several parts, such as nodes, with about as many tokens each.

    Args:
        batch: keyword arguments of a model, with `attention_mask` or `labels`; see `BalancedSplit` for what is cut.
        part: which one, from 0.
        parts: how many there are.
        group: see `BalancedSplit`.

    Returns:
        The arguments with this part's rows; the batch itself if it is the only part, and None if there are fewer rows
        than parts and it has none.

    Raises:
        ValueError: there are neither attention_mask nor labels.
    """
    if parts == 1:
        return dict(batch)
    split = BalancedSplit(_kept(batch, "rows_of_part"), group=group)
    rows = split.of_part(part, parts)
    return split.of_rows(dict(batch), rows) if rows else None


def _kept(batch: Mapping[str, Any], where: str) -> torch.Tensor:
    """[rows, tokens], True for tokens that must be computed."""
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if isinstance(mask, torch.Tensor):
        return mask
    if isinstance(labels, torch.Tensor) and labels.dim() == 2:
        return (labels != IGNORED).flip(1).cummax(dim=1).values.flip(1)
    raise ValueError(
        f"[{where}] the keyword arguments are {sorted(batch)}, expected an attention_mask or labels of [rows, tokens] "
        "among them; they say how long each row is"
    )
