"""`roundpipe demo`: its text, tokenizer, model, proofs, loss and records, and a short run of the whole command."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import roundpipe
from roundpipe.demo import corpus as corpus_module
from roundpipe.demo import proof, session
from roundpipe.demo.command import _imports_interrupted
from roundpipe.demo.conversations import write_conversations
from roundpipe.demo.corpus import Corpus, SourceFile, load_corpus
from roundpipe.demo.guessing import Guessing, guess
from roundpipe.demo.model import as_layers, build_llama, parameter_count, save_model, training_bytes
from roundpipe.demo.next_steps import going_on
from roundpipe.demo.options import FULL, DemoOptions
from roundpipe.demo.plain_loop import GRADIENTS, OPTIMIZER, WEIGHTS, Outcome, plain_steps
from roundpipe.demo.precision import choose_precision
from roundpipe.demo.report import METRICS_FILE, MetricsWriter, RunReporter, draw_curve, prepare_folder
from roundpipe.demo.tokenizer import END_OF_FILE, encode_files, train_tokenizer
from roundpipe.demo.training import (
    IGNORED,
    Batch,
    EvaluationRecord,
    RandomBatches,
    StepRecord,
    held_out_batches,
    held_out_scores,
    learning_rate_factor,
    next_token_loss,
)
from roundpipe.demo.verdict import exact, fits, learns

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PACKAGE_PARENT = Path(corpus_module.__file__).parents[2]


@pytest.fixture(scope="module")
def small_corpus() -> Corpus:
    return load_corpus(limit_bytes=1_200_000)


def command_environment() -> dict[str, str]:
    # One thread: on a busy machine small operations wait longer for a second one than they take.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (environment.get("PYTHONPATH"), str(PACKAGE_PARENT)) if part
    )
    return environment


def run_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "roundpipe.cli", *arguments],
        cwd=cwd,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# --- text ---


def test_corpus_is_the_same_every_time_and_keeps_to_its_limit(small_corpus: Corpus) -> None:
    assert load_corpus(limit_bytes=1_200_000) == small_corpus
    assert 900_000 < small_corpus.training_bytes + small_corpus.held_out_bytes <= 1_200_000


def test_held_out_files_are_not_trained_on(small_corpus: Corpus) -> None:
    training = {file.path for file in small_corpus.training}
    held_out = {file.path for file in small_corpus.held_out}
    assert held_out
    assert not training & held_out
    assert not {file.text for file in small_corpus.training} & {file.text for file in small_corpus.held_out}


def test_corpus_skips_tests_and_other_packages(small_corpus: Corpus) -> None:
    for file in (*small_corpus.training, *small_corpus.held_out):
        assert not set(file.path.split("/")[:-1]) & corpus_module.SKIPPED_FOLDERS


def test_corpus_does_not_depend_on_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "LEAST_TRAINING_BYTES", 1)
    for root in (tmp_path / "a", tmp_path / "b" / "c"):
        (root / "test").mkdir(parents=True)
        for number in range(60):
            (root / f"file{number}.py").write_text(f"value = {number}\n")
        (root / "broken.py").write_bytes(b"\xff\xfe\x00")
        (root / "empty.py").write_text("")
        (root / "test" / "test_file.py").write_text("skipped = True\n")
    first = load_corpus(tmp_path / "a")
    assert first == load_corpus(tmp_path / "b" / "c")
    assert len(first.training) + len(first.held_out) == 60


def test_corpus_without_sources_is_a_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^\[demo.corpus\] found 0 bytes"):
        load_corpus(tmp_path)


def test_tokenizer_survives_a_round_trip(small_corpus: Corpus) -> None:
    texts = [file.text for file in small_corpus.training]
    tokenizer = train_tokenizer(texts, 512)
    assert tokenizer.get_vocab_size() == 512
    for text in (
        "def f(x):\n\treturn x  # grüße, 世界 \U0001f600\r\n",
        " \n ",
        small_corpus.held_out[0].text,
    ):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert train_tokenizer(texts, 512).to_str() == tokenizer.to_str()

    tokens = encode_files(tokenizer, small_corpus.held_out)
    assert tokens.dtype == torch.int64
    assert int((tokens == tokenizer.token_to_id(END_OF_FILE)).sum()) == len(small_corpus.held_out)


# --- model ---


def test_layers_compute_what_the_llama_computes() -> None:
    llama = build_llama(300, 32, seed=1, dtype=torch.float32)
    layers = as_layers(llama)
    assert len(layers) == llama.config.num_hidden_layers + 2
    assert {id(p) for p in layers.parameters()} == {id(p) for p in llama.parameters()}

    tokens = torch.randint(300, (3, 32), generator=torch.Generator().manual_seed(0))
    expected = llama(tokens).logits
    torch.testing.assert_close(layers(tokens), expected, rtol=0, atol=1e-6)

    expected.square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in llama.parameters() if parameter.grad is not None]
    llama.zero_grad()
    layers(tokens).square().mean().backward()
    for parameter, gradient in zip(llama.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=1e-6)


def test_a_token_does_not_see_its_future() -> None:
    layers = as_layers(build_llama(300, 16, seed=1, dtype=torch.float32))
    tokens = torch.arange(16).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 9:] = 7
    before, after = layers(tokens), layers(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert not torch.equal(after[:, 9:], before[:, 9:])


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (build_llama(300, 16, seed, torch.float32) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_cast_model_keeps_exact_rotary_frequencies() -> None:
    llama = build_llama(300, 16, seed=1, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in llama.parameters()} == {torch.bfloat16}
    assert llama.model.rotary_emb.inv_freq.dtype == torch.float32
    tokens = torch.arange(16).unsqueeze(0)
    torch.testing.assert_close(as_layers(llama)(tokens), llama(tokens).logits, rtol=0, atol=0)


def test_default_model_has_about_five_million_parameters() -> None:
    llama = build_llama(2048, 128, seed=0, dtype=torch.float32)
    assert 4_500_000 < parameter_count(llama) < 5_500_000
    assert sum(training_bytes(llama).values()) == 16 * parameter_count(llama)
    assert sum(training_bytes(llama.to(torch.bfloat16)).values()) == 16 * parameter_count(llama)


# --- the proofs ---


def proof_case(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Sequential, list[Batch], DemoOptions]:
    """The demo's model with a small vocabulary, and three batches of two short rows."""
    options = DemoOptions(batch_size=2, sequence_length=16)
    text = torch.randint(300, (1000,), generator=torch.Generator().manual_seed(0))
    batches = proof.proof_batches(list(itertools.islice(RandomBatches(text, options), 5)))
    return as_layers(build_llama(300, 16, seed=1, dtype=dtype)), batches, options


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pipeline_has_the_bits_of_the_loop_written_by_hand(dtype: torch.dtype) -> None:
    layers, batches, options = proof_case(dtype)
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    pool = roundpipe.devices("virtual:2,memory=48MiB")
    expected = plain_steps(layers, batches, options, torch.device("cpu"))
    assert len(batches) == len(expected.losses) == 3
    assert len(expected.masters) == (0 if dtype == torch.float32 else len(before))
    for count in proof.DEVICE_COUNTS:
        found = proof.compare_with_ours(layers, batches, options, pool, count, expected)
        assert found.is_exact, found
        assert len(roundpipe.devices()) == count
        assert found.numbers == 3 + parameter_count(layers) * (1 if dtype == torch.float32 else 2)
    for (name, parameter), initial in zip(layers.named_parameters(), before, strict=True):
        assert torch.equal(parameter, initial)
        trained = expected.weights if dtype == torch.float32 else expected.masters
        assert not torch.equal(trained[name], initial.float())


