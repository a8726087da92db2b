"""What ranks keep of a cached prompt, and the doses of edits over them, are those of one rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from midstream import Capture, Gate, Probe, Steer
from support import dose_oracle
from support.cached_pair import vector
from support.engines import generated, greedy, tokens
from support.oracle_edits import PLACES, EditOracle

SITES = ["resid_post", "z", "mlp_act"]  # the last two are split over tensor-parallel ranks
PROMPT = [(13 * nth) % 190 + 3 for nth in range(100)]
KINDS = ("mean", "max", "moments")


def _asked() -> list[dict[str, Any]]:
    steer = Steer(vector(1, 0.3), layer=1)
    gate = Gate(steer, Probe(vector(2), 0), 0.0, smooth=0.02, sharpness=0.5)
    reduced = [{"capture": Capture("all", SITES, "prompt", reduce=kind)} for kind in KINDS]
    return [*reduced, {"edits": gate, "capture": Capture("all", positions=slice(96, None))}]


def _ask(llm: Any, prompts: Sequence[list[int]], count: int, **asked: Any) -> list[Any]:
    outputs: list[Any] = llm.generate(
        [tokens(each) for each in prompts],
        greedy(count, detokenize=False),
        use_tqdm=False,
        **asked,
    )
    return outputs


def check_kept(several: Any, single: Any) -> None:
    """A prompt that is cached, with what each rank kept of it, gives what an engine of one rank
    without a cache gives: sums of its rows, and what a gate remembers.
    """
    assert several.reset_prefix_cache()
    for plan in _asked():
        [wanted] = _ask(single, [PROMPT], 4, **plan)
        for hit in (0, 96):
            [output] = _ask(several, [PROMPT], 4, **plan)
            assert output.num_cached_tokens == hit
            assert output.receipt.status == "ok"
            assert generated(output) == generated(wanted)
            assert set(output.activations) == set(wanted.activations)
            for tap, values in wanted.activations.items():
                found = output.activations[tap]
                torch.testing.assert_close(found, values, rtol=1e-3, atol=1e-4)


def check_doses(several: Any, path: Path) -> None:
    """Doses are those of plain hooks, of whole vectors."""
    oracle = EditOracle(path, PLACES["llama"])
    prompts = [PROMPT[:70], PROMPT[:9]]
    kinds = [dose_oracle.each_kind(len(prompt)) for prompt in prompts]
    assert several.reset_prefix_cache()
    outputs = _ask(several, prompts, 5, edits=[[at.edit for at in of] for of in kinds])
    for output, prompt, of_prompt in zip(outputs, prompts, kinds, strict=True):
        assert output.receipt.status == "ok"
        dose_oracle.assert_doses(output, prompt, of_prompt, oracle)
