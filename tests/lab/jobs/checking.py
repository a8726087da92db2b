"""What must be true of a store that a data set was captured into."""

from os import PathLike
from typing import Any

import torch
from lab.jobs.fakes import LAYERS, tokens_of, vector

from midstream import open_store
from midstream.store import verify


def lines_in(root: str | PathLike[str]) -> dict[int, str]:
    """The id of each line that is stored; each is there once."""
    requests = open_store(root).requests
    found = {each.metadata["line"]: each.request for each in requests}
    assert len(found) == len(requests)
    return found


def check_rows(root: str | PathLike[str], texts: dict[int, Any]) -> None:
    """Whether exactly these lines are there, with the rows that the engine gave for them."""
    assert verify(root).ok
    store = open_store(root)
    assert set(lines_in(root)) == set(texts)
    for each in store.requests:
        tokens = tokens_of(texts[each.metadata["line"]])
        place = len(tokens) - 1
        activations = each.activations()
        assert each.prompt_tokens == len(tokens)
        assert activations.positions.tolist() == [place]
        assert activations.token_ids.tolist() == [tokens[place]]
        for layer in LAYERS:
            expected = vector(tokens[place], place, layer)
            assert torch.equal(activations["resid_post", layer], expected[None])
