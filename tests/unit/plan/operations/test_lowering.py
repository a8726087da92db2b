"""Each operation's instructions compute its formula, and are flagged as one edit."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.formulas import apply, run
from support.nightly import rounds
from unit.plan.strategies import edits, gates, plain_edits, plain_kinds

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan import Feature, Gate, Reading, Replace, Steer, Vector
from midstream.plan.operation import refreshed
from midstream.plan.operations import KINDS_BY_OP, OPS

WIDTH = 5


@st.composite
def cases(draw, kinds):
    """(edit, h [tokens, WIDTH]), with as many tokens as there are rows to give to each."""
    edit = draw(kinds)
    inner = edit.edit if isinstance(edit, Gate) else edit
    several = isinstance(inner, Replace | Steer) and len(inner.rows) > 1
    tokens = len(inner.rows) if several else draw(st.integers(1, 3))
    numbers = st.integers(-32, 32).map(lambda number: number / 8)
    row = st.lists(numbers, min_size=WIDTH, max_size=WIDTH)
    return edit, np.array(draw(st.lists(row, min_size=tokens, max_size=tokens)))


def agree(found, expected, scale):
    return np.allclose(found, expected, rtol=1e-5, atol=1e-5 * (1 + np.abs(scale).max()))


KINDS = [*plain_kinds(WIDTH), gates(WIDTH, own=True)]


@pytest.mark.parametrize("nth", range(len(KINDS)))
@given(data=st.data())
@settings(max_examples=rounds(suite=6, nightly=400))
def test_the_instructions_of_an_edit_compute_its_formula(nth, data):
    edit, h = data.draw(cases(KINDS[nth]))
    expected = apply(edit, h)
    assert agree(run(edit.instructions(WIDTH), h), expected, np.maximum(abs(h), abs(expected)))


@pytest.mark.parametrize("gated", [False, True])
def test_the_norm_that_is_kept_is_that_before_all_features_were_added(gated):
    draw = np.random.default_rng(0)
    rows = draw.integers(-8, 8, (3, WIDTH)).tolist()
    edit = Feature(rows, rows, 3, mode="add", value=[0.5, -2, 1], norm="keep")
    h = draw.normal(size=(4, WIDTH))
    one = Gate(edit, Reading([1.0] * WIDTH)) if gated else edit
    assert agree(run(one.instructions(WIDTH), h), apply(one, h), abs(h))


@given(cases(gates(WIDTH)), st.data())
def test_a_gate_that_reads_a_score_computes_the_same(case, data):
    gate, h = case
    numbers = st.integers(-32, 32).map(lambda number: number / 8)
    score = np.array(data.draw(st.lists(numbers, min_size=len(h), max_size=len(h))))
    first, *others = gate.instructions(WIDTH)
    read = dataclasses.replace(first, read=None, slot=7, flags=first.flags & ~Flags.FRESH)
    others = refreshed(others)
    expected = apply(gate, h, score)
    found = run((read, *others), h, {7: score})
    assert agree(found, expected, np.maximum(abs(h), abs(expected)))


@given(edits(WIDTH))
def test_an_edit_counts_once_and_takes_h_once_before_it_is_read(edit):
    steps = edit.instructions(WIDTH)
    assert [step.counted for step in steps] == [False] * (len(steps) - 1) + [True]
    reading = [nth for nth, step in enumerate(steps) if step.reads or Flags.KEEP in steps[-1].flags]
    assert [nth for nth, step in enumerate(steps) if Flags.FRESH in step.flags] == reading[:1]
    gated = isinstance(edit, Gate)
    assert [Flags.GATED in step.flags for step in steps[gated:]] == [gated] * len(steps[gated:])
    assert (steps[0].op is Op.GATE) == gated


@given(edits(WIDTH))
def test_parameters_are_float32_that_json_can_hold(edit):
    for step in edit.instructions(WIDTH):
        for value in (step.a, step.b, step.c, step.d):
            assert np.float32(value) == value
            assert json.loads(json.dumps(value, allow_nan=False)) == value
        for vector in (*step.write, *([] if step.read is None else [step.read])):
            is_matrix = step.op is Op.MAP and vector is step.read
            assert vector.size == (WIDTH**2 if is_matrix else WIDTH)


def is_of_any_size(edit):
    """Whether it has no vectors, whose size could be wrong."""
    values = edit.own().values()
    rows = [row for value in values for row in (value if isinstance(value, tuple) else (value,))]
    return not any(isinstance(row, Vector) for row in rows)


@given(plain_edits(4), st.integers(1, 6).filter(lambda width: width != 4))
def test_a_model_of_another_width_is_refused_by_the_fields_name(edit, width):
    if is_of_any_size(edit):
        edit.instructions(width)
        return
    with pytest.raises(SpecError, match=f"expected {width} numbers.*hidden size, got 4") as caught:
        edit.instructions(width)
    field = caught.value.path.split("[")[0]
    assert field in edit.own()


@given(plain_edits(4).filter(lambda edit: not is_of_any_size(edit)))
def test_within_a_gate_the_path_leads_to_the_edit_or_the_probe(edit):
    gate = Gate(edit, [1.0, 0, 0, 0, 0])
    with pytest.raises(SpecError) as caught:
        gate.instructions(5)
    assert caught.value.path.startswith("edit.")
    with pytest.raises(SpecError) as caught:
        gate.instructions(4)
    assert caught.value.path == "probe.direction"


def test_every_kind_of_edit_is_known_by_its_op():
    names = "steer ablate clamp feature reconstruct affine loreft replace scale route bias gate"
    assert " ".join(OPS) == names
    assert {name: kind.op for name, kind in KINDS_BY_OP.items()} == {name: name for name in OPS}
