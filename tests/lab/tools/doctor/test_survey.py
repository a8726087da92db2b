"""What docs/data/models.json says of vLLM's architectures."""

import ast
import json
from pathlib import Path

from support.families import FAMILIES
from support.sources import package_path

from midstream.lab.tools.doctor.drawn_images import DRAWN, PROCESSED, SOUND

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


def test_every_multimodal_architecture_of_vllm_has_an_outcome():
    names = registry("_MULTIMODAL_MODELS")
    assert len(names) > 100
    assert set(names) - set(MODELS) == set()
    assert {name for name in names if not MODELS[name].get("multimodal")} == set()


def test_those_with_an_image_say_how_and_were_compared_with_something():
    shown = [one for one in MODELS.values() if one.get("images")]
    assert {one["images"] for one in shown} == {DRAWN, PROCESSED, SOUND}
    assert sum(one["outcome"] == "ok" and one["images"] != SOUND for one in shown) >= 60
    assert all(one["multimodal"] and one["compared_with"] for one in shown)


def test_at_least_sixty_are_ok_and_each_outcome_has_what_it_stands_on():
    assert {one["outcome"] for one in MODELS.values()} <= OUTCOMES
    assert sum(one["outcome"] == "ok" for one in MODELS.values()) >= 60
    assert MODELS
    for name, model in MODELS.items():
        if model["outcome"] != "ok":
            assert model["reason"], name
            continue
        assert model["layer_classes"], name
        assert model["worst"] <= 0.15, name
        # The stream is compared at every layer that has it, and something was edited.
        assert model["compared"] >= 2 * model["layers"] - 1, name
        assert model["operations"] >= 8, name
        for site in ("resid_pre", "resid_post"):
            assert all(site not in sites for sites in model["not compared"].values()), name


def test_the_families_that_a_gpu_runs_by_their_published_shapes_are_ok():
    named = [family["config"]["architectures"] for family in FAMILIES.values()]
    assert [MODELS[name]["outcome"] for (name,) in named] == ["ok"] * 12
