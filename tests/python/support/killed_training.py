"""A training that saves often and resumes by itself, in processes that may be killed. Each is a fork of one process,
which has imported torch."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

WIDTH = 96
SAVE_EVERY = 2
KEEP_LAST = 2
FAULT_AT = 4
FULL_BYTES = 16384  # of a file while the disk is "full": less than a checkpoint's, more than the journal's


@dataclass(frozen=True)
class Request:
    """One life of the training.

    Attributes:
        folder: of the run.
        steps: it ends after this step.
        fault: how the folder is during the save of step `FAULT_AT`: "full", "read-only", or "" for as always.
    """

    folder: str
    steps: int
    fault: str = ""


@dataclass
class Life:
    """A process that trains. It says `loaded N`, `completed N` for a synced record, `saved N` for a complete
    checkpoint, `failed N`, and `final HASH`."""

    pid: int
    said: list[list[str]] = field(default_factory=list)
    errors: str = ""
    status: int = 0

    def newest(self, word: str) -> int:
        """The largest number that was said after `word`; -1 if there was none."""
        return max((int(line[1]) for line in self.said if line[0] == word), default=-1)


class Lives:
    """Starts one life after the other. Use as a context manager.

    Args:
        environment: of the processes.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._folder = tempfile.TemporaryDirectory()

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def live(self, request: Request) -> Iterator[Life]:
        """Yields the life at its start and after each line that it says; returns when it is over, and not before."""
        assert self._process.stdin is not None and self._process.stdout is not None
        output, errors = (os.path.join(self._folder.name, name) for name in ("output", "errors"))
        Path(errors).unlink(missing_ok=True)
        if not os.path.exists(output):
            os.mkfifo(output)
        self._process.stdin.write(json.dumps([asdict(request), output, errors]) + "\n")
        self._process.stdin.flush()
        with open(output) as lines:
            life = Life(int(self._process.stdout.readline()))
            yield life
            for line in lines:
                life.said.append(line.split())
                yield life
        self._process.stdin.write("end\n")  # until here its process id is not given to another process
        self._process.stdin.flush()
        life.status = int(self._process.stdout.readline())
        life.errors = Path(errors).read_text()

    def undisturbed(self, request: Request) -> Life:
        """A life to its own end."""
        *_, life = self.live(request)
        return life


def train(request: Request) -> None:
    """Trains until the last step or a signal, from the newest checkpoint if there is one."""
    import torch
    from torch import nn

    import roundpipe

    def say(*words: object) -> None:
        os.write(1, (" ".join(map(str, words)) + "\n").encode())

    torch.set_num_threads(1)
    roundpipe.devices("virtual:2")
    torch.manual_seed(3)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(4)))
    config = roundpipe.RoundPipeRunConfig(num_microbatch=2)
    model = roundpipe.RoundPipe(layers.to(torch.bfloat16), name="killed", model_run_config=config)
    optimizer = roundpipe.optim.AdamW(model, lr=1e-3)
    done = 0
    if roundpipe.latest(request.folder) is not None:
        done = roundpipe.load_checkpoint(request.folder, model, optimizer).step
    say("loaded", done)
    journal = roundpipe.RunJournal(request.folder, after_step=done)

    def watch(save: roundpipe.Save) -> None:
        try:
            save.wait()
        except (OSError, roundpipe.RoundPipeError):
            say("failed", save.step)
        else:
            say("saved", save.step)

    save: roundpipe.Save | None = None
    with roundpipe.StopSignal() as stop:
        for step in range(done + 1, request.steps + 1):
            batch = torch.randn(4, WIDTH).bfloat16()
            loss = model.forward_backward((batch,), loss_fn=lambda outputs, _: outputs.float().square().mean())
            model.step(optimizer)
            journal.record(step, loss=float(loss))
            say("completed", step)
            if step % SAVE_EVERY == 0 or stop.requested:
                fault = request.fault if step == FAULT_AT else ""
                if fault and save is not None:
                    save.wait()  # it is not to meet the fault
                with faulty(fault, request.folder):
                    save = roundpipe.save_checkpoint(request.folder, model, optimizer, keep_last=KEEP_LAST)
                    threading.Thread(target=watch, args=(save,)).start()
                    if fault:
                        save.wait_over()
            if stop.requested:
                return
    model.synchronize()
    content = hashlib.sha256()
    for tensor in [
        *model.state_dict().values(),
        *(value for state in optimizer.state_dict()["state"].values() for value in state.values()),
        torch.rand(4),
    ]:
        content.update(torch.as_tensor(tensor).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    say("final", content.hexdigest())


@contextlib.contextmanager
def faulty(kind: str, folder: str) -> Iterator[None]:
    """While its block runs, the folder takes no new files, if `kind` is a fault."""
    if kind == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, resource.RLIM_INFINITY))
    elif kind == "read-only":
        os.chmod(folder, 0o555)
    try:
        yield
    finally:
        if kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        elif kind == "read-only":
            os.chmod(folder, 0o755)


def give_up_override() -> None:
    """From here on, permissions of files hold for this thread and those that it makes, even if the user is root."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # the capabilities' third version, of this thread
    sets = (ctypes.c_uint32 * 6)()
    system = ctypes.CDLL(None, use_errno=True)
    if system.capget(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for effective_or_permitted in (0, 1):
        sets[effective_or_permitted] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if system.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def serve() -> None:
    """Forks a process for each request on stdin; says its id, and its exit status when asked. The fork returns."""
    import torch._dynamo  # noqa: F401 - by torch.optim, when the first optimizer is made

    import roundpipe

    roundpipe.RoundPipe, roundpipe.devices, roundpipe.optim, roundpipe.save_checkpoint, roundpipe.RunJournal  # noqa: B018

    for line in sys.stdin:
        request, output, errors = json.loads(line)
        child = os.fork()
        if child == 0:
            for path, flags, descriptor in (
                (os.devnull, os.O_RDONLY, 0),
                (output, os.O_WRONLY, 1),
                (errors, os.O_WRONLY | os.O_CREAT, 2),
            ):
                opened = os.open(path, flags)
                os.dup2(opened, descriptor)
                os.close(opened)
            if request["fault"] == "read-only":
                give_up_override()
            train(Request(**request))
            return
        print(child, flush=True)
        sys.stdin.readline()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
