"""Doses of edits where several ranks have the model."""

from pathlib import Path
from typing import Any

import pytest
from engine.asking import ask, ask_all
from support.dose_oracle import assert_doses, each_kind, vector
from support.engines import ALL_SITES
from support.oracle_edits import PLACES, EditOracle
from support.ranks import PIPELINE, ranks

from midstream import Steer
from midstream.errors import SpecError

PROMPTS = [[(13 * n) % 190 + 3 for n in range(length)] for length in (70, 9)]


@pytest.mark.parametrize("args", [{"tensor_parallel_size": 2}, PIPELINE], ids=["tensor", "stages"])
def test_doses_over_two_ranks_are_those_of_plain_hooks(
    tiny_llama: Path, args: dict[str, Any]
) -> None:
    oracle = EditOracle(tiny_llama, PLACES["llama"])
    settings = {"sites": [*ALL_SITES, "z"], "doses": 64, "max_dose": 1e6, "check_ranks": True}
    common = {"max_num_batched_tokens": 48, "max_model_len": 128, "block_size": 32}
    with ranks(tiny_llama, midstream=settings, **common, **args) as llm:
        asked = [each_kind(len(prompt)) for prompt in PROMPTS]
        edits = [[at.edit for at in of_prompt] for of_prompt in asked]
        outputs = ask_all(llm, PROMPTS, 5, edits=edits)
        for output, prompt, of_prompt in zip(outputs, PROMPTS, asked, strict=True):
            assert output.receipt.status == "ok"
            assert_doses(output, prompt, of_prompt, oracle)
        if "tensor_parallel_size" in args:
            split = Steer(vector(1), 1, site="z", scale=0.1)
            with pytest.raises(SpecError, match=r"edits\[0\].*z is split over 2 ranks.*max_dose"):
                ask(llm, PROMPTS[1], 4, edits=[split])