def test_plain_loop_is_what_torch_does_in_float32() -> None:
    layers, batches, options = proof_case()
    found = plain_steps(layers, batches, options, torch.device("cpu"))
    optimizer = torch.optim.AdamW(
        layers.parameters(), options.learning_rate, options.betas, weight_decay=options.weight_decay
    )
    for step, batch in enumerate(batches):
        loss = torch.nn.functional.cross_entropy(layers(batch.tokens).flatten(0, 1), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # One batch instead of microbatches adds up in another order, which Adam's first steps can magnify.
        assert float(found.losses[step]) == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in layers.named_parameters():
        torch.testing.assert_close(found.weights[name], parameter.detach(), rtol=0, atol=options.learning_rate)


def small_outcome() -> Outcome:
    return Outcome(
        torch.tensor([2.5, 2.25]),
        {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros(2, 2, dtype=torch.bfloat16)},
        {"a": torch.ones(3), "b": torch.zeros(2, 2)},
    )


@pytest.mark.parametrize(
    ("where", "pick"),
    [
        ("the losses", lambda one: one.losses.view(torch.int32)),
        ("a", lambda one: one.weights["a"].view(torch.int16)),
        ("b", lambda one: one.weights["b"].view(torch.int16)),
        ("master of b", lambda one: one.masters["b"].view(torch.int32)),
    ],
)
def test_a_changed_bit_is_found(where: str, pick: Callable[[Outcome], torch.Tensor]) -> None:
    changed = small_outcome()
    assert proof.compare(changed, small_outcome(), "1 device").is_exact
    pick(changed).flatten()[-1] ^= 1
    found = proof.compare(changed, small_outcome(), "1 device")
    assert (found.differing, found.numbers, found.where) == (1, 16, where)
    assert found.largest > 0
    assert "EXACT   no" in exact([found]).line
    assert exact([found]).complaint.startswith("[demo] three steps on 1 device do not have the bits")


def test_a_sign_and_a_nan_are_differences() -> None:
    changed = small_outcome()
    changed.weights["b"][0, 0] = -0.0
    assert proof.compare(changed, small_outcome(), "").differing == 1
    changed.losses[0] = math.nan
    found = proof.compare(changed, small_outcome(), "")
    assert (found.differing, found.where) == (2, "the losses")
    assert math.isnan(found.largest)
    del changed.masters["b"]
    with pytest.raises(ValueError, match=r"^\[demo\] the two models have different parameters"):
        proof.compare(changed, small_outcome(), "")


def test_plain_loop_is_refused_below_what_it_needs_and_only_there() -> None:
    layers, batches, options = proof_case()
    _, needed_bytes = proof.measured_plain_steps(layers, batches, options, torch.device("cpu"))
    assert needed_bytes > sum(training_bytes(layers).values())

    stages = set()
    for share in (0.1, 0.4, 0.6, 0.95):
        pool = roundpipe.devices(f"virtual:4,memory={int(needed_bytes * share)}B")
        room = proof.try_on_one_device(layers, batches, options, pool, needed_bytes)
        assert room.is_refused
        assert room.message.startswith("[virtual:0] out of memory: ")
        assert room.limit_bytes == int(needed_bytes * share)
        assert f"and was refused at {room.limit_bytes / 2**20:.1f} MiB a device" in fits(room, 1).line
        stages.add(room.stage)
        # What was refused leaves nothing behind.
        report = roundpipe.devices().memory_report()
        assert len(report) == 1
        assert report[0]["current_bytes"] < 2**20
    assert stages == {WEIGHTS, GRADIENTS, OPTIMIZER}

    pool = roundpipe.devices(f"virtual:4,memory={int(needed_bytes * 1.05)}B")
    room = proof.try_on_one_device(layers, batches, options, pool, needed_bytes)
    assert not room.is_refused
    assert "fits as well" in fits(room, 1).line

    room = proof.try_on_one_device(layers, batches, options, roundpipe.devices("virtual:2"), needed_bytes)
    assert (room.limit_bytes, room.is_refused) == (0, False)
    assert "no limit" in fits(room, 1).line


# --- training ---


def test_microbatch_losses_add_up_to_the_mean_over_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 5, 11, generator=generator, dtype=torch.float32)
    labels = torch.randint(11, (7, 5), generator=generator)
    labels[0, :4] = IGNORED
    labels[6, 1:] = IGNORED
    count = Batch(labels, labels).token_count
    assert count == 27
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    for parts in (1, 2, 3, 7):
        pieces = zip(logits.tensor_split(parts), labels.tensor_split(parts), strict=True)
        total = sum(float(next_token_loss(piece, (label, count))) for piece, label in pieces)
        assert total == pytest.approx(float(expected), rel=1e-6)


