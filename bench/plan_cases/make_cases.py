"""Writes the cases of bench/plan_cases.py: uneven models on machines whose links or host are nearly as slow as compute.

Each case is a cost file, a machine file shared by several cases, and an entry of cases.toml. Always writes the same.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
KINDS = ("uneven", "experts", "giant", "head", "unequal")
COUNT = 60
DEVICES = (1, 2, 3, 4, 6, 8, 12, 16)
MICROBATCHES = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 64)
LINKS = (12, 25)
UPDATE_RATES = (0, 0, 4, 10)


def layer(factor: float, weights: float) -> dict[str, float]:
    """A layer of a transformer, times and bytes by factors."""
    weight_bytes = 1e6 * round(180 * weights)
    return {
        "forward_ms": round(9 * factor, 3),
        "backward_ms": round(20 * factor, 3),
        "weight_bytes": weight_bytes,
        "activation_bytes": 16e6,
        "saved_bytes": 200e6,
    }


def layers_of(kind: str, chance: random.Random, count: int) -> list[dict[str, float]]:
    layers = [layer(factor, factor) for factor in (chance.uniform(0.6, 1.4) for _ in range(count))]
    if kind == "experts":
        layers[1::2] = [layer(0.6 * chance.uniform(0.6, 1.4), 4) for _ in layers[1::2]]
    if kind == "giant":
        layers[chance.randrange(count)] = layer(chance.uniform(3, 6), 4)
    return layers


def text_of(entry: dict[str, float]) -> str:
    values = (f"{name} = {value:g}" if value < 1e5 else f"{name} = {int(value)}" for name, value in entry.items())
    return "{" + ", ".join(values) + "}"


def machine(devices: int, link: int, host: int, update: int, unequal: bool) -> tuple[str, str]:
    """The name and the text of a machine file."""
    name = f"{devices}-link{link}" + (f"-host{host}" if host else "") + (f"-update{update}" if update else "")
    lines = [
        'schema = "roundpipe-machine"',
        "version = 1",
        f"link_up_gb_per_s = {link}",
        f"link_down_gb_per_s = {link}",
    ]
    lines += [f"host_gb_per_s = {host}", f"update_gb_per_s = {update}"]
    kinds = [(devices, 1.0, 24.0)]
    if unequal:
        name += "-unequal"
        slow = devices // 3
        # Room for a few layers, and fewer on the slower ones.
        kinds = [(devices - 2 * slow, 1.0, 2.4), (slow, 0.8, 1.6), (slow, 0.6, 1.2)]
    for count, speed, gigabytes in kinds:
        lines += ["", "[[devices]]", f"count = {count}", f"speed = {speed}", f"memory_bytes = {round(1e9 * gigabytes)}"]
    return name, "\n".join(lines) + "\n"


def main() -> None:
    chance = random.Random(60)
    entries = []
    (FOLDER / "machines").mkdir(parents=True, exist_ok=True)
    for number in range(COUNT):
        kind = KINDS[number % len(KINDS)]
        devices = DEVICES[number // len(KINDS) % len(DEVICES)]
        if kind == "unequal":
            devices = max(3, devices)
        microbatches = chance.choice(MICROBATCHES)
        count = chance.randint(8, 20 if microbatches <= 8 else 12)
        layers = layers_of(kind, chance, count)
        head = layer(chance.uniform(2.5, 4) if kind == "head" else chance.uniform(0.8, 1.6), 2)
        head["activation_bytes"] = 0
        name = f"{number + 1:02}-{kind}"
        lines = ['schema = "roundpipe-costs"', "version = 1", f'name = "{name}"', f"head = {text_of(head)}"]
        lines += ["layers = [", *(f"  {text_of(entry)}," for entry in layers), "]"]
        (FOLDER / f"{name}.toml").write_text("\n".join(lines) + "\n")
        host = 50 if chance.random() < 0.4 else 0
        update = chance.choice(UPDATE_RATES)
        machine_name, text = machine(devices, chance.choice(LINKS), host, update, kind == "unequal")
        (FOLDER / "machines" / f"{machine_name}.toml").write_text(text)
        mode = "sync" if number % 4 == 3 else "async"
        groups = microbatches if chance.random() < 0.25 else 1
        entries.append(
            f'[[cases]]\ncosts = "{name}.toml"\nmachine = "machines/{machine_name}.toml"\n'
            f'microbatches = {microbatches}\nmode = "{mode}"\ngradient_groups = {groups}\n'
        )
    (FOLDER / "cases.toml").write_text("\n".join(entries))


if __name__ == "__main__":
    sys.exit(main())
