"""TransformerLens's `RemoteBridge` on engines, against its bridge to transformers in float32."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.engines import engine
from support.refusals import refused_calls
from support.tokenizers import byte_pairs
from torch import Tensor

from midstream import LLM, Steer
from midstream.errors import UnsupportedError
from midstream.lab.harness.transformer_lens import remote_bridge
from midstream.sites import NAMES

PROMPT, OTHER = [5, 17, 33, 101, 8, 77], [5, 17, 90]
TOLERANCE = 2e-4
SITES = [site for site in NAMES if site != "logits"]
MODELS = {name: tiny.MODELS[name] for name in ("llama", "gemma2", "gpt2")}
MODELS["qwen3-moe"] = tiny.QWEN3_MOE
NAMED = (
    *("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out"),
    *("attn.hook_q", "attn.hook_z", "attn.hook_pattern"),
)
HAS_BRIDGE = (
    importlib.util.find_spec("transformer_lens") is not None
    and importlib.util.find_spec("transformer_lens.model_bridge.remote_bridge") is not None
)
needs_bridge = pytest.mark.skipif(
    not HAS_BRIDGE,
    reason="needs TransformerLens 4.3, and sae-lens, of the extra dev, an older one; "
    "scripts/transformer_lens.sh runs these tests",
)


@pytest.fixture(scope="module", params=MODELS)
def both(request: pytest.FixtureRequest, tiny_models: Path) -> Iterator[tuple[Any, Any, LLM]]:
    """(the bridge on an engine, TransformerLens's bridge on transformers, the engine)."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny.make(request.param, tiny_models, MODELS[request.param])
    byte_pairs([]).save_pretrained(tiny_models / "tokenizer")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    theirs = TransformerBridge.boot_transformers(
        str(path),
        hf_model=model,
        tokenizer=AutoTokenizer.from_pretrained(tiny_models / "tokenizer"),
        device="cpu",
        dtype=torch.float32,
    )
    with engine(path, enable_prefix_caching=True, midstream={"sites": SITES}) as llm:
        yield remote_bridge(llm), theirs, llm


def assert_same(found: Any, expected: Any) -> None:
    assert set(found) <= set(expected)
    for name in found:
        assert found[name].shape == expected[name].shape, name
        assert (found[name] - expected[name]).abs().max() < TOLERANCE, name


@needs_bridge
def test_caches_and_logits_are_those_of_transformers(both: tuple[Any, Any, LLM]) -> None:
    ours, theirs, llm = both
    expected, expected_cache = theirs.run_with_cache(torch.tensor([PROMPT]))
    for _ in range(2):  # the second time the prefix cache has the prompt
        logits, cache = ours.run_with_cache(torch.tensor([PROMPT]))
        assert (logits - expected).abs().max() < TOLERANCE
        assert_same(dict(cache), expected_cache)
        for layer in range(tiny.LAYERS):
            assert {f"blocks.{layer}.{name}" for name in NAMED} <= set(cache)
    assert {"hook_embed", "ln_final.hook_out"} <= set(cache)
    _, few = ours.run_with_cache(torch.tensor([PROMPT]), names_filter="blocks.1.hook_resid_post")
    assert set(few) == {"blocks.1.hook_resid_post", "blocks.1.hook_out"}
    both_losses = [
        bridge.forward(torch.tensor([PROMPT]), return_type="loss") for bridge in (ours, theirs)
    ]
    assert abs(float((both_losses[0] - both_losses[1]).detach())) < TOLERANCE
    assert llm.info.shape.num_layers == tiny.LAYERS


@needs_bridge
def test_several_prompts_and_masks_keep_their_places(both: tuple[Any, Any, LLM]) -> None:
    ours, _, _ = both
    names = ["blocks.1.hook_resid_post", "blocks.1.attn.hook_z", "blocks.1.attn.hook_pattern"]
    names_filter = names.__contains__
    alone = [ours.run_with_cache(torch.tensor([ids]), names_filter=names_filter)
             for ids in (PROMPT, OTHER)]  # fmt: skip
    padded = torch.tensor([PROMPT, [0, 0, *OTHER, 0]])
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 0]])
    for ids, start, arguments in (
        ([PROMPT, OTHER], 0, {}),
        (padded, 2, {"attention_mask": mask}),
    ):
        logits, cache = ours.run_with_cache(ids, names_filter=names_filter, **arguments)
        kept = slice(start, start + 3)
        assert (logits[0] - alone[0][0][0]).abs().max() < TOLERANCE
        assert (logits[1, kept] - alone[1][0][0]).abs().max() < TOLERANCE
        rest = [place for place in range(6) if place not in range(start, start + 3)]
        assert torch.isneginf(logits[1, rest]).all()
        for name in names[:2]:
            assert (cache[name][0] - alone[0][1][name][0]).abs().max() < TOLERANCE
            assert (cache[name][1, kept] - alone[1][1][name][0]).abs().max() < TOLERANCE
            assert not cache[name][1, rest].any()
        pattern = cache[names[2]]
        assert (pattern[1, :, kept, kept] - alone[1][1][names[2]][0]).abs().max() < TOLERANCE
        assert not pattern[1, :, rest].any()