def test_batches_follow_the_seed_and_labels_follow_the_tokens() -> None:
    text = torch.arange(1000)
    options = DemoOptions(batch_size=4, sequence_length=16, seed=3)
    batches, again = RandomBatches(text, options), RandomBatches(text, options)
    first, second = next(batches), next(batches)
    assert torch.equal(first.tokens, next(again).tokens)
    assert not torch.equal(first.tokens, second.tokens)
    assert first.tokens.shape == (4, 16)
    assert torch.equal(first.labels, first.tokens + 1)
    other = next(RandomBatches(text, DemoOptions(batch_size=4, sequence_length=16, seed=4)))
    assert not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize("length", [17, 18, 400, 5000])
def test_held_out_rows_do_not_overlap(length: int) -> None:
    options = DemoOptions(batch_size=4, sequence_length=16, evaluation_batches=3)
    batches = held_out_batches(torch.arange(length), options)
    seen = torch.cat([batch.tokens.flatten() for batch in batches])
    assert len(seen) == len(seen.unique()) == min(12, (length - 1) // 16) * 16


def test_learning_rate_rises_then_falls() -> None:
    options = DemoOptions(steps=100, warmup_share=0.1)
    factors = [learning_rate_factor(step, options) for step in range(100)]
    assert max(factors) == factors[9] == 1.0
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)
    assert learning_rate_factor(0, DemoOptions(steps=1)) == 1.0


