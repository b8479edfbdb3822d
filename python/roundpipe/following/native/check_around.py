"""Compares the bits of the native parts around a model's layers with those of the Python parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from roundpipe import _core
from roundpipe.following.layers.values import split
from roundpipe.following.native.around import NativeEmbedding, NativeHead
from roundpipe.following.native.check import LARGE_BYTES, same_bits
from roundpipe.following.native.check_fast import are_near
from roundpipe.following.parts import ENDING
from roundpipe.following.program import Program, Ref, Tree, calls_are_alike
from roundpipe.following.skeleton import PartState
from roundpipe.following.survey import evaluating
from roundpipe.model.losses.ending import Ending, Kept

_ROWS, _TOKENS = 2, 6
_SHARE = 0.75


def _batches(vocabulary: int) -> Iterator[dict[str, torch.Tensor]]:
    """Tokens without a mask, with padding, with a mask that hides nothing, and with two documents in a row."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (_ROWS, _TOKENS), generator=generator)
    yield {"input_ids": ids}
    mask = torch.ones_like(ids)
    yield {"input_ids": ids, "attention_mask": mask}
    padded = mask.clone()
    padded[0, :2] = padded[1, -1:] = 0
    yield {"input_ids": ids, "attention_mask": padded}
    yield {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * _ROWS)}


def compare_embedding(native: NativeEmbedding, before: nn.Module) -> str | None:
    """Why the native part before the layers cannot stand for `before`; None if both hand on the same bits."""
    config, attention = native.exact_config(), native.masks
    if config is None or attention is None:
        return native.reason
    weight, frequencies = native.tensors_now()
    windows: tuple[int, ...] = ()
    with torch.inference_mode(False), evaluating(native.around.causal):
        for batch in _batches(weight.shape[0]):
            program, values, contents, collected = before(**batch)
            if contents or collected or not calls_are_alike(_without_tables(program)):
                return "its layers are not called alike"
            places = {name: place for place, name in enumerate(batch)}
            mask, positions = places.get("attention_mask"), places.get("position_ids")
            documents = _core.find_documents(
                batch.get("attention_mask"), batch.get("position_ids"), *batch["input_ids"].shape
            )
            call = _core.EmbeddingCall(places["input_ids"], mask, positions, [], attention, len(batch))
            given = list(batch.values())
            hidden, cos, sin, seen, placed = _core.embed(config, call, weight, frequencies, given, documents)
            args, kwargs = program.calls[0].arguments.join(values, {})
            expected = kwargs["attention_mask"]
            if attention == "packed":
                theirs = [program.documents.get(each.mask_and_positions()) for each in program.calls]
                if any(each is None or each.rows != documents.rows for each in theirs):
                    return "it finds other documents than the model"
                windows = tuple(each.window for each in theirs if each is not None)
                expected = None
            if (expected is None) != (seen.numel() == 0):
                return "it makes another mask than the model"
            mine = (hidden, cos, sin, placed, *(() if expected is None else (seen,)))
            others = (*args, *kwargs["position_embeddings"], kwargs["position_ids"])
            if not all(map(same_bits, mine, (*others, *(() if expected is None else (expected,))))):
                return "its values differ in bits from the model's own"
    native.note_compared(windows)
    return None


def _without_tables(program: Program) -> Program:
    """The program with one mask for all calls that take documents."""
    tables = {mask for mask, _ in program.documents}
    calls = []
    for call in program.calls:
        leaves = [
            Ref(-1) if isinstance(leaf, Ref) and leaf.number in tables else leaf for leaf in call.arguments.leaves
        ]
        calls.append(replace(call, arguments=Tree(leaves, call.arguments.spec)))
    return replace(program, calls=calls)


def compare_head(native: NativeHead, before: nn.Module, after: nn.Module) -> str | None:
    """Why the native part after the layers cannot stand for `after`; None if both have the same bits, or in fast
    arithmetic, nearly the same numbers as well. Notes the structures of the model's outputs."""
    config, own = native.exact_config(), native.config()
    is_fast = native.around.followed.arithmetic == "fast"
    if config is None:
        return native.reason
    norm, weight, bias = native.tensors_now()
    generator = torch.Generator().manual_seed(0)
    shape = (_ROWS, _TOKENS, weight.shape[1])
    hidden = torch.randn(shape, generator=generator).to(weight.dtype).requires_grad_()
    labels = torch.randint(weight.shape[0], shape[:2], generator=generator)
    labels[0, 2] = -100
    chunk = native.around.followed.loss_chunk_tokens
    chunk_tokens = 0 if chunk == "auto" else chunk
    is_large = weight.numel() * weight.element_size() > LARGE_BYTES
    trained = (norm, bias, *(() if is_large else (weight,)))
    wanted = [hidden, *(each for each in trained if each is not None and each.requires_grad)]
    with torch.inference_mode(False), evaluating(native.around.causal):
        for given, kept in (({"labels": labels}, Kept.LOSS), ({"labels": labels}, Kept.ALL), ({}, Kept.ALL)):
            share = _SHARE if given else None
            state = before(input_ids=torch.zeros_like(labels), **given, **{ENDING: Ending(share, kept=kept)})
            gives_logits = kept is Kept.ALL
            call = _core.HeadCall(0, 1 if given else None, None, share, gives_logits, chunk_tokens, 0, 1 + len(given))
            with torch.enable_grad():
                theirs, native.structures[bool(given), gives_logits] = split(after(_ending(state, hidden)))
                mine = _core.apply_head(config, call, norm, weight, bias, [hidden, *given.values()])
                if len(mine) != len(theirs) or not all(map(same_bits, mine, theirs)):
                    return "its values differ in bits from the model's own"
                forms = [mine, theirs]
                if is_fast:
                    forms.append(_core.apply_head(own, call, norm, weight, bias, [hidden, *given.values()]))
                gradients = [torch.autograd.grad([v.sum() for v in each], wanted) for each in forms]
            if not all(map(same_bits, *gradients[:2])):
                return "its gradients differ in bits from the model's own"
            if is_fast and not all(map(are_near, (*forms[2], *gradients[2]), (*theirs, *gradients[1]))):
                return "in fast arithmetic, its results differ from the model's own"
    return None


def _ending(state: PartState, hidden: torch.Tensor) -> PartState:
    """The state after the last layer, which has returned `hidden`."""
    program, values, contents, collected = state
    (number,) = program.calls[-1].outputs
    assert number is not None
    return program, {**values, number: hidden}, contents, collected
