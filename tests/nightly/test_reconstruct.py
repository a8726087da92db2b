"""Reconstructions in compiled models, and with several ranks, against `sae_lens`."""

from typing import Any

import pytest
from support import saelens, tiny
from support.engines import engine
from support.inner_served import PROMPTS, ROOM, Served
from support.oracle_edits import At
from support.ranks import PIPELINE, ranks
from support.saelens import CHANGED, Oracle, as_saelens

from midstream import Capture, Reconstruct
from midstream.ops.sae.layout import size

WIDTH, FEATURES = 64, 120
LONG = [(13 * nth) % 190 + 3 for nth in range(150)]
NAMES = ("topk", "jumprelu", "normed", "skip")
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"index": CHANGED},
    {"index": CHANGED, "mode": "scale", "error": True},
)


@pytest.mark.parametrize("how", ["compiled", "tensor parallel", "pipeline parallel"])
def test_reconstructions_are_those_of_sae_lens(how, tiny_models, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "compiled"))
    path = tiny.make("llama-bias", tiny_models, tiny.MODELS["llama"])
    oracle = Oracle(path, "llama")
    for name in NAMES:
        folder = tmp_path / name
        saelens.write_random(name, folder, WIDTH, FEATURES, "blocks.1.hook_resid_post")
    settings = {
        "sites": ["resid_post", "mlp_in", "mlp_out"],
        "reconstruct": {"resid_post:1": FEATURES, "mlp_in:2": FEATURES},
        "readout_bytes": len(NAMES) * 4 * size(WIDTH, FEATURES, True),
        "saes": {name: str(tmp_path / name) for name in NAMES},
        "check_ranks": how != "compiled",
    }
    starts = {
        "compiled": lambda: engine(path, enforce_eager=False, **ROOM, midstream=settings),
        "tensor parallel": lambda: ranks(path, tensor_parallel_size=2, **ROOM, midstream=settings),
        "pipeline parallel": lambda: ranks(path, **PIPELINE, **ROOM, midstream=settings),
    }
    given = [(name, one) for name in NAMES for one in ASKED]
    prompts = [(LONG, *PROMPTS)[nth % 4] for nth in range(len(given))]
    with starts[how]() as llm:
        served = Served("llama", oracle, llm)
        outputs = served.ask(
            [*prompts, PROMPTS[0]], 3, capture=Capture([1, 2], ["resid_post", "mlp_out"]),
            edits=[*([Reconstruct(name, **one)] for name, one in given), None],
        )  # fmt: skip
        for prompt, output, (name, one) in zip(prompts, outputs, given, strict=False):
            assert output.receipt.status == "ok", output.receipt
            served.assert_is(prompt, output, At(as_saelens(tmp_path, name, **one)))
        served.assert_is(PROMPTS[0], outputs[-1])
