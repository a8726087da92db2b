"""`SweepRequest`: its JSON form, its defaults, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midstream import KL, LogProb, Text
from midstream.errors import SpecError
from midstream.lab.sweep import SweepRequest
from midstream.lab.sweep.edits import check_sizes
from midstream.lab.sweep.source import NameSource, PromptSource, RowsSource, ZeroSource, read_source
from midstream.plan import Named, Positions
from midstream.plan.shape import ModelShape
from midstream.results.activations import Activations
from midstream.results.arrays import Heads

SOURCES = st.one_of(
    st.text(min_size=1, max_size=10).map(lambda text: f"a {text}"),
    st.lists(st.integers(0, 1000), min_size=1, max_size=5),
    st.just(0),
    st.just({"name": "average"}),
    st.just({"captured": "some-id", "positions": [1, 2]}),
)
ITEMS = st.sampled_from(["prompt", "last_prompt", 3, -1, {"text": "Japan"}, {"slice": [0, 4, 1]}])
FIELDS = st.fixed_dictionaries(
    {"source": SOURCES, "metric": st.sampled_from([{"logprob": 3}, "kl", {"recovered": "kl"}])},
    optional={
        "layers": st.sampled_from(["all", 3, [0, -1]]),
        "sites": st.sampled_from(["z", ["resid_pre", "mlp_out"]]),
        "heads": st.sampled_from(["all", 1, [0, 2]]),
        "align": st.sampled_from(["suffix", "prefix", {"0": 3, "-1": -1}]),
        "alpha": st.floats(-2, 2, width=32),
        "mask": st.sampled_from([[1, 2], {"f32": "AACAPwAAAD8="}]),
        "repeats": st.integers(0, 10),
    },
)
PLACES = st.one_of(
    st.just({}),
    st.builds(lambda item: {"positions": item}, ITEMS),
    st.just({"positions": "prompt", "exclude": [0]}),
    st.builds(lambda item: {"groups": {"one": item, "all": "prompt"}}, ITEMS),
)


@given(FIELDS, PLACES)
def test_a_request_is_read_from_its_json_form(fields, places):
    request = SweepRequest.parse({**fields, **places})
    plain = request.to_dict()
    again = SweepRequest.parse(json.loads(json.dumps(plain)))
    assert again.to_dict() == plain
    assert again == request


@given(FIELDS, st.sampled_from([2.5, -1, 0, "a prompt", {"name": "average"}]))
def test_a_request_of_features_is_read_from_its_json_form(fields, source):
    others = {name: one for name, one in fields.items() if name not in ("heads", "mask")}
    request = SweepRequest.parse({**others, "source": source, "sae": "s", "features": [9, 4]})
    again = SweepRequest.parse(json.loads(json.dumps(request.to_dict())))
    assert again == request
    assert again.features == (9, 4)
    assert set(again.left) == {"layers", "sites"} - set(fields)


def test_omitted_layers_and_sites_are_those_of_the_sae_or_the_defaults():
    request = SweepRequest(0, KL(), sae="s", features=3, layers=[0, 2])
    placed = request.at_tap(("mlp_out", 1))
    assert (placed.layers.indices, placed.sites, placed.left) == ((0, 2), ("mlp_out",), ())
    with pytest.raises(SpecError, match="has no hook point") as error:
        request.at_tap(None)
    assert error.value.path == "sites"
    assert SweepRequest(0, KL()).at_tap(None).sites == ("resid_post",)
    request = SweepRequest("a prompt", KL())
    assert request.layers.indices == "all"
    assert request.sites == ("resid_post",)
    assert request.positions == Positions("prompt")
    assert (request.alpha, request.dims, request.weights, request.repeats) == (1.0, (), None, 3)
    assert SweepRequest.parse(request) is request


def test_a_source_is_told_by_its_form_and_one_without_rows_is_none():
    assert read_source("a prompt") == PromptSource("a prompt")
    assert read_source([1, 2]) == PromptSource([1, 2])
    messages = [{"role": "user", "content": "hello"}]
    assert read_source(messages) == PromptSource(messages)
    assert read_source({"prompt_token_ids": [1]}) == PromptSource({"prompt_token_ids": [1]})
    assert read_source(0) == read_source("zero") == read_source(0.0) == ZeroSource()
    assert read_source("mean:average") == read_source(Named("average")) == NameSource("average")
    at = {("z", 1): torch.arange(3), ("z", 2): torch.arange(0)}
    rows = {tap: torch.randn(len(each), 4) for tap, each in at.items()}
    heads = dict.fromkeys(rows, Heads(2))
    found = read_source(Activations(rows, at, [5, 6, 7], heads=heads))
    assert isinstance(found, RowsSource)
    assert found.positions == {("z", 1): (0, 1, 2)}
    nothing = {("z", 2): rows["z", 2]}
    with pytest.raises(SpecError, match="these activations have no rows"):
        read_source(Activations(nothing, {("z", 2): at["z", 2]}, [5]))


def test_rows_are_one_for_each_position_or_one_for_all():
    several = read_source({("resid_pre", 3): np.ones((4, 8)), "z.2": np.zeros((4, 2, 4))})
    assert isinstance(several, RowsSource)
    assert several.length == 4
    assert several.positions == dict.fromkeys([("resid_pre", 3), ("z", 2)], (0, 1, 2, 3))
    assert several.rows["z", 2].shape == (4, 8)
    one = read_source({("blocks.3.hook_resid_pre"): [1.0, 2.0]})
    assert isinstance(one, RowsSource)
    assert one.positions == {("resid_pre", 3): ()}
    again = read_source(json.loads(json.dumps(several.emit())))
    assert isinstance(again, RowsSource)
    assert again.positions == several.positions
    assert all((again.rows[tap] == several.rows[tap]).all() for tap in several.rows)


@pytest.mark.parametrize(
    ("mask", "dims", "weights"),
    [
        ([3, 1], (1, 3), None),
        (2, (2,), None),
        (range(3), (0, 1, 2), None),
        (np.array([0, 2]), (0, 2), None),
        (np.array([False, True, True]), (1, 2), None),
        ([0.0, 1.0], (), [0.0, 1.0]),
        (np.array([0.5, 1.0]), (), [0.5, 1.0]),
        ([0, 0.5], (), [0.0, 0.5]),
    ],
)
def test_integers_of_a_mask_are_indices_and_other_numbers_weights(mask, dims, weights):
    request = SweepRequest("a", KL(), mask=mask)
    assert request.dims == dims
    assert (None if request.weights is None else request.weights.numpy().tolist()) == weights


@pytest.mark.parametrize(
    ("more", "path"),
    [
        ({"source": ""}, "source"),
        ({"source": float("nan"), "sae": "a", "features": 3}, "source"),
        ({"sae": "a"}, "features"),
        ({"features": 3}, "sae"),
        ({"sae": "a", "features": [3, 3]}, "features"),
        ({"sae": "a", "features": "all"}, "features"),
        ({"sae": "a", "features": 3, "heads": "all"}, "heads"),
        ({"sae": "a", "features": 3, "mask": [1]}, "mask"),
        ({"source": {("nowhere", 3): [1.0]}}, "source"),
        ({"source": {("z", 0): np.ones((2, 3)), ("z", 1): np.ones((3, 3))}}, "source"),
        ({"source": "mean:.."}, "source.name"),
        ({"source": Named("a", 2.0)}, "source.scale"),
        ({"metric": "logprob"}, "metric"),
        ({"metric": {"logprob": -1}}, "metric.logprob"),
        ({"layers": []}, "layers"),
        ({"sites": "nowhere"}, "sites"),
        ({"positions": "generated"}, "positions"),
        ({"positions": ["prompt", "last_row"]}, "positions[1]"),
        ({"positions": 1, "groups": {"a": 1}}, "positions"),
        ({"groups": {}}, "groups"),
        ({"groups": {"a": "generated"}}, "groups.a"),
        ({"heads": "some"}, "heads"),
        ({"align": "middle"}, "align"),
        ({"alpha": "1"}, "alpha"),
        ({"mask": []}, "mask"),
        ({"repeats": -1}, "repeats"),
        ({"repeat": 3}, ""),
    ],
)
def test_malformed_requests_are_refused_by_their_path(more, path):
    with pytest.raises(SpecError) as error:
        SweepRequest.parse({"source": "a", "metric": LogProb(3), **more})
    assert error.value.path == path


def test_a_function_has_no_json_form():
    request = SweepRequest("a", len)
    with pytest.raises(SpecError, match="no JSON form"):
        request.to_dict()
    with pytest.raises(SpecError, match="no JSON form"):
        SweepRequest.parse({"source": "a", "metric": len})
    assert SweepRequest("a", KL(), positions=Text("b")).to_dict()["positions"] == [
        {"text": "b", "occurrence": "all"}
    ]


@pytest.mark.parametrize("align", ["suffix", {3: -1}, {-1: 0, 0: -2}])
def test_activations_alone_do_not_say_where_their_prompt_ends(align):
    rows = Activations(
        {("resid_pre", 0): torch.ones(2, 4)}, {("resid_pre", 0): torch.tensor([0, 1])}, [5, 6, 7]
    )
    with pytest.raises(SpecError, match="where that is; give the output") as error:
        SweepRequest(rows, KL(), align=align)
    assert error.value.path == "align"
    output = SimpleNamespace(activations=rows, prompt_token_ids=[5, 6, 7], outputs=[])
    assert SweepRequest(output, KL(), align=align).source.length == 3
    for other in ("exact", "prefix", {-1: 0}):
        SweepRequest(rows, KL(), align=other)


def test_a_mask_of_truth_values_is_as_long_as_the_vectors():
    chosen = np.array([True, False, True, False])
    request = SweepRequest(0, KL(), mask=chosen)
    assert request.dims == (0, 2)
    taps = frozenset([("resid_pre", 0)])
    check_sizes(request, taps, ModelShape(2, 4, taps))
    for mask in (chosen[:3], torch.tensor([True] * 2), np.array([True] + [False] * 7)):
        with pytest.raises(SpecError, match="expected 4 truth values") as error:
            check_sizes(SweepRequest(0, KL(), mask=mask), taps, ModelShape(2, 4, taps))
        assert error.value.path == "mask"
    with pytest.raises(SpecError, match="one dimension"):
        SweepRequest(0, KL(), mask=chosen.reshape(2, 2))
