"""Sparse autoencoders from files, and the edits of their features."""

import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.formulas import apply, run
from support.refusals import refused
from support.sae_oracle import KINDS, RandomSae

from midstream.errors import MissingExtraError, SpecError
from midstream.plan import Feature
from midstream.sae.sae import SAE

WIDTH, FEATURES = 6, 9
FLAT = {
    "architecture": "standard",
    "d_in": WIDTH,
    "d_sae": FEATURES,
    "hook_name": "blocks.8.hook_resid_pre",
    "hook_layer": 8,
    "hook_head_index": None,
    "activation_fn_str": "relu",
    "apply_b_dec_to_input": True,
    "finetuning_scaling_factor": False,
    "normalize_activations": "none",
    "model_name": "gpt2-small",
}
NEW = {
    "architecture": "jumprelu",
    "d_in": WIDTH,
    "d_sae": FEATURES,
    "dtype": "float32",
    "apply_b_dec_to_input": False,
    "normalize_activations": "none",
    "reshape_activations": "none",
    "metadata": {"hook_name": "blocks.3.hook_mlp_out", "sae_lens_version": "6.12.1"},
}


def tensors(threshold=False):
    random = torch.Generator().manual_seed(0)
    found = {
        "W_enc": torch.randn(WIDTH, FEATURES, generator=random),
        "b_enc": torch.randn(FEATURES, generator=random),
        "W_dec": torch.randn(FEATURES, WIDTH, generator=random),
        "b_dec": torch.randn(WIDTH, generator=random),
    }
    if threshold:
        found["threshold"] = torch.rand(FEATURES, generator=random)
    return found


def write(folder, config, weights):
    if config is not None:
        (folder / "cfg.json").write_text(json.dumps(config))
    save_file(weights, folder / "sae_weights.safetensors")
    return folder


def test_the_place_is_that_of_the_hook_unless_it_is_given(tmp_path):
    sae = SAE.load(write(tmp_path, NEW, tensors(True)))
    feature = sae.feature(2, value=1, positions=[3], phase="prompt", exclude=[0])
    assert isinstance(feature, Feature)
    assert (feature.layers.indices, feature.sites.names) == ((3,), ("mlp_out",))
    assert feature.positions.include == (3,)
    assert (feature.positions.phase, feature.positions.exclude) == ("prompt", (0,))
    other = sae.feature(2, value=1, layer=5, site="resid_post")
    assert (other.layers.indices, other.sites.names) == ((5,), ("resid_post",))
    assert sae.feature(2, value=1, layer=5).sites.names == ("mlp_out",)
    assert (sae.width, sae.num_features) == (WIDTH, FEATURES)


def test_hooks_are_sites_or_refused_only_where_one_is_needed(tmp_path):
    config = {key: value for key, value in FLAT.items() if key != "hook_layer"}
    for hook, tap in (
        ("blocks.0.hook_resid_pre", ("resid_pre", 0)),
        ("blocks.11.hook_resid_mid", ("resid_mid", 11)),
        ("blocks.11.hook_resid_post", ("resid_post", 11)),
        ("blocks.4.hook_attn_out", ("attn_out", 4)),
        ("blocks.4.hook_mlp_out", ("mlp_out", 4)),
        ("blocks.4.attn.hook_in", ("attn_in", 4)),
        ("blocks.4.mlp.hook_in", ("mlp_in", 4)),
    ):
        sae = SAE.load(write(tmp_path, {**config, "hook_name": hook}, tensors()))
        feature = sae.feature(0, value=1)
        assert (feature.sites.names[0], feature.layers.indices[0]) == tap
    for hook in ("blocks.4.attn.hook_z", "blocks.4.hook_attn_in", "blocks.x.hook_resid_pre", ""):
        sae = SAE.load(write(tmp_path, {**FLAT, "hook_name": hook, "hook_layer": 4}, tensors()))
        with pytest.raises(SpecError, match="hook_name: unsupported hook"):
            sae.feature(0, value=1)
        assert sae.feature(0, value=1, layer=1, site="resid_pre").layers.indices == (1,)


