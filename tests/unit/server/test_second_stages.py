"""Second stages of guards whose own request has not got what they need, and what they leave out."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import serving_endpoints
from support.serving_endpoints import Params
from support.serving_fake import completion, outputs_of, refused, serving
from unit.server.test_guards import ASK, FORM, GUARDS, PROBE, events, named, stream

from midstream import Probe
from midstream.errors import NothingSelectedError
from midstream.results.probe_scores import Probes
from midstream.results.receipt import Probed, Receipt
from midstream.steering.guard_definition import MESSAGE

pytestmark = pytest.mark.anyio


def ended(probe: Probe, values: list[float], unscored: int = 0, problem: str = "") -> Any:
    """An output of the server's own request, with some scores of a probe."""
    size = len(values)
    probed = Probed(probe.name, "resid_post", 1, size, size, unscored)
    problems = (problem,) if problem else ()
    made = Receipt("x", 5, 1, (), None, probed=(probed,), problems=problems)
    at = torch.arange(size)
    probes = Probes({probe.name: torch.tensor(values)}, {probe.name: at}, 100 + at, {})
    return SimpleNamespace(outputs=[completion(probes=probes, receipt=made)])


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([], "ended without scores"),
        ([([math.nan] * 3, 0, "")], "none of the scores is finite"),
        ([([0.0, 0.1], 0, "a worker lost them")], "a worker lost them"),
        # Skipped by the cache, then computed: it reads what it needs.
        ([([math.nan, math.nan, 0.1], 2, ""), ([0.9, 0.1, 0.1], 0, "")], None),
        ([([math.nan, 0.9], 1, ""), ([0.1, 0.1], 0, "")], ""),
    ],
)
async def test_a_second_stage_without_the_scores_that_it_needs_is_none_that_passed(
    answers: list[Any], problem: str | None
) -> None:
    asked = []

    async def generate(_: Any, params: Any, request_id: str) -> Any:
        asked.append((params.skip_reading_prefix_cache, request_id))
        plan = params.extra_args["midstream"]
        assert plan.is_own  # no capture of every request has it
        for answer in answers[len(asked) - 1 : len(asked)]:
            yield ended(plan.plan.probes[0], *answer)

    async with serving() as (site, client):
        await client.put(f"{GUARDS}/cheap", json=FORM)
        dear = {**FORM, "action": "stop", "message": "!", "when": {"guard": "cheap"}}
        await client.put(f"{GUARDS}/dear", json=dear)
        site.server.guards.connect(site.engine, generate)
        with events() as logged:
            text, _ = await stream(client)
        assert text == ("t1t2t3" if problem == "" else "t1t2t3!")
        failed = [one["problem"] for one in named(logged, "guard.failed")]
        assert len(failed) == bool(problem)
        assert all(str(problem) in one for one in failed)
        reads = [skips for skips, _ in asked]
        assert reads == [False, True][: max(1, len(answers))]
        assert len({name for _, name in asked}) == len(asked)


async def test_a_second_stage_that_selects_no_token_passes() -> None:
    async def generate(*_: Any, **__: Any) -> Any:
        raise NothingSelectedError("probes[0].positions", "no token")
        yield

    async with serving() as (site, client):
        await client.put(f"{GUARDS}/cheap", json=FORM)
        dear = {**FORM, "action": "stop", "message": "!", "when": {"guard": "cheap"}}
        await client.put(f"{GUARDS}/dear", json=dear)
        site.server.guards.connect(site.engine, generate)
        assert await stream(client) == ("t1t2t3", "length")


async def test_a_second_stage_reads_none_of_the_tokens_that_its_probe_leaves_out() -> None:
    async with serving() as (site, client):
        await client.put(f"{GUARDS}/cheap", json=FORM)
        dear = {**FORM, "action": "stop", "when": {"guard": "cheap"}}
        for exclude in ([0], [{"slice": [2, 4]}], [{"tokens": [7]}]):
            probe = {**PROBE.to_dict(), "exclude": exclude}
            await client.put(f"{GUARDS}/dear", json={**dear, "probe": probe})
            await stream(client)
            (read,) = site.engine.calls[-1][1].extra_args["midstream"].plan.probes
            wanted = Probe.parse(probe).positions.exclude
            assert read.positions.exclude == wanted
        for exclude in ([-1], ["last_prompt"], ["generated"], [{"slice": [-3, None]}]):
            probe = {**PROBE.to_dict(), "exclude": exclude}
            form = {**dear, "probe": probe}
            await refused(client.put(f"{GUARDS}/dear", json=form), 400, "from the beginning")


@pytest.mark.parametrize("activations", ["inline", "handle"])
async def test_rows_and_scores_do_not_tell_an_answer_that_a_second_stage_withholds(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = partial(Params, output_kind=SimpleNamespace(name="FINAL_ONLY"))
    monkeypatch.setattr(serving_endpoints, "Params", whole)
    own = {
        "capture": {"layers": [1]}, "activations": activations,
        "probes": {**PROBE.to_dict(), "name": "own"},
    }  # fmt: skip
    async with serving() as (site, client):
        site.engine.script = lambda *asked: outputs_of(*asked)[-1:]
        body = {**ASK, "midstream": own}
        assert {"activations", "probes"} <= set(
            (await client.post("/v1/completions", json=body)).json()["midstream"]
        )
        held = len(site.server.captures)
        await client.put(f"{GUARDS}/cheap", json=FORM)
        dear = {**FORM, "action": "stop", "when": {"guard": "cheap"}}
        await client.put(f"{GUARDS}/dear", json=dear)
        answer = (await client.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == MESSAGE
        assert list(answer["midstream"]) == ["receipt"]
        assert len(site.server.captures) == held
