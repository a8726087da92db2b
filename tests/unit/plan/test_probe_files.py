"""A probe's file has all of it, and what is known of it; damaged and forged files are refused."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from support.refusals import refused_calls
from unit.plan.strategies import floats32, probes

from midstream import Probe, Steer
from midstream.errors import SpecError
from midstream.plan import MLP, Plan, Stop, Switch
from midstream.plan.positions.prompt import Prompt
from midstream.plan.probe_files import archive
from midstream.plan.probe_files.info import Calibration, ProbeInfo, check_models, model_name
from midstream.plan.resolve.resolve import resolve
from midstream.plan.resolve.wire import to_bytes
from midstream.plan.shape import ModelShape

SHAPE = ModelShape(4, 4, frozenset({("resid_post", layer) for layer in range(4)}), {})
INFO = ProbeInfo(
    "org/Small", 4, 4, {"kind": "logistic", "C": 0.5, "seed": 3, "groups": None}, "StandardScaler",
    1.25, "ab" * 32, {"auc": 0.9, "auc_low": 0.8}, ("kind", "rude"),
    Calibration("isotonic", ((-1.0, 0.0), (2.0, 0.75))), "of two forums",
)  # fmt: skip
PROBE = Probe(np.arange(1.0, 5.0), layer=3, bias=0.5, name="guard").with_info(INFO)

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.none() | st.booleans() | st.integers(-(2**31), 2**31) | floats32 | words
infos = st.builds(
    ProbeInfo,
    model=words,
    width=st.integers(0, 2**17),
    num_layers=st.integers(0, 200),
    recipe=st.dictionaries(words, scalars, max_size=4),
    scaler=words,
    threshold=st.none() | floats32,
    data_hash=words,
    scores=st.dictionaries(words, floats32, max_size=4),
    classes=st.lists(words, max_size=3).map(tuple),
    calibration=st.none() | st.builds(
        lambda a, b: Calibration("sigmoid", ((a, b),)), floats32, floats32
    ),
    notes=words,
)  # fmt: skip


@given(probes(), st.none() | infos)
@settings(max_examples=150, deadline=None)
def test_a_file_has_the_probe_and_what_is_known_of_it(probe, info):
    wanted = probe.with_info(info)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "p.safetensors"
        wanted.save(path)
        read = Probe.load(path)
        assert (read, read.info) == (wanted, info)
        assert read.to_dict() == wanted.to_dict()
        with safe_open(path, "numpy") as file:
            assert all(file.get_tensor(key).dtype == np.float32 for key in file.keys())  # noqa: SIM118
        assert [entry.name for entry in Path(folder).iterdir()] == ["p.safetensors"]


def test_networks_and_vectors_of_switches_are_tensors_by_the_path_of_their_field(tmp_path):
    switch = Switch([Steer(np.ones(4), layer=1)], above=1.0)
    network = MLP(np.arange(12.0).reshape(3, 4), np.ones(3), np.arange(3.0), "tanh")
    probe = Probe(mlp=network, layer=2, positions="generated", act=switch)
    probe.save(tmp_path / "p.safetensors")
    assert Probe.load(tmp_path / "p.safetensors") == probe
    with safe_open(tmp_path / "p.safetensors", "numpy") as file:
        shapes = {key: file.get_tensor(key).shape for key in file.keys()}  # noqa: SIM118
    assert shapes.pop("mlp.hidden") == (3, 4)
    assert shapes.pop("mlp.output") == shapes.pop("mlp.hidden_bias") == (3,)
    assert list(shapes.values()) == [(4,)]


def test_what_is_known_changes_neither_equality_nor_requests_and_stays_with_the_weights():
    bare = PROBE.with_info(None)
    assert (bare, hash(bare), repr(bare)) == (PROBE, hash(PROBE), repr(PROBE))
    assert "info" not in PROBE.to_dict()
    assert {"direction", "diff", "info", "save", "with_info"} <= set(dir(PROBE))
    packed = [
        to_bytes(resolve(Plan(probes=(probe,)), SHAPE, Prompt(3), 2)) for probe in (bare, PROBE)
    ]
    assert packed[0] == packed[1]
    assert b"org/Small" not in packed[1]
    assert Probe.parse(PROBE.to_dict()).info is None
    assert pickle.loads(pickle.dumps(PROBE)).info == INFO
    moved = PROBE.replace(name="other", positions="generated", act=Stop(above=1.0))
    assert moved.info == INFO
    assert PROBE.replace(bias=1.0).info is None
    assert PROBE.replace(layer=2).info is None


def forged(path, header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def written(tmp_path, change, tensors=None, name="f"):
    """A file whose metadata `change` has spoilt."""
    PROBE.save(tmp_path / "good.safetensors")
    with safe_open(tmp_path / "good.safetensors", "numpy") as file:
        parts = json.loads(file.metadata()[archive.KEY])
    change(parts)
    rows = {"direction": np.arange(1, 5, dtype="f4")} if tensors is None else tensors
    path = tmp_path / f"{name}.safetensors"
    save_file(rows, path, {archive.KEY: json.dumps(parts)})
    return path


def test_damaged_forged_and_foreign_files_are_refused(tmp_path):
    PROBE.save(tmp_path / "good.safetensors")
    data = (tmp_path / "good.safetensors").read_bytes()
    bad = tmp_path / "bad.safetensors"
    for length in range(0, len(data), 7):
        bad.write_bytes(data[:length])
        with pytest.raises(SpecError, match=r"path: .*bad\.safetensors: .*(cut short|damaged)"):
            Probe.load(bad)
    bad.write_bytes(data + b"x")
    with pytest.raises(SpecError, match="damaged"):
        Probe.load(bad)

    def load(path):
        return lambda: Probe.load(path)

    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    deep = json.loads("[" * 200 + "]" * 200)
    many = {str(n): "" for n in range(65)}
    row = np.ones(4, "f4")
    nan = np.array([1, np.nan, 1, 1], "f4")

    def spoilt(change, tensors=None):
        name = f"f{len(list(tmp_path.iterdir()))}"
        return load(written(tmp_path, change, tensors, name))

    refused_calls(
        (load(tmp_path / "gone.safetensors"), "path", "it cannot be read"),
        (load(tmp_path), "path", "it cannot be read"),
        (load(forged(tmp_path / "g", (1 << 40).to_bytes(8, "little"))), "path", "."),
        (load(forged(tmp_path / "h", b" " * (1 << 20) + b"{}")), "header of 1048578 bytes"),
        (load(forged(tmp_path / "i", {"direction": entry}, b"\0" * 16)), "not the file of a probe"),
        (load(forged(tmp_path / "j", b'{"a": 1, "a": 2}')), "duplicate JSON field"),
        (load(forged(tmp_path / "k", [1])), "not the file of a probe"),
        (spoilt(lambda parts: parts.update(version=2)), "metadata.version: expected 1, got 2"),
        (spoilt(lambda parts: parts.update(more=2)), "unknown field 'more'"),
        (spoilt(lambda parts: parts.pop("info")), "missing field `info`"),
        (spoilt(lambda parts: parts.update(probe=[])), "probe: expected an object"),
        (spoilt(lambda parts: parts["probe"].update(more=1)), "probe: unknown field 'more'"),
        (spoilt(lambda parts: parts["probe"].update(positions=deep)), "at most 32 levels"),
        (spoilt(lambda parts: parts["info"].update(scores=many)), "at most 64 entries"),
        (spoilt(lambda parts: parts["info"].update(notes="x" * 16_001)), "16000 characters"),
        (spoilt(lambda parts: parts["info"].update(width=-1)), "info.width: expected at least 0"),
        (spoilt(lambda parts: parts["info"].update(threshold="1")), "info.threshold: expected a n"),
        (spoilt(lambda parts: None, {"direction": nan}), r"probe.direction\[1\]: expected a"),
        (spoilt(lambda parts: None, {"direction": row.astype("f2")}), "expected dtype F32, got"),
        (spoilt(lambda parts: None, {"direction": row.astype("f8")}), "expected dtype F32, got"),
        (spoilt(lambda parts: None, {"direction": row[None, None]}), "probe.direction"),
        (spoilt(lambda parts: None, {"other": row}), "probe.direction: expected the tensor"),
        (spoilt(lambda parts: None, {"direction": row, "z": row}), "tensor 'z' is no part"),
    )  # fmt: skip
    with open(tmp_path / "long.safetensors", "wb") as file:
        file.truncate(archive.MAX_FILE_BYTES + 1)
    with pytest.raises(SpecError, match="a file of 268435457 bytes; expected at most 268435456"):
        Probe.load(tmp_path / "long.safetensors")


def test_what_cannot_be_in_a_file_is_not_written(tmp_path):
    refused_calls(
        (lambda: PROBE.save(tmp_path / "p.json"), "path", "ends in .safetensors"),
        (lambda: Probe("mood", layer=1).save(tmp_path / "p.safetensors"), "mood is a name"),
        (lambda: PROBE.with_info({"modle": "x"}), "info", "unknown field 'modle'"),
        (lambda: PROBE.with_info({"scores": {"auc": np.nan}}), "info.scores['auc']", "finite"),
        (lambda: Calibration.parse({"method": "isotonic", "values": [[1, 0], [1, 1]]}), "ascend"),
        (lambda: Calibration.parse({"method": "sigmoid", "values": []}), "one pair"),
        (lambda: PROBE.diff(3), "other", "expected a Probe"),
    )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_another_model_or_width_is_refused_with_the_names_of_both(tmp_path):
    PROBE.save(tmp_path / "p.safetensors")

    def engine(model, shape=SHAPE):
        return SimpleNamespace(
            model_config=SimpleNamespace(model=model), info=SimpleNamespace(shape=shape)
        )

    for model in ("org/Small", "me/small", "/models/small", ""):
        assert Probe.load(tmp_path / "p.safetensors", engine(model)) == PROBE
    wide = replace(SHAPE, hidden_size=8)
    cases = [
        ("org/Large", SHAPE, r"on org/Small \(width 4, 4 layers\), and .* org/Large \(width 4"),
        ("org/Small", wide, r"on org/Small \(width 4, .* runs org/Small \(width 8, 4 layers\)"),
        ("x/y", replace(SHAPE, num_layers=9), r"runs x/y \(width 4, 9 layers\)"),
    ]  # fmt: skip
    for model, shape, problem in cases:
        with pytest.raises(SpecError, match=problem):
            Probe.load(tmp_path / "p.safetensors", engine(model, shape))
        with pytest.raises(SpecError, match=rf"probes\[1\]: .*{problem}"):
            check_models([PROBE.with_info(None), PROBE], model, shape)
    cached = "/cache/hub/models--org--Small/snapshots/1a2b"
    assert [model_name(name) for name in (cached, "/data/tiny/", "a/b", "b")] == [
        "org/Small",
        "tiny",
        "a/b",
        "b",
    ]


def test_a_difference_has_fields_cosines_and_changes():
    other = Probe([2.0, 0.0, 0.0, 0.0], layer=2, bias=0.5, name="guard").with_info(
        replace(INFO, threshold=1.0, scores={"auc": 0.95, "brier": 0.1})
    )
    found = PROBE.diff(other)
    assert found.cosines == {"direction": pytest.approx(1 / np.sqrt(30))}
    assert set(found.fields) == {
        "layer", "direction.norm", "info.threshold", "info.scores.auc", "info.scores.auc_low",
        "info.scores.brier",
    }  # fmt: skip
    assert found.fields["info.scores.brier"] == (None, 0.1)
    assert found.changes["info.threshold"] == -0.25
    assert found.changes["info.scores.auc"] == pytest.approx(0.05)
    assert "cosine of direction: 0.182574" in str(found)
    assert "info.threshold: 1.25 → 1.0 (-0.25)" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["changes"] == found.changes
    same = PROBE.diff(PROBE)
    assert (bool(same), same.cosines) == (False, {"direction": pytest.approx(1.0)})
    wider = PROBE.diff(Probe(np.ones(6), layer=3, bias=0.5, name="guard"))
    assert wider.fields["direction.shape"] == ([4], [6])
    assert not wider.cosines


def test_calibrated_probabilities_are_platts_or_linear_between_knots():
    assert INFO.calibration([-5.0, -1.0, 0.5, 2.0, 9.0]).tolist() == [0, 0, 0.375, 0.75, 0.75]
    sigmoid = Calibration("sigmoid", ((-2.0, 0.5),))
    scores = np.array([[-1000.0, 0.0], [0.25, 1000.0]])
    wanted = 1 / (1 + np.exp(np.clip(-2.0 * scores + 0.5, -700, 700)))
    np.testing.assert_allclose(sigmoid(scores), wanted, rtol=1e-12, atol=1e-300)
