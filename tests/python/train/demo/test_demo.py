"""`roundpipe demo`: its text, tokenizer, model, proofs and verdicts, and a short run of the whole command."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import roundpipe
from interrupted_output import InterruptedAt
from roundpipe.checkpoints.runs.lines import read_lines
from roundpipe.data.samples import IGNORED
from roundpipe.train.demo import corpus as corpus_module
from roundpipe.train.demo import proof, session
from roundpipe.train.demo.command import _imports_interrupted
from roundpipe.train.demo.corpus import SourceFile, load_corpus, write_conversations
from roundpipe.train.demo.next_steps import going_on
from roundpipe.train.demo.plain_loop import GRADIENTS, OPTIMIZER, WEIGHTS, Outcome, plain_steps
from roundpipe.train.demo.preset import STEPS, demo_config, is_judged
from roundpipe.train.demo.untrained import build_llama, save_model, train_tokenizer
from roundpipe.train.demo.verdict import Guessing, exact, fits, guess, learns, right_share
from sweeps import mostly_long

pytestmark = pytest.mark.usefixtures("one_torch_thread")

PACKAGE_PARENT = Path(corpus_module.__file__).parents[3]


@pytest.fixture(scope="module")
def small_corpus() -> list[SourceFile]:
    return load_corpus(1_200_000)


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


def test_corpus_is_the_same_every_time_and_keeps_to_its_limit(small_corpus: list[SourceFile]) -> None:
    assert load_corpus(1_200_000) == small_corpus
    assert 900_000 < sum(len(file.text.encode()) for file in small_corpus) <= 1_200_000


def test_corpus_skips_tests_and_other_packages(small_corpus: list[SourceFile]) -> None:
    for file in small_corpus:
        assert not set(file.path.split("/")[:-1]) & corpus_module.SKIPPED_FOLDERS


def test_corpus_does_not_depend_on_where_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "LEAST_BYTES", 1)
    for root in (tmp_path / "a", tmp_path / "b" / "c"):
        (root / "test").mkdir(parents=True)
        for number in range(60):
            (root / f"file{number}.py").write_text(f"value = {number}\n")
        (root / "broken.py").write_bytes(b"\xff\xfe\x00")
        (root / "empty.py").write_text("")
        (root / "test" / "test_file.py").write_text("skipped = True\n")
    first = load_corpus(10_000, tmp_path / "a")
    assert first == load_corpus(10_000, tmp_path / "b" / "c")
    assert len(first) == 60


def test_corpus_without_sources_is_a_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^\[demo.corpus\] found 0 bytes"):
        load_corpus(10_000, tmp_path)


def test_tokenizer_survives_a_round_trip(small_corpus: list[SourceFile]) -> None:
    texts = [file.text for file in small_corpus[1:]]
    tokenizer = train_tokenizer(texts, 512)
    assert tokenizer.get_vocab_size() == 512
    for text in ("def f(x):\n\treturn x  # grüße, 世界 \U0001f600\r\n", " \n ", small_corpus[0].text):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert train_tokenizer(texts, 512).to_str() == tokenizer.to_str()


def test_conversations_are_about_functions_with_docstrings(tmp_path: Path) -> None:
    documented = 'def add(a, b):\n    """Adds\n    two numbers. More words.\n\n    Details."""\n\n\n'
    text = documented + "def silent():\n    pass\n"
    files = [SourceFile("pkg/mod.py", text), SourceFile("broken.py", "def (")]
    write_conversations(tmp_path / "chat.jsonl", files)
    (line,) = (tmp_path / "chat.jsonl").read_text().splitlines()
    question, answer = json.loads(line)["messages"]
    assert question == {"role": "user", "content": "What does add in pkg.mod do?"}
    assert answer == {"role": "assistant", "content": "Adds two numbers."}


# --- model ---


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


def test_default_model_has_about_five_million_parameters() -> None:
    llama = build_llama(2048, 128, seed=0, dtype=torch.float32)
    assert 4_500_000 < sum(parameter.numel() for parameter in llama.parameters()) < 5_500_000


def test_the_saved_model_is_one_that_transformers_loads(small_corpus: list[SourceFile], tmp_path: Path) -> None:
    tokenizer = train_tokenizer((file.text for file in small_corpus[:4]), 400)
    llama = build_llama(400, 32, seed=0, dtype=torch.float32)
    save_model(tmp_path / "model", llama, tokenizer)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")("def f(x):", return_tensors="pt")["input_ids"]
    assert tokens.tolist()[0] == tokenizer.encode("def f(x):").ids
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, llama.eval()(tokens).logits)


# --- the proofs ---


RULE = {"lr": 3e-4, "betas": (0.8, 0.95), "weight_decay": 0.1}


def proof_case(dtype: torch.dtype = torch.float32) -> tuple[LlamaForCausalLM, list[torch.Tensor]]:
    """The demo's model with a small vocabulary, and three batches of two short rows."""
    tokens = torch.randint(300, (3, 2, 16), generator=torch.Generator().manual_seed(0))
    return build_llama(300, 16, seed=1, dtype=dtype), list(tokens)


