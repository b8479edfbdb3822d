"""Tries models of text with pictures, videos or sounds in the pipeline, beside the plain model."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any

import peft
import torch

import roundpipe
from gradients import gradients
from multimodal_models import MIXED as MIXED
from multimodal_models import MODELS, Batch, Multimodal, Sizes, build, together
from multimodal_others import OTHERS
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe

ALL = {**MODELS, **OTHERS}
CASES: dict[str, tuple[str, Sizes]] = {
    "text": ("images", [[], [], []]),
    "one picture a row": ("images", [[0], [1], [2]]),
    "uneven pictures": ("images", [[1, 3], [], [2]]),
    "one video a row": ("videos", [[0], [1], [2]]),
    "uneven videos": ("videos", [[1, 3], [], [2]]),
    "one sound a row": ("sounds", [[0], [1], [2]]),
    "uneven sounds": ("sounds", [[1, 3], [], [2]]),
}
TRAINED = ("all", "adapters")
LARGEST = 1e-5  # difference of a gradient over several microbatches, as a part of the largest gradient


def cases_of(model: Multimodal) -> list[str]:
    """The names of the cases that a model has."""
    taken = [case for case, (kind, _) in CASES.items() if getattr(model, kind) is not None]
    if model.images is None:
        taken.append("text")
    if model.videos is not None:
        taken.append(MIXED)
    # Without a decoder of its own, text is the whole of it; with one, each row has one sound.
    taken = [case for case in taken if not model.one_each or case == "one sound a row"]
    return [case for case in taken if case not in model.without]


def batch_of(model: Multimodal, case: str) -> Batch:
    """The batch of a case."""
    if case == MIXED:
        assert model.images is not None and model.videos is not None
        return together(model.images([[2], [0, 1]]), model.videos([[], [1, 0], [3]]))
    kind, sizes = CASES[case]
    make = getattr(model, kind) or model.images or model.sounds
    made: Batch = make(sizes)
    return made


def prepared(model: Multimodal, trained: str) -> Any:
    """The model to train: all of it, or adapters of the text's layers beside a frozen tower."""
    made = build(model)
    if trained == "all":
        return made
    names = f"(?!.*{model.tower}).*\\.(q_proj|v_proj|down_proj|w2|query_key_value|qkv_proj)"
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=False)
    torch.manual_seed(3)
    return peft.get_peft_model(made, config).train()


@dataclass(frozen=True)
class Trial:
    """What a step gave beside the plain model.

    Attributes:
        loss: the difference of the losses.
        gradient: the largest difference of a gradient, as a part of the largest gradient.
        where: the name of that parameter.
        recomputed: whether the plain model recomputed its layers: torch's own checkpointing gives some layers other
            bits (a convolution over tokens in Qwen3.5).
        warned: the warning that several microbatches compute something else, if there was one.
    """

    loss: float
    gradient: float
    where: str
    recomputed: bool = False
    warned: str | None = None

    def holds(self, microbatches: int) -> bool:
        """Whether it has the same bits, or over several microbatches is close."""
        limit = LARGEST if microbatches > 1 else 0.0
        return abs(self.loss) <= limit and self.gradient <= limit


def trial(model: Any, batch: Batch, microbatches: int, devices: int) -> Trial:
    """One forward and backward of a model on virtual devices, and of a copy outside."""
    roundpipe.devices(f"virtual:{devices},debug")
    before = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        wrapped = wrap_model_to_roundpipe(model, model_run_config=RoundPipeRunConfig(num_microbatch=microbatches))
    warned = next((str(each.message) for each in noted if "set num_microbatch=1" in str(each.message)), None)
    loss = float(wrapped.forward_backward(input_kwargs=batch))
    wrapped.synchronize()
    found = replace(_beside(copy.deepcopy(before), batch, loss, gradients(model)), warned=warned)
    if microbatches > 1 or found.gradient == 0 or not before.supports_gradient_checkpointing:
        return found
    before.gradient_checkpointing_enable()
    return replace(_beside(before, batch, loss, gradients(model)), recomputed=True)


def _beside(plain: Any, batch: Batch, loss: float, mine: dict[str, torch.Tensor]) -> Trial:
    expected = plain(**batch).loss
    expected.backward()
    theirs = gradients(plain)
    largest = max(float(gradient.abs().max()) for gradient in theirs.values())
    nothing = torch.zeros(())
    differences = {
        name: float((mine.get(name, nothing) - theirs.get(name, nothing)).abs().max())
        for name in mine.keys() | theirs.keys()
    }
    where = max(sorted(differences), key=lambda name: differences[name])
    return Trial(loss - float(expected.detach()), differences[where] / largest, where)


def tried(name: str, case: str, trained: str, microbatches: int, devices: int) -> Trial:
    """A step of one of `ALL`."""
    model = ALL[name]
    return trial(prepared(model, trained), batch_of(model, case), microbatches, devices)