def _changed(op: str, value: Any, places: list[int]) -> Any:
    def hook(tensor: Tensor, hook: Any) -> Tensor:
        changed = tensor.clone()
        old = changed[:, places]
        changed[:, places] = {
            "suppress": lambda: torch.zeros_like(old),
            "scale": lambda: old * value,
            "add": lambda: old + value,
            "set": lambda: torch.zeros_like(old) + value,
        }[op]()
        return changed

    return hook


@needs_bridge
def test_interventions_do_what_hooks_do_in_transformers(both: tuple[Any, Any, LLM]) -> None:
    ours, theirs, llm = both
    ids = torch.tensor([PROMPT])
    width = llm.info.shape.hidden_size
    vector = torch.linspace(-1, 1, width)
    plain = ours.forward(ids)
    for name, spec, value in (
        ("blocks.0.hook_in", {"op": "add", "value": vector}, vector),
        ("blocks.1.hook_out", {"op": "set", "value": vector.tolist(), "pos": [2, 4]}, vector),
        ("blocks.1.mlp.hook_out", {"op": "suppress"}, None),
        ("blocks.1.attn.o.hook_in", {"op": "set", "value": 0.25, "pos": 5}, 0.25),
        ("embed.hook_out", {"op": "scale", "factor": -0.5}, -0.5),
    ):
        if name not in ours.hook_dict:  # after attention and the MLP of Gemma 2 there is a norm
            name = name.replace("mlp.hook_out", "ln2_post.hook_out")
        pos = spec.get("pos", list(range(len(PROMPT))))
        places = [pos] if isinstance(pos, int) else pos
        changed = _changed(spec["op"], value, places)
        expected = theirs.run_with_hooks(ids, fwd_hooks=[(name, changed)])
        found = ours.forward(ids, intervene={name: spec})
        assert (found - expected).abs().max() < TOLERANCE, name
        assert (found - plain).abs().max() > 10 * TOLERANCE, name
    by_edits = ours.forward(ids, edits=Steer(vector, 1, site="resid_pre"))
    by_spec = ours.forward(ids, intervene={"blocks.1.hook_in": {"op": "add", "value": vector}})
    assert torch.equal(by_edits, by_spec)
    assert (ours.forward(ids) - plain).abs().max() < TOLERANCE  # nothing stays


@needs_bridge
def test_the_driver_is_one_by_transformer_lens_own_rules(both: tuple[Any, Any, LLM]) -> None:
    from transformer_lens.model_bridge.driver_protocol import Driver, validate_driver

    ours, _, llm = both
    driver, ids = ours._driver, torch.tensor([PROMPT])
    assert isinstance(driver, Driver)
    validate_driver(driver, after_bridge_construction=True)
    norm = "transformer.ln_f" if driver.architecture.startswith("GPT2") else "model.norm"
    assert driver.get_param(f"{norm}.weight").shape == (tiny.HIDDEN,)
    with pytest.raises(NotImplementedError, match="attn_scores"):
        ours.run_with_cache(ids, names_filter="blocks.0.attn.hook_attn_scores")
    other = remote_bridge(llm)
    other.close()
    refused_calls((lambda: other.forward(ids), "closed"))
    ours.forward(ids)  # the engine is not closed with a bridge


@needs_bridge
def test_what_is_not_tapped_is_not_fired(tiny_llama: Path, llm: LLM) -> None:
    ours = remote_bridge(llm)
    assert "blocks.0.hook_out" in ours._driver.supported_hook_points
    assert "blocks.0.attn.q.hook_out" in ours._driver.non_fireable_hook_points
    with pytest.raises(NotImplementedError, match="attn.hook_q"):
        ours.run_with_cache(torch.tensor([PROMPT]), names_filter="blocks.0.attn.hook_q")


@needs_bridge
@pytest.mark.model
def test_a_text_is_tokenized_as_transformer_lens_does(smollm2: Path) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    theirs = TransformerBridge.boot_transformers(str(smollm2), device="cpu", dtype=torch.float32)
    expected, expected_cache = theirs.run_with_cache("The capital of France is")
    with engine(smollm2, skip_tokenizer_init=False, midstream={}) as llm:
        logits, cache = remote_bridge(llm).run_with_cache("The capital of France is")
    assert (logits - expected).abs().max() < 1e-2
    for name, rows in cache.items():
        assert (rows - expected_cache[name]).norm() < 1e-4 * expected_cache[name].norm(), name


@pytest.mark.skipif(HAS_BRIDGE, reason="this TransformerLens has the bridge")
def test_an_older_transformer_lens_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match=r"transformer-lens>=4\.3"):
        remote_bridge(llm)
