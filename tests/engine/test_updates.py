"""Edits of running requests that change, against transformers with them as the receipt says."""

import pytest
from support.engines import greedy
from support.updating import PROMPT, Stepped, check_replay, everything, held, steer, vector

from midstream import Steer
from midstream.errors import SpecError


def test_other_edits_hold_from_the_next_position_on(llm, reference):
    run = Stepped(llm)
    (first, hook), (second, later) = steer(vector(1), 1, 2.0), steer(vector(2), 0, 3.0)
    run.add("a", PROMPT, greedy(20), edits=[first], capture=everything())
    run.step(5)
    found = llm.update("a", edits=[second])
    assert found.version == 1
    (position,) = found.positions.values()
    assert position == len(PROMPT) + 4
    output = run.finish()["a"]
    completion = output.outputs[0]
    assert held(completion.receipt) == [(0, position), (position, len(PROMPT) + 19)]
    check_replay(reference, PROMPT, completion, {0: [hook], 1: [later]})


def test_scale_multiplies_the_edits_given_last(llm, reference):
    run = Stepped(llm)
    one, hook = steer(vector(1), 1, 2.0)
    for name in ("a", "b"):
        run.add(name, PROMPT, greedy(24), edits=[one], capture=everything())
    run.step(4)
    llm.update("a", scale=0)
    run.step(3)
    llm.update("a", scale=7)
    llm.update("a", scale=0.5)
    run.step(3)
    llm.update("a", edits=[Steer(vector(2), 0, 3.0)], scale=2)
    run.step(3)
    llm.update("a", scale=1)
    outputs = run.finish()
    completion = outputs["a"].outputs[0]
    versions = completion.receipt.versions
    assert [one.scale for one in versions] == [1, 0, 7, 0.5, 2, 1]
    assert [one.positions[1] - one.positions[0] for one in versions] == [12, 3, 0, 3, 3, 11]
    assert [one.applied for one in versions] == [12, 0, 0, 3, 3, 11]
    second = steer(vector(2), 0, 6.0)[1], steer(vector(2), 0, 3.0)[1]
    hooks = {0: [hook], 3: [steer(vector(1), 1, 1.0)[1]], 4: [second[0]], 5: [second[1]]}
    check_replay(reference, PROMPT, completion, hooks)
    assert outputs["b"].outputs[0].receipt.versions == ()
    check_replay(reference, PROMPT, outputs["b"].outputs[0], {0: [hook]})
    assert completion.token_ids != outputs["b"].outputs[0].token_ids


@pytest.mark.parametrize("order", ["after", "before"])
def test_what_is_computed_again_after_a_preemption_is_as_it_was(llm, reference, order):
    run = Stepped(llm)
    (first, hook), (second, later) = steer(vector(1), 1, 2.0), steer(vector(2), 0, 3.0)
    run.add("a", PROMPT, greedy(20), edits=[first], capture=everything())
    run.step(6)
    if order == "after":
        llm.update("a", edits=[second])
    assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    if order == "before":
        llm.update("a", edits=[second])
    (request,) = run.scheduler.requests.values()
    assert request.num_preemptions == 1
    assert request.num_computed_tokens == 0
    completion = run.finish()["a"].outputs[0]
    position = len(PROMPT) + 5
    assert held(completion.receipt) == [(0, position), (position, len(PROMPT) + 19)]
    check_replay(reference, PROMPT, completion, {0: [hook], 1: [later]})


def test_a_continuation_reuses_blocks_of_the_same_versions_only(llm, reference):
    run = Stepped(llm)
    prompt = [(5 * n) % 180 + 4 for n in range(40)]
    (first, hook), (second, later) = steer(vector(1), 1, 2.0), steer(vector(2), 0, 3.0)
    run.add("a", prompt, greedy(100), edits=[first], capture=everything())
    run.step(40)
    (p,) = llm.update("a", edits=[second]).positions.values()
    assert p == 79
    completion = run.finish()["a"].outputs[0]
    check_replay(reference, prompt, completion, {0: [hook], 1: [later]})
    whole = [*prompt, *completion.token_ids]  # 140 tokens, 4 blocks of 32
    switched = [Steer(vector(1), 1, 2.0, positions=slice(0, p))]
    switched += [Steer(vector(2), 0, 3.0, positions=slice(p, None))]
    late = [Steer(vector(1), 1, 2.0, positions=slice(0, p + 1))]
    late += [Steer(vector(2), 0, 3.0, positions=slice(p + 1, None))]
    for name, edits, cached in (
        ("late", late, 64), ("first", [first], 64), ("second", [second], 0),
        ("plain", [Steer(vector(3), 2, positions=[139])], 0), ("same", switched, 128),
    ):  # fmt: skip
        run.add(name, whole, greedy(3), edits=edits)
        output = run.finish()[name]
        assert output.num_cached_tokens == cached, name
        assert output.outputs[0].receipt.status == "ok"
    hooks = [
        type(hook)(one.site, one.layer, one.vector, one.scale, where)
        for one, where in ((hook, lambda at: at < p), (later, lambda at: at >= p))
    ]
    assert list(run.outputs["same"].outputs[0].token_ids) == reference.generate(whole, 3, hooks)


