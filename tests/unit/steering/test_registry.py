"""Names for vectors, checked against a model."""

import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from midstream.client.protocol import upload_of
from midstream.errors import NoRoomError, SpecError
from midstream.plan import Affine, ModelShape, Plan, Steer, Vector
from midstream.plan.vectors.matrix import matrix_of
from midstream.plan.vectors.named_vector import Named
from midstream.steering import VectorRegistry
from midstream.steering import registry as module

# Four layers, three wide; resid_mid is tapped at layer 2 only, and layer 0 has none.
SHAPE = ModelShape(
    4,
    3,
    [*(("resid_post", layer) for layer in range(4)), ("resid_mid", 2)],
    {("resid_mid", 0): "it has no norm there"},
)
V, W = Vector.parse([1.0, 2.0, 2.0]), Vector.parse([0.0, -1.0, 0.0])


@pytest.fixture
def registry() -> VectorRegistry:
    return VectorRegistry(SHAPE)


def test_what_is_registered_is_looked_up_by_tap_in_the_order_of_a_forward_pass(registry):
    registry.register("happy", {"resid_post": {-1: V, 2: W}, "post_attn": {2: V}})
    assert list(registry.lookup("happy").items()) == [
        (("resid_mid", 2), V),
        (("resid_post", 2), W),
        (("resid_post", 3), V),
    ]
    assert "happy" in registry
    assert "sad" not in registry
    assert len(registry) == 1


def test_one_vector_is_for_no_tap_in_particular(registry):
    for value in (V, [1, 2, 2], np.asarray([1.0, 2, 2]), V.emit()):
        registry.register("plain", value)
        assert dict(registry.lookup("plain")) == {None: V}


def test_a_file_is_registered_like_its_dict(registry, tmp_path):
    np.savez(tmp_path / "v.npz", **{"post_attn.2": V.numpy(), "-1": W.numpy()})
    registry.register("file", tmp_path / "v.npz")
    registry.register("dict", {("resid_mid", 2): V, 3: W})
    assert registry.lookup("file") == registry.lookup("dict")
    np.savez(tmp_path / "one.npz", vector=V.numpy())
    registry.register("one", str(tmp_path / "one.npz"))
    assert dict(registry.lookup("one")) == {None: V}


def test_a_scale_is_multiplied_in(registry):
    registry.register("x", {1: {"vector": V, "scale": -2}})
    assert registry.lookup("x")[("resid_post", 1)] == Vector.parse([-2.0, -4.0, -4.0])
    with pytest.raises(SpecError, match="overflows float32") as caught:
        registry.register("x", {1: {"vector": [3e38, 0, 0], "scale": 2}})
    assert caught.value.path == "vectors[1][0]"


M, N = np.arange(9.0).reshape(3, 3), np.eye(3)


def test_matrices_are_registered_by_layer_or_for_any(registry):
    registry.register("act", {1: M, -1: N})
    assert dict(registry.lookup("act")) == {
        ("resid_post", 1): matrix_of(M),
        ("resid_post", 3): matrix_of(N),
    }
    description = registry.register("one", M.tolist())
    assert dict(registry.lookup("one")) == {None: matrix_of(M)}
    assert (description.width, description.norms) == (3, (float(np.linalg.norm(M)),))
    for name in ("act", "one"):
        registry.register("again", registry.form(name))
        assert registry.lookup("again") == registry.lookup(name)
    for value in ({1: M, -1: N}, {"resid_post": {1: M}}, M):
        registry.register("here", value)
        registry.register("there", json.loads(json.dumps(upload_of(value))))
        assert registry.lookup("there") == registry.lookup("here")
        registry.remove("here")
        registry.remove("there")
    with pytest.raises(NoRoomError, match="72 bytes plus 144 registered bytes exceed"):
        registry.register("two", {1: M, 2: N}, room=200)
    bound = Plan.make(edits=Affine(matrix="act")).bind(registry.lookup, 4)
    assert [(edit.layers.indices, edit.matrix) for edit in bound.edits] == [
        ((1,), matrix_of(M)),
        ((3,), matrix_of(N)),
    ]


