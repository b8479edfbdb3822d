"""accelerate's Accelerator for training loops over a model in the pipeline."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import nn

from roundpipe.trainers.host import MIXED, autocasting, compute_in, is_in_pipeline
from roundpipe.trainers.random_state import load_random_state, save_random_state
from roundpipe.trainers.wrapping import into_pipeline

_REFUSED = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config")
_COMPILED = ("dynamo_backend", "dynamo_plugin")


class RoundPipeAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """`accelerate.Accelerator` whose `prepare` puts models with trainable parameters into the pipeline.

    Batches, losses and optimizers are on the host. An optimizer may be made before or after the model is prepared.

    Raises:
        ValueError: an argument has no meaning in the pipeline; the message names it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs)
        for name in (*_REFUSED, *_COMPILED):
            if given.arguments.get(name) is not None:
                why = "layers run one by one" if name in _COMPILED else "one process drives all devices"
                raise ValueError(f"[RoundPipeAccelerator] {name} is refused: {why}; leave it out")
        given.arguments["cpu"] = True
        super().__init__(*given.args, **given.kwargs)
        if self.mixed_precision not in ("no", *MIXED):
            raise ValueError(
                f"[RoundPipeAccelerator] mixed_precision is {self.mixed_precision!r}, expected 'no' or 'bf16'; for "
                "fp16, write a loop with roundpipe.GradScaler"
            )
        if self.distributed_type != DistributedType.NO or self.device.type != "cpu":
            raise ValueError(
                f"[RoundPipeAccelerator] accelerate is set up for {self.distributed_type.value} on {self.device}, "
                "expected one process on the host, which drives all devices; start the script with `python`"
            )
        self.register_save_state_pre_hook(self._save_models)
        self.register_load_state_pre_hook(self._load_models)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Puts a model into the pipeline, unless it is there, or nothing of it is trained."""
        if not is_in_pipeline(model):
            if not any(parameter.requires_grad for parameter in model.parameters()):
                return super().prepare_model(model, device_placement, evaluation_mode)  # type: ignore[no-any-return]
            model = into_pipeline("RoundPipeAccelerator", model)
        if all(model is not known for known in self._models):
            self._models.append(model)
        compute_in(model, self.mixed_precision)
        return model

    def autocast(self, autocast_handler: Any = None) -> AbstractContextManager[None]:
        """Autocast of `mixed_precision`, on the host and on the devices."""
        if autocast_handler is not None:
            raise ValueError("[RoundPipeAccelerator] autocast_handler is refused; use torch.autocast in its place")
        return autocasting(MIXED.get(self.mixed_precision))

    def _save_models(self, models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        """Writes the models' files in the place of accelerate, and beside them what their dropout draws from."""
        for index, model in enumerate(models):
            known: dict[tuple[Any, ...], str] = {}
            tensors = {}
            for name, tensor in model.state_dict().items():
                place = (tensor.data_ptr(), tensor.shape, tensor.dtype)
                if not tensor.numel() or known.setdefault(place, name) == name:
                    tensors[name] = tensor.contiguous()
            save_file(tensors, _weights_file(folder, index), metadata={"format": "pt"})
            save_random_state(Path(folder), model, index)
        weights.clear()

    def _load_models(self, models: list[nn.Module], folder: str) -> None:
        for index, model in enumerate(models):
            tensors = load_file(_weights_file(folder, index))
            result = model.load_state_dict(tensors, strict=False)
            state = model.state_dict()
            loaded = {state[name].data_ptr() for name in tensors if name in state}
            missing = [name for name in result.missing_keys if state[name].data_ptr() not in loaded]
            if missing or result.unexpected_keys:
                raise ValueError(
                    f"[RoundPipeAccelerator] {_weights_file(folder, index)} lacks {missing[:3]} and has "
                    f"{result.unexpected_keys[:3]} besides, expected this model's weights; make the model as it was"
                )
            load_random_state(Path(folder), model, index)
        models.clear()


def _weights_file(folder: str, index: int) -> Path:
    return Path(folder) / ("model.safetensors" if not index else f"model_{index}.safetensors")
