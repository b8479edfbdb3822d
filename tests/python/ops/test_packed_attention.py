"""`attn_implementation="sdpa_packed"` against transformers' own attention and against documents run one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundpipe.ops import packed_attention
from sweeps import sweep

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
MIXED = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=5),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=8),
    "qwen3 sliding": lambda: transformers.Qwen3Config(
        **GROUPED, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=1
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=4, layer_types=MIXED),
    "phi3": lambda: transformers.Phi3Config(**GROUPED),
    "phi3 sliding": lambda: transformers.Phi3Config(**GROUPED, sliding_window=3),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=4, layer_types=MIXED, attn_logit_softcapping=0.1
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **GROUPED, head_dim=8, sliding_window=4, layer_types=MIXED, num_local_experts=2, num_experts_per_tok=1
    ),
}
DOCUMENTS = [[7, 3, 7, 1, 6], [12, 12]]  # two rows of 24 tokens


def build(name: str, implementation: str) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    if implementation == "sdpa_packed" and name in ("gemma2", "gpt-oss"):
        implementation = "packed"
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():  # larger scores than at the start, so that attention is not even
            parameter.normal_(std=0.3)
    return model.eval()


def batch(documents: list[list[int]] = DOCUMENTS) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    tokens = sum(documents[0])
    ids = torch.randint(1, 40, (len(documents), tokens), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])
    labels = ids if not positions.any() else ids.masked_fill(positions == 0, -100)
    return {"input_ids": ids, "position_ids": positions, "labels": labels, "use_cache": False}


def one_by_one(model: transformers.PreTrainedModel, ids: torch.Tensor, documents: list[list[int]]) -> torch.Tensor:
    rows = [
        torch.cat([model(input_ids=part[None], use_cache=False).logits for part in row.split(lengths)], dim=1)
        for row, lengths in zip(ids, documents, strict=True)
    ]
    return torch.cat(rows)


def gradients(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@sweep("name, documents", CONFIGS, [DOCUMENTS, [[24]], [[2, 22]], [[1] * 24]], together=1)
def test_packed_rows_equal_transformers(name: str, documents: list[list[int]]) -> None:
    inputs = batch(documents)
    results = []
    for implementation in ("eager", "sdpa_packed"):
        model = build(name, implementation)
        if (name, implementation) == ("gpt-oss", "eager"):  # does not tell its mask about position_ids
            logits = one_by_one(model, inputs["input_ids"], documents)
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        else:
            output = model(**inputs)
            logits, loss = output.logits, output.loss
        loss.backward()
        results.append((logits, loss, gradients(model)))
    (expected, expected_loss, expected_gradients), (found, found_loss, found_gradients) = results
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_loss, expected_loss, rtol=1e-5, atol=1e-5)
    assert found_gradients.keys() == expected_gradients.keys()
    for key, gradient in expected_gradients.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(found_gradients[key], gradient, rtol=1e-5, atol=1e-5 * scale, msg=key)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_document_in_a_row_is_the_document_alone(name: str) -> None:
    inputs = batch()
    expected = one_by_one(build(name, "eager"), inputs["input_ids"], DOCUMENTS)
    model = build(name, "sdpa_packed")
    # In the last two transformers does not look for documents.
    for change in ({}, {"use_cache": True}, {"attention_mask": torch.ones(2, 24, dtype=torch.long)}):
        torch.testing.assert_close(model(**inputs | change).logits, expected, rtol=1e-5, atol=1e-5)


class Sizes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.most = max([self.most, *(leaf.numel() for leaf in tensors)])
        return result


@pytest.mark.parametrize("name", CONFIGS)
def test_no_tensor_of_tokens_times_tokens(name: str) -> None:
    tokens = 384
    inputs = batch([[64, 64, 96, 32, 128]])
    largest = {}
    for implementation in ("eager", "sdpa_packed"):
        model = build(name, implementation)
        with Sizes() as sizes:
            model(**inputs).loss.backward()
        largest[implementation] = sizes.most
    assert largest["eager"] >= tokens * tokens > largest["sdpa_packed"]


def test_a_long_document_with_a_window_takes_bands() -> None:
    model = build("mistral", "sdpa_packed")
    with Sizes() as sizes:
        model(**batch([[256]])).loss.backward()
    assert sizes.most < 256 * 256


def test_many_queries_are_taken_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "_QUERIES_AT_ONCE", 3)
    for name in ("mistral", "gemma2", "gpt-oss"):
        expected = one_by_one(build(name, "eager"), batch()["input_ids"], DOCUMENTS)
        torch.testing.assert_close(build(name, "sdpa_packed")(**batch()).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gemma2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_at_the_ends(name: str, side: str) -> None:
    ids = torch.randint(1, 40, (3, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, padding in ((0, 5), (1, 1)):
        mask[row, slice(padding) if side == "left" else slice(12 - padding, 12)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": False}
    logits = [build(name, implementation)(**inputs).logits for implementation in ("eager", "sdpa_packed")]
    assert logits[1].isfinite().all()
    torch.testing.assert_close(logits[1][mask.bool()], logits[0][mask.bool()], rtol=1e-5, atol=1e-5)


def test_generation_with_a_cache() -> None:
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    texts = [
        build("qwen3", implementation).generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        for implementation in ("sdpa", "sdpa_packed")
    ]
    assert torch.equal(texts[0], texts[1])


def test_dropout_and_scaling_reach_attention() -> None:
    query, key, value = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(1)).unbind(0)
    lengths = torch.tensor([[0, 5, 3]], dtype=torch.int32)
    module = torch.nn.Module()

    def run(**options: Any) -> torch.Tensor:
        return packed_attention.packed_attention(module, query, key, value, lengths, **options)[0]

    scaled = [
        torch.nn.functional.scaled_dot_product_attention(
            query[:, :, part], key[:, :, part], value[:, :, part], is_causal=True, scale=0.3
        )
        for part in (slice(5), slice(5, 8))
    ]
    torch.testing.assert_close(run(scaling=0.3), torch.cat(scaled, dim=2).transpose(1, 2))
    for options in ({}, {"softcap": 50.0}):
        dropped = run(dropout=0.9999, **options)
        assert (dropped == 0).float().mean() > 0.9


def test_the_mask_is_the_lengths_of_the_documents() -> None:
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = CONFIGS["mistral"]()
    config._attn_implementation = "sdpa_packed"
    inputs: Any = {"config": config, "inputs_embeds": torch.zeros(2, 24, 32), "past_key_values": None}
    packed = inputs | {"attention_mask": None, "position_ids": batch()["position_ids"]}
    assert create_causal_mask(**packed).tolist() == [[0, 7, 3, 7, 1, 6], [0, 12, 12, 0, 0, 0]]
    assert create_sliding_window_causal_mask(**packed).tolist() == [[5, 7, 3, 7, 1, 6], [5, 12, 12, 0, 0, 0]]
    padded = torch.ones(2, 24)
    padded[0, :2] = padded[0, 20:] = 0
    assert create_causal_mask(**inputs, attention_mask=padded).tolist() == [[0, -2, 18, -4], [0, 24, 0, 0]]


def test_registering_again_does_no_harm() -> None:
    packed_attention.register()
    assert build("llama", "sdpa_packed")(**batch()).logits.isfinite().all()


# --- bad input ---


def test_padding_between_tokens_is_refused() -> None:
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, 4] = 0
    with pytest.raises(ValueError, match="row 1 has padding between tokens"):
        build("llama", "sdpa_packed")(input_ids=batch()["input_ids"], attention_mask=mask, use_cache=False)


def test_masks_that_are_not_causal_are_refused() -> None:
    from transformers.masking_utils import bidirectional_mask_function

    with pytest.raises(ValueError, match="sees the one after it"):
        packed_attention.document_lengths(1, 4, 4, mask_function=bidirectional_mask_function)
    with pytest.raises(ValueError, match="adds to the causal mask"):
        packed_attention.document_lengths(1, 4, 4, use_vmap=True)


def test_options_without_support_are_refused() -> None:
    x = torch.zeros(1, 2, 4, 4)
    module = torch.nn.Module()
    for options in ({"is_causal": False}, {"position_bias": x}, {"output_attentions": True}):
        with pytest.raises(ValueError, match="got position_bias, is_causal=False or output_attentions"):
            packed_attention.packed_attention(module, x, x, x, torch.tensor([[0, 4]]), **options)
    with pytest.raises(ValueError, match=r"have \[3\] tokens, expected 4"):
        packed_attention.packed_attention(module, x, x, x, torch.tensor([[0, 3]]))
    with pytest.raises(ValueError, match="softcap and s_aux are for training"):
        packed_attention.packed_attention(module, x, x, x, None, softcap=1.0)
