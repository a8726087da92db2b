"""Rows to encode: every finite float of a dtype, the extreme ones often."""

import torch
from hypothesis import strategies as st

from midstream.codecs import Codec, Raw, parse_codec
from midstream.results.encoded_rows import Rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Codecs that mark a row that is not finite.
LOSSY = ("full8", "rp8:k=16,seed=3", "topk8:k=3")
CASTS = ("cast:dtype=bfloat16", "cast:dtype=float16", "cast:dtype=float8_e4m3fn")
CODECS = ("raw", *CASTS, *LOSSY)

_WIDTHS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}
_INTEGERS = {32: torch.int32, 16: torch.int16}


def codec(spec: str) -> Codec:
    return parse_codec(spec)


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor | Rows:
    """Rows as they come from the device."""
    if isinstance(codec, Raw):
        return values
    return Rows(codec, values.shape[1], values.dtype, (codec.encode(values)[:, None],), (0,))


def from_bits(bits: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """[n, hidden] of the floats with these bits."""
    width = _WIDTHS[dtype]
    signed = torch.tensor(bits, dtype=torch.int64) - ((torch.tensor(bits) >> (width - 1)) << width)
    return signed.to(_INTEGERS[width]).view(dtype)


@st.composite
def finite_rows(draw: st.DrawFn, min_width: int = 1) -> torch.Tensor:
    """[n, hidden] in any of the dtypes: any bits at all, those that are not finite made 0."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    n, hidden = draw(st.integers(1, 3)), draw(st.integers(min_width, 12))
    largest = (1 << _WIDTHS[dtype]) - 1
    # Few different values in a row give ties, and rows that are constant.
    pool = draw(st.lists(st.integers(0, largest), min_size=1, max_size=2 * hidden))
    bits = st.lists(st.sampled_from(pool), min_size=hidden, max_size=hidden)
    return from_bits(draw(st.lists(bits, min_size=n, max_size=n)), dtype).nan_to_num_(0, 0, 0)
