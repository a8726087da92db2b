"""Weights that change under an engine in another process: its front end learns of it."""

from pathlib import Path

import torch
from support.alongside import rows_of
from support.oracle import HookEdit, Oracle, relative_error
from support.own_process import python
from support.reloading import other_weights
from system.weights_async import PROMPT, TOKEN

PLACES = ("model.layers", "post_attention_layernorm")


def test_an_async_engine_serves_nothing_of_old_weights(
    tiny_llama: Path, tiny_models: Path, tmp_path: Path
) -> None:
    other = other_weights(tiny_llama, tiny_models / "async-reloaded", 7)
    out = tmp_path / "found.pt"
    python("-m", "system.weights_async", tiny_llama, other, out, timeout=300)
    found = torch.load(out, weights_only=False)
    for nth, path in enumerate((tiny_llama, other)):
        oracle = Oracle(path, *PLACES)
        model = oracle.model.requires_grad_(False)
        read = model.model.norm.weight.double() * model.lm_head.weight[TOKEN].double()
        direction = (read / read.norm()).float()
        assert relative_error(found[f"direction{nth}"], direction) < 1e-5
        versions = [(1, "step 1")] if nth else []
        for name, cached in (("first", 0), ("again", 32), ("steered", None)):
            one = found[f"{name}{nth}"]
            edits = [] if cached is not None else [
                HookEdit("resid_post", 1, direction, 3.0, lambda _: True)
            ]  # fmt: skip
            seen = oracle.run(rows_of(PROMPT, one["tokens"]), edits).values["resid_post", 2]
            assert relative_error(one["rows"], seen) < 1e-4, (name, nth)
            assert (one["status"], one["versions"]) == ("ok", versions)
            assert cached is None or one["cached"] == cached
    assert found["over"]["versions"] == [(0, ""), (1, "")]
    assert found["over"]["status"] == "ok"
    assert found["version"] == (1, "step 1")
    assert found["usage"] == {"number": 1, "name": "step 1"}
