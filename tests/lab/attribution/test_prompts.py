"""Token ids of a twin's prompts."""

import numpy as np
import pytest
import torch

from midstream.errors import SpecError
from midstream.lab.attribution.prompts import PromptReader

READER = PromptReader(None, 128, 16)


@pytest.mark.parametrize("ids", [[0, 5], [0], [5]])
@pytest.mark.parametrize("made", [list, tuple, np.array, torch.tensor])
def test_ids_may_be_an_array_alone_and_in_vllms_dict(made, ids):
    assert READER.ids(made(ids)) == ids
    assert READER.ids({"prompt_token_ids": made(ids)}) == ids
    assert READER.ids({"prompt_token_ids": None, "prompt": made(ids)}) == ids


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": np.array([], int)}, {"prompt": ""}, {"prompt_token_ids": [1], 3: 4},
        {},
    ],
)  # fmt: skip
def test_a_dict_without_a_prompt_or_with_other_fields_is_named(prompt):
    with pytest.raises(SpecError, match="got a dict with the fields"):
        READER.ids(prompt)


def test_several_prompts_are_none():
    with pytest.raises(SpecError, match="^prompt_token_ids: expected a text, .* got `Tensor`"):
        READER.ids({"prompt_token_ids": torch.tensor([[1, 2]])})
