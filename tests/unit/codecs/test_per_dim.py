"""`full8:per=dim` keeps every value of a block to half a step of its dimension."""

import torch
from hypothesis import given
from support.codec_rows import finite_rows
from support.refusals import refused

from midstream.codecs import Full8, Full8PerDim, parse_codec
from midstream.errors import CodecError


@given(finite_rows())
def test_a_block_is_the_transpose_encoded_by_full8(rows):
    block = Full8PerDim().encode(rows)
    assert torch.equal(block, Full8().encode(rows.T.contiguous()))
    found = Full8PerDim().decode(block)
    assert torch.equal(found, Full8().decode(block, len(rows), rows.dtype).T)
    low, high = rows.double().aminmax(dim=0)
    bound = (high - low) / 255 * (0.5 + 2**-13) + found.double().abs() * 2**-24 + 2.0**-149
    assert ((rows.double() - found.double()).abs() <= bound).all()


def test_an_outlier_dimension_makes_no_other_coarse():
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    rows[:, 7] += 3000.0
    others = torch.arange(64) != 7
    per_dim = (Full8PerDim().decode(Full8PerDim().encode(rows)) - rows)[:, others].abs().max()
    per_row = Full8().decode(Full8().encode(rows), 64, rows.dtype) - rows
    assert float(per_dim) < 0.02
    assert float(per_row[:, others].abs().max()) > 1


def test_a_dimension_that_is_not_finite_decodes_to_nan_and_no_other_does():
    for bad in (torch.nan, torch.inf):
        rows = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        rows[3, 2] = bad
        found = Full8PerDim().decode(Full8PerDim().encode(rows))
        assert found.isnan().any(0).tolist() == [False, False, True, False]
        assert found[:, 2].isnan().all()


def test_what_is_not_a_block_is_rejected():
    shape = r"full8:per=dim: expected uint8 \[hidden, 8 \+ rows\]"
    refused(
        Full8PerDim().decode,
        (torch.zeros(3), shape),
        (torch.zeros(3, 9), shape),
        (torch.zeros(3, 7, dtype=torch.uint8), shape),
        (torch.full((2, 9), 255, dtype=torch.uint8), "full8:per=dim: row 0: the scale"),
        error=CodecError,
    )


def test_captures_take_a_scale_per_row_and_say_what_to_do_for_one_per_dimension():
    assert parse_codec("full8:per=row") == Full8()
    refused(parse_codec, ("full8:per=dim", "codec", "needs all rows of a completion.*save"))
