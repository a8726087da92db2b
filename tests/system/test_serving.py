"""A server on twelve layers of SmolLM2: over HTTP comes what the offline engine gives."""

import asyncio
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
from safetensors.torch import load_file
from support import own_process, serving
from support.nightly import rounds
from support.others_words import packed
from support.own_process import python
from support.serving import NAME, Running
from support.serving_load import load
from support.serving_offline import (
    ASKED,
    CASES,
    PARIS,
    TOKENS,
    TOP,
    VECTOR,
    Case,
    ask,
    assert_equal,
    fewer_layers,
    plain,
    settings,
)
from system import one_connection, served_sweeps
from system.spans import collecting, wait_for

from midstream import Capture, Client, Feature, Features, Lens, Probe, Steer, extra_body
from midstream.client import ServerError
from midstream.plan import Switch
from midstream.store import open_store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def model(smollm2: Path, folder: Path) -> Path:
    return fewer_layers(smollm2, folder)


@pytest.fixture(scope="module")
def offline(model: Path, folder: Path) -> dict[str, Any]:
    out = folder / "offline.pt"
    python("-m", "support.serving_offline", model, out, timeout=580)
    return dict(torch.load(out))


@pytest.fixture(scope="module")
def spans() -> Iterator[tuple[str, Any]]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def server(model: Path, folder: Path, spans: tuple[str, Any]) -> Iterator[Running]:
    given = settings(folder) | {
        "sinks": {"store": {"root": str(folder / "store")}},
        "http": {"parameters": ["lm_head.weight", "model.norm.weight"]},
    }
    options = serving.settings(**given), f"--otlp-traces-endpoint={spans[0]}"
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    command = serving.command(model, *options)
    with serving.running(command, folder, **protocol, OTEL_BSP_SCHEDULE_DELAY="200") as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Client]:
    with Client(server.url) as found:
        yield found


@pytest.fixture(scope="module")
def openai(server: Running) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


STREAMED = (
    "plain",
    "everything",
    "remembered",
    "chat",
    "lenses",
    "features",
    "attention",
    "between",
    "families",
)
BY_NIGHT = [
    name if name in STREAMED else pytest.param(name, marks=pytest.mark.nightly) for name in CASES
]


@pytest.mark.parametrize("name", CASES)
def test_an_answer_is_bit_by_bit_what_the_offline_engine_gives(client, offline, name):
    [found] = ask(client, CASES[name]).outputs
    assert_equal(plain(found), offline[name])


@pytest.mark.parametrize("name", BY_NIGHT)
def test_a_stream_comes_to_bit_by_bit_what_the_offline_engine_gives(client, offline, name):
    case = CASES[name]
    prompt = {"messages": case.prompt} if case.is_chat else {"prompt": case.prompt}
    assert name != "between" or offline[name]["probes"]["p"][2].tolist() == [35170, 3689]
    asked = dict(case.asked)
    kinds = {one.key for one in case.captures if not isinstance(one, Capture)} - {"logits"}
    if kinds:
        asked["capture"] = [
            {**one.to_dict(), **({"stream": True} if one.key in kinds else {})}
            for one in case.captures
        ]
    how = {"activations": "inline"} if asked else {}
    [found] = [*client.stream(**prompt, **ASKED, **asked, **how)][-1].outputs
    assert_equal(plain(found), offline[name])
    parts = found.lens_rows, found.feature_rows, found.norm_rows, found.attention_rows
    for kind, several in zip(("lens", "features", "norms", "attention"), parts, strict=True):
        assert bool(several) == (kind in kinds)
        for part in several:
            for key, rows in part.items():
                whole = getattr(found, kind)[key]
                at = torch.searchsorted(whole.positions, rows.positions)
                expected = whole.values[at][
                    ..., : rows.values.shape[-1]
                ]  # weights of the keys so far
                assert torch.equal(rows.values, expected), (kind, key)


def test_the_openai_client_gets_the_same_beside_its_own(client, openai, offline):
    case, name = CASES["chat"], "chat"
    answer = openai.chat.completions.create(
        messages=case.prompt, **ASKED, extra_body=extra_body(**case.asked)
    )
    assert answer.usage.completion_tokens == TOKENS
    [found] = client.read(answer).outputs
    assert_equal(plain(found), offline[name])
    stream = openai.chat.completions.create(
        messages=case.prompt, **ASKED, stream=True,
        extra_body=extra_body(**case.asked, activations="none"),
    )  # fmt: skip
    text, scores, receipts = "", [], []
    for event in stream:
        told = getattr(event, "midstream", None) or {}
        text += "".join(choice.delta.content or "" for choice in event.choices)
        scores += told.get("probes", {}).get("p", {}).get("scores", [])
        receipts += [told["receipt"]] if "receipt" in told else []
    assert text == offline[name]["text"]
    assert scores == offline[name]["probes"]["p"][0].tolist()
    assert [one["status"] for one in receipts] == ["ok"]


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


