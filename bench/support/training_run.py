"""One training run of a language model, in a process of its own: `python training_run.py JSON` prints its figures.

The process imports the `roundpipe` that is first on its path: ours, or another release of the same interface. So the
"chain" of a model's parts is trained by what both have in common; "followed" is our way for a model as it is.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

import psutil
import torch
from support.process_memory import peak_resident_bytes
from support.trainers import import_system, make_trainer
from support.training_request import Request, Result


def run(request: Request) -> Result:
    """Trains in this process."""
    import_system(request)
    available_bytes = psutil.virtual_memory().available
    trainer = make_trainer(request)
    result = Result(parameters=trainer.parameters, losses=trainer.losses)
    for mode in request.modes:
        trainer.train(request.warm_up, mode == "async")
        start = time.perf_counter()
        trainer.train(request.steps, mode == "async")
        seconds = time.perf_counter() - start
        result.tokens_per_s[mode] = request.steps * request.rows * request.tokens / seconds
    result.machine_bytes = available_bytes - psutil.virtual_memory().available
    result.resident_bytes = peak_resident_bytes()
    result.host_memory_bytes = trainer.host_memory_bytes()
    if torch.accelerator.is_available():
        result.device_peak_bytes = torch.accelerator.max_memory_allocated()
    elif not request.peer:
        import roundpipe

        result.device_peak_bytes = max(entry["peak_bytes"] for entry in roundpipe.devices().memory_report())
    return result


if __name__ == "__main__":
    print(json.dumps(asdict(run(Request(**json.loads(sys.argv[1]))))))
