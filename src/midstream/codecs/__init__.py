"""How captured vectors are written as bytes: all of them, or less at a known price.

Rows move and rest encoded, as uint8 [n, row_bytes]; a codec turns vectors into such rows on the
device, before they are copied, and turns them back wherever they are read. `docs/codecs.md` has
the layout of each, byte by byte, and what each loses.
"""

from midstream.codecs.base import Codec
from midstream.codecs.full8 import Full8
from midstream.codecs.parse import parse_codec
from midstream.codecs.raw import Raw
from midstream.codecs.rp8 import Rp8
from midstream.codecs.sketches import cosine_similarities, inner_products, norms
from midstream.codecs.topk8 import Topk8

__all__ = [
    "Codec",
    "Full8",
    "Raw",
    "Rp8",
    "Topk8",
    "cosine_similarities",
    "inner_products",
    "norms",
    "parse_codec",
]
