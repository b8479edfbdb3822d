"""From the arguments of a call to a request that the engine can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from roundpipe import _core
from roundpipe.data.microbatch import effective_microbatches, microbatch_rows, split_call, split_label
from roundpipe.following.layers.values import owned, split, to_host
from roundpipe.model.call.joint_plan import RunType
from roundpipe.model.call.loss_function import ScaledOutputs, is_own_loss
from roundpipe.model.call.request import CallRequest, Microbatch, route_of
from roundpipe.model.call.run_config import ResolvedRunConfig, RoundPipeRunConfig
from roundpipe.model.losses.loss_arguments import adding_losses, cut_of_own_loss

if TYPE_CHECKING:
    from torch import nn

    from roundpipe.following.language_model import LanguageModel


@dataclass(frozen=True)
class StepArguments:
    """The arguments of `forward_backward` or a sibling, as the user gave them; `where` is the method's name.

    `count` tells the other nodes of the call; None if there are none, or it is only prepared.
    """

    where: str
    input_args: Any
    input_kwargs: dict[str, Any] | None
    label: Any
    loss_fn: Callable[[Any, Any], Any]
    return_outputs: bool
    run_config: RoundPipeRunConfig | None
    count: _core.CallCount | None = None


@dataclass(frozen=True)
class Preparation:
    """Cuts one call's arguments into microbatches and finds its route.

    Attributes:
        name: the model's name, in messages.
        layers: how many layers the model has.
        model: what the pipeline stands for.
        followed: the language model that the layers come from, if they do.
        config: the call's options.
    """

    name: str
    layers: int
    model: nn.Module
    followed: LanguageModel | None
    config: ResolvedRunConfig

    def with_microbatches(self, count: int) -> Preparation:
        """The same call in so many microbatches, or fewer for a smaller batch."""
        return replace(self, config=replace(self.config, num_microbatch=count, num_microbatch_is_open=False))

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_only: bool) -> CallRequest:
        """The request of `model(...)`; `loss_only` says that only the loss will be read from the outputs."""
        batch, changeable, _ = self._split(args, kwargs, loss_only, merges=self.config.merge_output is True)
        adds = self.followed is not None and self.followed.adds_losses(args, kwargs)
        config = adding_losses(self.config) if adds else self.config
        run_type: RunType = "train" if config.requires_grad else "infer"
        route = route_of(config, run_type, self.layers)
        return CallRequest(config, config.requires_grad, batch, route, changeable, self._savers())

    def step(self, given: StepArguments) -> CallRequest:
        """The request of one `forward_backward`."""
        args = tuple(given.input_args) if isinstance(given.input_args, (list, tuple)) else (given.input_args,)
        kwargs = dict(given.input_kwargs or {})
        own_loss = self.followed is not None and is_own_loss(given.loss_fn)
        if given.count is not None and not own_loss:
            given.count.note_users_loss()
        count = given.count if own_loss else None
        batch, changeable, rows = self._split(
            args, kwargs, own_loss and not given.return_outputs, count=count, has_label=given.label is not None
        )
        config, loss_fn = self.config, given.loss_fn
        if self.followed is not None:
            adds = self.followed.adds_losses(args, kwargs)
            config = adding_losses(config) if adds else config
            parts = 1 if adds else len(batch)
            scaled = loss_fn if isinstance(loss_fn, ScaledOutputs) else ScaledOutputs(None)
            own = self.followed.mean_loss(parts, scaled.scaler, scaled.any_rows)
            loss_fn = own if own_loss else self.followed.seen_by(loss_fn, parts)
        label_parts, changeable_label = owned(split_label(given.label, len(batch), config.split_label, rows))
        labels = [split(to_host(part, given.where)) for part in label_parts]
        route = route_of(config, "fused", self.layers)
        changeable = changeable or changeable_label
        return CallRequest(
            config, True, batch, route, changeable, self._savers(), labels, loss_fn, given.return_outputs
        )

    def _savers(self) -> tuple[str, ...]:
        return () if self.followed is None else self.followed.memory_savers()

    def _split(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_only: bool,
        merges: bool = False,
        count: _core.CallCount | None = None,
        has_label: bool = False,
    ) -> tuple[list[Microbatch], bool, list[int] | None]:
        """Returns each microbatch's tensors with their structure, whether the arguments hold objects that the caller
        may change and, for a call that has a label beside its arguments, the rows of each microbatch.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            loss_only: only the loss will be read from the outputs.
            merges: outputs are merged automatically, with a loss among them.
            count: tells the other nodes of the call.
            has_label: whether there is a label.
        """
        args, kwargs = to_host((args, kwargs), self.name)
        followed, config, how = self.followed, self.config, self.config.split_input
        if followed is not None:
            how = followed.splitting(how, args, kwargs)
        parts = effective_microbatches(args, kwargs, config.num_microbatch, config.num_microbatch_is_default, how)
        if followed is not None:
            parts = followed.microbatches(parts, config.num_microbatch_is_default, args, kwargs)
        elif merges:
            parts = cut_of_own_loss(self.model, parts, config.num_microbatch_is_default, args, kwargs)
        calls, changeable = owned(split_call(args, kwargs, parts, how))
        rows = None
        if has_label:
            # Who has cut by pictures knows the rows; the first argument may count pictures.
            own = followed.rows_of(calls) if followed is not None and how is not config.split_input else None
            rows = microbatch_rows(args, kwargs, calls, how) if own is None else own
        if followed is not None:
            calls = followed.prepare(calls, loss_only, count)
        return [split(call, is_call=True) for call in calls], changeable, rows
