"""Extremes of the op: what changes nothing, overflows, or is not finite, and gates that close."""

import math

import pytest
import torch
from support.refusals import refused
from support.site_cases import Case, Step, assert_same, case, same_bits
from support.site_noops import NOOPS, NOOPS_OF_MAPS, noop_case
from support.site_oracle import expected

import midstream.ops.site  # noqa: F401  (defines the op)
from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.ops.site_triton import MAX_WIDTH

FRESH, COUNTED = Flags.FRESH, Flags.COUNTED
BOTH = FRESH | COUNTED
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def run(made: Case) -> Case:
    made.run()
    return made


def single(*steps: Step, rows: int = 4, width: int = 16) -> tuple[Case, torch.Tensor]:
    """A float32 stream in one tensor, and what it was before."""
    made = case([list(steps)], rows=rows, width=width, residual=False, captures=False)
    before = made.hidden.clone()
    return run(made), before


@pytest.mark.parametrize("name", [*NOOPS, *NOOPS_OF_MAPS])
def test_what_adds_up_to_nothing_leaves_every_bit_in_place(name):
    steps = {**NOOPS, **NOOPS_OF_MAPS}[name]
    counted = sum(Flags.COUNTED in step.flags and not step.ids for step in steps)
    for dtype in DTYPES:
        for residual in (True, False):
            made = noop_case(name, dtype=dtype, residual=residual)
            before = made.hidden.clone()
            run(made)
            assert same_bits(made.hidden, before), (dtype, residual)
            assert (made.tally[: len(before), layout.EDITS] >= counted).all()


def test_the_kind_of_a_program_says_where_its_map_is():
    for ops, kind in (
        ([], layout.ANY),
        ([Op.SCALE], layout.ANY),
        ([Op.MAP, Op.ADD], layout.WITH_MAP),
        ([Op.PROBE, Op.GATE, Op.MAP, Op.PROBE], layout.WITH_MAP + 2),
    ):
        assert layout.kind_of(ops) == kind, ops
    for kinds, kind in (
        ([layout.PLAIN] * 2, layout.PLAIN),
        ([layout.READS] * 2, layout.READS),
        ([layout.READS, layout.PLAIN], layout.ANY),
        ([layout.READS, layout.ANY], layout.ANY),
    ):
        assert layout.kind_of([Op.ADD] * 2, kinds) == kind, kinds
    refused(
        layout.kind_of,
        ([Op.ADD, Op.MAP], "before the MAP changes h"),
        ([Op.MAP, Op.MAP], "two of MAPs and CODEs"),
        error=ValueError,
    )


def test_only_readings_of_the_stream_for_every_token_are_run_as_readings_alone():
    steps = {
        layout.READS: [Step(Op.PROBE, slot=0), Step(Op.PROBE, slot=1, flags=Flags.ADDS)],
        layout.PLAIN: [Step(Op.ADD), Step(Op.ADD, slot=1, flags=Flags.NONE)],
        layout.ANY: [
            Step(Op.PROBE),
            Step(Op.PROBE, slot=0, flags=Flags.UNITS),
            Step(Op.PROBE, slot=0, ids=(1,)),
            Step(Op.PROBE, slot=0, bit=3),
            Step(Op.PROBE, slot=0, mask=2),
            Step(Op.UNIT, slot=0),
            Step(Op.GATE, slot=0),
            Step(Op.ADD, flags=Flags.KEEP),
            Step(Op.ADD, mask=1),
        ],
    }
    for kind, alike in steps.items():
        assert [step.kind for step in alike] == [kind] * len(alike)


def test_a_gate_is_a_sigmoid_of_a_reading_and_closes_and_opens_fully():
    for sharpness in (1.0, -1.0, 3e38):
        made, before = single(
            Step(Op.GATE, read=1, a=0.5, b=1.5, c=sharpness, flags=FRESH),
            Step(Op.ADD, write=2, a=1.0, flags=COUNTED | Flags.GATED),
            rows=5,
            width=3,
        )
        made.bank[:] = 0
        made.bank[1, 0] = made.bank[2, 1] = 1
        made.hidden.copy_(before.zero_())
        made.hidden[:, 0] = torch.tensor([1.0, 2.0, -300.0, 300.0, 0.0])
        run(made)
        seen = sharpness * (made.hidden[:, 0].double() + 0.5 - 1.5)
        torch.testing.assert_close(made.hidden[:, 1], torch.sigmoid(seen).float())
        assert made.hidden[2:4, 1].tolist() == ([0, 1] if sharpness > 0 else [1, 0])


