"""A plugin of pytest: `-p on_the_card` runs tests that ask for virtual devices on test cards instead.

`virtual:N` becomes N workers of the first card, or of both in turn with ON_CARDS=2. Tests that need what only virtual
devices have, such as throttled links, are skipped. Results are the same bits: the card runs the CPU's kernels.
"""

from __future__ import annotations

import os
import re

import pytest
import torch

import roundpipe
import roundpipe.device.pool

_CARDS = int(os.environ.get("ON_CARDS", "1"))
_VIRTUAL_ONLY = re.compile(r"(link|host|latency|threads)=")
_devices = roundpipe.device.pool.devices


def _on_cards(workers: int) -> str:
    if _CARDS == 1:
        return f"card:0x{workers}"
    share = [(workers + 1) // 2, workers // 2]
    return ",".join(f"card:{card}x{count}" for card, count in enumerate(share) if count)


def _devices_on_cards(spec=None):
    if spec is None:
        return _devices()
    text = spec if isinstance(spec, str) else ",".join(spec)
    if _VIRTUAL_ONLY.search(text):
        pytest.skip("only virtual devices have this")
    text = re.sub(r",debug\b", "", text)  # a card writes over what is freed anyway
    text = re.sub(r"virtual(?::(\d+))?", lambda found: _on_cards(int(found[1] or 1)), text)
    return _devices(text)


# The card has it on for `module.to("card")`; the models of these tests stay on the host, as real cards leave it off.
torch.__future__.set_swap_module_params_on_conversion(False)
roundpipe.devices = roundpipe.device.pool.devices = _devices_on_cards
