"""Finds the layers of a followed model that the engine can run without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from roundpipe.following.language_model import LanguageModel
from roundpipe.following.layers.shell import NativeForm
from roundpipe.following.native.around import Around, NativeEmbedding, NativeHead
from roundpipe.following.native.check import compare
from roundpipe.following.native.check_around import compare_embedding, compare_head
from roundpipe.following.native.code import Code, family_of
from roundpipe.following.native.decoder import NativeDecoder, native_decoder
from roundpipe.following.native.passages import Passages
from roundpipe.following.native.report import NativeLayers, NativeOption, required, without_native_layers
from roundpipe.following.parts import OwnLayer, Part
from roundpipe.following.skeleton import FollowedModel


def make_native(model: LanguageModel, option: NativeOption) -> NativeLayers:
    """Finds the layers of a followed model that the engine can run natively, and compares their bits.

    Raises:
        ValueError: native layers are required, and a layer has no native form.
    """
    if option is False:
        return without_native_layers(option, "", model.arithmetic)
    parts = [part for part in model.chain if isinstance(part, OwnLayer)]
    followed = parts[0].followed
    decoders: dict[int, NativeDecoder] = {}
    reasons: dict[int, str] = {}
    prefix = None
    for part in parts:
        own = next(iter(part._parameters), None)
        found = (
            native_decoder(part.layer, part.index, followed.arithmetic)
            if own is None
            else f"{own} is used between two of its layers, which has no native form"
        )
        if isinstance(found, str):
            reasons[part.index] = found
        else:
            decoders[part.index] = found
            prefix = family_of(part.layer)
    if prefix is None:
        return without_native_layers(option, next(iter(reasons.values())), followed.arithmetic)
    code = Code(prefix)
    passages = Passages(followed, decoders, code)
    whole = passages.reason_against()
    if whole is not None:
        return without_native_layers(option, whole, followed.arithmetic)
    differing = compare(list(decoders.values()), str(passages.attention()), str(passages.experts()))
    for number in differing:
        del decoders[number]
    reasons |= differing
    modules: dict[int, NativeForm] = {id(part): decoders[part.index] for part in parts if part.index in decoders}
    followed.calls_alike = None
    if not decoders:
        return required(NativeLayers(option, len(parts), reasons=reasons, arithmetic=followed.arithmetic))
    before, after = model.before, model.chain[-1]
    around = _around(before, after, passages, prefix, code)
    modules |= {id(part): native for part, native in zip((before, after), around, strict=True) if native is not None}
    layers = NativeLayers(
        option,
        len(parts),
        decoders,
        reasons,
        passages,
        modules=modules,
        before=before,
        arithmetic=followed.arithmetic,
    )
    if not reasons:
        followed.calls_alike = _alike(followed, prefix, code)
    return required(layers)


def _around(before: Any, after: Any, passages: Passages, prefix: str, code: Code) -> tuple[NativeForm | None, ...]:
    """Gives `passages` the native forms of the parts around the layers, and returns them; None for one that has none,
    or other bits."""
    around = Around(before.followed, prefix)
    reason = around.reason_against() or code.reason_against_around()
    passages.around = {"the part before the layers": reason, "the part after the layers": reason}
    if reason is not None or not (isinstance(before, Part) and isinstance(after, Part)):
        return None, None
    head, embedding = NativeHead(around, code, after), NativeEmbedding(around, code, before)
    carried = dict(before.followed.carried)
    against = (
        embedding.reason_now() or _compared(lambda: compare_embedding(embedding, before)),
        head.reason_now() or _compared(lambda: compare_head(head, before, after)),
    )
    before.followed.carried = carried  # without the forms of these calls
    passages.around = dict(zip(passages.around, against, strict=True))
    passages.embedding = embedding if against[0] is None else None
    passages.head = head if against[1] is None else None
    return passages.embedding, passages.head


def _compared(comparison: Callable[[], str | None]) -> str | None:
    try:
        return comparison()
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"it cannot be compared ({str(error).splitlines()[0]})"


def _alike(followed: FollowedModel, prefix: str, code: Code) -> Callable[[], bool] | None:
    """See `FollowedModel.calls_alike`: whether the layers are called by the loop of transformers' class, which gives
    all of them the same arguments if all have the same kind of mask."""
    around = [module for module in followed.model.modules() if type(module).__name__ == f"{prefix}Model"]
    base: Any = around[0] if len(around) == 1 else None
    own = [] if base is None or type(base) is not code.model_class else list(base.layers)
    if own != followed.layers or followed.order != list(range(len(own))):
        return None

    def alike() -> bool:
        config = base.config
        return (
            code.reason_against() is None
            and "forward" not in vars(base)
            and config.num_hidden_layers == len(own)
            and len(set(getattr(config, "layer_types", None) or ())) <= 1
        )

    return alike
