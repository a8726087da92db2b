"""Estimates of patches, against plain autograd, and against real patches."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import tiny
from support.gradient_oracle import GradientOracle, difference
from support.oracle import Branches
from support.undrawn import undrawn
from torch import nn

from midstream.errors import SpecError
from midstream.lab.attribution import Twin, attribution_patching
from midstream.lab.sweep import KL, LogitDiff, LogProb, Recovered
from midstream.plan.shape import ModelShape

CORRUPT = [5, 17, 33, 101, 8, 77]
CLEAN = [5, 17, 90, 14, 8, 77]
LONGER = [1, 2, 3, *CLEAN]
PLACES = range(len(CORRUPT))
METRIC = LogitDiff(7, 11)
SITES = ["resid_pre", "attn_in", "z", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make("llama", tmp_path_factory.mktemp("patching"))


@pytest.fixture(scope="module")
def twin(folder):
    return Twin.load(folder)


@pytest.fixture(scope="module")
def oracle(folder):
    mid = "post_attention_layernorm"
    return GradientOracle(folder, "model.layers", mid, Branches(), z="self_attn.o_proj")


def expected(oracle, metric, clean=CLEAN, places=PLACES, heads=0):
    """The value and (clean − corrupt) · gradient by tap and position, or position and head."""
    base, here, gradients = oracle.run(CORRUPT, metric)
    _, there, _ = oracle.run(clean, metric)
    effects = {}
    for tap, gradient in gradients.items():
        product = (there[tap][list(places)] - here[tap]).double() * gradient.double()
        effects[tap] = product.unflatten(1, (heads, -1)).sum(-1) if heads else product.sum(-1)
    return base, effects


def assert_close(found, base, effects, sites=SITES):
    assert found.sweep.corrupt == pytest.approx(base, rel=1e-5, abs=1e-6)
    assert found.coords["site"] == list(sites)
    for nth, site in enumerate(sites):
        for row, layer in enumerate(found.coords["layer"]):
            wanted = effects[site, layer].numpy()
            scale = max(1e-3, float(np.abs(wanted).max()))
            assert np.abs(found.effects[nth, row] - wanted).max() < 1e-4 * scale, (site, layer)


def test_every_cell_is_difference_times_gradient(twin, oracle):
    found = attribution_patching(twin, CLEAN, CORRUPT, METRIC, sites=SITES)
    base, effects = expected(oracle, difference)
    assert_close(found, base, effects)
    assert found.sweep.clean == pytest.approx(oracle.run(CLEAN, difference)[0], rel=1e-5)
    assert found.dims == ("site", "layer", "position")
    # Tokens of the prompts that are the same, before all that differ, have no effect.
    assert not found.effects[:, :, :2].any()


def logprob(logits):
    return logits[-1].log_softmax(-1)[7]


@pytest.mark.parametrize("metric", [difference, LogProb(7), KL(), Recovered(METRIC)])
def test_each_metric_has_its_own_gradient(twin, oracle, metric):
    found = attribution_patching(twin, CLEAN, CORRUPT, metric, sites=SITES)
    clean = torch.log_softmax(
        oracle.model(torch.tensor([CLEAN]), use_cache=False).logits[0, -1].detach(), -1
    )
    functions = {
        LogProb: logprob,
        KL: lambda logits: torch.nn.functional.kl_div(
            logits[-1].log_softmax(-1), clean, log_target=True, reduction="sum"
        ),
    }
    base, effects = expected(oracle, functions.get(type(metric), difference))
    if isinstance(metric, Recovered):
        scale = found.sweep.clean - found.sweep.corrupt
        effects = {tap: each / scale for tap, each in effects.items()}
        assert found.base == 0.0
        assert np.array_equal(found.effects, found.values)
    assert_close(found, base, effects)


def test_prompts_of_other_lengths_are_aligned_as_in_a_sweep(twin, oracle):
    with pytest.raises(SpecError, match=r"^align: the prompt has 6 tokens and the source has 9"):
        attribution_patching(twin, LONGER, CORRUPT, METRIC)
    found = attribution_patching(twin, LONGER, CORRUPT, METRIC, sites=SITES, align="suffix")
    base, effects = expected(oracle, difference, LONGER, range(3, 9))
    assert_close(found, base, effects)
    pairs = attribution_patching(twin, LONGER, CORRUPT, METRIC, align={2: 8, -1: 0})
    _, effects = expected(oracle, difference, LONGER, [0, 0, 8, 0, 0, 0])
    for layer in range(3):
        assert np.isnan(pairs.values[0, layer, [0, 1, 3, 4]]).all()
        wanted = effects["resid_pre", layer][[2, 5]].numpy()
        assert pairs.effects[0, layer, [2, 5]] == pytest.approx(wanted, rel=1e-3, abs=1e-5)


def test_heads_groups_masks_and_alpha_divide_the_same_sums(twin, oracle):
    base, effects = expected(oracle, difference, heads=2)
    heads = attribution_patching(twin, CLEAN, CORRUPT, METRIC, sites="z", heads="all", layers=[1])
    assert heads.dims == ("site", "layer", "position", "head")
    assert heads.effects[0, 0] == pytest.approx(effects["z", 1].numpy(), rel=1e-3, abs=1e-5)
    one = attribution_patching(twin, CLEAN, CORRUPT, METRIC, sites="z", heads=1, layers=[1])
    assert np.array_equal(one.effects[..., 0], heads.effects[..., 1])
    whole = attribution_patching(twin, CLEAN, CORRUPT, METRIC, sites="z", layers=[1])
    assert heads.effects.sum(-1) == pytest.approx(whole.effects, rel=1e-3, abs=1e-5)
    grouped = attribution_patching(
        twin,
        CLEAN,
        CORRUPT,
        METRIC,
        sites="z",
        layers=[1],
        groups={"two": [2, 3], "last": [-1]},
    )
    assert grouped.coords["position"] == ["two", "last"]
    assert grouped.effects[0, 0, 0] == pytest.approx(whole.effects[0, 0, 2:4].sum(), rel=1e-4)
    assert grouped.effects[0, 0, 1] == pytest.approx(whole.effects[0, 0, 5], rel=1e-4)
    halves = [
        attribution_patching(
            twin, CLEAN, CORRUPT, METRIC, sites="z", layers=[1], alpha=0.5, mask=mask
        ).effects
        for mask in (list(range(32)), [0.0] * 32 + [1.0] * 32)
    ]
    assert 2 * halves[0][0, 0] == pytest.approx(heads.effects[0, 0, :, 0], rel=1e-3, abs=1e-5)
    assert 2 * halves[1][0, 0] == pytest.approx(heads.effects[0, 0, :, 1], rel=1e-3, abs=1e-5)


@torch.no_grad()
def outputs_of(model, module, tokens):
    """What a module returns in one pass."""
    found = []
    handle = module.register_forward_hook(lambda _m, _a, out: found.append(out.clone()))
    model(torch.tensor([tokens]), use_cache=False)
    handle.remove()
    return found


@torch.no_grad()
def patched_metric(model, module, position, row):
    """The metric of the corrupt prompt with a row of a module's output replaced."""

    def patch(_m, _a, out):
        changed = out.clone()
        changed[0, position] = row
        return changed

    handle = module.register_forward_hook(patch)
    logits = model(torch.tensor([CORRUPT]), use_cache=False).logits[0]
    handle.remove()
    return float(difference(logits))


