"""Runs of `roundpipe train` on one of several nodes, for the processes of `node_processes.py`."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Mapping
from typing import Any

import peft.tuners.lora  # noqa: F401  here, so that not every node imports it
import torch
import transformers.models.llama.modeling_llama  # noqa: F401

import roundpipe
from roundpipe.train.config import TrainConfig
from roundpipe.train.nodes import RunNodes
from roundpipe.train.session import run


def train(
    values: Mapping[str, Any], resume: bool = False, on_ranks: Mapping[int, Mapping[str, Any]] | None = None
) -> tuple[int | str, str]:
    """Trains, and returns the exit code, or the error of a run that is refused, with what was printed.

    Args:
        values: of the configuration.
        on_ranks: other values, of some ranks.
    """
    mine = (on_ranks or {}).get(torch.distributed.get_rank(), {})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            return run(TrainConfig(**{**values, **mine}), resume), printed.getvalue()
        except (ValueError, roundpipe.RoundPipeError) as error:
            return str(error), printed.getvalue()


def train_and_stop(values: Mapping[str, Any], rank: int, step: int) -> tuple[int | str, str]:
    """Trains, and gets SIGINT on one rank while a step is made."""
    count = 0

    class Interrupted(RunNodes):
        def rows_of(self, batch: Mapping[str, Any], group: int = 1) -> dict[str, Any] | None:
            nonlocal count
            count += 1
            if (self.rank, count) == (rank, step):
                signal.raise_signal(signal.SIGINT)
            return rows_of(self, batch, group)

    rows_of, RunNodes.rows_of = RunNodes.rows_of, Interrupted.rows_of  # type: ignore[method-assign]
    return train(values)
