"""The options of a demo run, with every default in this one place. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, replace

# The device pool if no accelerator is found.
VIRTUAL_DEVICES = "virtual:4,memory=48MiB"

DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class DemoOptions:
    """Settings of one run; the defaults train for about two minutes on two CPU cores."""

    # Optimizer updates.
    steps: int = 200
    # Sequences per step, cut into microbatches by the pipeline.
    batch_size: int = 10
    # Tokens per sequence.
    sequence_length: int = 128
    # Seeds the initial weights and the batches.
    seed: int = 0
    # Type of the weights: "float32", "bfloat16", or "auto", which measures briefly and takes the fast one.
    dtype: str = "auto"
    # At most this much text is read, held-out files included.
    corpus_bytes: int = 2_500_000
    # Highest learning rate, reached at the end of the warmup. A rate that synchronous steps still tolerate costs
    # asynchronous ones a tenth of their loss.
    learning_rate: float = 3e-4
    # Factor of the learning rate of the embedding and the head: each of their rows sees few of the tokens.
    token_table_factor: float = 30.0
    # Share of the steps over which the learning rate rises linearly from zero.
    warmup_share: float = 0.1
    # Share of the steps, at the start, that are synchronous: a staleness of one costs most there.
    synchronous_share: float = 0.6
    # Decay factors of AdamW's running means.
    betas: tuple[float, float] = (0.8, 0.95)
    # Gradient norms above this are scaled down to it.
    clip_norm: float = 1.0
    # AdamW's decoupled weight decay.
    weight_decay: float = 0.1
    # Held-out evaluations during the run, without the first and the last one.
    evaluations: int = 1
    # Batches of held-out text in one evaluation.
    evaluation_batches: int = 16
    # The held-out loss must end at least this share below ln(vocabulary), in a run with these other settings.
    required_fall: float = 0.4

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length"):
            value = getattr(self, name)
            if value < 1:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"[demo] {flag} is {value}; expected at least 1; give a positive number")
        if self.seed < 0:
            raise ValueError(f"[demo] --seed is {self.seed}; expected 0 or more; give a number that is not negative")
        if self.dtype not in DTYPES:
            raise ValueError(
                f"[demo] --dtype is {self.dtype!r}; expected one of {', '.join(DTYPES)}; choose one of them"
            )

    @property
    def is_judged(self) -> bool:
        """Whether `required_fall` applies to this run: only the seed and the type may differ from the defaults."""
        return any(replace(self, seed=one.seed, dtype=one.dtype) == one for one in (DemoOptions(), FULL))


# `--full`: four to five minutes.
FULL = DemoOptions(steps=480, corpus_bytes=6_000_000, learning_rate=1.2e-4, synchronous_share=0.4, evaluations=4)
