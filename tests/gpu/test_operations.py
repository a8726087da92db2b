"""Every operation at every site on SmolLM2 on a GPU, in float32, compiled and with graphs, against
the same formula by hook in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.edit_cases import Case, ask, cases, problems
from support.engine_view import inspect
from support.engines import GPU_MEMORY, engine
from support.oracle import relative_error
from support.oracle_edits import EVERY_SITE, PLACES, EditOracle

# vLLM's float32 attention on a GPU rounds products to TF32: unedited prompts are within 1e-3 of
# transformers, and some edits amplify that: of 220 cases on an H200 the worst was 4.6e-3 up to the
# edited layer and 2.0e-2 after it, for a whole site, with logprobs off by 0.1. So the bounds of a
# single case are wide, and what most cases come to is held to as well. That the formulas are right
# to 1e-4 is shown on the CPU.
NEAR, FAR, MOST = 1e-2, 4e-2, 3e-3
BY_ROW = 0.1
TIE = 0.2
TEXTS = ("The capital of France is the city of", "She said that two and two", "Water boils at")
TAPS = list(zip(EVERY_SITE, (4, 10, 21, 12, 16, 8, 25), strict=True))


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> EditOracle:
    return EditOracle(smollm2, PLACES["llama"], "cuda")


@pytest.fixture(scope="module")
def given(smollm2: Path, oracle: EditOracle) -> list[Case]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return cases(oracle, [list(tokenizer(text).input_ids) * 2 for text in TEXTS], TAPS)


@pytest.fixture(scope="module")
def llm(smollm2: Path, given: list[Case]) -> Iterator[Any]:
    with engine(
        smollm2,
        enforce_eager=False,
        max_num_batched_tokens=256,
        max_num_seqs=64,
        **GPU_MEMORY,
        midstream={"sites": list(EVERY_SITE), "maps": 16},
    ) as found:
        yield found


def test_every_operation_at_every_site_does_what_its_formula_says(
    llm: Any, oracle: EditOracle, given: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in one batch, in mixed steps of 256 tokens, none of which runs a layer's Python:
    graphs are replayed, or what was compiled runs.
    """

    def refuse(*_args: Any) -> None:
        raise AssertionError("a layer's Python ran")

    assert len(given) > 180
    monkeypatch.setattr("midstream.runtime.worker.taps.taps._fire", refuse)
    outputs = ask(llm, given, layers=None)
    found = []
    errors = []
    for case, output in zip(given, outputs, strict=True):
        found += problems(oracle, case, output, BY_ROW, TIE)
        ids = [*case.prompt, *output.outputs[0].token_ids][:-1]
        seen = oracle.run(ids, case.edits)
        for tap, value in output.activations.items():
            expected = seen.values[tap]
            if not expected.any():  # scaled to nothing: there is no share of it to be off by
                assert not value.any(), f"{case.name}: {tap} should be zero"
                continue
            error = relative_error(value, expected)
            errors.append(error)
            edited = case.tap[1] if case.tap is not None else 0
            if not error <= (NEAR if tap[1] <= edited else FAR):
                found.append(f"{case.name}: {tap} in all: {error:.2e}")
    errors.sort()
    assert errors[len(errors) * 9 // 10] < MOST
    assert not found, "\n".join([f"of {len(given)} cases:", *found[:40]])
    inspect(llm).check_integrity()


def test_one_at_a_time_they_give_what_they_give_together(
    llm: Any, oracle: EditOracle, given: list[Case]
) -> None:
    """Alone, each decoding step is a graph for one sequence."""
    found = []
    for case in given[::9]:
        (output,) = ask(llm, [case], layers=None)
        found += problems(oracle, case, output, BY_ROW, TIE)
    assert not found, "\n".join(found[:40])
