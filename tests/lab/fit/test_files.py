"""Files of directions: what is written is read, by others too; what is forged is rejected."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.refusals import refused_calls

from midstream.errors import MissingExtraError, SpecError
from midstream.lab.fit import Directions, LayerScore
from midstream.lab.fit.files import KEY
from midstream.plan.shape import ModelShape
from midstream.steering import VectorRegistry

numbers = st.floats(-(2.0**100), 2.0**100, width=32)
unit_numbers = st.floats(0, 1)


@st.composite
def directions(draw, first=0, site=None):
    """Directions of any layers and width, with or without midpoints and scores."""
    layers = sorted(draw(st.sets(st.integers(first, 200), min_size=1, max_size=5)))
    width = draw(st.integers(1, 6))

    def rows():
        size = len(layers) * width
        found = draw(st.lists(numbers, min_size=size, max_size=size))
        return np.array(found, np.float32).reshape(len(layers), width)

    scored = draw(st.sets(st.sampled_from(layers)))
    score = st.builds(LayerScore, unit_numbers, unit_numbers, st.floats(-50, 50))
    return Directions(
        rows(),
        tuple(layers),
        site or draw(st.sampled_from(["resid_post", "mlp_out", "z"])),
        draw(st.sampled_from([None, rows()])),
        {layer: draw(score) for layer in scored},
        draw(st.sampled_from(["", "mean", "Pipeline"])),
        draw(st.integers(0, 9)),
        draw(st.text(max_size=5)),
    )


def check_same(found, wanted):
    np.testing.assert_array_equal(found.vectors, wanted.vectors)
    assert found.vectors.dtype == np.float32
    assert (found.midpoints is None) == (wanted.midpoints is None)
    if wanted.midpoints is not None:
        np.testing.assert_array_equal(found.midpoints, wanted.midpoints)
    for name in ("layers", "site", "scores", "method", "num_folds", "model_type"):
        assert getattr(found, name) == getattr(wanted, name), name


@given(directions())
@settings(max_examples=60)
def test_a_file_of_safetensors_has_everything(wanted):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "d.safetensors"
        wanted.save(path)
        check_same(Directions.load(path), wanted)
        assert [one.name for one in Path(folder).iterdir()] == ["d.safetensors"]


@given(directions(first=1, site="resid_post"))
@settings(max_examples=60)
def test_a_control_vector_has_the_vectors_and_the_model(wanted):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "d.gguf"
        wanted.to_gguf(path)
        bare = Directions(wanted.vectors, wanted.layers, model_type=wanted.model_type)
        check_same(Directions.from_gguf(path), bare)
        reader = gguf.GGUFReader(path)
        for tensor in reader.tensors:
            layer = int(tensor.name.removeprefix("direction."))
            np.testing.assert_array_equal(tensor.data, wanted[layer].vector)
        assert len(reader.tensors) == len(wanted)
        assert reader.get_field("general.architecture").contents() == "controlvector"
        hint = reader.get_field("controlvector.model_hint")  # left out if it is empty
        assert (hint.contents() if hint else "") == wanted.model_type
        assert reader.get_field("controlvector.layer_count").contents() == len(wanted)
        del reader, tensor  # it maps the file


def small(layers=(1, 2)):
    rows = np.arange(1, 3 * len(layers) + 1, dtype=np.float32).reshape(-1, 3)
    scores = {layers[0]: LayerScore(0.5, 1.0, 2.0, 0.125, None, 0.25)}
    return Directions(rows, layers, "resid_post", rows + 1, scores, "mean", 5, "llama")


def test_an_engine_registers_the_file_and_the_directions(tmp_path):
    taps = frozenset({("resid_post", layer) for layer in range(4)})
    registry = VectorRegistry(ModelShape(4, 3, taps, {}))
    small().save(tmp_path / "d.safetensors")
    registry.register("file", tmp_path / "d.safetensors")
    small().register(SimpleNamespace(vectors=registry), "all")
    small()[2].register(SimpleNamespace(vectors=registry), "one")
    assert registry.lookup("file") == registry.lookup("all")
    assert registry.lookup("one") == {("resid_post", 2): registry.lookup("all")["resid_post", 2]}
    np.testing.assert_array_equal(
        registry.lookup("all")["resid_post", 1].numpy(), small().vectors[0]
    )


def test_a_control_vector_lacks_layer_0_of_a_fit_of_all_layers_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"d\.gguf: layer 0 is left out: llama\.cpp counts"):
        small((0, 2)).to_gguf(tmp_path / "d.gguf")
    bare = Directions(small((0, 2)).vectors[1:], (2,), model_type=small().model_type)
    check_same(Directions.from_gguf(tmp_path / "d.gguf"), bare)


def test_what_a_format_cannot_have_and_missing_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(SpecError, match=r"path: expected a name that ends in \.safetensors"):
        small().save(tmp_path / "d.gguf")
    with pytest.raises(SpecError, match=r"path: expected a name that ends in \.gguf"):
        small().to_gguf(tmp_path / "d.safetensors")
    with pytest.raises(SpecError, match=r"path: expected a name that ends in \.gguf"):
        Directions.from_gguf(tmp_path / "d.safetensors")
    with pytest.raises(SpecError, match="layers: llama.cpp counts layers from 0.* the only one"):
        small((0,)).to_gguf(tmp_path / "d.gguf")
    with pytest.raises(SpecError, match="site: control vectors are of resid_post; these are of z"):
        Directions(np.ones((1, 3), np.float32), (1,), "z").to_gguf(tmp_path / "d.gguf")
    assert not list(tmp_path.iterdir())
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingExtraError, match=r"to_gguf needs the package gguf.*midstream\[fit\]"
    ):
        small().to_gguf("x.gguf")
    with pytest.raises(MissingExtraError, match=r"logistic.*needs the package sklearn"):
        Directions.from_rows(np.ones((4, 1, 3)), np.zeros((4, 1, 3)), "logistic")


def test_a_file_of_vectors_alone_steers_and_has_no_probe(tmp_path):
    np.savez(tmp_path / "v.npz", **{"mlp_out.3": np.ones(4), "mlp_out.7": np.ones(4)})
    found = Directions.load(tmp_path / "v.npz")
    assert (found.layers, found.site, found.midpoints, found.scores) == (
        (3, 7),
        "mlp_out",
        None,
        {},
    )
    assert found[7].steer(2.0).sites.names == ("mlp_out",)
    with pytest.raises(SpecError, match="midpoint: a file of vectors alone has no midpoint"):
        found[3].probe()
    with pytest.raises(SpecError, match="midpoints: a file of vectors alone"):
        found.project(np.ones((2, 1, 4)))
    with pytest.raises(SpecError, match="scores: nothing was held out"):
        _ = found.best_layer


GOOD = {
    "version": 1, "method": "mean", "num_folds": 5, "model_type": "llama",
    "midpoints": {"1": [0, 0, 1], "2": [0, 0, 2]}, "scores": {"1": [0.5, 1.0, 2.0]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 2}, "metadata.version: expected 1, got '2'"),
        ({"more": 1}, "metadata: unknown field 'more'"),
        ({"num_folds": "5"}, "metadata.num_folds: expected `int`"),
        ({"midpoints": []}, ""),
        ({"midpoints": [1]}, "metadata.midpoints: expected an object by layer, got `list`"),
        ({"midpoints": {"1": [0, 0, 1]}}, "metadata.midpoints: expected one of the vectors' width"),
        ({"midpoints": {"1": [0], "2": [1]}}, "metadata.midpoints: expected one of the vectors'"),
        ({"midpoints": {"1": [0, 0, 1], "9": [0]}}, "the file has no vector of this layer"),
        (
            {"scores": {"1": [0.5, 1.0]}},
            r"scores\['1'\]: expected \[auc, accuracy, d_prime, auc_",
        ),
        ({"scores": {"1": [0.5, None, 1.0]}}, r"scores\['1'\]: expected a number, got `None`"),
    ],
)
def test_forged_metadata_are_rejected(tmp_path, change, match):
    path = tmp_path / "d.safetensors"
    tensors = {f"resid_post.{layer}": np.ones(3, np.float32) for layer in (1, 2)}
    save_file(tensors, path, {KEY: json.dumps(GOOD | change)})
    if not match:
        assert Directions.load(path).midpoints is None
        return
    with pytest.raises(SpecError, match=match) as raised:
        Directions.load(path)
    assert str(path) in str(raised.value)


@given(st.text(max_size=40))
@settings(max_examples=40)
def test_metadata_of_any_text_are_read_or_rejected(text):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "d.safetensors"
        save_file({"1": np.ones(3, np.float32)}, path, {KEY: text})
        with pytest.raises(SpecError):
            Directions.load(path)


def test_files_and_forms_whose_layers_cannot_be_are_rejected(tmp_path):
    save_file({"vector": np.ones(3, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(SpecError, match="its vector has no layer"):
        Directions.load(tmp_path / "a.safetensors")
    both = {"1": np.ones(3, np.float32), "mlp_out.1": np.ones(3, np.float32)}
    save_file(both, tmp_path / "b.safetensors")
    with pytest.raises(SpecError, match="expected vectors of one site, got mlp_out, resid_post"):
        Directions.load(tmp_path / "b.safetensors")
    save_file({"1": np.ones((3, 3), np.float32)}, tmp_path / "c.safetensors")
    with pytest.raises(SpecError, match="expected a vector of a layer from 0"):
        Directions.load(tmp_path / "c.safetensors")
    (tmp_path / "d.pkl").write_bytes(b"\x80")
    with pytest.raises(SpecError, match="pickles"):
        Directions.load(tmp_path / "d.pkl")
    rows = np.random.default_rng(0).normal(size=(5, 2, 4))
    form = Directions.from_rows(rows + 1, rows).to_json()
    first, second = form["layers"]
    with pytest.raises(SpecError, match=r"layers\[1\]\.layer: 0 is given twice"):
        Directions.from_json({**form, "layers": [first, first, second]})
    for parts, wrong in (([first, {**second, "midpoint": None}], 1),
                         ([{**first, "midpoint": None}, second], 1)):  # fmt: skip
        with pytest.raises(SpecError, match=rf"layers\[{wrong}\]\.midpoint: expected one at every"):
            Directions.from_json({**form, "layers": parts})


def test_repengs_vectors_are_read_and_written():
    given_ = SimpleNamespace(model_type="mistral", directions={2: np.ones(3), 1: np.zeros(3)})
    found = Directions.from_repeng(given_)
    assert (found.layers, found.site, found.model_type) == ((1, 2), "resid_post", "mistral")
    again = found.to_repeng()
    assert again["model_type"] == "mistral"
    np.testing.assert_array_equal(again["directions"][2], np.ones(3, np.float32))
    with pytest.raises(SpecError, match="control_vector: expected an object with `directions`"):
        Directions.from_repeng({1: np.ones(3)})
    given_.directions = {-1: np.ones(3)}
    with pytest.raises(
        SpecError, match=r"control_vector.directions\[-1\]: expected a layer from 0"
    ):
        Directions.from_repeng(given_)
    given_.directions = {1: np.full(3, np.nan)}
    with pytest.raises(SpecError, match=r"control_vector.directions\[1\]\[0\]: expected a finite"):
        Directions.from_repeng(given_)


# Neuronpedia's schema of POST /api/vector/new, apps/webapp/app/api/vector/new/route.tsx.
NEURONPEDIA = {
    "type": "object",
    "additionalProperties": False,
    "required": [
        "modelId", "layerNumber", "hookType", "vector", "vectorDefaultSteerStrength", "vectorLabel",
    ],
    "properties": {
        "modelId": {"type": "string", "minLength": 1},
        "layerNumber": {"type": "integer", "minimum": 0},
        "hookType": {"enum": ["hook_resid_pre", "hook_resid_post"]},
        "vector": {"type": "array", "maxItems": 24576, "items": {"type": "number"}},
        "vectorDefaultSteerStrength": {"type": "number", "minimum": -300, "maximum": 300},
        "vectorLabel": {"type": "string", "minLength": 1},
    },
}  # fmt: skip


def test_a_direction_is_what_neuronpedia_takes():
    import jsonschema

    found = Directions(np.array([[0, 1], [-3.5, 0.1]], np.float32), (4, 7), "resid_pre")
    body = json.loads(json.dumps(found[7].to_neuronpedia("gpt2-small", "calm", 2)))
    jsonschema.validate(body, NEURONPEDIA)
    assert np.array(body["vector"], np.float32).tobytes() == found.vectors[1].tobytes()
    expected = {"modelId": "gpt2-small", "vectorLabel": "calm", "vectorDefaultSteerStrength": 2,
                "layerNumber": 7, "hookType": "hook_resid_pre"}  # fmt: skip
    assert {name: value for name, value in body.items() if name != "vector"} == expected
    wide = Directions(np.ones((1, 24_577), np.float32), (0,))[0]
    refused_calls(
        (lambda: Directions(np.ones((1, 2)), (0,), "mlp_out")[0].to_neuronpedia("m", "l"), "site",
         "resid_pre and resid_post, not mlp_out"),
        (lambda: wide.to_neuronpedia("m", "l"), "vector", "24576 numbers, not 24577"),
        (lambda: found[4].to_neuronpedia("", "l"), "model_id", "expected a text"),
        (lambda: found[4].to_neuronpedia("m", 3), "label", "expected a text"),
        (lambda: found[4].to_neuronpedia("m", "l", 301), "strength", "−300 to 300"),
        (lambda: found[4].to_neuronpedia("m", "l", "big"), "strength", "expected a number"),
    )  # fmt: skip
    with pytest.raises(AttributeError, match=r"take \.best\.to_neuronpedia"):
        found.to_neuronpedia("m", "l")


def test_neuronpedias_own_client_sends_the_same(monkeypatch):
    client = pytest.importorskip("neuronpedia.requests.vector_request", reason="needs neuronpedia")
    sent = []

    def request(method, url, *, json, headers):
        sent.append((method, url, json))
        raise ConnectionError

    monkeypatch.setattr("neuronpedia.requests.base_request.requests.request", request)
    found = Directions(np.array([[0.5, 1]], np.float32), (4,))[4]
    with pytest.raises(ConnectionError):
        client.VectorRequest(api_key="none").new(
            "calm", "gpt2-small", 4, "hook_resid_post", found.vector.tolist(), 2.0
        )
    [(method, url, body)] = sent
    assert (method, url.rpartition("/api/")[2]) == ("POST", "vector/new")
    assert body == found.to_neuronpedia("gpt2-small", "calm", 2)
