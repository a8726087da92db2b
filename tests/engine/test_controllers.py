"""Controllers, against transformers with the edits switched where the receipt says."""

import copy
from typing import Any

import pytest
from support import controlling
from support.engine_view import inspect
from support.engines import greedy
from support.oracle import HookEdit
from support.updating import (
    PROMPT,
    Stepped,
    check_replay,
    check_versions,
    everything,
    steer,
    steps_ahead,
    vector,
)

from midstream import Controller, Feature, Probe, SamplingParams, Steer, Threshold
from midstream.errors import ReceiptError, SpecError
from midstream.plan import Switch
from midstream.plan.control.control_laws import Observed

SIZE = len(PROMPT)
OWN, HOOK = steer(vector(1), 1, 2.0)
CALM, CALM_HOOK = steer(vector(2), 0, 3.0)
SETS = {"": [HOOK], "calm": [CALM_HOOK]}
SCRIPT = Controller("script", edits={"calm": CALM})


def probe(act: Any = None) -> Probe:
    return Probe(vector(3), 1, name="p", act=act)


def ask(llm: Any, *controllers: Any, **more: Any) -> list[Any]:
    """One output of the same prompt for each controller, in the same steps."""
    asked = {"edits": OWN, "probes": probe(), "capture": everything(), **more}
    params = asked.pop("params", greedy(24))
    prompts = [{"prompt_token_ids": list(PROMPT)}] * len(controllers)
    outputs = llm.generate(prompts, params, controller=list(controllers), use_tqdm=False, **asked)
    inspect(llm).check_integrity()
    return list(outputs)


def scales_at(completion: Any) -> list[float]:
    """The scale at each position, by the receipt."""
    return [
        one.scale for one in completion.receipt.versions for _ in range(*one.positions)
    ]  # fmt: skip


def expected(law: Any, scores: list[float], ahead: int) -> list[float]:
    """The scale at each position, where each answer holds from the next position on that is not
    scheduled.
    """
    law = copy.copy(law)
    found = [1.0] * (SIZE + ahead)
    shown = scores[:SIZE]
    for position in range(SIZE, len(scores) + 1):
        answer = law(Observed("r", position + 1 - SIZE, {"p": controlled(shown)}))
        found.append(found[-1] if answer is None else answer)
        shown = scores[position : position + 1]
    return found[: len(scores)]


def controlled(scores: list[float]) -> Any:
    import numpy as np

    return np.array(scores, np.float32)


def test_each_answer_holds_from_the_next_step_on(llm, reference):
    (free,) = ask(llm, None)
    scores = free.probes["p"]
    middle = float(scores[SIZE:].median())
    laws = [
        Threshold("p", above=middle, on=1.5, off=0.5),
        Threshold("p", above=middle + 2, below=middle - 2, on=0.0, off=1.0),
        "halving",
        "sign",
        None,
    ]
    changed = 0
    for law, output in zip(laws, ask(llm, *laws), strict=True):
        completion = output.outputs[0]
        check_versions(reference, PROMPT, completion, SETS)
        if law is None:
            assert completion.receipt.versions == ()
            assert completion.token_ids == free.outputs[0].token_ids
            continue
        scores = completion.probes["p"].tolist()
        law = {"sign": controlling.Sign(), "halving": controlling.halving}.get(law, law)
        assert scales_at(completion) == expected(law, scores, steps_ahead(llm))
        changed += len(completion.receipt.versions)
    assert changed > 20


def test_it_chooses_edits_by_name_and_stops_at_the_last_token_with_a_score(llm, reference):
    completion = ask(llm, SCRIPT, None)[0].outputs[0]
    calm, half = (SIZE + step + steps_ahead(llm) for step in (2, 4))
    assert [(one.source, one.scale, one.positions) for one in completion.receipt.versions] == [
        ("request", 1.0, (0, calm)),
        ("controller:script/calm", 1.0, (calm, half)),
        ("controller:script", 0.5, (half, SIZE + 6)),
    ]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "controller:script")
    assert len(completion.token_ids) == 6
    assert len(completion.probes["p"]) == SIZE + 6
    whole = [*PROMPT, *completion.token_ids]
    edits = [
        type(hook)(hook.site, hook.layer, hook.vector, hook.scale * scale,
                   lambda at, low=low, high=high: low <= at < high)
        for hook, scale, low, high in (
            (HOOK, 1, 0, calm), (CALM_HOOK, 1, calm, half), (HOOK, 0.5, half, SIZE + 6),
        )
    ]  # fmt: skip
    _, seen = reference.run(whole, edits)
    for tap in completion.activations:
        assert (completion.activations[tap] - seen[tap]).abs().max() < 1e-3


