"""How long may a training sequence be on a device with a memory cap, with and without chunked loss and MLPs?

One small Llama with random weights is wrapped once for each variant; a batch is one row. First, on a device without a
cap, losses and gradients are compared with those of the first variant, and the variants take turns at lengths that all
of them can do. Then each gets a device with the cap: the peak of its memory by length, and the longest row that still
trains. A row that does not fit raises torch.OutOfMemoryError, and the variant has to go on with the same bits after it.

Memory is what the device's threads have allocated through torch: weights and gradients of a stage, activations, and
temporary tensors. What the matrix library allocates by itself is not seen. The whole model is one stage, so that all
variants hold the same weights: "by stage" recomputes nothing, "by layer" every layer but the last.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from support.report import Report, parser
from transformers import LlamaConfig, LlamaForCausalLM

import roundpipe
import roundpipe.ops.packed_attention  # registers "sdpa_packed"
from roundpipe import ModelExecutePlan, RoundPipeRunConfig, wrap_model_to_roundpipe

# Largest distance from the first variant's loss and gradients, of the largest entry of each tensor; all is fp32.
BOUND = 1e-5
MIB = 1 << 20
SHORT = 64  # tokens of the row that is trained before and after one that does not fit
# The search ends when the longest row that trains and the shortest that does not are this close, of the former.
RESOLUTION = 1 / 16


@dataclass(frozen=True)
class Shape:
    """What is measured, and at which lengths, in tokens."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    loss_chunk: Literal["auto"] | int
    mlp_chunk: int
    compared: int
    timed: list[int]
    lengths: list[int]
    packed_lengths: list[int]
    document: int
    step: int  # lengths in the search are multiples of it
    limit: int  # lengths in the search are at most this


FULL = Shape(
    vocabulary=32_000,
    width=256,
    inner=688,
    layers=4,
    loss_chunk="auto",
    mlp_chunk=2048,
    compared=2560,
    timed=[528, 2560],
    lengths=[256, 512, 1024, 2048, 4096, 8192],
    packed_lengths=[512, 4096, 8192],
    document=512,
    step=8,
    limit=1 << 17,
)
QUICK = Shape(
    vocabulary=1000,
    width=32,
    inner=64,
    layers=2,
    loss_chunk=32,
    mlp_chunk=128,
    compared=160,
    timed=[160],
    lengths=[64, 128],
    packed_lengths=[64, 128],
    document=32,
    step=64,
    limit=1 << 10,
)