@pytest.mark.parametrize("dtype", mostly_long([torch.float32, torch.bfloat16], torch.bfloat16))
def test_pipeline_has_the_bits_of_the_loop_written_by_hand(dtype: torch.dtype) -> None:
    llama, batches = proof_case(dtype)
    before = [parameter.detach().clone() for parameter in llama.parameters()]
    pool = roundpipe.devices("virtual:2,memory=48MiB")
    expected = plain_steps(llama, batches, RULE, torch.device("cpu"))
    assert len(batches) == len(expected.losses) == 3
    assert len(expected.masters) == (0 if dtype == torch.float32 else len(before))
    count = sum(parameter.numel() for parameter in before)
    for devices in proof.DEVICE_COUNTS:
        found = proof.compare_with_ours(llama, batches, RULE, pool, devices, expected)
        assert found.is_exact, found
        assert len(roundpipe.devices()) == devices
        assert found.numbers == 3 + count * (1 if dtype == torch.float32 else 2)
    for (name, parameter), initial in zip(llama.named_parameters(), before, strict=True):
        assert torch.equal(parameter, initial)
        trained = expected.weights if dtype == torch.float32 else expected.masters
        assert not torch.equal(trained[name], initial.float())


def test_plain_loop_is_what_torch_does_in_float32() -> None:
    llama, batches = proof_case()
    found = plain_steps(llama, batches, RULE, torch.device("cpu"))
    optimizer = torch.optim.AdamW(llama.parameters(), **RULE)  # type: ignore[arg-type]
    for step, batch in enumerate(batches):
        loss = llama(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # One batch instead of microbatches adds up in another order, which Adam's first steps can magnify.
        assert float(found.losses[step]) == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in llama.named_parameters():
        torch.testing.assert_close(found.weights[name], parameter.detach(), rtol=0, atol=3e-4)


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


METRICS = [{"step": 0, "evaluation_loss": 7.7}, {"step": 1, "loss": 7.5, "device_bytes": 1}]


def test_plain_loop_is_refused_below_what_it_needs_and_only_there() -> None:
    llama, batches = proof_case()
    _, needed_bytes = proof.measured_plain_steps(llama, batches, RULE, torch.device("cpu"))
    assert needed_bytes > sum(proof.training_bytes(llama).values())

    stages = set()
    for share in (0.1, 0.4, 0.6, 0.95):
        pool = roundpipe.devices(f"virtual:4,memory={int(needed_bytes * share)}B")
        room = proof.try_on_one_device(llama, batches, RULE, pool, needed_bytes)
        assert room.is_refused
        assert room.message.startswith("[virtual:0] out of memory: ")
        assert room.limit_bytes == int(needed_bytes * share)
        assert f"and was refused at {room.limit_bytes / 2**20:.1f} MiB a device" in fits(room, METRICS).line
        stages.add(room.stage)
        # What was refused leaves nothing behind.
        report = roundpipe.devices().memory_report()
        assert len(report) == 1
        assert report[0]["current_bytes"] < 2**20
    assert stages == {WEIGHTS, GRADIENTS, OPTIMIZER}

    pool = roundpipe.devices(f"virtual:4,memory={int(needed_bytes * 1.05)}B")
    room = proof.try_on_one_device(llama, batches, RULE, pool, needed_bytes)
    assert not room.is_refused
    assert "fits as well" in fits(room, METRICS).line

    room = proof.try_on_one_device(llama, batches, RULE, roundpipe.devices("virtual:2"), needed_bytes)
    assert (room.limit_bytes, room.is_refused) == (0, False)
    assert "no limit" in fits(room, METRICS).line


# --- the verdict ---


@dataclass(frozen=True)
class Logits:
    logits: torch.Tensor


class CountingUp:
    """Predicts the number after each token, one token in every row left wrong."""

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        following = input_ids + 1
        following[:, -2] = 0
        return Logits(torch.nn.functional.one_hot(following, 50).float())


def rows(*labels: list[int]) -> dict[str, torch.Tensor]:
    """A batch of padded rows; the first label of each is one that nothing predicts."""
    padded = torch.tensor([[0, *row, *[IGNORED] * (max(map(len, labels)) - len(row))] for row in labels])
    return {"input_ids": padded.clamp(min=0), "attention_mask": (padded != IGNORED).long(), "labels": padded}


def test_the_share_of_right_tokens_is_of_those_that_count() -> None:
    batches = [rows([1, 2, 3, 4], [1, 2]), rows([1, 5, 3])]
    # The last prediction of each row is wrong, where there is no padding behind it.
    assert right_share(CountingUp(), batches) == pytest.approx((3 + 2 + 1) / 9)


def test_guessing_is_counted_on_held_out_tokens() -> None:
    found = guess([rows([0, 1, 1], [1, 2, 2])], [rows([1, 1, 2], [0, 3, 1, 1])], 4)
    assert found.uniform_loss == pytest.approx(math.log(4))
    assert found.most_frequent_share == pytest.approx(4 / 7)
    expected = -(4 * math.log(4 / 10) + math.log(3 / 10) + math.log(2 / 10) + math.log(1 / 10)) / 7
    assert found.frequency_loss == pytest.approx(expected)


def test_only_runs_whose_settings_are_known_are_judged(tmp_path: Path) -> None:
    assert is_judged(demo_config(tmp_path, seed=3, dtype="float32", devices="virtual:2"))
    assert is_judged(demo_config(tmp_path, full=True, seed=3))
    assert not is_judged(demo_config(tmp_path, steps=STEPS - 1))
    assert not is_judged(demo_config(tmp_path, learning_rate=2e-3))


@pytest.mark.parametrize(
    ("loss", "share", "is_judged", "holds"),
    [
        (4.5, 0.2, True, True),
        (4.7, 0.2, True, False),
        (4.5, 0.02, True, False),
        (None, 0.2, True, False),
        (4.7, 0.2, False, True),
    ],
)
def test_a_run_that_has_not_learnt_says_so(loss: float | None, share: float, is_judged: bool, holds: bool) -> None:
    verdict = learns(
        [*METRICS, {"step": 2, "evaluation_loss": loss}], share, Guessing(math.log(2048), 5.9, 0.03), is_judged
    )
    assert ("LEARNS  no: " not in verdict.line) == (not verdict.complaint) == holds
    assert "held-out loss 7.70 -> " in verdict.line
    assert f"next token right {share:.1%} (guessing 3.0%)" in verdict.line


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


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments", mostly_long([["--steps", "0"], ["--dtype", "int8"], ["--steps", "many"]], ["--steps", "0"])
)
def test_bad_arguments_exit_with_two_and_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    result = run_command("demo", *arguments, "--out", "run", cwd=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_refusals_come_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^\[devices\] .*no such device"):
        session.run_demo(tmp_path / "run", False, False, {"devices": "no such device"})
    with pytest.raises(ValueError, match=r"^\[demo\] --resume is given without --out"):
        session.run_demo(None, False, True, {})
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"^\[train\] --out is .*, which is not empty"):
        session.run_demo(tmp_path / "run", False, False, {})


