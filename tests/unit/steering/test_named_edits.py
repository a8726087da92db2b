"""Names for whole edits: tiers, clamps and other operations under one name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from midstream.client.protocol import upload_of
from midstream.errors import NoRoomError, SpecError
from midstream.plan import Ablate, Clamp, Gate, ModelShape, Named, Plan, Probe, Route, Scale, Steer
from midstream.plan.operations import bind_edit
from midstream.plan.vectors.named_lookup import NamedEdits
from midstream.steering import VectorRegistry
from midstream.steering.tiers import Steering

SHAPE = ModelShape(4, 3, [("resid_post", layer) for layer in range(4)])
V, W = [1.0, 2.0, 2.0], [0.0, -1.0, 0.0]
CLAMP = Clamp(W, 3, high=2.0, phase="generated")
CALM = {"base": {1: V}, "prompt": Steer(W, 2), "generated": [Ablate(V, 0)], "edits": [CLAMP]}
EXPANDED = (
    Steer(V, 1, site="resid_post"),
    Steer(W, 2, phase="prompt"),
    Ablate(V, 0, phase="generated"),
    CLAMP,
)


@pytest.fixture
def registry() -> VectorRegistry:
    found = VectorRegistry(SHAPE)
    found.register("calm", CALM)
    return found


def expand(registry, edit):
    return bind_edit(edit, registry.lookup, SHAPE.num_layers)


def test_a_name_stands_for_its_tiers_and_then_its_edits(registry):
    assert registry.lookup("calm") == NamedEdits(EXPANDED)
    assert expand(registry, Steer("calm")) == EXPANDED


def test_prefill_and_decode_are_other_words_for_prompt_and_generated(registry):
    registry.register("same", {"base": {1: V}, "prefill": Steer(W, 2), "decode": Ablate(V, 0),
                               "edits": CLAMP})  # fmt: skip
    registry.register("sent", json.loads(json.dumps(upload_of(CALM))))
    assert registry.lookup("same") == registry.lookup("calm") == registry.lookup("sent")


def test_scales_multiply_the_scale_of_each_steer_and_nothing_else(registry):
    gate = Gate(Steer(V, 1, 4.0), Probe(W, 0), threshold=1.0)
    registry.register("gated", {"edits": [gate, Scale(2.0, 1), Steer(V, 2, -1.0)]})
    found = expand(registry, Steer(Named("gated", 0.5), scale=3.0))
    assert found == (
        Gate(Steer(V, 1, 6.0), Probe(W, 0), threshold=1.0),
        Scale(2.0, 1),
        Steer(V, 2, -1.5),
    )


def test_a_steer_for_whole_edits_has_a_scale_only(registry):
    places = {"layer": 1, "site": "resid_post", "norm": "match", "phase": "prompt", "positions": 0}
    refused(
        lambda field: expand(registry, Steer("calm", **{field: places[field]})),
        *((field, field, "must be omitted: `calm`") for field in places),
    )
    refused(
        lambda edit: expand(registry, edit),
        (Steer(Named("calm", 0.0)), "scale", "0 would leave the ablate of `calm`"),
        (Ablate("calm"), "registered with whole edits"),
        (Clamp("calm", high=1.0), "registered with whole edits"),
        (Gate(Steer("calm"), Probe(V, 0), threshold=0.0), "registered with whole edits"),
    )
    refused(
        lambda probe: probe.bind(registry.lookup), (Probe("calm", 1), "registered with whole edits")
    )


def test_a_plan_counts_expanded_edits_under_the_edit_of_the_request(registry):
    plan = Plan(edits=(Scale(2.0, 0), Steer("calm"), Scale(3.0, 0))).bind(registry.lookup, 4)
    assert plan.edits == (Scale(2.0, 0), *EXPANDED, Scale(3.0, 0))
    assert plan.origins == (0, 1, 1, 1, 1, 2)


def test_names_within_a_name_are_resolved_when_it_is_registered(registry):
    registry.register("v", {1: V})
    registry.register("both", {"base": [("v", 2.0), "calm"]})
    registry.register("v", {1: W})
    registry.remove("calm")
    assert expand(registry, Steer("both")) == (Steer(V, 1, scale=2.0, site="resid_post"), *EXPANDED)


def test_server_wide_steering_takes_a_name_of_whole_edits_in_the_base_tier(registry):
    steering = Steering(registry)
    assert steering.set(base=("calm", 2.0)).base == expand(registry, Steer("calm", scale=2.0))
    with pytest.raises(SpecError, match="must be omitted: `calm`") as caught:
        steering.set(prompt="calm")
    assert caught.value.path == "prompt.phase"


def test_edits_that_do_not_fit_the_model_are_rejected_and_nothing_changes(registry):
    refused(
        lambda value: registry.register("calm", value),
        ({"base": []}, "vectors", "there is no edit"),
        ({"base": [], "15": V}, "vectors", "unknown field"),
        ({"base": {4: V}}, "vectors.base[4].layer", "layer 4 is out of range"),
        ({"edits": [Steer([1.0], 0)]}, "vectors.edits[0].vector", "expected 3 numbers"),
        ({"base": "sad"}, "vectors.base", "'sad'"),
        ({"base": [CLAMP]}, "vectors.base[0].phase", "contradicts the tier"),
        ({"edits": [5]}, "vectors.edits[0]", "expected an edit"),
        (
            {"prompt": [Steer(V, 1)], "prefill": [Steer(V, 1)]},
            "vectors.prefill",
            "the same tier as `prompt`",
        ),
    )
    assert registry.lookup("calm") == NamedEdits(EXPANDED)


def test_the_description_counts_operations_and_names_every_tap(registry):
    (found,) = registry.list()
    assert found.taps == tuple(("resid_post", layer) for layer in range(4))
    assert found.norms == ()
    assert found.edits == ("steer", "steer", "ablate", "clamp")
    assert found.to_dict()["edits"] == ["steer", "steer", "ablate", "clamp"]
    assert "2 steer, 1 ablate, 1 clamp" in str(registry)
    registry.register("v", {1: V})
    assert "edits" not in registry.list()[1].to_dict()


def test_the_digest_follows_the_edits(registry):
    (before,) = registry.list()
    registry.register("calm", CALM)
    assert registry.list()[0].digest == before.digest
    registry.register("calm", {**CALM, "edits": Clamp(W, 3, high=2.5, phase="generated")})
    assert registry.list()[0].digest != before.digest
    assert registry.list()[0].registered == 3


def test_the_limit_of_bytes_counts_the_vectors_of_the_edits(registry):
    with pytest.raises(NoRoomError):
        VectorRegistry(SHAPE).register("calm", CALM, room=12 * 4 - 1)
    VectorRegistry(SHAPE).register("calm", CALM, room=12 * 4)


def test_a_saved_name_is_registered_from_its_file(registry, tmp_path):
    registry.register("v", {1: V, 2: W})
    registry.register("lone", V)
    for name in ("calm", "v", "lone"):
        registry.save(name, tmp_path / f"{name}.json")
        registry.register("again", tmp_path / f"{name}.json")
        assert registry.lookup("again") == registry.lookup(name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calm.json", "lone.json", "v.json"]
    with pytest.raises(SpecError, match=r"ends in \.json"):
        registry.save("calm", tmp_path / "calm.bin")


@given(st.binary(max_size=40) | st.recursive(
    st.none() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["base", "edits", "op", "vector", "1"]), inner, max_size=3),
    max_leaves=6,
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_other_file_is_rejected_with_its_name(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("files") / "x.json"
    path.write_bytes(content)
    # A vector of it has more numbers than such a file.
    registry = VectorRegistry(ModelShape(4, 50, [("resid_post", 1)]))
    with pytest.raises(SpecError):
        registry.register("x", path)
    assert len(registry) == 0


def test_edits_of_sites_of_any_width_are_registered_within_a_limit():
    z, router = ("z", 0), ("router", 0)
    shape = ModelShape(1, 3, [z, router], widths={z: 6, router: 8}, heads={z: 2})
    registry = VectorRegistry(shape)
    edits = [Steer([1.0] * 6, 0, site="z"), Steer(V, 0, site="z", head=1), Route(7, layer=0),
             Gate(Scale([1.0] * 6, 0, site="z"), [1.0] * 6)]  # fmt: skip
    found = registry.register("x", {"edits": edits}, room=84)
    assert found.edits == ("steer", "steer", "route", "gate")
    with pytest.raises(NoRoomError, match="84 bytes"):
        registry.register("y", {"edits": edits}, room=167)
