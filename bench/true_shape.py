"""Does a model fit 24 GB? Layers of its real width run, and the whole model is predicted from them.

1. Measured on the host: decoder layers of the real width of Qwen3-32B (all weights train, bf16) and Qwen3-235B-A22B
   (LoRA adapters on frozen bf16 weights) make steps on a virtual device with a cap of 24 GB. The peak of the device's
   memory stands beside two predictions: the engine's own, and the one from shapes alone. The loss is compared with that
   of plain transformers. Weights are random, and the vocabulary of these runs is small; the embedding and the head of
   32B, with the real vocabulary, run by themselves.
2. Predicted: the device and host memory of the whole models, from their configurations, without weights; and the
   longest row that is predicted to fit 24 GB.

What a card's driver and libraries take for themselves is in no number here.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from support.process_memory import peak_resident_bytes
from support.published_models import MODELS, PublishedModel
from support.report import Report, parser
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipeRunConfig, _core, wrap_model_to_roundpipe
from roundpipe.following.layers.shell import PythonLayer
from roundpipe.following.layers.values import split
from roundpipe.model.call.loss_function import MicrobatchLoss, outputs_as_loss
from roundpipe.model.memory.prediction import predict_device
from roundpipe.plan.fit import Fit, card_of_tflops, costs_of_shapes, fit, layers_of_shapes, longest_row
from roundpipe.plan.schedules import Request
from roundpipe.plan.shapes import make_model, measure

MEMORY_BYTES = 24_000_000_000
RANK = 16
MICROBATCHES = 2
# Of the loss, against plain transformers in the same bf16: microbatches and chunks round in another order.
LOSS_TOLERANCE = 2e-3
# gpt-oss has no fused attention in transformers: what it holds cannot be told from shapes.
SUPPORTED = [name for name in MODELS if name != "gpt-oss-20b"]
# How far the peak may lie above the prediction, and below it.
ABOVE, BELOW = 0.03, 0.25
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY_EXPERTS = TINY | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.3f}"


def small_model(config: Any, lora: bool) -> nn.Module:
    """With random weights, in bf16; adapters as `make_model` puts them in."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rotary = type(model.model.rotary_emb)
    model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = rotary(config)  # its buffers have values, which the meta device lost
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1)
            else:
                parameter.uniform_(-0.03, 0.03)
    if lora:
        from peft import LoraConfig, get_peft_model

        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=names, task_type="CAUSAL_LM"))
    return model.train()


