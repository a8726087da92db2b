"""A twin's gradients are those that `retain_grad` gives in a plain transformers model."""

import pytest
from support import tiny
from support.gradient_oracle import GradientOracle, difference
from support.oracle import Branches, relative_error

from midstream.lab.attribution import Twin

TOKENS = [5, 17, 33, 101, 8, 77, 54, 23, 9]
NORM, POST_FF = "post_attention_layernorm", "post_feedforward_layernorm"
# By model: its branches, and the module whose input `z` is.
MODELS = {
    "llama": (Branches(), "self_attn.o_proj"),
    "gemma2": (Branches(attn_out=NORM, mlp_out=POST_FF), "self_attn.o_proj"),
    "gpt2": (Branches(attn_in="attn", attn_out="attn"), "attn.c_proj"),
    "opt": (Branches(mlp_in="fc1", mlp_out="fc2"), "self_attn.out_proj"),
    "phi": (Branches(), "self_attn.dense"),
    "mixtral": (Branches(), "self_attn.o_proj"),
}
# The others take longer for the same code.
QUICK = ("llama", "gemma2", "phi")


def of_all_tokens(logits):
    """A loss of the whole prompt."""
    return logits.log_softmax(dim=-1)[range(len(TOKENS) - 1), TOKENS[1:]].sum()


@pytest.fixture(
    scope="module",
    params=[
        name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in MODELS
    ],
)
def pair(request, tmp_path_factory):
    """(a twin, the oracle of the same model, its sites)."""
    folder = tiny.make(request.param, tmp_path_factory.mktemp("twin"))
    spec, (branches, z) = tiny.MODELS[request.param], MODELS[request.param]
    oracle = GradientOracle(folder, spec.layers, spec.mid, branches, z=z)
    sites = ["resid_pre", "attn_in", "z", "attn_out", "mlp_in", "mlp_out", "resid_post"]
    return Twin.load(folder), oracle, [*sites, *(["resid_mid"] if spec.mid else [])]


@pytest.mark.parametrize("metric", [difference, of_all_tokens])
def test_gradients_at_all_sites_are_those_of_plain_autograd(pair, metric):
    twin, oracle, sites = pair
    _, values, expected = oracle.run(TOKENS, metric)
    found = twin.gradients(TOKENS, metric, sites=sites)
    assert set(found) == set(expected)
    for tap, gradient in found.items():
        assert relative_error(gradient, expected[tap]) < 2e-5, tap
    for tap, rows in twin.activations(TOKENS, sites=sites).items():
        assert relative_error(rows, values[tap]) < 2e-5, tap


def test_gradients_of_one_tap_alone_are_those_that_it_has_among_all(pair):
    twin, _, _ = pair
    together = twin.gradients(TOKENS, difference, sites=["resid_pre", "resid_post"])
    for site, layer in (("resid_post", 2), ("resid_pre", 2), ("resid_post", 0)):
        (alone,) = twin.gradients(TOKENS, difference, sites=site, layers=layer).values()
        assert relative_error(alone, together[site, layer]) < 1e-6
