"""Each operation's fields: what they take, and what is refused, by its path."""

import warnings

import numpy as np
import pytest
import torch
from support.refusals import refused, refused_calls

from midstream.errors import ScaleWarning, SpecError
from midstream.plan import (
    Ablate,
    Affine,
    Capture,
    Clamp,
    Feature,
    LoReFT,
    Named,
    Positions,
    Probe,
    Reading,
    Reconstruct,
    Replace,
    Scale,
    Steer,
    Vector,
)
from midstream.plan.operations import steer as steer_module

STEER = {"op": "steer", "vector": [1, 2], "layer": -2}


def test_a_steer_has_its_fields_in_canonical_form():
    steer = Steer([1, 2], np.int64(3), np.float32(2), "post_attn", "all", "generated")
    assert steer.vector == Vector.parse([1, 2])
    assert (steer.layers.indices, steer.scale, steer.sites.names) == ((3,), 2.0, ("resid_mid",))
    assert type(steer.scale) is float
    assert steer.positions == Positions("all", "generated")
    assert Steer([1], 0) == Steer([1], [0], 1, ["resid_post"], ["all"], "all", None)
    assert Steer([1], range(2)).layers.indices == (0, 1)
    assert Steer([1], "all").layers.indices == "all"


def test_a_dict_is_the_arguments_and_what_is_emitted_has_every_field():
    assert Steer.parse(STEER).to_dict() == {
        "op": "steer",
        "vector": {"f32": "AACAPwAAAEA="},
        "scale": 1.0,
        "norm": None,
        "layer": -2,
        "site": "resid_post",
        "positions": ["all"],
        "phase": "all",
    }
    several = {"layer": [1, 2], "site": ["resid_pre", "mlp_out"], "exclude": [0, -1]}
    assert several.items() <= Steer.parse({**STEER, **several}).to_dict().items()


def test_a_steer_has_a_token_instead_of_a_vector():
    steer = Steer(token=" Paris", layer=[3, 4], scale=2)
    given = {"op": "steer", "token": " Paris", "lens": "logit", "scale": 2.0, "layer": [3, 4]}
    assert given.items() <= steer.to_dict().items()
    assert Steer(token=7, layer=1, lens="tuned").replace(layer=2).lens == "tuned"
    assert steer.is_bound
    with pytest.raises(SpecError, match=r"llm\.lenses\.direction"):
        steer.instructions(8)


def test_a_malformed_token_is_refused_by_its_path():
    refused(
        lambda given: Steer(**given),
        ({"token": 3}, "layer", "missing"),
        ({"token": 3, "layer": 1, "vector": [1]}, "token", "`vector` is given too"),
        ({"vector": [1], "layer": 1, "lens": "tuned"}, "lens", "is for `token`"),
        ({"token": -1, "layer": 1}, "token", "from 0"),
        ({"token": "", "layer": 1}, "token", "an empty one"),
        ({"token": 3, "layer": 1, "site": "attn_out"}, "site", "a lens reads the stream"),
        ({"token": 3, "layer": 1, "head": 2}, "head", "of the whole vector"),
    )


def test_equal_numbers_are_emitted_alike():
    assert str(Steer([1], 0, scale=-0.0).scale) == "0.0"
    assert str(Scale(-0.0, 0).factor) == "0.0"
    assert str(Ablate([1], 0, strength=0).instructions(1)[0].a) == "0.0"


def test_an_unknown_or_ambiguous_argument_is_rejected_by_name():
    refused_calls(
        (lambda: Steer([1], 0, coeff=2), "coeff", "argument of Steer .did you mean `scale`"),
        (lambda: Ablate([1], 0, scale=2), "scale", "argument of Ablate .did you mean `strength`"),
        (lambda: Scale(1, 0, hook_point="x"), "hook_point", "did you mean `site`"),
        (lambda: Probe([1], 0, nme="x"), "nme", "did you mean `name`"),
        (lambda: Steer([1], 0, layers=1), "layers", "`layer` is given too"),
        (lambda: Steer([1], 0, site="resid_pre", sites="resid_post"), "sites", "`site` is given"),
        (lambda: Capture([0], layer=1), "layer", "`layers` is given too"),
        (lambda: Steer([0, 0], 0), "vector", "the vector is zero"),
        (lambda: Steer({0: [1], 1: [0]}), "vector[1]", "the vector is zero"),
    )


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_arrays_and_tensors_are_layers_positions_and_numbers(kind):
    wanted = Steer([1], [0, 2], 2.0, positions=[1, -1])
    assert Steer([1], kind([0, 2]), kind(2.0), positions=kind([1, -1])) == wanted
    assert Steer([1], kind(3), kind([2.0])) == Steer([1], 3, 2.0)
    assert Capture(kind([0, 2]), positions=kind(1)) == Capture([0, 2], positions=1)
    assert Probe([1], kind(3), bias=kind([0.5])) == Probe([1], 3, bias=0.5)
    for mistake in (kind([1.0]), kind([True]), kind(1.5)):
        with pytest.raises(SpecError, match="expected .*`int`.* got `(float|bool)`"):
            Capture(mistake)