def test_a_step_gate_is_open_above_its_threshold_only_and_reads_an_earlier_sites_score():
    made, before = single(
        Step(Op.GATE, a=99.0, b=0.25, slot=3, flags=Flags.STEP),
        Step(Op.ADD, write=2, a=1.0, flags=COUNTED | Flags.GATED),
        rows=3,
    )
    made.hidden.copy_(before)
    made.tally.zero_()
    made.scores[:3, 3] = torch.tensor([0.25, 0.26, math.nan])
    run(made)
    assert torch.equal(made.hidden[[0, 2]], before[[0, 2]])
    assert torch.equal(made.hidden[1], before[1] + made.bank[2])
    # A closed gate is carried out all the same.
    assert made.tally[:3, layout.EDITS].tolist() == [1, 1, 1]


@pytest.mark.parametrize("step", [Step(Op.SCALE, a=1.0), Step(Op.REPLACE, write=1, a=0.0)])
def test_a_factor_of_zero_is_nothing_even_times_infinity(step):
    made = case([[step], []], rows=4, width=8, residual=False, captures=False)
    made.hidden[:, 3] = torch.tensor([math.inf, -math.inf, 1.0, math.inf])
    before = made.hidden.clone()
    run(made)
    assert same_bits(made.hidden, before)


def overflowing(dtype, *steps):
    """Two rows with these steps between two rows without edits, all captured, and a probe."""
    made = case([list(steps), []], rows=4, width=24, dtype=dtype, residual=False, captures=False)
    made.tokens[:4, layout.PROGRAM] = torch.tensor([3, 2, 2, 3])
    made.tokens[:4, layout.GROUP] = 2
    made.tokens[:4, layout.RECORD] = torch.arange(4) + 1
    made.table[2, layout.PLACE] = 1
    return made


HUGE = {
    "a sum": [Step(Op.ADD, write=1, a=3e38), Step(Op.ADD, write=1, a=3e38)],
    "opposite infinities": [
        Step(Op.ADD, write=1, a=3e38),
        Step(Op.ADD, write=1, a=3e38),
        Step(Op.ADD, write=2, a=-3e38),
        Step(Op.ADD, write=2, a=-3e38),
    ],
    "a product": [Step(Op.SCALE, a=3e38), Step(Op.SCALE, a=3e38)],
    "a projection": [Step(Op.LINEAR, read=1, write=1, a=3e38)],
    "a norm": [Step(Op.ADD_MATCHED, write=1, a=3e38), Step(Op.ADD_MATCHED, write=2, a=3e38)],
    "a norm that is kept": [Step(Op.ADD, write=1, a=3e38, flags=BOTH | Flags.KEEP)],
}


@pytest.mark.parametrize("name", HUGE)
def test_an_edit_that_overflows_saturates_and_flags_its_rows_alone(name):
    for dtype in DTYPES:
        made = overflowing(dtype, *HUGE[name])
        made.bank[1:3] *= 10
        wanted = expected(made)
        run(made)
        assert made.hidden.isfinite().all(), dtype
        assert float(made.hidden.abs().max()) <= layout.limit_of(str(dtype).removeprefix("torch."))
        assert made.tally[:4, layout.NONFINITE].tolist() == [0, 1, 1, 0]
        assert_same(made, wanted, exact=False)


def test_the_largest_values_of_an_edit_have_a_norm_in_float32():
    row = torch.full((MAX_WIDTH,), layout.LIMIT)
    assert math.isfinite(float((row * row).sum()))


def test_values_of_the_model_that_are_not_finite_are_flagged_where_they_are_captured():
    for bad in (math.inf, -math.inf, math.nan):
        for residual in (True, False):
            made = overflowing(torch.bfloat16, Step(Op.ADD, write=1, a=0.0))
            made.hidden[3, 5] = bad
            if residual:
                made.residual = torch.zeros_like(made.hidden)
            before = made.hidden.clone()
            run(made)
            assert made.tally[:4, layout.NONFINITE].tolist() == [0, 0, 0, 1]
            assert same_bits(made.hidden, before)


def test_a_score_that_is_not_finite_is_flagged():
    made = overflowing(torch.float32, Step(Op.PROBE, read=1, slot=1))
    made.table[2, layout.PLACE] = 0
    made.bank[1] = 3e38
    made.hidden[1] = 10.0
    made.hidden[2] = 0.0
    run(made)
    assert made.tally[:4, layout.NONFINITE].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("residual", [True, False])
def test_a_norm_is_kept_at_any_scale(residual):
    def stream(made):
        return made.hidden.double() + (made.residual.double() if residual else 0)

    for scale in (1.0, 1e4, 1e12, -1e12):
        step = Step(Op.ADD, write=1, a=scale, flags=BOTH | Flags.KEEP)
        made = case([[step]], rows=3, width=576, residual=residual, captures=False)
        before = stream(made)
        wanted = before + scale * made.bank[1].double()
        wanted *= before.norm(dim=1, keepdim=True) / wanted.norm(dim=1, keepdim=True)
        run(made)
        torch.testing.assert_close(stream(made), wanted, atol=5e-6, rtol=0)