def test_tensors_alone_are_enough_if_it_is_said_what_they_mean(tmp_path):
    given = RandomSae("jumprelu", WIDTH, FEATURES, "")
    path = tmp_path / "mine.safetensors"
    save_file(given.tensors, path)
    with pytest.raises(SpecError, match="missing cfg.json.*give `apply_b_dec_to_input`"):
        SAE.load(path)
    x = torch.randn(5, WIDTH)
    for subtract in (False, True):
        sae = SAE.load(path, apply_b_dec_to_input=subtract)
        given.config["apply_b_dec_to_input"] = subtract
        assert torch.allclose(sae.encode(x).double(), given.encode(x), atol=1e-5)
    with pytest.raises(SpecError, match="the SAE has no hook_name; specify both"):
        sae.feature(0, value=1, layer=3)
    save_file({**given.tensors, "b_dec": torch.zeros(WIDTH)}, path)
    assert not SAE.load(path).apply_b_dec_to_input


def test_half_precision_is_read_as_float32(tmp_path):
    weights = {name: tensor.bfloat16() for name, tensor in tensors().items()}
    sae = SAE.load(write(tmp_path, FLAT, weights))
    assert {sae.w_enc.dtype, sae.b_dec.dtype} == {torch.float32}
    assert torch.equal(sae.w_dec, weights["W_dec"].float())


def test_a_configuration_beside_the_file_counts(tmp_path):
    folder = write(tmp_path, FLAT, tensors())
    sae = SAE.load(folder / "sae_weights.safetensors")
    assert (sae.apply_b_dec_to_input, sae.hook_name) == (True, FLAT["hook_name"])
    with pytest.raises(SpecError, match="apply_b_dec_to_input: .*already specified by .*cfg.json"):
        SAE.load(folder, apply_b_dec_to_input=True)


def test_a_threshold_below_zero_is_that_of_the_relu_before_it(tmp_path):
    weights = {**tensors(), "threshold": torch.full((FEATURES,), -1.0)}
    sae = SAE.load(write(tmp_path, NEW, weights))
    assert sae.feature(0, value=1).threshold == (0,)
    x = torch.randn(20, WIDTH)
    relu = SAE.load(write(tmp_path, {**NEW, "architecture": "standard"}, tensors())).encode(x)
    assert torch.equal(sae.encode(x), relu)


@pytest.mark.parametrize("mode", ["set", "add", "scale", "ablate"])
def test_features_of_one_edit_read_the_same_vector(tmp_path, mode):
    x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    ids = [7, 2, 5]
    values = {"scale": [2.0, 0.5, 0.0], "ablate": None}.get(mode, [3.0, -1.0, 0.25])
    for kind in ("standard", "jumprelu", "gated", "batchtopk", "centered"):
        given = RandomSae(kind, WIDTH, FEATURES, "blocks.3.hook_mlp_out")
        sae = SAE.load(given.write(tmp_path))
        active = given.encode(x)[:, ids]
        numbers = torch.tensor(values or [0.0] * 3).double()
        amount = {
            "set": numbers - active,
            "add": numbers.expand(20, 3),
            "scale": (numbers - 1) * active,
            "ablate": -active,
        }[mode]
        edit = sae.features(ids, mode, values)
        wanted = (x + amount @ given.tensors["W_dec"][ids].double()).numpy()
        assert np.allclose(apply(edit, x), wanted, atol=1e-4)
        assert np.allclose(run(edit.instructions(WIDTH), x), wanted, atol=1e-4)
        if values is not None:
            assert edit == sae.features(dict(zip(ids, values, strict=True)), mode)
            one = sae.features(ids[:1], mode, values[:1])
            assert one == sae.feature(ids[0], mode, values[0])
        assert edit.sites.names == ("mlp_out",)


