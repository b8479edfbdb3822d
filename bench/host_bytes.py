"""How many bytes do the published models take on the host? Predicted from their configurations, nothing is loaded.

Ours: bf16 weights, bf16 gradients, the 2 bytes that make the weight an exact fp32 master, and Adam's two moments. The
published layout takes 20 bytes a trained parameter (16-bit weights, fp32 masters, gradients and moments, 16-bit
gradients), before its pinned allocator rounds up to powers of two. Frozen weights take 2 bytes in both. Where
embedding and head are one parameter, ours also holds an fp32 sum of the gradient of each until they are added up
(tied_grad_accumulation="microbatch" needs none). Values that wait between stages depend on the batch and are left out.
What ours takes in a real run is measured by gpu/throughput.py.
"""

from __future__ import annotations

from typing import Any

import torch
from support.published_models import MODELS, PublishedModel
from support.report import Report, parser

from roundpipe.model.memory.budget import ADAM, ADAM_8BIT, predict_unloaded
from roundpipe.plan.shapes import make_model

PUBLISHED_BYTES = 20  # a trained parameter
FROZEN_BYTES = 2


def meta_model(model: PublishedModel) -> Any:
    from transformers import AutoModelForCausalLM

    if model.lora:
        return make_model(model.config(), lora_rank=16)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model.config(), dtype=torch.bfloat16)


def row(name: str, model: PublishedModel) -> list[str]:
    made = meta_model(model)
    tied = getattr(made, "all_tied_weights_keys", {})
    ours, small = (predict_unloaded(made, rule) for rule in (ADAM, ADAM_8BIT))
    parameters = [p for n, p in made.named_parameters() if n not in tied]
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trained
    published = PUBLISHED_BYTES * trained + FROZEN_BYTES * frozen
    sizes = [
        ours.weights,
        ours.gradients,
        ours.masters,
        ours.moments,
        ours.partial_sums,
        ours.total,
        small.total,
        published,
    ]
    untied = (ours.total - ours.partial_sums) / trained
    if not model.lora and abs(untied - 14) > 0.01:
        raise SystemExit(f"{name}: {untied:.3f} bytes a parameter beside tied sums, expected 14")
    return [
        name + (" LoRA" if model.lora else ""),
        f"{(trained + frozen) / 1e9:.2f}",
        f"{trained / 1e9:.3f}",
        *(f"{size / 1e9:.1f}" for size in sizes),
        f"{ours.total / published:.2f}",
    ]


def main() -> None:
    options = parser(__doc__).parse_args()
    names = ["Qwen3-1.7B"] if options.quick else list(MODELS)
    report = Report("Host memory of the published models, predicted from their configurations", options.out)
    report("Sources: " + ", ".join(f"huggingface.co/{MODELS[name].source}" for name in names) + " (config.json).")
    report("")
    report(
        "**Predicted**, GB (parameters in billions; LoRA: rank 16 on the attention's projections, adapters in fp32):"
    )
    report("")
    header = ["model", "parameters", "trained", "weights", "gradients", "fp32 masters", "moments", "tied sums", "ours"]
    header += ["ours, 8-bit moments", "published layout", "ours / published"]
    report.table(header, [row(name, MODELS[name]) for name in names])
    report.close()


if __name__ == "__main__":
    main()
