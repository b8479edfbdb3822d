"""A transformers model as a chain of pipeline layers, with the preparation that its calls need."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from roundpipe import _core
from roundpipe.following import collector
from roundpipe.following.layers.adapters import without_adapters
from roundpipe.following.parts import COEFFICIENT, ENDING, FREQUENCIES
from roundpipe.following.picture_trial import other_alone
from roundpipe.following.pictures.splitting import picture_splitting
from roundpipe.following.placeholder import WITHOUT_VALUES, CannotFollow
from roundpipe.following.refusals import left_out_at_random, refuse_compiled
from roundpipe.following.rotary import LongRows
from roundpipe.following.sample_batches import sample_batches
from roundpipe.following.skeleton import FollowedModel
from roundpipe.following.survey import (
    Uses,
    find_early_ends,
    find_stacks,
    forced_arguments,
    parts_of,
    sample_batch,
    watch,
)
from roundpipe.following.tower_layers import cut_towers, tower_parts
from roundpipe.following.verification import Found, place_of_before, try_training, verify
from roundpipe.model.call.loss_function import LossScaler, OwnLoss
from roundpipe.model.losses.ending import Ending, Kept, loss_in
from roundpipe.model.losses.loss_arguments import (
    TOKEN_LOSSES,
    asks_for_router_loss,
    is_part_of_a_sum,
    leaves_loss_to_caller,
    take_return_logits,
    take_token_losses,
)
from roundpipe.model.losses.reduction import (
    FoundLoss,
    LossForm,
    Reduction,
    asks_for_loss,
    count,
    positions_are_inside,
)
from roundpipe.model.losses.token_loss import shares
from roundpipe.ops.functional import Arithmetic
from roundpipe.ops.token_wise import ChunkTokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def language_model_in(model: nn.Module) -> PreTrainedModel | None:
    """Returns `model`, or the model inside it if peft wrapped it, if that is a causal language model; else None."""
    from transformers import PreTrainedModel

    inner = without_adapters(model)
    if not isinstance(inner, PreTrainedModel) or getattr(inner.config, "is_encoder_decoder", False):
        return None
    if "labels" not in inspect.signature(inner.forward).parameters:
        return None
    causal = "CausalLM" in type(inner).__name__ or getattr(inner.config, "is_decoder", True)
    like: Any = inner  # its accessors have no types
    try:
        ends = like.get_input_embeddings(), like.get_output_embeddings()
    except NotImplementedError:  # it has no tokens
        return None
    return inner if causal and None not in ends else None


def transformers_model_in(model: nn.Module) -> PreTrainedModel | None:
    """Returns `model`, or the model inside it if peft wrapped it, if that is a transformers model; else None."""
    from transformers import PreTrainedModel

    inner = without_adapters(model)
    return inner if isinstance(inner, PreTrainedModel) else None


class LanguageModel:
    """A followed model: a causal language model, or any other transformers model.

    The model's own forward runs. The part before the layers runs it until it calls the first of the model's own
    layers. The last layer of the chain runs it with the layers' real results as answers to its calls. Operations
    between two of its layers are recorded when the first part runs, and repeated after each layer.

    Args:
        model: a transformers model, or one that peft has wrapped; on the CPU, with values.
        loss_chunk_tokens: number of tokens whose logits are held at a time if only the loss is needed.
        mlp_chunk_tokens: number of tokens whose inner activations of an MLP are held at a time.
        arithmetic: of what computes natively.

    Attributes:
        chain: the pipeline's layers. Parameters are the model's own.
        name: the name of the model's class.
        is_causal: whether it is a causal language model.
        arithmetic: as it was given.

    Raises:
        CannotFollow: the chain would not compute the same; the message gives the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_chunk_tokens: ChunkTokens = "auto",
        mlp_chunk_tokens: ChunkTokens = "auto",
        arithmetic: Arithmetic = _core.DEFAULT_ARITHMETIC,
    ) -> None:
        inner = transformers_model_in(model)
        if inner is None:
            raise CannotFollow(f"[follow] {type(model).__name__} is not a model of transformers")
        _check_chunk("loss_chunk_tokens", loss_chunk_tokens)
        _check_chunk("mlp_chunk_tokens", mlp_chunk_tokens)
        self._model = model
        self.name = type(inner).__name__
        self._inner, self._config = inner, inner.config
        self.is_causal = language_model_in(model) is not None
        _core.check_arithmetic(arithmetic)
        self._chunks, self.arithmetic = (loss_chunk_tokens, mlp_chunk_tokens), arithmetic
        self._contents, self._trained = _contents(model), _trained(model)
        self._loss_function = _loss_function(inner)
        self._sizes = {id(parameter): parameter.shape for parameter in model.parameters()}
        self._signature = inspect.signature(model.forward)
        if any(each.kind is each.VAR_POSITIONAL for each in self._signature.parameters.values()):
            # peft's models hand on what they are called with.
            self._signature = inspect.signature(inner.forward)
        self._positions = getattr(inner.config.get_text_config(), "max_position_embeddings", None)
        self._confirmed: set[str] = set()  # forms of calls with pictures
        self.chain = nn.Sequential()
        refuse_compiled(model, find_stacks(inner) if any(isinstance(m, nn.ModuleList) for m in inner.modules()) else ())
        try:
            self._found = self._follow(inner, loss_chunk_tokens, mlp_chunk_tokens)
        except CannotFollow as reason:
            raise CannotFollow(
                f"[wrap_model_to_roundpipe] {self.name} cannot be followed: {reason}; "
                "use_sequential_preset=False wraps it part by part instead"
            ) from reason

    def _follow(self, inner: PreTrainedModel, loss_chunk_tokens: ChunkTokens, mlp_chunk_tokens: ChunkTokens) -> Found:
        names: dict[int, str] = {}
        for name, tensor in [*self._model.named_parameters(), *self._model.named_buffers()]:
            if tensor.device.type == "meta":
                raise CannotFollow(f"'{name}' is on the meta device, expected a model with values")
            names.setdefault(id(tensor), name)
        dropped = left_out_at_random(inner)
        if dropped is not None:
            raise CannotFollow(f"it leaves out layers at random ({dropped}; 0 is followed)")
        collector.install(self._model)
        passed_over: list[nn.Module] = []
        while True:
            layers = find_stacks(inner, passed_over)
            followed = FollowedModel(self._model, inner, layers, names, forced_arguments(self._model, inner))
            followed.rotary = self._rotary = LongRows(self._model, followed.layers)
            batch, expected = self._watched(followed, inner)
            if followed.order:
                break
            passed_over += layers  # such as a tower that is much larger than the model of the text
        try:
            uses = Uses(followed, batch)
            if uses.ends.drawn is not None:
                raise CannotFollow(
                    f"its end reads values that random numbers made before its layers ({uses.ends.drawn})"
                )
            find_early_ends(followed, uses)
            towers = cut_towers(followed)
            ends = {tower.number: tower.after for tower in towers}
            for name, part in (*tower_parts(followed, towers), *parts_of(followed, uses, ends)):
                self.chain.add_module(name, part)
            if not self.is_causal:
                try_training(followed, batch)
            found = verify(followed, self.chain, batch, expected)
        except (*WITHOUT_VALUES, AttributeError) as error:
            raise CannotFollow(f"part by part it fails ({type(error).__name__}: {error})") from error
        # Set only now, after the comparison of bits: values computed in chunks are the same, but their bits differ.
        followed.loss_chunk_tokens, followed.mlp_chunk_tokens = loss_chunk_tokens, mlp_chunk_tokens
        followed.arithmetic = self.arithmetic
        self._followed = followed
        return found

    def _watched(self, followed: FollowedModel, inner: PreTrainedModel) -> tuple[dict[str, Any], Any]:
        """A small batch that the model accepts, and the model's outputs for it."""
        reason: Exception | None = None
        # Some causal language models do not take text alone.
        for inputs in itertools.chain([sample_batch(inner)] if self.is_causal else (), sample_batches(inner)):
            batch = inputs | followed.forced
            try:
                return batch, watch(followed, batch)
            except CannotFollow:
                raise
            except Exception as error:  # the model may accept another batch
                reason = reason or error
        raise CannotFollow(
            "no small batch is known that its forward runs with"
            + (f" ({type(reason).__name__}: {str(reason).splitlines()[0] if str(reason) else ''})" if reason else "")
        ) from reason

    def is_outdated(self, frees: bool) -> bool:
        """Whether modules or parameters were added or removed since the model was followed, or are trained now and were
        not.

        Args:
            frees: whether parameters that were frozen since then count, too: only their memory depends on it.
        """
        trained = _trained(self._model)
        newly = trained != self._trained if frees else not trained <= self._trained
        return newly or _contents(self._model) != self._contents

    @property
    def is_resized(self) -> bool:
        """Whether a parameter that the model had when it was followed has another shape now."""
        return any(self._sizes.get(id(each), each.shape) != each.shape for each in self._model.parameters())

    def followed_anew(self) -> LanguageModel:
        """Follows the model again. REQUIRES: nothing runs its layers."""
        anew = LanguageModel(self._model, *self._chunks, self.arithmetic)
        anew._followed.chunk_logit_bytes = self._followed.chunk_logit_bytes
        return anew

    def chunk_logit_bytes(self, device: str) -> int | None:
        """Bytes of fp32 logits in a chunk of the loss on `device`; None if `loss_chunk_tokens` says it otherwise."""
        if self._followed.loss_chunk_tokens != "auto":
            return None
        return self._followed.chunk_logit_bytes or _core.chunk_logit_bytes(device)

    def keep_chunk_logit_bytes(self, number: int) -> None:
        """Chunks of the loss have so many bytes from now on, on any device."""
        self._followed.chunk_logit_bytes = number

    @property
    def before(self) -> nn.Module:
        """The part before the model's own layers."""
        return self.chain[place_of_before(self.chain)]

    @property
    def cuts_by_rows(self) -> bool:
        """Whether any rows of a batch may be a microbatch, in any order."""
        return self.is_causal and self._found.mixing is None

    def memory_savers(self) -> tuple[str, ...]:
        """Options of `wrap_model_to_roundpipe` that reduce the memory of a row."""
        names = ("loss_chunk_tokens", "mlp_chunk_tokens")
        return tuple(f"a smaller {name} (now {chunk!r})" for name, chunk in zip(names, self._chunks, strict=True))

    def prepare(
        self, batch: list[tuple[tuple[Any, ...], dict[str, Any]]], loss_only: bool, count: _core.CallCount | None = None
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Adds to each microbatch's arguments the weight of its loss.

        Args:
            batch: `(args, kwargs)` of each microbatch.
            loss_only: only the loss will be read from the outputs.
            count: counts the labels of the other nodes, for a loss over all of them.

        Raises:
            ValueError: there are more tokens than the model has positions, or no label counts and the loss is a mean.
        """
        batch, no_logits = take_return_logits(batch, self._signature.parameters)
        named = [self._named(args, kwargs) for args, kwargs in batch]
        longest = max((_positions(arguments) or 0 for arguments in named), default=0)
        self._check_positions(longest)
        counts = self._counts(named)
        summed = self._adds(named[0])
        is_mean = not summed and not leaves_loss_to_caller(named[0])
        batch, token_losses = take_token_losses(batch)
        if token_losses:
            self._refuse_token_losses(named[0])
        total = None
        if count is not None:
            total, batch = self._counted(count, counts, summed, named[0], batch)
        if is_mean and any(counted is not None for counted in counts) and not any(counts) and not total:
            raise ValueError(
                "[forward] every label of the batch is ignored (-100), so there is no loss; expected at least one "
                "label that is a token and is not the first of its row"
            )
        has_labels = asks_for_loss(named[0]) and (self.is_causal or None not in counts)
        if no_logits and not has_labels:
            raise ValueError(
                "[forward] return_logits is False and there are no labels; expected one of logits and loss"
            )
        kept = Kept.LOSS if loss_only else Kept.ALL_BUT_LOGITS if no_logits else Kept.ALL
        kept = Kept.TOKEN_LOSSES if token_losses else kept
        shared: list[float] | list[None] = [None] * len(batch)
        if not token_losses:
            shared = shares(counts, summed, total) or shared
        routed: list[float] | list[None] = [None] * len(batch)
        of_node = 1.0 if count is None else count.share
        if self._sums_router_loss(named[0]) and (len(batch) > 1 or of_node != 1.0):
            labels = sum(counted or 0 for counted in counts)
            routed = [of_node * ((counted or 0) / labels if labels else 1 / len(batch)) for counted in counts]
        ending = Ending(
            kept=kept if has_labels else Kept.ALL,
            towers=len(batch) == 1,
            refuses_loss=len(batch) > 1 and not asks_for_loss(named[0]),
        )
        endings = [replace(ending, share=s, router_share=r) for s, r in zip(shared, routed, strict=True)]
        further = {FREQUENCIES: self._rotary.frequencies(longest)} if longest and self._rotary.modules else {}
        return [
            (args, {**kwargs, **further, ENDING: each}) for (args, kwargs), each in zip(batch, endings, strict=True)
        ]

    def _refuse_token_losses(self, arguments: dict[str, Any]) -> None:
        """Raises ValueError for a call whose loss of each token would not be what the model's loss is the mean of."""
        name, expected = self.name, "expected a causal language model of transformers with its own cross-entropy"
        if not self.is_causal or not isinstance(arguments.get("labels"), torch.Tensor):
            raise ValueError(f"[forward] {TOKEN_LOSSES} is given to {name}, {expected}, and labels among the arguments")
        if asks_for_router_loss(self._config, arguments):
            raise ValueError(
                f"[forward] {TOKEN_LOSSES} is given to {name} with output_router_logits, whose loss is no sum over "
                "tokens; set it to False in the model's config"
            )

    def _sums_router_loss(self, arguments: dict[str, Any]) -> bool:
        """Whether microbatches' losses are added, and each has a router's loss, which counts once for the batch."""
        return self._adds(arguments) and asks_for_loss(arguments) and asks_for_router_loss(self._config, arguments)

    def _counted(
        self,
        count: _core.CallCount,
        counts: list[int | None],
        summed: bool,
        arguments: dict[str, Any],
        batch: list[tuple[tuple[Any, ...], dict[str, Any]]],
    ) -> tuple[float | None, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
        """The number of labels on all nodes, of a loss that is their mean, and the microbatches' arguments; a
        `num_items_in_batch` among them becomes that of all nodes."""
        labels = [counted for counted in counts if counted is not None]
        if len(labels) < len(counts):
            count.note_users_loss()  # a mean over who knows what
            return None, batch
        items = arguments.get("num_items_in_batch") if summed else None
        if summed and items is None:
            count.note_sum()
            return None, batch
        total = count.total(sum(labels), None if items is None else float(items))
        if items is None:
            return total, batch
        everywhere = torch.full_like(items, total) if isinstance(items, torch.Tensor) else type(items)(total)
        return None, [(args, {**kwargs, "num_items_in_batch": everywhere}) for args, kwargs in batch]

    def _found_for(self, arguments: dict[str, Any]) -> FoundLoss | None:
        """What is known about the loss of a call; None if nothing is, or no loss is asked for."""
        if not asks_for_loss(arguments) or _loss_function(self._inner) != self._loss_function:
            return None
        return self._found.losses.get(LossForm.of(arguments))

    def _counts(self, batch: list[dict[str, Any]]) -> list[int | None]:
        """For each microbatch, the number of items that the loss averages over; None if it is unknown."""
        return [self.counted(arguments) for arguments in batch]

    def counted(self, arguments: dict[str, Any]) -> int | None:
        """The number of items that the loss of a call with these keyword arguments averages over; None if it has none,
        or if they are unknown."""
        found = self._found_for(arguments)
        return None if found is None else count(found.reduction, arguments)

    def splitting(self, split_input: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The way to cut a call into microbatches, if `split_input` leaves it open."""
        if split_input is not None:
            return split_input
        return picture_splitting(self._config, self._named(args, kwargs), self._named, self._confirm)

    def _confirm(self, form: str, alone: list[tuple[int, dict[str, Any]]], together: dict[str, Any]) -> None:
        """Tries the first batch of each form with pictures, as `picture_splitting` cuts it."""
        if form in self._confirmed:
            return
        reason = other_alone(self._model, self.chain, together, alone)
        if reason is not None:
            raise ValueError(
                f"[forward] the batch of {self.name} cannot be cut into microbatches: beside other rows, a row with "
                f"pictures calls the first layer with other values than alone ({reason}), expected the same; set "
                "num_microbatch=1, or give split_input a function"
            )
        self._confirmed.add(form)

    def rows_of(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[int] | None:
        """The rows of each microbatch by its tokens; None without these."""
        tokens = [self._named(args, kwargs).get("input_ids") for args, kwargs in calls]
        rows = [len(each) for each in tokens if isinstance(each, torch.Tensor)]
        return rows if len(rows) == len(calls) else None

    def microbatches(self, number: int, is_default: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The number of microbatches that a call may be cut into, given that `number` were planned.

        Args:
            is_default: whether `number` is the default instead of the user's choice.

        Raises:
            ValueError: the user asked for more than one, and the result would change.
        """
        arguments = self._named(args, kwargs)
        reason = self._found.mixing or self._loss_reason(arguments)
        if reason is None and self._sums_router_loss(arguments) and COEFFICIENT not in vars(self._inner):
            reason = "its router's loss counts once for the batch, and how it is weighted is not known"
        if number == 1 or reason is None:
            if self.splitting(None, args, kwargs) is None:
                return number
            text = arguments.get("input_ids")
            return min(number, len(arguments["inputs_embeds"] if text is None else text))
        if not is_default:
            raise ValueError(
                f"[forward] the batch of {self.name} cannot be cut into {number} microbatches: {reason}; set "
                "num_microbatch=1"
            )
        return 1

    def _loss_reason(self, arguments: dict[str, Any]) -> str | None:
        """Why the losses of microbatches of a call would not make the loss of the batch; None if they do."""
        if not asks_for_loss(arguments) or leaves_loss_to_caller(arguments):
            return None
        found = self._found_for(arguments)
        if found is None or count(found.reduction, arguments) is None:
            return "what its loss is the mean of is not known"
        if not positions_are_inside(arguments):
            return "positions outside of a row do not count"
        if is_part_of_a_sum(arguments) and found.honours_items is None and found.reduction is not Reduction.SUM:
            return "what its loss does with num_items_in_batch is not known"
        return None

    def check_microbatches(self, number: int | None) -> None:
        """Reports, when the model is wrapped, why a row depends on others.

        Raises:
            ValueError: more than one microbatch (`number`) is asked for.
        """
        reason = self._found.mixing
        if reason is not None:
            if number is not None and number > 1:
                raise ValueError(
                    f"[wrap_model_to_roundpipe] {self.name} mixes the rows of a batch ({reason}), so {number} "
                    "microbatches would compute something else; set num_microbatch=1"
                )
            warnings.warn(
                f"[wrap_model_to_roundpipe] {self.name} mixes the rows of a batch ({reason}): its calls run as one "
                "microbatch, so that devices mostly wait for each other",
                stacklevel=3,
            )

    def seen_by(self, loss_fn: Callable[[Any, Any], Any], microbatches: int) -> Callable[[Any, Any], Any]:
        """Adapts the user's loss function: its `outputs.loss` is the microbatch's part of the batch's loss.

        For a causal language model it is a mean, as in the published package: scripts divide it.
        """
        if self.is_causal or microbatches == 1:
            return loss_fn

        def loss(outputs: Any, label: Any) -> Any:
            value = getattr(outputs, "loss", None)
            if isinstance(value, torch.Tensor) and not isinstance(outputs, tuple):
                outputs = type(outputs)(**{**outputs, "loss": value / microbatches})
            return loss_fn(outputs, label)

        return loss

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._signature.parameters, args, strict=False)), **kwargs}

    def _check_positions(self, needed: int) -> None:
        if self._rotary.accepts_longer:
            return
        if isinstance(self._positions, int) and 0 < self._positions < needed:
            raise ValueError(
                f"[forward] the batch has {needed} positions, the model has max_position_embeddings = "
                f"{self._positions}; shorten the rows, or, if positions are rotary, raise "
                "config.max_position_embeddings before wrapping"
            )

    def adds_losses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the losses of a call's microbatches are parts of a sum."""
        return self._adds(self._named(args, kwargs))

    def _adds(self, arguments: dict[str, Any]) -> bool:
        found = self._found_for(arguments)
        if found is None:
            return False
        return found.reduction is Reduction.SUM or (bool(found.honours_items) and is_part_of_a_sum(arguments))

    @staticmethod
    def mean_loss(microbatches: int, scaler: LossScaler | None = None, any_rows: bool = False) -> OwnLoss:
        """A loss_fn that returns the model's own loss, such that the microbatches' losses sum to the batch's, times the
        scale of `scaler`."""
        return OwnLoss(loss_in, microbatches, scaler, any_rows)


def _positions(arguments: dict[str, Any]) -> int | None:
    """The number of positions that a call needs; None if it is unknown."""
    positions = arguments.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.numel():
        return int(positions.max()) + 1
    for name, dims in (("input_ids", 2), ("inputs_embeds", 3)):
        value = arguments.get(name)
        if isinstance(value, torch.Tensor) and value.dim() == dims:
            return value.shape[1]
    return None


def _contents(model: nn.Module) -> list[int]:
    """A value that changes when a parameter, its shape or a submodule changes."""
    found: list[int] = []
    for module in model.modules():
        found.extend(map(id, module._modules.values()))
        found.extend(map(id, module._parameters.values()))
        found.extend(size for p in module._parameters.values() if p is not None for size in p.shape)
    return found


def _loss_function(model: PreTrainedModel) -> tuple[Any, Any]:
    """What changes when the model gets another loss function."""
    return vars(model).get("_loss_function"), getattr(model, "loss_type", None)


def _trained(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters() if parameter.requires_grad}


def _check_chunk(name: str, value: ChunkTokens) -> None:
    if value is None or value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return
    raise ValueError(f"[wrap_model_to_roundpipe] {name} is {value!r}, expected 'auto', None or a number of tokens")
