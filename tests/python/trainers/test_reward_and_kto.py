"""TRL's trainers of rewards and of good and bad completions in the pipeline, against TRL's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from robustness import script_environment
from tiny_chat import model_folder, tiny_llama
from trainer_runs import SGD, agree, some_in_short

trl = pytest.importorskip("trl")

from roundpipe.huggingface import RoundPipeKTOTrainer, RoundPipeRewardTrainer  # noqa: E402  needs trl
from trl_runs import (  # noqa: E402
    goes_on,
    judged,
    lora,
    make,
    offline,  # noqa: F401  a fixture
    rewards,
    small_mixtral,
    small_scorer,
    trained,
    with_trained_adapter,
)

pytestmark = [
    pytest.mark.usefixtures("one_torch_thread", "offline"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(deprecated|adds a router loss)"),
]

REWARD = (trl.RewardTrainer, RoundPipeRewardTrainer)
KTO = (trl.KTOTrainer, RoundPipeKTOTrainer)
EVALUATED = {**SGD, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 2}


def with_margins() -> list[dict[str, Any]]:
    return [{**row, "margin": 0.1 * (index % 3)} for index, row in enumerate(rewards())]


REWARDS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "all weights": (small_scorer, rewards, dict, {}),
    "LoRA": (small_scorer, rewards, lambda: {"peft_config": lora("SEQ_CLS")}, {"gradient_accumulation_steps": 2}),
    "margins, centred": (small_scorer, with_margins, dict, {"center_rewards_coefficient": 0.01}),
    # Centred, since the bias of its head changes no difference of rewards.
    "Bert": (lambda: small_scorer("Bert"), rewards, dict, {"center_rewards_coefficient": 0.1}),
    "Qwen2": (lambda: small_scorer("Qwen2"), rewards, dict, {"gradient_accumulation_steps": 2}),
}


@pytest.mark.parametrize("case", some_in_short(REWARDS, {"LoRA"}))
def test_rewards(case: str, tmp_path: Path) -> None:
    model, rows, given, options = REWARDS[case]
    agree(trained(REWARD, trl.RewardConfig, tmp_path, model, rows(), given, **EVALUATED, **options))


@pytest.mark.long
def test_a_reward_model_by_its_name(tmp_path: Path) -> None:
    """A causal model gets a head, which is drawn from the seed of the arguments."""
    name = str(model_folder(tmp_path / "model"))
    agree(trained(REWARD, trl.RewardConfig, tmp_path, lambda: name, rewards(), dict, **EVALUATED))


@pytest.mark.long
@pytest.mark.parametrize("case", ["all weights", "LoRA"])
def test_training_on_rewards_goes_on(case: str, tmp_path: Path) -> None:
    model, rows, given, _ = REWARDS[case]
    goes_on(REWARD, trl.RewardConfig, tmp_path, model, rows(), given)


COMPLETIONS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "LoRA": (tiny_llama, lambda: {"peft_config": lora()}, {"gradient_accumulation_steps": 2}),
    "trained adapter": (with_trained_adapter, dict, {}),
    "all weights": (tiny_llama, lambda: {"ref_model": tiny_llama()}, {"desirable_weight": 1.5}),
    "without the KL": (tiny_llama, lambda: {"peft_config": lora()}, {"loss_type": "apo_zero_unpaired"}),
    "router loss": (small_mixtral, lambda: {"ref_model": small_mixtral()}, {"router_aux_loss_coef": 0.1}),
}


@pytest.mark.parametrize("case", some_in_short(COMPLETIONS, {"LoRA"}))
def test_completions(case: str, tmp_path: Path) -> None:
    model, given, options = COMPLETIONS[case]
    trainers = trained(KTO, trl.KTOConfig, tmp_path, model, judged(), given, **EVALUATED, **options)
    agree(trainers)
    assert (trainers[1].ref_model is None) == ("ref_model" not in given())


@pytest.mark.long
def test_completions_with_a_model_by_its_name(tmp_path: Path) -> None:
    """TRL loads the reference by that name once more."""
    name = str(model_folder(tmp_path / "model"))
    agree(trained(KTO, trl.KTOConfig, tmp_path, lambda: name, judged(), dict, **EVALUATED))


@pytest.mark.long
@pytest.mark.parametrize("case", ["LoRA", "trained adapter", "all weights"])
def test_training_on_completions_goes_on(case: str, tmp_path: Path) -> None:
    model, given, _ = COMPLETIONS[case]
    goes_on(KTO, trl.KTOConfig, tmp_path, model, judged(), given)


@pytest.mark.parametrize("name", ["sync_ref_model", "precompute_ref_log_probs", "activation_offloading"])
def test_what_has_no_meaning_for_completions_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^\[RoundPipeKTOTrainer\] {name}=True is refused"):
        make(RoundPipeKTOTrainer, trl.KTOConfig, tmp_path, tiny_llama(), judged(), {}, **{name: True})


def test_what_has_no_meaning_for_rewards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^\[RoundPipeRewardTrainer\] activation_offloading=True is refused"):
        make(
            RoundPipeRewardTrainer,
            trl.RewardConfig,
            tmp_path,
            small_scorer(),
            rewards(),
            {},
            activation_offloading=True,
        )


LAUNCHED = """
import sys
import trl
from pathlib import Path
from roundpipe.huggingface import RoundPipeRewardTrainer
from trl_runs import make, rewards, small_scorer

trainer = make(RoundPipeRewardTrainer, trl.RewardConfig, Path(sys.argv[1]), small_scorer(), rewards(), {}, max_steps=1)
trainer.train()
print("trained", trainer.state.global_step)
"""


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_launcher_may_start_one_process(processes: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = script_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*launcher, script, tmp_path], env=environment, capture_output=True, text=True)
    if processes == 1:
        assert "trained 1" in done.stdout, done.stderr
    else:
        assert done.returncode != 0
        assert "[RoundPipeRewardTrainer] the script was launched with 2 processes, expected one" in done.stderr
