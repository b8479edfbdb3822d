"""Loads transformers' causal language models without a second copy of their weights.

transformers itself does everything except reading files: it decides class, dtype, tensor names, tied weights, buffers
and generation config. Only the step that fills the empty model is replaced. If that step needs more than reading
safetensors (quantised weights, several devices, other formats), transformers' own step runs too.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import build_glob_alternation
from transformers.utils import logging
from transformers.utils.loading_report import LoadStateDictInfo

from roundpipe import _core
from roundpipe.huggingface.weights.files import Checkpoint, empty_on_host
from roundpipe.huggingface.weights.names import Names, Source
from roundpipe.huggingface.weights.safetensors_header import CheckpointError
from roundpipe.quantise.choice import choose
from roundpipe.quantise.place import encode_weights, place_encoded

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel

_THREADS = 4
_SHOWN_BYTES = 1_000_000_000  # models of at least this size show a progress bar
_PLAIN_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def load_causal_model(
    base: str | os.PathLike[str],
    extra_tensors: str,
    mapped: bool,
    options: dict[str, Any],
    admit: Callable[[nn.Module], None] | None = None,
    quantise: Quantise | None = None,
) -> PreTrainedModel:
    """Returns the model of `AutoModelForCausalLM.from_pretrained(base, **options)`.

    Memory peaks at the model's weights plus the tensors that make up one of its parameters.

    Args:
        base: a folder, or a model on the Hub.
        extra_tensors: "refuse" or "ignore".
        mapped: whether parameters that are one tensor of the files stay in the mapped files.
        options: options of transformers, including `dtype`.
        admit: receives the empty model before any weight is read, and may refuse it with a BudgetError.
        quantise: encodes weights as they are read; then memory peaks at the encoded weights plus a layer's.

    Raises:
        CheckpointError: a file is damaged, or weights are missing, of another shape or kind, or left over. Raised
            before any weight is read.
        Exception: whatever transformers raises.
    """
    fill = _Fill(base, extra_tensors, mapped, admit, quantise)
    # A new class for this one call, so that no other call is affected.
    factory: Any = type(
        AutoModelForCausalLM.__name__,
        (AutoModelForCausalLM,),
        {"_model_mapping": _Mapping(AutoModelForCausalLM._model_mapping, fill)},
    )
    # Ignored size mismatches are reported by name.
    model, info = factory.from_pretrained(base, **options, output_loading_info=True, ignore_mismatched_sizes=True)
    fill.check(info, type(model).__name__)
    loaded: PreTrainedModel = model
    return loaded


@dataclass(frozen=True)
class Quantise:
    """How weights are encoded while they are read; see `roundpipe.quantise.choice.choose`."""

    format: str
    keep: tuple[str, ...] = ()

    def empty(self, model: nn.Module) -> nn.Module:
        """A copy of a model without values, with its weights encoded."""
        copied = copy.deepcopy(model)
        encode_weights(copied, self.format, self.keep)
        return copied


class _Mapping:
    """transformers' table of model classes by config class, with the step that fills a model replaced."""

    def __init__(self, mapping: Any, fill: _Fill) -> None:
        self._mapping = mapping
        self._fill = fill

    def __contains__(self, config: object) -> bool:
        return config in self._mapping

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping.keys())

    def __getitem__(self, config: Any) -> Any:
        found = self._mapping[config]
        return tuple(map(self._filled, found)) if isinstance(found, (list, tuple)) else self._filled(found)

    def _filled(self, original: Any) -> Any:
        def load(model: Any, state_dict: Any, files: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
            model.__class__ = original
            info = None if state_dict is not None else self._fill.run(model, files or (), config)
            if info is not None:
                return info, None
            return original._load_pretrained_model(model, state_dict, files, config, *args, **kwargs)

        names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        return type(original.__name__, (original,), {**names, "_load_pretrained_model": staticmethod(load)})


class _Fill:
    """Reads the weights of one model."""

    def __init__(
        self,
        base: str | os.PathLike[str],
        extra_tensors: str,
        mapped: bool,
        admit: Callable[[nn.Module], None] | None,
        quantise: Quantise | None,
    ) -> None:
        self._base = base
        self._quantise = quantise
        self._admit = admit
        self._extra_tensors = extra_tensors
        self._mapped = mapped

    def run(self, model: Any, files: Iterable[str], config: Any) -> LoadStateDictInfo | None:
        """Fills an empty model; None, with nothing done, if that needs more than reading.

        Args:
            model: on the meta device.
            files: the files of its weights.
            config: transformers' `LoadStateDictConfig`.
        """
        paths = [Path(file) for file in files]
        devices = {str(device) for device in (config.device_map or {}).values()}
        plain = config.hf_quantizer is None and config.device_mesh is None and devices <= {"cpu"}
        if not plain or {path.suffix for path in paths} != {".safetensors"} or len({p.parent for p in paths}) != 1:
            self._refuse_encoding("its files are not plain safetensors")
            return None
        if any(tensor.device.type != "meta" for tensor in model.parameters()):
            self._refuse_encoding("the model is not empty")
            return None
        checkpoint = Checkpoint(paths[0].parent, [path.name for path in paths])
        try:
            names = Names(model, checkpoint, config.weight_mapping or ())
            dtypes = _dtypes(model, config)
            info = self._compare(model, checkpoint, names, dtypes)
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            # The conversion needs values, or does not support these shapes (transformers then raises its own error),
            # or this is another version of transformers.
            self._refuse_encoding("its tensors have to be converted")
            return None
        chosen = None if self._quantise is None else choose(model, self._quantise.format, self._quantise.keep)
        if self._admit is not None:
            self._admit(model if self._quantise is None else self._quantise.empty(model))
        encoded = frozenset() if chosen is None else chosen.encoded
        mappable = {name for name, _ in model.named_parameters()} - encoded if self._mapped else set()
        with _Reader(checkpoint, dtypes, mappable) as reader:
            for name, value in reader.values(names):
                if chosen is not None and name in encoded:
                    _put_encoded(model, name, value, chosen.format)
                else:
                    _put(model, name, value)
        model._weight_conversions = [entry for entry in config.weight_mapping or () if entry.was_used()]
        return info

    def _refuse_encoding(self, reason: str) -> None:
        """Raises CheckpointError if weights are to be encoded: transformers, to which the model is left, does not."""
        if self._quantise is not None:
            raise CheckpointError(
                f"[from_pretrained] {self._base} cannot be quantised while it is loaded: {reason}; save it again with "
                "save_pretrained of transformers, in safetensors, and load that"
            )

    def _compare(
        self, model: Any, checkpoint: Checkpoint, names: Names, dtypes: dict[str, torch.dtype]
    ) -> LoadStateDictInfo:
        """Raises CheckpointError unless the files hold the model; tied tensors may be missing."""
        known = model.state_dict()
        found: dict[str, Any] = {
            "missing_keys": set(known) - set(names.sources),
            "unexpected_keys": set(names.unplaced),
            "error_msgs": [],
            "conversion_errors": {},
        }
        info: Any = LoadStateDictInfo(**{part.name: found.get(part.name, set()) for part in fields(LoadStateDictInfo)})
        for source in dict.fromkeys(names.sources.values()):
            for key, _ in source.keys:
                _refuse_other_kind(checkpoint, key, dtypes[source.parameters[0]])
            for name, value in names.load(source, checkpoint.empty).items():
                if value.shape != known[name].shape:
                    info.mismatched_keys.add((name, value.shape, known[name].shape))
        kept = set(info.missing_keys)
        model._adjust_missing_and_unexpected_keys(info)
        tied = getattr(model, "all_tied_weights_keys", {})
        found = info.to_dict()
        found["missing_keys"] = info.missing_keys - tied.keys() - set(tied.values())
        self.check(found, type(model).__name__)
        info.missing_keys = kept  # transformers ties weights and removes them from this list
        report: LoadStateDictInfo = info
        return report

    def check(self, info: dict[str, Any], kind: str) -> None:
        """Raises CheckpointError if transformers' report lists anything."""
        for found, what in (("missing_keys", "are not in its files"), ("mismatched_keys", "have another shape there")):
            if names := info.get(found):
                raise CheckpointError(
                    f"[from_pretrained] weights of {kind} {what} ({len(names)}): {_listed(names)}; expected every "
                    f"weight in {self._base}, since the others would start at random"
                )
        if (names := info.get("unexpected_keys")) and self._extra_tensors == "refuse":
            raise CheckpointError(
                f"[from_pretrained] {self._base} holds {len(names)} tensors that {kind} has no place for: "
                f"{_listed(names)}; expected only tensors of such a model, since the effect of others would be lost; "
                "extra_tensors='ignore' loads the model without them"
            )


class _Reader:
    """Reads or maps tensors with a few threads. Leaving the block with an error, Ctrl+C included, stops the threads.

    Args:
        checkpoint: the files.
        dtypes: the target dtype of each parameter.
        mappable: names of the parameters that may stay in mapped files.
    """

    def __init__(self, checkpoint: Checkpoint, dtypes: dict[str, torch.dtype], mappable: set[str]) -> None:
        self._checkpoint = checkpoint
        self._dtypes = dtypes
        self._mappable = mappable
        total = sum(tensor.end - tensor.start for tensor in checkpoint.tensors.values())
        self._bar: Any = logging.tqdm(
            total=total, unit="B", unit_scale=True, desc="Loading weights", disable=total < _SHOWN_BYTES
        )
        self._pool = ThreadPoolExecutor(_THREADS, "roundpipe-read")
        self._stopped = threading.Event()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._pool.shutdown(cancel_futures=True)
        self._bar.close()

    def values(self, names: Names) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the model's parameters and persistent buffers by name; single tensors of the files come first."""
        sources = list(dict.fromkeys(names.sources.values()))
        order = {key: index for index, key in enumerate(self._checkpoint.tensors)}
        single = sorted((s for s in sources if s.converter is None), key=lambda s: order[s.keys[0][0]])
        # No more than threads need, since some values are gone before the next are read.
        started: deque[tuple[str, torch.Tensor, Future[None]]] = deque()
        for source in single:
            name, key = source.parameters[0], source.keys[0][0]
            mapped = self._checkpoint.mapped(key, self._dtypes[name]) if name in self._mappable else None
            if mapped is not None:
                self._bar.update(mapped.nbytes)
                yield name, mapped
                continue
            started.append((name, *self._start(source, key)))
            if len(started) > _THREADS:
                yield _finished(started.popleft())
        while started:
            yield _finished(started.popleft())
        for source in sources:
            if source.converter is not None:
                yield from self._converted(names, source)

    def _converted(self, names: Names, source: Source) -> Iterator[tuple[str, torch.Tensor]]:
        parts = {key: self._start(source, key) for key, _ in source.keys}

        def take(key: str) -> torch.Tensor:
            value, done = parts.pop(key)
            done.result()
            return value

        for name, made in names.load(source, take).items():
            # Large memory from malloc would not return to the system when blocks take the values over.
            yield name, empty_on_host(made.shape, made.dtype).copy_(made) if made.is_contiguous() else made
            del made
        _trim_heap()

    def _start(self, source: Source, key: str) -> tuple[torch.Tensor, Future[None]]:
        stored = self._checkpoint.tensors[key]
        value = empty_on_host(stored.shape, self._dtypes[source.parameters[0]])
        return value, self._pool.submit(self._read, key, value)

    def _read(self, key: str, value: torch.Tensor) -> None:
        for count in self._checkpoint.read_into(key, value):
            if self._stopped.is_set():
                return
            self._bar.update(count)


def _finished(started: tuple[str, torch.Tensor, Future[None]]) -> tuple[str, torch.Tensor]:
    name, value, done = started
    done.result()
    return name, value


def _trim_heap() -> None:
    """Returns freed memory between live allocations to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _put(model: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Makes `value` the parameter or buffer of that name, as transformers does."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._parameters:
        value = torch.nn.Parameter(value, requires_grad=value.is_floating_point())
    value._is_hf_initialized = True  # type: ignore[attr-defined]
    setattr(module, leaf, value)


def _put_encoded(model: torch.nn.Module, name: str, value: torch.Tensor, format: str) -> None:
    """Likewise, encoded."""
    try:
        made = _core.encode(format, value)
    except ValueError as error:
        raise CheckpointError(f"[from_pretrained] {name} cannot be encoded: {error}") from error
    # Large memory from malloc would not return to the system when blocks take the values over.
    parts = [empty_on_host(part.shape, part.dtype).copy_(part) for part in made]
    module: Any = place_encoded(model, name, _core.Encoding(format, value.dtype), parts)
    for initialized in (module, *(module._parameters[part] for part in module.part_names())):
        initialized._is_hf_initialized = True


def _dtypes(model: Any, config: Any) -> dict[str, torch.dtype]:
    """The dtype to which transformers casts each parameter."""
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    if config.dtype_plan:
        pattern, policies, _ = build_glob_alternation(list(config.dtype_plan))
        for name in dtypes:
            if match := pattern.search(name):
                dtypes[name] = config.dtype_plan[policies[str(match.lastgroup)]]
    return dtypes


def _refuse_other_kind(checkpoint: Checkpoint, key: str, dtype: torch.dtype) -> None:
    """Raises CheckpointError for numbers that a cast would not turn into weights: integers, or scaled values."""
    stored = checkpoint.tensors[key]
    if stored.torch_dtype == dtype or (stored.torch_dtype in _PLAIN_FLOATS and dtype in _PLAIN_FLOATS):
        return
    raise CheckpointError(
        f"[from_pretrained] {key} in {checkpoint.folder / stored.file} has the dtype {stored.dtype}, expected numbers "
        f"that can become {dtype}; give a model whose weights are not quantised"
    )


def _listed(names: Iterable[Any]) -> str:
    texts = sorted(
        name if isinstance(name, str) else f"{name[0]} {tuple(name[1])} instead of {tuple(name[2])}" for name in names
    )
    return ", ".join(texts[:5]) + (", ..." if len(texts) > 5 else "")
