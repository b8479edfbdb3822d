"""Loads transformers' language models without a second copy of their weights.

transformers itself does everything except reading files: it decides class, dtype, tensor names, tied weights, buffers
and generation config. Only the step that fills the empty model is replaced. If that step needs more than reading
safetensors (quantised weights, several devices, other formats), transformers' own step runs too.
"""

from __future__ import annotations

import copy
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
)
from transformers.core_model_loading import build_glob_alternation
from transformers.utils import logging
from transformers.utils.loading_report import LoadStateDictInfo

from roundpipe import _core
from roundpipe.huggingface.weights.encoded_files import Encoded, EncodedFiles, encoded_in
from roundpipe.huggingface.weights.files import Checkpoint, empty_on_host
from roundpipe.huggingface.weights.names import Names, Source
from roundpipe.huggingface.weights.safetensors_header import CheckpointError
from roundpipe.quantise.choice import choose
from roundpipe.quantise.place import place_encoded

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedModel

_THREADS = 4
_SHOWN_BYTES = 1_000_000_000  # models of at least this size show a progress bar
_PLAIN_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


Kind = Literal["causal", "scores", "pictures", "sounds"]
AUTO_CLASSES: dict[Kind, Any] = {
    "causal": AutoModelForCausalLM,
    "scores": AutoModelForSequenceClassification,
    "pictures": AutoModelForImageTextToText,
    "sounds": AutoModelForMultimodalLM,
}
"""The class of transformers that loads a model: of text, of a few numbers for each row, of text and pictures, of text
and sounds."""


class CheckedError(Exception):
    """Ends a loading that only checks."""


