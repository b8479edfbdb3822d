"""A backend outside of torch, as Ascend's, gives its devices and its modules' methods a name of its own."""

from __future__ import annotations

import subprocess
import sys

from robustness import script_environment

PROGRAM = """
import warnings
import torch
from torch import nn
torch.utils.rename_privateuse1_backend("npu")
torch.utils.generate_methods_for_privateuse1_backend()
import roundpipe
from roundpipe.following.placeholder import _is_device
assert all(map(_is_device, ["cpu", "meta", "npu", "npu:1", "cuda:0"]))
assert not any(map(_is_device, ["", "mean", "ij,jk->ik", "npus", "npu:x"]))
roundpipe.devices("virtual:1")
model = roundpipe.RoundPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert model.npu() is model and model.npu(0) is model and model.to("npu") is model
assert len(caught) == 3 and all("moving the model to 'npu' is not needed" in str(w.message) for w in caught), caught
"""


def test_names_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=script_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
