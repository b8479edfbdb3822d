"""The options of `roundpipe plan`. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from roundpipe.command_options import After
from roundpipe.planning import PRODUCTS
from roundpipe.planning.options import OPTIMIZERS, WITH_8BIT, LinkOptions, require

if TYPE_CHECKING:
    from roundpipe import _core
    from roundpipe.memory.budget import UpdateRule
    from roundpipe.planning.cards import NamedCard
    from roundpipe.planning.costs import CostSet
    from roundpipe.planning.schedules import Request

TOKENS = 8192
TFLOPS = 100.0
_MOST_TOKENS = 1 << 24


@dataclass(frozen=True, kw_only=True)
class PlanOptions(LinkOptions):
    """Options of `roundpipe plan`."""

    schema: ClassVar[str] = "roundpipe.plan/1"
    modes: ClassVar[tuple[str, ...]] = ("async", "sync", "inference")
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="The folder (or config.json) of a transformers model, of which only the shapes are read; a cost file; "
            "or a preset: qwen3-1.7b, llama3.1-8b, gpt-oss-20b, qwen3-32b, qwen3-235b-lora.",
        ),
    ]
    mode: Annotated[str, typer.Option(help="async, sync or inference.")] = "async"
    microbatches: Annotated[
        int | None,
        typer.Option(
            help="Microbatches per step (default: as in training, one more than devices; fewer if the host has no room "
            "for what waits between stages).",
            show_default=False,
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of the host, such as 512GB, which limits the plan too (default: not compared).",
            show_default=False,
        ),
        After("memory"),
    ] = None
    optimizer: Annotated[
        str,
        typer.Option(help=f"Update rule, which takes memory of the host: {', '.join(OPTIMIZERS)}."),
        After("host_memory"),
    ] = "adamw"
    moments: Annotated[str, typer.Option(help="Of adam and adamw: fp32 or 8bit."), After("optimizer")] = "fp32"
    tokens: Annotated[
        int | None,
        typer.Option(help=f"For a model: tokens of a microbatch, in one row (default: {TOKENS})."),
        After("moments"),
    ] = None
    train: Annotated[
        str | None,
        typer.Option(help="For a model: full (all weights, the default) or lora (adapters of rank 16)."),
        After("tokens"),
    ] = None
    arithmetic: Annotated[
        str | None,
        typer.Option(
            help="For a model: exact (the default) or fast, with fused kernels where layers have a native form."
        ),
        After("train"),
    ] = None
    tflops: Annotated[
        float | None,
        typer.Option(
            help="For a model: 1e12 operations per second that a device reaches (default: the card of --card or of "
            f"--machine, else {TFLOPS:g}).",
            show_default=False,
        ),
        After("arithmetic"),
    ] = None
    card: Annotated[
        str | None,
        typer.Option(
            help="For a model: the devices, by name, whose layer times, memory and links follow from data sheets: "
            "rtx-3090, rtx-4090, rtx-5090 or h100.",
            show_default=False,
        ),
        After("tflops"),
    ] = None
    products: Annotated[
        str | None,
        typer.Option(
            help=f"For a card: the products whose rate counts, {', '.join(PRODUCTS)} (default: bf16). Sizes stay those "
            "of bf16.",
            show_default=False,
        ),
        After("card"),
    ] = None
    save: Annotated[
        Path | None, typer.Option(help="Write the stages to this file, for ModelExecutePlan.load."), After("as_json")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.tokens is None or 1 <= self.tokens <= _MOST_TOKENS, "tokens", self.tokens, f"1 to {_MOST_TOKENS}")
        require(self.train in (None, "full", "lora"), "train", self.train, "full or lora")
        require(self.arithmetic in (None, "exact", "fast"), "arithmetic", self.arithmetic, "exact or fast")
        if self.mode == "sync":
            self.refuse(["steps_shown"], "--mode async or inference")
        require(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, f"one of {', '.join(OPTIMIZERS)}")
        require(self.moments in ("fp32", "8bit"), "moments", self.moments, "fp32 or 8bit")
        if self.moments == "8bit":
            require(self.optimizer in WITH_8BIT, "moments", self.moments, f"fp32 for {self.optimizer}")
        if self.mode == "inference":
            fields = ["host_memory", "optimizer", "moments", "keep", "gradient_groups", "update_rate"]
            self.refuse(fields, "--mode async or sync")
        require(self.tflops is None or 1e-6 <= self.tflops <= 1e9, "tflops", self.tflops, "1e-06 to 1e+09")
        if self.tflops is not None:
            self.refuse(["card", "products"], "no --tflops")
        require(self.products in (None, *PRODUCTS), "products", self.products, f"one of {', '.join(PRODUCTS)}")
        if self.card is None and self.machine is None:
            self.refuse(["products"], "--card or --machine")

    @property
    def outputs(self) -> dict[str, Path | None]:
        return {**super().outputs, "save": self.save}

    @property
    def rule(self) -> UpdateRule:
        """The optimizer, which takes and moves memory of the host."""
        from roundpipe.memory.budget import UpdateRule

        return UpdateRule(self.optimizer, self.moments)

    def named_card(self) -> NamedCard | None:
        """What `--card` names."""
        from roundpipe.planning import cards

        return None if self.card is None else cards.named(self.card)

    def device_card(self) -> _core.Card:
        """How fast a device computes: as `--tflops` says, or else a card."""
        from roundpipe.planning.fit import card_of_tflops

        named, machine = self.named_card(), self.machine_file()
        card = named.card if named is not None else None if machine is None else machine.card
        if self.tflops is not None or card is None:
            if self.products is not None:
                raise ValueError(
                    f"[options] --machine is {self.machine}, which has no card, expected one with [card] for "
                    "--products, or --card"
                )
            return card_of_tflops(TFLOPS if self.tflops is None else self.tflops)
        return card.in_core(self.products or "bf16")

    def memory_bytes(self) -> int | None:
        named = self.named_card()
        if self.memory is None and self.machine is None and named is not None:
            return named.memory_bytes
        return super().memory_bytes()

    def request(self, costs: CostSet) -> Request:
        named = self.named_card()
        if named is not None and self.machine is None:
            link = named.link_gb_per_s
            costs = dataclasses.replace(costs, rates={"link_up_gb_per_s": link, "link_down_gb_per_s": link})
        return super().request(costs)

    def host_bytes(self) -> int | None:
        """Memory of the host; None: not limited."""
        from roundpipe import _core

        return None if self.host_memory is None else _core.parse_bytes(self.host_memory)
