"""What a twin is loaded from, and what it refuses."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from support import tiny
from support.gradient_oracle import difference
from support.oracle import relative_error

from midstream.errors import SpecError, UnsupportedError
from midstream.lab.attribution import Twin
from midstream.lab.attribution.model_files import ModelFiles

TOKENS = [5, 17, 33, 101, 8, 77, 54, 23, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.make("llama", tmp_path_factory.mktemp("loading"))


SLOWER = [pytest.param(name, marks=pytest.mark.nightly) for name in ("gpt2", "phi", "mixtral")]


@pytest.mark.parametrize("name", ["llama", "gemma2", *SLOWER])
def test_a_twin_of_lower_precision_finds_the_same_sites_and_keeps_its_weights(name, tmp_path):
    folder = tiny.make(name, tmp_path)
    full, half = Twin.load(folder), Twin.load(folder, dtype="bfloat16")
    assert half.shape.taps == full.shape.taps
    assert half.hooked.places == full.hooked.places
    assert half.hooked.inner.places == full.hooked.inner.places
    plain = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, half.hooked.model.state_dict()[key]), key
    sites = ["resid_pre", "attn_out", "mlp_out"]
    expected = full.gradients(TOKENS, difference, sites=sites)
    for tap, gradient in half.gradients(TOKENS, difference, sites=sites).items():
        assert gradient.dtype == torch.float32
        assert relative_error(gradient, expected[tap]) < 0.15, tap


def test_a_twin_works_in_inference_mode_and_without_gradients_and_its_weights_keep_none(folder):
    with torch.inference_mode():
        twin = Twin.load(folder)
        inside = twin.gradients(TOKENS, difference)
    with torch.no_grad():
        without = twin.gradients(TOKENS, difference)
    outside = twin.gradients(TOKENS, difference)
    for tap, gradient in outside.items():
        assert torch.equal(gradient, inside[tap])
        assert torch.equal(gradient, without[tap])
        assert not gradient.requires_grad
    twin = Twin.load(str(folder))
    twin.gradients(TOKENS, difference)
    for name, parameter in twin.hooked.model.named_parameters():
        assert parameter.grad is None, name
        assert not parameter.requires_grad, name
    assert repr(twin) == f"Twin({folder}, float32 on cpu)"


def test_quantised_weights_are_refused_by_their_method(folder, tmp_path):
    copy = tmp_path / "quantised"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"quantised are quantised \(fp8\)"):
        Twin.load(copy)


@pytest.mark.parametrize(
    ("model", "given", "error", "message"),
    [
        ("nowhere", {}, UnsupportedError, "transformers cannot give gradients of .*nowhere"),
        ("", {"dtype": "int8"}, SpecError, "^dtype: expected one of float32, bfloat16, float16"),
        ("", {"dtype": torch.int64}, SpecError, r"^dtype: .* got torch.int64"),
        ("", {"device": "abacus"}, SpecError, "^device: 'abacus' cannot be used"),
        ("", {"device": 1.5}, SpecError, "^device: 1.5 cannot be used"),
    ],
)
def test_what_cannot_be_loaded_is_named(folder, model, given, error, message):
    with pytest.raises(error, match=message):
        Twin.load(folder / model, **given)


@pytest.mark.nightly  # transformers imports much for it
def test_a_model_of_another_kind_is_refused(tmp_path):
    config = hf.T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    hf.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedError, match=f"cannot give gradients of {tmp_path}.*T5Config"):
        Twin.load(tmp_path)


def engine(**changes):
    """What `ModelFiles` reads of an engine."""
    model = {
        "model": "some/model", "quantization": None, "hf_overrides": {}, "revision": "abc",
        "trust_remote_code": False, "hf_config_path": None,
    }  # fmt: skip
    load = SimpleNamespace(load_format=changes.pop("load_format", "auto"))
    config = SimpleNamespace(model_config=SimpleNamespace(**{**model, **changes}), load_config=load)
    return SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))


def test_the_files_of_an_engine_are_those_that_it_loaded():
    assert ModelFiles.of(engine()) == ModelFiles("some/model", "abc", False)
    same = engine(hf_config_path="some/model")
    assert ModelFiles.of(same) == ModelFiles("some/model", "abc", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "awq"}, r"the weights of some/model are quantised \(awq\)"),
        ({"load_format": "dummy"}, "some/model were loaded with load_format='dummy'"),
        ({"load_format": "gguf"}, "load_format='gguf'"),
        ({"hf_overrides": {"rope_theta": 1}}, "some/model was loaded with hf_overrides"),
        (
            {"hf_config_path": "other"},
            "some/model was loaded with the configuration in hf_config_path='other'",
        ),
    ],
)
def test_engines_with_other_weights_than_their_files_are_refused(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        ModelFiles.of(engine(**changes))
    with pytest.raises(UnsupportedError, match=message):
        Twin(engine(**changes))