def test_matrices_and_vectors_are_not_taken_for_each_other(registry):
    registry.register("act", {1: M})
    registry.register("v", {1: V})
    refused(
        lambda edit: Plan.make(edits=edit).bind(registry.lookup, 4),
        (Affine(matrix="v"), "edits[0].matrix", "a square matrix: .*, got a vector of 3 numbers"),
        (Affine(matrix="act", layer=2), "edits[0].layer", "has no vector for layer 2"),
        (Affine(matrix="nobody"), "edits[0]", "no vectors are registered as 'nobody'"),
        (Steer("act"), "edits[0].vector", "expected a list of numbers, .*, got `Matrix`"),
    )


def test_what_does_not_fit_the_model_is_refused_and_nothing_changes(registry):
    registry.register("x", V)
    refused(
        lambda value: registry.register("x", value),
        ({1: np.eye(2)}, "vectors[1]", "3 numbers a row.*, got 2"),
        ({1: M[:2]}, "vectors[1]", r"square .*, got shape \[2, 3\]"),
        ({1: {"vector": M, "scale": 2}}, "vectors[1].scale", "expected 1 with a matrix, got 2"),
        ([1.0], "vectors", "expected 3 numbers, the model's hidden size, got 1"),
        ({1: [1.0] * 4}, "vectors[1]", "expected 3 numbers"),
        ({"resid_post": {4: V}}, 'vectors["resid_post"][4]', "layer 4 is out of range"),
        ({-5: V}, "vectors[-5]", "out of range"),
        (
            {"resid_pre": {1: V}},
            'vectors["resid_pre"][1]',
            r'resid_pre at layer 1 is not tapped; .*midstream=\{"sites": \["resid_pre"',
        ),
        ({("resid_mid", 3): V}, 'vectors[("resid_mid", 3)]', "is not tapped"),
        (
            {"resid_mid": {0: V}},
            'vectors["resid_mid"][0]',
            "cannot be tapped: it has no norm there",
        ),
        ({3: V, -1: V}, "vectors[-1]", r"the same tap as \[3\]"),
        (5, "vectors", "expected a list of numbers"),
        ("nowhere.npz", "vectors", "nowhere.npz: No such file"),
    )
    assert registry.lookup("x")[None] == V
    assert registry.list()[0].registered == 1


@given(name=st.text(max_size=8) | st.from_regex(r"[\w.:/ -]{0,80}", fullmatch=True))
def test_a_name_that_can_be_registered_can_be_asked_for_and_no_other(name):
    registry = VectorRegistry(SHAPE)
    try:
        registry.register(name, V)
    except SpecError:
        with pytest.raises(SpecError):
            Named(name)
        return
    assert Steer(name, layer=1).bind(registry.lookup) == (Steer(V, layer=1),)


def test_what_cannot_be_a_name_is_refused(registry):
    names = ("", "a b", "é", "a\n", ".a", "/a", "x" * 129, 3, None)
    refused(lambda name: registry.register(name, V), *((name, "name", "") for name in names))
    assert len(registry) == 0


def test_an_unknown_name_is_refused_with_those_that_are_there(registry):
    refused(registry.lookup, ("hapy", "no vectors are registered as 'hapy'; registered: none"))
    registry.register("happy", V)
    description, vectors = registry.show("happy")
    assert (description,) == registry.list()
    assert vectors == registry.lookup("happy")
    refused(registry.lookup, ("hapy", r"did you mean `happy`\?\); registered: `happy`"))
    refused(registry.lookup, (3, "`str`, got `int`"))
    refused(registry.lookup, ("v.safetensors", r"llm\.vectors\.register\(name, path\)"))
    for ask in (registry.remove, registry.show):
        refused(ask, ("hapy", "did you mean"))
    registry.remove("happy")
    assert "happy" not in registry
    assert list(registry.list()) == []


def test_there_is_room_for_so_many_names_and_for_replacing_one(registry, monkeypatch):
    monkeypatch.setattr(module, "MAX_NAMES", 1)
    registry.register("x", V)
    with pytest.raises(SpecError, match="remove one first"):
        registry.register("y", V)
    registry.register("x", W)
    assert registry.lookup("x")[None] == W


