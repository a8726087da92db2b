"""The `site` op on the CPU: the reference implementation against its own definition."""

from __future__ import annotations

import pytest
import torch
from helpers.site_cases import assert_same, expected, random_case

import midstream.ops.site
from midstream.ops import layout
from midstream.ops.site import site


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 80, 576, 640])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("max_edits", [0, 1, 5])
def test_rows_are_edited_captured_and_counted_as_defined(dtype, width, residual, max_edits):
    case = random_case(
        rows=13, width=width, dtype=dtype, residual=residual, max_edits=max_edits, seed=width
    )
    wanted = expected(case)
    torch.ops.midstream.site(*case.arguments())
    assert_same(case, wanted, exact=True)


def test_an_idle_batch_is_left_exactly_as_it_was():
    case = random_case(rows=9, width=64, dtype=torch.bfloat16, residual=True, max_edits=3, seed=1)
    case.tokens[:, layout.PROGRAM] = 0
    before = case.copy()
    torch.ops.midstream.site(*case.arguments())
    assert_same(case, before, exact=True)


def test_rows_of_padding_beyond_the_words_in_use_are_not_touched():
    case = random_case(rows=6, width=32, dtype=torch.float32, residual=False, max_edits=2, seed=2)
    case.tokens[:3, layout.PROGRAM] = 3
    case.tokens[3:] = 0
    before = case.copy()
    torch.ops.midstream.site(*case.arguments())
    assert torch.equal(case.hidden[3:], before.hidden[3:])
    assert torch.equal(case.tally[3:], before.tally[3:])


def test_an_empty_batch_is_allowed():
    case = random_case(rows=0, width=32, dtype=torch.float32, residual=False, max_edits=2, seed=3)
    torch.ops.midstream.site(*case.arguments())


def test_a_scale_of_zero_leaves_every_bit_in_place():
    case = random_case(rows=9, width=64, dtype=torch.bfloat16, residual=True, max_edits=5, seed=4)
    case.edit_scales.zero_()
    before = case.hidden.clone()
    torch.ops.midstream.site(*case.arguments())
    assert torch.equal(case.hidden, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.ones(2, 4, dtype=torch.int32)}, "tokens must be"),
        ({"tally": torch.zeros(20, 3, dtype=torch.int32)}, "tally must be"),
        ({"tokens": torch.ones(20, 4, dtype=torch.int64)}, "tokens must be contiguous"),
        ({"bank": torch.zeros(4, 33)}, "32 wide"),
        ({"bank": torch.zeros(4, 32, dtype=torch.float64)}, "bank must be contiguous"),
        ({"ring": torch.zeros(4, 64)[:, ::2]}, "ring must be contiguous"),
        ({"residual": torch.zeros(5, 32)}, "residual must be as hidden"),
        ({"hidden": torch.zeros(6, 64)[:, ::2]}, "hidden must be"),
    ],
)
def test_wrong_shapes_strides_and_dtypes_are_refused(change, message):
    case = random_case(rows=6, width=32, dtype=torch.float32, residual=True, max_edits=2, seed=5)
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(ValueError, match=message):
        site(*case.arguments())


def test_the_op_survives_compilation_in_order_and_in_place():
    case = random_case(rows=8, width=32, dtype=torch.float32, residual=True, max_edits=3, seed=6)
    case.tokens[:, layout.PROGRAM] = 4
    case.table[4, layout.EDIT_COUNT] = 3
    wanted = expected(case)
    doubled = expected(wanted)

    def model(hidden, *rest):
        torch.ops.midstream.site(hidden, *rest)
        between = hidden * 2
        torch.ops.midstream.site(hidden, *rest)
        return between, hidden * 3

    between, after = torch.compile(model, fullgraph=True)(*case.arguments())
    torch.testing.assert_close(between, wanted.hidden * 2)
    torch.testing.assert_close(after, doubled.hidden * 3)
    assert_same(case, doubled, exact=False)


def test_the_op_is_defined_as_its_schema_says():
    case = random_case(rows=4, width=16, dtype=torch.float32, residual=True, max_edits=2, seed=7)
    torch.library.opcheck(
        torch.ops.midstream.site.default,
        case.arguments(),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert midstream.ops.site.site.__doc__