@dataclass
class Variant:
    """A wrapped model, and what was measured of it."""

    name: str
    grain: Literal["stage", "layer"]
    model: Any
    document: int = 0  # tokens of each of a row's documents; 0: the row is one
    # Of the training that raised no error, by length; 0: it ran out of memory.
    peak_bytes: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    distance: float = 0
    longest: int = 0
    too_long: int = 0

    def train(self, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Loss and gradients of one row; its tokens depend on the length alone."""
        ids = torch.randint(self.model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens))
        inputs = {"input_ids": ids, "labels": ids}
        if self.document:
            inputs["position_ids"] = (torch.arange(tokens) % self.document)[None]
        plan = ModelExecutePlan()
        plan.bwd_plan = [range(self.model.num_layers)]
        config = RoundPipeRunConfig(num_microbatch=1, recompute_grain=self.grain, execute_plan=plan)
        gradients: list[torch.Tensor] = []

        def take() -> None:
            for parameter in self.model.optim_parameters():
                assert parameter.grad is not None
                gradients.append(parameter.grad)
                parameter.grad = None

        loss = self.model.forward_backward(input_kwargs=inputs, run_config=config)
        self.model.step(take, is_async=False)
        return loss, gradients

    def fits(self, tokens: int, spec: str) -> bool:
        """Whether a row of that length trains; notes the peak of the memory."""
        if tokens not in self.peak_bytes:
            # A new device for each length: what an earlier one left behind would count.
            self.peak_bytes[tokens] = self._peak_bytes(tokens, roundpipe.devices(spec))
            peak = self.peak_bytes[tokens]
            progress(f"{self.name}, {tokens} tokens: {f'{peak / MIB:.1f} MiB' if peak else 'out of memory'}")
        return self.peak_bytes[tokens] > 0

    def _peak_bytes(self, tokens: int, device: roundpipe.DevicePool) -> int:
        before, _ = self.train(SHORT)
        device.reset_peak_memory()
        try:
            self.train(tokens)
            return int(device.memory_report()[0]["peak_bytes"])
        except torch.OutOfMemoryError:
            pass  # and go on outside, as the error's traceback holds what the layers had allocated
        after, _ = self.train(SHORT)
        if not torch.equal(after, before):
            raise SystemExit(
                f"{self.name}: a loss of {before.item()!r} is {after.item()!r} once {tokens} tokens did not fit"
            )
        return 0

    def search(self, lengths: list[int], step: int, limit: int, memory_mib: int) -> None:
        """Finds the longest row that trains: between those of `lengths` or beyond, where the peaks point."""
        cap, device = memory_mib * MIB, f"virtual:1,memory={memory_mib}MiB"
        low = high = 0
        for tokens in lengths:
            if high or not self.fits(tokens, device):
                high = high or tokens
                self.peak_bytes[tokens] = 0
            else:
                low = tokens
        if not low:
            raise SystemExit(f"{self.name}: not even {lengths[0]} tokens fit; raise --memory-mib")
        gap = step
        while low < limit and (not high or high - low > max(step, low * RESOLUTION)):
            gap = max(gap, int(low * RESOLUTION) // step * step)
            guess = self._where_it_ends(cap) // step * step
            guess = max(guess, low + gap)
            guess = min(guess, high - gap if high else 2 * low, limit)
            if guess <= low or (high and guess >= high):
                guess = (low + high) // 2 // step * step
            if self.fits(guess, device):
                low = guess
            else:
                high, gap = guess, 2 * gap
        self.longest, self.too_long = low, high

    def _where_it_ends(self, cap: int) -> int:
        """At which length a line through the two longest rows that trained reaches the cap."""
        known = sorted(tokens for tokens, peak in self.peak_bytes.items() if peak)[-2:]
        if len(known) < 2 or self.peak_bytes[known[1]] <= self.peak_bytes[known[0]]:
            return 0
        slope = (self.peak_bytes[known[1]] - self.peak_bytes[known[0]]) / (known[1] - known[0])
        return known[1] + int((cap - self.peak_bytes[known[1]]) / slope)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def config_of(shape: Shape, attention: str) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=4,
        max_position_embeddings=2 * shape.limit,
        attn_implementation=attention,
    )


class Maker:
    """Makes variants of one model."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        self._weights = LlamaForCausalLM(config_of(shape, "sdpa")).state_dict()

    def __call__(
        self,
        name: str,
        loss_chunk: Literal["auto"] | int | None,
        mlp_chunk: int | None,
        grain: Literal["stage", "layer"],
        attention: str = "sdpa",
        document: int = 0,
    ) -> Variant:
        model = LlamaForCausalLM(config_of(self.shape, attention))
        model.load_state_dict(self._weights)
        wrapped = wrap_model_to_roundpipe(model, loss_chunk_tokens=loss_chunk, mlp_chunk_tokens=mlp_chunk)
        return Variant(name, grain, wrapped, document)


def compare(variants: list[Variant], tokens: int) -> None:
    """Losses and gradients of all against the first's."""
    expected: list[torch.Tensor] = []
    for variant in variants:
        loss, gradients = variant.train(tokens)
        found = [loss, *gradients]
        expected = expected or found
        variant.distance = max(
            ((one - other).abs().max() / other.abs().max()).item() for one, other in zip(found, expected, strict=True)
        )
        progress(f"{variant.name}, {tokens} tokens: {variant.distance:.1e} from the first")


def measure_times(variants: list[Variant], lengths: list[int], rounds: int) -> None:
    """Medians over rounds in which all take turns, each beginning with another."""
    for tokens in lengths:
        taken: dict[str, list[float]] = {variant.name: [] for variant in variants}
        for turn in range(-1, rounds):
            first = turn % len(variants)
            for variant in variants[first:] + variants[:first]:
                begin = time.perf_counter()
                variant.train(tokens)
                if turn >= 0:
                    taken[variant.name].append(time.perf_counter() - begin)
        for variant in variants:
            variant.seconds[tokens] = statistics.median(taken[variant.name])
            progress(f"{variant.name}, {tokens} tokens: {variant.seconds[tokens] * 1e3:.0f} ms")


def time_rows(variants: list[Variant], lengths: list[int]) -> list[list[str]]:
    rows = []
    for variant in variants:
        cells = [variant.name]
        for tokens in lengths:
            ratios = (variant.seconds[tokens] / base.seconds[tokens] for base in variants[:2])
            cells += [f"{variant.seconds[tokens] / tokens * 1e6:.1f}", *(f"{ratio:.3f}" for ratio in ratios)]
        rows.append(cells)
    return rows


def length_rows(variants: list[Variant], lengths: list[int], bases: list[Variant]) -> list[list[str]]:
    rows = []
    for variant in variants:
        peaks = (variant.peak_bytes[tokens] for tokens in lengths)
        cells = [variant.name, *(f"{peak / MIB:.0f}" if peak else "OOM" for peak in peaks)]
        cells += [f"{variant.longest:,}", f"{variant.too_long:,}" if variant.too_long else "-"]
        rows.append([*cells, *(f"{variant.longest / base.longest:.1f}" for base in bases)])
    return rows


def print_times(report: Report, variants: list[Variant], options: argparse.Namespace, shape: Shape) -> None:
    plain, by_layer = (variant.name for variant in variants[:2])
    report(
        f"Microseconds per token of forward, backward and gradients, on a device without a cap, and the ratio to "
        f"'{plain}' and to '{by_layer}'. Medians of {options.rounds} rounds in which all take turns:"
    )
    report("")
    header = ["variant"]
    for tokens in shape.timed:
        header += [f"{tokens:,} tokens: us/token", "/ by stage", "/ by layer"]
    report.table(header, time_rows(variants, shape.timed))
    report(f"Largest distance of loss and gradients from the first variant's, at {shape.compared:,} tokens:")
    report("")
    report.table(["variant", "distance"], [[variant.name, f"{variant.distance:.1e}"] for variant in variants])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--memory-mib", type=int, default=416, help="the cap of the device")
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    shape = FULL
    if options.quick:
        shape, options.memory_mib, options.rounds = QUICK, 4, 1
    report = Report("Longest training sequence under a memory cap, with and without chunks", options.out)
    chunk = shape.mlp_chunk
    roundpipe.devices("virtual:1")
    make = Maker(shape)
    variants = [
        make("plain, by stage", None, None, "stage"),
        make("plain, by layer", None, None, "layer"),
        make("chunked loss, by layer", shape.loss_chunk, None, "layer"),
        make(f"chunked loss and MLP ({chunk}), by layer", shape.loss_chunk, chunk, "layer"),
    ]
    report(
        f"A Llama of {shape.layers} layers, hidden size {shape.width}, MLPs of {shape.inner}, {shape.vocabulary:,} "
        "tokens in its vocabulary, fp32, SDPA. One row per microbatch, one microbatch. loss_chunk_tokens is "
        f"{shape.loss_chunk!r}; mlp_chunk_tokens is {chunk} where said, "
        "since 'auto' leaves rows of up to 16,384 tokens whole."
    )
    report("")
    compare(variants, shape.compared)
    measure_times(variants, shape.timed, options.rounds)
    print_times(report, variants, options, shape)

    report(
        f"Peak memory in MiB by length on a device with {options.memory_mib} MiB, and the longest row that trains. "
        f"The search stops when the next length that does not fit is within {RESOLUTION:.0%}:"
    )
    report("")
    for variant in variants:
        variant.search(shape.lengths, shape.step, shape.limit, options.memory_mib)
    header = [f"{tokens:,}" for tokens in shape.lengths]
    ends = ["longest", "does not fit", "/ by stage", "/ by layer"]
    report.table(["variant", *header, *ends], length_rows(variants, shape.lengths, variants[:2]))

    packed = [
        make("plain, sdpa", None, None, "layer", document=shape.document),
        make("chunked loss and MLP, sdpa", shape.loss_chunk, chunk, "layer", document=shape.document),
        make("chunked loss and MLP, sdpa_packed", shape.loss_chunk, chunk, "layer", "sdpa_packed", shape.document),
    ]
    roundpipe.devices("virtual:1")
    compare(packed, shape.compared)
    report(f"The same for packed rows, with documents of {shape.document} tokens, by layer:")
    report("")
    for variant in packed:
        variant.search(shape.packed_lengths, shape.step, shape.limit, options.memory_mib)
    header = [f"{tokens:,}" for tokens in shape.packed_lengths]
    columns = ["variant", *header, "longest", "does not fit", "/ plain, sdpa", "distance"]
    rows = length_rows(packed, shape.packed_lengths, packed[:1])
    report.table(columns, [[*row, f"{variant.distance:.1e}"] for row, variant in zip(rows, packed, strict=True)])
    report.close()
    wrong = [f"{each.name}: {each.distance:g} from the first" for each in variants + packed if each.distance > BOUND]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
