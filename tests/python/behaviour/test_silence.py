"""Random programs of a user's habits have the numbers of plain PyTorch.

`make test` tries 30, `make test-all` 300, `make test-silence` 2,000.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from silent_program import SilentProgram

STATEMENTS = (
    *("call", "call", "call", "step", "step", "step", "call_with_a_loss_outside", "call_with_labels_of_other_rows"),
    *("evaluate", "zero_grad", "assign", "write", "read_by_any_way", "read_by_any_way", "synchronize"),
    *("take_a_state", "load_a_state", "look", "save", "load"),
)


@settings(suppress_health_check=list(HealthCheck))
@given(
    kind=st.sampled_from(["loop", "function", "fused"]),
    devices=st.integers(1, 3),
    layers=st.integers(1, 3),
    microbatches=st.integers(1, 3),
    seed=st.integers(0, 2**16),
    statements=st.lists(st.sampled_from(STATEMENTS), min_size=3, max_size=14),
)
def test_numbers_of_plain_pytorch(
    kind: str,
    devices: int,
    layers: int,
    microbatches: int,
    seed: int,
    statements: list[str],
    one_torch_thread: None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        program = SilentProgram(Path(folder), kind, devices, layers, microbatches, seed)
        for statement in statements:
            getattr(program, statement)()
        program.synchronize()