def test_what_is_computed_again_after_a_preemption_is_as_it_was(llm, reference):
    controllers = [Controller("sign"), Controller("halving")]
    plain = [output.outputs[0] for output in ask(llm, *controllers)]
    llm.reset_prefix_cache()
    run = Stepped(llm)
    for nth, one in enumerate(controllers):
        asked = {"edits": OWN, "probes": probe(), "capture": everything(), "controller": one}
        run.add(str(nth), PROMPT, greedy(24), **asked)
    run.step(4)  # after the step that computes the position SIZE + 2 the strength was halved
    assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    run.step(4)
    assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    outputs = run.finish()
    for nth, before in enumerate(plain):
        completion = outputs[str(nth)].outputs[0]
        # A preemption drops the step that is scheduled ahead, which moves what holds after it.
        if not steps_ahead(llm):
            assert completion.token_ids == before.token_ids
            assert completion.receipt.versions == before.receipt.versions
        check_versions(reference, PROMPT, completion, SETS)


def test_a_function_beside_the_engine_changes_edits_and_stops(llm, reference):
    """An answer holds some tokens later: the receipt says where, and the replay agrees."""
    tokens = []

    def each_third(seen: Observed) -> float:
        tokens.append((seen.tokens, len(seen.scores["p"])))
        return float(seen.tokens // 3 % 2)

    def chooses(seen: Observed) -> Any:
        return {"edits": [CALM], "scale": 0.5} if seen.tokens >= 4 else None

    def stops(seen: Observed) -> Any:
        return {"stop": True} if seen.tokens >= 8 else None

    def fails(_: Observed) -> None:
        raise KeyError("it")

    controllers = [
        Controller(each_third, name="third", seconds=60),
        Controller(chooses, seconds=60),
        Controller(stops, name="limit", seconds=60),
        Controller(fails),
        Controller(fails, on_error="end"),
        None,
    ]
    with pytest.raises(ReceiptError, match="controller 'local' of request .*KeyError") as caught:
        ask(llm, *controllers, params=greedy(60))
    found = [output.outputs[0] for output in caught.value.outputs]
    third, chose, stopped, kept, ended, free = found
    half = HookEdit(CALM_HOOK.site, CALM_HOOK.layer, CALM_HOOK.vector, 1.5, CALM_HOOK.where)
    assert len(third.receipt.versions) > 3
    assert {one.source for one in third.receipt.versions[1:]} == {"controller:third"}
    assert [one.scale for one in third.receipt.versions[1:3]] == [0.0, 1.0]
    check_replay(
        reference,
        PROMPT,
        third,
        {one.number: [HOOK] for one in third.receipt.versions if one.scale},
    )
    shown = [count for count, _ in tokens]
    assert shown == sorted(set(shown))
    assert sum(new for _, new in tokens) == SIZE + shown[-1] - 1
    later = {one.number: [half] for one in chose.receipt.versions[1:]}
    check_replay(reference, PROMPT, chose, {0: [HOOK], **later})
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", "controller:limit")
    assert 8 <= len(stopped.token_ids) < 60
    assert (ended.finish_reason, len(ended.token_ids) < 60) == ("error", True)
    for one in (stopped, kept, free):
        assert one.receipt.versions == ()
        assert one.token_ids == free.token_ids[: len(one.token_ids)]
        check_replay(reference, PROMPT, one, {0: [HOOK]})


def test_what_cannot_be_controlled_is_rejected_by_its_name(llm):
    law = Threshold("p", above=1.0)
    many = Controller("sign", edits={f"set{nth}": OWN for nth in range(22)})
    latent = Feature(encoder=vector(1), decoder=vector(2), layer=1, mode="add", value=1.0)
    for controller, more, path, words in (
        ("who", {}, "controller[0]", "no controller 'who'; declared are"),
        (Threshold("q", above=1.0), {}, "controller[0].threshold.probe", "no probe 'q'"),
        (law, {"probes": None}, "controller[0]", "give the request `probes`"),
        (many, {}, "controller[0]", "the limit is 64 versions"),
        (Controller(law), {"params": SamplingParams(n=2)}, "controller[0]", "n=1"),
        (Controller(law), {"probes": None}, "controller[0]", "give the request `probes`"),
        (Controller(law, name="a"), {"params": greedy(4, stop="controller:a")}, "stop", "reason"),
        (Threshold("p", above=1.0, on=0.5), {"edits": latent}, "controller[0]", "no strength"),
        (law, {"probes": probe(Switch([], above=1))}, "controller[0]", "Switch"),
        ({"declared": 3}, {}, "controller[0].declared", "characters"),
        ({"threshold": {"probe": "p"}}, {}, "controller[0].threshold", "above"),
        (Controller("sign", edits={"a": Steer(vector(1), 99)}), {}, "controller[0].edits.a", "99"),
    ):  # fmt: skip
        with pytest.raises(SpecError, match=words) as caught:
            ask(llm, controller, **more)
        assert caught.value.path.startswith(path), caught.value
    run = Stepped(llm)
    run.add("a", PROMPT, greedy(8), probes=probe(), controller="sign")
    run.step(2)
    with pytest.raises(SpecError, match="cannot be updated"):
        llm.update("a", edits=[OWN])
    run.finish()