@pytest.mark.parametrize(
    "arguments", [{"steps": 0}, {"batch_size": -1}, {"sequence_length": 0}, {"seed": -1}, {"dtype": "float8"}]
)
def test_options_refuse_nonsense(arguments: dict[str, int | str]) -> None:
    with pytest.raises(ValueError, match=r"^\[demo\] --[a-z-]+ is .*expected"):
        DemoOptions(**arguments)  # type: ignore[arg-type]


def test_a_requested_precision_is_not_measured() -> None:
    choice = choose_precision("bfloat16", torch.device("cpu"))
    assert choice.dtype == torch.bfloat16
    assert math.isnan(choice.float32_gflops)


class CountingUp:
    """Predicts the number after each token, one token in every row left wrong."""

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        following = tokens + 1
        following[:, -1] = 0
        return torch.nn.functional.one_hot(following, 50).float() * 20

    def synchronize(self) -> None:
        pass


def test_held_out_scores_are_shares_of_the_tokens_that_count() -> None:
    tokens = torch.arange(24).view(3, 8)
    labels = tokens + 1
    labels[0, :2] = IGNORED
    batches = [Batch(tokens[:2], labels[:2]), Batch(tokens[2:], labels[2:])]
    loss, accuracy = held_out_scores(CountingUp(), batches)  # type: ignore[arg-type]
    assert accuracy == pytest.approx(19 / 22)
    assert loss == pytest.approx(3 * 20 / 22, abs=1e-5)


def test_guessing_is_counted_on_held_out_labels() -> None:
    text = torch.tensor([0, 1, 1, 1, 2, 2])
    labels = torch.tensor([[1, 1, 2, IGNORED], [0, 3, 1, 1]])
    found = guess(text, [Batch(labels, labels)], 4)
    assert found.uniform_loss == pytest.approx(math.log(4))
    assert found.uniform_accuracy == 0.25
    assert found.most_frequent_accuracy == pytest.approx(4 / 7)
    expected = -(4 * math.log(4 / 10) + math.log(3 / 10) + math.log(2 / 10) + math.log(1 / 10)) / 7
    assert found.frequency_loss == pytest.approx(expected)


def test_only_runs_whose_settings_are_known_are_judged() -> None:
    assert DemoOptions(seed=3, dtype="float32").is_judged
    assert replace(FULL, seed=3).is_judged
    assert FULL.steps > DemoOptions().steps
    assert not replace(FULL, steps=DemoOptions().steps).is_judged
    assert not DemoOptions(sequence_length=64).is_judged


