"""A server reads requests in other tools' words, or rejects them; it never ignores a field. And the
parameters that it allows are read from it; and it returns attention weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import controlling, serving
from support.others_words import direction, packed
from support.sae_oracle import RandomSae
from support.serving import NAME, Running
from support.serving_offline import HELLO, TOKENS, VECTOR, assert_equal, plain

from midstream import (
    Attention,
    Capture,
    Client,
    Feature,
    Features,
    Lens,
    Logits,
    Mass,
    Norms,
    Probe,
    Reconstruct,
    Replace,
    Steer,
    Stop,
    Switch,
    TopKeys,
)
from midstream.client import ServerError
from midstream.compat.foreign_fields import FOREIGN, OWN

# Each result comes in one of the two ways by day: those with parts on the way in a stream.
COMPLETE = pytest.mark.parametrize(
    "asks", ["complete", pytest.param("stream", marks=pytest.mark.nightly)]
)
STREAM = pytest.mark.parametrize(
    "asks", [pytest.param("complete", marks=pytest.mark.nightly), "stream"]
)
ASKED = {"model": NAME, "temperature": 0, "max_tokens": TOKENS}
PROMPT = "The capital of France is"
MAP = torch.randn(576, 576, generator=torch.Generator().manual_seed(4)) / 24
RANDOM = RandomSae("topk", 576, 400, "blocks.10.hook_resid_post")
JUMPS = RandomSae("jumprelu", 576, 40, "blocks.10.hook_resid_post")


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("saes")
    for name, sae in (("random", RANDOM), ("jumps", JUMPS)):
        sae.write(folder / name)
    lens = tmp_path_factory.mktemp("lenses") / "mapped.safetensors"
    save_file({"3": MAP}, lens)
    settings = serving.settings(
        lenses={"mapped": str(lens)},
        http={"parameters": ["lm_head.weight", "model.norm.weight"]},
        saes={name: str(folder / name) for name in ("random", "jumps")},
        reconstruct={"resid_post:10": 400},
        readout_bytes=8 << 20,
        controllers=controlling.DECLARED,
    )
    command = serving.command(smollm2, "--sites=resid_post,rot_q,final_norm", settings)
    with serving.running(command, tmp_path_factory.mktemp("others")) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


@pytest.fixture(scope="module")
def parameters(client: Client) -> Callable[[str], torch.Tensor]:
    """A parameter of the model by its name; each is fetched once."""
    return functools.cache(client.parameter)


def ask(client: Client, prompt: Any, **given: Any) -> Any:
    if isinstance(prompt, list):
        return client.chat(prompt, **ASKED, **given)
    return client.complete(prompt, **ASKED, **given)


STEERED = {"steering_vectors": {"post_block": packed([VECTOR], [3], scales=[0.1])}}
LENS = {"output_residual_stream": "[10, 20]"}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"vllm_xargs": LENS}, {"capture": Capture([10, 20])}),
        (
            {"output_residual_stream": [10, 20], **STEERED},
            {"capture": Capture([10, 20]), "steer": Steer(VECTOR, 3, 0.1)},
        ),
        (
            {"steering": {"vectors": [
                {"data": direction({3: VECTOR}), "scale": 0.1, "apply": {"generation": "all"}}
            ]}},
            {"edits": Steer(VECTOR, 3, 0.1, phase="generated")},
        ),
    ],
    ids=["vllm-lens", "the fork and vllm-lens", "EasySteer"],
)  # fmt: skip
@pytest.mark.parametrize(
    "prompt",
    [
        pytest.param(PROMPT, id="completion"),
        pytest.param(HELLO, id="chat", marks=pytest.mark.nightly),
    ],
)
def test_requests_in_other_tools_words_get_the_text_and_rows_of_ours(client, prompt, theirs, ours):
    [found] = ask(client, prompt, **theirs).outputs
    [expected] = ask(client, prompt, **ours).outputs
    assert found.receipt.status == "ok"
    assert found.receipt.coming_from
    first, second = plain(found), plain(expected)
    del first["receipt"]["coming_from"], second["receipt"]["coming_from"]
    assert_equal(first, second)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_field_that_is_not_understood_is_rejected_by_every_endpoint(server, path):
    body = {"prompt": PROMPT, "messages": HELLO, "input": PROMPT, **ASKED}
    with httpx.Client(base_url=server.url, timeout=60) as http:
        for name in (*FOREIGN, *OWN, "midstreem", "Midstream"):
            for sent in ({name: 1}, {"vllm_xargs": {name: 1}}, {"extra_body": {name: [1]}}):
                answer = http.post(path, json=body | sent)
                assert answer.status_code == 400, (name, answer.text)
                assert name in answer.json()["error"]["param"]


def test_clients_read_the_allowed_parameters_as_the_checkpoint_has_them(client, smollm2):
    stored = load_file(smollm2 / "model.safetensors")
    head = stored["model.embed_tokens.weight"]  # tied
    assert torch.equal(client.parameter("lm_head.weight"), head.float())
    assert torch.equal(client.parameter("model.norm.weight"), stored["model.norm.weight"].float())
    with pytest.raises(ServerError, match=r"may not read.*'model.embed_tokens.weight'"):
        client.parameter("model.embed_tokens.weight")


@COMPLETE
def test_logits_come_over_http(client, parameters, asks):
    """They are the head's of what the final norm returned."""
    last = {"positions": ["last_prompt", "generated"]}
    asked = [Logits(4, **last), Capture(sites="final_norm", **last)]
    if asks == "stream":
        *_, found = client.stream(PROMPT, **ASKED, capture=asked)
    else:
        found = client.complete(PROMPT, **ASKED, capture=asked)
    every = found.activations["final_norm"] @ parameters("lm_head.weight").T
    rows = found.logits
    assert rows.positions.tolist() == list(range(4, 4 + TOKENS))
    torch.testing.assert_close(rows.values, every.topk(4).values, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(rows.values, every.gather(1, rows.ids), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(rows.logsumexp, every.logsumexp(-1), atol=1e-3, rtol=1e-4)


@COMPLETE
def test_reduced_rows_come_over_http(client, asks):
    """They are reductions of the rows of another request."""
    asked = [
        Capture([3], positions="prompt", reduce="moments"),
        Capture([10], reduce="norm"),
        Capture([-1], positions="last_prompt"),
    ]
    whole = client.complete(PROMPT, **ASKED, capture=Capture([3, 10, -1])).activations
    if asks == "stream":
        *_, found = client.stream(PROMPT, **ASKED, capture=asked)
    else:
        found = client.complete(PROMPT, **ASKED, capture=asked)
    length = len(whole.positions) + 1 - TOKENS
    rows = whole["resid_post", 3][:length].double()
    moments = torch.stack([rows.mean(0), rows.var(0, correction=0)])
    mine = found.activations
    torch.testing.assert_close(mine["resid_post", 3].double(), moments, rtol=1e-4, atol=1e-4)
    assert mine.positions_of("resid_post", 3).tolist() == [length - 1] * 2
    norms = whole["resid_post", 10].double().norm(dim=1, keepdim=True)
    torch.testing.assert_close(mine["resid_post", 10].double(), norms, rtol=1e-4, atol=1e-4)
    last = whole["resid_post", -1][length - 1 : length]
    torch.testing.assert_close(mine["resid_post", -1], last, rtol=1e-4, atol=1e-4)


@STREAM
def test_lenses_come_over_http(client, parameters, asks):
    """They are the head's and the norm's of what was captured, and those of a stream are parts."""
    last = {"positions": ["last_prompt", "generated"]}
    given = Lens([3, -1], top=4, tokens=[" Paris"], **last, stream=asks == "stream")
    norms = Norms([3, -1], **last, stream=asks == "stream")
    asked = [given, Capture([3, -1], **last), norms]
    if asks == "stream":
        *_, found = client.stream(PROMPT, **ASKED, capture=asked)
    else:
        found = client.complete(PROMPT, **ASKED, capture=asked)
    rows = found.lens["logit"]
    assert rows.positions.tolist() == list(range(4, 4 + TOKENS))
    assert rows.layers == (3, 29)
    stream = torch.stack([found.activations["resid_post", layer] for layer in (3, -1)], 1)
    lengths = torch.stack([found.norms["resid_post", layer].values for layer in (3, 29)], 1)
    torch.testing.assert_close(lengths, stream.float().norm(dim=-1), atol=1e-4, rtol=1e-4)
    scale = torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + 1e-5)
    normed = stream * scale * parameters("model.norm.weight")
    every = normed @ parameters("lm_head.weight").T
    torch.testing.assert_close(rows.values, every.topk(4).values, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(rows.values, every.gather(2, rows.ids), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(rows.logsumexp, every.logsumexp(-1), atol=1e-3, rtol=1e-4)
    (paris,) = rows.tokens
    torch.testing.assert_close(rows.token_values[..., 0], every[..., paris], atol=1e-3, rtol=1e-4)
    assert int(rows.ranks[0, 1, 0]) == 1  # The capital of France is … Paris
    [one] = found.outputs
    if asks == "stream":
        parts = [part["logit"] for part in one.lens_rows]
        assert parts
        assert sum(len(part["resid_post", 3]) for part in one.norm_rows) == sum(map(len, parts))
        assert sum(map(len, parts)) <= len(rows)
        for part in parts:
            at = torch.searchsorted(rows.positions, part.positions)
            assert torch.equal(part.values, rows.values[at])
            assert torch.equal(part.ranks, rows.ranks[at])


def test_a_lens_that_the_server_has_from_its_start_is_had_over_http(client, parameters):
    """It maps the stream of its layer before the norm."""
    asked = [Lens(3, top=4, kind="mapped"), Capture(3)]
    found = client.complete(PROMPT, **ASKED, capture=asked)
    rows = found.lens["mapped"]
    moved = found.activations["resid_post", 3].float() @ MAP.T
    scale = torch.rsqrt(moved.pow(2).mean(-1, keepdim=True) + 1e-5)
    every = moved * scale * parameters("model.norm.weight")
    every = every @ parameters("lm_head.weight").T
    torch.testing.assert_close(rows.values[:, 0], every.topk(4).values, atol=1e-3, rtol=1e-4)
    with pytest.raises(ServerError, match="there is no lens 'other'; there is 'logit', 'mapped'"):
        client.complete(PROMPT, **ASKED, capture=Lens(3, kind="other"))


def test_a_token_steers_over_http_as_its_direction_does(client, parameters):
    """The direction is that of the parameters that a client may fetch."""
    read = parameters("model.norm.weight") * parameters("lm_head.weight")[7042]
    capture = Capture([20], positions="last_prompt")
    kept = []
    for edit in (None, Steer(read / read.norm(), 20, 30.0), Steer(token=7042, layer=20, scale=30)):
        found = client.complete(PROMPT, **ASKED, capture=capture, edits=edit)
        kept.append(found.activations["resid_post", 20])
    torch.testing.assert_close(kept[1], kept[2], atol=1e-3, rtol=1e-4)
    moved = (kept[2] - kept[0])[0].double()
    torch.testing.assert_close(moved, 30 * (read / read.norm()).double(), atol=1e-2, rtol=0)
    with pytest.raises(ServerError, match=r"midstream\.edits.*there is no lens 'no'") as caught:
        client.complete(PROMPT, **ASKED, edits=Steer(token=7042, layer=20, lens="no"))
    assert caught.value.status == 400


@STREAM
def test_features_come_over_http(client, asks):
    """Of an SAE that the server has from its start: they are those of what was captured."""
    last = {"positions": ["last_prompt", "generated"]}
    asked = [Features("random", 9, features=[3, 1], **last, stream=asks == "stream"), Capture(10)]
    if asks == "stream":
        *_, found = client.stream(PROMPT, **ASKED, capture=asked)
    else:
        found = client.complete(PROMPT, **ASKED, capture=asked)
    rows = found.features["random"]
    assert rows.positions.tolist() == list(range(4, 4 + TOKENS))
    assert (rows.site, rows.layer, rows.features) == ("resid_post", 10, (3, 1))
    active = RANDOM.encode(found.activations["resid_post", 10].float()[rows.positions])
    assert torch.equal(rows.l0, (active > 0).sum(-1))
    torch.testing.assert_close(rows.values.double(), active.topk(9).values, atol=1e-3, rtol=1e-4)
    shown = active.gather(1, rows.ids.clamp(min=0)) * (rows.ids >= 0)
    torch.testing.assert_close(rows.values.double(), shown, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(
        rows.feature_values.double(), active[:, [3, 1]], atol=1e-3, rtol=1e-4
    )
    [one] = found.outputs
    if asks == "stream":
        parts = [part["random"] for part in one.feature_rows]
        assert parts
        for part in parts:
            at = torch.searchsorted(rows.positions, part.positions)
            assert torch.equal(part.values, rows.values[at])
            assert torch.equal(part.ids, rows.ids[at])


def test_an_sae_that_the_server_has_not_is_refused(client):
    for asked, path in (
        ({"capture": Features("mine")}, "capture[0].sae"),
        ({"edits": Feature(sae="mine", index={3: 1.0})}, "edits[0].sae"),
        ({"edits": Reconstruct("mine")}, "edits[0].sae"),
    ):
        with pytest.raises(
            ServerError, match="there is no SAE 'mine'; there is `random`"
        ) as caught:
            client.complete(PROMPT, **ASKED, **asked)
        assert caught.value.status == 400
        assert path in str(caught.value)


def test_features_are_edited_over_http_by_the_name_of_their_sae(client):
    """Against the vectors without the edit, by the formulas of the SAE."""
    values = {3: 20.0, 17: 0.0, 30: 5.0}
    capture = Capture(10, positions="prompt")
    [before] = client.complete(PROMPT, **ASKED, capture=capture).outputs
    edit = Feature(sae="jumps", index=values)
    [after] = client.complete(PROMPT, **ASKED, capture=capture, edits=edit).outputs
    assert after.receipt.edited.applied == 5 + TOKENS - 1
    x = before.activations["resid_post", 10].double()
    added = torch.tensor(list(values.values())) - JUMPS.encode(x)[:, list(values)]
    wanted = x + added @ JUMPS.tensors["W_dec"][list(values)].double()
    found = after.activations["resid_post", 10].double()
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)


def test_vectors_are_reconstructed_over_http_by_the_name_of_an_sae(client):
    """With and without the error term, against the vectors without the edit."""
    values = {3: 20.0, 17: 0.0, 30: 5.0}
    capture = Capture(10, positions="prompt")
    [before] = client.complete(PROMPT, **ASKED, capture=capture).outputs
    x = before.activations["resid_post", 10].double()
    w_dec, b_dec = (RANDOM.tensors[name].double() for name in ("W_dec", "b_dec"))
    code = RANDOM.encode(x)
    changed = code.clone()
    changed[:, list(values)] = torch.tensor(list(values.values())).double()
    for edit, wanted in (
        (Reconstruct("random"), code @ w_dec + b_dec),
        (Reconstruct("random", values), changed @ w_dec + b_dec),
        (Reconstruct("random", values, error=True), x + (changed - code) @ w_dec),
    ):
        [after] = client.complete(PROMPT, **ASKED, capture=capture, edits=edit).outputs
        assert after.receipt.edited.applied == 5 + TOKENS - 1
        found = after.activations["resid_post", 10].double()
        error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert float(error.max()) <= 1e-4


@STREAM
def test_attention_comes_over_http(client, asks):
    asked = [
        Attention([10], heads=[0, 3], queries=["last_prompt", "generated"], reduce="full"),
        Attention([10, -1], reduce=TopKeys(2), name="top", stream=asks == "stream"),
        Attention(10, heads=0, queries="generated", reduce=Mass(slice(0, 3)), name="mass"),
        Capture([10], positions="last_prompt"),
    ]
    read = Probe(attention=asked[2].reduce, layer=10, head=0, phase="generated", name="read")
    if asks == "stream":
        *_, found = client.stream(PROMPT, **ASKED, capture=asked, probes=read)
    else:
        found = client.complete(PROMPT, **ASKED, capture=asked, probes=read)
    [one] = found.outputs
    assert one.receipt.status == "ok"
    assert torch.equal(
        torch.as_tensor(found.probes["read"]), found.attention["mass", 10].values[:, 0]
    )
    assert found.activations.layers == (10,)
    full, top, mass = (found.attention[key] for key in (10, ("top", 10), ("mass", 10)))
    assert torch.equal(torch.as_tensor(found.probes["read"]), mass.values[:, 0])
    queries = 1 + TOKENS - 1
    assert full.values.shape == (queries, 2, 5 + TOKENS - 1)
    torch.testing.assert_close(full.values.sum(-1), torch.ones(queries, 2))
    weights, places = full.values.topk(2)
    torch.testing.assert_close(top.values[4:, [0, 3]], weights)
    certain = full.values.topk(3).values.diff().abs().amin(-1) > 1e-3
    assert torch.equal(top.keys[4:, [0, 3]][certain], places[certain])
    torch.testing.assert_close(mass.values[:, 0], full.values[1:, 0, :3].sum(-1))
    assert len(found.attention["top", 29]) == 5 + TOKENS - 1
    came = [part["top", 10] for part in one.attention_rows]
    assert bool(came) == (asks == "stream")
    if came:
        keys = torch.cat([part.keys for part in came])
        assert torch.equal(keys, top.keys[: len(keys)])


def test_a_stream_changes_its_edits_while_it_runs(client):
    edit = Steer(VECTOR, 5, 2.0)
    found, last = None, None
    asked = {"steer": edit, "capture": Capture([5]), **ASKED, "max_tokens": 200}
    for last in client.stream(PROMPT, **asked):
        if found is None and last.request_id:
            found = client.update(last.request_id, scale=0)
    assert last is not None
    [one] = last.outputs
    assert found is not None
    position = found.positions[0]
    rows = one.receipt.prompt_tokens + one.receipt.generated_tokens - 1
    assert one.receipt.status == "ok"
    versions = one.receipt.versions
    assert [each.positions for each in versions] == [(0, position), (position, rows)]
    assert [each.applied + each.cached for each in versions] == [position, 0]
    with pytest.raises(ServerError, match="404"):
        client.update(last.request_id, scale=1)


def test_an_id_that_is_another_with_a_number_is_not_changed_with_it(client, server):
    """`X-Request-Id` lets a client choose ids. The new edits have rows that the server caches."""
    kept = client.complete(PROMPT, **ASKED, capture=Capture([5]), activations="keep")
    edit = Replace(kept.outputs[0].captured.at(0), layer=5, positions="generated")
    asked = {"messages": HELLO, "steer": Steer(VECTOR, 5, 0.5), **ASKED, "max_tokens": 150}
    with ExitStack() as stack:
        streams = []
        for name in ("exp", "exp-1"):
            http = httpx.Client(base_url=server.url, headers={"x-request-id": name})
            mine = stack.enter_context(Client(server.url, http=stack.enter_context(http)))
            streams.append(mine.stream(**asked))
            assert next(streams[-1]).request_id == f"chatcmpl-{name}"
        assert list(client.update("chatcmpl-exp", edits=[edit]).positions) == [0]
        receipts = [list(each)[-1].outputs[0].receipt for each in streams]
    assert [one.status for one in receipts] == ["ok", "ok"]
    assert [len(one.versions) for one in receipts] == [2, 0]


def test_a_stream_ends_at_the_token_at_which_a_probe_stops_it(client, server):
    """No event shows a later token."""
    asked = {"steer": Steer(VECTOR, 5, 0.5), **ASKED, "max_tokens": 24}
    read = {"direction": VECTOR, "layer": 10, "phase": "generated", "name": "guard"}
    whole = client.complete(PROMPT, **asked, probes=Probe(**read))
    scores = whole.outputs[0].probes["guard"].tolist()
    where = next(at for at in range(6, 20) if scores[at] > max(scores[:at]) + 1e-3)
    guard = Probe(**read, act=Stop(above=(scores[where] + max(scores[:where])) / 2))
    shown, last = "", None
    for last in client.stream(PROMPT, **asked, probes=guard):
        assert whole.text.startswith(last.outputs[0].text)
        shown = last.outputs[0].text
    assert last is not None
    (one,) = last.outputs
    assert (one.finish_reason, one.receipt.generated_tokens) == ("stop", where + 1)
    assert shown != whole.text
    position = one.receipt.prompt_tokens + where
    actions = [(each.name, each.kind, each.position) for each in one.receipt.actions]
    assert actions == [("guard", "stop", position)]
    assert one.probes["guard"].tolist() == pytest.approx(scores[: where + 1], abs=1e-4)
    parts = {"steer": asked["steer"].to_dict(), "probes": [guard.to_dict()]}
    body = {"prompt": PROMPT, **ASKED, "max_tokens": 24, "midstream": parts}
    (choice,) = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "probe:guard")
    assert choice["text"] == shown


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_controller_of_a_request_over_http(client, is_declared):
    """It turns the edits off, and then stops the request; or half of them off."""
    law = {"threshold": {"probe": "p", "above": -1e6, "on": 0.0, "off": 1.0}, "name": "halver"}
    asked = {"steer": Steer(VECTOR, 5, 0.5), "probes": Probe(VECTOR, 10, name="p"), **ASKED}
    given = {"declared": "script", "edits": {"calm": []}} if is_declared else law
    completion = client.complete(PROMPT, **{**asked, "max_tokens": 24}, controller=given).outputs[0]
    receipt = completion.receipt
    shown = [(one.source, one.scale) for one in receipt.versions]
    if is_declared:
        assert shown[1:] == [("controller:script/calm", 1.0), ("controller:script", 0.5)]
        assert (completion.finish_reason, receipt.generated_tokens) == ("stop", 6)
    else:
        assert shown[1:] == [("controller:halver", 0.0)]
    # Of asynchronous scheduling, one step was scheduled with the score that was answered.
    late = receipt.versions[1].positions[0] - receipt.prompt_tokens - (2 if is_declared else 0)
    assert late in (0, 1)
    assert receipt.status == "ok"


def test_what_is_no_controller_is_rejected_over_http(client):
    asked = {"steer": Steer(VECTOR, 5, 0.5), "probes": Probe(VECTOR, 10, name="p"), **ASKED}
    for given, param in (
        ("os:getpid", "midstream.controller"),
        ("who", "midstream.controller"),
        ({"threshold": {"probe": "p"}}, "midstream.controller.threshold"),
        ({"threshold": {"probe": "q", "above": 1.0}}, "midstream.controller.threshold.probe"),
        ({"path": "os:getpid"}, "midstream.controller"),
        ({"budget": {"probe": "p", "total": 1.0}, "seconds": 9}, "midstream.controller"),
    ):
        body = {"model": "served", "prompt": PROMPT, "midstream": {
            "probes": asked["probes"].to_dict(), "controller": given,
            "steer": asked["steer"].to_dict(),
        }}  # fmt: skip
        response = client._http.post("/v1/completions", json=body)
        assert response.status_code == 400, given
        assert response.json()["error"]["param"] == param, given


def test_a_probe_switches_the_edits_of_a_request_over_http(client):
    act = Switch([], above=-1e6, for_=3)
    probe = Probe(VECTOR, 10, phase="generated", name="calm", act=act)
    asked = {"steer": Steer(VECTOR, 5, 0.5), **ASKED, "max_tokens": 24}
    receipt = client.complete(PROMPT, **asked, probes=probe).outputs[0].receipt
    met = receipt.prompt_tokens + 2
    assert [(each.kind, each.position) for each in receipt.actions] == [("switch", met)]
    first, second = receipt.versions
    # Some steps may have been scheduled ahead.
    assert met < second.positions[0] <= met + 4
    assert (second.source, second.expected) == ("probe:calm", 0)
    assert first.applied + first.cached == first.positions[1] == second.positions[0]
