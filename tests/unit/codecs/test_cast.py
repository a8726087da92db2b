"""`cast` rounds every value to the nearest of a shorter dtype."""

import numpy as np
import torch
from hypothesis import given
from support.codec_rows import finite_rows

from midstream.codecs import Cast

# (bits of the significand, smallest exponent, largest value)
FORMS = {
    "bfloat16": (8, -126, (2 - 2.0**-7) * 2.0**127),
    "float16": (11, -14, 65504.0),
    "float8_e4m3fn": (4, -6, 448.0),
}


def rounded(values: np.ndarray, name: str) -> np.ndarray:
    """The nearest values of a form, halves to even; the largest for what is beyond it."""
    bits, least, most = FORMS[name]
    exponent = np.maximum(np.frexp(values)[1] - 1, least)
    step = np.exp2((exponent - bits + 1).astype(np.float64))
    return np.clip(np.rint(values / step) * step, -most, most)


@given(finite_rows())
def test_values_are_rounded_to_the_nearest(rows: torch.Tensor) -> None:
    for name in FORMS:
        codec = Cast(name)
        found = codec.decode(codec.encode(rows), rows.shape[1], rows.dtype)
        wanted = rounded(rows.double().numpy(), name)
        assert np.array_equal(found.double().numpy(), wanted)


def test_a_value_that_is_not_finite_stays_so_and_no_other_becomes_so() -> None:
    rows = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf, 3e38, -3e38]])
    for name in FORMS:
        found = Cast(name).decode(Cast(name).encode(rows), 6, torch.float32)[0]
        assert found.isfinite().tolist() == [True, False, False, False, True, True]
        assert found[4] == -found[5] == rounded(np.array([3e38]), name)[0]
        if name != "float8_e4m3fn":
            assert found[2:4].tolist() == [torch.inf, -torch.inf]


def test_rows_of_the_same_dtype_keep_every_bit() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for name in ("bfloat16", "float16"):
        data = Cast(name).encode(bits.view(getattr(torch, name)).view(64, -1))
        assert torch.equal(data.view(torch.int16).view(-1), bits)