def test_a_request_in_other_tools_words_gets_the_text_and_rows_of_ours(client):
    vectors = {"post_block": packed([VECTOR], [3], scales=[0.1])}
    theirs = {"output_residual_stream": [10, TOP], "steering_vectors": vectors}
    ours = {"capture": Capture([10, TOP]), "steer": Steer(VECTOR, 3, 0.1)}
    [found] = client.complete(PARIS, **ASKED, **theirs).outputs
    [expected] = client.complete(PARIS, **ASKED, **ours).outputs
    first, second = plain(found), plain(expected)
    assert first["receipt"].pop("coming_from")
    del second["receipt"]["coming_from"]
    assert_equal(first, second)


def test_clients_read_the_allowed_parameters_as_the_checkpoint_has_them(client, model):
    stored = load_file(model / "model.safetensors")
    head = stored["model.embed_tokens.weight"]  # tied
    assert torch.equal(client.parameter("lm_head.weight"), head.float())
    assert torch.equal(client.parameter("model.norm.weight"), stored["model.norm.weight"].float())
    with pytest.raises(ServerError, match=r"may not read.*'model.embed_tokens.weight'"):
        client.parameter("model.embed_tokens.weight")


def test_a_name_that_the_server_has_not_is_refused_by_its_place(client):
    for asked, path in (
        ({"capture": Lens(3, kind="other")}, "capture[0].kind"),
        ({"capture": Features("mine")}, "capture[0].sae"),
        ({"edits": Feature(sae="mine", index={3: 1.0})}, "edits[0].sae"),
        ({"edits": Steer(token=7042, layer=TOP, lens="no")}, "edits[0].lens"),
        ({"edits": Steer("glad", 3)}, "edits[0]"),
    ):
        with pytest.raises(ServerError, match="(there is|there are|) no ") as caught:
            client.complete(PARIS, **ASKED, **asked)
        assert (caught.value.status, caught.value.param) == (400, f"midstream.{path}")


def test_scores_and_rows_come_with_the_tokens_that_they_are_of(client):
    asked = {"capture": Capture([10], stream=True), "probes": Probe(VECTOR, 5, name="p")}
    seen = []
    for found in client.stream(PARIS, **{**ASKED, "max_tokens": 24}, **asked):
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


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_controller_changes_edits_and_stops_its_request(client, is_declared):
    law = {"threshold": {"probe": "p", "above": -1e6, "on": 0.0, "off": 1.0}, "name": "halver"}
    asked = {"steer": Steer(VECTOR, 5, 0.5), "probes": Probe(VECTOR, 10, name="p"), **ASKED}
    given = {"declared": "script", "edits": {"calm": []}} if is_declared else law
    completion = client.complete(PARIS, **{**asked, "max_tokens": 24}, controller=given).outputs[0]
    receipt = completion.receipt
    shown = [(one.source, one.scale) for one in receipt.versions]
    if is_declared:
        assert shown[1:] == [("controller:script/calm", 1.0), ("controller:script", 0.5)]
        assert (completion.finish_reason, receipt.generated_tokens) == ("stop", 6)
    else:
        assert shown[1:] == [("controller:halver", 0.0)]
    late = receipt.versions[1].positions[0] - receipt.prompt_tokens - (2 if is_declared else 0)
    assert late in (0, 1)  # a step may have been scheduled ahead
    assert receipt.status == "ok"


def test_a_probe_switches_the_edits_of_a_request(client):
    act = Switch([], above=-1e6, for_=3)
    probe = Probe(VECTOR, 10, phase="generated", name="calm", act=act)
    asked = {"steer": Steer(VECTOR, 5, 0.5), **ASKED, "max_tokens": 24}
    receipt = client.complete(PARIS, **asked, probes=probe).outputs[0].receipt
    met = receipt.prompt_tokens + 2
    assert [(each.kind, each.position) for each in receipt.actions] == [("switch", met)]
    first, second = receipt.versions
    # Some steps may have been scheduled ahead.
    assert met < second.positions[0] <= met + 4
    assert (second.source, second.expected) == ("probe:calm", 0)
    assert first.applied + first.cached == first.positions[1] == second.positions[0]


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


def test_a_request_behind_a_steered_one_of_its_connection_is_answered_as_alone(server):
    one_connection.check(server)


def fingerprint(client: Client) -> str:
    """What the answer to a request that knows nothing of midstream says of the server."""
    body = {"model": NAME, "prompt": "a", "max_tokens": 1}
    found: str = client.call("POST", "/v1/completions", body)["system_fingerprint"]
    return found


