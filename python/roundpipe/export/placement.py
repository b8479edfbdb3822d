"""Places an adapter on its base without the base's weights, and merges it one group of weights at a time.

The base is built on the meta device, and peft adds its own layers to it. So peft itself decides which weights an
adapter changes, and computes the changes.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from roundpipe import _core
from roundpipe.export.adapter import Adapter
from roundpipe.huggingface.weights.files import Checkpoint
from roundpipe.huggingface.weights.names import Names, Read, Source

_PREFIX = "base_model.model."  # between a PeftModel and the model it wraps
_ADAPTER_NAME = "default"


@dataclass(eq=False)
class Unit:
    """One of peft's layers, which is merged by itself.

    Attributes:
        path: its module's name in the base model.
        module: the layer on the meta device.
        inputs: each parameter's name in the layer, with the identity of the parameter that it takes.
        outputs: each parameter's name in the merged module, with the identity of the parameter that it becomes.
    """

    path: str
    module: nn.Module
    inputs: dict[str, int]
    outputs: dict[str, int]


@dataclass(eq=False)
class Group:
    """Units that share tensors of the files. Most have one unit."""

    units: list[Unit] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)


class Placement:
    """The merge of one adapter into one base, worked out before any weight is read.

    Attributes:
        groups: maps each changed tensor of the files to its group.
        untied: parameters that shared a tensor of the files and no longer do, with that tensor.

    Raises:
        ValueError: the base's config or tensors are incomplete, or the adapter does not belong to this base.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter) -> None:
        self._checkpoint = checkpoint
        model = build_model(checkpoint.folder, "export")
        # The conversions that a loaded model keeps for saving. Legacy names are read but not written.
        saved: Any = get_model_conversion_mapping(model, add_legacy=False)
        model._weight_conversions = saved
        self._names = Names(model, checkpoint, get_model_conversion_mapping(model))
        self._label = f"the adapter in {adapter.folder}"
        # A parameter's identity identifies it: it stays the same object when peft wraps its module, and tied modules
        # share one.
        self._aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(parameter), []).append(name)
        self._base = {id(parameter): parameter for parameter in model.parameters()}  # also keeps the identities taken
        self._by_name = {name: key for key, names in self._aliases.items() for name in names}
        self._take_shapes()
        peft_model = _wrap(model, adapter)
        self._adapter = self._assign(peft_model, adapter)
        self._final = dict(self._by_name)  # the parameter under each name after the merge
        units = list(self._units(model))
        self.untied: dict[str, str] = {}
        self._find_untied(units)
        self.groups = self._group(units)
        self._rehearse()

    def merge(self, group: Group) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The merged tensors of a group under their names in the files, and the tensors that are no longer tied."""
        return self._merge(group, self._checkpoint.read, self._adapter)

    def _merge(
        self, group: Group, read: Read, adapter: dict[int, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        loaded: dict[str, torch.Tensor] = {}
        for source in group.sources:
            loaded |= self._names.load(source, read)
        # An adapter's tensor for a parameter of the base replaces it, in the base's dtype.
        values: dict[int, torch.Tensor] = {}
        for name, value in loaded.items():
            key = self._by_name[name]
            values[key] = adapter[key].to(value.dtype, copy=True) if key in adapter else value
        for unit in group.units:
            module = copy.deepcopy(unit.module)
            state = {name: values[key] if key in values else adapter[key] for name, key in unit.inputs.items()}
            module.load_state_dict(state, strict=False, assign=True)
            merged = dict(_unload(module, merge=True).named_parameters(remove_duplicate=False))
            values |= {key: merged[name].detach() for name, key in unit.outputs.items()}
        final = {name: values[self._final[name]].to(value.dtype) for name, value in loaded.items()}
        stored: dict[str, torch.Tensor] = {}
        for source in group.sources:
            stored |= self._names.store(source, {name: final[name] for name in source.parameters})
        split = {
            name: values[self._final[name]].to(stored[key].dtype) for name, key in self.untied.items() if key in stored
        }
        return stored, split

    def _take_shapes(self) -> None:
        """Gives each parameter its dtype from the files, because peft derives the adapter's dtype from it."""
        for key, names in self._aliases.items():
            sources = [self._names.sources[name] for name in names if name in self._names.sources]
            if not sources:
                raise ValueError(
                    f"[export] no tensor in {self._checkpoint.folder} becomes {names[0]} of its model; expected a "
                    "whole model as save_pretrained writes it; give the folder of the base model itself"
                )
            parameter = self._base[key]
            for source in sources:
                for name, tensor in self._names.load(source, self._checkpoint.empty).items():
                    if name not in names:
                        continue
                    if tensor.shape != parameter.shape:
                        raise ValueError(
                            f"[export] {name} has shape {tuple(tensor.shape)} in {self._checkpoint.folder}, expected "
                            f"{tuple(parameter.shape)} by its config.json; give a folder whose files belong together"
                        )
                    parameter.data = parameter.data.to(tensor.dtype)

    def _assign(self, peft_model: Any, adapter: Adapter) -> dict[int, torch.Tensor]:
        """The adapter's tensors by the identity of their parameters, in these parameters' dtypes."""
        parameters = dict(peft_model.named_parameters(remove_duplicate=False))
        buffers = dict(peft_model.named_buffers(remove_duplicate=False))
        assigned: dict[int, torch.Tensor] = {}
        for name, tensor in _named_by_peft(peft_model, adapter).items():
            target = parameters.get(name)
            if target is None:
                if name in buffers:
                    continue
                raise ValueError(
                    f"[export] {self._label} holds {name}, which the base in {self._checkpoint.folder} has no place "
                    "for; expected an adapter of this base; give another --base"
                )
            if tensor.shape != target.shape:
                raise ValueError(
                    f"[export] {self._label} has {name} of shape {tuple(tensor.shape)}, expected "
                    f"{tuple(target.shape)} for the base in {self._checkpoint.folder}; give the base it was trained "
                    "on, with its vocabulary resized as for the training"
                )
            assigned[id(target)] = tensor.to(target.dtype)
        for name, parameter in parameters.items():
            if id(parameter) not in self._base and id(parameter) not in assigned:
                raise ValueError(
                    f"[export] {self._label} holds no tensor for {name.removeprefix(_PREFIX)}, expected one for each "
                    "layer that its config targets; give the base it was trained on"
                )
        self._peft_model = peft_model  # keeps the identities taken
        return assigned

    def _units(self, model: nn.Module) -> Iterator[Unit]:
        inside: str | None = None
        for path, module in model.named_modules():
            if inside is not None and path.startswith(inside + "."):
                continue
            if not (hasattr(module, "base_layer") or hasattr(module, "unload_and_optionally_merge_module")):
                continue
            inside = path
            left = _unload(module, merge=False)
            outputs = {name: id(value) for name, value in left.named_parameters(remove_duplicate=False)}
            kept = set(outputs.values())
            inputs = {
                name: id(value)
                for name, value in module.named_parameters(remove_duplicate=False)
                # A module that is replaced as a whole comes with its original, which is not needed.
                if not (id(value) in self._base and id(value) not in kept)
            }
            for name, key in outputs.items():
                self._final[f"{path}.{name}"] = key
            yield Unit(path, module, inputs, outputs)

    def _find_untied(self, units: list[Unit]) -> None:
        touched = {name for unit in units for name in self._final if name.startswith(unit.path + ".")}
        for names in self._aliases.values():
            if len(names) == 1 or not touched.intersection(names):
                continue
            own = [name for name in names if name in self._names.sources]
            self._refuse_unequal(own)
            keys = self._names.sources[own[0]].keys
            for name in names:
                if name in own or self._final[name] == self._final[own[0]]:
                    continue
                if len(keys) != 1 or self._names.parameter_of(name)[0] != name or name in self._checkpoint.tensors:
                    raise ValueError(
                        f"[export] {self._label} gives {name} weights of its own, which have no name in the files of "
                        f"{self._checkpoint.folder}; save the base without tied weights and merge into that"
                    )
                self.untied[name] = keys[0][0]

    def _refuse_unequal(self, names: list[str]) -> None:
        """Raises if tied parameters that the files hold twice differ: it would be unclear which one is meant."""
        first, *others = [self._names.load(self._names.sources[name], self._checkpoint.read)[name] for name in names]
        for name, other in zip(names[1:], others, strict=True):
            if not torch.equal(first, other):
                raise ValueError(
                    f"[export] {names[0]} and {name} are tied by the config and differ in {self._checkpoint.folder}; "
                    "expected equal weights; save the base again with save_pretrained"
                )

    def _group(self, units: list[Unit]) -> dict[str, Group]:
        of_source: dict[Source, Group] = {}

        def join(unit: Unit | None, sources: list[Source]) -> None:
            group = Group()
            for old in dict.fromkeys(of_source[source] for source in sources if source in of_source):
                group.units += old.units
                group.sources += old.sources
            group.units += [unit] if unit else []
            group.sources += [source for source in dict.fromkeys(sources) if source not in group.sources]
            of_source.update(dict.fromkeys(group.sources, group))

        for unit in units:
            names = [name for key in unit.inputs.values() for name in self._aliases.get(key, [])]
            names += [name for output in unit.outputs for name in self._tied_with(f"{unit.path}.{output}")]
            join(unit, [self._names.sources[name] for name in names if name in self._names.sources])
        for key in self._adapter:
            names = self._aliases.get(key, [])
            join(None, [self._names.sources[name] for name in names if name in self._names.sources])
        return {key: group for source, group in of_source.items() for key, _ in source.keys}

    def _tied_with(self, name: str) -> list[str]:
        return self._aliases.get(self._by_name.get(name, 0), [])

    def _rehearse(self) -> None:
        """Merges everything on the meta device, so that errors appear before anything is written."""
        adapter = {key: tensor.to("meta") for key, tensor in self._adapter.items()}
        for group in dict.fromkeys(self.groups.values()):
            where = group.units[0].path if group.units else group.sources[0].parameters[0]
            try:
                stored, _ = self._merge(group, self._checkpoint.empty, adapter)
            except (RuntimeError, KeyError, TypeError, NotImplementedError, AttributeError) as error:
                raise ValueError(
                    f"[export] {self._label} cannot be merged at {where}: {error}; expected layers that peft can merge"
                ) from error
            for name, tensor in stored.items():
                expected = self._checkpoint.tensors[name]
                if tuple(tensor.shape) != expected.shape or tensor.dtype != expected.torch_dtype:
                    raise ValueError(
                        f"[export] {name} would become {tensor.dtype} {tuple(tensor.shape)}, expected "
                        f"{expected.torch_dtype} {expected.shape} as in {self._checkpoint.folder}; the adapter at "
                        f"{where} changes more than values"
                    )


