"""Settings steer plain `vllm.LLM` as explicit edits steer `midstream.LLM`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import tiny
from support.engines import engine, generated, greedy, tokens

import midstream
from midstream import Scale, Steer
from midstream.errors import ConfigError

PROMPTS = [[9, 41, 7, 150, 66, 12], [3, 5, 8], list(range(20, 120))]
_DRAW = torch.Generator().manual_seed(12)
U, V = (torch.randn(tiny.HIDDEN, generator=_DRAW) * size for size in (3.0, 2.0))
GENERATED = {"op": "scale", "factor": 1.5, "layer": 1}
EDITS = [Steer(U, 0, 2.0), Steer(V, 1, 2.0), Scale(1.5, 1, phase="generated")]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("vectors") / "happy.safetensors"
    save_file({"resid_post.0": U, "resid_post.1": V}, file)
    return {
        "vectors": {"happy": str(file)},
        "steering": {"base": ["happy", 2.0], "generated": GENERATED},
    }


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, settings: dict[str, Any]) -> Iterator[Any]:
    """A plain vllm.LLM, made as a program makes it that knows nothing of midstream."""
    midstream.activate()  # as vLLM's plugins do in a process that begins with MIDSTREAM set
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIDSTREAM", json.dumps(settings))
        with engine(tiny_llama, plain=True, max_num_batched_tokens=64, block_size=32) as found:
            yield found


def numbers(outputs: list[Any]) -> list[Any]:
    """Tokens, and all log-probabilities, of outputs."""

    def of(table: Any) -> Any:
        return [each and {token: one.logprob for token, one in each.items()} for each in table]

    return [
        (generated(one), of(one.outputs[0].logprobs), of(one.prompt_logprobs)) for one in outputs
    ]


def test_a_plain_engine_gives_what_explicit_edits_give(plain: Any, llm: Any) -> None:
    params = greedy(5, logprobs=3, prompt_logprobs=2, detokenize=False)
    prompts = [tokens(prompt) for prompt in PROMPTS]
    for _ in range(2):  # the second from the prefix cache where vLLM allows that
        found = plain.generate(prompts, params, use_tqdm=False)
        explicit = llm.generate(prompts, params, edits=[EDITS] * 3, use_tqdm=False)
        assert numbers(found) == numbers(explicit)
    assert numbers(found) != numbers(llm.generate(prompts, params, use_tqdm=False))
    assert all(one.receipt.edited.applied == one.receipt.edited.expected for one in found)


def test_the_settings_change_no_hash_of_compiled_graphs(plain: Any, tiny_llama: Path) -> None:
    with engine(tiny_llama, midstream={}, max_num_batched_tokens=64, block_size=32) as unsteered:
        one, other = (each.llm_engine.vllm_config for each in (plain, unsteered))
        assert one.compute_hash() == other.compute_hash()
        assert not unsteered.steering


def test_wrong_settings_fail_at_the_start_and_are_named(tiny_llama: Path, tmp_path: Path) -> None:
    deep = tmp_path / "deep.safetensors"
    save_file({"99": U}, deep)
    for given, message in (
        ({"vectors": {"x": str(deep)}}, r"midstream.vectors.x: .*layer 99 is out of range"),
        ({"steering": {"base": "y"}}, r"midstream.steering.base: no vectors are registered as"),
    ):
        with pytest.raises(ConfigError, match=message), engine(tiny_llama, midstream=given):
            pass
