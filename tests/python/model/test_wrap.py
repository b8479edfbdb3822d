from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe.data.microbatch import effective_microbatches, merge_outputs, merge_what_fits, split_call
from roundpipe.model.call.execute_plan import ModelExecutePlan
from roundpipe.model.call.run_config import RoundPipeRunConfig
from roundpipe.model.step.optimizer_context import OptimizerCtx, in_optimizer_context
from roundpipe.model.wrap import AutoRoundPipe, wrap_model_to_roundpipe

DEVICES = 3


class FakePipe(nn.Module):
    """Records how it was made and runs its module's microbatches on the host."""

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig | None = None,
        pin_model: str = "alloc",
    ) -> None:
        super().__init__()
        self.model, self.optim_dtype, self.name, self.pin_model = model, optim_dtype, name, pin_model
        self.config = model_run_config or RoundPipeRunConfig()
        self.original: nn.Module | None = None
        self.__dict__["_wrapped"] = model

    def set_original_model(self, model: nn.Module) -> None:
        self.__dict__["original"] = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        wanted = self.config.num_microbatch
        n = effective_microbatches(args, kwargs, wanted or DEVICES + 1, wanted is None)
        outputs = [self.model(*part, **named) for part, named in split_call(args, kwargs, n)]
        return merge_outputs(outputs, self.config.merge_output)