def load_language_model(
    base: str | os.PathLike[str],
    extra_tensors: str,
    mapped: bool,
    options: dict[str, Any],
    admit: Callable[[nn.Module], None] | None = None,
    quantise: Quantise | None = None,
    stored: Mapping[str, Any] | None = None,
    kind: Kind = "causal",
    only_checks: bool = False,
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
        stored: the `quantization_config` of files whose weights are encoded; not in the options' config.
        kind: of the model. If the files of one of "scores" are those of another model with the same base, its head
            starts at random, and theirs is left out.
        only_checks: ends with a CheckedError where the first weight would be read.

    Raises:
        CheckpointError: a file is damaged, or weights are missing, of another shape or kind, or left over. Raised
            before any weight is read.
        Exception: whatever transformers raises.
    """
    stored_kinds = options["config"].architectures or () if kind == "scores" else ()
    has_new_head = kind == "scores" and not any(each.endswith("ForSequenceClassification") for each in stored_kinds)
    fill = _Fill(base, extra_tensors, mapped, admit, quantise, stored, has_new_head, only_checks)
    auto = AUTO_CLASSES[kind]
    # A new class for this one call, so that no other call is affected.
    factory: Any = type(auto.__name__, (auto,), {"_model_mapping": _Mapping(auto._model_mapping, fill)})
    # Ignored size mismatches are reported by name, and of a new head there is nothing to report.
    with _quiet() if has_new_head else nullcontext():
        model, info = factory.from_pretrained(base, **options, output_loading_info=True, ignore_mismatched_sizes=True)
    fill.check(info, model)
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _quiet() -> Iterator[None]:
    like: Any = logging  # has no types
    before = like.get_verbosity()
    like.set_verbosity_error()
    try:
        yield
    finally:
        like.set_verbosity(before)


@dataclass(frozen=True)
class Quantise:
    """How weights are encoded while they are read; see `roundpipe.quantise.choice.choose`."""

    format: str
    keep: tuple[str, ...] = ()

    def encoded(self, model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Encoded]:
        """The parameters of an empty model that will be encoded, empty as well."""
        found = {}
        for name in choose(model, self.format, self.keep).encoded:
            encoding = _core.Encoding(self.format, dtypes[name])
            found[name] = Encoded(encoding, _core.encode(self.format, model.get_parameter(name).detach()))
        return found


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
        stored: Mapping[str, Any] | None,
        has_new_head: bool,
        only_checks: bool,
    ) -> None:
        self._base, self._has_new_head, self._only_checks = base, has_new_head, only_checks
        self._quantise = quantise
        self._stored = stored
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
        stored = None if self._stored is None else EncodedFiles(checkpoint, self._stored)
        files_as_plain = checkpoint if stored is None else stored.plain
        try:
            names = Names(model, files_as_plain, config.weight_mapping or ())
            dtypes = _dtypes(model, config)
            info = self._compare(model, files_as_plain, names, dtypes)
            encoded = {} if stored is None else encoded_in(stored, model, names, dtypes)
        except CheckpointError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            # The conversion needs values, or does not support these shapes (transformers then raises its own error),
            # or this is another version of transformers.
            self._refuse_encoding("its tensors have to be converted")
            return None
        if self._quantise is not None:
            encoded = self._quantise.encoded(model, dtypes)
        if self._admit is not None:
            self._admit(_with_encoded(model, encoded))
        if self._only_checks:
            raise CheckedError
        mappable = {name for name, _ in model.named_parameters()} if self._mapped else set()
        with _Reader(checkpoint, stored, dtypes, mappable) as reader:
            for name, value in reader.values(names):
                if isinstance(value, Encoded):
                    _put_encoded(model, name, value)
                elif name in encoded:
                    _put_encoded(model, name, _encode(name, value, encoded[name].encoding))
                else:
                    _put(model, name, value)
        model._weight_conversions = [entry for entry in config.weight_mapping or () if entry.was_used()]
        return info

    def _refuse_encoding(self, reason: str) -> None:
        """Raises CheckpointError if weights are encoded, now or in the files: transformers, to which the model is left,
        does not do it. Nothing more is checked then."""
        if self._stored is not None:
            raise CheckpointError(
                f"[from_pretrained] {self._base} holds quantised weights, which cannot be read as they are: {reason}; "
                "load the model that was quantised, with quantise="
            )
        if self._quantise is not None:
            raise CheckpointError(
                f"[from_pretrained] {self._base} cannot be quantised while it is loaded: {reason}; save it again with "
                "save_pretrained of transformers, in safetensors, and load that"
            )
        if self._only_checks:
            raise CheckedError

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
        self.check(found, model)
        info.missing_keys = kept  # transformers ties weights and removes them from this list
        report: LoadStateDictInfo = info
        return report

    def check(self, info: dict[str, Any], model: Any) -> None:
        """Raises CheckpointError if transformers' report on the model lists anything but heads that may be new."""
        kind = type(model).__name__
        if self._has_new_head:
            inside = f"{model.base_model_prefix}."
            both = ("missing_keys", "unexpected_keys")
            info = info | {each: {name for name in info.get(each) or () if name.startswith(inside)} for each in both}
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
        encoded: those of their weights that are encoded.
        dtypes: the target dtype of each parameter.
        mappable: names of the parameters that may stay in mapped files.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        encoded: EncodedFiles | None,
        dtypes: dict[str, torch.dtype],
        mappable: set[str],
    ) -> None:
        self._checkpoint = checkpoint
        self._encoded = encoded
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

    def values(self, names: Names) -> Iterator[tuple[str, torch.Tensor | Encoded]]:
        """Yields the model's parameters and persistent buffers by name; single tensors of the files come first."""
        sources = list(dict.fromkeys(names.sources.values()))
        order = {key: index for index, key in enumerate(self._checkpoint.tensors)}
        single = [source for source in sources if source.converter is None]
        single.sort(key=lambda source: order.get(self._first_tensor(source), 0))
        # No more than threads need, since some values are gone before the next are read.
        started: deque[tuple[Source, list[_Started]]] = deque()
        for source in single:
            started.append((source, self._begin(source, source.keys[0][0])))
            if len(started) > _THREADS:
                yield from self._finished(names, *started.popleft())
        while started:
            yield from self._finished(names, *started.popleft())
        for source in sources:
            if source.converter is not None:
                yield from self._converted(names, source)

    def _first_tensor(self, source: Source) -> str:
        key = source.keys[0][0]
        is_encoded = self._encoded is not None and key in self._encoded.weights
        return self._encoded.weights[key].stored_parts[0] if is_encoded else key  # type: ignore[union-attr]

    def _begin(self, source: Source, key: str) -> list[_Started]:
        """Begins to read what holds a tensor of the source."""
        name = source.parameters[0]
        if self._encoded is None or key not in self._encoded.weights:
            return [self._start(key, self._dtypes[name], name)]
        weight = self._encoded.weights[key]
        return [
            self._start(part, self._checkpoint.tensors[part].torch_dtype, name) for part in weight.stored_parts if part
        ]

    def _start(self, key: str, dtype: torch.dtype, name: str) -> _Started:
        mapped = self._checkpoint.mapped(key, dtype) if name in self._mappable else None
        if mapped is not None:
            self._bar.update(mapped.nbytes)
            return mapped, None
        value = empty_on_host(self._checkpoint.tensors[key].shape, dtype)
        return value, self._pool.submit(self._read, key, value)

    def _finished(
        self, names: Names, source: Source, started: list[_Started]
    ) -> Iterator[tuple[str, torch.Tensor | Encoded]]:
        key = source.keys[0][0]
        if self._encoded is not None and key in self._encoded.weights:
            dtype = self._dtypes[source.parameters[0]]
            yield from self._encoded.load(names, source, dtype, lambda key: self._parts(key, started)).items()
        else:
            yield source.parameters[0], _value(started.pop())

    def _parts(self, key: str, started: list[_Started]) -> list[torch.Tensor]:
        """Of an encoded weight. What was started is let go."""
        assert self._encoded is not None
        weight, parts = self._encoded.weights[key], []
        for index, tensor in enumerate(weight.stored_parts):
            read = _value(started.pop(0)) if tensor else torch.empty(0)
            made = weight.part(index, read)
            parts.append(made if made.data_ptr() == read.data_ptr() else _on_host(made))
        return parts

    def _converted(self, names: Names, source: Source) -> Iterator[tuple[str, torch.Tensor | Encoded]]:
        started = {key: self._begin(source, key) for key, _ in source.keys}
        made: Mapping[str, torch.Tensor | Encoded]
        if self._encoded is not None and source.keys[0][0] in self._encoded.weights:
            dtype = self._dtypes[source.parameters[0]]
            made = self._encoded.load(names, source, dtype, lambda key: self._parts(key, started.pop(key)))
        else:
            made = names.load(source, lambda key: _value(started.pop(key).pop()))
        for name, value in made.items():
            if isinstance(value, Encoded):
                yield name, Encoded(value.encoding, [_on_host(part) for part in value.parts])
            else:
                yield name, _on_host(value) if value.is_contiguous() else value
        del made
        _trim_heap()

    def _read(self, key: str, value: torch.Tensor) -> None:
        for count in self._checkpoint.read_into(key, value):
            if self._stopped.is_set():
                return
            self._bar.update(count)