class _Loaded(NamedTuple):
    missing_keys: list[str]
    unexpected_keys: list[str]


def build_model(folder: Path, where: str) -> PreTrainedModel:
    """The causal language model of a folder on the meta device, with plain weights, whatever its files hold.

    Raises:
        ValueError: tagged with `where`: transformers makes no such model.
    """
    factory: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if getattr(config, "quantization_config", None) is not None:
            del config.quantization_config
        with torch.device("meta"):
            model = factory.from_config(config, attn_implementation="eager")
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ValueError(
            f"[{where}] cannot build the model of {folder}: {str(error).strip()}; expected the folder of a causal "
            "language model whose code is part of transformers"
        ) from None
    model.eval()
    model.tie_weights()
    assert isinstance(model, PreTrainedModel)
    return model


def _wrap(model: PreTrainedModel, adapter: Adapter) -> Any:
    from peft import PeftModel

    try:
        # peft warns about tied weights, which are handled here; its new layers draw random numbers.
        with warnings.catch_warnings(), _core.DrawsApart(seed=0, device=torch.device("cpu")):
            warnings.simplefilter("ignore")
            wrapped = PeftModel(model, adapter.config, adapter_name=_ADAPTER_NAME)
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(
            f"[export] peft cannot place the adapter in {adapter.folder} on {type(model).__name__}: {error}; expected "
            "an adapter of this base; give another --base"
        ) from error
    return wrapped.eval()


