import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_steps import VOCABULARY
from support.nightly import rounds
from support.plans import random_plan
from unit.plan.position_strategies import rows_of
from unit.plan.strategies import plans_by_length

from midstream.errors import SpecError
from midstream.ops.layout import Flags
from midstream.plan import (
    Capture,
    Gate,
    ModelShape,
    Plan,
    Prompt,
    ResolvedPlan,
    Steer,
    Steps,
    Where,
)
from midstream.plan.positions.ranges import clip, merge
from midstream.plan.resolve.resolve import resolve
from midstream.sites import NAMES, order

SHAPE = ModelShape(4, 3, [(site, layer) for site in NAMES for layer in range(4)])
TAP = ("resid_post", 0)


def _resolved(capture=None, edits=None, probes=None):
    plan = Plan.make(capture, edits, probes)
    assert plan is not None
    return resolve(plan, SHAPE, Prompt(10), 5)


def _positions(ranges):
    return [position for start, stop in ranges for position in range(start, stop)]


@given(plans_by_length, st.integers(1, 10), st.lists(st.integers(0, 8), min_size=1, max_size=6))
@settings(max_examples=rounds(suite=100, nightly=800))
def test_what_is_selected_agrees_with_enumeration(plan, prompt_len, generated):
    # Token ids of a prompt are not known here; those of generated tokens are.
    prompt, ids = Prompt(prompt_len, (99,) * prompt_len), [99] * prompt_len + generated[:-1]
    try:
        resolved = resolve(plan, SHAPE, prompt, 6)
    except SpecError:
        return
    length = len(ids)
    captured: dict[tuple[str, int], set[int]] = {}
    for capture in plan.captures:
        layers = range(4) if capture.layers.indices == "all" else capture.layers.indices
        rows = rows_of(capture.positions, prompt, ids)
        for tap in ((site, layer) for site in capture.sites for layer in layers):
            captured.setdefault(tap, set()).update(rows)
    found = resolved.expected_rows(length, ids)
    assert found == {tap: len(rows) for tap, rows in captured.items()}
    assert list(found) == list(resolved.taps) == sorted(captured, key=order)
    assert sorted(tap for _, taps in resolved.alike for tap in taps) == sorted(captured)
    for captures, taps in resolved.alike:
        for tap in taps:
            ranges = resolved.ranges_of(captures, length, ids)
            assert _positions(ranges) == sorted(captured[tap])
    for source, edit in enumerate(plan.edits):
        wanted = sorted(rows_of(edit.positions, prompt, ids))
        per_tap: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for one in resolved.edits:
            if one.source == source:
                place = per_tap.setdefault((one.site, one.layer), [])
                place.extend(one.where.final(length, ids))
        for ranges in per_tap.values():
            assert _positions(clip(merge(ranges), length)) == wanted
            assert sum(stop - start for start, stop in ranges) == len(wanted)
    for probe, one in zip(plan.probes, resolved.probes, strict=False):
        assert one.name == probe.name
        assert _positions(one.where.final(length, ids)) == sorted(
            rows_of(probe.positions, prompt, ids)
        )


def test_the_last_row_is_where_the_request_ended():
    where = _resolved(Capture(0, positions="last_row")).captures[0].where
    assert where == Where((), last_from=9)
    assert where.possible == ((9, None),)
    assert where.final(10, ()) == ((9, 10),)
    assert where.final(12, ()) == ((11, 12),)
    # Aborted within the prompt: there is no last row.
    assert where.final(4, ()) == ()
    generated = _resolved(Capture(0, positions="last_row", phase="generated")).captures[0].where
    assert (generated.possible, generated.final(10, ())) == (((10, None),), ())
    assert generated.final(11, ()) == ((10, 11),)


def test_steps_are_known_by_all_that_they_do():
    plan = _resolved(edits=Gate(Steer([1, 2, 3], 1), [1, 0, 0], 0.5))
    (edit,) = plan.edits
    gate, add = edit.steps.instructions
    variants = [
        (gate, add),
        (add,),
        (add, gate),
        (replace(gate, read=None), add),
        (replace(gate, slot=0), add),
        (replace(gate, slot=1), add),
        *((replace(gate, **{name: 7.0}), add) for name in "abcd"),
        (gate, replace(add, flags=add.flags | Flags.KEEP)),
        (gate, replace(add, first=3)),
        (gate, replace(add, write=add.write * 2)),
    ]
    assert len({Steps(each).digest for each in variants}) == len(variants)
    assert Steps((gate, add)) == edit.steps
    assert hash(Steps((gate, add))) == hash(edit.steps)
    assert ResolvedPlan(10, (), ()).slots == 0


def shared_plans() -> list[ResolvedPlan]:
    """Random plans, each shared by requests of several lengths."""
    found = [random_plan(random.Random(seed), length=12) for seed in range(150)]
    return [plan for plan in found if plan is not None]


def test_what_a_plan_remembers_is_what_a_fresh_one_computes():
    draw = random.Random(1)
    for plan in shared_plans():
        everything = tuple(range(len(plan.captures)))
        for length in (3, 12, 5, 3, 12):
            tokens = [draw.randrange(VOCABULARY) for _ in range(length)]
            fresh = replace(plan)
            assert plan.expected_rows(length, tokens) == fresh.expected_rows(length, tokens)
            plan.expected_rows(length, tokens).clear()  # is the caller's
            ranges = plan.ranges_of(everything, length, tokens)
            assert ranges == fresh.ranges_of(everything, length, tokens)


def test_a_plan_that_selects_by_generated_tokens_remembers_nothing():
    kinds = {plan.reads_tokens for plan in shared_plans()}
    assert kinds == {False, True}
    for plan in shared_plans():
        first, second = (plan.remember("x", 4, lambda made=made: made) for made in ("a", "b"))
        assert (first, second) == (("a", "b") if plan.reads_tokens else ("a", "a"))


def test_what_is_remembered_stays_small():
    plan = next(plan for plan in shared_plans() if not plan.reads_tokens)
    assert [plan.remember("x", 5000, lambda made=made: made) for made in range(2)] == [0, 1]
    for length in range(1000):
        assert plan.remember("y", length, lambda length=length: length) == length
    assert len(plan._known) <= 32
