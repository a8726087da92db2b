"""A fingerprint of generated tokens passes with the model that computed them, and with nothing
else.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.asking import ask
from support import tiny
from support.engines import engine, generated

from midstream import Capture, Steer
from midstream.errors import NothingSelectedError, SpecError
from midstream.lab.replay import Fingerprint, fingerprint, verify
from midstream.lab.replay.fingerprint import CAPTURE, judge

DRAW = np.random.default_rng(8)
PROMPT = DRAW.integers(3, tiny.VOCAB, 21).tolist()
TOKENS = 75  # in three batches of 32


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def found(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Any]:
    """An engine of either dtype, with chunks of 64 tokens."""
    settings = {"sites": ["resid_post", "final_norm"]}
    with engine(
        tiny_llama, dtype=request.param, midstream=settings, max_num_batched_tokens=64
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def output(found: Any) -> Any:
    return ask(found, PROMPT, TOKENS, capture=CAPTURE)


def test_the_honest_one_passes_also_as_json(found, output):
    proof = fingerprint(output)
    assert [len(batch) for batch in proof.indices] == [128, 128, 128]
    read = Fingerprint.parse(json.loads(json.dumps(proof.to_dict())))
    assert read == proof
    verdict = verify(found, PROMPT, generated(output), read)
    assert verdict.passed, verdict
    assert max(verdict.mean) < 2 if proof.dtype == "bfloat16" else max(verdict.mean) < 64


def test_its_values_are_the_largest_of_the_rows_by_numpy(output):
    proof = fingerprint(output)
    rows = output.activations["final_norm"].float().numpy()
    for number in range(3):
        flat = rows[32 * number : 32 * number + 32].ravel()
        largest = np.sort(np.abs(flat))[-128:]
        chosen = flat[list(proof.indices[number])]
        np.testing.assert_array_equal(np.sort(np.abs(chosen)), largest)
        bits = np.array(proof.values[number], np.uint32)
        bits = bits << 16 if proof.dtype == "bfloat16" else bits
        np.testing.assert_array_equal(bits.view(np.float32), chosen)


def forged(proof: Fingerprint, prompt: list[int], tokens: list[int]) -> Fingerprint:
    """The same values, under the digest of other tokens."""
    digest = hashlib.sha256(np.asarray([*prompt, *tokens], "<i8").tobytes()).hexdigest()
    return replace(proof, sha256=digest)


def test_other_tokens_or_another_prompt_are_told_apart(found, output):
    proof, tokens = fingerprint(output), generated(output)
    altered = [*tokens[:40], (tokens[40] + 1) % tiny.VOCAB, *tokens[41:]]
    another = [*tokens[:32], *DRAW.integers(3, tiny.VOCAB, 32).tolist(), *tokens[64:]]
    prompt = [*PROMPT[:-3], 4, 5, 6]
    for own, claimed in ((PROMPT, altered), (prompt, tokens), (PROMPT, tokens[:-1])):
        assert verify(found, own, claimed, proof).reason == "it is of other tokens"
    verdict = verify(found, PROMPT, another, forged(proof, PROMPT, another))
    assert "of an honest one" in verdict.reason
    assert verdict.exponents[0] < verdict.exponents[1]


def test_another_model_and_an_edit_are_told_apart(found, output, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = generated(output)
    vector = np.ones(tiny.HIDDEN, np.float32) / 2
    edited = ask(found, PROMPT, TOKENS, capture=CAPTURE, edits=Steer(vector, 1))
    own = generated(edited)
    assert not verify(found, PROMPT, own, fingerprint(edited)).passed
    assert verify(found, PROMPT, own, fingerprint(edited), edits=Steer(vector, 1)).passed
    proof = fingerprint(output)
    # Weights that differ by a hundredth, in the same dtype.
    model = LlamaForCausalLM.from_pretrained(found.model_config.model, dtype=torch.float32)
    assert isinstance(model.config, LlamaConfig)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.05 * torch.randn_like(weight))
    dtype = getattr(torch, proof.dtype)
    with torch.no_grad():
        hidden = model.to(dtype).model(torch.tensor([[*PROMPT, *tokens[:-1]]])).last_hidden_state
    assert not judge(hidden[0, len(PROMPT) - 1 :], proof).passed


def test_transformers_computes_the_same_fingerprint_and_a_lower_precision_is_told_apart(
    found, output
):
    from transformers import LlamaForCausalLM

    proof, tokens = fingerprint(output), generated(output)
    path, first = found.model_config.model, len(PROMPT) - 1
    rows = {}
    for name in ("float32", "bfloat16"):
        model = LlamaForCausalLM.from_pretrained(path, dtype=getattr(torch, name))
        with torch.no_grad():
            hidden = model.model(torch.tensor([[*PROMPT, *tokens[:-1]]])).last_hidden_state
        rows[name] = hidden[0, first:]
    assert judge(rows[proof.dtype], proof).passed
    if proof.dtype == "float32":
        verdict = judge(rows["bfloat16"].float(), proof)
        assert "mantissas" in verdict.reason or "exponents" in verdict.reason


def test_what_is_no_fingerprint_of_these_tokens_is_refused(found, output):
    proof, tokens = fingerprint(output), generated(output)
    other = "bfloat16" if proof.dtype == "float32" else "float32"
    for changes, said in (
        ({"dtype": "float16"}, "dtype: expected bfloat16 or float32, got .?float16"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 300}, "indices: expected a list of 10 lists"),
        ({"values": [[1]] * 3}, "values: expected one for each index"),
        ({"indices": [[-1]] * 3}, "indices: expected"),
        ({"values": [[1 << 70]] * 3}, r"values: expected numbers below 2\*\*32"),
    ):
        with pytest.raises(SpecError, match=said):
            Fingerprint.parse({**proof.to_dict(), **changes})
    wrong = Fingerprint.parse({**proof.to_dict(), "dtype": other})
    with pytest.raises(
        SpecError, match=rf"proof\.dtype: expected that of the engine, {proof.dtype}"
    ):
        verify(found, PROMPT, tokens, wrong)
    with pytest.raises(SpecError, match="tokens: expected at least one"):
        verify(found, PROMPT, [], proof)
    without = ask(found, PROMPT, 4, capture=Capture([0]))
    with pytest.raises(NothingSelectedError, match="expected final_norm of each generated token"):
        fingerprint(without)
    late = ask(found, PROMPT, 4, capture=Capture(sites="final_norm", positions="generated"))
    with pytest.raises(NothingSelectedError, match="last_prompt"):
        fingerprint(late)
