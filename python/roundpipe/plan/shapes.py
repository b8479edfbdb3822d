"""The memory and operations of a causal language model's layers, derived from its configuration, without weights.

The model is made on torch's meta device, so nothing is allocated, and its own forward runs there once: up to its first
layer, one layer of each kind, and from the last layer to the loss. `ShapeMeter` counts the tensors. This assumes that
attention is fused and that feed-forward blocks treat each token independently; a real run checks both, with values.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.following.language_model import language_model_in
from roundpipe.following.layers.shell import PythonLayer
from roundpipe.following.native.decoder import NativeDecoder, native_decoder
from roundpipe.following.parts import LEAST_LOGITS_BYTES
from roundpipe.following.survey import find_layers
from roundpipe.following.tower_layers import likely_layers
from roundpipe.following.towers import modules_beside
from roundpipe.model.losses.lazy_logits import LazyLogits
from roundpipe.model.losses.token_loss import TokenLoss
from roundpipe.model.memory.budget import ADAM, HostPrediction, UpdateRule, predict_unloaded
from roundpipe.ops.functional import Arithmetic
from roundpipe.ops.token_wise import Candidates, chunk_of, in_chunks
from roundpipe.plan.shape_meter import NumbersWithValues, ShapeMeter
from roundpipe.quantise import encode_weights
from roundpipe.quantise.adapters import add_adapters
from roundpipe.quantise.modules import count_parameters, plain_class

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PretrainedConfig

    from roundpipe.huggingface.weights.direct_loading import Kind

_META = torch.device("meta")
_ATTENTION = "roundpipe_shapes"


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """One layer of the pipeline.

    Attributes:
        name: its name in the pipeline.
        footprint: for one microbatch.
        size: bytes of weights and gradients.
        forward: what a device does for one microbatch.
        backward: without the recompute, and without sums of gradients.
    """

    name: str
    footprint: _core.LayerFootprint
    size: _core.LayerBytes
    forward: _core.LayerWork
    backward: _core.LayerWork


@dataclasses.dataclass(frozen=True)
class ModelShapes:
    """A model, with one microbatch of rows of so many tokens.

    Attributes:
        layers: the part before the model's own layers, these layers, and the part after them.
        first_trained: layers below need no backward.
        parameters: the number of all parameters, and of the trained ones.
        arithmetic: of the layers and, if it is another one than was asked for, why.
    """

    name: str
    tokens: int
    layers: list[LayerShape]
    first_trained: int
    parameters: int
    trained: int
    model: nn.Module
    arithmetic: str

    @property
    def trained_bytes(self) -> int:
        """Of the weights that a step updates."""
        return sum(parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)

    def host(self, rule: UpdateRule = ADAM, values: int = 0) -> HostPrediction:
        """The model's host memory; see `predict_unloaded`."""
        return dataclasses.replace(predict_unloaded(self.model, rule), values=values)


def make_model(
    config: PretrainedConfig,
    lora_rank: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    adapters: PeftConfig | None = None,
    quantise: str | None = None,
    keep: Sequence[str] = (),
    folder: Path | None = None,
    kind: Kind = "causal",
) -> nn.Module:
    """Makes the model on the meta device.

    Args:
        lora_rank: None trains everything; otherwise only PEFT's adapters of that rank on every `nn.Linear` with the
            name of one in the layers of the text. Experts stored as one tensor are not such modules.
        adapters: trains these instead.
        quantise: the format of frozen weights, and `keep` the modules whose weights stay, as of `from_pretrained`.
        folder: with the model's files, whose headers are read if the config says that weights are encoded there.
        kind: of the model.

    Raises:
        ValueError: transformers has no causal language model, or no fused attention, for the configuration.
    """
    from transformers import AttentionInterface

    from roundpipe.huggingface.weights.direct_loading import AUTO_CLASSES

    AttentionInterface.register(_ATTENTION, _fused_attention)
    config = copy.deepcopy(config)
    config._attn_implementation = None  # transformers chooses, as it does for a run
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        del config.quantization_config
    maker = AUTO_CLASSES[kind]
    try:
        with _META:
            model: Any = maker.from_config(config, dtype=dtype)
    except (KeyError, ValueError) as error:
        raise ValueError(f"[shapes] transformers cannot make a causal language model of it: {error}") from None
    if model.config._attn_implementation != "sdpa":
        raise ValueError(
            f"[shapes] {type(model).__name__} runs with attention '{model.config._attn_implementation}', expected "
            "'sdpa': the memory of other kinds cannot be predicted"
        )
    model.set_attn_implementation(_ATTENTION)
    if stored is not None:
        if folder is None or quantise is not None:
            raise ValueError(
                "[shapes] the config says that the model's weights are quantised, expected the folder of its files and "
                "no other format; remove quantization_config to plan for plain weights"
            )
        from roundpipe.huggingface.weights.encoded_files import place_stored

        place_stored(model, folder, dict(stored))
    elif quantise is not None:
        encode_weights(model, quantise, keep)
    if lora_rank is not None:
        from peft import LoraConfig

        modules = _layers_of_text(model).named_modules()
        linear = {name.rpartition(".")[2] for name, module in modules if plain_class(module) is nn.Linear}
        adapters = LoraConfig(r=lora_rank, target_modules=sorted(linear), task_type="CAUSAL_LM")
    if adapters is not None:
        with _META:
            model = add_adapters(model, adapters, low_cpu_mem_usage=True)
    made: nn.Module = model.train()
    return made