@pytest.mark.parametrize(
    ("loss", "accuracy", "options", "holds"),
    [
        (4.5, 0.2, DemoOptions(), True),
        (4.7, 0.2, DemoOptions(), False),
        (4.5, 0.02, DemoOptions(), False),
        (math.nan, 0.2, DemoOptions(), False),
        (4.7, 0.2, DemoOptions(steps=3), True),
    ],
)
def test_a_run_that_has_not_learnt_says_so(loss: float, accuracy: float, options: DemoOptions, holds: bool) -> None:
    guessing = Guessing(math.log(2048), 1 / 2048, 5.9, 0.03)
    first, last = EvaluationRecord(0, 7.7, 0.0, 0, 0.0), EvaluationRecord(options.steps, loss, accuracy, 9, 1.0)
    verdict = learns(first, last, guessing, options)
    assert ("LEARNS  no: " not in verdict.line) == (not verdict.complaint) == holds
    assert f"next token right {accuracy:.1%} (guessing 3.0%)" in verdict.line


# --- records ---


def test_metrics_are_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    with MetricsWriter(path) as metrics:
        metrics.write("step", {"step": 1, "loss": 7.5})
        metrics.write("step", {"step": 2, "loss": float("nan")})
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"kind": "step", "step": 1, "loss": 7.5}, {"kind": "step", "step": 2, "loss": None}]
    with pytest.raises(FileExistsError):
        MetricsWriter(path)


