"""The parts around the decoder layers: when they are native, that their bits are the Python parts', and their locks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from test_native_models import ROPES, batch, check_plain_bits, fixed_plan, run_plain, wrap
from transformers.loss import loss_utils

import dense_models
import moe_models
import roundpipe
from dense_models import make
from gradients import check_gradients, gradients
from roundpipe import RoundPipeError, _core
from roundpipe.ops import packed_attention
from sweeps import sweep

pytestmark = pytest.mark.usefixtures("one_device")
BEFORE, AFTER = "the part before the layers", "the part after the layers"


def reasons(model: Any) -> dict[str, str]:
    return dict(wrap(copy.deepcopy(model), native=None).layers_are_native.reasons_around)


@pytest.mark.parametrize("name", [*dense_models.MODELS, *moe_models.MODELS])
def test_which_parts_are_native(name: str) -> None:
    model = (moe_models.make if name in moe_models.MODELS else make)(name)
    slides = getattr(model.config, "sliding_window", None) is not None
    expected = (
        "masks for the attention 'eager' have no native form" if "gpt" in name else "layers have a sliding window"
    )
    assert reasons(model) == ({BEFORE: expected} if slides else {})


def test_other_masks_are_made_in_python() -> None:
    found = reasons(make("llama", attn_implementation="eager"))
    assert found == {BEFORE: "masks for the attention 'eager' have no native form"}


def make_packed(name: str) -> Any:
    packed_attention.register()
    family = moe_models if name in moe_models.MODELS else dense_models
    return family.make(name, attn_implementation="packed")


@sweep(
    "name, kind",
    [*dense_models.MODELS, *moe_models.MODELS],
    ["whole", "padded", "packed"],
    together=1,
    short=[*dense_models.MODELS, *moe_models.MODELS][::3],
)
def test_documents_of_packed_rows_are_found_natively(name: str, kind: str) -> None:
    """Also for layers with windows; the bits are the plain model's."""
    model = make_packed(name)
    assert reasons(model) == {}
    check_plain_bits(model, batch(kind))


def test_positions_and_padding_make_documents_together() -> None:
    model, arguments = make_packed("qwen2"), batch("packed")
    arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    arguments["attention_mask"][0, :3] = arguments["attention_mask"][1, -2:] = 0
    check_plain_bits(copy.deepcopy(model), arguments)
    native, python = wrap(copy.deepcopy(model)), wrap(model, native=False)
    assert torch.equal(native(**arguments).logits, python(**arguments).logits)


def test_padding_between_documents_is_refused_as_in_python() -> None:
    arguments = batch("whole")
    arguments["attention_mask"] = torch.ones_like(arguments["input_ids"])
    arguments["attention_mask"][0, 3] = 0
    for native in (True, False):
        with pytest.raises(ValueError, match="has padding between tokens, expected it at the row's ends"):
            wrap(make_packed("llama"), native=native).forward_backward(input_kwargs=arguments)


def test_windows_and_attention_that_change_later_count() -> None:
    def change_window(model: Any) -> None:
        model.config.sliding_window = 2

    def change_attention(model: Any) -> None:
        model.set_attn_implementation("sdpa")

    for name, change, expected in (
        ("mistral", change_window, "its masks are others than when the model was wrapped"),
        ("mistral", change_attention, "layers have a sliding window"),
        ("llama", change_attention, "its masks are others than when the model was wrapped"),
    ):
        model = make_packed(name)
        wrapped = wrap(copy.deepcopy(model))
        with torch.no_grad():
            before = wrapped(**batch("packed")).logits
            for each in (model, wrapped._original_model):
                change(each)
            after = wrapped(**batch("packed")).logits
            assert torch.equal(after, model(**batch("packed"), use_cache=False).logits)
        assert wrapped.layers_are_native.reasons_around == {BEFORE: expected}
        assert name == "llama" or not torch.equal(before, after)


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_positions_that_depend_on_the_batch_are_made_in_python(rope: str) -> None:
    found = reasons(make("llama", rope_parameters={"rope_type": rope, "rope_theta": 100.0, **ROPES[rope]}))
    depends = rope in ("dynamic", "longrope")
    assert found == ({BEFORE: f"rotary positions of the kind '{rope}' depend on the batch"} if depends else {})


