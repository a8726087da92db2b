"""Names of sites in other tools' spellings."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused, refused_calls

from midstream import Attention, Capture, Gate, Probe, Replace, Scale, Steer, sites
from midstream.plan import Reading

LAYERS = st.integers(0, 999)
TAPS = st.tuples(st.sampled_from(sites.IN_LAYERS), LAYERS)


@given(TAPS)
def test_a_name_of_transformer_lens_is_read_back(tap):
    assert sites.parse(sites.transformer_lens_name(tap)) == tap


@given(TAPS)
def test_an_address_of_interp_engine_is_read(tap):
    assert sites.parse(f"{tap[0]}.{tap[1]}") == tap


@given(st.text(max_size=40))
def test_any_text_is_read_or_unknown(text):
    found = sites.parse(text)
    assert found is None or found[0] in sites.NAMES


def test_names_of_other_tools_mean_sites():
    for name, tap in (
        ("blocks.10.hook_resid_post", ("resid_post", 10)),
        ("blocks.10.attn.hook_z", ("z", 10)),
        ("blocks.10.mlp.hook_post", ("mlp_act", 10)),
        ("model.layers.10.self_attn.o_proj.input", ("z", 10)),
        ("model.layers.10.mlp.down_proj.input", ("mlp_act", 10)),
        ("hook_resid_post", ("resid_post", None)),
        ("model.layers.10.output", ("resid_post", 10)),
        ("model.layers[10].output[0]", ("resid_post", 10)),
        ("model.layers[-1].output", ("resid_post", -1)),
        ("model.layers.10.input", ("resid_pre", 10)),
        ("model.layers.10.self_attn.input", ("attn_in", 10)),
        ("model.layers.10.self_attn.output", ("attn_out", 10)),
        ("model.layers.10.mlp", ("mlp_out", 10)),
        ("model.layers.10.mlp.input", ("mlp_in", 10)),
        ("model.layers.10.block_sparse_moe.output", ("mlp_out", 10)),
        ("transformer.h.10", ("resid_post", 10)),
        ("transformer.h.10.attn.output", ("attn_out", 10)),
        ("gpt_neox.layers.3.attention", ("attn_out", 3)),
        ("model.decoder.layers.3.input", ("resid_pre", 3)),
        ("layers_input[10]", ("resid_pre", 10)),
        ("layers_output[-1]", ("resid_post", -1)),
        ("attentions_input[3]", ("attn_in", 3)),
        ("attentions_output[3]", ("attn_out", 3)),
        ("mlps_input[3]", ("mlp_in", 3)),
        ("mlps_output[3]", ("mlp_out", 3)),
        ("mlps_output", ("mlp_out", None)),
        ("post_attn.2", ("resid_mid", 2)),
        ("post_mlp", ("resid_post", None)),
    ):
        assert sites.parse(name) == tap, name
        if tap[1] is not None:
            assert Capture(sites=name) == Capture(tap[1], tap[0])
            assert Steer([1], site=name) == Steer([1], tap[1], site=tap[0])
            assert Probe([1], site=name) == Probe([1], tap[1], site=tap[0])
            assert Replace([1], site=name) == Replace([1], tap[1], site=tap[0])
            assert Scale(2, sites=name) == Scale(2, tap[1], site=tap[0])
            assert Reading([1], site=name) == Reading([1], layer=tap[1], site=tap[0])
            assert Gate(Scale(2, 3), {"direction": [1], "site": name}).probe.tap == tap


def test_a_place_of_other_tools_without_a_site_is_unsupported():
    hooks = ("hook_q_input", "hook_attn_in", "hook_mlp_in", "mlp.hook_mid")
    paths = ("layers.3.self_attn.q_proj", "layers.3.self_attn.o_proj.output", "embed_tokens")
    names = [f"blocks.3.{hook}" for hook in hooks] + [f"model.{path}" for path in paths]
    words = "has no site here; unsupported. Sites: `embed`, .*`final_norm`"
    refused(
        lambda name: Capture(3, sites=name),
        *(
            (name, words)
            for name in (
                *names,
                "hook_pos_embed",
                "ln_final.hook_normalized",
                "lm_head",
                "token_embeddings",
            )
        ),
        (
            "blocks.3.attn.hook_pattern",
            r'a capture of weights .*Attention\(layers, reduce="full"\)',
        ),
        ("blocks.3.attn.hook_attn_scores", r'weights .*Attention\(layers, reduce="scores"\)'),
    )
    assert Attention([3], reduce="scores").reduce == "scores"


def test_names_of_sites_without_a_layer():
    for name, site in (
        ("embed", "embed"),
        ("hook_embed", "embed"),
        ("final_norm", "final_norm"),
        ("ln_final.hook_out", "final_norm"),
        ("model.norm", "final_norm"),
        ("transformer.ln_f.output", "final_norm"),
    ):
        assert sites.parse(name) == (site, None), name
        assert sites.parse(sites.transformer_lens_name((site, 7))) == (site, None)
        assert Capture(sites=name) == Capture(sites=[site]) == Capture.parse({"sites": site})
        assert "layers" not in Capture(sites=name).to_dict()
        for one in (Steer([1], site=name), Scale(2, sites=name), Replace([1], site=name)):
            assert "layer" not in one.to_dict()
            assert type(one).parse(one.to_dict()) == one == one.replace(site=site)
        probe, reading = Probe([1], site=name), Reading([1], site=name)
        assert Probe.parse(probe.to_dict()) == probe
        assert reading == Reading.parse(probe) == Reading.parse(reading.to_dict())


def test_a_layer_at_a_site_without_one_is_refused():
    refused_calls(
        (lambda: Capture(3, "final_norm"), "layers", "got 3, but `final_norm` has no layer: omit"),
        (lambda: Capture([0, 1], ["embed", "final_norm"]), "layers", "got 0, 1, but .* have no la"),
        (lambda: Capture(sites=["embed", "resid_post"]), "", "missing field `layers`"),
        (lambda: Capture(sites="final_norm.3"), "sites", "unknown site|no site here"),
        (lambda: Capture(sites="layers_outputs[3]"), "sites", "unknown site"),
        (lambda: Capture(sites="heads_output[3]"), "sites", "unknown site"),
        (lambda: Capture(sites="attention_probabilities[3]"), "sites", "Attention"),
        (lambda: Steer([1], [2, 3], site="embed"), "layer", "got 2, 3, but `embed` has no layer"),
        (lambda: Steer({2: [1]}, site="embed"), "layer", "got 2, but `embed` has no layer"),
        (lambda: Scale(2, 3, site=["embed", "q"]), "site", "embed has no layer and others have"),
        (lambda: Probe([1], 0, site="embed"), "layer", "got 0, but `embed` has no layer"),
        (lambda: Reading([1], layer=0, site="embed"), "layer", "got 0, but `embed` has no layer"),
    )


def test_all_layers_of_a_site_without_one_are_the_site_also_in_changed_copies():
    sites = ["embed", "final_norm"]
    for one in (Capture(sites=sites, stream=True), Capture(sites=sites, tag="x", sink="npz")):
        assert Capture("all", sites) == one.without_place()
        assert one.without_place().to_dict() == Capture(sites=sites).to_dict()
        assert dataclasses.replace(one, positions="last_prompt").layers == one.layers
    assert Steer([1], "all", site="embed") == Steer([1], site="embed")


def test_among_others_their_layers_are_not_chosen():
    one = Capture([3], ["resid_post", "final_norm"])
    assert one.to_dict()["layers"] == [3]
    assert Capture(sites=["blocks.3.hook_resid_post", "ln_final.hook_out"]) == one


def test_names_with_layers_are_several_taps():
    names = [f"blocks.{layer}.hook_resid_{site}" for layer in (3, 1) for site in ("pre", "post")]
    assert Capture(sites=names) == Capture([3, 1], ["resid_pre", "resid_post"])
    assert Capture([3, 1], names) == Capture([3, 1], ["resid_pre", "resid_post"])


def test_names_that_contradict_the_layers_are_rejected():
    refused(
        lambda given: Capture(*given),
        ((4, "resid_post.3"), "layers", "have layer 3; omit it here"),
        (("all", "resid_post.3"), "layers", "have layer 3; omit it here"),
        ((None, ["resid_post.3", "resid_pre"]), "sites", "either every name or none"),
        ((None, ["resid_post.3", "blocks.3.hook_resid_post"]), "sites", "same site and layer"),
        ((None, ["resid_post.3", "resid_pre.4"]), "sites", "not every combination"),
        ((None, ["resid_post.3", "residpost.3"]), "sites[1]", "unknown site 'residpost.3'"),
        ((None, "resid_post"), "", "missing field `layers`"),
    )
