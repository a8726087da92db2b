"""GRPO by TRL on SmolLM2 with the score of a probe as reward: whether it rises, and what it costs.

    python benchmarks/grpo.py [MODEL] [--steps 20] [--plain] [--full] [--json FILE]

The reward is read in the forward pass that samples. With --plain the same training runs on an
engine without midstream, and the reward is the share of the completion's characters that are
lower case. With --full every completion has --tokens tokens: steps of both take the same work, so
that runs in turn can be compared. Needs `pip install trl`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

QUESTION = "How was your day?"
WANTED = "I love this wonderful, happy, beautiful and joyful day."
OTHER = "The table lists the numbers of parts and the dates of delivery."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder; default: SmolLM2-135M-Instruct is made")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=12, help="most tokens of a completion")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument("--plain", action="store_true", help="without midstream")
    parser.add_argument("--full", action="store_true", help="no completion ends early")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = train(args)
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train; return the mean reward and the seconds of each step."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = args.model or smollm2()
    sampling = {"min_tokens": args.tokens} if args.full else {}
    started, reward = start(model, args.plain, sampling)

    def lower_case(completions: list[Any], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [sum(map(str.islower, text)) / max(1, len(text)) for text in texts]

    config = GRPOConfig(
        output_dir="/tmp/midstream-grpo",
        max_steps=args.steps,
        learning_rate=args.rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=args.generations,
        num_generations=args.generations,
        max_completion_length=args.tokens,
        temperature=1.0,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        seed=1,
    )
    conversation = [{"role": "user", "content": QUESTION}]
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=lower_case if args.plain else reward,
        rollout_func=started if args.plain else reward.rollout,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [conversation] * args.steps}),
    )
    seconds: list[float] = []
    step = trainer.training_step

    def timed(*given: Any, **named: Any) -> Any:
        began = time.perf_counter()
        out = step(*given, **named)
        seconds.append(time.perf_counter() - began)
        return out

    trainer.training_step = timed
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return {
        "model": Path(model).name,
        "midstream": not args.plain,
        "tokens": args.tokens if args.full else f"at most {args.tokens}",
        "rewards": [round(value, 3) for value in rewards],
        "first_5": round(statistics.mean(rewards[:5]), 3),
        "last_5": round(statistics.mean(rewards[-5:]), 3),
        "median_step_seconds": round(statistics.median(seconds), 2),
    }


def start(model: Any, plain: bool, sampling: dict[str, Any]) -> tuple[Any, Any]:
    """Return a rollout function without midstream, or a reward with one."""
    settings = {
        "dtype": "float32", "max_model_len": 256, "enforce_eager": True, "seed": 1,
        "gpu_memory_utilization": 0.3, "disable_log_stats": True,
    }  # fmt: skip
    if plain:
        from vllm import LLM

        return plain_rollout(LLM(str(model), **settings), sampling), None
    from midstream import LLM, Probe
    from midstream.lab.rl import Rollout, probe_reward

    llm = LLM(str(model), midstream={"layers": [20], "sites": ["resid_post"]}, **settings)
    direction = difference(llm)
    probe = Probe(direction, 20, name="cheerful", positions="generated")
    return None, probe_reward(Rollout(llm, sampling=sampling), probe, "mean")


def difference(llm: Any) -> Any:
    """Return the unit difference of the mean rows of two texts."""
    from midstream import Capture

    outputs = llm.generate(
        [WANTED, OTHER], capture=Capture([20], "resid_post", positions=slice(1, None)),
        use_tqdm=False,
    )  # fmt: skip
    wanted, other = (out.activations["resid_post", 20].float().mean(0) for out in outputs)
    return (wanted - other) / (wanted - other).norm()


def plain_rollout(llm: Any, sampling: dict[str, Any]) -> Any:
    """Return a rollout function on an engine of vLLM's, by the same steps as midstream's."""
    from vllm import SamplingParams

    from midstream.lab.rl.rollout import load_weights, sampling_of, token_ids

    loaded = [-1]

    def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
        if loaded[0] != trainer.state.global_step:
            load_weights(llm, trainer.accelerator.unwrap_model(trainer.model))
            llm.reset_prefix_cache()
            loaded[0] = trainer.state.global_step
        given = [token_ids(prompt, trainer.processing_class) for prompt in prompts]
        params = SamplingParams(**{**sampling_of(trainer.args), **sampling}, logprobs=0)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
        completions = [out.outputs[0] for out in outputs]
        return {
            "prompt_ids": given,
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "logprobs": [
                [row[token].logprob for row, token in zip(c.logprobs, c.token_ids, strict=True)]
                for c in completions
            ],
        }

    return rollout


def smollm2() -> Path:
    from midstream.lab.demo.model.smollm2 import make_smollm2

    return make_smollm2(Path.home() / ".cache" / "midstream" / "SmolLM2-135M-Instruct")


if __name__ == "__main__":
    main()