_Started = tuple[torch.Tensor, "Future[None] | None"]  # a tensor, and what waits until it is read


def _value(started: _Started) -> torch.Tensor:
    value, done = started
    if done is not None:
        done.result()
    return value


def _on_host(made: torch.Tensor) -> torch.Tensor:
    """A copy. Large memory from malloc would not return to the system when blocks take the values over."""
    return empty_on_host(made.shape, made.dtype).copy_(made)


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


def _encode(name: str, value: torch.Tensor, encoding: _core.Encoding) -> Encoded:
    try:
        made = _core.encode(encoding.format, value)
    except ValueError as error:
        raise CheckpointError(f"[from_pretrained] {name} cannot be encoded: {error}") from error
    return Encoded(encoding, [_on_host(part) for part in made])


def _put_encoded(model: torch.nn.Module, name: str, value: Encoded) -> None:
    """Likewise, encoded."""
    module: Any = place_encoded(model, name, *value)
    for initialized in (module, *(module._parameters[part] for part in module.part_names())):
        initialized._is_hf_initialized = True


def _with_encoded(model: nn.Module, encoded: Mapping[str, Encoded]) -> nn.Module:
    """An empty model with such parameters, which are frozen as all others are then."""
    if not encoded:
        return model
    copied = copy.deepcopy(model)
    for name, value in encoded.items():
        place_encoded(copied, name, *value)
    return copied.requires_grad_(False)


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
