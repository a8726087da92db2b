"""Edits apply at the positions that are asked for and at no others, however the work is cut up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask_all
from support import tiny
from support.edit_cases import Case, Maker, all_problems, ask, problems
from support.engines import generated, greedy, tokens
from support.oracle_edits import EVERY_SITE, PLACES, At, EditOracle
from support.scheduling import chunks

from midstream import (
    Ablate,
    Capture,
    Clamp,
    Gate,
    Positions,
    Replace,
    Scale,
    Steer,
    TokenIds,
    Window,
)

TOLERANCE = 1e-4
TIE = 1e-3
COUNT = 8  # tokens generated: rows at P … P + 6
LONG = [
    5, 17, 33, 101, 8, 77, 54, 23, 9, 150, 44, 12, 13, 99, 180, 64, 3, 70, 71, 120, 66, 14, 190,
    31, 57, 88, 142, 6, 25, 111, 39, 160, 81, 17, 5, 33, 101,
]  # fmt: skip
SHORT = [44, 8, 150, 9, 3]
EVEN = list(range(0, tiny.VOCAB, 2))
THIRD = list(range(1, tiny.VOCAB, 3))


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> EditOracle:
    return EditOracle(tiny_llama, PLACES["llama"])


@pytest.fixture
def llm(wide: Any) -> Any:
    return wide


def by_number(size: int) -> dict[str, tuple[dict[str, Any], set[int]]]:
    """Selections for a prompt of `size` tokens (at least 5), and their positions, by hand."""
    prompt, rest = set(range(size)), set(range(size, size + COUNT - 1))
    last = size - 1
    return {
        "one": ({"positions": 3}, {3}),
        "the first": ({"positions": 0}, {0}),
        "from the prompt's end": ({"positions": -2}, {size - 2}),
        "a generated one": ({"positions": size + 3}, {size + 3}),
        "some": ({"positions": [0, -1, size, size + 5]}, {0, last, size, size + 5}),
        "the last of the prompt": ({"positions": "last_prompt"}, {last}),
        "the prompt": ({"phase": "prompt"}, prompt),
        "the generated": ({"positions": "generated"}, rest),
        "a slice": ({"positions": slice(1, 4)}, {1, 2, 3}),
        "a slice over the end": (
            {"positions": slice(-2, size + 2)},
            {size - 2, last, size, size + 1},
        ),
        "an open slice with a step": (
            {"positions": slice(1, None, 3)},
            {p for p in range(size + COUNT - 1) if p >= 1 and (p - 1) % 3 == 0},
        ),
        "a slice, generated only": ({"positions": slice(2, None), "phase": "generated"}, rest),
        "a slice, prompt only": ({"positions": slice(2, None), "phase": "prompt"}, prompt - {0, 1}),
        "a window before": ({"positions": Window(-3, 0)}, {size - 3, size - 2, last}),
        "a window after": ({"positions": Window(0, 2)}, {size, size + 1}),
        "a window across": ({"positions": Window(-1, 2)}, {last, size, size + 1}),
        "a window from here on, with a step": (
            {"positions": Window(-2, None, 3)},
            {size - 2, size + 1, size + 4},
        ),
        "a window that begins before 0": (
            {"positions": Window(-40, -1)},
            set(range(size - 40, size - 1)) & prompt,
        ),
        "all but some": ({"exclude": [1, -1, size + 1]}, (prompt | rest) - {1, last, size + 1}),
        "all but a window": (
            {"exclude": Window(-2, 3)},
            (prompt | rest) - set(range(size - 2, size + 3)),
        ),
        "all but the prompt": ({"exclude": "prompt"}, rest),
        "all but the generated": ({"exclude": "generated"}, prompt),
        "two kinds": (
            {"positions": Positions([slice(0, 2), Window(2, 4)], exclude=[0])},
            {1, size + 2, size + 3},
        ),
    }  # fmt: skip


def some_edit(nth: int, maker: Maker, where: dict[str, Any]) -> Any:
    """An edit of one kind or another."""
    place = {**maker.place, **where}
    kinds: list[Callable[[], Any]] = [
        lambda: Steer(maker.vector(), **place),
        lambda: Scale(1.8, **place),
        lambda: Replace(maker.vector(), alpha=0.5, **place),
        lambda: Clamp(maker.direction(), value=maker.size, **place),
        lambda: Ablate([maker.direction(), maker.vector()], **place),
        lambda: maker.gate(
            Steer(maker.vector(), norm="keep", **place), ("resid_pre", 0), soft=True
        ),
    ]  # fmt: skip
    return kinds[nth % len(kinds)]()


def cases_by_number(oracle: EditOracle) -> list[Case]:
    draw = torch.Generator().manual_seed(12)
    found = []
    for prompt in (LONG, SHORT):
        plain = oracle.run([*prompt, *SHORT])
        for nth, (name, (where, expected)) in enumerate(by_number(len(prompt)).items()):
            tap = (EVERY_SITE[nth % len(EVERY_SITE)], 1 + nth % 2)
            edit = some_edit(nth, Maker(tap, plain, draw), where)
            at = At(edit, frozenset(expected).__contains__)
            found.append(Case(f"{name}, {len(prompt)}", prompt, [at], tap=tap))
    return found


@pytest.mark.parametrize("size", [1, 7, 64])
def test_edits_are_at_their_positions_and_nowhere_else(
    llm: Any, oracle: EditOracle, size: int
) -> None:
    """Each selection is a request of one batch; prompts come whole, or in chunks that cut any
    selection anywhere. The receipts say the same positions.
    """
    given = cases_by_number(oracle)
    with chunks(llm, size) as seen:
        found = all_problems(llm, oracle, given, TOLERANCE, TIE, count=COUNT)
    assert max(seen) == min(size, len(LONG))
    assert not found, "\n".join(found[:30])


def test_a_generated_token_that_is_computed_anew_is_still_a_generated_token(
    llm: Any, oracle: EditOracle
) -> None:
    """Phase belongs to the token: after preemption the generated tokens come in a prefill."""
    draw = torch.Generator().manual_seed(21)
    end = len(LONG)
    given = []
    for nth, phase in enumerate(("generated", "prompt", "all", "generated")):
        maker = Maker((EVERY_SITE[nth], 1), oracle.run(LONG), draw)
        edit = some_edit(nth, maker, {"phase": None if phase == "all" else phase})
        where = {"generated": lambda p: p >= end, "prompt": lambda p: p < end}
        at = At(edit, where.get(phase, lambda p: True))
        given.append(Case(f"{phase} {nth}", LONG, [at], tap=(EVERY_SITE[nth], 1)))
    by_hand = llm.llm_engine
    maker = Maker(("resid_mid", 1), oracle.run(LONG), draw)
    by_id = some_edit(0, maker, {"positions": TokenIds(EVEN), "phase": "generated"})
    given.append(Case("by id", LONG, [At(by_id)], tap=("resid_mid", 1)))
    everything = Capture("all", EVERY_SITE)
    for nth, case in enumerate(given):
        plan = {"capture": everything.to_dict(), "edits": [at.edit.to_dict() for at in case.edits]}
        params = greedy(COUNT, logprobs=3, extra_args={"midstream": plan}, detokenize=False)
        by_hand.add_request(f"anew-{nth}", tokens(case.prompt), params)
    outputs: dict[str, Any] = {}

    def step() -> None:
        for output in by_hand.step():
            outputs[output.request_id] = output

    for _ in range(4):
        step()
    assert all(len(generated(output)) >= 3 for output in outputs.values())
    assert by_hand.reset_prefix_cache(reset_running_requests=True)
    with chunks(llm, 64) as seen:
        while by_hand.has_unfinished_requests():
            step()
    assert max(seen) >= end + 3, "nothing was computed anew: the test shows nothing"
    assert len(outputs) == len(given)
    ids = [*LONG, *generated(outputs["anew-4"])][:-1]
    places = frozenset(p for p in range(end, len(ids)) if ids[p] in EVEN)
    assert 0 < len(places) < COUNT - 1
    given[4] = Case("by id", LONG, [At(by_id, places.__contains__)], tap=("resid_mid", 1))
    for nth, case in enumerate(given):
        found = problems(oracle, case, outputs[f"anew-{nth}"], TOLERANCE, TIE)
        assert not found, found


def by_token(size: int) -> dict[str, tuple[dict[str, Any], Callable[[int, int], bool]]]:
    """Selections by tokens' ids, and whether one of (position, id) is in them."""
    even, third = set(EVEN), set(THIRD)
    return {
        "ids": ({"positions": TokenIds(EVEN)}, lambda p, t: t in even),
        "ids, generated": (
            {"positions": TokenIds(EVEN), "phase": "generated"},
            lambda p, t: p >= size and t in even,
        ),
        "ids, prompt": (
            {"positions": TokenIds([5, 33]), "phase": "prompt"},
            lambda p, t: p < size and t in (5, 33),
        ),
        "all but ids": ({"exclude": TokenIds(EVEN)}, lambda p, t: t not in even),
        "generated but ids": (
            {"positions": "generated", "exclude": TokenIds(THIRD)},
            lambda p, t: p >= size and t not in third,
        ),
        "ids but other ids": (
            {"positions": TokenIds(EVEN), "exclude": TokenIds(THIRD)},
            lambda p, t: t in even and t not in third,
        ),
        "a window and ids": (
            {"positions": [Window(-3, 2), TokenIds(THIRD)]},
            lambda p, t: size - 3 <= p < size + 2 or t in third,
        ),
        "a window without ids": (
            {"positions": Window(-3, 5), "exclude": TokenIds(EVEN)},
            lambda p, t: size - 3 <= p < size + 5 and t not in even,
        ),
        "a window, ids, and no others": (
            {"positions": [Window(0, 2), TokenIds(EVEN)], "exclude": [TokenIds(THIRD), 1]},
            lambda p, t: (size <= p < size + 2 or t in even) and t not in third and p != 1,
        ),
    }


