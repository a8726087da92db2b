from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from spec.strategies import plans, rows_of

from midstream.errors import SpecError
from midstream.sites import NAMES
from midstream.spec import Capture, ModelShape, Plan, Steer, resolve

SHAPE = ModelShape(4, 3, [(site, layer) for site in NAMES for layer in range(4)])
TAP = ("resid_post", 0)


def _resolved(capture=None, edits=None, *, prompt_len=10, max_tokens=5):
    plan = Plan.make(capture, edits)
    assert plan is not None
    return resolve(plan, SHAPE, prompt_len, max_tokens)


@given(plans, st.integers(1, 14), st.integers(1, 6), st.data())
@settings(max_examples=200)
def test_counts_agree_with_enumeration(plan, prompt_len, max_tokens, data):
    try:
        resolved = resolve(plan, SHAPE, prompt_len, max_tokens)
    except SpecError:
        return
    generated = data.draw(st.integers(1, max_tokens))
    length = prompt_len + generated - 1
    captured: dict[tuple[str, int], set[int]] = {}
    for capture in plan.captures:
        layers = range(4) if capture.layers.indices == "all" else capture.layers.indices
        rows = rows_of(capture.positions, prompt_len, generated)
        for tap in ((site, layer) for site in capture.sites for layer in layers):
            captured.setdefault(tap, set()).update(rows)
    assert resolved.expected_rows(length) == {tap: len(rows) for tap, rows in captured.items()}
    for tap, rows in captured.items():
        assert resolved.capture_positions(*tap, length) == sorted(rows)
    edited = [rows_of(edit.positions, prompt_len, generated) for edit in plan.edits]
    assert resolved.edit_counts(length) == sum(len(rows) for rows in edited)
    assert resolved.edited_tokens(length) == len(set().union(*edited))
    if any(row < prompt_len for rows in captured.values() for row in rows):
        assert resolved.captures_prompt


def test_overlapping_captures_are_a_union_at_each_tap():
    plan = _resolved([Capture(0, positions=slice(0, 4)), Capture([0, 1], positions=[3, "last"])])
    assert plan.expected_rows(14) == {("resid_post", 0): 5, ("resid_post", 1): 2}
    assert plan.capture_positions("resid_post", 0, 14) == [0, 1, 2, 3, 13]
    assert plan.capture_ranges("resid_post", 0, 14) == ((0, 4), (13, 14))
    assert plan.capture_positions("resid_post", 3, 14) == []


def test_the_last_row_is_where_the_request_ended():
    capture = _resolved(Capture(0, positions="last")).captures[0]
    assert capture.last
    assert capture.worker_ranges == ((9, None),)
    assert capture.final_ranges(10) == ((9, 10),)
    assert capture.final_ranges(12) == ((11, 12),)
    # Aborted within the prompt: there is no last row.
    assert capture.final_ranges(4) == ()


def test_the_last_generated_row_is_none_if_only_one_token_was_sampled():
    capture = _resolved(Capture(0, positions="last", phase="generated")).captures[0]
    assert capture.worker_ranges == ((10, None),)
    assert capture.final_ranges(10) == ()
    assert capture.final_ranges(11) == ((10, 11),)


def test_edits_that_fall_on_one_token_are_counted_each_but_the_token_once():
    plan = _resolved(
        edits=[Steer([1, 0, 0], 0, positions=[0, 1]), Steer([1, 0, 0], 1, positions=slice(1, 4))]
    )
    assert plan.edit_counts(14) == 5
    assert plan.edited_tokens(14) == 4
    assert (plan.edit_counts(2), plan.edited_tokens(2)) == (3, 2)


def test_a_plan_knows_whether_it_may_capture_of_the_prompt():
    for positions, expected in (
        ("generated", False),
        (slice(10, None), False),
        ([9, 12], True),
        ("last", True),
        ("all", True),
    ):
        assert _resolved(Capture(0, positions=positions)).captures_prompt is expected
    assert not _resolved(Capture(0, positions="last", phase="generated")).captures_prompt
    assert not _resolved(edits=Steer([1, 0, 0], 0)).captures_prompt


def test_the_digest_depends_on_all_that_changes_computation_and_on_nothing_else():
    def digest(capture=None, prompt_len=10, max_tokens=5, **changes):
        steer = Steer(**{"vector": [1, 2, 3], "layer": 1, "positions": "prompt", **changes})
        return _resolved(capture, steer, prompt_len=prompt_len, max_tokens=max_tokens).digest

    base = digest()
    changed = [
        digest(vector=[1, 2, 4]),
        digest(layer=2),
        digest(scale=2),
        digest(site="resid_mid"),
        digest(positions=slice(9)),
        digest(prompt_len=11),
        _resolved(Capture(0)).digest,
    ]
    assert len({base, *changed}) == len(changed) + 1
    assert digest(capture=Capture(0)) == digest(max_tokens=50) == digest(layer=-3) == base
    assert digest(positions=slice(10)) == base


def test_the_digest_is_the_same_in_every_process():
    digest = _resolved(edits=Steer([1, 2, 3], 1, phase="generated")).digest
    assert digest == "ea5b1b0a4df694c0db96d2af2cb45972364ed7c12ac8143bef7b833221d55996"
