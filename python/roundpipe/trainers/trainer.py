"""transformers' trainers over a model in the pipeline, and the mixin that gives others the same."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainingArguments

from roundpipe.data.balance import balanced_config
from roundpipe.model.call.run_config import RoundPipeRunConfig
from roundpipe.model.losses.ending import loss_in
from roundpipe.model.pipe import RoundPipe
from roundpipe.trainers.adapters import keep_trained
from roundpipe.trainers.arguments import check_arguments, stay_on_host
from roundpipe.trainers.host import (
    generating_in,
    is_in_pipeline,
    loading_on_host,
    original_of,
    prepare_on_host,
    steps_in,
)
from roundpipe.trainers.kinds import check_kind, has_reference
from roundpipe.trainers.random_state import load_random_state, save_random_state
from roundpipe.trainers.wrapping import into_pipeline, is_unfollowed

_OF_TEXT = frozenset({"input_ids", "attention_mask", "labels", "position_ids"})


class RoundPipeTrainerMixin(Trainer):
    """Trains the model of another subclass of `transformers.Trainer` in the pipeline.

    It comes first: `class Mine(RoundPipeTrainerMixin, TheirTrainer)`. Arguments and methods are those of the other.

    A plain model (also with PEFT adapters) is wrapped when the trainer is made; a wrapped one is taken as it is. The
    Trainer's own code runs the training: data, schedule, logging, callbacks, checkpoints. Batches, losses and the
    optimizer are on the host. Where the loss is the model's own, a step is one `forward_backward`; any other loss, such
    as an overridden `compute_loss`, is computed on the host from the outputs that the pipeline merges.

    Of TRL's trainers with a reference, the reference is in the pipeline, too: with adapters, it is the base without
    them, or a copy of the adapters that were given; without adapters, it is a second model.

    Raises:
        ValueError: an argument has no meaning in the pipeline, the other trainer makes steps that the pipeline cannot
            make, or the model cannot be wrapped; the message names it.
    """

    _balances = False
    _in_init = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(super().__init__).bind(*args, **kwargs)
        given = [bound.arguments.get(name) for name in ("model", "ref_model")]
        check_kind(self._where, type(self), any(map(is_in_pipeline, given)))
        if isinstance(bound.arguments.get("args"), TrainingArguments):
            self._check(bound.arguments["args"])
        self._in_init = True
        with loading_on_host():
            super().__init__(*bound.args, **bound.kwargs)
        self._in_init = False
        if not is_in_pipeline(self.model):
            self.model = self.model_wrapped = self._wrapped(cast(nn.Module, self.model))
            self.callback_handler.model = self.model
        elif is_unfollowed(self.model) and cast(Any, self.model).model_run_config.num_microbatch != 1:
            raise ValueError(
                f"[{self._where}] the model is in the pipeline without being followed, so the losses of its "
                "microbatches do not make that of the batch; wrap it with "
                "model_run_config=RoundPipeRunConfig(num_microbatch=1)"
            )
        ours: Any = self
        if has_reference(type(self)) and ours.ref_model is not None:
            reference = self._in_pipeline(ours.ref_model)
            ours.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    @property
    def _where(self) -> str:
        return next(kind.__name__ for kind in type(self).__mro__ if kind.__module__.startswith("roundpipe."))

    def _check(self, args: TrainingArguments) -> None:
        """Refuses what has no meaning here, before anything is made from it."""
        check_arguments(self._where, args)
        stay_on_host(self._where, args)

    def create_accelerator_and_postprocess(self) -> None:
        """Makes an accelerator that leaves the model on the host."""
        self._check(self.args)
        super().create_accelerator_and_postprocess()
        prepare_on_host(self.accelerator, lambda model: self._in_init)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Makes a model from `model_init`, in the pipeline."""
        return self._wrapped(super().call_model_init(trial))

    def _wrapped(self, model: nn.Module) -> nn.Module:
        wrapped = self._in_pipeline(model, router_loss=getattr(self, "aux_loss_enabled", False))
        self._balances = wrapped.model_run_config.num_microbatch is None if type(wrapped) is RoundPipe else False
        return cast(nn.Module, wrapped)

    def _in_pipeline(self, model: nn.Module, router_loss: bool = False) -> Any:
        if has_reference(type(self)) and is_peft_model(model):
            keep_trained(model)
        return into_pipeline(self._where, model, router_loss)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return model

    # -- steps ------------------------------------------------------------------------------------------------------

    def _own_loss_of(self, model: Any, inputs: dict[str, Any]) -> bool:
        """Whether `compute_loss` would return the loss that the model returns, so that the pipeline may compute it."""
        return (
            type(self).compute_loss is Trainer.compute_loss
            and self.label_smoother is None
            and self.compute_loss_func is None
            and type(model) is RoundPipe
            and model._language_model is not None
            and any(inputs.get(name) is not None for name in self.label_names)
        )

    def _is_scaled(self, items: Any) -> bool:
        """Whether the loss is not to be divided by the number of accumulated batches."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            scaled = self.model_accepts_loss_kwargs and items is not None
        return bool(scaled) or self.current_gradient_accumulation_steps == 1

    def _arguments(self, inputs: dict[str, Any], items: Any) -> dict[str, Any]:
        return (
            {**inputs, "num_items_in_batch": items} if self.model_accepts_loss_kwargs and items is not None else inputs
        )

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward, loss and backward of one batch; see `Trainer.training_step`."""
        own = self._own_loss_of(model, inputs) and self._is_scaled(num_items_in_batch)
        if not own or self.args.torch_empty_cache_steps is not None:
            return super().training_step(model, inputs, num_items_in_batch)
        pipe: Any = model
        pipe.train()
        if callable(getattr(self.optimizer, "train", None)):
            cast(Any, self.optimizer).train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager(), steps_in(pipe, self.accelerator.mixed_precision):
            loss: torch.Tensor = pipe.forward_backward(
                input_kwargs=self._arguments(inputs, num_items_in_batch), run_config=self._cut(pipe, inputs)
            )
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **given: Any,
    ) -> Any:  # Trainer and Seq2SeqTrainer declare different tuples
        """Evaluates one batch; see `Trainer.prediction_step`. If only the loss is asked for, no logits are merged."""
        has_labels = bool(self.label_names) and all(inputs.get(name) is not None for name in self.label_names)
        if not prediction_loss_only or not has_labels or not self._own_loss_of(model, inputs):
            generates = getattr(self.args, "predict_with_generate", False)
            with generating_in(model, self.accelerator.mixed_precision if generates else "no"):
                return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **given)
        inputs = self._prepare_inputs(inputs)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        with torch.no_grad(), self.compute_loss_context_manager():
            outputs = model(**self._arguments(inputs, items), roundpipe_loss_only=True)
        return loss_in(outputs).mean(), None, None

    def _cut(self, pipe: Any, inputs: dict[str, Any]) -> RoundPipeRunConfig | None:
        """Microbatches of even token counts, for a batch of text in a model that this trainer wrapped."""
        mask = inputs.get("attention_mask")
        rows_differ = isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask.all())
        if (
            not self._balances
            or self.neftune_noise_alpha is not None
            or not rows_differ
            or set(inputs) - _OF_TEXT
            or not pipe._language_model.cuts_by_rows
        ):
            return None
        return balanced_config(inputs)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Saves a transformers model as one also where only its parts are in the pipeline."""
        model: Any = self.model
        if not isinstance(model, PreTrainedModel) and isinstance(original_of(model), PreTrainedModel):
            model.synchronize()
            self.model = original_of(model)
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model = model

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        save_random_state(Path(output_dir), self.model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            load_random_state(Path(checkpoint), self.model)


class RoundPipeTrainer(RoundPipeTrainerMixin):
    """`transformers.Trainer` that trains its model in the pipeline; see `RoundPipeTrainerMixin`.

    Raises:
        ValueError: an argument has no meaning in the pipeline, or the model cannot be wrapped; the message names it.
    """


class RoundPipeSeq2SeqTrainer(RoundPipeTrainer, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` that trains its model in the pipeline; see `RoundPipeTrainerMixin`.

    With `predict_with_generate`, `model.generate` runs on the host, on all of its weights.
    """
