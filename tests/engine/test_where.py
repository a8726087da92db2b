"""Edits apply at the positions that are asked for and at no others, however the work is cut up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny
from support.edit_cases import Case, Maker, all_problems, ask, problems
from support.engines import generated, greedy
from support.oracle_edits import EVERY_SITE, At, EditOracle
from support.scheduling import chunks
from support.updating import Stepped

from midstream import Ablate, Capture, Clamp, Replace, Scale, Steer, TokenIds, Window
from midstream.plan import Positions

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


@pytest.fixture
def llm(wide: Any) -> Any:
    return wide


def by_number(size: int) -> dict[str, tuple[dict[str, Any], set[int]]]:
    """Selections for a prompt of `size` tokens (at least 5), and their positions, by hand."""
    prompt, rest = set(range(size)), set(range(size, size + COUNT - 1))
    last = size - 1
    return {
        "from the prompt's end": ({"positions": -2}, {size - 2}),
        "some": ({"positions": [0, -1, size, size + 5]}, {0, last, size, size + 5}),
        "the last of the prompt": ({"positions": "last_prompt"}, {last}),
        "the prompt": ({"phase": "prompt"}, prompt),
        "the generated": ({"positions": "generated"}, rest),
        "a slice over the end": (
            {"positions": slice(-2, size + 2)},
            {size - 2, last, size, size + 1},
        ),
        "an open slice with a step": (
            {"positions": slice(1, None, 3)},
            {p for p in range(size + COUNT - 1) if p >= 1 and (p - 1) % 3 == 0},
        ),
        "a window across": ({"positions": Window(-1, 2)}, {last, size, size + 1}),
        "a window that begins before 0": (
            {"positions": Window(-40, -1)},
            set(range(size - 40, size - 1)) & prompt,
        ),
        "all but a window": (
            {"exclude": Window(-2, 3)},
            (prompt | rest) - set(range(size - 2, size + 3)),
        ),
        "two kinds": (
            {"positions": Positions([slice(0, 2), Window(2, 4)], exclude=[0])},
            {1, size + 2, size + 3},
        ),
    }


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
def test_edits_are_at_their_positions_and_nowhere_else(llm, oracle, size):
    given = cases_by_number(oracle)
    with chunks(llm, size) as seen:
        found = all_problems(llm, oracle, given, TOLERANCE, TIE, count=COUNT)
    assert max(seen) == min(size, len(LONG))
    assert not found, "\n".join(found[:30])


def test_a_generated_token_that_is_computed_anew_is_still_a_generated_token(llm, oracle):
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
    maker = Maker(("resid_mid", 1), oracle.run(LONG), draw)
    by_id = some_edit(0, maker, {"positions": TokenIds(EVEN), "phase": "generated"})
    given.append(Case("by id", LONG, [At(by_id)], tap=("resid_mid", 1)))
    run = Stepped(llm)
    for nth, case in enumerate(given):
        asked = {"capture": Capture("all", EVERY_SITE), "edits": [at.edit for at in case.edits]}
        run.add(str(nth), case.prompt, greedy(COUNT, logprobs=3, detokenize=False), **asked)
    run.step(4)
    assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    with chunks(llm, 64) as seen:
        outputs = run.finish()
    assert max(seen) >= end + 3, "nothing was computed anew: the test shows nothing"
    ids = [*LONG, *generated(outputs["4"])][:-1]
    places = frozenset(p for p in range(end, len(ids)) if ids[p] in EVEN)
    assert 0 < len(places) < COUNT - 1
    given[4] = Case("by id", LONG, [At(by_id, places.__contains__)], tap=("resid_mid", 1))
    for nth, case in enumerate(given):
        found = problems(oracle, case, outputs[str(nth)], TOLERANCE, TIE)
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
        "ids but other ids": (
            {"positions": TokenIds(EVEN), "exclude": TokenIds(THIRD)},
            lambda p, t: t in even and t not in third,
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
