"""What does fast arithmetic save? A decoder layer, and training steps, in exact and in fast arithmetic.

The first table runs one decoder layer of a model's shape forward and backward, in both forms in turn, and counts what
torch's dispatcher runs: element-wise kernels, and the bytes that they read and write for a token, without products and
attention. Before that, both are compared with the exact form in fp64: the distances of results and gradients are in the
second table, and the program fails if the fast form is further away than the exact one by more than half, or by more
than one rounding. The third table trains a small model through the engine, in both forms in turn.

`--device` names a virtual device (the host) or a card.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support.accelerator import describe
from support.language_models import SHAPES, configuration
from support.report import Report, parser
from transformers import AutoModelForCausalLM

import roundpipe
from roundpipe import RoundPipeRunConfig, _core, wrap_model_to_roundpipe
from roundpipe.following.native.decoder import NativeDecoder, config_of, native_decoder
from roundpipe.ops.functional import Arithmetic
from roundpipe.plan.shape_meter import ShapeMeter

FORMS: tuple[Arithmetic, ...] = ("exact", "fast")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_of(shape: str, layers: int, vocabulary: int, longest: int) -> Any:
    config = configuration(shape, longest, layers)
    config.vocab_size = vocabulary
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@dataclass
class Layer:
    """A layer with an input, on a device."""

    decoder: NativeDecoder
    tokens: int
    device: str

    def __post_init__(self) -> None:
        attention = self.decoder.layer.self_attn
        dtype = next(self.decoder.layer.parameters()).dtype
        generator = torch.Generator().manual_seed(1)
        shape = (1, self.tokens, self.decoder.layer.hidden_size)
        self.hidden, self.given = (torch.randn(shape, generator=generator).to(self.device, dtype) for _ in range(2))
        angles = torch.rand(1, self.tokens, attention.head_dim, generator=generator)
        self.tables = [wave.to(self.device, dtype) for wave in (angles.cos(), angles.sin())]
        self.weights = [each.detach().to(self.device) for each in self.decoder.layer.parameters()]

    def forward(self, form: Arithmetic, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        inputs = [each.to(dtype or each.dtype).requires_grad_() for each in (self.hidden.detach(), *self.weights)]
        tables = [each.to(inputs[0].dtype) for each in self.tables]
        config = config_of(self.decoder.layer, form)
        return _core.decode(config, self.decoder.names, inputs[1:], inputs[0], *tables, None, "sdpa"), inputs

    def backward(self, output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(torch.autograd.grad(output, inputs, self.given.to(output.dtype)))

    def results(self, form: Arithmetic, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        output, inputs = self.forward(form, dtype)
        return [output.detach(), *self.backward(output, inputs)]

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.accelerator.synchronize()


def in_turn(runs: dict[Arithmetic, Callable[[], object]], rounds: int) -> dict[Arithmetic, float]:
    """The median seconds of each, one after the other in each round, each round beginning with another one."""
    taken: dict[Arithmetic, list[float]] = {form: [] for form in runs}
    for turn in range(rounds + 1):
        for form in FORMS if turn % 2 else FORMS[::-1]:
            begin = time.perf_counter()
            runs[form]()
            if turn > 0:  # the first one warms up
                taken[form].append(time.perf_counter() - begin)
    return {form: statistics.median(each) for form, each in taken.items()}


def distances(layer: Layer) -> tuple[float, float, bool]:
    """Of the exact and the fast form from fp64, the largest of results and gradients; and whether fast is as near."""
    true = layer.results("exact", torch.float64)
    found = []
    for form in FORMS:
        pairs = zip(layer.results(form), true, strict=True)
        found.append([float(torch.linalg.vector_norm(a.double() - b) / torch.linalg.vector_norm(b)) for a, b in pairs])
    rounding = torch.finfo(layer.hidden.dtype).eps
    near = all(fast <= 1.5 * exact + rounding for exact, fast in zip(*found, strict=True))
    return max(found[0]), max(found[1]), near


def layers(report: Report, options: Any) -> list[str]:
    """Prints the first two tables; returns what is wrong."""
    rows, near_rows, wrong = [], [], []
    for shape in options.shapes:
        plain = model_of(shape, 1, 64, options.tokens).model.layers[0]
        for name in options.dtypes:
            decoder = native_decoder(copy.deepcopy(plain).to(DTYPES[name]), 0)
            assert isinstance(decoder, NativeDecoder), decoder
            layer = Layer(decoder, options.tokens, "cpu" if options.device == "virtual:1" else options.device)
            exact, fast, near = distances(layer)
            near_rows.append([shape, name, f"{exact:.1e}", f"{fast:.1e}"])
            wrong += (
                [] if near else [f"{shape} in {name}: the fast form is {fast:g} from fp64, the exact one {exact:g}"]
            )
            counted: dict[Arithmetic, list[_core.LayerWork]] = {}
            for form in FORMS:
                with ShapeMeter([]) as forward:
                    output, inputs = layer.forward(form)
                with ShapeMeter([]) as backward:
                    layer.backward(output, inputs)
                counted[form] = [forward.work, backward.work]

            def run(form: Arithmetic, layer: Layer = layer) -> None:
                layer.results(form)
                layer.synchronize()

            seconds = in_turn({form: lambda form=form: run(form) for form in FORMS}, options.rounds)  # type: ignore[misc]
            rows.append(
                [
                    shape,
                    name,
                    *(f"{seconds[form] * 1e3:.1f}" for form in FORMS),
                    f"{seconds['exact'] / seconds['fast']:.2f}",
                    *(" + ".join(f"{each.element_kernels:.0f}" for each in counted[form]) for form in FORMS),
                    *(
                        " + ".join(f"{each.element_bytes / options.tokens / 1e3:.0f}" for each in counted[form])
                        for form in FORMS
                    ),
                ]
            )
    report(
        f"A decoder layer, {options.tokens} tokens, forward and backward in ms; element-wise kernels, and KB a token,"
    )
    report("forward + backward:")
    report("")
    header = ["layer", "dtype", "exact", "fast", "exact / fast", "kernels, exact", "fast", "KB, exact", "fast"]
    report.table(header, rows)
    report("Distance from fp64, of the norm, the largest of the result and all gradients:")
    report("")
    report.table(["layer", "dtype", "exact", "fast"], near_rows)
    return wrong


def training(report: Report, options: Any) -> None:
    rows = []
    roundpipe.devices(options.device)
    plain = model_of(options.trained, options.layers, options.vocabulary, options.length)
    ids = torch.randint(options.vocabulary, (options.rows, options.length), generator=torch.Generator().manual_seed(2))
    for name in options.dtypes:
        steps: dict[Arithmetic, Callable[[], object]] = {}
        losses: dict[Arithmetic, list[float]] = {form: [] for form in FORMS}
        for form in FORMS:
            model = copy.deepcopy(plain).to(DTYPES[name])
            config = RoundPipeRunConfig(num_microbatch=2)
            wrapped = wrap_model_to_roundpipe(model, native=True, arithmetic=form, model_run_config=config)
            optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-3)

            def step(wrapped: Any = wrapped, optimizer: Any = optimizer, to: list[float] = losses[form]) -> None:
                to.append(float(wrapped.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})))
                wrapped.step(optimizer, is_async=False)
                wrapped.synchronize()

            steps[form] = step
        seconds = in_turn(steps, options.rounds)
        apart = max(abs(a - b) / a for a, b in zip(losses["exact"], losses["fast"], strict=True))
        speed = [options.rows * options.length / seconds[form] for form in FORMS]
        rows.append([name, *(f"{each:,.0f}" for each in speed), f"{speed[1] / speed[0]:.2f}", f"{apart:.1e}"])
    report(
        f"Tokens a second of training steps by the engine: {options.layers} layers of the shape {options.trained}, "
        f"vocabulary {options.vocabulary:,}, {options.rows} rows of {options.length} tokens; and the largest distance "
        "of the losses of one step:"
    )
    report("")
    report.table(["dtype", "exact", "fast", "fast / exact", "losses apart"], rows)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--device", default="virtual:1")
    arguments.add_argument("--shapes", nargs="+", default=["1.7B"], choices=list(SHAPES))
    arguments.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=list(DTYPES))
    arguments.add_argument("--tokens", type=int, default=512, help="of the layer")
    arguments.add_argument("--trained", default="tiny", choices=list(SHAPES))
    arguments.add_argument("--layers", type=int, default=4)
    arguments.add_argument("--vocabulary", type=int, default=32_000)
    arguments.add_argument("--rows", type=int, default=8)
    arguments.add_argument("--length", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=5)
    options = arguments.parse_args()
    if options.quick:
        options.shapes, options.tokens, options.rounds = ["tiny"], 16, 1
        options.layers, options.vocabulary, options.length = 2, 300, 16
    report = Report("Fast arithmetic against exact arithmetic", options.out)
    report(f"- {describe(options.device)}")
    report("")
    report(f"Medians of {options.rounds} rounds, in which both take turns.")
    report("")
    wrong = layers(report, options)
    training(report, options)
    report.close()
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