def test_every_completion_changes_from_a_position_of_its_own(llm, reference):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    run = Stepped(llm)
    (first, hook), (second, later) = steer(vector(1), 1, 2.0), steer(vector(2), 0, 3.0)
    whole = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, n=3, output_kind=whole
    )
    run.add("a", PROMPT, params, edits=[first], capture=everything())
    run.step(5)
    found = llm.update("a", edits=[second])
    assert set(found.positions) == {0, 1, 2}
    output = run.finish()["a"]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    for one in output.outputs:
        assert held(one.receipt)[1][0] == found.positions[one.index]
        check_replay(reference, PROMPT, one, {0: [hook], 1: [later]}, is_greedy=False)


def test_a_request_that_began_with_no_edits_yet_gets_them_later(llm, reference):
    run = Stepped(llm)
    prompt = [(5 * n) % 180 + 4 for n in range(60)]
    edit, hook = steer(vector(1), 1, 3.0)
    for name in ("a", "b"):
        run.add(name, prompt, greedy(50), edits=[])
    run.step(4)
    (position,) = llm.update("a", edits=edit).positions.values()
    run.step(3)
    llm.update("a", scale=0.5)
    outputs = run.finish()
    assert position == len(prompt) + 3
    completion, plain = outputs["a"].outputs[0], outputs["b"].outputs[0]
    assert plain.receipt.status == completion.receipt.status == "ok"
    assert (plain.receipt.versions, plain.receipt.edited, plain.activations) == ((), None, None)
    assert held(completion.receipt) == [
        (0, position), (position, position + 3), (position + 3, len(prompt) + 49)
    ]  # fmt: skip
    assert completion.receipt.edited.applied == len(prompt) + 49 - position
    half = steer(vector(1), 1, 1.5)[1]
    check_replay(reference, prompt, completion, {1: [hook], 2: [half]})
    check_replay(reference, prompt, plain, {})
    for one, hits in ((completion, 64), (plain, 96)):
        whole = {"prompt_token_ids": [*prompt, *one.token_ids]}
        later = llm.generate(whole, greedy(1), use_tqdm=False)[0]
        assert (later.num_cached_tokens, hasattr(later, "receipt")) == (hits, False)


def test_what_cannot_change_says_so_and_changes_nothing(llm, reference):
    run = Stepped(llm)
    first, hook = steer(vector(1), 1, 2.0)
    run.add("a", PROMPT, greedy(8), edits=[first], capture=everything())
    run.add("bare", PROMPT, greedy(8), capture=everything())
    run.step(3)
    for name, given, path, problem in (
        ("b", {"scale": 1}, "request_id", "request 'b' is not running"),
        ("a", {}, "", "give `edits`, `scale` or both"),
        ("a", {"scale": float("nan")}, "scale", "finite"),
        ("a", {"edits": [Steer(vector(1), 99)]}, "edits[0].layer", "99"),
        ("a", {"edits": [{"op": "steer"}]}, "edits[0]", "vector"),
        ("a", {"edits": [Steer("unknown")]}, "edits[0]", "unknown"),
        ("bare", {"scale": 2}, "scale", "no edits of its own"),
    ):
        with pytest.raises(SpecError, match=problem) as caught:
            llm.update(name, **given)
        assert caught.value.path.startswith(path)
    llm.update("bare", edits=[first])
    outputs = run.finish()
    assert outputs["a"].outputs[0].receipt.versions == ()
    check_replay(reference, PROMPT, outputs["a"].outputs[0], {0: [hook]})
    check_replay(reference, PROMPT, outputs["bare"].outputs[0], {1: [hook]})
    with pytest.raises(SpecError, match="request 'a' is not running: it has ended"):
        llm.update("a", scale=2)


def test_requests_that_ended_have_their_results_once_the_last_other_one_is_aborted(llm, reference):
    """No step follows in which they would get them."""
    edit, hook = steer(vector(1), 1, 2.0)
    run = Stepped(llm)
    run.add("short", PROMPT, greedy(3), edits=[edit], capture=everything())
    run.add("long", PROMPT, greedy(30), edits=[edit])
    while "short" not in run.outputs:
        run.step()
    llm.llm_engine.abort_request(["long"])
    assert not llm.llm_engine.has_unfinished_requests()
    check_replay(reference, PROMPT, run.outputs["short"].outputs[0], {0: [hook]})
