"""Probes that switch edits, against transformers with the edits as the receipt says."""

from typing import Any

import pytest
import torch
from support.conditions import first_met
from support.engine_view import inspect
from support.engines import generated, greedy
from support.updating import (
    PROMPT,
    Stepped,
    check_replay,
    everything,
    held,
    steer,
    steps_ahead,
    vector,
)

from midstream import Capture, Local, Probe, Steer
from midstream.errors import SpecError
from midstream.plan import Stop, Switch

READ = 1
SIZE = len(PROMPT)


FIRST, HOOK = steer(vector(1), 1, 2.0)
SECOND, LATER = steer(vector(2), 0, 3.0)


def probe(act: Any = None, name: str = "mood", phase: str = "generated") -> Probe:
    return Probe(vector(3), READ, name=name, phase=phase, act=act)


def scores_without(llm: Any, prompt: list[int], phase: str, params: Any = None) -> Any:
    """The scores while nothing is switched, of each completion."""
    run = Stepped(llm)
    run.add("free", prompt, params or greedy(24), edits=[FIRST], probes=probe(phase=phase))
    output = run.finish()["free"]
    llm.reset_prefix_cache()
    return [one.probes["mood"].tolist() for one in output.outputs]


def above(scores: list[float], nth: int) -> float:
    """A threshold that the first new maximum from a score on exceeds, and no score before."""
    where = next(at for at in range(nth, len(scores)) if scores[at] > max(scores[:at]) + 1e-2)
    return (scores[where] + max(scores[:where])) / 2


def actions(receipt: Any) -> list[tuple[str, str, int]]:
    return [(one.name, one.kind, one.position) for one in receipt.actions]


def test_other_edits_hold_from_the_position_after_the_one_that_met_the_condition(llm, reference):
    (free,) = scores_without(llm, PROMPT, "generated")
    threshold = above(free, 4)
    where = SIZE + first_met(free, above=threshold)
    start = where + 1 + steps_ahead(llm)
    run = Stepped(llm)
    asked = {"edits": [FIRST], "capture": everything()}
    switch = Switch([SECOND], above=threshold)
    run.add("a", PROMPT, greedy(24), probes=probe(switch), **asked)
    run.add("same", PROMPT, greedy(24), probes=probe(), **asked)
    run.add("off", PROMPT, greedy(24), probes=probe(Switch([], above=threshold)), **asked)
    run.add("never", PROMPT, greedy(24), probes=probe(Switch([], above=1e6)), **asked)
    run.add("plain", PROMPT, greedy(24), capture=everything())
    outputs = run.finish()
    for name, hooks in (("a", {0: [HOOK], 1: [LATER]}), ("off", {0: [HOOK]})):
        completion = outputs[name].outputs[0]
        assert held(completion.receipt) == [(0, start), (start, SIZE + 23)]
        assert [one.source for one in completion.receipt.versions] == ["request", "probe:mood"]
        assert actions(completion.receipt) == [("mood", "switch", where)]
        assert completion.receipt.actions[0].score == pytest.approx(free[where - SIZE], abs=1e-4)
        assert len(completion.probes["mood"]) == 23
        check_replay(reference, PROMPT, completion, hooks)
    same, never = outputs["same"].outputs[0], outputs["never"].outputs[0]
    assert list(never.token_ids) == list(same.token_ids)
    for completion in (same, never):
        assert completion.receipt.versions == completion.receipt.actions == ()
        check_replay(reference, PROMPT, completion, {0: [HOOK]})
    check_replay(reference, PROMPT, outputs["plain"].outputs[0], {})
    assert len({tuple(generated(outputs[name])) for name in ("a", "off", "same")}) == 3
    inspect(llm).check_integrity()


def test_several_probes_switch_one_after_the_other_and_a_stop_ends_it(llm, reference):
    late = Steer(vector(2), 0, 3.0, positions=slice(14, None))
    run = Stepped(llm)
    probes = [
        probe(Switch(late, above=-1e6), "on"),
        probe(Switch([], above=-1e6, for_=9), "off"),
        probe(Stop(above=-1e6, for_=15), "end"),
    ]
    run.add("a", PROMPT, greedy(24), edits=[FIRST], capture=everything(), probes=probes)
    completion = run.finish()["a"].outputs[0]
    on, off = 10 + steps_ahead(llm), 18 + steps_ahead(llm)
    assert held(completion.receipt) == [(0, on), (on, off), (off, 24)]
    assert [one.applied for one in completion.receipt.versions] == [on, off - 14, 0]
    assert actions(completion.receipt) == [
        ("on", "switch", 9), ("off", "switch", 17), ("end", "stop", 23),
    ]  # fmt: skip
    shown = [one.what for one in completion.receipt.selected]
    assert {"versions[1].edits[0]", "probes[0]"} <= set(shown)
    hook = type(LATER)("resid_post", 0, vector(2), 3.0, lambda at: at >= 14)
    # The row of the token that stopped it is there, unlike that of a last token.
    ids = [*PROMPT, *completion.token_ids]
    assert len(ids) == 24
    where = [(HOOK, 0, on), (hook, on, off)]
    hooks = [
        type(one)(one.site, one.layer, one.vector, one.scale,
                  lambda at, one=one, low=low, high=high: low <= at < high and one.where(at))
        for one, low, high in where
    ]  # fmt: skip
    _, seen = reference.run(ids, hooks)
    for tap in completion.activations:
        assert torch.allclose(completion.activations[tap], seen[tap], atol=1e-3)