def _layers_of_text(model: Any) -> nn.ModuleList:
    """The layers of a transformers model, not those of a tower, which may be larger."""
    return find_layers(model.get_decoder())


def measure(
    model: nn.Module,
    tokens: int,
    name: str = "model",
    rows: int = 1,
    chunk_logit_bytes: int = 0,
    arithmetic: Arithmetic = _core.DEFAULT_ARITHMETIC,
    pictured: Mapping[str, Any] | None = None,
) -> ModelShapes:
    """Measures each layer for a microbatch of some rows.

    Args:
        model: from `make_model`.
        chunk_logit_bytes: of the loss, see `linear_cross_entropy`; 0: as on a card.
        arithmetic: of the loss, and of layers that have a native form.
        pictured: the model's arguments for rows with pictures; None: rows of text alone.

    Raises:
        ValueError: its forward needs values, or it is not a causal language model.
    """
    inner = language_model_in(model)
    if inner is None:
        raise ValueError(f"[shapes] {type(model).__name__} is not a causal language model of transformers")
    ids = torch.empty((rows, tokens), dtype=torch.int64, device=_META)
    arguments = {"input_ids": ids, "labels": ids} if pictured is None else padded_to(tokens, pictured)
    if pictured is not None:
        _with_masks(model)
    walk = _Walk(model, inner, arguments, chunk_logit_bytes, arithmetic)
    try:
        numbers = NumbersWithValues()  # type: ignore[no-untyped-call]
        with nullcontext() if pictured is None else numbers:
            layers = walk.run()
    except NotImplementedError as error:
        raise ValueError(f"[shapes] {type(inner).__name__} cannot run without values: {error}") from error
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise ValueError(f"[shapes] {type(inner).__name__} cannot run without values: {error}") from error
    trained = [index for index, layer in enumerate(layers) if layer.size.gradients]
    return ModelShapes(
        name=name,
        tokens=tokens,
        layers=layers,
        first_trained=trained[0] if trained else len(layers),
        parameters=count_parameters(model),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        model=model,
        arithmetic=walk.arithmetic_text(),
    )


class _FusedAttention(TorchFunctionMode):
    """Keeps attention fused: on the meta device, torch takes it apart, which no accelerator does."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        dropout, causal = kwargs.get("dropout_p", 0.0), kwargs.get("is_causal", False)
        mask = kwargs.get("attn_mask")
        if mask is not None:  # each layer keeps one of its own
            mask = torch.empty(mask.shape, dtype=args[0].dtype, device=_META)
        return fused(*args[:3], dropout, causal, attn_mask=mask, scale=kwargs.get("scale"))[0]


def _with_masks(model: Any) -> None:
    """Lets a model make masks for padded rows, which it does not for an attention that it does not know."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = f"{_ATTENTION}_with_masks"
    AttentionInterface.register(name, _fused_attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)


