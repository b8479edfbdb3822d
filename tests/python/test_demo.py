"""`roundpipe demo`: its text, tokenizer, model, loss and records, and a short run of the whole command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roundpipe.demo import corpus as corpus_module
from roundpipe.demo.corpus import Corpus, load_corpus
from roundpipe.demo.model import as_layers, build_llama, continue_text, parameter_count, training_bytes
from roundpipe.demo.options import DemoOptions
from roundpipe.demo.precision import choose_precision
from roundpipe.demo.report import METRICS_FILE, MetricsWriter, RunReporter, draw_curve, prepare_folder
from roundpipe.demo.tokenizer import END_OF_FILE, encode_files, train_tokenizer
from roundpipe.demo.training import (
    IGNORED,
    Batch,
    EvaluationRecord,
    StepRecord,
    held_out_batches,
    learning_rate_factor,
    next_token_loss,
    random_batches,
)

PACKAGE_PARENT = Path(corpus_module.__file__).parents[2]


@pytest.fixture(scope="module")
def small_corpus() -> Corpus:
    return load_corpus(limit_bytes=1_200_000)


def run_command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        part for part in (environment.get("PYTHONPATH"), str(PACKAGE_PARENT)) if part
    )
    return subprocess.run(
        [sys.executable, "-m", "roundpipe.cli", *arguments],
        cwd=cwd,
        env=environment,
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


def test_continuation_with_a_cache_is_the_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = build_llama(300, 32, seed=1, dtype=torch.float32)
    prompt = torch.tensor([5, 6, 7])
    first = continue_text(llama, prompt, 8, seed=3)
    assert torch.equal(continue_text(llama, prompt, 8, seed=3), first)

    generator = torch.Generator().manual_seed(3)
    tokens = prompt
    for _ in range(8):
        probabilities = torch.softmax(llama(tokens.unsqueeze(0)).logits[0, -1] / 0.7, dim=-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1, generator=generator)])
    assert torch.equal(tokens[3:], first)


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
    batches, again = random_batches(text, options), random_batches(text, options)
    first, second = next(batches), next(batches)
    assert torch.equal(first.tokens, next(again).tokens)
    assert not torch.equal(first.tokens, second.tokens)
    assert first.tokens.shape == (4, 16)
    assert torch.equal(first.labels, first.tokens + 1)
    other = next(random_batches(text, DemoOptions(batch_size=4, sequence_length=16, seed=4)))
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
            reporter.on_evaluation(EvaluationRecord(0, 7.6, 0, 0.0))
            for step in (1, 2):
                reporter.on_step(StepRecord(step, 7.5, 1e-3, 10 * step, 5.0, 2.0 * step))
    assert "step 2/2  loss 7.500  5 tokens/s  0 s left" in capsys.readouterr().out
    kinds = [json.loads(line)["kind"] for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert kinds == ["evaluation", "step", "step"]

    draw_curve(tmp_path / "loss.png", reporter.step_records, reporter.evaluation_records, 7.6, 4.6)
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


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--dtype", "int8"], ["--steps", "many"], ["--devices", "no such device"]]
)
def test_bad_arguments_exit_with_two_and_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    result = run_command("demo", *arguments, "--out", "run", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / METRICS_FILE).exists()


def test_three_steps_through_the_pipeline(tmp_path: Path) -> None:
    arguments = ("demo", "--steps", "3", "--out", "run", "--batch-size", "5", "--sequence-length", "32")
    result = run_command(*arguments, "--devices", "virtual:2,memory=48MiB", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "each device may hold 48.0 MiB" in result.stdout
    assert "continuation after training" in result.stdout

    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS_FILE).read_text().splitlines()]
    assert [line["kind"] for line in lines].count("step") == 3
    assert lines[0]["kind"] == "run"
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line["tokens"] for line in steps] == [160, 320, 480]
    assert set(steps[0]) == {"kind", "step", "loss", "lr", "tokens", "tokens_per_s", "elapsed_s"}
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    assert (evaluations[0]["step"], evaluations[-1]["step"]) == (0, 3)
    assert evaluations[0]["held_out_loss"] == pytest.approx(math.log(lines[0]["vocabulary"]), abs=0.3)
    assert (tmp_path / "run" / "loss.png").exists()

    refused = run_command(*arguments, cwd=tmp_path)
    assert refused.returncode == 2
    assert "[demo] run holds the metrics.jsonl of a previous run" in refused.stderr
    assert "Traceback" not in refused.stderr
