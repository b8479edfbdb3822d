"""A causal language model as a chain of pipeline layers, and what its calls need besides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from roundpipe.data.samples import IGNORED
from roundpipe.following import collector
from roundpipe.following.parts import LOSS_ONLY, SHARE, Structure
from roundpipe.following.placeholder import CannotFollow
from roundpipe.following.survey import Uses, evaluating, find_layers, forced_arguments, parts_of, sample_batch, watch
from roundpipe.following.token_loss import count_tokens, loss_in, shares
from roundpipe.following.token_wise import ChunkTokens
from roundpipe.shadow import ShadowTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def language_model_in(model: nn.Module) -> PreTrainedModel | None:
    """The causal language model of transformers that `model` is, or that peft has wrapped; None if there is none."""
    from transformers import PreTrainedModel

    inner: Any = model
    if hasattr(type(model), "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel) or getattr(inner.config, "is_encoder_decoder", False):
        return None
    if "labels" not in inspect.signature(inner.forward).parameters:
        return None
    causal = "CausalLM" in type(inner).__name__ or getattr(inner.config, "is_decoder", True)
    like: Any = inner  # its accessors have no types
    ends = like.get_input_embeddings(), like.get_output_embeddings()
    return inner if causal and None not in ends else None


class LanguageModel:
    """A followed model.

    The forward that runs is the model's own: in the first layer of the chain until it calls the first of its own
    layers, in the last one with those answering what they have returned. What lies between two of its layers is
    recorded when the first part runs, and done again after each layer.

    Args:
        model: a causal language model of transformers, or one that peft has wrapped; on the CPU, with values.
        loss_chunk_tokens: for how many tokens logits are held at a time where only the loss is asked for.
        mlp_chunk_tokens: for how many tokens the inner activations of an MLP are held at a time.

    Attributes:
        chain: the pipeline's layers. Parameters are the model's own.

    Raises:
        CannotFollow: with the reason, if the chain would not compute the same.
    """

    def __init__(
        self, model: nn.Module, loss_chunk_tokens: ChunkTokens = "auto", mlp_chunk_tokens: ChunkTokens = "auto"
    ) -> None:
        language_model = language_model_in(model)
        if language_model is None:
            raise CannotFollow(f"[follow] {type(model).__name__} is no causal language model of transformers")
        _check_chunk("loss_chunk_tokens", loss_chunk_tokens)
        _check_chunk("mlp_chunk_tokens", mlp_chunk_tokens)
        self._model = model
        self._chunks = loss_chunk_tokens, mlp_chunk_tokens
        self._contents = _contents(model)
        self._signature = inspect.signature(model.forward)
        self._positions = getattr(language_model.config.get_text_config(), "max_position_embeddings", None)
        self.chain = nn.Sequential()
        try:
            self._follow(language_model, loss_chunk_tokens, mlp_chunk_tokens)
        except CannotFollow as reason:
            raise CannotFollow(
                f"[wrap_model_to_roundpipe] {type(language_model).__name__} cannot be followed: {reason}; "
                "use_sequential_preset=False wraps it part by part instead"
            ) from reason

    def _follow(
        self, language_model: PreTrainedModel, loss_chunk_tokens: ChunkTokens, mlp_chunk_tokens: ChunkTokens
    ) -> None:
        batch = sample_batch(language_model)
        names: dict[int, str] = {}
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            if tensor.device.type == "meta":
                raise CannotFollow(f"'{name}' is on the meta device, expected a model with values")
            names.setdefault(id(tensor), name)
        structure = Structure(
            self._model, language_model, list(find_layers(language_model)), names, forced_arguments(self._model)
        )
        batch |= structure.forced
        collector.install(self._model)
        expected = watch(structure, batch)
        if not structure.order:
            raise CannotFollow("its forward calls none of the layers in its largest nn.ModuleList")
        for name, part in parts_of(structure, Uses(structure, batch)):
            self.chain.add_module(name, part)
        try:
            self._shifts_labels = _verify(structure, self.chain, batch, expected)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError) as error:
            raise CannotFollow(f"part by part it fails ({type(error).__name__}: {error})") from error
        # From here on: what is computed in chunks has the same values, not the same bits.
        structure.loss_chunk_tokens, structure.mlp_chunk_tokens = loss_chunk_tokens, mlp_chunk_tokens

    def followed_anew(self) -> LanguageModel | None:
        """The model as it is now, if modules or parameters were put in or taken out since it was followed."""
        return LanguageModel(self._model, *self._chunks) if _contents(self._model) != self._contents else None

    def prepare(
        self, batch: list[tuple[tuple[Any, ...], dict[str, Any]]], loss_only: bool
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Adds to each microbatch's arguments what its loss counts for.

        Args:
            batch: `(args, kwargs)` of each microbatch.
            loss_only: nobody looks at more of the outputs than the loss.

        Raises:
            ValueError: more tokens than the model has positions, or no label that counts.
        """
        named = [self._named(args, kwargs) for args, kwargs in batch]
        for arguments in named:
            self._check_positions(arguments)
        counts = [count_tokens(arguments, self._shifts_labels) for arguments in named]
        if any(count is not None for count in counts) and not any(counts):
            raise ValueError(
                "[forward] every label of the batch is ignored (-100), so there is no loss; expected at least one "
                "label that is a token and is not the first of its row"
            )
        has_labels = None not in counts
        summed = named[0].get("num_items_in_batch") is not None
        weights: list[float] | list[None] = shares(counts, summed) or [None] * len(batch)
        return [
            (args, {**kwargs, SHARE: weight, LOSS_ONLY: loss_only and has_labels})
            for (args, kwargs), weight in zip(batch, weights, strict=True)
        ]

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._signature.parameters, args, strict=False)), **kwargs}

    def _check_positions(self, arguments: dict[str, Any]) -> None:
        ids = arguments.get("input_ids")
        positions = arguments.get("position_ids")
        if isinstance(positions, torch.Tensor) and positions.numel():
            needed = int(positions.max()) + 1
        elif isinstance(ids, torch.Tensor) and ids.dim() == 2:
            needed = ids.shape[1]
        else:
            return
        if isinstance(self._positions, int) and 0 < self._positions < needed:
            raise ValueError(
                f"[forward] the batch has {needed} positions, the model has max_position_embeddings = "
                f"{self._positions}; shorten the rows, or raise config.max_position_embeddings before wrapping where "
                "positions are rotary"
            )

    @staticmethod
    def mean_loss(microbatches: int) -> Callable[[Any, Any], Any]:
        """A loss_fn: the model's own loss, such that the sum over the microbatches is that of the whole batch."""

        def loss(outputs: Any, _: Any) -> torch.Tensor:
            value = loss_in(outputs)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise ValueError(
                    "[forward_backward] the model returned no loss, expected one; give labels in input_kwargs, or a "
                    "loss_fn"
                )
            return value if microbatches == 1 else value / microbatches

        return loss


