"""A server on SmolLM2 in processes of its own: over HTTP comes what the offline engine gives."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from support import own_process, serving
from support.nightly import rounds
from support.own_process import python
from support.serving import NAME, Running
from support.serving_load import load
from support.serving_offline import ASKED, CASES, TOKENS, VECTOR, Case, ask, assert_equal, plain
from system import one_connection, served_sweeps
from system.spans import Spans, collecting

from midstream import Capture, Client, Probe, Steer, Text, extra_body
from midstream.client import ServerError
from midstream.store import open_store

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def offline(smollm2: Path, folder: Path) -> dict[str, Any]:
    out = folder / "offline.pt"
    python("-m", "support.serving_offline", smollm2, out, timeout=580)
    return dict(torch.load(out))


@pytest.fixture(scope="module")
def spans() -> Iterator[Spans]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def server(smollm2: Path, folder: Path, spans: Spans) -> Iterator[Running]:
    options = (
        "--sites=resid_post",
        serving.settings(gate_states=2, sinks={"store": {"root": str(folder / "store")}}),
        f"--otlp-traces-endpoint={spans.url}",
    )
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    command = serving.command(smollm2, *options)
    with serving.running(command, folder, **protocol, OTEL_BSP_SCHEDULE_DELAY="200") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


@pytest.fixture(scope="module")
def openai(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


# ---------------------------------------------------------------- as offline


def ways(name: str) -> Iterator[Any]:
    """A case in both ways in which rows come; inline, all of them at night."""
    yield pytest.param(name, "handle", id=f"{name}-handle")
    marks = () if name in ("everything", "chat", "between") else pytest.mark.nightly
    yield pytest.param(name, "inline", id=f"{name}-inline", marks=marks)


@pytest.mark.parametrize(("name", "how"), [way for name in CASES for way in ways(name)])
def test_an_answer_is_bit_by_bit_what_the_offline_engine_gives(client, offline, name, how):
    more = {"activations": how} if CASES[name].asked else {}
    [found] = ask(client, CASES[name], **more).outputs
    assert_equal(plain(found), offline[name])


STREAMED = "plain", "everything", "remembered", "chat", "between"


@pytest.mark.parametrize(
    "name",
    [name if name in STREAMED else pytest.param(name, marks=pytest.mark.nightly) for name in CASES],
)
def test_a_stream_comes_to_bit_by_bit_what_the_offline_engine_gives(client, offline, name):
    case = CASES[name]
    asked = {**ASKED, **case.asked}
    prompt = {"messages": case.prompt} if case.is_chat else {"prompt": case.prompt}
    if name == "between":
        assert offline[name]["probes"]["p"][2].tolist() == [665, 28]
    [found] = [*client.stream(**prompt, **asked)][-1].outputs
    assert_equal(plain(found), offline[name])


@pytest.mark.parametrize("name", ["everything", "chat"])
def test_the_openai_client_gets_the_same_beside_its_own(client, openai, offline, name):
    case = CASES[name]
    body = extra_body(**case.asked)
    if case.is_chat:
        answer = openai.chat.completions.create(messages=case.prompt, **ASKED, extra_body=body)
    else:
        answer = openai.completions.create(prompt=case.prompt, **ASKED, extra_body=body)
    assert answer.usage.completion_tokens == TOKENS
    [found] = client.read(answer).outputs
    assert_equal(plain(found), offline[name])


@pytest.mark.parametrize("name", ["everything", "chat"])
def test_a_plan_as_text_in_vllm_xargs_is_the_same_plan(client, offline, name):
    case = CASES[name]
    xargs = {"midstream": json.dumps(extra_body(**case.asked)["midstream"])}
    [found] = ask(client, Case(case.prompt), vllm_xargs=xargs).outputs
    assert_equal(plain(found), offline[name])


def test_a_response_has_the_rows_of_its_conversation(client, openai, offline):
    case = CASES["chat"]
    given = {"model": NAME, "input": case.prompt[0]["content"], "temperature": 0}
    given |= {"max_output_tokens": TOKENS, "extra_body": extra_body(**case.asked)}
    answer = openai.responses.create(**given)
    [found] = client.read(answer).outputs
    assert_equal(plain(found), offline["chat"])
    given["extra_body"] = extra_body(**case.asked, activations="none")
    *_, event = openai.responses.create(**given, stream=True)
    assert event.type in ("response.completed", "response.incomplete")
    assert event.midstream["receipt"]["status"] == "ok"
    assert event.midstream["probes"]["p"]["scores"] == found.probes["p"].tolist()


# ---------------------------------------------------------------- streams


def test_scores_and_rows_come_with_the_tokens_that_they_are_of(client):
    asked = {"capture": Capture([10], stream=True), "probes": Probe(VECTOR, 5, name="p")}
    seen = []
    for found in client.stream(PROMPT, **{**ASKED, "max_tokens": 24}, **asked):
        [one] = found.outputs
        rows = sum(len(part["resid_post", 10]) for part in one.rows)
        seen.append((len(one.probes["p"]) if one.probes else 0, rows, one.receipt))
    scores, rows, receipts = zip(*seen, strict=True)
    assert list(scores) == sorted(scores)
    assert list(rows) == sorted(rows)
    assert 0 < scores[0] < scores[-1] == 5 + 24 - 1
    assert 0 < rows[0] < rows[-1]
    assert receipts[-1].status == "ok"
    assert not any(receipts[:-1])
    whole = one.activations["resid_post", 10]
    came = torch.cat([part["resid_post", 10] for part in one.rows])
    assert torch.equal(came, whole[: len(came)])
    assert len(whole) == scores[-1]


def test_the_openai_clients_stream_has_scores_and_ends_with_the_receipt(openai, offline):
    case = CASES["chat"]
    body = extra_body(**case.asked, activations="none")
    stream = openai.chat.completions.create(
        messages=case.prompt, **ASKED, stream=True, extra_body=body
    )
    text, scores, receipts = "", [], []
    for event in stream:
        told = getattr(event, "midstream", None) or {}
        text += "".join(choice.delta.content or "" for choice in event.choices)
        scores += told.get("probes", {}).get("p", {}).get("scores", [])
        receipts += [told["receipt"]] if "receipt" in told else []
    assert text == offline["chat"]["text"]
    assert scores == offline["chat"]["probes"]["p"][0].tolist()
    assert [one["status"] for one in receipts] == ["ok"]


# ---------------------------------------------------------------- several choices


def test_each_choice_of_several_prompts_has_its_own_rows_and_receipt(client):
    prompts = ["One two three four", "Seven eight"]
    given = {**ASKED, "n": 2, "seed": 1, "temperature": 1.0, "capture": Capture([1])}
    found = client.complete(prompts, **given)
    assert [one.index for one in found.outputs] == [0, 1, 2, 3]
    lengths = [one.receipt.prompt_tokens for one in found.outputs]
    assert lengths == [4, 4, 2, 2]
    for one in found.outputs:
        assert one.receipt.status == "ok"
        rows = one.receipt.prompt_tokens + one.receipt.generated_tokens - 1
        assert one.activations["resid_post", 1].shape == (rows, 576)
    first, second, third, _ = (one.activations["resid_post", 1] for one in found.outputs)
    torch.testing.assert_close(first[:4], second[:4], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(first[:2], third[:2], rtol=1e-2, atol=1e-2)


def test_a_large_plan_which_a_thread_resolves_gives_the_same_rows(client):
    excluded = [Text(f"nowhere {nth}") for nth in range(2000)], None
    captures = [Capture([1], positions="prompt", exclude=texts) for texts in excluded]
    large, small = (client.complete("One two", capture=each, **ASKED) for each in captures)
    assert large.receipt.status == "ok"
    assert torch.equal(large.activations["resid_post", 1], small.activations["resid_post", 1])


def test_a_stream_of_several_prompts_has_each_ones_scores_at_its_choice(client):
    prompts = ["One two three four", "Seven eight"]
    asked = {"probes": Probe(VECTOR, 5, name="p"), "capture": Capture([2])}
    found = [*client.stream(prompts, **ASKED, **asked)][-1]
    for one, rows in zip(found.outputs, (4, 2), strict=True):
        assert one.receipt.prompt_tokens == rows
        assert len(one.probes["p"]) == rows + TOKENS - 1
        assert one.activations["resid_post", 2].shape == (rows + TOKENS - 1, 576)


def test_a_request_behind_a_steered_one_of_its_connection_is_answered_as_alone(server):
    one_connection.check(server)


# ---------------------------------------------------------------- steering and vectors


def test_a_named_vector_does_what_the_vector_itself_does(client, offline):
    about = client.vectors.register("glad", {3: VECTOR})
    assert about["name"] == "glad"
    assert about["width"] == 576
    assert [one["name"] for one in client.vectors.list()] == ["glad"]
    asked = {**CASES["everything"].asked, "steer": Steer("glad", 3, 0.1)}
    [found] = ask(client, Case(PROMPT, asked)).outputs
    assert_equal(plain(found), offline["everything"])
    client.vectors.remove("glad")
    assert client.vectors.list() == []
    with pytest.raises(ServerError, match="400: .*glad") as refused:
        ask(client, Case(PROMPT, asked))
    assert refused.value.param == "midstream.edits[0]"


def fingerprint(client: Client) -> str:
    """What the answer to a request that knows nothing of midstream says of the server."""
    body = {"model": NAME, "prompt": "a", "max_tokens": 1}
    found: str = client.call("POST", "/v1/completions", body)["system_fingerprint"]
    return found


@pytest.mark.parametrize(
    "tier", ["base", pytest.param("prompt", marks=pytest.mark.nightly), "generated"]
)
def test_server_wide_steering_is_that_tier_of_every_request_until_it_is_cleared(client, tier):
    phase = None if tier == "base" else tier
    edit = Steer(VECTOR, 3, 0.5, **({} if phase is None else {"phase": phase}))
    capture = Capture([20])
    own = ask(client, Case(PROMPT, {"capture": capture, "edits": edit}))
    before = ask(client, Case(PROMPT, {"capture": capture}))
    epoch = client.steering.show()["epoch"]
    state = client.steering.set(**{tier: Steer(VECTOR, 3, 0.5)})
    assert state["epoch"] == epoch + 1
    assert len(state[tier]) == 1
    assert fingerprint(client).endswith(f"-midstream-{state['digest'][:8]}")
    steered = ask(client, Case(PROMPT, {"capture": capture}))
    assert steered.text == own.text
    assert torch.equal(steered.activations["resid_post", 20], own.activations["resid_post", 20])
    assert steered.receipt.edited.applied == own.receipt.edited.applied > 0
    assert client.steering.clear()["epoch"] == epoch + 2
    assert "midstream" not in fingerprint(client)
    after = ask(client, Case(PROMPT, {"capture": capture}))
    assert after.receipt.edited is None
    assert torch.equal(after.activations["resid_post", 20], before.activations["resid_post", 20])
    assert not torch.equal(after.activations["resid_post", 20], own.activations["resid_post", 20])


def test_what_is_generated_where_no_key_is_asked_for_is_steered_and_captured_too(client):
    watch = "/v1/midstream/captures/watch"
    asked = {**ASKED, "prompt": PROMPT}
    client.call("PUT", watch, {"capture": {"layers": [20], "positions": "last_prompt"}})
    try:
        client.call("POST", "/invocations", asked)
        client.steering.set(base=Steer(VECTOR, 3, 0.5))
        for path in ("/invocations", "/v1/completions"):
            client.call("POST", path, asked)
        found = client.call("POST", f"{watch}/collect", {})["completions"]
    finally:
        client.steering.clear()
        client.call("DELETE", watch)
    plain, here, there = [one["activations"]["base64"] for one in found]
    assert plain != here == there


def test_the_endpoints_as_elsewhere_are_the_same_steering(client):
    layers = client.call("GET", "/v1/steering/layers")
    assert layers["layers"]["0"] == ["resid_post"]
    assert len(layers["layers"]) == 30
    assert layers["hidden_size"] == 576
    given = {"post_block": {"3": {"vector": VECTOR.tolist(), "scale": 0.5}}}
    done = client.call("POST", "/v1/steering/set", {"vectors": given})
    assert done["layers_updated"] == [3]
    assert client.steering.show()["epoch"] == done["epoch"]
    own = Steer(VECTOR, 3, 0.5)
    capture = Capture([20])
    steered = ask(client, Case(PROMPT, {"capture": capture}))
    shown = client.call("GET", "/v1/steering")["steering"]
    assert shown["3"]["resid_post"]["vectors"] == pytest.approx(
        0.5 * float(VECTOR.norm()), rel=1e-3
    )
    client.call("POST", "/v1/steering/clear", {})
    alone = ask(client, Case(PROMPT, {"capture": capture, "steer": own}))
    assert torch.equal(steered.activations["resid_post", 20], alone.activations["resid_post", 20])
    module = {"name": "calm", "vectors": {"post_block": {"3": VECTOR.tolist()}}}
    client.call("POST", "/v1/steering/modules/register", module)
    names = [one["name"] for one in client.call("GET", "/v1/steering/modules")["modules"]]
    assert names == ["calm"] == [one["name"] for one in client.vectors.list()]
    client.call("POST", "/v1/steering/modules/unregister", {"name": "calm"})
    assert client.vectors.list() == []


# ---------------------------------------------------------------- sinks


def test_rows_for_a_store_are_where_the_answer_says(client, offline, folder):
    case = CASES["edits"]
    kept = Capture([12, 29], sink="store", tag="served", request_id="one")
    [found] = ask(client, Case(case.prompt, {**case.asked, "capture": kept})).outputs
    assert found.activations is None
    result = found.capture_results["store"]
    assert result.status == "ok"
    root = folder / "store"
    assert all(Path(path).is_relative_to(root) for path in result.paths)
    assert all(Path(path).exists() for path in result.paths)
    rows = open_store(root).get("one")
    for tap, (values, positions, _) in offline["edits"]["rows"].items():
        assert torch.equal(rows.encoded(*tap), values)
        assert torch.equal(rows.positions_of(*tap), positions)


# ---------------------------------------------------------------- handles


def test_a_handle_is_fetched_in_ranges_listed_and_deleted(client, server):
    body = {**ASKED, "prompt": PROMPT, **extra_body(capture=Capture([4]))}
    told = client.call("POST", "/v1/completions", body)["midstream"]["activations"]
    assert told["format"] == "safetensors"
    assert told["rows"] == {"resid_post.4": 5 + TOKENS - 1}
    assert told["id"] in [
        one["id"] for one in client.call("GET", "/v1/midstream/captures")["captures"]
    ]
    url = server.url + told["url"]
    with httpx.Client() as http:
        whole = http.get(url)
        assert len(whole.content) == told["bytes"]
        parts = [
            http.get(url, headers={"range": f"bytes={first}-{first + 4095}"})
            for first in range(0, told["bytes"], 4096)
        ]
        assert {part.status_code for part in parts} == {206}
        assert b"".join(part.content for part in parts) == whole.content
        assert http.delete(url).status_code == 204
        assert http.get(url).status_code == 404
    assert server.status()["held"] == {"captures": 0, "bytes": 0}


# ---------------------------------------------------------------- many, and killed ones

KILLED = """
import sys
from midstream import Capture, Client
with Client(sys.argv[1]) as client:
    asked = {"model": sys.argv[2], "prompt": "Once upon a time", "max_tokens": 480}
    for found in client.stream(**asked, ignore_eos=True, capture=Capture("all")):
        print("EVENT", flush=True)
