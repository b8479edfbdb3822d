"""A process that trains laps of a language model as it is asked for them: `python training_server.py JSON`.

Every line on stdin is a Lap and every line on stdout a LapResult, but for the first, the number of the model's
parameters, which comes when all is set up. It ends with its input. What an idle server does not need of the device's
memory is given back, so that several take turns on one card.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
from support.trainers import make_trainer
from support.training_request import Lap, LapResult, Request


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a system prints must not be taken for an answer

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    trainer = make_trainer(Request(**json.loads(sys.argv[1])))
    answer(trainer.parameters)
    for line in sys.stdin:
        lap = Lap(**json.loads(line))
        before = len(trainer.losses)
        seconds: float | None = None
        try:
            trainer.set_batch(lap.rows, lap.tokens, lap.microbatches)
            if lap.warm_up:
                trainer.train(lap.warm_up, lap.mode == "async")
            start = time.perf_counter()
            trainer.train(lap.steps, lap.mode == "async")
            seconds = time.perf_counter() - start
        except torch.OutOfMemoryError as error:
            print(error, file=sys.stderr)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        answer(asdict(LapResult(seconds, trainer.losses[before:])))


if __name__ == "__main__":
    main()
