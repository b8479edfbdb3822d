"""What do native layers save? Host time and interpreter locks of a decoder layer, in Python and native.

The models are so small that almost all of their time is the host's. The first table calls one Llama layer by itself, on
one thread: transformers' module and its native form, which dispatch the same operators, and the native form little
else. The second compares both with the bare dispatch of these operators, a trace of the native form: torch's
interpreter calls them with the same sizes, and no code of a module runs. The third runs whole models through the engine
on 1 to 8 virtual devices, each of which is a thread. Its figures are per layer, and hold that layer's share of the
parts around the layers, and of what each call asks a layer before it begins. The fourth says what a further microbatch
adds: the locks of its way through all parts, forward and backward. The last is the speed of a training step of layers
that compute a little: a Llama, and a Qwen3-MoE of 32 small experts, with transformers' default way to compute experts
and expert by expert. Python and native take turns in one process, and their losses and gradients have to be the same
bits.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from support.report import Report, parser

import roundpipe
from roundpipe import RoundPipeRunConfig, _core, wrap_model_to_roundpipe
from roundpipe.following.native.decoder import NativeDecoder, config_of, native_decoder

VOCABULARY = 64


def llama(layers: int, width: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def mixture(layers: int, width: int, experts: str) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        moe_intermediate_size=width // 2,
        num_experts=32,
        num_experts_per_tok=4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=512,
        use_cache=False,
        experts_implementation=experts,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def microseconds(
    runs: Sequence[Callable[[], object]], rounds: int, repeats: int, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """The median time of one run of each, by default of the host's cores; they take turns."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(rounds + 1):
        for run, taken in zip(runs, times, strict=True):
            start = clock()
            for _ in range(repeats):
                run()
            taken.append((clock() - start) / repeats * 1e6)
    return [statistics.median(taken[1:]) for taken in times]


