"""The doctor finds sites in transformers by arithmetic, and holds what the tests' oracle holds."""

from functools import partial

import pytest
import torch
import transformers as hf
from support import tiny
from support.inner_cases import SPECS
from support.inner_oracle import INNER, InnerOracle
from support.oracle import Branches, HookEdit, Oracle, relative_error

from midstream.lab.attribution.hooked.site_finder import SitePlace
from midstream.lab.tools.doctor.model_copy import save_copy, small_config
from midstream.lab.tools.doctor.reference import Reference
from midstream.lab.tools.doctor.small_config import Size
from midstream.sites import OUTER

TOKENS = [5, 17, 33, 101, 8, 77, 54, 23, 9]
NORM, PRE_FF = "post_attention_layernorm", "pre_feedforward_layernorm"
PRE_NORM = {
    "attn_in": SitePlace("self_attn", entry=True),
    "attn_out": SitePlace("self_attn"),
    "resid_mid": SitePlace(NORM, entry=True),
    "mlp_in": SitePlace(NORM),
    "mlp_out": SitePlace("mlp"),
}
SANDWICH = {
    "attn_in": SitePlace("self_attn", entry=True),
    "attn_out": SitePlace(NORM),
    "resid_mid": SitePlace(PRE_FF, entry=True),
    "mlp_in": SitePlace(PRE_FF),
    "mlp_out": SitePlace("post_feedforward_layernorm"),
}
POST_NORM = {
    "attn_in": SitePlace("self_attn", entry=True),
    "attn_out": SitePlace(NORM),
    "resid_mid": SitePlace("mlp", entry=True),
    "mlp_in": SitePlace("mlp", entry=True),
    "mlp_out": SitePlace("post_feedforward_layernorm"),
}
PARALLEL = {
    "attn_in": SitePlace("self_attn", entry=True),
    "attn_out": SitePlace("self_attn"),
    "mlp_in": SitePlace("mlp", entry=True),
    "mlp_out": SitePlace("mlp"),
}


def copy_of(config, folder):
    save_copy(small_config(config, Size(2)), folder, 3)
    found = Reference(folder)
    found.find_sites(TOKENS)
    return found


@pytest.mark.parametrize(
    ("config", "places"),
    [
        (hf.LlamaConfig(), PRE_NORM),
        (hf.Gemma2Config(), SANDWICH),
        (hf.Olmo2Config(), POST_NORM),
        (hf.CohereConfig(), PARALLEL),
    ],
    ids=["pre-norm", "sandwich", "post-norm", "parallel"],
)
def test_the_sites_are_found_where_their_names_say_they_are(config, places, tmp_path):
    found = copy_of(config, tmp_path)
    assert [layer.found for layer in found.places] == [places] * len(found.layers)


SMALL = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
ZAMBA2 = hf.Zamba2Config(
    **SMALL, hybrid_layer_ids=[1], layers_block_type=["mamba", "hybrid"], num_mem_blocks=1,
    mamba_headdim=8, mamba_ngroups=1,
)  # fmt: skip


def test_a_sum_that_only_a_branch_reads_is_no_stream(tmp_path):
    # The shared transformer's output is added to Mamba's input, and not to the stream.
    hf.AutoModelForCausalLM.from_config(ZAMBA2).save_pretrained(tmp_path)
    found = Reference(tmp_path)
    found.find_sites(TOKENS)
    assert found.places[1].found["attn_out"] == SitePlace("mamba_decoder.mamba")
    for site in ("resid_mid", "mlp_in", "mlp_out"):
        assert found.missing((site, 1)), site


@pytest.mark.parametrize(
    "config",
    [hf.LlamaConfig(), hf.Gemma2Config(), hf.GPT2Config(), hf.OPTConfig(word_embed_proj_dim=768)],
    ids=["llama", "gemma2", "gpt2", "opt"],
)
@torch.no_grad()
def test_the_sites_without_a_layer_hold_what_transformers_embeds_and_norms(config, tmp_path):
    found = copy_of(config, tmp_path)
    embed, norm = ("embed", 0), ("final_norm", len(found.layers) - 1)
    whole = found.model(torch.tensor([TOKENS]), output_hidden_states=True)
    embedded = found.model.get_input_embeddings().weight[TOKENS]
    if config.model_type == "gemma2":
        embedded = embedded * found.width**0.5
    seen = found.run(TOKENS)
    assert relative_error(seen.values[embed], embedded) < 1e-6
    assert relative_error(seen.values[norm], whole.hidden_states[-1][0]) < 1e-6
    # The embedding of another token, and twice the vector that the head reads.
    changed = found.run([*TOKENS[:-1], 7])
    swapped = found.run(TOKENS, {embed: lambda _: changed.values[embed]})
    assert relative_error(swapped.logits, changed.logits) < 1e-5
    doubled = found.run(TOKENS, {norm: lambda rows: 2 * rows})
    expected = 2 * seen.values[norm] @ found.model.get_output_embeddings().weight.T
    if config.model_type == "gemma2":
        cap = found.model.config.final_logit_softcapping
        expected = (expected / cap).tanh() * cap
    assert relative_error(doubled.logits, expected) < 1e-5


def test_an_embedding_that_is_normalised_before_the_first_layer_is_said_to_be_missing(tmp_path):
    found = copy_of(hf.BloomConfig(), tmp_path)
    assert "changes the embedding" in found.missing(("embed", 0))
    assert found.missing(("final_norm", 1)) is None


