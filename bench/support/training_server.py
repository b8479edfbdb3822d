"""A process that trains laps of a language model as it is asked for them: `python training_server.py JSON`.

It imports what it needs and waits for a first line on stdin, which says that it may take memory; a Ready on stdout says
that all is set up. Every other line on stdin is a Lap, and every other line on stdout a LapResult. It ends with its
input. What an idle server does not need of the device's memory is given back, so that several take turns on one card.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from support.step_profile import profiled
from support.trainers import Trainer, import_system, make_trainer
from support.training_request import Lap, LapResult, Ready, Request


def run(trainer: Trainer, lap: Lap) -> LapResult:
    """One lap; without seconds where memory ran out."""
    before = len(trainer.losses)
    trainer.step_seconds.clear()
    trainer.set_batch(lap.rows, lap.tokens, lap.microbatches)
    trainer.recompute, trainer.learning_rate = lap.recompute, lap.learning_rate
    is_async = lap.mode == "async"
    on_card = torch.accelerator.is_available()
    if on_card:
        torch.accelerator.reset_peak_memory_stats()
    seconds, profile, uploaded_bytes = None, None, 0
    try:
        if lap.warm_up:
            trainer.train(lap.warm_up, is_async)
        uploaded_bytes = -trainer.uploaded_bytes()
        start = time.perf_counter()
        if lap.profiled:
            profile = profiled(lambda: trainer.train(lap.steps, is_async))
        else:
            trainer.train(lap.steps, is_async)
        seconds = time.perf_counter() - start
        uploaded_bytes += trainer.uploaded_bytes()
    except torch.OutOfMemoryError as error:
        print(error, file=sys.stderr)
    peak_bytes = torch.accelerator.max_memory_allocated() if on_card else 0
    return LapResult(
        *(seconds, trainer.losses[before:], peak_bytes, trainer.host_memory_bytes(), trainer.step_seconds),
        *(uploaded_bytes, profile),
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a system prints must not be taken for an answer

    def answer(value: Any) -> None:
        print(json.dumps(asdict(value)), file=answers, flush=True)

    request = Request(**json.loads(sys.argv[1]))
    import_system(request)
    sys.stdin.readline()
    start = time.perf_counter()
    trainer = make_trainer(request, expect="--expect" in sys.argv)
    flops = trainer.flops
    answer(
        Ready(
            *(trainer.parameters, time.perf_counter() - start),
            *(flops.per_token, flops.per_token_and_position, trainer.expected_loss),
        )
    )
    for line in sys.stdin:
        result = run(trainer, Lap(**json.loads(line)))
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        answer(result)


if __name__ == "__main__":
    main()
