"""Which sites a model has, and what they are to each other; `test_parity` reads and edits them."""

from pathlib import Path

import pytest
import torch
from support import tiny
from support.engines import engine, greedy, tokens
from support.oracle import Branches, Oracle, relative_error

from midstream import Capture
from midstream.errors import SpecError

PROMPT = [5, 17, 33, 101, 8, 77, 54, 23, 9, 150, 44]


def test_sites_that_a_model_lacks_are_refused_by_name(tmp_path: Path) -> None:
    """Granite scales what it adds, outside any module."""
    import transformers as hf

    config = hf.GraniteConfig(
        vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        residual_multiplier=0.5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    hf.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    held = ["resid_pre", "attn_in", "resid_mid", "mlp_in", "resid_post"]
    with engine(tmp_path, midstream={"sites": held}) as llm:
        output = llm.generate(tokens(PROMPT), greedy(2), capture=Capture(layers=[0], sites=held))
        assert {site for site, _ in output[0].activations} == set(held)
        for site in ("attn_out", "mlp_out"):
            with pytest.raises(SpecError, match=rf"{site}.*scaled where it is added"):
                llm.generate(tokens(PROMPT), greedy(2), capture=Capture(layers=[0], sites=site))
        table = llm.sites()
        assert {table["router", layer].reason for layer in (0, 1)} == {"this layer has no experts"}
        for site in ("mlp_act", "z", "embed"):
            assert table[site, 0].reason.startswith("not tapped; add it to"), site
        with pytest.raises(
            SpecError, match="router.*cannot be tapped.*: this layer has no experts"
        ):
            llm.generate(tokens(PROMPT), greedy(2), capture=Capture(layers=[0], sites="router"))


def test_the_sites_are_different_places_and_add_up(tiny_llama: Path) -> None:
    """The tests above would pass for any sites if the oracle confused them."""
    oracle = Oracle(tiny_llama, "model.layers", "post_attention_layernorm", branches=Branches())
    _, seen = oracle.run(PROMPT)
    for layer in range(3):
        pre, mid, post = (seen[f"resid_{part}", layer] for part in ("pre", "mid", "post"))
        torch.testing.assert_close(pre + seen["attn_out", layer], mid)
        torch.testing.assert_close(mid + seen["mlp_out", layer], post)
        assert relative_error(seen["attn_in", layer], pre) > 0.01
        assert relative_error(seen["attn_in", layer], seen["attn_out", layer]) > 0.01
        assert relative_error(seen["attn_in", layer], seen["mlp_in", layer]) > 0.01
        assert relative_error(seen["mlp_in", layer], mid) > 0.01
        assert relative_error(seen["mlp_in", layer], seen["mlp_out", layer]) > 0.01
        assert relative_error(mid, pre) > 0.01
        assert relative_error(post, mid) > 0.01