SHORT = ("--steps", "2")


def test_two_steps_through_the_pipeline(tmp_path: Path) -> None:
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
    assert "train --model run/model --data run/chat.jsonl --out run/chat-model --length 128" in result.stdout
    folder = tmp_path / "run"
    for name in ("model/tokenizer.json", "untrained/tokenizer.json", "text.jsonl", "report.html"):
        assert (folder / name).exists()
    assert len((folder / "chat.jsonl").read_text().splitlines()) > 100
    held_out = [line["evaluation_loss"] for line in read_lines(folder / "metrics.jsonl") if "evaluation_loss" in line]
    assert held_out[0] == pytest.approx(math.log(2048), abs=0.3)


# One file held out, so that evaluations are short.
SMALL: dict[str, Any] = {"steps": 1, "devices": "virtual:2", "held_out": 1.0, "samples": 0}


@pytest.fixture
def short_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "STEPS", 1)
    monkeypatch.setattr(proof, "ROWS", 1)


def test_a_bit_that_differs_ends_with_one(
    tmp_path: Path, short_proof: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_one_bit_changed(*arguments: Any, **named: Any) -> Outcome:
        outcome = plain_steps(*arguments, **named)
        next(iter(outcome.weights.values())).view(torch.int16).flatten()[7] ^= 1
        return outcome

    monkeypatch.setattr(proof, "plain_steps", with_one_bit_changed)
    assert session.run_demo(tmp_path / "run", False, False, SMALL) == 1
    printed = capsys.readouterr()
    assert "on 1 device: NOT equal: 1 of " in printed.out
    assert "EXACT   no: on 1 device, 1 of " in printed.out
    assert "FITS    not shown, as these devices have no limit of their own" in printed.out
    assert "[demo] three steps on 1 device do not have the bits of the loop written by hand" in printed.err


@pytest.mark.long
def test_a_stopped_run_goes_on_to_its_verdict(
    tmp_path: Path, short_proof: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, values = tmp_path / "run", {**SMALL, "steps": 4, "dtype": "bfloat16", "log_every": 1}
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", InterruptedAt("step 2/4"))
        assert session.run_demo(folder, False, False, values) == 130
        assert f"roundpipe demo --resume --out {folder}" in sys.stdout.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"^\[train\] --seed is 1, expected 0 as in the run"):
        session.run_demo(folder, False, True, {"seed": 1})
    assert session.run_demo(folder, False, True, {"devices": "virtual:3"}) == 0
    assert "LEARNS  held-out loss " in capsys.readouterr().out
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line] == [1, 2, 3, 4]


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
    for folder in (tmp_path, Path(__file__).parents[4]):
        command = shlex.split(going_on(folder, tmp_path / "model", tmp_path / "chat.jsonl", 128).splitlines()[1])
        program = command[: command.index("train")]
        found = subprocess.run([*program, "--version"], cwd=folder, env=command_environment(), capture_output=True)
        assert found.returncode == 0
        assert command[command.index("--model") + 1] == str(tmp_path / "model")