def test_values_of_features_are_given_once_and_for_features_that_are_there(tmp_path):
    sae = SAE.load(write(tmp_path, FLAT, tensors()))
    refused(
        lambda given: sae.features(*given),
        (({1: 2.0}, "set", 3.0), "index", ""),
        (({1: 2.0}, "ablate"), "index", ""),
        (([1, 1], "set", 3.0), "index[1]", ""),
        (([1, FEATURES], "set", 3.0), "index", ""),
        (([1, 2], "set", [3.0]), "value", ""),
    )
    refused(
        lambda index: sae.feature(index, value=1),
        *((index, "^index: ") for index in (-1, FEATURES, True, "0", 1.0)),
    )


def test_a_multiple_of_a_decoder_row_is_added_whatever_else_is_active(tmp_path):
    given = RandomSae("topk", 24, 60, "blocks.1.hook_resid_post")
    sae = SAE.load(given.write(tmp_path))
    with pytest.raises(SpecError, match='depends on all of them; the mode "add" does not'):
        sae.features({3: 1.0})
    x = torch.randn(4, 24).double()
    found = apply(sae.features({3: 1.5, 4: -2.0}, "add"), x)
    wanted = x + 1.5 * sae.w_dec[3].double() - 2 * sae.w_dec[4].double()
    assert np.allclose(found, wanted.numpy(), atol=1e-5)


def test_a_configuration_that_cannot_be_followed_is_refused(tmp_path):
    def load(change):
        return SAE.load(write(tmp_path, {**FLAT, **change}, tensors()))

    cases = (
        ({"architecture": "temporal"}, "architecture", "`standard`, `jumprelu`, .*got 'temporal'"),
        ({"architecture": "batchtopk"}, "architecture", "`batchtopk`, but there is no tensor"),
        ({"architecture": "topk"}, "k", "missing: how many"),
        ({"architecture": "topk", "k": 0}, "k", "at least 1, got 0"),
        ({"architecture": "transcoder"}, "apply_b_dec_to_input", "b_dec is none of its input"),
        ({"rescale_acts_by_decoder_norm": True}, "rescale_acts_by_decoder_norm", "got True"),
        ({"metadata": {}, "new": 1}, "new", "unknown field, which might change the features"),
        ({"architecture": 3}, "architecture", "got 3"),
        (
            {"architecture": "jumprelu"},
            "architecture",
            "`jumprelu`, but there is no tensor `threshold`",
        ),
        ({"activation_fn_str": "topk"}, "k", "missing"),
        ({"activation_fn": "tanh-relu"}, "activation_fn", "got 'tanh-relu'"),
        ({"normalize_activations": "batch"}, "normalize_activations", "`none`.*, got 'batch'"),
        (
            {"normalize_activations": "expected_average_only_in"},
            "normalize_activations",
            "does not have the factor; give `input_scale`",
        ),
        ({"normalize_activations": True}, "normalize_activations", "one of `none`.*, got True"),
        ({"reshape_activations": "hook_z"}, "reshape_activations", "got 'hook_z'"),
        ({"finetuning_scaling_factor": True}, "finetuning_scaling_factor", "got True"),
        ({"hook_head_index": 0}, "hook_head_index", "expected `None`, got 0"),
        ({"hook_layer": 7}, "hook_layer", "7 contradicts `hook_name`"),
        ({"hook_name": 7}, "hook_name", "expected `str`, got `int`"),
        ({"apply_b_dec_to_input": "yes"}, "apply_b_dec_to_input", "expected `bool`, got `str`"),
        ({"d_in": 7}, "d_in", r"7, but W_enc has shape \[6, 9\]"),
        ({"d_sae": "9"}, "d_sae", "expected `int`, got `str`"),
        ({"metadata": []}, "metadata", "expected an object, got `list`"),
        ({"metadata": {"hook_head_index": 2}, "hook_head_index": 2}, "hook_head_index", "got 2"),
    )
    at = tmp_path / "cfg.json"
    refused(load, *((change, f"{at}.{field}", problem) for change, field, problem in cases))

    def load_text(text):
        at.write_text(text)
        return SAE.load(tmp_path)

    texts = ("", "{", "[]", '{"a": NaN}', '{"a": 1, "a": 2}', " " * (1 << 21))
    refused(load_text, *((text, re.escape(str(at))) for text in texts))