def test_folder_of_a_previous_run_is_refused(tmp_path: Path) -> None:
    folder = prepare_folder(tmp_path / "a" / "b")
    assert prepare_folder(folder) == folder
    (folder / METRICS_FILE).touch()
    with pytest.raises(ValueError, match=r"^\[demo\] .* previous run; expected"):
        prepare_folder(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^\[demo\] cannot create"):
        prepare_folder(tmp_path / "file" / "sub")


def test_reporter_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with MetricsWriter(tmp_path / METRICS_FILE) as metrics:
        reporter = RunReporter(metrics, Console(force_terminal=False), steps=2)
        with reporter:
            reporter.on_evaluation(EvaluationRecord(0, 7.6, 0.05, 0, 0.0))
            for step in (1, 2):
                reporter.on_step(StepRecord(step, 7.5, 1e-3, 10 * step, 5.0, 2.0 * step))
    printed = capsys.readouterr().out
    assert "step 2/2  loss 7.500  5 tokens/s  0 s left" in printed
    assert "after 0 steps: held-out loss 7.600 nats per token, next token right 5.0%" in printed
    kinds = [json.loads(line)["kind"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert kinds == ["evaluation", "step", "step"]

    guessing = Guessing(7.6, 1 / 2048, 6.0, 0.02)
    draw_curve(tmp_path / "loss.png", reporter.step_records, reporter.evaluation_records, guessing, 4.6)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


# --- the command ---


def test_help_and_version(tmp_path: Path) -> None:
    listing = run_command("--help", cwd=tmp_path)
    assert listing.returncode == 0
    assert "demo" in listing.stdout
    assert run_command("--version", cwd=tmp_path).stdout.startswith("roundpipe ")


def test_command_does_not_import_torch_for_help() -> None:
    # The package's own __init__ is left out: only what the command line adds is looked at.
    code = (
        "import sys, types; package = types.ModuleType('roundpipe'); "
        f"package.__path__ = [{str(PACKAGE_PARENT / 'roundpipe')!r}]; sys.modules['roundpipe'] = package; "
        "import roundpipe.cli; print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--dtype", "int8"], ["--steps", "many"]])
def test_bad_arguments_exit_with_two_and_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    result = run_command("demo", *arguments, "--out", "run", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / METRICS_FILE).exists()


def test_unknown_devices_are_a_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^\[devices\] .*no such device"):
        session.run_demo(DemoOptions(), "no such device", tmp_path / "run")
    assert not (tmp_path / "run" / METRICS_FILE).exists()


SHORT = ("--steps", "3", "--batch-size", "5", "--sequence-length", "32")


def records_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


def test_three_steps_through_the_pipeline(tmp_path: Path) -> None:
    result = run_command("demo", *SHORT, "--out", "run", "--devices", "virtual:2,memory=48MiB", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("RoundPipe demo: ")
    assert any("one device that may hold 48.0 MiB: refused in " in line for line in lines)
    for devices in ("1 device", "4 devices"):
        assert any(f"on {devices}: equal, all " in line for line in lines)
    verdict = [line.split()[0] for line in lines if line.startswith(("FITS ", "EXACT ", "LEARNS "))]
    assert verdict == ["FITS", "EXACT", "LEARNS"]
    assert not any(" no: " in line for line in lines)
    assert "train --model run/model --data run/chat.jsonl --out run/chat-model --length 32" in result.stdout
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()
    assert len((tmp_path / "run" / "chat.jsonl").read_text().splitlines()) > 100

    records = records_of(tmp_path / "run")
    kinds = [record["kind"] for record in records]
    assert kinds[:5] == ["run", "room", "comparison", "comparison", "guessing"]
    assert records[0]["devices"] == "virtual:2,memory=48.00MiB"
    assert records[1]["refused"] is True
    assert records[1]["needed_bytes"] > records[1]["limit_bytes"] == 48 * 2**20
    assert [record["exact"] for record in records[2:4]] == [True, True]
    steps = [record for record in records if record["kind"] == "step"]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["tokens"] for step in steps] == [160, 320, 480]
    assert set(steps[0]) == {"kind", "step", "loss", "lr", "tokens", "tokens_per_s", "elapsed_s"}
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert (evaluations[0]["step"], evaluations[-1]["step"]) == (0, 3)
    assert evaluations[0]["held_out_loss"] == pytest.approx(math.log(records[0]["vocabulary"]), abs=0.3)
    assert 0 <= evaluations[0]["held_out_accuracy"] < 0.02
    assert (tmp_path / "run" / "loss.png").exists()


def test_a_bit_that_differs_ends_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_one_bit_changed(*arguments: Any, **named: Any) -> Outcome:
        outcome = plain_steps(*arguments, **named)
        next(iter(outcome.weights.values())).view(torch.int16).flatten()[7] ^= 1
        return outcome

    monkeypatch.setattr(proof, "plain_steps", with_one_bit_changed)
    options = DemoOptions(steps=1, batch_size=2, sequence_length=16, evaluation_batches=1, corpus_bytes=1_200_000)
    folder = tmp_path / "run"
    assert session.run_demo(options, "virtual:2", folder) == 1
    printed = capsys.readouterr()
    assert "on 1 device: NOT equal: 1 of " in printed.out
    assert "EXACT   no: on 1 device, 1 of " in printed.out
    assert "FITS    not shown, as these devices have no limit of their own" in printed.out
    assert "[demo] three steps on 1 device do not have the bits of the loop written by hand" in printed.err
    records = records_of(folder)
    assert [record["exact"] for record in records if record["kind"] == "comparison"] == [False, False]

    with pytest.raises(ValueError, match=r"^\[demo\] .*run holds the metrics.jsonl of a previous run"):
        session.run_demo(options, "virtual:2", folder)


RESUMED = DemoOptions(
    steps=8,
    batch_size=2,
    sequence_length=16,
    dtype="bfloat16",
    synchronous_share=0.25,
    evaluations=3,
    evaluation_batches=1,
    corpus_bytes=1_200_000,
)


@pytest.fixture
def without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    room = proof.Room(limit_bytes=0, needed_bytes=1, stage="", message="")
    monkeypatch.setattr(session, "_prove", lambda *_: (room, []))


def last_records(folder: Path) -> dict[tuple[str, int], Any]:
    """What was last written of each step and evaluation, without times."""
    found = {}
    for record in records_of(folder):
        if record["kind"] in ("step", "evaluation"):
            values = {name: value for name, value in record.items() if name not in ("tokens_per_s", "elapsed_s")}
            found[record["kind"], record["step"]] = values
    return found


@pytest.mark.long
@pytest.mark.parametrize("stops", ["at once", "after its step"])
def test_a_resumed_run_is_the_same_run(
    stops: str,
    tmp_path: Path,
    without_proof: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    assert session.run_demo(RESUMED, "virtual:2", tmp_path / "whole") == 0
    on_step = RunReporter.on_step

    def interrupted(reporter: RunReporter, record: StepRecord) -> None:
        on_step(reporter, record)
        if record.step == 6 and stops == "at once":
            raise KeyboardInterrupt
        reporter.stop_requested |= record.step == 4 and stops == "after its step"

    with monkeypatch.context() as patch:
        patch.setattr(RunReporter, "on_step", interrupted)
        assert session.run_demo(RESUMED, "virtual:2", folder, save_every=3) == 130
    saved = 3 if stops == "at once" else 5  # a step is submitted before the loss of the one before is read
    with (folder / METRICS_FILE).open("a") as metrics:
        metrics.write('{"kind": "st')  # what a crash may leave
    capsys.readouterr()
    assert session.run_demo(replace(RESUMED, dtype="auto"), "virtual:3", folder, save_every=3, resume=True) == 0
    printed = capsys.readouterr()
    assert f"resumed: {saved} steps were made before" in printed.out
    assert ("steps 4 to 5 were completed before the run ended" in printed.err) == (stops == "at once")
    assert "does not reproduce" not in printed.err
    assert last_records(folder) == last_records(tmp_path / "whole")
    assert roundpipe.latest(folder / "checkpoints") is not None

    with pytest.raises(ValueError, match=r"^\[demo\] seed is 1, and 0 in the run"):
        session.run_demo(replace(RESUMED, seed=1), "virtual:2", folder, resume=True)
    with pytest.raises(ValueError, match=r"^\[demo\] --resume is given without --out"):
        session.run_demo(RESUMED, "virtual:2", None, resume=True)
    with pytest.raises(ValueError, match=r"^\[demo\] --save-every is 0"):
        session.run_demo(RESUMED, "virtual:2", None, save_every=0)


@pytest.mark.long
def test_interrupt_during_the_proof_is_clean(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "roundpipe.cli", "demo", *SHORT, "--devices", "virtual:2,memory=48MiB"],
        cwd=tmp_path,
        env=command_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("proof: the same steps with RoundPipe") for line in process.stdout)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=300)
    assert process.returncode == 130, out + error
    assert error.strip() == "roundpipe: interrupted"