def test_what_is_scaled_where_it_is_added_is_not_found_and_said_to_be_missing(tmp_path):
    found = copy_of(hf.GraniteConfig(residual_multiplier=0.3), tmp_path)
    for site in ("attn_out", "mlp_out"):
        assert "scaled" in found.missing((site, 0)), site
    for site in ("resid_pre", "attn_in", "resid_mid", "mlp_in", "resid_post"):
        assert found.missing((site, 1)) is None
    assert found.places[0].found["resid_mid"] == SitePlace(NORM, entry=True)


def test_where_attention_and_mamba_are_added_at_once_the_stream_behind_them_is_found(tmp_path):
    found = copy_of(hf.FalconH1Config(attention_out_multiplier=0.7), tmp_path)
    assert found.missing(("attn_out", 0))
    assert found.places[0].found["attn_in"].path == "self_attn"
    assert found.places[0].found["resid_mid"] == SitePlace("pre_ff_layernorm", entry=True)
    assert found.places[0].found["mlp_out"] == SitePlace("feed_forward")


def test_a_layer_that_is_a_mixer_alone_has_one_branch(tmp_path):
    found = copy_of(hf.MambaConfig(), tmp_path)
    assert found.places[0].found == {"attn_out": SitePlace("mixer")}
    assert found.missing(("mlp_out", 0))
    assert "named attention" in found.missing(("attn_in", 0))


ORACLES = {
    "llama": Branches(),
    "gemma3": Branches(attn_out=NORM, mlp_out="post_feedforward_layernorm"),
    "gpt2": Branches(attn_in="attn", attn_out="attn"),
    "opt": Branches(mlp_in="fc1", mlp_out="fc2"),
    "phi": Branches(),
}


@pytest.mark.parametrize("name", ORACLES)
def test_values_and_edits_are_those_of_the_tests_own_oracle(name, tmp_path):
    path = tiny.make(name, tmp_path)
    spec = tiny.MODELS[name]
    oracle = Oracle(path, spec.layers, spec.mid, branches=ORACLES[name])
    reference = Reference(path)
    reference.find_sites(TOKENS)
    assert set(oracle.sites) == {site for site in OUTER if reference.missing((site, 1)) is None}
    draw = torch.Generator().manual_seed(1)
    for site in (None, *oracle.sites):
        hooks, changes = [], {}
        if site is not None:
            vector = torch.randn(reference.width, generator=draw)
            hooks = [HookEdit(site, 1, vector, 2.0, lambda position: True)]
            changes = {(site, 1): lambda rows, v=vector: rows + 2.0 * v}
        logits, expected = oracle.run(TOKENS, hooks)
        seen = reference.run(TOKENS, changes)
        assert relative_error(seen.logits, logits) < 1e-5, site
        for tap, value in expected.items():
            assert relative_error(seen.values[tap], value) < 1e-5, (site, tap)
        if site is not None:
            moved = seen.values[site, 1] - seen.before[site, 1]
            assert relative_error(moved, (2.0 * vector).expand_as(moved)) < 1e-5


# Sites that the doctor need not tell apart: midstream lacks those without a rotary embedding.
WITHOUT_ROPE = {"gpt2": {"rot_q", "rot_k"}, "opt": {"rot_q", "rot_k"}}


@pytest.mark.parametrize("name", INNER)
def test_inner_values_and_edits_are_those_of_the_tests_own_oracle(name, tmp_path):
    path = tiny.make(f"{name}-inner", tmp_path, SPECS[name])
    oracle, reference = InnerOracle(path, INNER[name]), Reference(path)
    reference.find_sites(TOKENS)
    found = set(reference.inner.places[1].found)
    assert found - WITHOUT_ROPE.get(name, set()) == set(oracle.sites)
    for nth, site in enumerate((None, *oracle.sites)):
        tap, change = (site, nth % 3), None
        if site is not None:
            assert reference.heads(tap) == oracle.heads(site)
            assert reference.is_fixed(tap) == (site == "router")
            if reference.is_fixed(tap):
                continue
            change = partial(_with_half_of_the_columns, torch.linspace(-1, 1, 2048))
        changes = {} if change is None else {tap: lambda rows, c=change: c(rows.clone())}
        expected = oracle.run(TOKENS) if change is None else oracle.changed(TOKENS, tap, change)
        seen = reference.run(TOKENS, changes)
        assert relative_error(seen.logits, expected.logits) < 1e-5, site
        for site_and_layer, value in expected.values.items():
            if reference.missing(site_and_layer) is None:
                assert relative_error(seen.values[site_and_layer], value) < 1e-5, (site, tap)


def _with_half_of_the_columns(values, rows):
    """Add something to every second column, in place and differently for each token."""
    steps = torch.arange(1, len(rows) + 1)[:, None] / len(rows)
    rows[:, ::2] += steps * values[: rows.shape[1]][::2]
    return rows


def test_of_interleaved_heads_and_attention_without_a_function_the_reason_is_given(tmp_path):
    interleaved = copy_of(hf.GPTNeoXConfig(), tmp_path / "neox")
    assert "no matrix" in interleaved.missing(("q", 0))
    assert interleaved.missing(("rot_q", 0)) is interleaved.missing(("z", 0)) is None
    closed = copy_of(hf.FalconConfig(), tmp_path / "falcon")
    assert "calls no function" in closed.missing(("z", 0))
    assert closed.missing(("mlp_act", 0)) is None