def test_tensors_that_do_not_fit_are_refused(tmp_path):
    at = tmp_path / "sae_weights.safetensors"

    def load(change):
        weights = {name: each for name, each in {**tensors(), **change}.items() if each is not None}
        return SAE.load(write(tmp_path, FLAT, weights))

    refused(
        load,
        ({"W_enc": None}, str(at), "missing tensor `W_enc`"),
        ({"r_mag": torch.zeros(1)}, str(at), "unknown tensor 'r_mag', which might change the"),
        ({"W_enc": torch.zeros(3)}, f"{at}.W_enc", r"shape \[width, features\], got \[3\]"),
        ({"W_dec": torch.zeros(WIDTH, FEATURES)}, f"{at}.W_dec", r"shape \[9, 6\].*got \[6, 9\]"),
        ({"b_dec": torch.zeros(1)}, f"{at}.b_dec", r"expected shape \[6\]"),
        (
            {"scaling_factor": torch.full((9,), 2.0)},
            f"{at}.scaling_factor",
            "all factors must be 1",
        ),
        (tensors(True), "`standard`, but there is a tensor `threshold`"),
    )
    assert load({"scaling_factor": torch.ones(FEATURES)}).num_features == FEATURES
    at.write_bytes(b"\x10" + bytes(30))
    refused(SAE.load, (tmp_path, "expected a safetensors file"))


def test_other_files_are_refused_without_being_read(tmp_path):
    names = ("sae.pt", "sae.bin", "sae.npz", "sae")
    for name in names:
        (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    refused(
        lambda name: SAE.load(tmp_path / name),
        *((name, name.partition(".")[0]) for name in (*names, "gone.safetensors")),
    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_architecture_encodes_as_its_formulas_do(tmp_path, kind):
    given = RandomSae(kind, 24, 60, "blocks.1.hook_resid_post")
    sae = SAE.load(given.write(tmp_path))
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(2))
    active = given.encode(x)
    assert 0 < (active > 0).sum() < active.numel()
    found = sae.encode(x)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), active, atol=1e-5)
    as_array = sae.encode(x.numpy())
    assert isinstance(as_array, np.ndarray)
    assert np.array_equal(as_array, found.numpy())
    assert sae.hook_name == "blocks.1.hook_resid_post"
    if sae.top_k or sae.is_transcoder or sae.normalize != "none":
        with pytest.raises(SpecError, match="a feature cannot be changed by itself"):
            sae.feature(0, value=1)
    else:
        assert sae.feature(0, value=1).layers.indices == (1,)
    if sae.normalize != "none":
        with pytest.raises(SpecError, match="cannot be undone"):
            sae.decode(active)
        return
    decoded = sae.decode(found)
    assert torch.allclose(decoded.double(), given.decode(found), atol=1e-5)
    assert np.array_equal(sae.decode(as_array), decoded.numpy())


def test_a_mean_norm_is_a_factor_of_the_input(tmp_path):
    given = RandomSae("standard", 24, 60, "blocks.1.hook_resid_post")
    x = torch.randn(4, 24)
    active = given.encode(0.25 * x)
    given.config["normalize_activations"] = "expected_average_only_in"
    sae = SAE.load(given.write(tmp_path), input_scale=0.25)
    assert torch.allclose(sae.encode(x).double(), active, atol=1e-5)
    assert torch.allclose(sae.decode(active).double(), given.decode(active) / 0.25, atol=1e-4)


