"""Layout of a sparse autoencoder (SAE) in a worker's memory for registered weights, and of what a
`CODE` instruction says of it. All numbers are float32.

An SAE begins at a multiple of `ALIGN` numbers, its place, with a header of `ALIGN` numbers. Its
tensors follow without gaps: W_enc [width, features], b_enc [features] with b_dec folded in, the
thresholds [features], W_dec [features, width], b_dec [width] and, with `SKIPS`, W_skip transposed,
[width, width].

A description is in the bank, where the instruction reads: `DESCRIPTION` numbers, then three numbers
(id, factor, shift) for each feature that is changed: its activation becomes factor · activation +
shift.
"""

from __future__ import annotations

# Numbers of the header, and what an SAE's place is counted in.
ALIGN = 64

# Columns of the header.
FEATURES = 0
TOP_K = 1  # number of the largest activations that are kept; 0: all
NORMALIZE = 2  # an index of `NORMALIZATIONS`
CENTERED = 3  # 1: the mean of x is subtracted first
TRANSCODES = 4  # 1: what is decoded is another vector than x, which is not normalised
SKIPS = 5  # 1: W_skip x is added to what is decoded

NORMALIZATIONS = ("none", "constant_norm_rescale", "layer_norm")
NO_NORM, RESCALED, LAYER_NORM = range(3)
# Of layer_norm, as SAELens has it: it is added to the standard deviation.
EPSILON = 1e-5

# Columns of a description. The place is HIGH · 4096 + LOW: float32 has no larger whole numbers than
# 2²⁴ without gaps.
HIGH, LOW = 0, 1
ERROR = 2  # 1: only what the changes add is decoded, so that the SAE's error stays in h
CHANGES = 3  # number of features that are changed
WIDEST = 4  # number of the SAE's features
DIGEST = 5  # the first of `DIGEST_NUMBERS`, 16 bits each, which keep keys of the prefix cache apart
DIGEST_NUMBERS = 8
DESCRIPTION = DIGEST + DIGEST_NUMBERS
CHANGE = 3  # numbers of a change

_PLACES = 4096


def split_place(place: int) -> tuple[int, int]:
    """Return the numbers HIGH and LOW of a place."""
    return divmod(place, _PLACES)


def place_of(high: float, low: float) -> int:
    return int(high) * _PLACES + int(low)


def size(width: int, features: int, skips: bool) -> int:
    """Return how many numbers an SAE takes, header included, rounded up to `ALIGN`."""
    numbers = ALIGN + 2 * width * features + 2 * features + width + (width * width if skips else 0)
    return -(-numbers // ALIGN) * ALIGN
