"""What the nodes of a model have to know of its calls, as Python makes them: see `_core.LossCounts`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from roundpipe import _core


def note_backward_of(counts: _core.LossCounts, outputs: Iterable[torch.Tensor]) -> None:
    """Notes, when a loss of these outputs goes backward, that it is the user's; that raises what `note_users_loss`
    does."""
    for node in {output.grad_fn for output in outputs}:
        if node is not None:
            node.register_prehook(lambda gradients: counts.note_users_loss())


@contextmanager
def telling_failure(counts: _core.LossCounts) -> Iterator[None]:
    """Tells the other nodes, which make a step, of an error in the block: they then make none either. Collective if
    there is one."""
    try:
        yield
    except Exception as error:
        counts.tell_failure(_words(error))
        raise


@contextmanager
def noting_failure(count: _core.CallCount | None) -> Iterator[None]:
    """Notes an error in the block for the other nodes, if they have been told of the call."""
    try:
        yield
    except BaseException as error:
        if count is not None:
            count.note_failure(_words(error))
        raise


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
