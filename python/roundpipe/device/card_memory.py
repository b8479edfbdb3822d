"""Keeps the process within its workers' memory caps on each card, by the allocator's own cap where torch has one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

# Cards with a cap set here; a cap that the user set, on another card or before any set here, stays.
_capped: set[torch.device] = set()


def cap_cards(workers: Iterable[tuple[str, int]]) -> None:
    """Caps the process on each card to the sum of its workers' caps, and removes the caps of earlier pools.

    Args:
        workers: torch's name of each worker's device, and its cap in bytes. A cap of 0 means no limit, and then the
            card has no cap.
    """
    caps: dict[torch.device, int] = defaultdict(int)
    open_cards: set[torch.device] = set()
    for name, limit_bytes in workers:
        device = torch.device(name)
        if device.type != "cpu":
            caps[device] += limit_bytes
            open_cards |= {device} if limit_bytes == 0 else set()
    _free_workspaces(caps)
    for card in sorted(_capped | set(caps), key=str):
        module = torch.get_device_module(card)
        if not hasattr(module, "set_per_process_memory_fraction"):
            continue
        total_bytes = module.mem_get_info(card)[1]
        cap_bytes = caps.get(card, total_bytes)
        is_whole = card in open_cards or cap_bytes >= total_bytes
        if is_whole and card not in _capped:
            continue
        module.set_per_process_memory_fraction(1.0 if is_whole else cap_bytes / total_bytes, card)
        (_capped.discard if is_whole else _capped.add)(card)


def _free_workspaces(cards: Iterable[torch.device]) -> None:
    """Frees the workspaces that torch keeps for cuBLAS, 8 to 32 MiB for each pair of a thread and a stream.

    Workers of earlier pools leave theirs behind, and these count towards the cap. torch allocates workspaces again on
    demand.
    """
    if any(card.type == "cuda" for card in cards) and hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
        torch._C._cuda_clearCublasWorkspaces()