def test_a_plan_that_was_bound_keeps_its_vectors_when_the_name_is_replaced(registry):
    registry.register("mood", {1: V})
    plan = Plan.make(edits=Steer("mood", scale=2))
    before = plan.bind(registry.lookup)
    looked_up = registry.lookup("mood")
    registry.register("mood", {2: W})
    assert before.edits == (Steer(V, layer=1, scale=2),)
    assert dict(looked_up) == {("resid_post", 1): V}
    assert plan.bind(registry.lookup).edits == (Steer(W, layer=2, scale=2),)
    registry.remove("mood")
    assert before.edits == (Steer(V, layer=1, scale=2),)


def test_readers_see_the_old_vectors_or_the_new_ones_never_a_mixture(registry):
    both = [{layer: [float(n)] * 3 for layer in range(4)} for n in (1, 2)]
    registry.register("x", both[0])
    seen, stop = set(), threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(frozenset(vector.digest for vector in registry.lookup("x").values()))
            registry.list()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for nth in range(300):
        registry.register("x", both[nth % 2])
        registry.register(f"other{nth}", V)
    stop.set()
    for thread in readers:
        thread.join()
    assert seen
    assert all(len(digests) == 1 for digests in seen)


def test_descriptions_are_sorted_and_say_what_is_there(registry):
    registry.register("b", {1: V, 3: W})
    registry.register("a", W)
    described = registry.register("a", V)
    first, second = registry.list()
    assert first == described
    assert (first.name, first.taps, first.norms, first.width) == ("a", (None,), (3.0,), 3)
    assert first.registered == 2
    assert second.taps == (("resid_post", 1), ("resid_post", 3))
    assert second.norms == (3.0, 1.0)
    assert second.to_dict()["taps"] == [["resid_post", 1], ["resid_post", 3]]


def test_a_digest_covers_taps_and_contents_and_nothing_else(registry):
    def digest(vectors):
        return registry.register("x", vectors).digest

    assert digest({1: V, 2: W}) == digest({("resid_post", 2): W, "post_block": {-3: V}})
    different = [{1: V, 2: W}, {1: W, 2: V}, {1: V}, {2: V}, V, {("resid_mid", 2): V}]
    assert len({digest(vectors) for vectors in different}) == len(different)
    assert registry.register("y", V).digest == digest(V)


def test_a_listing_prints_as_a_table(registry):
    assert str(registry) == "no named vectors"
    assert registry._repr_html_() == "<p>no named vectors</p>"
    registry.register("happy", dict.fromkeys(range(4), V))
    head, row = str(registry.list()).splitlines()
    assert head.split() == ["name", "taps", "norms", "width", "digest", "registered", "edits"]
    assert row.startswith("happy  resid_post.0, resid_post.1, resid_post.2, resid_post.3  3, 3, 3")
    assert str(registry.list()[0]) == str(registry.list())
    assert registry._repr_html_().startswith("<table><thead><tr><th>name</th>")
    assert "<td>happy</td>" in registry.list()._repr_html_()


def test_html_is_escaped():
    from midstream.steering.listing import html_table

    assert html_table(["<b>"], [["a & <i>"]]) == (
        "<table><thead><tr><th>&lt;b&gt;</th></tr></thead>"
        "<tbody><tr><td>a &amp; &lt;i&gt;</td></tr></tbody></table>"
    )


def test_vectors_take_no_more_room_than_there_is_and_a_name_makes_room_for_itself(registry):
    registry.register("a", {1: V, 2: V}, 36)
    for vectors in ({1: V, 2: V}, {1: V, 2: V, 3: V}):
        with pytest.raises(NoRoomError, match="plus 24 registered bytes exceed the limit of 36"):
            registry.register("b", vectors, 36)
    assert "b" not in registry
    registry.register("b", V, 36)
    registry.register("a", {2: W, 3: W}, 36)
    registry.remove("b")
    registry.register("a", {1: V, 2: V, 3: V}, 36)
    registry.register("c", {1: V, 2: V, 3: V})


def test_an_unknown_name_is_found_out_fast_among_as_many_names_as_there_may_be(registry):
    for nth in range(module.MAX_NAMES):
        registry.register(f"{'direction-' * 9}{nth:04}", V)
    began = time.process_time()
    with pytest.raises(SpecError, match="did you mean"):
        registry.lookup(f"{'direction-' * 9}x000")
    assert time.process_time() - began < 0.3