def test_files_of_gemma_scope_are_read(tmp_path):
    given = RandomSae("jumprelu", 24, 60, "blocks.1.hook_resid_post")
    path = given.write_npz(tmp_path / "params.npz")
    x = torch.randn(4, 24)
    for one in (path, tmp_path):
        sae = SAE.load(one, hook_name="blocks.20.hook_resid_post")
        assert torch.allclose(sae.encode(x).double(), given.encode(x), atol=1e-5)
        assert sae.feature(0, value=1).layers.indices == (20,)
    del given.tensors["threshold"]
    with pytest.raises(SpecError, match=r"params\.npz\.architecture: .*no tensor `threshold`"):
        SAE.load(given.write_npz(path))
    np.savez(path, W_enc=np.array([object()]))
    with pytest.raises(SpecError, match=r"params\.npz: missing tensor `b_enc`"):
        SAE.load(path)
    given.tensors["threshold"] = torch.ones(60)
    arrays = {name: tensor.numpy() for name, tensor in given.tensors.items()}
    np.savez(path, **arrays | {"W_enc": np.array([object()])})
    with pytest.raises(SpecError, match=r"params\.npz: expected a \.npz file of arrays"):
        SAE.load(path)


def of_sae_lens(given):
    """An object of sae_lens as it is used here: `cfg.to_dict()` with `metadata`, `state_dict()`."""
    fields = {name: value for name, value in given.config.items() if name != "hook_name"}
    fields["metadata"] = SimpleNamespace(hook_name=given.config["hook_name"])
    architecture = fields.pop("architecture")
    config = SimpleNamespace(to_dict=lambda: fields, architecture=lambda: architecture)
    return SimpleNamespace(cfg=config, state_dict=lambda: given.tensors)


def test_objects_of_sae_lens_are_read():
    x = torch.randn(4, 24)
    for kind in ("gated", "topk", "jumprelu", "skip"):
        given = RandomSae(kind, 24, 60, "blocks.1.hook_resid_post")
        sae = SAE.from_saelens(of_sae_lens(given))
        assert torch.allclose(sae.encode(x).double(), given.encode(x), atol=1e-5)
        assert sae.hook_name == "blocks.1.hook_resid_post"
    refused(SAE.from_saelens, ("gpt2-small", "expected an SAE of the package sae_lens, got `str`"))


def test_a_release_and_its_id_are_those_of_sae_lens(monkeypatch):
    given = RandomSae("jumprelu", 24, 60, "blocks.12.hook_resid_post")
    asked = []

    def from_pretrained(release, sae_id, device):
        asked.append((release, sae_id, device))
        return of_sae_lens(given)

    package = SimpleNamespace(SAE=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "sae_lens", package)
    sae = SAE.load("gemma-scope-2b-pt-res-canonical", "layer_12/width_16k/canonical")
    assert asked == [("gemma-scope-2b-pt-res-canonical", "layer_12/width_16k/canonical", "cpu")]
    x = torch.randn(4, 24)
    assert torch.allclose(sae.encode(x).double(), given.encode(x), atol=1e-5)
    assert sae.tap == ("resid_post", 12)
    with pytest.raises(SpecError, match="apply_b_dec_to_input: the release specifies it"):
        SAE.load("gemma", "layer_12", apply_b_dec_to_input=True)
    monkeypatch.setitem(sys.modules, "sae_lens", None)
    with pytest.raises(MissingExtraError, match="pip install sae-lens; or download the SAE"):
        SAE.load("gemma-scope-2b-pt-res-canonical", "layer_12/width_16k/canonical")


def test_what_a_gated_sae_lacks_is_refused_by_name(tmp_path):
    given = RandomSae("gated", 24, 60, "blocks.1.hook_resid_post")
    given.config["normalize_decoder"] = True
    with pytest.raises(SpecError, match="normalize_decoder: expected False, got True"):
        SAE.load(given.write(tmp_path))
    del given.config["normalize_decoder"], given.tensors["r_mag"]
    with pytest.raises(SpecError, match="missing tensor `r_mag`"):
        SAE.load(given.write(tmp_path))
