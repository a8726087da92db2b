"""Probes that act: transformers' scores decide where a completion ends, or is flagged."""

import pytest
import torch
from support.conditions import first_met, pooled
from support.engine_view import inspect
from support.engines import generated, greedy, tokens
from support.updating import Stepped

from midstream import Capture, Probe, Steer, TokenIds
from midstream.errors import SpecError
from midstream.plan import Flag, Stop

HIDDEN, LAYER, COUNT = 64, 1, 24
VECTOR = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(1))
BIAS = 0.25
# The second comes in chunks.
PROMPTS = [[(7 * n) % 120 + 5 for n in range(20)], [(11 * n) % 150 + 5 for n in range(100)]]
CONDITIONS = [
    ({"above": 0.5, "for_": 2}, "generated"),
    ({"below": 0.45, "for_": 3, "pool": "mean:4"}, "generated"),
    ({"above": 0.6, "pool": "ema:0.8"}, "generated"),
    ({"above": 0.8, "pool": "mean:8"}, "all"),
    ({"above": 0.99}, "prompt"),
    ({"below": 0.4, "for_": 2}, TokenIds(list(range(0, 180, 2)))),
]


def probe(act=None, positions="all", name="guard", **more):
    return Probe(VECTOR, LAYER, BIAS, name=name, positions=positions, act=act, **more)


def ask(llm, prompts=PROMPTS, params=None, **asked):
    params = params or greedy(COUNT)
    return llm.generate([tokens(one) for one in prompts], params, use_tqdm=False, **asked)


def scores_in_transformers(reference, ids):
    """The score of each token but the last."""
    _, sites = reference.run(ids[:-1])
    return (sites["resid_post", LAYER].double() @ VECTOR.double() + BIAS).tolist()


def chosen(positions, prompt, ids):
    """The positions that a selection selects, by its definition."""
    size, last = len(prompt), len(ids) - 1
    if isinstance(positions, TokenIds):
        return [place for place in range(last) if ids[place] % 2 == 0]
    return {
        "all": range(last), "prompt": range(size), "generated": range(size, last),
    }[positions]  # fmt: skip


def placed(fields, scores):
    """A condition whose threshold is between the pooled scores at a quantile of them."""
    values = sorted(set(pooled(scores, fields.get("pool", "none")).tolist()))
    side = "above" if "above" in fields else "below"
    nth = min(max(int(fields[side] * len(values)), 1), len(values) - 1)
    return {**fields, side: (values[nth - 1] + values[nth]) / 2}


def late(scores, pool="none"):
    """A condition that is met late, and where it is."""
    values = pooled(scores, pool).tolist()
    where = next(nth for nth in range(6, len(values)) if values[nth] > max(values[:nth]))
    return {"above": (values[where] + max(values[:where])) / 2, "pool": pool}, where


