"""Programs that train on weights without values, as the published package's benchmark programs do: every loss is NaN,
and they run all the same if the environment says that nobody looks at losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from roundpipe import RoundPipeError, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.optim import Adam

MICROBATCHES, CALLS = 2, 2
SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
    "dtype": torch.float16,
}


def without_values(config: Any) -> nn.Module:
    """Linear layers and embeddings are initialised; norms and buffers hold what was in the memory, here NaN."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                tensor.data.fill_(torch.nan)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("kind", [LlamaConfig, Qwen3Config])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_benchmark_of_the_published_package(kind: Any, is_async: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> torch.Tensor:
        model = wrap_model_to_roundpipe(
            without_values(kind(**SIZES)),
            optim_dtype=torch.float32,
            use_sequential_preset=True,
            model_run_config=RoundPipeRunConfig(num_microbatch=MICROBATCHES, recompute_grain="stage"),
        )
        optim = Adam(model.optim_parameters(), lr=1e-5)
        tokens = torch.randint(0, 31, (8, 12))
        for _ in range(3):
            for rows in tokens.chunk(CALLS):
                loss = model.forward_backward(
                    input_kwargs={
                        "input_ids": rows,
                        "attention_mask": torch.ones_like(rows),
                        "labels": rows,
                        "return_logits": False,
                    },
                    loss_fn=lambda outputs, _: outputs.loss / MICROBATCHES / CALLS,
                )
            model.step(lambda: (optim.step(), optim.zero_grad(), None)[-1], is_async)
        model.synchronize()
        return loss  # type: ignore[no-any-return]

    with pytest.raises(RoundPipeError, match="set ROUNDPIPE_CHECK_LOSS=0"):
        train()
    monkeypatch.setenv("ROUNDPIPE_CHECK_LOSS", "0")
    assert train().isnan()