def _named_by_peft(peft_model: Any, adapter: Adapter) -> dict[str, torch.Tensor]:
    """The adapter's tensors under the names of the wrapped model; peft's own loader only passes them on here."""
    from peft import set_peft_model_state_dict

    seen: dict[str, torch.Tensor] = {}

    def note(state_dict: dict[str, torch.Tensor], **_: Any) -> _Loaded:
        seen.update(state_dict)
        return _Loaded([], [])

    peft_model.load_state_dict = note
    try:
        set_peft_model_state_dict(peft_model, adapter.tensors, adapter_name=_ADAPTER_NAME)
    except KeyError as error:
        raise ValueError(
            f"[export] the adapter in {adapter.folder} holds no tensor {error}, which its config asks for; expected a "
            "config and weights that were saved together"
        ) from None
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"[export] peft cannot read the weights of the adapter in {adapter.folder}: {_first_line(error)}; "
            "expected an adapter of this base; give another --base"
        ) from None
    finally:
        del peft_model.load_state_dict
    return seen


def _unload(module: nn.Module, merge: bool) -> nn.Module:
    """Returns the rest of one of peft's layers after peft has removed itself from it."""
    special = getattr(module, "unload_and_optionally_merge_module", None)
    if special is not None:
        left = special(merge=merge, safe_merge=False, adapter_names=None)
    else:
        layer: Any = module
        if merge:
            layer.merge(safe_merge=False, adapter_names=None)
        left = layer.get_base_layer()
    assert isinstance(left, nn.Module)
    return left


def _first_line(error: Exception) -> str:
    return re.split(r"[\r\n]", str(error).strip(), maxsplit=1)[0]
