"""Fits over HTTP: what is answered, registered and refused, and that ordinary requests go first."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lab.server.routes.test_sweep import Connection
from support.serving_fake import TOKENS, WIDTH, completion, outputs_of, refused, serving

from midstream import Directions
from midstream.errors import SpecError
from midstream.lab.fit.json_form import to_json
from midstream.results.activations import Activations

pytestmark = pytest.mark.anyio
PATH = "/v1/midstream/fit"
VECTORS = "/v1/midstream/vectors"
POSITIVE = ["good a", "nice b", "fine c", "glad d", "kind e"]
NEGATIVE = ["bad f", "sad g", "mean hh", "grim i", "cold j"]
BODY = {"positive": POSITIVE, "negative": NEGATIVE}


def row_of(text, layer):
    """The vector of a text at a layer: of its first characters, so that none are alike."""
    return [float(ord(text[nth]) - 96) * (layer + 1) + nth for nth in range(WIDTH)]


def script(prompt, params, request_id):
    """One output, with a row at each layer that is captured."""
    [capture] = params.extra_args["midstream"].captures
    layers = capture.layers.indices
    layers = range(4) if layers == "all" else sorted(n % 4 for n in layers)
    last = len(prompt) - 1
    values = {("resid_post", n): torch.tensor([row_of(prompt, n)]) for n in layers}
    at = torch.tensor([last])
    found = Activations(values, dict.fromkeys(values, at), torch.tensor(list(map(ord, prompt))))
    return [SimpleNamespace(activations=found, outputs=[completion()], finished=True)]


def expected(method="mean", **given):
    rows = [
        np.array([[row_of(text, n) for n in range(4)] for text in texts], np.float32)
        for texts in (POSITIVE, NEGATIVE)
    ]
    return Directions.from_rows(*rows, method, **given)


@pytest.fixture
async def fitting():
    async with serving() as (site, client):
        site.engine.script = script
        yield site, client


@pytest.mark.parametrize("method", ["mean", "lda", "logistic"])
async def test_a_fit_is_that_of_the_rows_with_its_scores_by_layer(fitting, method):
    site, client = fitting
    answer = (await client.post(PATH, json={**BODY, "method": method, "seed": 3})).json()
    found, wanted = Directions.from_json(answer["directions"]), expected(method, seed=3)
    assert np.array_equal(found.vectors, wanted.vectors)
    assert np.array_equal(found.midpoints, wanted.midpoints)
    assert dict(found.scores) == dict(wanted.scores)
    assert answer["directions"]["best_layer"] == wanted.best_layer
    assert (found.layers, found.method, found.model_type) == ((0, 1, 2, 3), method, "fake")
    assert answer["registered"] is None
    assert not site.engine.vectors.list()


async def test_with_a_name_the_vectors_are_registered(fitting):
    site, client = fitting
    answer = (await client.post(PATH, json={**BODY, "layers": [1, -1], "name": "good"})).json()
    assert answer["registered"]["name"] == "good"
    shown = (await client.get(f"{VECTORS}/good")).json()
    assert shown["taps"] == [["resid_post", 1], ["resid_post", 3]]
    _, vectors = site.engine.vectors.show("good")
    wanted = expected()
    for layer in (1, 3):
        assert np.array_equal(vectors["resid_post", layer].numpy(), wanted[layer].vector)


async def test_groups_are_held_out_together(fitting):
    _, client = fitting
    for groups, given in (
        (list("aabbc"), list("aabbc")),
        ([list("aabbc"), list("ccbba")], (list("aabbc"), list("ccbba"))),
    ):
        answer = (await client.post(PATH, json={**BODY, "groups": groups})).json()
        found = Directions.from_json(answer["directions"])
        assert dict(found.scores) == dict(expected(groups=given).scores)


@pytest.mark.parametrize(
    ("change", "param", "problem"),
    [
        ({"positive": "text"}, "positive", "expected a list of prompts"),
        ({"negative": []}, "negative", "at least one"),
        ({"positive": ["", *POSITIVE[1:]]}, "positive[0]", "at least one token"),
        ({"method": "svm"}, "method", "svm"),
        ({"method": {"a": 1}}, "method", "expected `str`"),
        ({"method": "pca", "negative": NEGATIVE[:3]}, "method", "pairs"),
        ({"layers": [9]}, "layers[0]", "out of range"),
        ({"site": "resid"}, "site", "resid"),
        ({"folds": 1}, "folds", "at least 2"),
        ({"groups": ["a"]}, "groups", "5 keys"),
        ({"name": "../x"}, "name", "name"),
        ({"model": 3}, "model", "name of a model"),
        ({"layer": 3}, "layer", "did you mean"),
        ({"positive": [[{"role": "user", "content": [{"type": "image_url"}]}]]},
         "positive[0][0].content", "no media"),
    ],
)  # fmt: skip
async def test_what_is_malformed_is_refused_with_its_place(fitting, change, param, problem):
    site, client = fitting
    if "layers" in change:

        def checked(prompt, params, request_id):
            raise SpecError("capture.layers[0]", "layer 9 is out of range")

        site.engine.script = checked
    error = await refused(client.post(PATH, json={**BODY, **change}), 400, problem)
    assert error["param"] == param
    assert not site.engine.vectors.list()
    assert not site.engine.states


async def test_prompts_rows_and_vectors_are_limited_and_another_content_type_is_refused():
    async with serving(fit_prompts=9, client_bytes=2000) as (site, client):
        site.engine.script = script
        await refused(client.post(PATH, json=BODY), 400, "http.fit_prompts")
        fewer = {"positive": POSITIVE[:4], "negative": NEGATIVE[:4]}
        asked = {**fewer, "positions": "prompt"}
        await refused(client.post(PATH, json=asked), 400, "http.client_bytes")
        assert not site.engine.calls
        assert (await client.post(PATH, json=fewer)).status_code == 200
    async with serving(inline_bytes=100) as (site, client):
        site.engine.script = script
        await refused(client.post(PATH, content=b"{}", headers={"content-type": "text/plain"}), 415)
        await refused(client.post(PATH, json={**BODY, "name": "x"}), 413, "http.inline_bytes")
        assert not site.engine.vectors.list()


async def test_a_name_needs_what_changes_of_vectors_need_and_a_fit_alone_does_not(monkeypatch):
    named = {**BODY, "name": "x"}
    page = {"origin": "https://example.org"}
    monkeypatch.setenv("MIDSTREAM_ADMIN_KEY", "secret")
    async with serving() as (site, client):
        site.engine.script = script
        await refused(client.post(PATH, json=named), 401, "admin key")
        assert not site.engine.calls
        assert (await client.post(PATH, json=BODY)).status_code == 200
        key = {"x-midstream-admin-key": "secret"}
        assert (await client.post(PATH, json=named, headers=key)).status_code == 200
        assert [one.name for one in site.engine.vectors.list()] == ["x"]
    monkeypatch.delenv("MIDSTREAM_ADMIN_KEY")
    async with serving() as (site, client):
        site.engine.script = script
        await refused(client.post(PATH, json=named, headers=page), 403, "origin")
    async with serving(host="0.0.0.0") as (site, client):
        site.engine.script = script
        await refused(client.post(PATH, json=named), 403, "no key")
        assert not site.engine.calls


async def test_ordinary_requests_go_first(fitting):
    site, client = fitting
    site.engine.limit_seats(8)  # of which a fit has two
    site.server.sweeps.wait_seconds = 3600
    most = 0

    async def pause():
        nonlocal most
        most = max(most, site.engine.running)
        await asyncio.sleep(0)

    site.engine.pause = pause
    assert (await client.post(PATH, json=BODY)).status_code == 200
    assert most == 2
    release, begun = asyncio.Event(), asyncio.Event()

    async def held():
        begun.set()
        await release.wait()

    def of_either(prompt, *given):
        return (outputs_of if prompt == "abc" else script)(prompt, *given)

    site.engine.pause, site.engine.script = held, of_either
    ordinary = asyncio.ensure_future(
        client.post(
            "/v1/completions", json={"prompt": "abc", "midstream": {"capture": {"layers": [1]}}}
        )
    )
    await begun.wait()
    before = len(site.engine.calls)
    fit = asyncio.ensure_future(client.post(PATH, json=BODY))
    await asyncio.sleep(0.1)
    assert len(site.engine.calls) == before  # it has no token yet
    release.set()
    assert len((await ordinary).json()["choices"][0]["text"]) == 2 * TOKENS
    assert (await fit).status_code == 200


async def test_a_client_that_disconnects_ends_its_fit(fitting):
    site, _ = fitting
    never, begun = asyncio.Event(), asyncio.Event()

    async def held():
        begun.set()
        await never.wait()

    site.engine.pause = held
    client = Connection({**BODY, "name": "x"}, PATH)
    answer = client.start(site.app)
    await begun.wait()
    client.gone.set()
    await asyncio.wait_for(answer, 10)
    assert not site.engine.states
    assert not site.engine.vectors.list()
    assert site.server.sweeps.sweeps == 0


def test_the_json_form_is_read_strictly():
    value = to_json(expected())
    again = Directions.from_json(value)
    assert to_json(again) == value
    assert to_json(expected(folds=0))["best_layer"] is None
    for change, path in (
        ({"format": "x"}, "format"),
        ({"layers": []}, "layers"),
        ({"layers": value["layers"][::-1]}, "layers"),
        ({"layers": [{**value["layers"][0], "layer": -1}]}, "layers[0].layer"),
        ({"layers": [{**value["layers"][0], "vector": [float("nan")]}]}, "layers[0].vector[0]"),
        ({"layers": [{**value["layers"][0], "midpoint": [1.0]}]}, "layers[0].midpoint"),
        ({"layers": [{**value["layers"][0], "score": {"auc": 1}}]}, "layers[0].score"),
        ({"num_folds": "5"}, "num_folds"),
        ({"site": "nowhere"}, "site"),
    ):
        with pytest.raises(SpecError) as refusal:
            Directions.from_json({**value, **change})
        assert refusal.value.path == path
