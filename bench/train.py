"""What does `roundpipe train` cost against a loop written by hand? Tokens a second, and time of the host's cores.

Both train the same Llama on the same batches, with the same optimizer and schedule, and take turns in one process. The
loop is the one of the documentation, which reads each loss before it goes on. The command also keeps its journal,
metrics, events and progress, and looks at devices and memory. Its losses have to be the same bits. The time of the
cores is that of all threads: what else runs on the machine disturbs it less.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from support.report import Report, parser
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import roundpipe
from roundpipe.checkpoints.runs.lines import Lines
from roundpipe.data.balance import balanced_config
from roundpipe.data.chat import load_tokenizer
from roundpipe.train.config import TrainConfig
from roundpipe.train.data import read_data
from roundpipe.train.interface.progress import Screen
from roundpipe.train.loop import StepRecord, Training
from roundpipe.train.model import load_model
from roundpipe.train.nodes import RunNodes
from roundpipe.train.optimizer import make_optimizer, make_schedule
from roundpipe.train.tasks.objective import NextTokens
from roundpipe.train.trackers import All, Metrics, TensorBoard

WARM_UP = 3  # steps that do not count


class Taken(NamedTuple):
    """Of the steps that count: tokens, wall and core seconds, and every step's loss."""

    tokens: int
    wall_s: float
    cores_s: float
    losses: list[float]


class Clock:
    """An observer that starts counting after the first steps, and stops at the last."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.times: list[tuple[float, float]] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)
        self.times.append((time.perf_counter(), time.process_time()))

    def on_evaluation(self, record: Any) -> None:
        pass

    def taken(self) -> Taken:
        (wall, cores), (last_wall, last_cores) = self.times[WARM_UP - 1], self.times[-1]
        tokens = sum(record.tokens for record in self.records[WARM_UP:])
        return Taken(tokens, last_wall - wall, last_cores - cores, [record.loss for record in self.records])


def make_files(folder: Path, width: int, layers: int, lines: int) -> None:
    """A model of random weights with a tokenizer of bytes, and texts of random letters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    config = LlamaConfig(vocab_size=258, num_attention_heads=4, max_position_embeddings=2048, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.add_special_tokens(["<pad>", "<eos>"])
    PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder / "model"
    )
    generator = torch.Generator().manual_seed(0)
    texts = ["".join(chr(97 + n) for n in torch.randint(26, (200,), generator=generator)) for _ in range(lines)]
    (folder / "text.txt").write_text("\n".join(texts))


def by_command(config: TrainConfig, folder: Path) -> Taken:
    model, optimizer, schedule, data = parts(config, folder)
    clock = Clock()
    board = TensorBoard(folder / "events")
    nodes = RunNodes.alone()
    with Screen(data.steps, 0, 1) as screen:
        objective = NextTokens(model, nodes, config.microbatches)
        training = Training(config, model, optimizer, schedule, data, folder, nodes, objective)
        metrics = Metrics(Lines(folder / "metrics.jsonl"))
        training.run(All([metrics, board, screen, clock]), lambda: False)
    board.close()
    return clock.taken()


def by_hand(config: TrainConfig, folder: Path) -> Taken:
    model, optimizer, schedule, data = parts(config, folder)
    clock = Clock()
    for step, batch in enumerate(data.train, start=1):
        loss = model.forward_backward(input_kwargs=batch, run_config=balanced_config(batch))
        norm = model.step(optimizer, config.asynchronous, max_grad_norm=config.clip, lr_scheduler=schedule)
        print(f"step {step} loss {float(loss):.4f} norm {float(norm):.3f}")
        clock.on_step(StepRecord(step, float(loss), 0.0, 0.0, 0.0, batch["input_ids"].numel()))
        if step == data.steps:
            break
    return clock.taken()


def parts(config: TrainConfig, folder: Path) -> tuple[Any, Any, Any, Any]:
    tokenizer = load_tokenizer(config.model)
    data = read_data(config, tokenizer, folder / "data", RunNodes.alone())
    model = load_model(config)
    optimizer = make_optimizer(model, config)
    return model, optimizer, make_schedule(optimizer, config, data.steps), data


def main() -> None:
    options = parser(__doc__, needs=("tensorboard",))
    options.add_argument("--devices", default="virtual:2", help="device pool")
    options.add_argument("--width", type=int, default=256, help="hidden units of the model")
    options.add_argument("--layers", type=int, default=6, help="layers of the model")
    options.add_argument("--rounds", type=int, default=5, help="runs of each")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.width, arguments.layers, arguments.rounds = 32, 2, 1
    steps, length = (5, 64) if arguments.quick else (20, 256)
    report = Report("roundpipe train: what it costs against a loop written by hand", arguments.out)
    report(f"Llama of {arguments.layers} layers of {arguments.width}, rows of {length} tokens, {arguments.devices}")
    report("")
    roundpipe.devices(arguments.devices)
    taken: dict[str, list[Taken]] = {"by hand": [], "roundpipe train": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_files(folder, arguments.width, arguments.layers, lines=400)
        for number in range(arguments.rounds):
            config = TrainConfig(
                model=str(folder / "model"),
                data=[str(folder / "text.txt")],
                length=length,
                batch_tokens=8 * length,
                steps=steps,
                documents="line",
                held_out=0.0,
            )
            for name, run in (("by hand", by_hand), ("roundpipe train", by_command)):
                out = folder / f"{name.replace(' ', '-')}-{number}"
                out.mkdir()
                with contextlib.redirect_stdout(io.StringIO()):
                    taken[name].append(run(config, out))
    losses = {tuple(run.losses) for runs in taken.values() for run in runs}
    assert len(losses) == 1, "the losses differ"
    rows = []
    for name, runs in taken.items():
        speed = statistics.median(run.tokens / run.wall_s for run in runs)
        cores = statistics.median(run.cores_s / run.tokens * 1e6 for run in runs)
        rows.append([name, f"{speed:,.0f}", f"{cores:,.1f}"])
    report.table(["", "tokens/s", "core us a token"], rows)
    pairs = list(zip(taken["by hand"], taken["roundpipe train"], strict=True))
    slower = statistics.median(ours.wall_s / theirs.wall_s for theirs, ours in pairs)
    dearer = statistics.median(ours.cores_s / theirs.cores_s for theirs, ours in pairs)
    report(
        f"`roundpipe train` takes {100 * (slower - 1):+.1f} % time and {100 * (dearer - 1):+.1f} % of the cores' time, "
        f"medians of {arguments.rounds} pairs; all losses are the same bits"
    )
    report.close()


if __name__ == "__main__":
    main()