def louder(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def other_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    return loss_utils.ForCausalLMLoss(logits, labels, vocab_size) * 3


CHANGES: dict[str, tuple[Callable[[Any], Any], set[str], str]] = {
    "norm": (lambda m: m.model.norm.register_forward_hook(louder), {AFTER}, "its LlamaRMSNorm has hooks"),
    "head": (lambda m: m.lm_head.register_forward_hook(louder), {AFTER}, "its Linear has hooks"),
    "loss": (lambda m: setattr(m, "loss_function", other_loss), {AFTER}, "another loss function"),
    "embedding": (lambda m: m.model.embed_tokens.register_forward_hook(louder), {BEFORE}, "its Embedding has hooks"),
    "positions": (lambda m: setattr(m.model.rotary_emb, "attention_scaling", 0.5), set(), ""),
    "padding": (lambda m: setattr(m.model.embed_tokens, "padding_idx", 2), set(), ""),
    "hidden states": (
        lambda m: setattr(m.config, "output_hidden_states", True),
        {BEFORE, AFTER},
        "output_hidden_states is on",
    ),
    "masks": (
        lambda m: m.set_attn_implementation("eager"),
        {BEFORE},
        "masks for the attention 'eager' have no native form",
    ),
    "model": (lambda m: m.model.register_forward_hook(lambda *_: None), {BEFORE, AFTER}, "LlamaModel has hooks"),
}


@sweep("name, later", CHANGES, [False, True], together=1)
def test_what_is_changed_counts(name: str, later: bool) -> None:
    """Before the model is wrapped, or after a call of it."""
    change, parts, expected = CHANGES[name]
    model = make("llama").train()
    plain = copy.deepcopy(model)
    change(plain)
    outputs, theirs = run_plain(plain, batch("padded"))
    if not later:
        change(model)
    wrapped = wrap(model)
    if later:
        with torch.no_grad():
            assert not torch.equal(wrapped(**batch("whole")).logits, outputs.logits)
        change(model)
    mine = wrapped(**batch("padded"))
    mine.loss.backward()
    wrapped.synchronize()
    found = wrapped.layers_are_native.reasons_around
    assert found.keys() == parts and all(expected in reason for reason in found.values()), found
    assert wrapped.layers_are_native
    assert str(wrapped.layers_are_native) == "all 2 decoder layers run natively" + "".join(
        f"; {part} runs in Python: {reason}" for part, reason in found.items()
    )
    assert torch.equal(mine.loss, outputs.loss) and torch.equal(mine.logits, outputs.logits)
    check_gradients(gradients(model), theirs, exact=True)


def test_other_models_are_called_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(transformers.LlamaForCausalLM):
        pass

    model = make("llama")
    model.__class__ = Mine
    assert set(reasons(model).values()) == {"the model is Mine, not LlamaForCausalLM"}
    original = loss_utils.fixed_cross_entropy
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", lambda *args, **kwargs: original(*args, **kwargs))
    expected = "transformers.loss.loss_utils.fixed_cross_entropy has been replaced"
    assert set(reasons(make("llama")).values()) == {expected}


@sweep("name, kind", ["llama", "qwen3_moe"], ["whole", "padded", "packed"], together=1)
def test_outputs_are_the_models(name: str, kind: str) -> None:
    """Their class and their keys too, with a loss, without one, and with nothing but a loss."""
    model = moe_models.make(name) if name in moe_models.MODELS else make(name)
    wrapped = wrap(copy.deepcopy(model))
    python = wrap(copy.deepcopy(model), native=False)
    arguments = batch(kind)
    without = {key: value for key, value in arguments.items() if key != "labels"}
    for given, options in ((arguments, {}), (without, {}), (arguments, {"roundpipe_loss_only": True})):
        mine, theirs = wrapped(**given, **options), python(**given, **options)
        assert type(mine) is type(theirs) and list(mine.items()).__len__() == len(theirs.items())
        for (key, value), (other, expected) in zip(mine.items(), theirs.items(), strict=True):
            assert key == other and (value is expected is None or torch.equal(value, expected))


def test_microbatches_have_the_weight_of_their_labels() -> None:
    """One of them has no label that counts, which runs in Python at its end."""
    arguments = batch("whole", rows=3)
    arguments["labels"][1] = -100
    arguments["labels"][2, :5] = -100
    for extra in ({}, {"num_items_in_batch": torch.tensor(7)}, {"num_items_in_batch": 7}):
        found = []
        for native in (True, False):
            model = make("llama")
            wrapped = wrap(model, microbatches=3, native=native)
            loss, outputs = wrapped.forward_backward(input_kwargs={**arguments, **extra}, return_outputs=True)
            only = wrapped.forward_backward(input_kwargs={**arguments, **extra})
            wrapped.synchronize()
            found.append((loss, outputs.logits, outputs.loss, only, gradients(model)))
        assert all(map(torch.equal, found[0][:4], found[1][:4]))
        check_gradients(found[0][4], found[1][4], exact=True)


def test_arguments_of_other_forms_begin_in_python() -> None:
    """Each of them has the Python layers' outputs, also after calls of a plain form."""
    model = make("llama")
    wrapped, python = wrap(copy.deepcopy(model)), wrap(copy.deepcopy(model), native=False)
    ids, labels = batch("whole")["input_ids"], batch("whole")["labels"]
    kept = torch.arange(ids.shape[1]).expand(ids.shape) > 1
    forms: list[dict[str, Any]] = [
        {"input_ids": ids},
        {"inputs_embeds": model.model.embed_tokens(ids).detach()},
        {"input_ids": ids, "attention_mask": kept},
        {"input_ids": ids, "attention_mask": torch.ones(ids.shape[1], ids.shape[1]).tril().bool()[None, None]},
        {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None] + 1},
        {"input_ids": ids, "logits_to_keep": 2},
        {"input_ids": ids, "shift_labels": labels.roll(-1, 1), "labels": labels},
        {"input_ids": ids, "labels": labels, "output_hidden_states": True},
    ]
    for arguments in forms:
        with torch.no_grad():
            outputs, expected = wrapped(**arguments), python(**arguments)
        assert torch.equal(outputs.logits, expected.logits), arguments.keys()
        assert outputs.loss is expected.loss or torch.equal(outputs.loss, expected.loss), arguments.keys()
        assert (outputs.hidden_states is None) == (expected.hidden_states is None)


