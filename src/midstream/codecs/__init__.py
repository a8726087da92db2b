"""Codecs: encodings of captured vectors as bytes, lossless or with a known error.

The classes specify each byte layout and error. Everything is little-endian, without padding.
"""

from midstream.codecs.base import Codec
from midstream.codecs.cast import Cast
from midstream.codecs.full8 import Full8
from midstream.codecs.parse import parse_codec
from midstream.codecs.per_dim import Full8PerDim
from midstream.codecs.raw import Raw
from midstream.codecs.records import RowEncoding
from midstream.codecs.rp8 import Rp8
from midstream.codecs.sketches import cosine_similarities, inner_products, norms
from midstream.codecs.topk8 import Topk8

__all__ = [
    "Cast",
    "Codec",
    "Full8",
    "Full8PerDim",
    "Raw",
    "RowEncoding",
    "Rp8",
    "Topk8",
    "cosine_similarities",
    "inner_products",
    "norms",
    "parse_codec",
]