class FakeSteps:
    def __init__(
        self,
        pipes: dict[str, Any],
        host_parameters: dict[str, nn.Parameter],
        optim_dtype: torch.dtype | None,
        joint: None,
    ) -> None:
        self.pipes, self.host_parameters, self.optim_dtype = pipes, host_parameters, optim_dtype
        self.models = SimpleNamespace(named_parameters=lambda: list(host_parameters.items()))
        self.synchronized = 0

    def step(self, step_fn: Callable[..., Any], is_async: bool, args: Any, kwargs: Any) -> None:
        with OptimizerCtx():
            step_fn(is_async, *args, **kwargs)

    def synchronize(self) -> None:
        self.synchronized += 1

    has_copies = False

    def show_weights(self) -> None:
        pass

    show_gradients = note_reach = before_call = show_weights
    is_untouched = True

    def clear_copies(self, set_to_none: bool) -> None:
        assert set_to_none
        for _, parameter in self.optim_named_parameters("", True):
            parameter.grad = None

    def optim_named_parameters(self, prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, nn.Parameter]]:
        for path, pipe in self.pipes.items():
            for name, parameter in pipe.model.named_parameters():
                yield f"{prefix}{'.' if prefix else ''}{path}.{name}", parameter


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The structure is decided without an engine, so these tests need none."""
    for name, fake in {"RoundPipe": FakePipe, "TorchSteps": FakeSteps}.items():
        monkeypatch.setattr(f"roundpipe.model.wrap.{name}", fake)


pytestmark = pytest.mark.usefixtures("engine")


def wrap(model: nn.Module, **options: Any) -> Any:
    """With thresholds that suit a toy: nothing is tiny."""
    return wrap_model_to_roundpipe(model, **{"lower_threshold": 0, **options})


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class Decoder(nn.Module):
    """Embedding, blocks and head, as language models have them."""

    def __init__(self, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(8, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.drop(self.norm(x)))


def test_root_sequential_is_one_pipe() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    config = RoundPipeRunConfig(num_microbatch=4)
    pipe = wrap(model, name="toy", model_run_config=config, optim_dtype=torch.float32, pin_model="off")
    assert isinstance(pipe, FakePipe) and pipe.model is model and pipe.config == config
    assert (pipe.name, pipe.optim_dtype, pipe.pin_model) == ("toy", torch.float32, "off")


def test_decoder() -> None:
    plain = Decoder()
    ids = torch.arange(4).reshape(2, 2)
    expected = plain(ids)
    model = wrap(plain, name="lm", model_run_config=RoundPipeRunConfig(preserve_rng_state=False))
    assert isinstance(model, AutoRoundPipe)
    assert list(model._step_group.pipes) == ["embed", "layers.0", "layers.1", "layers.2", "norm", "head"]
    assert model._step_group.host_parameters == {}
    assert [layer.config.merge_output for layer in plain.layers] == [merge_what_fits] * 3
    assert all(pipe.config.preserve_rng_state is False for pipe in model._step_group.pipes.values())
    assert plain.layers[1].name == "lm.layers.1"
    assert isinstance(plain.drop, nn.Dropout)  # nothing to move
    torch.testing.assert_close(model(ids), expected)  # not its bits, since rows are computed apart


def test_thresholds() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.big = nn.Linear(100, 100)  # 40 400 bytes
            self.small = nn.Linear(10, 10)  # 440 bytes
            self.group = nn.ModuleDict({"a": Block(50), "b": Block(10)})  # 10 200 and 440 bytes

    def units(**options: int) -> dict[str, Any]:
        return dict(wrap_model_to_roundpipe(Root(), **options)._step_group.pipes)

    by_default = units(lower_threshold=1000)  # upper is 51 480 / 4
    assert list(by_default) == ["big", "small", "group.a", "group.b"]
    assert [pipe.config.num_microbatch for pipe in by_default.values()] == [None, 1, None, 1]
    assert list(units(lower_threshold=1000, upper_threshold=0)) == ["big", "group.a.linear"]
    assert list(units(lower_threshold=10**6, upper_threshold=440)) == ["small", "group.b"]
    host = wrap_model_to_roundpipe(Root(), lower_threshold=10**6, upper_threshold=440)._step_group.host_parameters
    assert list(host) == ["big.weight", "big.bias", "group.a.linear.weight", "group.a.linear.bias"]


def test_own_parameters_of_the_root_make_it_one_layer() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([torch.ones(4)])
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x * self.scales[0])

    assert isinstance(wrap(Root(), lower_threshold=16), FakePipe)
    auto = wrap(Root(), lower_threshold=17, upper_threshold=80)
    assert list(auto._step_group.pipes) == ["linear"] and list(auto._step_group.host_parameters) == ["scales.0"]


def test_skipped_modules_stay_whole() -> None:
    plain = Decoder()
    model = wrap(plain, skip_modules=[plain.layers[1].linear, "head"])
    assert list(model._step_group.pipes) == ["embed", "layers.0", "layers.2", "norm"]
    assert set(model._step_group.host_parameters) == {"layers.1.linear.weight", "layers.1.linear.bias", "head.weight"}
    assert model(torch.ones(2, 2, dtype=torch.long)).shape == (2, 2, 5)


def test_skipping_inside_a_sequential_opens_it() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2))
    model = wrap(plain, skip_modules=["2"])
    assert list(model._step_group.pipes) == ["0", "1"] and type(plain[2]) is nn.Linear
    assert model(torch.ones(3, 2)).shape == (3, 2)


def test_skipping_the_root_wraps_nothing() -> None:
    plain = Decoder()
    model = wrap(plain, skip_modules=[plain])
    assert model._step_group.pipes == {} and len(model._step_group.host_parameters) == 10


def test_sequential_with_its_own_forward_is_one_layer() -> None:
    class Residual(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return x + super().forward(x)

    plain = nn.ModuleDict({"r": Residual(nn.Linear(2, 2)), "empty": nn.Sequential(), "act": nn.Sequential(nn.ReLU())})
    model = wrap(plain, upper_threshold=100)
    assert list(model._step_group.pipes) == ["r"]


def test_override_config() -> None:
    plain = Decoder()
    model = wrap(
        plain,
        lower_threshold=10**6,
        upper_threshold=1000,
        model_run_config=RoundPipeRunConfig(num_microbatch=7, recompute_grain="layer", merge_output=True),
        override_config={
            "norm": RoundPipeRunConfig(num_microbatch=3),
            plain.layers: RoundPipeRunConfig(preserve_rng_state=False),
            plain.layers[0]: RoundPipeRunConfig(merge_output=True),
        },
    )
    configs = {path: pipe.config for path, pipe in model._step_group.pipes.items()}
    assert configs["norm"].num_microbatch == 3 and configs["head"].num_microbatch == 1  # tiny, unless told
    assert configs["layers.0"].num_microbatch == 7
    assert [configs[f"layers.{i}"].merge_output for i in range(3)] == [True, merge_what_fits, merge_what_fits]
    assert all(configs[f"layers.{i}"].preserve_rng_state is False for i in range(3))
    assert all(config.recompute_grain == "layer" for config in configs.values())


def test_override_inside_a_unit_warns() -> None:
    with pytest.warns(UserWarning, match=r"override_config for layers\.1\.linear has no effect"):
        wrap(Decoder(), override_config={"layers.1.linear": RoundPipeRunConfig(num_microbatch=2)})


@pytest.mark.parametrize("argument", ["skip_modules", "override_config"])
@pytest.mark.parametrize("key", ["layers.9", nn.Linear(1, 1)])
def test_unknown_modules(argument: str, key: Any) -> None:
    with pytest.raises(ValueError, match=rf"^\[{argument}\]"):
        wrap(Decoder(), **{argument: {key: RoundPipeRunConfig()}})


def test_shared_module_is_wrapped_once() -> None:
    plain = Decoder(layers=1)
    plain.layers = nn.ModuleList([plain.layers[0]] * 3)
    model = wrap(plain)
    first = plain.layers[0]
    assert isinstance(first, FakePipe) and all(layer is first for layer in plain.layers)
    assert first.config.merge_output is merge_what_fits
    assert list(model._step_group.pipes) == ["embed", "layers.0", "norm", "head"]
    assert model(torch.ones(2, 2, dtype=torch.long)).shape == (2, 2, 5)


def test_module_shared_by_two_units_joins_them() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d, self.e, self.f = (Block() for _ in range(6))
            self.b.linear = self.a.linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.f(self.e(self.d(self.c(self.b(self.a(x))))))

    plain = Root()
    with pytest.warns(UserWarning, match=r"a\.linear\.weight and b\.linear\.weight are one \(tied\).*the whole model"):
        pipe = wrap(plain, lower_threshold=10**6)  # a block is below the default upper_threshold
    assert isinstance(pipe, FakePipe) and pipe.model is plain


def test_tied_parameters_are_kept_in_one_layer() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = Decoder(tied=True)
            self.extra = nn.Linear(5, 5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.extra(self.lm(ids))

    plain = Outer()
    with pytest.warns(UserWarning, match=r"lm\.embed\.weight and lm\.head\.weight .*module lm \(.* bytes\)") as caught:
        model = wrap(plain)
    assert len(caught) == 1 and caught[0].filename == wrap.__code__.co_filename  # points at the caller
    assert list(model._step_group.pipes) == ["lm", "extra"]
    assert model(torch.ones(2, 2, dtype=torch.long)).shape == (2, 2, 5)


def test_ties_inside_one_unit_are_no_concern() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = nn.ModuleDict({"lm": Decoder(tied=True), "other": nn.Linear(90, 90)})
        assert list(wrap(plain, upper_threshold=2000)._step_group.pipes) == ["lm", "other"]


def test_ties_that_cannot_be_kept_together() -> None:
    with pytest.raises(ValueError, match=r"embed\.weight .*head\.weight|head\.weight .*embed\.weight") as info:
        wrap(Decoder(tied=True), skip_modules=["head"])
    assert "a part of it is skipped" in str(info.value)
    with pytest.raises(ValueError, match="expected at most upper_threshold = 400"):
        wrap(Decoder(tied=True), upper_threshold=400)
    skipped = wrap(Decoder(tied=True), skip_modules=["head", "embed"])
    assert list(skipped._step_group.host_parameters) == ["embed.weight"]


def test_modules_wrapped_already_are_kept() -> None:
    plain = Decoder()
    mine = FakePipe(plain.head)
    plain.head = mine
    model = wrap(plain)
    assert model._step_group.pipes["head"] is mine and plain.head is mine
    with pytest.raises(ValueError, match="is wrapped already, as AutoRoundPipe"):
        wrap(model)


def test_no_preset_for_any_model() -> None:
    with pytest.raises(NotImplementedError, match=r"no preset for Decoder, expected one of .'GptOssForCausalLM'"):
        wrap(Decoder(), use_sequential_preset=True)


class Named(Decoder):
    """Has what user models have besides layers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 8}
        self._size = 1

    @property
    def size(self) -> int:
        return self._size

    @size.setter
    def size(self, value: int) -> None:
        self._size = 2 * value

    def generate(self) -> int:
        return self.size + 1

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"mine": super().state_dict(*args, **kwargs)}


