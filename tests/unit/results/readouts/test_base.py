"""Keys of read-outs' results."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from midstream.results.readouts import RESULTS
from midstream.results.readouts.base import LayerRows

BY_LAYER = {key: kind for key, kind in RESULTS.items() if issubclass(kind, LayerRows)}
FIRST, LAST = SimpleNamespace(nbytes=4), SimpleNamespace(nbytes=8)


def made(kind: type[LayerRows], num_layers: int | None = 4) -> LayerRows:
    return kind({("resid_post", 1): FIRST, ("resid_post", 3): LAST}, num_layers)


def test_attention_and_norms_are_by_layer():
    assert set(BY_LAYER) == {"attention", "norms"}


@pytest.mark.parametrize("kind", BY_LAYER.values(), ids=BY_LAYER)
def test_a_layer_is_any_integer_and_negative_ones_count_from_the_last(kind):
    results = made(kind)
    for layer in (3, -1, np.int64(3), np.int32(-1), torch.tensor(3)):
        assert results["resid_post", layer] is LAST
        assert ("resid_post", layer) in results
    assert (results.nbytes, len(results)) == (12, 2)
    assert list(results.values()) == [FIRST, LAST]


@pytest.mark.parametrize("kind", BY_LAYER.values(), ids=BY_LAYER)
def test_what_is_no_layer_of_the_rows_is_a_key_error_that_lists_them(kind):
    results, words = made(kind), r"there (is|are) no .* there (is|are) \('resid_post', 1\)"
    for layer in (0, -2, -5, 4, True, "1", 1.0, None, [1]):
        with pytest.raises(KeyError, match=words):
            results["resid_post", layer]
        assert ("resid_post", layer) not in results
    assert ("resid_post", -1) not in made(kind, None)
    assert ("resid_post", 3) in made(kind, None)
