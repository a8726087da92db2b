"""`rp8`: the projection that anybody can make, and what its sketches tell."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import codec_page
from support.codec_rows import DTYPES

from midstream.codecs import Rp8, cosine_similarities, inner_products, norms
from midstream.codecs.rp8 import projection_matrix

# ---------------------------------------------------------------- the projection


def test_the_second_reading_is_of_philox_as_published():
    # Known answers of the authors' own library, for zeros, for ones, and for digits of π.
    ones = (1 << 64) - 1
    for counter, key, first in (
        ((0,) * 4, (0, 0), 0x16554D9ECA36314C),
        ((ones,) * 4, (ones, ones), 0x87B092C3013FE90B),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            0xA528F45403E61D95,
        ),
    ):
        assert codec_page.philox(counter, key)[0] == first


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**64 - 1))
def test_the_projection_is_what_the_page_says(k, hidden, seed):
    found = projection_matrix(k, hidden, seed)
    assert found.shape == (k, hidden)
    # Libraries may differ in float64's last bit: now and then that is one in float32's.
    np.testing.assert_array_max_ulp(found, codec_page.projection(k, hidden, seed), maxulp=1)


def test_the_projection_never_changes():
    for k, hidden, seed, first in (
        (3, 5, 0, (0.09152956, 1.7221662, -1.1117988, -0.47627097)),
        (7, 9, 123, (0.17542014, 0.3971324, 0.16547346, 0.6439592)),
        (16, 33, 2**64 - 1, (-0.08678187, -0.41655877, -0.07036899, -0.32579064)),
    ):
        found = projection_matrix(k, hidden, seed)[0, :4]
        np.testing.assert_array_max_ulp(found, np.array(first, np.float32), maxulp=1)


def test_its_entries_are_gaussian_of_variance_1_over_k():
    k, hidden = 256, 1024
    entries = projection_matrix(k, hidden, 7).reshape(-1).astype(np.float64) * math.sqrt(k)
    n = len(entries)
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((entries**power).mean() - mean) < 4 * math.sqrt(variance / n)
    for quantile, share in ((-1.0, 0.158655), (0.0, 0.5), (2.0, 0.977250)):
        error = 4 * math.sqrt(share * (1 - share) / n)
        assert abs((entries < quantile).mean() - share) < error


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rp8_is_the_page_s_projection_in_the_page_s_full8(dtype):
    rows = torch.randn(6, 48, dtype=dtype)
    codec = Rp8(k=24, seed=11)
    data = codec.encode(rows)
    exact = rows.double().numpy() @ codec_page.projection(24, 48, 11).astype(np.float64).T
    for row, sketch in zip(data, exact, strict=True):
        expected = np.frombuffer(codec_page.affine(sketch.astype(np.float32)), np.uint8)
        found = np.frombuffer(bytes(row.tolist()), np.uint8)
        # A product in float32 may fall to the other side of a half.
        assert np.abs(found[8:].astype(int) - expected[8:].astype(int)).max() <= 1
        np.testing.assert_allclose(
            found[:8].view(np.float32), expected[:8].view(np.float32), rtol=1e-5
        )


def test_a_sketch_beyond_float32_reads_nan():
    rows = torch.full((1, 64), 3e38)
    found = Rp8(k=64).decode(Rp8(k=64).encode(rows), 64, rows.dtype)
    assert found.isnan().all()
    assert Rp8(k=8).decode(Rp8(k=8).encode(rows * 1e-3), 64, rows.dtype).isfinite().all()
    assert (Rp8(k=8).decode(Rp8(k=8).encode(rows * 0), 64, rows.dtype) == 0).all()


def test_the_projection_is_made_once_for_a_device():
    from midstream.codecs.rp8 import projection

    first = projection(4, 10, 5, torch.device("cpu"))
    Rp8(k=4, seed=5).encode(torch.zeros(0, 10))
    assert projection(4, 10, 5, torch.device("cpu")) is first


SEEDS = 250
SIMILARITIES = (0.0, 0.6, -0.95)


@pytest.fixture(scope="module")
def read() -> torch.Tensor:
    """float64 [SEEDS, 4, 32]: as they read by as many projections, a vector of length 3 and others
    of length 5, of these similarities to it.
    """
    k, hidden = 32, 24
    torch.manual_seed(k)
    x, noise = torch.randn(2, hidden).double()
    noise -= x * (noise @ x) / (x @ x)
    x, noise = x / x.norm(), noise / noise.norm()
    others = [5 * (c * x + math.sqrt(1 - c**2) * noise) for c in SIMILARITIES]
    rows = torch.stack([3 * x, *others]).float()
    codecs = [Rp8(k=k, seed=seed) for seed in range(SEEDS)]
    return torch.stack(
        [codec.decode(codec.encode(rows), hidden, rows.dtype) for codec in codecs]
    ).double()


@pytest.mark.parametrize("similarity", SIMILARITIES)
def test_over_many_projections_the_errors_are_those_of_the_theory(read, similarity):
    k = read.shape[2]
    pairs = read[:, [0, 1 + SIMILARITIES.index(similarity)]]
    few = 4 / math.sqrt(SEEDS)  # four standard errors of a mean; of a deviation, some less

    for which, length in ((0, 3.0), (1, 5.0)):
        squares = torch.stack([norms(both)[which] ** 2 for both in pairs]) / length**2
        expected = math.sqrt(2 / k)
        assert abs(squares.mean() - 1) < few * expected
        assert abs(squares.std() / expected - 1) < few

    products = torch.stack([inner_products(both[:1], both[1:])[0, 0] for both in pairs])
    exact = 15 * similarity
    expected = math.sqrt((15**2 + exact**2) / k)
    assert abs(products.mean() - exact) < few * expected
    assert abs(products.std() / expected - 1) < few

    cosines = torch.stack([cosine_similarities(both[:1], both[1:])[0, 0] for both in pairs])
    expected = (1 - similarity**2) / math.sqrt(k)
    assert abs(cosines.mean() - similarity) < few * expected + 1 / k
    assert abs(cosines.std() / expected - 1) < 1.5 * few


def test_with_the_defaults_lengths_are_off_by_some_3_percent():
    torch.manual_seed(0)
    rows = torch.randn(2000, 576) * torch.logspace(-3, 3, 2000)[:, None]
    codec = Rp8()
    found = norms(codec.decode(codec.encode(rows), 576, rows.dtype))
    relative = found / rows.norm(dim=1) - 1
    assert abs(relative.mean()) < 0.01  # one projection: its errors are not independent
    assert 0.02 < relative.std() < 0.04
    assert relative.abs().max() < 0.16


def test_similarities_lie_within_1_and_are_nan_for_zero_vectors():
    sketches = torch.tensor([[3.0, 1e-3], [-1.0, 2.0], [0.0, 0.0]])
    found = cosine_similarities(sketches, sketches)
    assert found.shape == (3, 3)
    torch.testing.assert_close(found.diagonal()[:2], torch.ones(2))
    assert found[:2, :2].abs().max() <= 1
    assert found[2].isnan().all()
