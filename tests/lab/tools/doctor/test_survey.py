"""What docs/data/models.json says of vLLM's architectures."""

import ast
import json
from pathlib import Path

from support.sources import package_path

ROOT = Path(__file__).resolve().parents[4]
FOUND = json.loads((ROOT / "docs/data/models.json").read_text())
MODELS = FOUND["models"]
OUTCOMES = {"ok", "not comparable", "refused", "not compared", "cannot be built"}


def registry(name):
    """The architectures in one of the registry's tables, as its source has them."""
    tree = ast.parse((package_path("vllm") / "model_executor/models/registry.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return [key.value for key in node.value.keys if key is not None]
    raise AssertionError(f"the registry has no {name}")


def test_every_decoder_only_text_architecture_of_vllm_has_an_outcome():
    own = registry("_TEXT_GENERATION_MODELS")
    through = registry("_TRANSFORMERS_SUPPORTED_MODELS")
    assert len(own) > 100
    missing = {*own, *(name for name in through if name.endswith("ForCausalLM"))} - set(MODELS)
    assert missing == set()


def test_at_least_sixty_are_ok_and_each_outcome_has_what_it_stands_on():
    assert {one["outcome"] for one in MODELS.values()} <= OUTCOMES
    assert sum(one["outcome"] == "ok" for one in MODELS.values()) >= 60
    assert MODELS
    for name, model in MODELS.items():
        if model["outcome"] != "ok":
            assert model["reason"], name
            continue
        assert model["layer_classes"], name
        assert model["worst"] < 0.15, name
        # The stream is compared at every layer that has it, and something was edited.
        assert model["compared"] >= 2 * model["layers"] - 1, name
        assert model["operations"] >= 8, name
        for site in ("resid_pre", "resid_post"):
            assert all(site not in sites for sites in model["not compared"].values()), name
