"""How the native parts of a followed model are called by one microbatch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.following.layers.values import Structure, split
from roundpipe.following.native.arguments import TokenArguments, token_arguments
from roundpipe.following.native.around import NativeEmbedding, NativeHead
from roundpipe.following.native.code import Code
from roundpipe.following.native.decoder import NativeDecoder
from roundpipe.following.parts import ENDING
from roundpipe.following.program import LayerCall, Program, Ref
from roundpipe.following.skeleton import FollowedModel, PartState
from roundpipe.model.losses.ending import Ending, Kept
from roundpipe.ops.token_wise import chunk_of

_LOGITS = "router_logits"  # what transformers collects in the routers of experts
# Arguments that these layers pass on to their attention, which reads nothing of them; with a cache, they would.
_UNREAD = frozenset(
    {"num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "output_router_logits"}
)
_NO_CACHE: dict[str, tuple[Any, ...]] = {
    "cache": (None,),
    "past_key_values": (None,),
    "use_cache": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "return_dict": (None, False, True),
}
_ANY = torch.empty(0)
_TOKEN_DIMS = 2  # rows and tokens
_MOST_ENTERED = 64
"""Forms of microbatches whose passages are kept."""


class Passages:
    """Makes the passage of each microbatch: before it enters the model if all of it is native, and else once the part
    before the layers has run.

    Args:
        followed: the model.
        decoders: the native layers, by number of the call.
        code: what they stand for.

    Attributes:
        embedding: the native part before the layers, if there is one.
        head: the native part after the layers, if there is one.
        around: why the parts around the layers have no native form; None for one that has.
    """

    def __init__(self, followed: FollowedModel, decoders: Mapping[int, NativeDecoder], code: Code) -> None:
        self.embedding: NativeEmbedding | None = None
        self.head: NativeHead | None = None
        self.around: dict[str, str | None] = {}
        self._followed = followed
        self._decoders = decoders
        self._code = code
        # Passages that were made before the model was entered, by what they were made from.
        self._entered: dict[tuple[Any, ...], _core.Passage] = {}
        # The latest passage's calls, the numbers of their masks and positions, and what they were made from. Replaced
        # whole, by any thread.
        self._last: tuple[tuple[Any, ...], list[_core.DecoderCall | None], list[Any]] | None = None

    def reason_against(self) -> str | None:
        """Why no layer would run natively now; None if those with a native form would."""
        reason = self._code.reason_against()
        if reason is None and self.attention() is None:
            name = next(iter(self._decoders.values())).model_config._attn_implementation
            reason = f"the attention {name!r} has no native form"
        if reason is None and self.experts() is None:
            name = next(d.model_config._experts_implementation for d in self._decoders.values() if d.has_experts)
            reason = f"the experts implementation {name!r} has no native form"
        return reason

    def reasons_around(self) -> dict[str, str]:
        """Why parts around the layers run in Python now, by part."""
        found = dict(self.around)
        for name, part in zip(found, (self.embedding, self.head), strict=False):
            if part is not None:
                found[name] = part.reason_now()
        return {name: reason for name, reason in found.items() if reason is not None}

    def attention(self) -> str | None:
        """The native name of the attention that the layers use now; None if there is none."""
        configs = {id(decoder.model_config): decoder.model_config for decoder in self._decoders.values()}
        names = {self._code.attention(config) for config in configs.values()}
        return names.pop() if len(names) == 1 else None

    def experts(self) -> str | None:
        """The native name of how the layers' experts compute now, also if there are none; None if there is none."""
        configs = {id(d.model_config): d.model_config for d in self._decoders.values() if d.has_experts}
        names = {self._code.experts(config) for config in configs.values()}
        return names.pop() if len(names) == 1 else None if names else "eager"

    def __call__(self, state: PartState) -> _core.Passage | None:
        """The passage of a microbatch with this state; None if Python runs its layers."""
        program, values, contents, collected = state
        attention, experts = self.attention(), self.experts()
        if attention is None or experts is None or self._code.reason_against() is not None or contents or collected:
            return None
        key = (program.calls, attention, experts, self._followed.mlp_chunk_tokens, list(values))
        last = self._last
        if last is None or last[0][0] is not program.calls or last[0][1:] != key[1:]:
            if any(call.glue or call.kept_shared for call in program.calls):
                return None
            if not all(
                call.collected == () or (call.collected == (_LOGITS,) and number in self._decoders)
                for number, call in enumerate(program.calls)
            ):
                return None
            calls = list(self._calls(program, list(values), attention, experts))
            last = self._last = (key, calls, [call.mask_and_positions() for call in program.calls])
        head, structure = self._head_after(program) or (None, None)
        after = functools.partial(_structure_after, program, self._logits(program), structure)
        passage = _core.Passage(last[1], after, None, head)
        if not program.documents:
            return passage
        return passage.with_documents(None, [program.documents.get(numbers) for numbers in last[2]])

    def _head_after(self, program: Program) -> tuple[_core.HeadCall, Structure] | None:
        """How the native part after the layers is called, and the structure of its result; None if Python runs it."""
        last = program.calls[-1]
        if self.head is None or program.carried or any(call.collected for call in program.calls):
            return None
        if self.head.config() is None or self._code.reason_against_around() is not None:
            return None
        args, kwargs = pytree.tree_unflatten(program.inputs.leaves, program.inputs.spec)
        given = token_arguments(self._followed.model.forward, args, kwargs)
        if given is None or len(last.outputs) != 1 or last.outputs[0] not in last.kept:
            return None
        places = {number: place for place, number in enumerate(last.kept)}
        labels, items = (None if number is None else places[number] for number in (given.labels, given.items))
        return self._head(places[last.outputs[0]], labels, items, program.ending, len(places))

    def _head(
        self, hidden: int, labels: int | None, items: int | None, ending: Ending, inputs: int
    ) -> tuple[_core.HeadCall, Structure] | None:
        if self.head is None or ending.share == 0 or ending.kept is Kept.TOKEN_LOSSES:  # 0: one without labels
            return None
        chunk = self._followed.loss_chunk_tokens
        gives_logits = labels is None or ending.kept is Kept.ALL
        chunk_tokens = 0 if chunk == "auto" else chunk
        chunk_bytes = self._followed.chunk_logit_bytes
        call = _core.HeadCall(hidden, labels, items, ending.share, gives_logits, chunk_tokens, chunk_bytes, inputs)
        return call, self.head.structures[labels is not None, gives_logits]

    def enter(self, batch: Sequence[tuple[list[torch.Tensor], Structure]]) -> list[_core.Passage | None]:
        """The passages of microbatches that have not entered the model; None for one that Python embeds."""
        if not self._enters():
            return [None] * len(batch)
        return [self._entering(tensors, structure) for tensors, structure in batch]

    def _enters(self) -> bool:
        """Whether all parts are native for a call that is made now."""
        if self.embedding is None or self.head is None or len(self._decoders) != len(self._followed.order):
            return False
        if self.attention() not in ("sdpa", "packed") or self.experts() is None:
            return False
        if self.embedding.reason_now() is not None or self.head.reason_now() is not None:
            return False
        return all(decoder.config() is not None for decoder in self._decoders.values())

    def _entering(self, tensors: list[torch.Tensor], structure: Structure) -> _core.Passage | None:
        args, kwargs = structure.join([Ref(place) for place in range(len(tensors))])  # type: ignore[misc]
        ending: Ending = kwargs.pop(ENDING, Ending())
        if ending.router_share is not None or ending.kept is Kept.TOKEN_LOSSES:
            return None
        given = token_arguments(self._followed.model.forward, args, {**kwargs, **self._followed.forced})
        if given is None:
            return None
        shape = tensors[given.ids].shape
        alike = [tensors[place].shape for place in (given.attention_mask, given.labels) if place is not None]
        placed = shape if given.positions is None else tensors[given.positions].shape
        if len(shape) != _TOKEN_DIMS or not shape.numel() or any(each != shape for each in alike):
            return None
        if placed not in (shape, (1, shape[1])):
            return None
        # Here, since the tensors are still on the host.
        mask, positions = (
            None if place is None else tensors[place] for place in (given.attention_mask, given.positions)
        )
        only_loss = given.labels is not None and ending.kept is not Kept.ALL
        labels = tensors[given.labels] if only_loss and given.labels is not None else None
        documents = _core.find_documents(mask, positions, shape[0], shape[1], labels)
        if self.attention() == "packed" and documents.has_inner_padding():
            return None  # Python refuses it
        chunk = chunk_of(self._followed.mlp_chunk_tokens, shape[1]) or 0
        followed = self._followed
        ways = self.attention(), self.experts(), followed.loss_chunk_tokens, followed.chunk_logit_bytes
        key = (given, ending, chunk, len(tensors), *ways)
        passage = self._entered.get(key)
        if passage is None:
            passage = self._made(given, ending, chunk, len(tensors))
            if passage is not None:
                if len(self._entered) == _MOST_ENTERED:
                    self._entered = {}
                self._entered[key] = passage
        return passage and passage.with_documents(documents, self._documents_of_calls(documents))

    def _documents_of_calls(self, documents: _core.Documents) -> list[_core.Documents | None]:
        """What the layers of a microbatch that enters natively take."""
        if self.embedding is None or self.attention() != "packed":
            return [None] * len(self._decoders)
        windows = self.embedding.windows
        by_window = {window: documents.with_window(window) for window in set(windows)}
        return [by_window[window] for window in windows]

    def _made(self, given: TokenArguments, ending: Ending, chunk: int, inputs: int) -> _core.Passage | None:
        attention, experts = str(self.attention()), str(self.experts())
        kept = [place for place in (given.labels, given.items) if place is not None]
        hidden, cos, sin, mask, positions = embedded = _core.EMBEDDED
        further = list(range(len(embedded), len(embedded) + len(kept)))
        calls: list[_core.DecoderCall | None] = []
        for number in range(len(self._decoders)):
            chunk_here = self._chunk_in(number, chunk)
            if chunk_here is None:
                return None
            is_last = number == len(self._decoders) - 1
            outputs = [_core.RESULT, *(further if is_last else [*embedded[1:], *further])]
            places = (hidden, cos, sin, mask, positions)
            calls.append(_core.DecoderCall(*places, attention, experts, chunk_here, outputs, len(embedded) + len(kept)))
        labels = None if given.labels is None else 1
        items = None if given.items is None else len(kept)
        head = self._head(0, labels, items, ending, 1 + len(kept))
        if head is None:
            return None
        embedding = _core.EmbeddingCall(given.ids, given.attention_mask, given.positions, kept, attention, inputs)
        return _core.Passage(calls, functools.partial(_structure_entered, len(calls), head[1]), embedding, head[0])

    def _logits(self, program: Program) -> list[int]:
        """How many router's logits transformers collects in each call."""
        return [int(bool(call.collected) and self._decoders[n].has_experts) for n, call in enumerate(program.calls)]

    def _calls(
        self, program: Program, numbers: list[int], attention: str, experts: str
    ) -> Iterator[_core.DecoderCall | None]:
        logits = self._logits(program)
        for number, call in enumerate(program.calls):
            yield self._call(number, call, numbers, sum(logits[:number]), attention, experts)
            numbers = list(call.kept)

    def _call(
        self, number: int, call: LayerCall, numbers: list[int], collected: int, attention: str, experts: str
    ) -> _core.DecoderCall | None:
        decoder = self._decoders.get(number)
        if decoder is None or len(call.outputs) != 1 or call.output_spec != _LEAF:
            return None
        args, kwargs = pytree.tree_unflatten(call.arguments.leaves, call.arguments.spec)
        mask, positions = kwargs.pop("attention_mask", None), kwargs.pop("position_embeddings", None)
        position_ids = kwargs.pop("position_ids", None)
        if len(args) != 1 or not isinstance(positions, tuple) or len(positions) != 2:
            return None
        optional = [value for value in (mask, position_ids) if value is not None]
        given = (args[0], *positions, *optional)
        if not all(isinstance(value, Ref) for value in given):
            return None
        for name, value in kwargs.items():
            if name not in _UNREAD and value not in _NO_CACHE.get(name, ()):
                return None
        chunk = self._chunk(number, call)
        if chunk is None:
            return None
        places = {each: place for place, each in enumerate(numbers)}
        hidden, cos, sin = (places[value.number] for value in given[:3])
        seen, placed = (None if value is None else places[value.number] for value in (mask, position_ids))
        outputs = [_core.RESULT if each == call.outputs[0] else places[each] for each in call.kept]
        # Behind the values lie the logits that the calls before have collected.
        given_tensors = len(numbers) + collected
        outputs += range(len(numbers), given_tensors)
        if call.collected and decoder.has_experts:
            outputs.append(_core.ROUTER_LOGITS)
        return _core.DecoderCall(hidden, cos, sin, seen, placed, attention, experts, chunk, outputs, given_tensors)

    def _chunk(self, number: int, call: LayerCall) -> int | None:
        """The number of tokens of a row that the MLP computes at a time, 0 for all; None if it cannot."""
        shape = call.shapes[0]
        if shape is None or len(shape) != 3:
            return None
        chunk = None if call.collected else chunk_of(self._followed.mlp_chunk_tokens, shape[1])
        return self._chunk_in(number, chunk or 0)

    def _chunk_in(self, number: int, chunk: int) -> int | None:
        """Likewise, where the option asks for `chunk`."""
        blocks = [(block.path, block.activation) for block in self._followed.blocks[number]]
        if not chunk or not blocks:
            return 0
        return chunk if blocks == [("mlp", self._decoders[number].activation)] else None


_LEAF = pytree.tree_flatten(0)[1]


def _structure_after(program: Program, logits: list[int], end: Structure | None, number: int) -> Structure:
    """The structure of the state that call `number` hands on, or of the model's output, `end`."""
    if number == len(program.calls):
        assert end is not None
        return end
    call = program.calls[number]
    collected = tuple({_LOGITS: (_ANY,) * count} for count in logits[: number + 1]) if call.collected else ()
    return split((program, dict.fromkeys(call.kept, _ANY), {}, collected))[1]


def _structure_entered(calls: int, end: Structure, number: int) -> Structure:
    """Likewise, of a microbatch that entered natively."""
    if number != calls:
        raise _core.RoundPipeError(
            "[native] a part of the model was changed by another thread while a call of it began; expected one that "
            "stays the same until the call has begun"
        )
    return end
