"""Gates with memory, compared with a loop over the tokens in transformers, however they are cut."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine.asking import ask
from support import tiny
from support.edit_cases import Case, Maker, all_problems, problems
from support.engines import generated, greedy
from support.gate_memory import LONG
from support.inner_served import assert_rows
from support.oracle_edits import EVERY_SITE, At, EditOracle
from support.scheduling import chunks
from support.updating import Stepped

from midstream import Capture, Gate, SamplingParams, Steer, TokenIds
from midstream.errors import SpecError
from midstream.plan import Reading

TOLERANCE, TIE = 1e-4, 1e-3
COUNT = 8
PARAMS = greedy(COUNT, logprobs=3, detokenize=False)
EVERYTHING = Capture("all", EVERY_SITE)
SHORT = [44, 8, 150, 9, 3]
MEMORIES: dict[str, dict[str, Any]] = {
    "rest": {"hold": "rest"},
    "hold": {"hold": 2},
    "release": {"release": -1.0},
    "smooth": {"smooth": 0.3},
    "smooth by degrees": {"smooth": 0.4, "sharpness": 2.0},
    "all": {"hold": 1, "smooth": 0.5, "release": -0.5},
}


def gates(oracle: EditOracle, prompt: list[int], where: dict[str, Any]) -> dict[str, Gate]:
    """Each kind of memory, at the edit's own tap and at earlier ones, closed at first."""
    plain = oracle.run([*prompt, *SHORT])
    draw = torch.Generator().manual_seed(len(prompt))
    found = {}
    for nth, (name, memory) in enumerate(MEMORIES.items()):
        own = (EVERY_SITE[2 + nth % 5], 1 + nth % 2)
        maker = Maker(own, plain, draw)
        read = None if nth % 2 else (EVERY_SITE[nth % 3], nth % 2)
        direction = maker.direction(read)
        scores = maker.scores(direction, read)
        spread = float(scores[len(scores) * 3 // 4] - scores[len(scores) // 4])
        threshold = float(scores[len(scores) * 3 // 5] + scores[len(scores) * 3 // 5 + 1]) / 2
        given = dict(memory)
        if "release" in given:
            given["release"] = threshold + given["release"] * spread
        if "sharpness" in given:
            given["sharpness"] /= spread
        edit = Steer(maker.vector(), scale=0.8, **maker.place, **where)
        place = {} if read is None else {"site": read[0], "layer": read[1]}
        found[name] = Gate(edit, Reading(direction, 0.0, **place), threshold, **given)
    return found


def remembers(oracle: EditOracle, case: Case) -> bool:
    """Whether the gate of a case does something else without its memory, in the prompt."""
    if not case.edits or not case.edits[0].edit.memory:
        return False
    gate, where = case.edits[0].edit, case.edits[0].where
    alone = replace(gate, hold=None, smooth=None, release=None)
    one, other = (oracle.run(case.prompt, [At(each, where)]) for each in (gate, alone))
    return not torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("size", [1, 16])
def test_gates_remember_earlier_tokens_as_a_loop_does(wide, oracle, size):
    given = []
    for prompt in (LONG, SHORT):
        end = len(prompt)
        for where, chosen in (
            ({}, lambda p: True),
            ({"phase": "generated"}, lambda p, end=end: p >= end),
            ({"exclude": slice(2, 4)}, lambda p: p not in (2, 3)),
        ):
            for name, gate in gates(oracle, prompt, where).items():
                given.append(Case(f"{name} {where} {end}", prompt, [At(gate, chosen)]))
    plain = Gate(given[0].edits[0].edit.edit, torch.ones(tiny.HIDDEN))
    given += [Case("no memory", LONG, [At(plain)]), Case("plain", LONG, [])]
    with chunks(wide, size) as seen:
        found = all_problems(wide, oracle, given, TOLERANCE, TIE, count=COUNT)
    assert max(seen) == min(size, len(LONG))
    differ = sum(remembers(oracle, case) for case in given)
    assert differ > 12, f"{differ} cases of {len(given)} show what memory is"
    assert not found, "\n".join(found[:30])


def assert_is(oracle: EditOracle, prompt: list[int], completion: Any, edits: list[At]) -> None:
    assert completion.receipt.status == "ok"
    ids = [*prompt, *completion.token_ids][:-1]
    assert_rows(completion.activations, oracle.run(ids, edits))


def late_gate(oracle: EditOracle, prompt: list[int], nth: int, **memory: Any) -> Gate:
    """A gate that opens at the nth generated token that is computed, and at no token before."""
    ids = [*prompt, *oracle.generate(prompt, nth + 1)]
    plain = oracle.run(ids)
    rows = plain.values["resid_mid", 1].double()
    at = len(prompt) + nth
    direction = rows[at] - rows[:at].mean(0)
    scores = rows @ direction
    before = float(scores[:at].max())
    assert before < scores[at], "the case does not show it"
    maker = Maker(("resid_post", 1), plain, torch.Generator().manual_seed(nth))
    reading = Reading(direction.float(), layer=1, site="resid_mid")
    return Gate(maker.steer(), reading, (before + float(scores[at])) / 2, **memory)


def test_a_request_that_is_preempted_right_after_its_gate_opened_opens_it_there_again(wide, oracle):
    given = [
        Case("rest", LONG, [At(late_gate(oracle, LONG, 1, hold="rest"))], tap=("resid_post", 1)),
        Case("two more", LONG, [At(late_gate(oracle, LONG, 1, hold=2))], tap=("resid_post", 1)),
        Case("later", LONG, [At(late_gate(oracle, LONG, 4, hold="rest"))], tap=("resid_post", 1)),
    ]
    run = Stepped(wide)
    for nth, case in enumerate(given):
        asked = {"capture": EVERYTHING, "edits": [at.edit for at in case.edits]}
        run.add(str(nth), case.prompt, PARAMS, **asked)
    run.step(3)  # the prompt, and two generated tokens: the second opens two of the gates
    assert wide.llm_engine.reset_prefix_cache(reset_running_requests=True)
    with chunks(wide, 16) as seen:
        outputs = run.finish()
    assert sum(seen) > len(given) * (len(LONG) + 2), "nothing was computed anew"
    for nth, case in enumerate(given):
        output = outputs[str(nth)]
        ids = [*LONG, *generated(output)][:-1]
        opened = len(LONG) + (4 if nth == 2 else 1)
        seen_by = oracle.run(ids, case.edits)
        changed = seen_by.values["resid_post", 1] != seen_by.before["resid_post", 1]
        wanted = range(opened, opened + 3 if nth == 1 else len(ids))
        assert changed.any(1).nonzero().flatten().tolist() == list(wanted), case.name
        assert not problems(oracle, case, output, TOLERANCE, TIE)


def test_cached_prompts_are_used_where_no_token_is_read_or_all_were(wide, oracle):
    later = Capture("all", EVERY_SITE, phase="generated")
    ask(wide, LONG, 1)
    for where, hits in (
        ({"phase": "generated"}, (32, 32)),
        ({"positions": slice(20, None)}, (0, 32)),
    ):
        gate = late_gate(oracle, LONG, 2, hold="rest")
        gate = Gate(gate.edit.replace(**where), gate.probe, gate.threshold, hold="rest")
        first = where.get("positions", slice(len(LONG), None)).start
        case = Case(f"{where}", LONG, [At(gate, lambda p, first=first: p >= first)])
        for hit in hits:
            output = ask(wide, LONG, COUNT, edits=gate, capture=later)
            assert output.num_cached_tokens == hit
            assert_is(oracle, LONG, output.outputs[0], case.edits)


def test_each_completion_of_a_prompt_has_a_gate_of_its_own(wide, oracle):
    gate = gates(oracle, SHORT, {})["all"]
    wide.steering.set(base=gate)
    params = SamplingParams(
        n=3, temperature=1.0, seed=3, max_tokens=COUNT, ignore_eos=True, detokenize=False
    )
    output = ask(wide, SHORT, params, capture=EVERYTHING)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    for one in output.outputs:
        assert_is(oracle, SHORT, one, [At(gate)])


def test_tokens_that_an_edit_does_not_select_leave_its_gate_as_it_is(wide, oracle):
    even = list(range(0, tiny.VOCAB, 2))
    given = gates(oracle, LONG, {"positions": TokenIds(even)})
    for name in ("hold", "all"):
        output = ask(wide, LONG, PARAMS, edits=given[name], capture=EVERYTHING)
        ids = [*LONG, *generated(output)][:-1]
        places = frozenset(p for p, token in enumerate(ids) if token in even)
        case = Case(name, LONG, [At(given[name], places.__contains__)])
        assert not problems(oracle, case, output, TOLERANCE, TIE)


def test_a_gate_stays_open_when_the_edit_in_it_changes_and_cannot_change_itself(wide, oracle):
    gate = late_gate(oracle, LONG, 1, hold="rest")
    run, opened = Stepped(wide), len(LONG) + 1
    run.add("a", LONG, PARAMS, edits=[gate], capture=EVERYTHING)
    run.step(4)
    for wrong in ([replace(gate, hold=2)], [gate, replace(gate, hold=2)]):
        with pytest.raises(SpecError, match="gates with memory .hold, smooth, release. are those"):
            wide.update("a", edits=wrong)
    (off,) = wide.update("a", scale=0).positions.values()
    run.step(2)
    (on,) = wide.update("a", scale=0.5).positions.values()
    assert opened < off < on < len(LONG) + COUNT - 1
    (completion,) = run.finish()["a"].outputs
    half = gate.edit.replace(scale=0.5 * gate.edit.scale)
    edits = [At(gate.edit, lambda p: opened <= p < off), At(half, lambda p: p >= on)]
    assert_is(oracle, LONG, completion, edits)


def test_a_gate_goes_on_when_an_update_drops_or_adds_a_gate_before_it(wide, oracle):
    gate = late_gate(oracle, LONG, 1, hold="rest")
    first = Reading(torch.ones(tiny.HIDDEN), 1e6, layer=0, site="resid_pre")
    plain = Gate(Steer(torch.ones(tiny.HIDDEN), 2), first, 0.0)
    always = At(plain.edit)
    for nth, (given, later) in enumerate([([plain, gate], [gate]), ([gate], [plain, gate])]):
        run, opened = Stepped(wide), len(LONG) + 1
        asked = {"edits": given, "capture": EVERYTHING}
        run.add("a", LONG, PARAMS, **asked)
        run.step(4)
        (start,) = wide.update("a", edits=later).positions.values()
        (completion,) = run.finish()["a"].outputs
        assert opened < start < len(LONG) + COUNT - 1
        where = (lambda p: p < start) if nth == 0 else (lambda p: p >= start)  # noqa: B023
        edits = [At(gate.edit, lambda p: opened <= p), replace(always, where=where)]  # noqa: B023
        assert_is(oracle, LONG, completion, edits)
