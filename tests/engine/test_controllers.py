"""Controllers in the engine core: against transformers with the edits switched where the receipt
says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines import greedy
from support.oracle import Oracle
from support.updating import PROMPT, check_versions, everything, steer, vector

from midstream import Budget, Decay, Pid, Probe, Threshold
from midstream.testing import inspect

SIZE = len(PROMPT)
OWN, HOOK = steer(vector(1), 1, 2.0)
CALM, CALM_HOOK = steer(vector(2), 0, 3.0)


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle(tiny_llama, "model.layers", "post_attention_layernorm")


def probe(name: str = "p") -> Probe:
    return Probe(vector(3), 1, name=name)


def ask(llm: Any, *controllers: Any, **more: Any) -> list[Any]:
    """One completion of the same prompt for each controller, in the same steps."""
    asked = {"edits": OWN, "probes": probe(), "capture": everything(), **more}
    prompts = [{"prompt_token_ids": list(PROMPT)}] * len(controllers)
    params = asked.pop("params", greedy(24))
    outputs = llm.generate(prompts, params, controller=list(controllers), use_tqdm=False, **asked)
    inspect(llm).check_integrity()
    return [output.outputs[0] for output in outputs]


def test_each_answer_holds_from_the_next_step_on(llm: Any, oracle: Oracle) -> None:
    (free,) = ask(llm, None)
    scores = free.probes["p"][SIZE:].sort().values
    middle = float(scores[len(scores) // 2])
    laws = [
        Threshold("p", above=middle, on=1.5, off=0.5),
        Pid("p", target=middle, kp=0.02, low=0.0, high=2.0, step=0.25),
        Decay(6, least=0.2),
        Budget("p", total=float(free.probes["p"].clamp(min=0).sum()) / 2),
        None,
    ]
    for law, completion in zip(laws, ask(llm, *laws), strict=True):
        check_versions(oracle, PROMPT, completion, {"": [HOOK]})
        if law is None:
            assert completion.receipt.versions == ()
            assert list(completion.token_ids) == list(free.token_ids)
            continue
