"""GRPO by TRL with a probe's score as reward, where TRL is installed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import engine
from support.tiny import HIDDEN

from midstream import Probe
from midstream.lab.rl import probe_reward

pytestmark = pytest.mark.engine
STEPS = 20


def test_the_reward_rises_and_each_step_samples_with_its_own_weights(
    talking_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    direction = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
    probe = Probe(direction, 0, name="kind", site="resid_pre", positions="generated")
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=STEPS, learning_rate=5e-3, beta=0.0, use_cpu=True,
        per_device_train_batch_size=32, num_generations=32, max_completion_length=8,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, bf16=False,
        lr_scheduler_type="constant", model_init_kwargs={"dtype": "float32"}, seed=1,
        gradient_checkpointing=False,
    )  # fmt: skip
    versions: list[set[int]] = []
    with engine(talking_llama, midstream={"layers": [0], "sites": ["resid_pre"]}) as llm:
        reward = probe_reward(llm, probe)

        def noting(prompts: list[Any], trainer: Any) -> dict[str, Any]:
            fields = reward.rollout(prompts, trainer)
            versions.append(set(fields["weight_version"]))
            return fields

        trainer = trl.GRPOTrainer(
            model=str(talking_llama), reward_funcs=reward, rollout_func=noting, args=config,
            train_dataset=datasets.Dataset.from_dict({"prompt": ["How are you?"] * STEPS}),
        )  # fmt: skip
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert len(rewards) == STEPS
    # The spread of a direction's product with embeddings of 0.15 in each of 64 numbers is 1.2.
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 1
    assert versions == [{number} for number in range(1, STEPS + 1)]