def test_attributes_are_the_original_models() -> None:
    plain = Named()
    model = wrap(plain)
    assert model.config is plain.config and model.generate() == 2 and model.embed is plain.embed
    model.size = 5
    assert plain.size == 10 == model.size
    model.note = "x"
    assert plain.note == "x"
    del model.note
    assert not hasattr(plain, "note") and not hasattr(model, "note")
    assert list(model.state_dict()) == ["mine"]
    assert not model.eval().training and not plain.training and not plain.embed.training
    assert "generate" in dir(model) and "forward_backward" in dir(model)
    assert [name for name, _ in model.named_children()] == [name for name, _ in plain.named_children()]
    assert isinstance(model, nn.Module) and repr(model).startswith("AutoRoundPipe(Named(")
    calls = []
    model.register_forward_hook(lambda module, args, output: calls.append(module))
    model(torch.ones(1, 1, dtype=torch.long))
    assert calls == [plain]
    parent = nn.Sequential(model)
    assert [name for name, _ in parent.named_parameters()] == [f"0.{name}" for name, _ in plain.named_parameters()]


def test_forward_backward() -> None:
    torch.manual_seed(0)
    plain, reference = Decoder(), Decoder()
    reference.load_state_dict(plain.state_dict())
    ids, label = torch.arange(4).reshape(2, 2), torch.arange(4)

    def loss_fn(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), target)

    expected_outputs = reference(ids)
    expected = loss_fn(expected_outputs, label)
    expected.backward()  # type: ignore[no-untyped-call]
    model = wrap(plain, model_run_config=RoundPipeRunConfig(num_microbatch=1))
    loss, outputs = model.forward_backward((ids,), label=label, loss_fn=loss_fn, return_outputs=True)
    assert torch.equal(loss, expected) and not loss.requires_grad
    assert torch.equal(outputs, expected_outputs) and not outputs.requires_grad
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)

    losses = model.forward_backward(input_kwargs={"ids": ids}, loss_fn=lambda out, _: (out.sum(), out.mean()))
    assert isinstance(losses, list) and [value.requires_grad for value in losses] == [False, False]
    assert model.forward_backward((ids,), loss_fn=lambda out, _: out.sum()).dim() == 0
    with pytest.raises(ValueError, match="loss_fn returned something that is not a scalar tensor"):
        model.forward_backward((ids,))
    with pytest.warns(UserWarning, match="run_config has no effect"):
        config = RoundPipeRunConfig(num_microbatch=2)
        model.forward_backward((ids,), loss_fn=lambda out, _: out.sum(), run_config=config)


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_hugging_face_model(batch: int) -> None:
    """Its layers get a rotary embedding of shape (1, length, width) and a mask beside the batch."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        use_cache=False,  # a cache would mix the microbatches
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(batch * 6).reshape(batch, 6) % 11
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    expected = plain(input_ids=ids, attention_mask=mask, labels=ids)
    model = wrap(plain, lower_threshold=500, use_sequential_preset=False)
    assert [path for path in model._step_group.pipes if "layers" in path] == [f"model.layers.{i}" for i in range(3)]
    outputs = model(input_ids=ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(outputs.logits, expected.logits)
    loss = model.forward_backward((), {"input_ids": ids, "labels": ids}, loss_fn=lambda out, _: out.loss)
    assert loss.dim() == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_step_and_optimizer_parameters() -> None:
    model = wrap(Decoder(), optim_dtype=torch.float32)
    assert model._step_group.optim_dtype is torch.float32
    names = [name for name, _ in model.optim_named_parameters("m")]
    assert names[:2] == ["m.embed.weight", "m.layers.0.linear.weight"]
    model.forward_backward((torch.ones(1, 1, dtype=torch.long),), loss_fn=lambda out, _: out.sum())
    seen: list[Any] = []

    def step_fn(is_async: bool, a: int, *, b: int) -> None:
        seen.append((is_async, a, b, in_optimizer_context(), len(list(model.parameters()))))
        seen.append([name for name, _ in model.named_parameters()])
        model.zero_grad()

    model.step(step_fn, False, 1, b=2)
    assert seen[0] == (False, 1, 2, True, 10)
    assert seen[1] == [name for name, _ in model.optim_named_parameters()]
    assert all(parameter.grad is None for parameter in model.optim_parameters())
    model.synchronize()
    assert model._step_group.synchronized == 1
    assert next(iter(dict(model.named_parameters()))) == "embed.model.weight"  # outside, what is in the model


def test_optimizer_context_is_per_thread_and_nests() -> None:
    context = OptimizerCtx()
    seen = []
    with context, context:
        thread = threading.Thread(target=lambda: seen.append(in_optimizer_context()))
        thread.start()
        thread.join(10)
        assert in_optimizer_context()
    assert not in_optimizer_context() and seen == [False]
    with pytest.raises(KeyError), OptimizerCtx():
        raise KeyError
    assert not in_optimizer_context()


def test_automatic_plans_need_layers() -> None:
    with pytest.raises(ValueError, match="model 0 is an AutoRoundPipe"):
        ModelExecutePlan.auto("train", wrap(Decoder()))