class Single:
    """One layer, called by itself."""

    def __init__(self, width: int) -> None:
        model = llama(1, width)
        self.layer = model.model.layers[0]
        decoder = native_decoder(self.layer, 0)
        assert isinstance(decoder, NativeDecoder), decoder
        self.decoder, self.weights, self.config = decoder, list(self.layer.parameters()), config_of(self.layer)
        self.hidden = torch.randn(1, 4, width, requires_grad=True)
        self.table = torch.rand(1, 4, width // 4)

    def python(self) -> torch.Tensor:
        output: torch.Tensor = self.layer(self.hidden, position_embeddings=(self.table, self.table))
        return output

    def native(self) -> torch.Tensor:
        return _core.decode(
            self.config, self.decoder.names, self.weights, self.hidden, self.table, self.table, None, "sdpa"
        )


class Bare:
    """The operators of a native layer's forward, and nothing else: a trace, in which all but the hidden states is
    constant."""

    def __init__(self, single: Single) -> None:
        names, config, table = single.decoder.names, single.config, single.table
        weights = [weight.detach() for weight in single.weights]

        def layer(hidden: torch.Tensor) -> torch.Tensor:
            return _core.decode(config, names, weights, hidden, table, table, None, "sdpa")

        self.hidden = single.hidden.detach()
        with torch.no_grad():
            self.graph: Any = torch.jit.trace(layer, self.hidden, check_trace=False)
        self.operators = sum(node.kind().startswith("aten::") for node in self.graph.graph.nodes())
        # As many operators on numbers: what the interpreter takes for itself. An identity: what a call of it takes.
        source = "def counts(x: int):\n" + "    x = x + x * x\n" * (self.operators // 2) + "    return x\n"
        self.counts: Any = torch.jit.CompilationUnit(source).counts
        self.nothing: Any = torch.jit.trace(lambda hidden: hidden, self.hidden, check_trace=False)

    def __call__(self) -> torch.Tensor:
        result: torch.Tensor = self.graph(self.hidden)
        return result


def bare_dispatch(report: Report, single: Single, options: Any) -> None:
    bare = Bare(single)
    runs: list[Callable[[], object]] = [single.python, single.native, bare]
    runs += [lambda: bare.counts(1), lambda: bare.nothing(bare.hidden)]
    with torch.no_grad(), torch.jit.optimized_execution(False):
        if not torch.equal(single.native(), bare()):
            raise SystemExit("the bare operators' output differs")
        python, native, plain, counts, nothing = microseconds(runs, options.rounds, options.repeats)
    above = (native - plain) / (python - plain)
    rows = [[f"{python:.0f}", f"{native:.0f}", f"{plain:.0f}", str(bare.operators), f"{above:.2f}"]]
    report(f"The same forward without gradients, and its {bare.operators} operators alone, in microseconds:")
    report("")
    header = ["Python", "native", "bare dispatch", "operators", "(native - bare) / (Python - bare)"]
    report.table(header, rows)
    report(
        f"In the bare dispatch, torch's interpreter takes about {counts:.0f} for itself (as many operators on numbers, "
        f"and the call of a graph, {nothing:.0f} of these), beside the boxing of arguments. Without that, the quotient "
        f"is {(native - plain + counts) / (python - plain + counts):.2f}."
    )
    report("")


def single_layer(report: Report, options: Any) -> None:
    single = Single(options.width)
    runs = [single.python, single.native]
    if not torch.equal(single.python(), single.native()):
        raise SystemExit("the layer's outputs differ")
    rows = []
    with torch.no_grad():
        forward = microseconds(runs, options.rounds, options.repeats)
    recorded = microseconds(runs, options.rounds, options.repeats)
    gradient = torch.ones_like(single.hidden)
    both = microseconds(
        [lambda run=run: torch.autograd.grad(run(), [single.hidden, *single.weights], gradient) for run in runs],
        options.rounds,
        options.repeats,
    )
    for name, (python, native) in (
        ("forward, no gradients", forward),
        ("forward, recorded", recorded),
        ("forward and backward", both),
    ):
        rows.append([name, f"{python:.0f}", f"{native:.0f}", f"{native / python:.2f}"])
    report("A layer by itself, on one thread, in microseconds of the host's cores:")
    report("")
    report.table(["what", "Python", "native", "native / Python"], rows)
    bare_dispatch(report, single, options)


class Trained:
    """A model in the pipeline."""

    def __init__(self, model: Any, microbatches: int, native: bool) -> None:
        config = RoundPipeRunConfig(num_microbatch=microbatches)
        self.model = copy.deepcopy(model)
        self.wrapped = wrap_model_to_roundpipe(self.model, native=native, model_run_config=config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.wrapped(input_ids=ids).logits
        return logits

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.wrapped.forward_backward(input_kwargs={"input_ids": ids, "labels": ids})
        self.wrapped.synchronize()
        return loss


def check(models: list[Trained], ids: torch.Tensor) -> None:
    """Ends the program unless both compute the same bits."""
    losses = [each.step(ids) for each in models]
    gradients = [[p.grad for p in each.model.parameters()] for each in models]
    logits = [each.forward(ids) for each in models]
    if not (torch.equal(*losses) and torch.equal(*logits) and all(map(torch.equal, *gradients))):
        raise SystemExit("native and Python layers differ")
    for each in models:
        each.wrapped.zero_grad()


def taken_by(run: Callable[[], object]) -> int:
    before = _core.interpreter_lock_acquisitions()
    run()
    return _core.interpreter_lock_acquisitions() - before


def engine(report: Report, options: Any) -> None:
    model = llama(options.layers, options.width)
    ids = torch.randint(VOCABULARY, (options.microbatches, 4))
    forwards = options.layers * options.microbatches
    rows = []
    for devices in options.devices:
        roundpipe.devices(f"virtual:{devices},threads=1")
        models = [Trained(model, options.microbatches, native) for native in (False, True)]
        check(models, ids)
        runs: list[Callable[[], object]] = [lambda each=each: each.forward(ids) for each in models]
        runs += [lambda each=each: each.step(ids) for each in models]
        times = [each / forwards for each in microseconds(runs, options.rounds, 1)]
        taken = [taken_by(run) / forwards for run in runs]
        rows.append(
            [
                str(devices),
                *(f"{each:.0f}" for each in times[:2]),
                f"{times[1] / times[0]:.2f}",
                *(f"{each:.0f}" for each in times[2:]),
                f"{times[3] / times[2]:.2f}",
                *(f"{each:.2f}" for each in taken),
            ]
        )
    report(
        f"{options.layers} layers in {options.microbatches} microbatches of 4 tokens through the engine. For each "
        "layer and microbatch: microseconds of the host's cores, of all threads, and how often the lock was taken."
    )
    report("")
    header = ["devices", "forward Python", "native", "ratio", "step Python", "native", "ratio"]
    report.table([*header, "locks forward Python", "native", "locks step Python", "native"], rows)


def further_microbatches(report: Report, options: Any) -> None:
    """Calls of twice and of four times the microbatches, through the same plan on one device."""
    model = llama(options.layers, options.width)
    roundpipe.devices("virtual:1,threads=1")
    rows = []
    for name, native in (("Python", False), ("native", True)):
        taken = []
        for times in (2, 4):
            count = times * options.microbatches
            trained = Trained(model, count, native)
            ids = torch.randint(VOCABULARY, (count, 4))
            for _ in range(2):  # makes all there is
                trained.forward(ids)
                trained.step(ids)
            taken.append((taken_by(lambda: trained.forward(ids)), taken_by(lambda: trained.step(ids))))  # noqa: B023
        more = 2 * options.microbatches
        rows.append([name, *(f"{(after - before) / more:.2f}" for before, after in zip(*taken, strict=True))])
    report(
        f"How often a further microbatch takes the interpreter lock on its way through {options.layers} layers and the "
        "parts around them, on one device:"
    )
    report("")
    report.table(["layers", "forward", "step"], rows)


def tokens_a_second(report: Report, options: Any) -> None:
    width = 4 * options.width
    models = {"Llama": llama(options.layers, width)}
    models |= {f"Qwen3-MoE, {way}": mixture(options.moe_layers, width, way) for way in ("grouped_mm", "eager")}
    ids = torch.randint(VOCABULARY, (options.microbatches, options.tokens))
    roundpipe.devices("virtual:4,threads=1")
    rows = []
    for name, model in models.items():
        pair = [Trained(model, options.microbatches, native) for native in (False, True)]
        check(pair, ids)
        runs: list[Callable[[], object]] = [lambda each=each: each.step(ids) for each in pair]
        taken = microseconds(runs, options.rounds, 1, time.perf_counter)
        cores = microseconds(runs, options.rounds, 1)
        python, native = (ids.numel() / each * 1e6 for each in taken)
        layers = str(model.config.num_hidden_layers)
        speed = [f"{python:,.0f}", f"{native:,.0f}", f"{native / python:.2f}"]
        rows.append([name, layers, *speed, *(f"{each / 1e3:.0f}" for each in cores)])
    report(
        f"A training step of models of width {width} on 4 virtual devices, {options.microbatches} rows of "
        f"{options.tokens} tokens, and the time of the host's cores that it takes, in ms:"
    )
    report("")
    header = ["model", "layers", "tokens/s Python", "native", "native / Python", "cores Python", "native"]
    report.table(header, rows)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--moe-layers", type=int, default=8)
    arguments.add_argument("--width", type=int, default=16)
    arguments.add_argument("--microbatches", type=int, default=8)
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--repeats", type=int, default=200, help="of a layer by itself")
    options = arguments.parse_args()
    if options.quick:
        options.layers, options.microbatches, options.devices, options.rounds, options.repeats = 2, 2, [1, 2], 1, 2
        options.moe_layers, options.tokens = 2, 8

    torch.set_num_threads(1)
    report = Report("Native layers: host time and interpreter locks, against layers in Python", options.out)
    report(f"Medians of {options.rounds} rounds.")
    report("")
    single_layer(report, options)
    engine(report, options)
    further_microbatches(report, options)
    tokens_a_second(report, options)
    report.close()


if __name__ == "__main__":
    main()