def test_where_the_metric_is_linear_the_estimate_is_the_patch(folder):
    """Without its final norm, the model's logits are linear in what the last layer adds."""
    twin = Twin.load(folder)
    model = twin.hooked.model
    model.model.norm = nn.Identity()
    sites = ["mlp_out", "resid_post"]
    found = attribution_patching(twin, CLEAN, CORRUPT, METRIC, sites=sites, layers=-1)
    layer = model.model.layers[-1]
    for nth, module in enumerate((layer.mlp, layer)):
        (clean,) = outputs_of(model, module, CLEAN)
        for position in (3, 5):
            patched = patched_metric(model, module, position, clean[0, position])
            estimate = found.values[nth, 0, position]
            assert estimate == pytest.approx(patched, rel=1e-5), (sites[nth], position)
    assert abs(found.effects[0, 0, 5]) > 1e-2


def test_the_top_cells_are_those_of_the_largest_effects(twin):
    found = attribution_patching(twin, CLEAN, CORRUPT, METRIC, sites=["attn_out", "mlp_out"])
    top = found.top(5)
    effects = [abs(cell["effect"]) for cell in top]
    assert effects == sorted(effects, reverse=True)
    assert effects == pytest.approx(np.sort(np.abs(found.effects).ravel())[::-1][:5], rel=1e-4)
    first = top[0]
    index = tuple(found.coords[name].index(first[name]) for name in found.dims)
    assert found.values[index] == pytest.approx(first["value"])
    assert first["token"] == str(CORRUPT[first["position"]])  # this model has no tokenizer
    assert repr(found).startswith("Attribution(2 sites × 3 layers × 6 positions; LogitDiff(7, 11)")
    assert found.to_xarray().sel(site="mlp_out", layer=2, position=5) == found.values[1, 2, 5]
    assert math.isnan(found.sweep.noise_floor)
    with undrawn():
        assert found._repr_mimebundle_() == found.sweep._repr_mimebundle_()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 9}, r"^layers: layer 9 is out of range: the model has 3 layers"),
        ({"sites": "router"}, r"^sites: router cannot be tapped at any layer: no matrix"),
        ({"sites": "nowhere"}, r"^sites: .*nowhere"),
        ({"positions": [6]}, r"^positions: position 6 is out of range"),
        ({"heads": "all"}, r"^heads: the vectors of resid_pre are not of heads"),
        ({"metric": LogProb(199)}, r"^metric: token ids go from 0 to 198, got 199"),
        ({"metric": LogProb(" Paris")}, r"^metric.logprob: this model has no tokenizer"),
        ({"metric": lambda logits: logits[-1]}, r"^metric: .* one number, got .* shape \[199\]"),
        ({"metric": lambda logits: torch.tensor(3.0)}, r"^metric: .* not depend on the logits"),
        ({"metric": lambda logits: logits.sum() * math.inf}, r"^metric: its value is"),
        ({"clean": "Some text"}, r"^clean: this model has no tokenizer for a text"),
        ({"corrupt": [5, 199]}, r"^corrupt\[1\]: token ids go from 0 to 198, got 199"),
        ({"corrupt": {"prompt_embeds": 1}}, r"^corrupt: .* fields \['prompt_embeds'\]"),
        ({"corrupt": [1] * 513}, r"^corrupt: the prompt has 513 tokens; this model takes 512"),
        ({"metric": Recovered(METRIC), "clean": CORRUPT}, r"^metric: .* nothing to recover"),
    ],
)
def test_what_is_wrong_is_named(twin, changes, message):
    given = {"clean": CLEAN, "corrupt": CORRUPT, "metric": METRIC, **changes}
    with pytest.raises(SpecError, match=message):
        attribution_patching(twin, **given)