def test_own_loss_functions_get_the_outputs() -> None:
    def loss_fn(outputs: Any, label: Any) -> torch.Tensor:
        assert type(outputs).__name__ == "CausalLMOutputWithPast"
        value: torch.Tensor = outputs.loss * label.sum()
        return value

    found = []
    for native in (True, False):
        model = make("llama")
        wrapped = wrap(model, microbatches=2, native=native)
        label = torch.tensor([1.0, 2.0])
        loss = wrapped.forward_backward(input_kwargs=batch("whole", rows=2), label=label, loss_fn=loss_fn)
        wrapped.synchronize()
        found.append((loss, gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    check_gradients(found[0][1], found[1][1], exact=True)


def test_a_loss_that_is_not_a_number_is_refused() -> None:
    model = make("llama")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    wrapped = wrap(model)
    with pytest.raises(RoundPipeError, match=re.escape("[forward_backward] the loss is NaN")):
        wrapped.submit(input_kwargs=batch("whole")).loss()


def test_tokens_out_of_range_are_refused_as_in_python() -> None:
    arguments = batch("whole")
    arguments["input_ids"][0, 0] = 31
    messages = []
    for native in (True, False):
        with pytest.raises(IndexError) as raised:
            wrap(make("llama"), native=native).forward_backward(input_kwargs=arguments)
        messages.append(str(raised.value).splitlines()[0])
    assert messages[0] == messages[1]


def taken_by(call: Callable[[], Any]) -> int:
    """How often the engine takes the interpreter lock in a call, after two that make all there is."""
    taken = []
    for _ in range(6):
        before = _core.interpreter_lock_acquisitions()
        call()
        taken.append(_core.interpreter_lock_acquisitions() - before)
    return min(taken[2:])  # a value of one call may be dropped in the next


def test_no_part_of_a_plain_model_takes_the_interpreter_lock() -> None:
    """A call asks its layers for their state. Further microbatches take no lock, forward or backward."""
    roundpipe.devices("virtual:1")
    for step in (True, False):
        taken = []
        for microbatches in (2, 8):
            config = {**fixed_plan(2)} if step else {}
            wrapped = wrap(make("llama"), microbatches=microbatches, config=config)
            arguments = batch("padded", rows=microbatches)

            def call(wrapped: Any = wrapped, arguments: Any = arguments, step: bool = step) -> None:
                if step:
                    wrapped.forward_backward(input_kwargs=arguments)
                else:
                    with torch.no_grad():
                        wrapped(**arguments)
                wrapped.synchronize()

            taken.append(taken_by(call))
        # The last of a call's values may be dropped by a thread of the engine, which takes the lock for that.
        assert abs(taken[1] - taken[0]) < 6, (step, taken)


def test_odd_labels_have_plain_bits() -> None:
    """A tied head, a bias-free norm in 16 bits, and labels on the last token alone."""
    arguments = batch("whole")
    arguments["labels"][:, :-1] = -100
    check_plain_bits(make("qwen3", torch.bfloat16, tie_word_embeddings=True), arguments)