def test_server_wide_steering_is_that_tier_of_every_request_until_it_is_cleared(client):
    client.vectors.register("glad", {3: VECTOR})
    edit, captured = Steer(VECTOR, 3, 0.5, phase="generated"), {"capture": Capture([TOP])}
    [own] = client.complete(PARIS, **ASKED, **captured, edits=edit).outputs
    [before] = client.complete(PARIS, **ASKED, **captured).outputs
    epoch = client.steering.show()["epoch"]
    state = client.steering.set(generated=Steer("glad", 3, 0.5))
    assert (state["epoch"], len(state["generated"])) == (epoch + 1, 1)
    assert fingerprint(client).endswith(f"-midstream-{state['digest'][:8]}")
    [steered] = client.complete(PARIS, **ASKED, **captured).outputs
    assert steered.text == own.text
    assert torch.equal(steered.activations["resid_post", TOP], own.activations["resid_post", TOP])
    assert steered.receipt.edited.applied == own.receipt.edited.applied > 0
    (dose,), (same,) = steered.receipt.edited.doses, own.receipt.edited.doses
    assert 0 < dose.mean <= dose.largest
    assert dose.mean == pytest.approx(same.mean, rel=1e-4)
    assert client.steering.clear()["epoch"] == epoch + 2
    assert "midstream" not in fingerprint(client)
    [after] = client.complete(PARIS, **ASKED, **captured).outputs
    assert_equal(plain(after), plain(before))
    assert not torch.equal(after.activations["resid_post", TOP], own.activations["resid_post", TOP])
    client.vectors.remove("glad")
    assert client.vectors.list() == []


def test_what_is_generated_where_no_key_is_asked_for_is_steered_and_captured_too(client):
    watch = "/v1/midstream/captures/watch"
    asked = {**ASKED, "prompt": PARIS}
    client.call("PUT", watch, {"capture": {"layers": [TOP], "positions": "last_prompt"}})
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
    assert layers["layers"]["0"] == ["rot_q", "resid_post"]
    assert len(layers["layers"]) == 12
    assert layers["hidden_size"] == 576
    given = {"post_block": {"3": {"vector": VECTOR.tolist(), "scale": 0.5}}}
    done = client.call("POST", "/v1/steering/set", {"vectors": given})
    assert done["layers_updated"] == [3]
    assert client.steering.show()["epoch"] == done["epoch"]
    own = Steer(VECTOR, 3, 0.5)
    capture = Capture([TOP])
    steered = ask(client, Case(PARIS, {"capture": capture}))
    shown = client.call("GET", "/v1/steering")["steering"]
    assert shown["3"]["resid_post"]["vectors"] == pytest.approx(
        0.5 * float(VECTOR.norm()), rel=1e-3
    )
    client.call("POST", "/v1/steering/clear", {})
    alone = ask(client, Case(PARIS, {"capture": capture, "steer": own}))
    assert torch.equal(steered.activations["resid_post", TOP], alone.activations["resid_post", TOP])
    module = {"name": "calm", "vectors": {"post_block": {"3": VECTOR.tolist()}}}
    client.call("POST", "/v1/steering/modules/register", module)
    names = [one["name"] for one in client.call("GET", "/v1/steering/modules")["modules"]]
    assert names == ["calm"] == [one["name"] for one in client.vectors.list()]
    client.call("POST", "/v1/steering/modules/unregister", {"name": "calm"})
    assert client.vectors.list() == []


def test_rows_for_a_store_are_where_the_answer_says(client, offline, folder):
    case = CASES["edits"]
    kept = Capture([8, TOP], sink="store", tag="served", request_id="one")
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
        ask(client, Case(PARIS, {}), **extra_body(capture=Capture([99])))
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
        ask(client, Case(PARIS, {}), **extra_body(capture=Capture([99])))
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
    attributes = wait_for(spans[1], found.request_id)
    receipt = found.receipt
    assert attributes["midstream.receipt.status"] == "ok"
    assert attributes["midstream.captured.rows"] == sum(one.actual for one in receipt.captured)
    assert attributes["midstream.edits.applied"] == receipt.edited.applied
    assert attributes["midstream.asked.captures"] == len(CASES["everything"].captures)
    assert attributes["midstream.captured.bytes"] > 0
    assert attributes["gen_ai.usage.completion_tokens"] == TOKENS
    without = ask(client, CASES["plain"])
    assert not [
        name for name in wait_for(spans[1], without.request_id) if name.startswith("midstream")
    ]


def test_nothing_is_left_once_all_have_their_answers(client, server):
    ask(client, CASES["everything"])
    status = server.wait_until_idle()
    assert status["requests"] == status["waiting"] == 0
    assert status["held"] == {"captures": 0, "bytes": 0}
    assert status["workers"][0]["arena"]["leases"] == 0
    assert "error" not in status["totals"]["completions"]