def engine_of(**shape):
    """What a check reads of an engine before it runs anything."""
    sizes = {"num_layers": 3, "hidden_size": 64, **shape}
    info = SimpleNamespace(shape=ModelShape(taps=[("resid_post", 1)], **sizes))
    lookup = SimpleNamespace(lookup=lambda name: None)
    return SimpleNamespace(info=info, llm_engine=None, vectors=lookup)


def test_an_engine_that_cannot_check_estimates_is_named_before_anything_runs(twin):
    found = attribution_patching(twin, CLEAN, CORRUPT, METRIC)
    with pytest.raises(SpecError, match="^llm: expected a midstream.LLM, got `str`"):
        found.check("some/model")
    with pytest.raises(SpecError, match="^llm: expected a midstream.LLM, got `str`"):
        attribution_patching(twin, CLEAN, CORRUPT, METRIC, llm="some/model")
    with pytest.raises(SpecError, match="^llm: this engine's model has 4 layers of width 64, and"):
        found.check(engine_of(num_layers=4))
    with pytest.raises(SpecError, match="^top: expected at least 1 cell, got 0"):
        found.check(engine_of(), top=0)
    with pytest.raises(
        SpecError, match="^sites: resid_pre at layer . is not tapped; start the engine with "
    ):
        found.check(engine_of())
    by_function = attribution_patching(twin, CLEAN, CORRUPT, difference)
    with pytest.raises(SpecError, match="^metric: a function of logits cannot be measured"):
        by_function.check(engine_of())
    divergence = attribution_patching(twin, CLEAN, CORRUPT, KL())
    with pytest.raises(
        SpecError, match="^metric: KL reads the logits of all tokens: logits cannot be"
    ):
        divergence.check(engine_of())
    for metric in (KL(), Recovered(METRIC)):
        with pytest.raises(SpecError, match="^metric: .* compares a run with a clean one"):
            twin.gradients(CORRUPT, metric)