@pytest.mark.parametrize("size", [1, 16])
def test_tokens_are_selected_by_their_ids_in_the_prompt_and_as_they_are_generated(
    llm: Any, oracle: EditOracle, size: int
) -> None:
    draw = torch.Generator().manual_seed(31)
    count = 14
    asked: list[tuple[Case, Callable[[int, int], bool]]] = []
    for prompt in (LONG, SHORT):
        plain = oracle.run([*prompt, *SHORT])
        for nth, (name, (where, chosen)) in enumerate(by_token(len(prompt)).items()):
            if prompt is SHORT and name == "ids, prompt":
                continue
            tap = (EVERY_SITE[(nth + 2) % len(EVERY_SITE)], 1 + nth % 2)
            edit = some_edit(nth, Maker(tap, plain, draw), where)
            case = Case(f"{name}, {len(prompt)}", prompt, [At(edit)], tap=tap)
            asked.append((case, chosen))
    with chunks(llm, size) as seen:
        outputs = ask(llm, [case for case, _ in asked], count=count)
    assert max(seen) == size
    hits = misses = 0
    found = []
    for (case, chosen), output in zip(asked, outputs, strict=True):
        ids = [*case.prompt, *generated(output)][:-1]
        places = frozenset(p for p, token in enumerate(ids) if chosen(p, token))
        here = range(len(case.prompt), len(ids))
        hits += sum(p in places for p in here)
        misses += sum(p not in places for p in here)
        at = At(case.edits[0].edit, places.__contains__)
        found += problems(
            oracle, Case(case.name, case.prompt, [at], tap=case.tap), output, TOLERANCE, TIE
        )
    assert not found, "\n".join(found[:30])
    assert hits > 30, "too few generated tokens were selected to tell"
    assert misses > 30, "too few generated tokens were left out to tell"


def test_two_requests_with_other_ids_at_the_same_time_do_not_mix(
    llm: Any, oracle: EditOracle
) -> None:
    """The same edit with other ids, many at once, gated too."""
    maker = Maker(("resid_post", 0), oracle.run(LONG), torch.Generator().manual_seed(7))
    steer = maker.steer()
    groups = [list(range(k, tiny.VOCAB, 5)) for k in range(5)]
    given = []
    for ids in groups:
        inner = steer.replace(positions=TokenIds(ids))
        given += [inner, Gate(inner, maker.direction(), maker.middle(maker.direction()))]
    outputs = ask_all(
        llm,
        [SHORT] * len(given),
        greedy(12, logprobs=3, detokenize=False),
        capture=Capture("all", EVERY_SITE),
        edits=[[edit] for edit in given],
    )
    for nth, (edit, output) in enumerate(zip(given, outputs, strict=True)):
        ids = [*SHORT, *generated(output)][:-1]
        wanted = set(groups[nth // 2])
        places = frozenset(p for p, token in enumerate(ids) if token in wanted)
        case = Case(f"{type(edit).__name__} {nth}", SHORT, [At(edit, places.__contains__)])
        assert not problems(oracle, case, output, TOLERANCE, TIE)
