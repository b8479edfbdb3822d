"""Makes parameters and buffers the same on all nodes, those of rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from roundpipe import _core
from roundpipe.distributed.nodes import Nodes

_PIECE_BYTES = 16 << 20


class SharedValues:
    """Gives every rank the values of rank 0, and knows which tensors have them already.

    Compares checksums first, and sends only what differs, one tensor after the other.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._versions: dict[int, int] = {}  # of the tensors that were alike, by id

    def share(self, kind: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Gives every rank the values of rank 0. Collective; nothing may be computing with the tensors.

        Args:
            kind: see `Nodes.gather`.
            named: tensors on the host that live as long as the model, alike on all ranks but for their values.

        Raises:
            ValueError: one that differs lies in a file that is mapped.
            RoundPipeError: another rank does not answer.
        """
        tensors = list({id(tensor): (name, tensor) for name, tensor in named}.values())
        changed = [i for i, (_, tensor) in enumerate(tensors) if self._is_new(tensor)]
        anywhere = sorted({i for each in self._nodes.gather(kind, {"changed": changed}) for i in each["changed"]})
        if not anywhere:
            return
        checksums = [checksum(tensors[i][1]) for i in anywhere]
        mapped = [_core.is_mapped(tensors[i][1]) for i in anywhere]
        told = self._nodes.gather(kind, {"checksums": checksums, "mapped": mapped})
        for place, i in enumerate(anywhere):
            if len({each["checksums"][place] for each in told}) > 1:
                name, tensor = tensors[i]
                self._send(name, tensor, any(each["mapped"][place] for each in told))
        self._versions = {id(tensor): tensor._version for _, tensor in tensors}

    def written(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The tensors that were written to since the ranks had the same values, by name."""
        changed = {id(tensor): (name, tensor) for name, tensor in named if self._is_new(tensor)}
        return dict(changed.values())

    def note_alike(self, tensors: Iterable[Tensor]) -> None:
        """Notes that all ranks have written the same values to them."""
        self._versions |= {id(tensor): tensor._version for tensor in tensors}

    def _is_new(self, tensor: Tensor) -> bool:
        return self._versions.get(id(tensor)) != tensor._version

    def _send(self, name: str, tensor: Tensor, is_mapped: bool) -> None:
        if is_mapped:
            raise ValueError(
                f"[distributed] the ranks differ in the values of {name}, which lies in a mapped file "
                "(frozen_weights='mmap') and cannot be changed; expected the same files on every rank; copy them, or "
                "leave frozen_weights out"
            )
        content = tensor.detach().contiguous()
        try:
            for piece in _pieces(content):
                torch.distributed.broadcast(piece, group=self._nodes.groups()[1], group_src=0)
        except RuntimeError as error:
            raise _core.RoundPipeError(
                f"[distributed] the values of {name} of rank 0 did not arrive ({str(error).splitlines()[0]}); look at "
                "the other ranks' output, and start all nodes again"
            ) from error
        if content.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(content)
        torch.autograd.graph.increment_version(tensor)


def checksum(tensor: Tensor) -> int:
    """CRC-32C of its bytes."""
    found = 0
    for piece in _pieces(tensor):
        found = _core.crc32c(piece.numpy().tobytes(), found)
    return found


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Its bytes, piece by piece; views of its memory if it is contiguous."""
    content = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if content.numel():
        yield from torch.split(content.view(-1).view(torch.uint8), _PIECE_BYTES)
