"""Tokens between two marks: edits, captures, probes and gates there, however steps are cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.engines import tokens
from support.marks import EVERYTHING, MARKS, between, few, ids_of, item, problems, prompt
from support.oracle_edits import PLACES, At, EditOracle
from support.scheduling import chunks
from support.updating import Stepped

from midstream import Between, Capture, Gate, Probe, Steer, TokenIds
from midstream.errors import SpecError
from midstream.plan import Reading, Switch

COUNT = 24


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> EditOracle:
    return EditOracle(tiny_llama, PLACES["llama"])


def vector(seed: int) -> torch.Tensor:
    return torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(seed))


def steer(positions: Any, **more: Any) -> Steer:
    return Steer(vector(1), 1, scale=0.7, positions=positions, **more)


@pytest.mark.parametrize("size", [1, 7, 512])
def test_edits_are_at_the_tokens_between_the_marks(wide, oracle, size):
    """Of prompts that end outside, inside and within a mark, cut anywhere, in one batch."""
    given = [
        (marks, prompt(seed, length))
        for seed, marks in enumerate(MARKS)
        for length in (1, 20 + seed)
    ]
    with chunks(wide, size):
        outputs = wide.generate(
            [tokens(ids) for _, ids in given],
            few(COUNT),
            edits=[[steer(item(*marks))] for marks, _ in given],
            capture=EVERYTHING,
            use_tqdm=False,
        )
    generated = 0
    for (marks, ids), output in zip(given, outputs, strict=True):
        rows = ids_of(ids, output.outputs[0])
        chosen = between(rows, *marks)
        edit = steer(item(*marks))
        assert problems(oracle, rows, output.outputs[0], [(edit, chosen)]) == [], marks
        generated += sum(place >= len(ids) for place in chosen)
    assert len(given) < generated < len(given) * COUNT // 2


def test_several_edits_of_a_request_have_marks_of_their_own_and_other_items_beside(wide, oracle):
    def wanted(ids: list[int], end: int) -> list[list[int]]:
        thinking, other = (frozenset(between(ids, *MARKS[n])) for n in (0, 5))
        every = range(len(ids))
        return [
            [p for p in every if p in thinking],
            [p for p in every if p in other],
            [p for p in every if p in thinking or p in other],
            [p for p in every if p not in thinking],
            [p for p in every if p in thinking and ids[p] not in (3, 6)],
            [p for p in every if p in thinking and p >= end],
            [p for p in every if p in other or ids[p] == 4 or 2 <= p < end + 3],
            [p for p in every if end - 1 <= p < end + 5 and p not in other],
        ]

    thinking, other = item(*MARKS[0]), item(*MARKS[5])
    edits = [
        steer(thinking),
        steer(other),
        steer([thinking, other]),
        steer("all", exclude=thinking),
        steer(thinking, exclude=TokenIds([3, 6])),
        steer(thinking, phase="generated"),
        steer([other, TokenIds(4), slice(2, 10)]),
        steer(slice(6, 12), exclude=other),
    ]
    ids = prompt(5, 7)
    for start in range(0, len(edits), 2):
        outputs = wide.generate(
            [tokens(ids)] * 3, few(COUNT),
            edits=[edits[start : start + 4]] * 3, capture=EVERYTHING, use_tqdm=False,
        )  # fmt: skip
        for output in outputs:
            rows = ids_of(ids, output.outputs[0])
            places = wanted(rows, len(ids))[start : start + 4]
            mine = list(zip(edits[start : start + 4], places, strict=True))
            assert problems(oracle, rows, output.outputs[0], mine) == []


def test_captures_and_probes_have_the_rows_between_the_marks(wide, oracle):
    ids, marks = prompt(11, 9), MARKS[0]
    read = item(*marks)
    outputs = wide.generate(
        [tokens(ids)] * 4, few(COUNT),
        capture=Capture("all", "resid_post", positions=read),
        probes=[[
            Probe(vector(2), layer=2, name="inside", positions=read),
            Probe(vector(2), layer=2, name="outside", exclude=read),
        ]] * 4,
        use_tqdm=False,
    )  # fmt: skip
    for output in outputs:
        rows = ids_of(ids, output.outputs[0])
        chosen = between(rows, *marks)
        others = sorted(set(range(len(rows))) - set(chosen))
        values = oracle.run(rows).values["resid_post", 2]
        assert output.receipt.status == "ok"
        assert output.activations.positions.tolist() == chosen
        torch.testing.assert_close(
            output.activations["resid_post", 2], values[chosen], rtol=1e-3, atol=1e-4
        )
        for name, places in (("inside", chosen), ("outside", others)):
            assert output.probes.positions_of(name).tolist() == places
            torch.testing.assert_close(
                output.probes[name], values[places] @ vector(2), rtol=1e-3, atol=1e-3
            )


def test_marks_are_found_where_nothing_is_done(wide):
    ids, marks = prompt(18, 5), MARKS[0]
    for stop in range(7, 15):
        edit = steer(item(*marks), exclude=slice(5, stop))
        (completion,) = wide.generate(tokens(ids), few(COUNT), edits=edit, use_tqdm=False)[
            0
        ].outputs
        marked = between(ids_of(ids, completion), *marks)
        chosen = [place for place in marked if not 5 <= place < stop]
        (selected,) = completion.receipt.selected
        assert [place for span in selected.positions for place in range(*span)] == chosen
        edited = completion.receipt.edited
        assert edited.applied == edited.expected == len(chosen)


@pytest.mark.parametrize("memory", [{}, {"hold": 2}])
def test_gates_read_the_tokens_between_the_marks_alone(wide, oracle, memory):
    ids, marks = prompt(12, 9), MARKS[5]
    gate = Gate(steer(item(*marks)), Reading(vector(3), layer=0, site="resid_mid"), 0.0, **memory)
    for _ in range(3):
        output = wide.generate(
            tokens(ids), few(COUNT), edits=gate, capture=EVERYTHING, use_tqdm=False
        )[0]
        rows = ids_of(ids, output.outputs[0])
        chosen = between(rows, *marks)
        assert problems(oracle, rows, output.outputs[0], [(gate, chosen)]) == []


def test_a_request_that_is_preempted_between_the_marks_is_there_again(wide, oracle):
    """Its generated tokens are in the prefix cache, which serves none of them."""
    ids, run = prompt(13, 40), Stepped(wide)
    for nth, marks in enumerate(MARKS):
        run.add(
            f"{nth}", ids, few(40), edits=[steer(item(*marks))],
            capture=Capture("all", "resid_post", phase="generated"),
        )  # fmt: skip
        run.add(f"edit-{nth}", ids, few(40), edits=[steer(item(*marks))])
    for stop in (30, 4):
        run.step(stop)
        run.preempt()
    with chunks(wide, 9) as seen:
        outputs = run.finish()
    assert max(seen) == 9
    for nth, marks in enumerate(MARKS):
        (completion,), (bare,) = outputs[f"{nth}"].outputs, outputs[f"edit-{nth}"].outputs
        assert completion.receipt.status == bare.receipt.status == "ok"
        ranges = bare.receipt.selected[0].positions
        chosen = between(ids_of(ids, bare), *marks)
        assert [place for span in ranges for place in range(*span)] == chosen
        rows = ids_of(ids, completion)
        chosen = between(rows, *marks)
        edit = At(steer(item(*marks)), frozenset(chosen).__contains__)
        expected = oracle.run(rows, [edit]).values["resid_post", 2][len(ids) :]
        torch.testing.assert_close(
            completion.activations["resid_post", 2], expected, rtol=1e-3, atol=1e-4
        )


def test_requests_share_cached_blocks_exactly_where_the_same_tokens_are_edited(wide, oracle):
    first = prompt(14, 70)
    marks = MARKS[0]
    edit = steer(item(*marks))
    begin = between(first, *marks)[0]
    plain = wide.generate(tokens(first), few(2), use_tqdm=False)[0]
    assert plain.num_cached_tokens == 0
    for cached in (32 * (begin // 32), 64):
        output = wide.generate(
            tokens(first), few(COUNT), edits=edit,
            capture=Capture("all", "resid_post", phase="generated"), use_tqdm=False,
        )[0]  # fmt: skip
        assert output.num_cached_tokens == cached
        rows = ids_of(first, output.outputs[0])
        places = At(edit, frozenset(between(rows, *marks)).__contains__)
        expected = oracle.run(rows, [places]).values["resid_post", 2][len(first) :]
        torch.testing.assert_close(
            output.activations["resid_post", 2], expected, rtol=1e-3, atol=1e-4
        )


def test_each_completion_of_a_prompt_has_marks_of_its_own(wide, oracle):
    """The edit is server-wide."""
    ids, marks = prompt(15, 5), MARKS[0]
    edit = steer(item(*marks))
    wide.steering.set(base=edit)
    output = wide.generate(tokens(ids), few(COUNT, n=4), capture=EVERYTHING, use_tqdm=False)[0]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 4
    for one in output.outputs:
        rows = ids_of(ids, one)
        places = At(edit, frozenset(between(rows, *marks)).__contains__)
        seen = oracle.run(rows, [places])
        assert one.receipt.status == "ok"
        for tap, value in one.activations.items():
            torch.testing.assert_close(value, seen.values[tap], rtol=1e-3, atol=1e-4)


def test_a_change_of_a_request_keeps_its_marks(wide, oracle):
    ids, marks = prompt(16, 5), MARKS[0]
    edit, run = steer(item(*marks)), Stepped(wide)
    run.add("a", ids, few(COUNT), edits=[edit], capture=EVERYTHING)
    run.step(4)
    with pytest.raises(SpecError, match=r"edits: .*searched for marks .Between. from its beg"):
        wide.update("a", edits=[steer(item(*MARKS[1]))])
    (off,) = wide.update("a", edits=[]).positions.values()
    run.step(5)
    (on,) = wide.update("a", edits=[edit]).positions.values()
    (completion,) = run.finish()["a"].outputs
    rows = ids_of(ids, completion)
    chosen = frozenset(p for p in between(rows, *marks) if not off <= p < on)
    seen = oracle.run(rows, [At(edit, chosen.__contains__)])
    assert completion.receipt.status == "ok"
    for tap, value in completion.activations.items():
        torch.testing.assert_close(value, seen.values[tap], rtol=1e-3, atol=1e-4)


def test_a_probe_switches_to_edits_that_look_back_for_their_marks(wide, oracle):
    ids, marks, run = prompt(17, 9), MARKS[0], Stepped(wide)
    edit = steer(item(*marks))
    always = Switch(edits=[edit], above=-1e9, for_=6)
    run.add(
        "a", ids, few(COUNT), capture=EVERYTHING,
        probes=[Probe(vector(4), layer=2, name="p", phase="generated", act=always)],
    )  # fmt: skip
    (completion,) = run.finish()["a"].outputs
    _, later = completion.receipt.versions
    rows = ids_of(ids, completion)
    chosen = frozenset(p for p in between(rows, *marks) if p >= later.positions[0])
    assert len(ids) < later.positions[0] < len(rows) - 8
    seen = oracle.run(rows, [At(edit, chosen.__contains__)])
    assert completion.receipt.problems == ()
    for tap, value in completion.activations.items():
        torch.testing.assert_close(value, seen.values[tap], rtol=1e-3, atol=1e-4)


def test_marks_that_cannot_be_there_are_refused(wide):
    ids = tokens(prompt(1, 5))
    for positions, problem in (
        (Between([tiny.VOCAB], None), f"positions.start: there is no token {tiny.VOCAB}"),
        (Between([3], [4, tiny.VOCAB]), f"positions.end: there is no token {tiny.VOCAB}"),
        (Between("<think>", None), "positions.start: .*needs a tokenizer"),
    ):
        with pytest.raises(SpecError, match=problem):
            wide.generate(ids, few(3), edits=steer(positions), use_tqdm=False)
    many = [steer(Between([3 + n], [40])) for n in range(32)]
    with pytest.raises(SpecError, match="edits: the edits have 32 selections with marks"):
        wide.generate(ids, few(3), edits=many, use_tqdm=False)