def test_interrupt_that_a_package_turns_into_an_error_is_one() -> None:
    before = signal.getsignal(signal.SIGINT)

    def raise_as_a_package_does() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            raise ModuleNotFoundError("cannot import") from error

    with pytest.raises(KeyboardInterrupt), _imports_interrupted():
        raise_as_a_package_does()
    with pytest.raises(ModuleNotFoundError, match="really not there"), _imports_interrupted():
        raise ModuleNotFoundError("really not there")
    assert signal.getsignal(signal.SIGINT) is before


def test_command_that_goes_on_is_there(tmp_path: Path) -> None:
    for folder in (tmp_path, Path(__file__).parents[3]):
        command = shlex.split(going_on(folder, tmp_path / "model", tmp_path / "chat.jsonl", 128).splitlines()[1])
        program = command[: command.index("train")]
        found = subprocess.run([*program, "--version"], cwd=folder, env=command_environment(), capture_output=True)
        assert found.returncode == 0
        assert command[command.index("--model") + 1] == str(tmp_path / "model")


def test_conversations_are_about_functions_with_docstrings(tmp_path: Path) -> None:
    documented = 'def add(a, b):\n    """Adds\n    two numbers. More words.\n\n    Details."""\n\n\n'
    text = documented + "def silent():\n    pass\n"
    files = [SourceFile("pkg/mod.py", text), SourceFile("broken.py", "def (")]
    write_conversations(tmp_path / "chat.jsonl", files)
    (line,) = (tmp_path / "chat.jsonl").read_text().splitlines()
    question, answer = json.loads(line)["messages"]
    assert question == {"role": "user", "content": "What does add in pkg.mod do?"}
    assert answer == {"role": "assistant", "content": "Adds two numbers."}


def test_the_saved_model_is_one_that_transformers_loads(small_corpus: Corpus, tmp_path: Path) -> None:
    tokenizer = train_tokenizer((file.text for file in small_corpus.held_out), 400)
    llama = build_llama(400, 32, seed=0, dtype=torch.float32)
    save_model(tmp_path, llama, tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = AutoTokenizer.from_pretrained(tmp_path)("def f(x):", return_tensors="pt")["input_ids"]
    assert tokens.tolist()[0] == tokenizer.encode("def f(x):").ids
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, llama.eval()(tokens).logits)
