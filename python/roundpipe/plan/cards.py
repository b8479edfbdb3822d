"""Cards: how fast a device computes, from which the times of a model's layers follow (`_core.time_ms`).

`roundpipe plan --measure` measures the card of a machine, as the table `[card]` of its file; `cards.toml` beside this
file has some by name, from their vendors' data sheets.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from roundpipe import _core
from roundpipe.plan import PRODUCTS
from roundpipe.plan.costs import object_of, rate_of

_RATES = ("attention_tflops", "memory_gb_per_s", "launch_us")


@dataclasses.dataclass(frozen=True)
class Card:
    """What one device reaches.

    Attributes:
        product_tflops: 1e12 operations per second of large matrix products, by one of `PRODUCTS`.
        attention_tflops: the same of fused attention; 0 = no limit, as for the rest.
        memory_gb_per_s: of the device's memory, reads and writes together.
        launch_us: microseconds from the start of a kernel that has nothing to do to the start of the next.
    """

    product_tflops: dict[str, float]
    attention_tflops: float
    memory_gb_per_s: float
    launch_us: float

    def in_core(self, products: str = "bf16") -> _core.Card:
        """For layers whose products are of that kind. Attention is no faster than they are: it has their dtype.

        Raises:
            ValueError: the card has no rate of it.
        """
        if products not in self.product_tflops:
            known = ", ".join(self.product_tflops)
            raise ValueError(f"[card] there is no rate of {products} products, expected one of {known}")
        rates = {name: getattr(self, name) for name in _RATES}
        product = self.product_tflops[products]
        if product > 0:
            rates["attention_tflops"] = min(rates["attention_tflops"], product)
        return _core.Card(product_tflops=product, **rates)

    def shared(self, devices: int) -> Card:
        """What each of so many devices reaches that compute on it at the same time."""
        return dataclasses.replace(
            self,
            product_tflops={kind: rate / devices for kind, rate in self.product_tflops.items()},
            attention_tflops=self.attention_tflops / devices,
            memory_gb_per_s=self.memory_gb_per_s / devices,
        )

    def lines(self) -> list[str]:
        """The table of a machine file."""
        rates = ", ".join(f"{name} = {rate!r}" for name, rate in self.product_tflops.items())
        return ["[card]", f"product_tflops = {{ {rates} }}", *(f"{name} = {getattr(self, name)!r}" for name in _RATES)]


@dataclasses.dataclass(frozen=True)
class NamedCard:
    """A card of `cards.toml`, with what else its data sheet says: the memory of the card and the rate of its link."""

    card: Card
    memory_bytes: int
    link_gb_per_s: float


def parse(value: Any) -> Card:
    """A card from the table of a machine file."""
    fields = object_of(value, "card", ("product_tflops", *_RATES))
    products = object_of(fields.get("product_tflops", {}), "card.product_tflops", PRODUCTS)
    return Card(
        {name: rate_of(rate, f"card.product_tflops.{name}") for name, rate in products.items()},
        **{name: rate_of(fields.get(name, 0), f"card.{name}") for name in _RATES},
    )


def names() -> list[str]:
    """Of the cards in `cards.toml`."""
    return list(_document())


def named(name: str) -> NamedCard:
    """The card of that name in `cards.toml`.

    Raises:
        ValueError: there is none.
    """
    entry = _document().get(name)
    if entry is None:
        raise ValueError(f"[card] there is no card {name!r}, expected one of {', '.join(names())}")
    peaks: dict[str, float] = entry["peak_tflops"]
    card = Card(
        {kind: entry["product_share"] * peak for kind, peak in peaks.items()},
        attention_tflops=entry["attention_share"] * peaks["bf16"],
        memory_gb_per_s=entry["memory_gb_per_s"],
        launch_us=entry["launch_us"],
    )
    return NamedCard(card, entry["memory_bytes"], entry["link_gb_per_s"])


def _document() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("cards.toml").read_text())