@pytest.mark.parametrize(("fields", "positions"), CONDITIONS)
def test_a_completion_ends_at_the_token_that_transformers_scores_say(
    llm, reference, fields, positions
):
    whole = ask(llm)
    for prompt, output in zip(PROMPTS, whole, strict=True):
        ids = [*prompt, *generated(output)]
        every = scores_in_transformers(reference, ids)
        places = list(chosen(positions, prompt, ids))
        scores = [every[place] for place in places]
        condition = placed(fields, scores)
        where = first_met(scores, **condition)
        assert where is not None
        asked = probe(Stop(**condition), positions)
        both = [asked, probe(Flag(**condition), positions, "flag")]
        stopped, plain, flagged = ask(llm, [prompt] * 3, probes=[both, None, both[1]])
        (completion,) = stopped.outputs
        assert generated(stopped) == ids[len(prompt) : places[where] + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", "probe:guard")
        assert generated(plain) == generated(flagged) == ids[len(prompt) :]
        value = pooled(scores, condition.get("pool", "none"))[where]
        actions = [(one.name, one.kind, one.position) for one in stopped.receipt.actions]
        assert actions == [(name, kind, places[where]) for name, kind in
                           (("guard", "stop"), ("flag", "flag"))]  # fmt: skip
        (flag,) = flagged.receipt.actions
        for one in (*stopped.receipt.actions, flag):
            assert one.score == pytest.approx(value, abs=1e-4)
        assert (flag.position, flag.kind) == (places[where], "flag")
        assert stopped.probes["guard"].tolist() == pytest.approx(scores[: where + 1], abs=1e-4)
    inspect(llm).check_integrity()


def test_captures_and_edits_reach_to_the_token_that_a_probe_stopped_at(llm):
    steer = Steer(VECTOR, LAYER, 0.5, positions="generated")
    (whole,) = ask(llm, PROMPTS[:1], probes=probe(), edits=steer)
    size, values = len(PROMPTS[0]), whole.probes["guard"].tolist()
    threshold = sorted(values[size:])[-4] - 1e-4
    where = first_met(values[size:], above=threshold)
    asked = {"edits": steer, "capture": Capture(LAYER, positions=["generated", "last_row"])}
    (output,) = ask(llm, PROMPTS[:1], probes=probe(Stop(above=threshold), "generated"), **asked)
    assert generated(output) == generated(whole)[: where + 1]
    rows = output.activations["resid_post", LAYER]
    assert output.activations.positions_of("resid_post", LAYER).tolist() == list(
        range(size, size + where + 1)
    )
    assert (rows @ VECTOR + BIAS).tolist() == pytest.approx(values[size:][: where + 1], abs=1e-3)
    assert output.receipt.edited.expected == output.receipt.edited.applied == where + 1


def test_a_stop_in_the_first_chunk_of_a_prompt_leaves_no_token(llm):
    (whole,) = ask(llm, PROMPTS[1:], probes=probe(positions="prompt"))
    scores = whole.probes["guard"].tolist()
    condition = {"above": max(scores[:40]) - 1e-4}
    (output,) = ask(llm, PROMPTS[1:], probes=probe(Stop(**condition), "prompt"))
    where = first_met(scores, **condition)
    assert where < 40
    assert generated(output) == []
    assert output.outputs[0].text == ""
    assert output.receipt.actions[0].position == where
    assert len(output.probes["guard"]) == where + 1
    assert output.receipt.status == "ok"


def test_a_preempted_completion_stops_where_it_would_have(llm):
    (whole,) = ask(llm, PROMPTS[1:], probes=probe(positions="generated"))
    condition, where = late(whole.probes["guard"].tolist(), "mean:3")
    run = Stepped(llm)
    run.add("a", PROMPTS[1], greedy(COUNT), probes=probe(Stop(**condition), "generated"))
    for steps in (4, where - 4):
        run.step(steps)
        llm.reset_prefix_cache(reset_running_requests=True)
    output = run.finish()["a"]
    assert generated(output) == generated(whole)[: where + 1]
    assert output.outputs[0].stop_reason == "probe:guard"


def test_what_vllm_stops_at_comes_first(llm):
    (whole,) = ask(llm, PROMPTS[1:], probes=probe(positions="generated"))
    ids = generated(whole)
    condition, where = late(whole.probes["guard"].tolist())
    for params, count, reason in (
        (greedy(where + 1), where + 1, "length"),
        (greedy(COUNT, stop_token_ids=[ids[where]]), ids.index(ids[where]) + 1, ids[where]),
        (greedy(COUNT, min_tokens=COUNT), where + 1, "probe:guard"),
    ):
        asked = probe(Stop(**condition), "generated")
        (output,) = ask(llm, PROMPTS[1:], params, probes=asked)
        (completion,) = output.outputs
        ended = completion.stop_reason or completion.finish_reason
        assert (len(completion.token_ids), ended) == (count, reason)


def test_guards_of_the_engine_stop_every_request_within_their_tier(llm):
    (whole,) = ask(llm, PROMPTS[1:], probes=probe(positions="generated"))
    condition, where = late(whole.probes["guard"].tolist())
    guard = probe(Stop(**condition), name="guard")
    llm.steering.set(generated=guard, prompt=[Probe(VECTOR, 0, name="p", act=Flag(above=1e6))])
    assert "stop: guard" in str(llm.steering.show())
    plain, own = ask(llm, PROMPTS[1:] * 2, probes=[None, [probe(name="own")]])
    for output in (plain, own):
        assert generated(output) == generated(whole)[: where + 1]
        assert output.outputs[0].stop_reason == "probe:guard"
        assert [one.kind for one in output.receipt.actions] == ["stop"]
    assert sorted(own.probes) == ["guard", "own", "p"]
    assert [one.what for one in own.receipt.selected] == [
        "probes[0]", "steering[-2]", "steering[-1]",
    ]  # fmt: skip
    with pytest.raises(SpecError, match="named `guard` as well"):
        ask(llm, PROMPTS[1:], probes=probe())
    with pytest.raises(SpecError, match="already the name of"):
        llm.steering.set(base=guard)
    # One token has no generated row, so that there is nothing to guard.
    (one,) = ask(llm, PROMPTS[1:], greedy(1))
    assert one.outputs[0].finish_reason == "length"
    llm.steering.clear()
    (after,) = ask(llm, PROMPTS[1:])
    assert generated(after) == generated(whole)


def test_a_stop_string_that_reads_like_a_stop_reason_is_refused(llm):
    params = greedy(4, stop=["probe:guard"])
    with pytest.raises(SpecError, match="is the stop reason of the probe"):
        ask(llm, PROMPTS[:1], params, probes=probe(Stop(above=1.0)))