def _contents(model: nn.Module) -> list[int]:
    """Changes when a parameter, its shape, a submodule or what is trainable changes."""
    found: list[int] = []
    for module in model.modules():
        found.extend(map(id, module._modules.values()))
        found.extend(id(p) if p is None or p.requires_grad else ~id(p) for p in module._parameters.values())
        found.extend(size for p in module._parameters.values() if p is not None for size in p.shape)
    return found


def _check_chunk(name: str, value: ChunkTokens) -> None:
    if value is None or value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return
    raise ValueError(f"[wrap_model_to_roundpipe] {name} is {value!r}, expected 'auto', None or a number of tokens")


def _verify(structure: Structure, chain: nn.Sequential, batch: dict[str, Any], expected: Any) -> bool:
    """Runs the chain on the host, as a device would, and compares every output with the plain model's, bit for bit.

    Returns:
        Whether the model shifts its labels, so that the first of a row does not count.
    """
    with evaluating(structure.model):
        # Trees of their own, as devices have: nothing reaches another part but what is handed on.
        parts = [ShadowTree(part, {}).root for part in chain]
        flow: Any = parts[0](**batch)
        for part in parts[1:-1]:
            flow = part(flow)
        outputs = parts[-1](flow)
        mine, theirs = pytree.tree_leaves(outputs), pytree.tree_leaves(expected)
        same = len(mine) == len(theirs) and all(
            torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if isinstance(a, torch.Tensor) else a == b
            for a, b in zip(mine, theirs, strict=True)
        )
        if not same:
            raise CannotFollow("part by part it does not compute what it computes whole; its layers share something")
        program, values, *_ = flow
        labels = program.inputs.join(values, {})[1]["labels"]
        labels[:, 0] = IGNORED
        again, loss = parts[-1](flow).loss, expected.loss
        return torch.allclose(again, loss, rtol=0, atol=0, equal_nan=True)