def run_layers(name: str, model: PublishedModel, layers: int, tokens: int, quick: bool) -> dict[str, Any]:
    """Two steps of so many layers on a virtual device; what was predicted and measured."""
    changes: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": 1024}
    if quick:
        changes |= TINY_EXPERTS if model.lora else TINY
    config = model.config(**changes)
    plain = small_model(config, model.lora)
    ids = torch.randint(0, 1024, (MICROBATCHES, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        rows = [plain(input_ids=row[None], labels=row[None], use_cache=False).loss for row in ids]
    expected = float(torch.stack(rows).mean())

    device = roundpipe.devices(f"virtual:1,memory={MEMORY_BYTES}B")
    plan = ModelExecutePlan()
    if model.lora:
        # One visit, so that no second copy of the layer's weights is on what is host memory here.
        plan.bwd_plan = [range(layers + 2)]
    else:
        plan.fwd_plan = [range(layers + 1)]
        plan.bwd_plan = [range(layers + 1, layers + 2), *(range(n, n + 1) for n in reversed(range(layers + 1)))]
    run_config = RoundPipeRunConfig(num_microbatch=MICROBATCHES, execute_plan=plan)
    wrapped = wrap_model_to_roundpipe(plain, model_run_config=run_config)
    optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-6, moments="8bit")
    batch = {"input_ids": ids, "labels": ids}
    predicted = wrapped.predict_memory(input_kwargs=batch)
    gc.collect()
    device.reset_peak_memory()
    losses = []
    for _ in range(2):
        losses.append(float(wrapped.forward_backward(input_kwargs=batch)))
        wrapped.step(optimizer, is_async=False)
    wrapped.synchronize()
    peak = int(device.memory_report()[0]["peak_bytes"])
    host = optimizer.host_memory()

    meta = make_model(config, RANK if model.lora else None)
    shapes = measure(meta, tokens, chunk_logit_bytes=_core.chunk_logit_bytes("cpu"))
    like = layers_of_shapes(shapes)
    rules = _core.Engine.current().device_rules(MEMORY_BYTES)
    sizes = _core.StepSizes(like.sizes, like.footprints, _core.RecomputeGrain.STAGE, label_bytes=0, gradient_groups=1)
    from_shapes = predict_device([wrapped.last_plan()] * 3, sizes, rules)
    return {
        "name": name,
        "layers": layers,
        "tokens": tokens,
        "layer_bytes": shapes.layers[1].size.weights,
        "predicted": predicted.device.total,
        "shapes": from_shapes.total,
        "parts": from_shapes.rows(),
        "measured": peak,
        "loss": losses[0],
        "expected": expected,
        "second": losses[1],
        "host": str(host),
    }


class _Head(nn.Module):
    """The last norm, the head and the loss of a model, as one layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        from roundpipe.ops.functional import linear_cross_entropy

        hidden, labels = value
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        return linear_cross_entropy(
            self.norm(hidden).flatten(0, 1), self.head.weight, shifted.flatten(), reduction="mean"
        )


def run_head(name: str, model: PublishedModel, tokens: int, quick: bool) -> dict[str, Any]:
    """The head with the real vocabulary, forward and backward, by itself; and the same from shapes."""
    changes: dict[str, Any] = {"num_hidden_layers": 1, **(TINY | {"vocab_size": 20_000} if quick else {})}
    config = model.config(**changes)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    head = _Head(whole).to_empty(device="cpu")
    with torch.no_grad():
        head.norm.weight.fill_(1)
        head.head.weight.uniform_(-0.03, 0.03)
    hidden = torch.randn(1, tokens, config.hidden_size).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(0, config.vocab_size, (1, tokens))
    batch = split((hidden, labels))
    layer = PythonLayer(head, "head", is_last=True)
    roundpipe.devices("virtual:1")
    core = _core.ModelCore(_core.Pipeline("head", [layer], False), None, None, measures=False, checks_loss=False)
    loss = MicrobatchLoss(outputs_as_loss)
    arguments = _core.CallArguments([batch], [split(None)], loss, False, (), passages=[None])
    (real,) = core.footprints(arguments, _core.RunOptions())
    meta = make_model(config)
    shapes = measure(meta, tokens, chunk_logit_bytes=_core.chunk_logit_bytes("cpu")).layers[-1]
    return {
        "name": name,
        "tokens": tokens,
        "layer_bytes": shapes.size.weights,
        "measured": max(real.forward, real.backward),
        "shapes": max(shapes.footprint.forward, shapes.footprint.backward),
    }


def whole_model(model: PublishedModel, tokens: int, quick: bool) -> tuple[Any, Fit, int, Fit | None]:
    """Predicted for eight devices with 24 GB and 16 microbatches: at `tokens`, and the longest row."""
    changes = (TINY_EXPERTS if model.lora else TINY) | {"num_hidden_layers": 4, "vocab_size": 1024} if quick else {}
    meta = make_model(model.config(**changes), RANK if model.lora else None)

    def predict(length: int) -> Fit:
        shapes = measure(meta, length, model.preset)
        costs = costs_of_shapes(shapes, card_of_tflops(100))
        # No replicas, as in a training run. The search for the shortest step is cut short: memory is asked for here.
        request = Request(costs, costs.cluster(8), microbatches=16, replicas=False, interleave=False, effort=2_000_000)
        found = fit(request, layers_of_shapes(shapes), MEMORY_BYTES)
        print(f"{model.source}, {length} tokens: {found.device.total / 1e9:.2f} GB", file=sys.stderr, flush=True)
        return found

    longest, at_longest = longest_row(predict, limit=8192 if quick else 1 << 20)
    return measure(meta, tokens, model.preset), predict(tokens), longest, at_longest


def in_process(options: argparse.Namespace, case: str) -> dict[str, Any]:
    """Runs a case in a process of its own, so that nothing of one is in the memory of the next."""
    import json

    command = [sys.executable, __file__, "--case", case, "--tokens", str(options.tokens)]
    command += ["--quick"] if options.quick else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_case(case: str, tokens: int, quick: bool) -> dict[str, Any]:
    if case == "layers-32b":
        result = run_layers("Qwen3-32B", MODELS["Qwen3-32B"], 2, tokens, quick)
    elif case == "layers-235b":
        result = run_layers("Qwen3-235B-A22B, LoRA", MODELS["Qwen3-235B-A22B"], 1, tokens, quick)
    else:
        result = run_head("Qwen3-32B", MODELS["Qwen3-32B"], tokens, quick)
    return result | {"rss": peak_resident_bytes()}


def main() -> None:
    arguments = parser(__doc__, needs=("peft",))
    arguments.add_argument("--tokens", type=int, default=256, help="of a microbatch of the layers that run")
    arguments.add_argument("--models", nargs="+", default=[*SUPPORTED], choices=SUPPORTED)
    arguments.add_argument("--at", type=int, default=8192, help="tokens of a microbatch of the whole models")
    arguments.add_argument("--case", choices=["layers-32b", "layers-235b", "head-32b"], help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.quick:
        options.tokens, options.at, options.models = 64, 1024, SUPPORTED[-2:]
    if options.case:
        import json

        print(json.dumps(run_case(options.case, options.tokens, options.quick)))
        return
    report = Report("True shapes: layers of 32B and 235B under 24 GB, measured; whole models, predicted", options.out)
    wrong = measured_part(report, options)
    predicted_part(report, options)
    report.close()
    if wrong:
        raise SystemExit("\n".join(wrong))


def measured_part(report: Report, options: argparse.Namespace) -> list[str]:
    runs = [in_process(options, case) for case in ("layers-32b", "layers-235b")]
    report(
        f"**Measured** on a virtual device with {gigabytes(MEMORY_BYTES)} GB: two steps of forward, backward and AdamW "
        f"with 8-bit moments, {MICROBATCHES} microbatches of {options.tokens} tokens, random bf16 weights. 32B: every "
        f"weight trains; 235B: adapters of rank {RANK} on the attention's projections. GB; predicted by the engine, "
        "which runs a layer of each kind beside the pipeline, and from shapes alone:"
    )
    report("")
    rows, wrong = [], []
    for run in runs:
        ratio = run["measured"] / run["shapes"]
        off = abs(run["loss"] / run["expected"] - 1)
        rows.append(
            [
                *(run["name"], str(run["layers"]), gigabytes(run["layer_bytes"]), gigabytes(run["measured"])),
                *(gigabytes(run["predicted"]), gigabytes(run["shapes"]), f"{ratio:.3f}"),
                *(f"{run['loss']:.5f}", f"{run['expected']:.5f}", f"{run['second']:.5f}", gigabytes(run["rss"])),
            ]
        )
        if not options.quick and not 1 - BELOW < ratio < 1 + ABOVE:
            wrong.append(f"{run['name']}: {ratio:.3f} of what was predicted from shapes")
        if not off < LOSS_TOLERANCE:
            wrong.append(f"{run['name']}: a loss of {run['loss']}, expected {run['expected']}")
    header = ["model", "decoder layers", "weights of one", "measured peak", "predicted by the engine"]
    header += ["predicted from shapes", "measured / shapes", "loss", "plain transformers", "next loss", "process"]
    report.table(header, rows)
    head = in_process(options, "head-32b")
    report(
        f"**Measured**: the last norm, head and loss of {head['name']} with its real vocabulary, {head['tokens']} "
        f"tokens, forward and backward on the host: {gigabytes(head['measured'])} GB at the most beyond the weights "
        f"({gigabytes(head['layer_bytes'])} GB). Predicted from shapes: {gigabytes(head['shapes'])} GB, which counts "
        "one more chunk of logits, since not every device computes a softmax in place."
    )
    report("")
    return wrong


def predicted_part(report: Report, options: argparse.Namespace) -> None:
    found = {name: whole_model(MODELS[name], options.at, options.quick) for name in options.models}
    report(
        f"**Predicted** for the whole models, 8 devices of {gigabytes(MEMORY_BYTES)} GB, 16 microbatches of one row. "
        f"The fullest device at {options.at:,} tokens, GB:"
    )
    report("")
    header = ["model", "parameters", "weights", "gradients", "values", "work", "together", "fits", "recomputes by"]
    rows = []
    for name, (shapes, fitted, _, _) in found.items():
        parts = [gigabytes(size) for size in fitted.device.rows().values()]
        together = gigabytes(fitted.device.total)
        verdict = "yes" if fitted.fits else "no"
        rows.append([name, f"{shapes.parameters / 1e9:.2f} G", *parts, together, verdict, fitted.grain])
    report.table(header, rows)
    report("**Predicted** longest row, by the same code (within 1/32; published: arXiv:2604.27085, measured on cards):")
    report("")
    rows = []
    for name, (_, _, longest, at_longest) in found.items():
        device = gigabytes(at_longest.device.total) if at_longest else "-"
        waiting = gigabytes(at_longest.values) if at_longest else "-"
        rows.append([name, f"{longest:,}", device, waiting, MODELS[name].longest_row])
    report.table(["model", "longest row, predicted", "device GB", "values on the host GB", "published"], rows)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