"""


def test_rows_of_a_client_that_is_killed_in_mid_stream_are_let_go(server):
    before = server.wait_until_idle()
    process = own_process.start(
        *("-c", KILLED, server.url, NAME),
        env=serving.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == b"EVENT\n"
        assert server.status()["requests"] == 1
        os.kill(process.pid, signal.SIGKILL)
    after = server.wait_until_idle()
    assert after["requests"] == 0
    assert after["held"] == before["held"]
    assert after["workers"][0]["arena"]["leases"] == 0
    assert after["totals"]["aborted"] == before["totals"]["aborted"] + 1
    assert after["totals"]["completions"] == before["totals"]["completions"]


def test_sixty_four_clients_with_different_plans_each_get_what_they_asked_for(server):
    before = server.wait_until_idle()["totals"]["completions"].get("ok", 0)
    each = rounds(suite=1, nightly=2)
    report = asyncio.run(load(server.url, 64, 0, each, server.memory))
    assert report.wrong == []
    assert report.completions >= 64 * each
    status = server.wait_until_idle()
    assert status["totals"]["completions"] == {"ok": before + report.completions}
    assert status["requests"] == status["waiting"] == status["held"]["captures"] == 0
    assert status["workers"][0]["arena"]["leases"] == 0


def test_sweeps_are_what_the_offline_engine_gives_beside_others(client, server, offline):
    served_sweeps.check(client, server, offline)


# ---------------------------------------------------------------- operations


def test_metrics_beside_vllms_own_say_what_was_done(client, server):
    def read() -> dict[tuple[str, ...], float]:
        time.sleep(1.1)  # they are brought up to date once a second
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    server.wait_until_idle()
    before = read()
    assert any(name[0].startswith("vllm:") for name in before)
    [found] = ask(client, CASES["everything"]).outputs
    with pytest.raises(ServerError):
        ask(client, Case(PROMPT, {}), **extra_body(capture=Capture([99])))
    after = read()
    more = {name: value - before.get(name, 0) for name, value in after.items()}
    rows = 2 * (5 + TOKENS - 1)
    assert more["midstream:completions_total", "ok"] == 1
    assert more["midstream:captured_rows_total",] == rows
    assert more["midstream:captured_bytes_total",] == rows * 576 * 4
    assert more["midstream:edits_applied_total",] == found.receipt.edited.applied
    assert more["midstream:probe_scores_total",] == sum(len(one) for one in found.probes.values())
    assert more["midstream:refusals_total", "400"] == 1
    assert more["midstream:receipt_mismatches_total",] == 0
    assert more["midstream:active_steps_total", "0.0.0"] == TOKENS
    assert more["midstream:planner_seconds_total", "0.0.0"] > 0
    assert after["midstream:ring_rows_most", "0.0.0"] >= 10
    assert after["midstream:arena_bytes", "0.0.0"] > 0
    assert after["midstream:requests_running",] == 0


def test_the_log_has_a_line_for_each_refusal_and_change_and_no_vector(client, server):
    with pytest.raises(ServerError, match="400"):
        ask(client, Case(PROMPT, {}), **extra_body(capture=Capture([99])))
    client.vectors.register("logged", {3: [123.4567] * 576})
    client.steering.set(base="logged")
    client.steering.clear()
    client.vectors.remove("logged")
    lines = [line.partition("] midstream ")[2] for line in server.log.splitlines()]
    refused = [line for line in lines if line.startswith("request.refused ")]
    assert any('param="midstream.capture[0].layers"' in line and "status=400" in line
               for line in refused)  # fmt: skip
    assert 'vectors.registered name="logged" taps=1 width=576' in lines
    assert 'vectors.removed name="logged"' in lines
    changes = [line for line in lines if line.startswith("steering.changed ")]
    assert "base=1" in changes[-2]
    assert "base=0" in changes[-1]
    assert "123.4567" not in "".join(lines)


def test_vllms_spans_say_what_the_receipts_say(client, spans):
    found = ask(client, CASES["everything"])
    attributes = spans.wait_for(found.request_id)
    receipt = found.receipt
    assert attributes["midstream.receipt.status"] == "ok"
    assert attributes["midstream.captured.rows"] == sum(one.actual for one in receipt.captured)
    assert attributes["midstream.edits.applied"] == receipt.edited.applied
    assert attributes["gen_ai.usage.completion_tokens"] == TOKENS
    without = ask(client, CASES["plain"])
    attributes = spans.wait_for(without.request_id)
    assert not [name for name in attributes if name.startswith("midstream")]


def test_the_schema_has_every_endpoint_of_midstreams(server):
    paths = server.get("/openapi.json")["paths"].items()
    own = {path: methods for path, methods in paths if path.startswith("/v1/midstream")}
    assert {f"/v1/midstream/{name}" for name in ("status", "sites", "steering")} <= set(own)
    assert all(one.get("summary") for methods in own.values() for one in methods.values())


def test_nothing_is_left_once_all_have_their_answers(client, server):
    ask(client, CASES["everything"])
    status = server.wait_until_idle()
    assert status["requests"] == status["waiting"] == 0
    assert status["held"] == {"captures": 0, "bytes": 0}
    assert status["workers"][0]["arena"]["leases"] == 0
    assert "error" not in status["totals"]["completions"]
