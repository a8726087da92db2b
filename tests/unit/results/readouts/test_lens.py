"""Results of lenses as the caller reads them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from midstream.results.readouts.lens import LensResults, LensRows


def rows() -> LensRows:
    """Two positions, two layers, a vocabulary of four; token 2 was chosen."""
    logits = torch.tensor(
        [[[0.0, 1, 2, 3], [3.0, 2, 1, 0]], [[1.0, 5, 0, 2], [0.0, 0, 9, 1]]], dtype=torch.float32
    )
    values, ids = logits.topk(2)
    ranks = 1 + (logits > logits[..., 2:3]).sum(-1, keepdim=True)
    return LensRows(
        values,
        ids,
        (2,),
        logits[..., 2:3],
        ranks,
        logits.logsumexp(-1),
        torch.tensor([3, 7]),
        (4, 11),
    )


def test_logprobs_are_over_the_whole_vocabulary() -> None:
    one = rows()
    assert one.logprobs.shape == (2, 2, 2)
    assert float(one.logprobs[1, 1, 0]) == pytest.approx(-0.00058, abs=1e-5)
    assert torch.equal(one.token_logprobs[1, 1], one.logprobs[1, 1, :1])
    assert len(one) == 2
    assert repr(one) == "LensRows(2 positions × 2 layers: top 2 and 1 tokens)"


def test_the_json_form_is_read_back() -> None:
    given = LensResults({"logit": rows()})
    found = LensResults.from_json(given.to_json())["logit"]
    for name in ("values", "ids", "token_values", "ranks", "logsumexp", "positions"):
        assert torch.equal(getattr(found, name), getattr(rows(), name))
    assert (found.tokens, found.layers) == ((2,), (4, 11))
    assert rows().nbytes == 4 * (8 + 8 + 4 + 4 + 4)
    with pytest.raises(KeyError, match=r"there is no lens 'x'; there is 'logit'"):
        given["x"]


WORDS = [" a", " b", "<i>", "\n"]
TOKENIZER: Any = SimpleNamespace(decode=lambda ids: WORDS[ids[0]])


def test_the_table_has_a_line_for_each_layer() -> None:
    assert str(rows().table(TOKENIZER, top=1)) == (
        "position 7              '<i>'\n"
        "11          '<i>' 100%  #1\n"
        "4           ' b' 93%    #4"
    )  # fmt: skip
    assert repr(rows().table(row=0)) == str(rows().table(row=0))
    assert str(rows().table(row=0)) == (
        "position 3                2\n"
        "11          0 64%  1 24%  #3\n"
        "4           3 64%  2 24%  #2"
    )  # fmt: skip


def test_the_grid_has_a_column_for_each_position() -> None:
    assert str(rows().grid(TOKENIZER)) == (
        "layer  3         7\n"
        "11     ' a' 64%  '<i>' 100%\n"
        "4      '\\n' 64%  ' b' 93%"
    )  # fmt: skip