def test_both_spellings_of_layers_and_sites_are_accepted():
    wanted = Steer([1], [3, 4], site="resid_pre")
    assert Steer([1], layers=[3, 4], sites="resid_pre") == wanted
    assert Steer.parse({"vector": [1], "layers": [3, 4], "sites": "resid_pre"}) == wanted
    assert Probe([1], layers=3, sites="resid_pre") == Probe([1], 3, site="resid_pre")
    assert Reading([1], layers=3, sites="resid_pre") == Reading([1], layer=3, site="resid_pre")
    assert Capture(layer=3, site="resid_pre") == Capture([3], "resid_pre")
    assert Capture.parse({"layer": 3}) == Capture(3)
    assert "layers" not in wanted.to_dict()


def test_a_huge_scale_warns_once(monkeypatch):
    monkeypatch.setattr(steer_module, "_has_warned", False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        Steer([3.0] * 64, 0, 33)
        Steer([1.0] * 64, 0, 10, norm="match")
        Steer([1.0] * 64, 0, 1e8, norm="keep")
        assert not seen
        Steer([3.0] * 64, 0, -34)
        Steer([1.0] * 64, 0, 1e8)
        Steer([1.0] * 64, 0, 11, norm="match")
    assert [each.category for each in seen] == [ScaleWarning]
    assert seen[0].filename == __file__


def test_one_direction_or_row_may_stand_alone():
    assert Ablate([1, 2], 0) == Ablate([[1, 2]], 0) == Ablate(np.array([[1, 2]]), 0)
    assert Replace([1, 2], 0) == Replace([[1, 2]], 0)
    assert Affine([1, 0], [0, 1], 0, 2) == Affine([[1, 0]], torch.tensor([[0, 1]]), 0, [2])


def test_a_value_to_clamp_to_is_a_range_of_one():
    assert Clamp([1], 0, 3) == Clamp([1], 0, low=3, high=3)
    assert Clamp.parse({"direction": [1], "layer": 0, "value": 3}) == Clamp([1], 0, 3)


def test_a_features_bias_has_that_of_the_decoder_in_it():
    folded = Feature([1, 2], [3, 4], 0, value=1, bias=5, decoder_bias=[0.5, 0.25])
    assert folded == Feature([1, 2], [3, 4], 0, value=1, bias=4)
    two = Feature([[1, 2], [0, 4]], [[3, 4], [0, 0]], 0, value=1, bias=5, decoder_bias=[0.5, 0.25])
    assert two.bias == (4, 4)
    assert two.to_dict()["bias"] == 4
    assert "decoder_bias" not in folded.to_dict()


def test_a_reconstruction_has_its_fields_in_canonical_form():
    edit = Reconstruct("a", {33: 0.0, 7: 8.0}, error=True, positions=[1])
    assert edit == Reconstruct("a", [33, 7], value=[0, 8], error=True, positions=[1])
    assert edit.to_dict() == {
        "op": "reconstruct",
        "sae": "a",
        "index": [7, 33],
        "mode": "set",
        "value": [8.0, 0.0],
        "error": True,
        "positions": [1],
        "phase": "all",
    }
    given = {"sae": "a", "index": {"7": 8, "33": 0}, "error": True, "positions": [1]}
    assert Reconstruct.parse(given) == edit
    plain = Reconstruct("a", layer=3, site="mlp_out", norm="keep")
    assert {"index", "mode", "value"}.isdisjoint(plain.to_dict())


def test_features_of_a_name_have_one_form_whatever_their_order():
    edit = Feature(sae="a", index={33: 0.0, 7: 8.0})
    assert edit == Feature(sae="a", index=[33, 7], value=[0, 8])
    assert (edit.to_dict()["index"], edit.to_dict()["value"]) == ([7, 33], [8.0, 0.0])
    assert Feature.parse({"sae": "a", "index": {"7": 8, "33": 0}}) == edit
    for named in (edit, Reconstruct("a", {7: 8.0})):
        assert named.names() == ("a",)
        with pytest.raises(SpecError, match="the SAE `a` is not registered"):
            named.instructions(4)


def test_a_scale_has_one_factor_or_one_for_each_component():
    each = Scale([1, 2], 0, shift=[3, 4])
    assert (each.factor, each.shift) == (Vector.parse([1, 2]), Vector.parse([3, 4]))
    assert each == Scale(np.array([1.0, 2.0]), 0, shift=torch.tensor([3, 4]))
    assert each == Scale({"f32": "AACAPwAAAEA="}, 0, shift={"f32": "AABAQAAAgEA="})
    assert Scale(torch.tensor([2.0]), 0) == Scale(2, 0)
    assert "shift" not in Scale(2, 0).to_dict()


NEARLY = [[1.0, 0.01], [0.0, 1.0]]


def test_a_malformed_field_is_refused_by_its_path():
    refused_calls(
        (lambda: Steer("no such name!", 0), "vector", "expected 1 to 128 of the char.*'no such"),
        (lambda: Steer([1]), "layer", "missing; it can be omitted only where .* a registered"),
        (lambda: Steer([1], 0, -1e39), "scale", r"-1e\+39 overflows float32"),
        (
            lambda: Steer([1], 0, positions="last_row"),
            "positions",
            "unsupported in edits, .* known",
        ),
        (
            lambda: Steer([1], 0, positions=[0, "last_row"]),
            "positions[1]",
            '"last_row" is unsupported in',
        ),
        (lambda: Steer([1], 0, exclude="nope"), "exclude", "got 'nope'"),
        (lambda: Steer([1], 0, norm="kept"), "norm", "got 'kept' .did you mean `keep`"),
        (lambda: Ablate([[1, 0], [0, 0]], 0), "directions[1]", "the row is zero"),
        (lambda: Ablate([[0.1, 0.2], [0.3, 0.6]], 0), "directions[1]", "dependent on earlier rows"),
        (lambda: Ablate(Named("a", 2), 0), "directions.scale", "only the direction of `a`.*2.0"),
        (lambda: Clamp([1], 0), "", "missing bounds: give `value`, `low` or `high`"),
        (lambda: Clamp([0], 0, 1), "direction", "the vector is zero; expected a direction"),
        (lambda: Clamp([1], 0, 1, low=0), "low", "give either `value`, or `low` and `high`"),
        (lambda: Clamp([1], 0, low=2, high=1), "low", "expected at most `high`, 1.0, got 2.0"),
        (lambda: Clamp({"name": "a", "scale": 2}, 0, 1), "direction.scale", "1, because only the"),
        (lambda: Reconstruct(3), "sae", "the name of a registered SAE"),
        (lambda: Reconstruct("a", error=True), "error", "without `index` nothing would change"),
        (lambda: Reconstruct("a", mode="ablate"), "mode", "only with `index`"),
        (lambda: Reconstruct("a", value=1), "value", "only with `index`"),
        (lambda: Reconstruct("a", [1]), "value", "missing: modes .* require a value"),
        (lambda: Reconstruct("a", [1, 1], "ablate"), "index[1]", "given twice"),
        (lambda: Reconstruct("a", site="router"), "site", "expected one of `resid_pre`"),
        (lambda: Feature("a", [1], 0, value=1), "encoder", "got `str`"),
        (lambda: Feature([1], [1], 0, "pin", 1), "mode", "expected one of `set`"),
        (lambda: Feature([1], [1], 0), "value", "missing: modes `set`, `add`, `scale` require"),
        (lambda: Feature([1], [1], 0, "ablate", 0), "value", '"ablate" takes no value'),
        (lambda: Feature([1], [1], 0, value=1, threshold=-0.5), "threshold", "at least 0, got -0"),
        (
            lambda: Feature([1], [1], 0, value=1, decoder_bias=[1, 2]),
            "decoder_bias",
            "expected 1 numbers, as in `encoder`, got 2",
        ),
        (lambda: Feature([[1], [2]], [[1]], 0, value=1), "decoder", "expected 2 rows.*, got 1"),
        (lambda: Feature([[1], [2]], [[1], [2]], 0, value=[1]), "value", "2 numbers, .*, got 1"),
        (lambda: Feature([1], [1], 0, value=1, index=3), "index", "only with `sae`"),
        (lambda: Feature(layer=0, value=1), "encoder", "missing; .*, or `sae` and `index`"),
        (lambda: Feature(sae=object(), index=3, value=1), "sae", "name of a registered SAE"),
        (lambda: Feature(sae="a", value=1), "index", "missing; give the id of a feature"),
        (lambda: Feature(sae="a", index=3), "value", "missing: modes"),
        (lambda: Feature(sae="a", index={3: 1.0}, value=1), "value", "`index` has the values"),
        (lambda: Feature(sae="a", index={3: 1.0}, mode="ablate"), "index", "takes no value"),
        (lambda: Feature(sae="a", index={}, value=1), "index", "1 to 256 features, got 0"),
        (lambda: Feature(sae="a", index=[3, 3], value=1), "index[1]", "feature 3 is given twice"),
        (lambda: Feature(sae="a", index={3: 1, "3": 2}), "index['3']", "3 is given twice"),
        (lambda: Feature(sae="a", index=-1, value=1), "index", "ids from 0, got -1"),
        (lambda: Feature(sae="a", index=["1"], value=1), "index[0]", "expected `int`"),
        (lambda: Feature([1], sae="a", index=1, value=1), "encoder", "unsupported with `sae`"),
        (lambda: Feature(sae="a", index=1, value=1, head=0), "head", "unsupported with `sae`"),
        (lambda: Affine([[1], [2]], [[1]], 0), "write", r"shape of `read`, \[2, 1\], got \[1, 1\]"),
        (lambda: Affine([1], [1], 0, [1, 2]), "bias", "expected 1 numbers, one per row"),
        (lambda: Affine(layer=0), "read", "missing; give `read` and `write`, or `matrix`"),
        (lambda: Affine([1], layer=0), "write", "missing; give as many rows as in `read`"),
        (lambda: Affine([1], matrix=[[1]], layer=0), "read", "unsupported with `matrix`"),
        (lambda: Affine(matrix=[[1]], layer=0, head=1), "head", "maps the whole vector"),
        (lambda: LoReFT(NEARLY, NEARLY, 0, 0), "rotation", "orthonormal rows.*by 0.01, more than"),
        (lambda: LoReFT([1, 0], [[1, 0], [0, 1]], 0, 0), "weight", "the shape of `rotation`"),
        (lambda: Ablate([1], 0, norm="match"), "norm", "expected one of `keep`, got .match"),
        (lambda: Steer(layer=0), "vector", "missing; give a vector, one row per position"),
        (lambda: Steer([1], 0, rows=[[1]]), "rows", "`vector` is given too; give one of them"),
        (lambda: Steer(rows=[[0], [0]], layer=0), "rows", "all rows are zero"),
        (lambda: Steer(rows=[[1], [1, 2]], layer=0), "rows[1]", "expected 1 numbers"),
        (lambda: Replace(Named("x", 2), 0), "rows.scale", "1, because `x` is used as it is"),
        (lambda: Replace(["x", Named("y", 2)], 0), "rows[1].scale", "`y` is used as it is"),
    )


def test_a_dict_of_another_kind_is_refused():
    refused(
        lambda change: Steer.parse({**STEER, **change}),
        ({"op": "ablate"}, "op", "expected one of `steer`, got 'ablate'"),
        ({"scales": 3}, "", "unknown field 'scales' .did you mean `scale`"),
        ({"bias": 3}, "", "unknown field 'bias'; known: `vector`, `layer`, `scale`"),
    )
    refused(Steer.parse, ({"layer": 0}, "vector", "missing; give a vector"))
    refused(Clamp.parse, ({"layer": 0}, "", "missing field `direction`"))


def test_a_rotation_stored_in_bfloat16_is_orthonormal_enough_and_one_that_is_not_is_refused():
    rows = torch.linalg.qr(torch.randn(2048, 4, generator=torch.Generator().manual_seed(0)))[0].T
    LoReFT(rows.bfloat16(), rows, 0, 0)
    with pytest.raises(SpecError, match="more than 0.001"):
        LoReFT(rows + 0.01, rows, 0, 0)


def test_a_vector_of_another_width_is_refused_when_lowered():
    words = "3 numbers, the model's hidden size, got 2"
    refused(
        lambda edit: edit.instructions(3),
        (Steer([1, 2], 0, norm="match"), "vector", words),
        (Scale([1, 2], 0, shift=[3, 4]), "factor", words),
        (Scale(2, 0, shift=[1, 2]), "shift", words),
        (Feature([1, 2], [1, 2, 3], 0, value=1), "encoder[0]", words),
        (Feature([1, 2, 3], [1, 2], 0, value=1), "decoder[0]", words),
        (Feature([1, 2], [1, 2, 3], 0, "add", value=1), "encoder[0]", words),
    )
