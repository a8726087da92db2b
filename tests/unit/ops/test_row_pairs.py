"""Rows of any length are written as they were asked for, whatever was in the stream before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.short_rows import BOTH, check, every_case, short_case, stream_of
from support.site_cases import Step, case, same_bits

import midstream.ops.site  # noqa: F401  (defines the op)
from midstream.ops.layout import Op
from midstream.ops.row_pairs import write_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _name(known: dict) -> str:
    halves = "two halves" if known["residual"] else "one tensor"
    return f"{known['name']}-{known['size']:g}-{known['dtype']}-{halves}".replace("torch.", "")


def test_a_result_is_the_asked_row_to_within_the_rounding_of_that_row():
    wrong = {}
    for known in every_case():
        try:
            check(short_case(**known), known["name"], known["size"], lambda made: made.run())
        except AssertionError as error:
            wrong[_name(known)] = str(error)
    assert wrong == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_is_zero_in_both_halves(dtype):
    steps = [Step(op, write=4, a=1.0) for op in (Op.REPLACE, Op.MULTIPLY)]
    for step in (*steps, Step(Op.SCALE, a=0.0), Step(Op.SCALE, a=0.0, mask=11)):
        for residual in (True, False):
            made = case([[step]], rows=5, width=64, dtype=dtype, residual=residual, captures=False)
            made.bank[4] = 0
            before, where = made.copy(), torch.ones(64, dtype=torch.bool)
            if step.mask is not None:
                where = made.bank[step.mask] != 0
            made.run()
            for name in ("hidden", "residual") if residual else ("hidden",):
                after, rest = getattr(made, name), getattr(before, name)
                assert not after[:, where].any()
                assert same_bits(after[:, ~where].contiguous(), rest[:, ~where].contiguous())


@settings(max_examples=rounds(suite=200, nightly=5000))
@given(
    dtype=st.sampled_from(DTYPES),
    powers=st.tuples(st.integers(-9, 14), st.integers(-9, 14), st.integers(-9, 14)),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_addition_is_as_exact_as_both_halves_can_be_or_as_a_change_of_one_alone(
    dtype, powers, seed
):
    draw = torch.Generator().manual_seed(seed)
    hidden, residual, delta = (
        torch.randn(2, 40, generator=draw) * 2.0**power / 4 for power in powers
    )
    hidden, residual = hidden.to(dtype), residual.to(dtype)
    exact = hidden.double() + residual.double() + delta.double()
    alone = (hidden.float() + delta).to(dtype)
    before = (alone.double() + residual.double() - exact).abs()
    write_rows(hidden, residual, slice(0, 2), delta)
    after = (hidden.double() + residual.double() - exact).abs()
    # The low part is at most the rounding of the high part, and is rounded itself.
    both = (torch.finfo(dtype).eps / 2) ** 2 * exact.abs()
    assert bool((after <= torch.maximum(before, both) * (1 + 2**-10) + 2.0**-26).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_components_that_nothing_changes_keep_the_bits_of_both_halves(dtype):
    made = case(
        [[Step(Op.ADD, write=4, a=3.0), Step(Op.SCALE, a=0.5, mask=11)]],
        rows=4, width=40, dtype=dtype, captures=False,
    )  # fmt: skip
    kept = made.bank[11] == 0
    made.bank[4, kept] = 0
    before = made.copy()
    made.run()
    for name in ("hidden", "residual"):
        after, rest = getattr(made, name), getattr(before, name)
        assert same_bits(after[:, kept].contiguous(), rest[:, kept].contiguous())
        assert not torch.equal(after[:, ~kept], rest[:, ~kept])


def test_captures_at_the_site_of_an_edit_are_the_row_rounded_once():
    made = case([[Step(Op.REPLACE, write=4, a=1.0)]], rows=3, width=64, dtype=torch.bfloat16)
    made.tokens[:3, :3] = torch.tensor([[2, 2, 1], [2, 2, 5], [2, 2, 9]])
    made.table[2, 2] = 1
    made.run()
    captured, row = made.ring[[3, 7, 11]], made.bank[4].expand(3, -1)
    assert torch.equal(captured, stream_of(made).bfloat16())
    # The low part is rounded too, so a row next to a tie may go either way.
    assert bool(((captured.float() - row).abs() <= row.abs() * 2**-8 * 1.01).all())


def test_a_residual_of_another_dtype_has_the_high_part():
    made = case([[Step(Op.REPLACE, write=4, a=1.0, flags=BOTH)]], rows=3, width=64,
                dtype=torch.bfloat16, captures=False)  # fmt: skip
    made.residual = made.residual.float() * 1e4
    made.run()
    assert torch.equal(made.residual, made.bank[4].expand(3, -1))
    assert not made.hidden.any()
    torch.testing.assert_close(stream_of(made), made.bank[4].double().expand(3, -1))
