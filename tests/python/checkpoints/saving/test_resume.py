"""A resumed training has the bits of the one that was not interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe
from resumable import Recipe, Training, assert_same_state
from sweeps import mostly_long

pytestmark = pytest.mark.filterwarnings("ignore:.*BatchNorm1d, which in training mode")

RECIPES = {
    "fp32, asynchronous": Recipe(),
    "fp32, synchronous": Recipe(is_async=False),
    "bf16": Recipe(dtype=torch.bfloat16, normed=False),
    "bf16, clipped": Recipe(dtype=torch.bfloat16, clip=0.05),
    "fp16 with a scaler": Recipe(dtype=torch.float16, scaled=True, normed=False),
    "fp16 with a scaler, synchronous": Recipe(dtype=torch.float16, scaled=True, normed=False, is_async=False),
    "8-bit moments": Recipe(options={"moments": "8bit"}),
    "fp32 gradients": Recipe(dtype=torch.bfloat16, normed=False, calls=2, options={"gradients": "float32"}),
    "SGD with momentum": Recipe(kind="SGD", options={"momentum": 0.9}),
    "NAdam": Recipe(kind="NAdam"),
    "frozen layers": Recipe(frozen=(0, 2), normed=False),
    "torch's AdamW": Recipe(optimizer="torch"),
    "torch's AdamW, synchronous": Recipe(optimizer="torch", is_async=False),
    "torch's AdamW over bf16": Recipe(optimizer="torch", dtype=torch.bfloat16, normed=False),
    "torch's SGD with a scaler": Recipe(optimizer="torch", kind="SGD", dtype=torch.float16, scaled=True, normed=False),
    "24-bit masters": Recipe(dtype=torch.bfloat16, normed=False, options={"masters": "24bit", "moments": "8bit"}),
}
RESUMED_ON = {name: 1 + index % 3 for index, name in enumerate(RECIPES)}


def uninterrupted(recipe: Recipe, steps: int) -> dict[str, torch.Tensor]:
    training = Training(recipe, devices=4)
    training.run(steps)
    return training.final()


SHORT = (
    "fp32 gradients",
    "8-bit moments",
    "24-bit masters",
    "fp16 with a scaler, synchronous",
    "frozen layers",
    "torch's AdamW over bf16",
)


@pytest.mark.parametrize("snapshot_memory", mostly_long([1, None], 1), ids=str)
@pytest.mark.parametrize("name", mostly_long(RECIPES, *SHORT))
def test_a_resumed_run_has_the_same_bits(name: str, snapshot_memory: int | None, tmp_path: Path) -> None:
    recipe = RECIPES[name]
    expected = uninterrupted(recipe, 9)
    training = Training(recipe, devices=4)
    training.run(5)
    save = training.save(tmp_path, snapshot_memory=snapshot_memory)
    training.run(4)
    assert_same_state(training.final(), expected)  # the save has changed nothing
    assert save.wait().bytes > 0
    assert save.step == 5
    resumed = Training(recipe, devices=RESUMED_ON[name])
    resumed.run(1)  # loading replaces whatever there is
    assert resumed.load(tmp_path).step == 5
    resumed.run(4)
    assert_same_state(resumed.final(), expected)


def test_the_number_of_microbatches_is_the_checkpoint_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe(num_microbatch=None, normed=False)
    expected = uninterrupted(recipe, 4)
    training = Training(recipe, devices=4)
    training.run(2)
    training.save(tmp_path, wait=True)
    resumed = Training(recipe, devices=1)
    resumed.load(tmp_path)
    assert "num_microbatch of resumed is 5, as in the checkpoint" in capsys.readouterr().err
    resumed.run(2)
    assert_same_state(resumed.final(), expected)


def weights_after(
    pipe: Any, optimizer: Any, steps: range, vocabulary: int, shape: tuple[int, int]
) -> list[torch.Tensor]:
    """The weights of a language model after these steps, each of a batch of its own."""
    for step in steps:
        ids = torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(step))
        pipe.forward_backward((), {"input_ids": ids, "labels": ids})
        pipe.step(optimizer)
    pipe.synchronize()
    return [parameter.detach().clone() for parameter in pipe.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("native", mostly_long([False, None], None))
def test_a_loss_goes_on_in_chunks_of_the_size_that_it_had(
    native: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def make() -> tuple[Any, Any]:
        sizes = {"vocab_size": 40_000, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
        pipe = roundpipe.wrap_model_to_roundpipe(
            model, native=native, model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=1)
        )
        return pipe, roundpipe.optim.SGD(pipe, lr=0.1)

    def run(pipe: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
        return weights_after(pipe, optimizer, steps, 40_000, (1, 600))

    roundpipe.devices("virtual:1")
    first, optimizer = make()
    first._language_model.keep_chunk_logit_bytes(2**20)  # as if saved where chunks have another size
    run(first, optimizer, range(2))
    roundpipe.save_checkpoint(tmp_path, first, optimizer, wait=True)
    expected = run(first, optimizer, range(2, 4))
    plain, optimizer = make()
    plain_result = run(plain, optimizer, range(4))
    assert not all(map(torch.equal, plain_result, expected))
    resumed, optimizer = make()
    roundpipe.load_checkpoint(tmp_path, resumed, optimizer)
    assert "have 1 MiB of logits, as in the checkpoint" in capsys.readouterr().err
    assert all(map(torch.equal, run(resumed, optimizer, range(2, 4)), expected))
    roundpipe.save_checkpoint(tmp_path / "again", resumed, optimizer, wait=True)
    again, optimizer = make()
    roundpipe.load_checkpoint(tmp_path / "again", again, optimizer)
    assert again._language_model.chunk_logit_bytes("cpu") == 2**20


def test_a_training_in_another_arithmetic_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(arithmetic: str) -> tuple[Any, Any]:
        sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
        pipe = roundpipe.wrap_model_to_roundpipe(model, native=True, arithmetic=arithmetic)
        return pipe, roundpipe.optim.SGD(pipe, lr=0.1)

    def run(pipe: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
        return weights_after(pipe, optimizer, steps, 40, (4, 9))

    roundpipe.devices("virtual:2")
    first, optimizer = make("fast")
    run(first, optimizer, range(2))
    roundpipe.save_checkpoint(tmp_path, first, optimizer, wait=True)
    expected = run(first, optimizer, range(2, 4))
    roundpipe.devices("virtual:1")
    for arithmetic in ("fast", "exact"):
        resumed, optimizer = make(arithmetic)
        capsys.readouterr()
        roundpipe.load_checkpoint(tmp_path, resumed, optimizer)
        said = "computes in exact arithmetic, and the checkpoint in fast" in capsys.readouterr().err
        same = all(map(torch.equal, run(resumed, optimizer, range(2, 4)), expected))
        assert (said, same) == ((False, True) if arithmetic == "fast" else (True, False))


def test_states_of_any_object_and_random_states(tmp_path: Path) -> None:
    import random

    import numpy

    class Counter:
        value = 0

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value, 3: (1.5, float("inf")), "array": numpy.arange(4), "raw": b"\x00\xff"}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state[3] == (1.5, float("inf"))
            assert state["array"].tolist() == [0, 1, 2, 3]
            assert state["raw"] == b"\x00\xff"
            self.value = state["value"]

    training = Training(Recipe(), devices=1)
    counter = Counter()
    counter.value = 2**70
    folder = tmp_path / "run"
    roundpipe.save_checkpoint(
        folder, training.model, training.optimizer, state={"counter": counter, "note": ["text", None]}, wait=True
    )
    drawn = (random.random(), float(numpy.random.rand()), float(torch.rand(())))
    other = Counter()
    loaded = roundpipe.load_checkpoint(folder, training.model, training.optimizer, state={"counter": other})
    assert other.value == 2**70
    assert loaded.state["note"] == ["text", None]
    assert (random.random(), float(numpy.random.rand()), float(torch.rand(()))) == drawn


def test_a_plain_loop_over_the_model_s_own_parameters(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model = roundpipe.RoundPipe(layers, name="plain")
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run(model: Any, optimizer: torch.optim.Optimizer, steps: range, clears: str = "after") -> list[float]:
        losses = []
        for step in steps:
            if clears == "before":
                optimizer.zero_grad()
            loss = model(torch.full((6, 8), float(step))).square().mean()
            loss.backward()
            losses.append(float(loss))
            if clears != "never":
                optimizer.step()
            if clears == "after":
                optimizer.zero_grad()
        return losses

    # What is in .grad then: nothing, a gradient that no step has used, and one that the next step does not want.
    for clears, later in (("after", "after"), ("never", "after"), ("before", "before")):
        model, optimizer = make(0)
        run(model, optimizer, range(3))
        run(model, optimizer, range(3, 4), clears)
        roundpipe.save_checkpoint(tmp_path / clears, model, optimizer, wait=True)
        expected = run(model, optimizer, range(4, 8), later)
        again, its_optimizer = make(1)
        roundpipe.load_checkpoint(tmp_path / clears, again, its_optimizer)
        assert run(again, its_optimizer, range(4, 8), later) == expected, clears


@pytest.mark.parametrize("is_saved_by", ["fused", "function"])
def test_a_save_has_what_was_assigned_and_written_before_it(is_saved_by: str, tmp_path: Path) -> None:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = roundpipe.RoundPipe(torch.nn.Sequential(torch.nn.Linear(4, 4)).half(), name="written")
        if is_saved_by == "fused":
            return model, roundpipe.optim.SGD(model, lr=0.0)
        return model, torch.optim.SGD(model.optim_parameters(), lr=0.0)

    model, optimizer = make()
    weight, bias = model.get_parameter("0.weight"), model.get_parameter("0.bias")
    weight.data = torch.full((4, 4), 0.5, dtype=torch.float16)
    with torch.no_grad():
        bias.fill_(2.0)
    roundpipe.save_checkpoint(tmp_path, model, optimizer, step=1, wait=True)
    again, its_optimizer = make()
    roundpipe.load_checkpoint(tmp_path, again, its_optimizer)
    again.forward_backward((torch.ones(2, 4).half(),), loss_fn=lambda outputs, _: outputs.float().sum())
    again.step(its_optimizer if is_saved_by == "fused" else its_optimizer.step)
    state = again.state_dict()
    assert torch.equal(state["0.weight"], torch.full((4, 4), 0.5, dtype=torch.float16))
    assert torch.equal(state["0.bias"], torch.full((4,), 2.0, dtype=torch.float16))