def test_a_condition_met_in_a_chunk_of_the_prompt_switches_from_the_next_chunk_on(llm, reference):
    prompt = [(7 * n) % 190 + 3 for n in range(150)]
    (free,) = scores_without(llm, prompt, "prompt")
    threshold = above(free[:64], 2)
    run = Stepped(llm)
    asked = {"edits": [FIRST], "capture": everything()}
    act = Switch([SECOND], above=threshold)
    run.add("a", prompt, greedy(4), probes=probe(act, phase="prompt"), **asked)
    completion = run.finish()["a"].outputs[0]
    where = first_met(free, above=threshold)
    assert actions(completion.receipt) == [("mood", "switch", where)]
    (position,) = {one.positions[0] for one in completion.receipt.versions[1:]}
    assert where < position == 64 * (1 + steps_ahead(llm))
    check_replay(reference, prompt, completion, {0: [HOOK], 1: [LATER]})


def test_what_is_computed_again_after_a_preemption_has_the_edits_that_it_had(llm, reference):
    (free,) = scores_without(llm, PROMPT, "generated")
    threshold = above(free, 4)
    where = SIZE + first_met(free, above=threshold)
    run = Stepped(llm)
    act = Switch([SECOND], above=threshold)
    run.add("a", PROMPT, greedy(24), edits=[FIRST], capture=everything(), probes=probe(act))
    # The step that computes a generated position p is the (p + 2 − SIZE)-th.
    run.step(where + 2 - SIZE)
    (request,) = run.scheduler.requests.values()
    assert request.num_computed_tokens == where + 1
    assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    run.step(3)
    assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    completion = run.finish()["a"].outputs[0]
    assert request.num_preemptions == 2
    ((_, start), (again, stop)) = held(completion.receipt)
    assert where + 1 <= start == again <= where + 1 + 2 * steps_ahead(llm)
    assert stop == SIZE + 23
    assert actions(completion.receipt) == [("mood", "switch", where)]
    check_replay(reference, PROMPT, completion, {0: [HOOK], 1: [LATER]})


def test_names_are_bound_and_blocks_of_other_edits_are_not_reused(llm, reference):
    prompt = [(5 * n) % 180 + 4 for n in range(40)]
    llm.vectors.register("calm", {0: vector(2)})
    run = Stepped(llm)
    act = Switch(Steer("calm", scale=3.0), above=-1e6, for_=40)
    run.add("a", prompt, greedy(100), edits=[FIRST], capture=everything(), probes=probe(act))
    completion = run.finish()["a"].outputs[0]
    start = 80 + steps_ahead(llm)
    assert held(completion.receipt)[1] == (start, 139)
    check_replay(reference, prompt, completion, {0: [HOOK], 1: [LATER]})
    whole = [*prompt, *completion.token_ids]
    switched = [Steer(vector(1), 1, 2.0, positions=slice(0, start))]
    switched += [Steer(vector(2), 0, 3.0, positions=slice(start, None))]
    for name, edits, cached in (("same", switched, 128), ("first", [FIRST], 64)):
        run.add(name, whole, greedy(3), edits=edits)
        assert run.finish()[name].num_cached_tokens == cached, name


def test_vectors_that_the_workers_lack_are_sent_with_the_request(llm, reference):
    """They are so many that the plans name them. Both of two requests switch to them."""
    pairs = [steer(vector(10 + nth), nth % 3, 0.4) for nth in range(18)]
    act = Switch([edit for edit, _ in pairs], above=-1e6, for_=3)
    run = Stepped(llm)
    for name in ("a", "b"):
        asked = {"capture": everything(), "probes": probe(act)}
        run.add(name, PROMPT, greedy(8), edits=[FIRST], **asked)
        run.step(2)
    for output in run.finish().values():
        completion = output.outputs[0]
        assert held(completion.receipt)[1] == (SIZE + 3 + steps_ahead(llm), SIZE + 7)
        check_replay(reference, PROMPT, completion, {0: [HOOK], 1: [hook for _, hook in pairs]})
    inspect(llm).check_integrity()


def function(rows: Any) -> Any:
    return rows


def test_what_cannot_be_switched_is_rejected_by_its_name(llm):
    run = Stepped(llm)
    for act, path, words, more in (
        (Switch([Steer(vector(1), 99)], above=1), "probes[0].act.switch.edits[0].layer", "99", {}),
        (Switch([Steer("what")], above=1), "probes[0].act.switch.edits[0]", "what", {}),
        (Switch([], above=1), "probes[0].act.switch", "keeps the edits",
         {"capture": Capture(1, reuse=True)}),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=words) as caught:
            run.add("a", PROMPT, greedy(4), probes=probe(act), **more)
        assert caught.value.path.startswith(path)
    with pytest.raises(SpecError, match="Local") as caught:
        Switch([Local(function, 1)], above=1)
    assert caught.value.path == "edits[0]"
    with pytest.raises(SpecError, match="edits of one request"):
        llm.steering.set(generated=probe(Switch([], above=1)))
    run.add("a", PROMPT, greedy(8), edits=[FIRST], probes=probe(Switch([], above=1e6)))
    run.step(3)
    with pytest.raises(SpecError, match="cannot be updated"):
        llm.update("a", scale=0)
    assert run.finish()["a"].outputs[0].receipt.versions == ()