def _fused_attention(*args: Any, **kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    with _FusedAttention():
        return sdpa_attention_forward(*args, **kwargs)


def _tensors(value: Any) -> list[torch.Tensor]:
    distinct = {id(leaf): leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    return list(distinct.values())


def _size(modules: Iterable[nn.Module], tied: set[int], but: Iterable[nn.Module] = ()) -> _core.LayerBytes:
    without = {id(tensor) for module in but for tensor in (*module.parameters(), *module.buffers())}
    parameters = {id(p): p for module in modules for p in module.parameters()}.values()
    buffers = {id(b): b for module in modules for b in module.buffers()}.values()
    tensors = [tensor for tensor in (*parameters, *buffers) if id(tensor) not in without]
    return _core.layer_bytes(tensors, [id(tensor) in tied for tensor in tensors])


def _decode(
    native: NativeDecoder, chunk: int | None, hidden: torch.Tensor, attention_mask: Any = None, **kwargs: Any
) -> torch.Tensor:
    config = native.config()
    assert config is not None, native.reason
    weights = [parameter for _, parameter in native.layer.named_parameters()]
    cos, sin = kwargs["position_embeddings"]
    experts = "grouped_mm" if native.has_experts else None
    return _core.decode(
        config, native.names, weights, hidden, cos, sin, attention_mask, "sdpa", chunk or 0, experts=experts
    )


class _Walk:
    """One forward of the model, with its layers run separately."""

    def __init__(
        self, model: nn.Module, inner: Any, arguments: Mapping[str, Any], chunk_logit_bytes: int, arithmetic: Arithmetic
    ) -> None:
        self._model, self._chunk_logit_bytes, self._arithmetic = model, chunk_logit_bytes, arithmetic
        self._inner, self._arguments = inner, arguments
        self._layers = list(_layers_of_text(inner))
        self._ids = arguments["input_ids"]
        self._given = sum(value.nbytes for value in arguments.values() if isinstance(value, torch.Tensor))
        self._towers = _Towers(inner, self._layers)
        ends = self._inner.get_input_embeddings(), self._inner.get_output_embeddings()
        self._tied = {id(p) for p in ends[0].parameters()} & {id(p) for p in ends[1].parameters()}
        self._meter = ShapeMeter([*model.parameters(), *model.buffers(), *_tensors(arguments)])
        self._known: dict[Any, tuple[_core.LayerFootprint, _core.LayerWork, _core.LayerWork, Any]] = {}
        self._shapes: list[LayerShape] = []
        self._work, self._base = _core.LayerWork(), 0
        # Arguments of a layer's first and last call: if freed early, they would count as room made by later code.
        self._held: list[Any] = []
        self._exactly: list[str] = []  # why something computes exactly

    def run(self) -> list[LayerShape]:
        in_towers = [(layer, layer.forward) for layer in self._towers.layers]
        meter = self._meter
        try:
            for index, layer in enumerate(self._layers):
                layer.__dict__["forward"] = self._stand_in(index, layer)
            for index, (layer, forward) in enumerate(in_towers):
                layer.__dict__["forward"] = self._in_tower(index, layer, forward)
            with torch.enable_grad(), meter, self._postponed_logits(), self._towers.watched():
                output = self._model(**self._arguments, use_cache=False)
                loss = output[0] if isinstance(output, tuple) else output.loss
                del output
                self._after(loss)
        finally:
            for layer in (*self._layers, *self._towers.layers):
                layer.__dict__.pop("forward", None)
            for parameter in self._model.parameters():
                parameter.grad = None
        return self._shapes

    def arithmetic_text(self) -> str:
        """See `ModelShapes.arithmetic`."""
        reasons = "; ".join(dict.fromkeys(self._exactly))
        return self._arithmetic + (f", but exact: {reasons}" if reasons else "")

    def _stand_in(self, index: int, layer: nn.Module) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if index == 0:
                self._towers.end()
                self._before("before", args, kwargs, self._outside(first=True))
            return self._measured(f"layer{index}", layer, args, kwargs)

        return run

    def _in_tower(self, index: int, layer: nn.Module, forward: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            name = f"tower_layer{index}"
            if any(shape.name == name for shape in self._shapes):
                return forward(*args, **kwargs)  # a further call of the tower
            if not self._shapes:
                self._towers.begin()
                self._before("towers", args, kwargs, _size(self._towers.first, self._tied))
            return self._measured(name, layer, args, kwargs)

        return run

    def _measured(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Adds the shape of a layer that is called, and returns its output."""
        given = [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in _tensors((args, kwargs))]
        kind = (PythonLayer(layer, name).kind(), *given)
        if kind not in self._known:
            self._known[kind] = self._layer(layer, args, kwargs)
        footprint, forward_work, backward_work, output = self._known[kind]
        size = _size([layer], self._tied)
        self._shapes.append(LayerShape(name, footprint, size, forward_work, backward_work))
        self._held = [*self._held[:1], (args, kwargs, output)]
        self._meter.reset_peak()
        self._work, self._base = self._meter.work, self._meter.current_bytes
        return output

    def _travelling(self, args: Any, kwargs: Any) -> int:
        """Bytes that pass from layer to layer: a layer's tensors, and the labels, which the last layer needs; between
        layers of a tower, all arguments of the model."""
        further = self._ids.nbytes if self._towers.are_over else self._given
        return sum(int(tensor.nbytes) for tensor in _tensors((args, kwargs))) + int(further)

    def _before(self, name: str, args: Any, kwargs: Any, size: _core.LayerBytes) -> None:
        """Adds the shape of what ran since the last layer until one is called."""
        meter = self._meter
        forward, saved = meter.peak_bytes - self._base, meter.current_bytes - self._base
        forward_work = meter.work - self._work
        roots = [tensor for tensor in _tensors((args, kwargs)) if tensor.requires_grad]
        given = [torch.ones_like(root) for root in roots]
        backward = saved + self._backward(roots, given)
        outputs = self._travelling(args, kwargs)
        inputs = self._shapes[-1].footprint.outputs + self._given if self._shapes else self._given
        footprint = _core.LayerFootprint(
            inputs, outputs, sum(g.nbytes for g in given), forward, saved, max(saved, backward)
        )
        backward_work = meter.work - self._work - forward_work
        self._shapes.append(LayerShape(name, footprint, size, forward_work, backward_work))

    def _native_form(self, layer: nn.Module) -> NativeDecoder | None:
        """In which a layer computes, if that is not Python's; notes what computes exactly in fast arithmetic."""
        if self._arithmetic == "exact":
            return None
        native = native_decoder(layer, 0, self._arithmetic)
        reason = native if isinstance(native, str) else native.exact_parts()
        self._exactly += [reason] if reason else []
        return None if isinstance(native, str) else native

    def _layer(
        self, layer: nn.Module, args: Any, kwargs: Any
    ) -> tuple[_core.LayerFootprint, _core.LayerWork, _core.LayerWork, Any]:
        meter = self._meter
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._leaf, (args, kwargs))
        layer.__dict__.pop("forward", None)
        chunk = chunk_of("auto", self._ids.shape[1]) if self._towers.are_over else None
        native = self._native_form(layer) if self._towers.are_over else None
        in_python = native is None
        blocks = self._blocks(layer, args, kwargs) if chunk and in_python else ()
        base, before = meter.current_bytes, meter.work
        meter.reset_peak()
        with in_chunks(layer, blocks, chunk) if chunk and in_python else nullcontext():
            # Not by a call of the module, whose hooks its stand-in calls.
            output = layer.forward(*args, **kwargs) if native is None else _decode(native, chunk, *args, **kwargs)
        peak, saved = meter.peak_bytes - base, meter.current_bytes - base
        forward_work = meter.work - before
        roots = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        given = [torch.ones_like(root) for root in roots]
        # A layer passes on its inputs, with its own hidden states in place of the received ones.
        footprint = _core.LayerFootprint(
            inputs=self._travelling(args, kwargs),
            outputs=sum(tensor.nbytes for tensor in _tensors(output)),
            output_gradients=sum(gradient.nbytes for gradient in given),
            forward=peak,
            saved=saved,
            backward=max(saved, saved + self._backward(roots, given)),
        )
        detached = pytree.tree_map_only(torch.Tensor, self._leaf, output)
        return footprint, forward_work, meter.work - before - forward_work, detached

    def _after(self, loss: torch.Tensor) -> None:
        meter = self._meter
        forward, saved = meter.peak_bytes - self._base, meter.current_bytes - self._base
        forward_work = meter.work - self._work
        given = [torch.ones_like(loss)]
        backward = saved + self._backward([loss], given)
        inputs = self._shapes[-1].footprint.outputs + self._ids.nbytes
        footprint = _core.LayerFootprint(inputs, loss.nbytes, given[0].nbytes, forward, saved, max(saved, backward))
        backward_work = meter.work - self._work - forward_work
        self._shapes.append(LayerShape("after", footprint, self._outside(first=False), forward_work, backward_work))

    def _backward(self, roots: list[torch.Tensor], given: list[torch.Tensor]) -> int:
        """Runs the backward; returns the peak above the bytes held now."""
        held = self._meter.current_bytes
        self._meter.reset_peak()
        handles = [
            parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
            for parameter in self._model.parameters()
            if parameter.requires_grad
        ]
        if roots:
            torch.autograd.backward(roots, given)
        for handle in handles:
            handle.remove()
        return self._meter.peak_bytes - held

    @staticmethod
    def _leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point() and tensor.requires_grad)

    @staticmethod
    def _blocks(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        candidates = Candidates(layer)
        with torch.no_grad():
            layer(*args, **kwargs)
        candidates.end()
        with torch.no_grad():
            return tuple(candidates.blocks())

    def _outside(self, first: bool) -> _core.LayerBytes:
        """Bytes of the weights outside the layers: the embedding and what sees pictures belong to the first part, all
        others to the last."""
        embedding = self._inner.get_input_embeddings()
        head = self._inner.get_output_embeddings()
        towers = self._towers.called
        if first:
            return _size([embedding, *towers], self._tied, but=(*self._towers.layers, *self._towers.first))
        inside = {id(module) for part in (*self._layers, embedding, *towers) for module in part.modules()}
        others = [
            module
            for module in self._inner.modules()
            if id(module) not in inside and not any(True for _ in module.children())
        ]
        return _size([*(module for module in others if module is not head), head], self._tied)

    @contextmanager
    def _postponed_logits(self) -> Iterator[None]:
        """As in a run that needs only the loss: logits are computed in chunks if they would take much memory."""
        head = self._inner.get_output_embeddings()
        if type(head) is not nn.Linear or self._ids.numel() * head.out_features * 4 <= LEAST_LOGITS_BYTES:
            yield
            return
        before = self._inner.__dict__.get("_loss_function")
        head.__dict__["forward"] = lambda states: LazyLogits.make(states, head.weight, head.bias)
        self._inner.__dict__["_loss_function"] = TokenLoss(
            self._inner.loss_function, 0, self._chunk_logit_bytes, self._arithmetic
        )
        try:
            yield
        finally:
            del head.__dict__["forward"]
            self._inner.__dict__.pop("_loss_function")
            if before is not None:
                self._inner.__dict__["_loss_function"] = before


class _Towers:
    """The parts of a model beside its layers that are called before the first of them, and have weights: what sees
    pictures.

    Args:
        inner: the model.
        layers: of it.

    Attributes:
        layers: of those that are cut into layers; empty until one is called.
        called: those that were called.
        first: modules inside them without parts that were called before the first of their layers.
        are_over: whether the model's own layers have begun.
    """

    def __init__(self, inner: nn.Module, layers: Sequence[nn.Module]) -> None:
        self.called, self.first = list[nn.Module](), list[nn.Module]()
        self.are_over = self._have_begun = False
        self._parts = modules_beside(inner, [*layers, inner.get_input_embeddings()])  # type: ignore[operator]
        self.layers = [layer for part in self._parts for layer in likely_layers(part)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block, notes what is called."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        handles = [
            module.register_forward_pre_hook(lambda module, *_, part=part: self._note(part, module))
            for part in self._parts
            for module in part.modules()
            if id(module) not in inside
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, part: nn.Module, module: nn.Module) -> None:
        if not self.are_over and not any(part is each for each in self.called):
            self.called.append(part)
        if not self._have_begun and not any(True for _ in module.children()):
            self.first.append(module)

    def begin(self) -> None:
        """The first layer of a tower is called."""
        self._have_begun = True

    def end(self) -> None:
        """The first layer of the model is called."""
        if not self._have_begun:
            self.layers, self.first = [], []
        self._have_begun = self.are_over = True


def padded_to(tokens: int, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of rows with pictures as they are if one of the rows has so many tokens, and pixels without values."""
    shape = arguments["input_ids"].shape
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.shape[:2] == shape and not value.is_floating_point():
            fill = -100 if name == "labels" else 0
            value = F.pad(value, (0, max(0, tokens - shape[1])), value=fill)
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = torch.empty_like(value, device=_META)
        found[name] = value
    return found


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None  # the engine sums a gradient elsewhere as soon as it is complete
