"""How the native layers of a followed model are called by one microbatch."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from roundpipe import _core
from roundpipe.following.parts import FollowedModel, PartState
from roundpipe.following.program import LayerCall, Program, Ref
from roundpipe.following.token_wise import chunk_of
from roundpipe.layers.values import Structure, split
from roundpipe.native.code import Code
from roundpipe.native.decoder import NativeDecoder

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


class Passages:
    """Makes the passage of each microbatch, once the part before the layers has run.

    Args:
        followed: the model.
        decoders: the native layers, by number of the call.
        code: what they stand for.
    """

    def __init__(self, followed: FollowedModel, decoders: Mapping[int, NativeDecoder], code: Code) -> None:
        self._followed = followed
        self._decoders = decoders
        self._code = code
        # The latest passage's calls and what they were made from. Replaced whole, by any thread.
        self._last: tuple[tuple[Any, ...], list[_core.DecoderCall | None]] | None = None

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
            last = self._last = (key, list(self._calls(program, list(values), attention, experts)))
        return _core.Passage(last[1], functools.partial(_structure_after, program, self._logits(program)))

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
        chunk = self._chunk(number, call, decoder)
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

    def _chunk(self, number: int, call: LayerCall, decoder: NativeDecoder) -> int | None:
        """The number of tokens of a row that the MLP computes at a time, 0 for all; None if it cannot."""
        shape = call.shapes[0]
        if shape is None or len(shape) != 3:
            return None
        blocks = () if call.collected else self._followed.blocks[number]
        chunk = chunk_of(self._followed.mlp_chunk_tokens, shape[1]) if blocks else None
        if chunk is None:
            return 0
        return chunk if [(block.path, block.activation) for block in blocks] == [("mlp", decoder.activation)] else None


_LEAF = pytree.tree_flatten(0)[1]


def _structure_after(program: Program, logits: list[int], number: int) -> Structure:
    """The structure of the state that call `number` hands on."""
    call = program.calls[number]
    collected = tuple({_LOGITS: (_ANY,) * count} for count in logits[: number + 1]) if call.collected else ()
    return split((program, dict.fromkeys(call.kept, _ANY), {}, collected))[1]
