"""Features and their edits, against `sae_lens` in float64 on vectors of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import saelens, tiny
from support.end_oracle import EndOracle
from support.engines import engine, generated
from support.inner_served import PROMPTS, ROOM, TOLERANCE, Served
from support.oracle_edits import At
from support.saelens import KINDS
from torch import Tensor

from midstream import SAE, Capture, Features, SpecError

WIDTH, FEATURES = 64, 120
LONG = [(13 * nth) % 190 + 3 for nth in range(150)]
HOOK = "blocks.1.hook_resid_post"
TRAINED = ("StandardTrainingSAE", "BatchTopKTrainingSAE")
# Features of these can be changed one by one.
SINGLE = (
    "standard", "standard-unbiased", "jumprelu", "gated", "batchtopk", "batchtopk-norms",
    "matryoshka",
)  # fmt: skip


@dataclass(frozen=True)
class By:
    """An edit of the reference: what it makes of vectors, and where."""

    change: Callable[[Tensor], Tensor]
    taps: tuple[tuple[str, int], ...] = (("resid_post", 1),)


class Oracle(EndOracle):
    """Any changes too."""

    def taps(self, edit: Any) -> set[Any]:
        return set(edit.taps) if isinstance(edit, By) else super().taps(edit)

    def _apply(self, one: At, tap: Any, h: np.ndarray) -> np.ndarray:
        if not isinstance(one.edit, By):
            return super()._apply(one, tap, h)
        chosen = [position for position in range(len(h)) if one.where(position)]
        out = h.copy()
        out[chosen] = one.edit.change(torch.from_numpy(h[chosen])).numpy()
        return out


@pytest.fixture(scope="module")
def model(tiny_models: Path) -> tuple[Path, Oracle]:
    path = tiny.make("llama-bias", tiny_models, tiny.MODELS["llama"])
    return path, Oracle(path, "llama")


@pytest.fixture(scope="module")
def folders(model: tuple[Path, Oracle], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random SAEs and trained ones, by name."""
    found = tmp_path_factory.mktemp("saelens")
    for kind in KINDS:
        saelens.write_random(kind, found / kind, WIDTH, FEATURES, HOOK)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 190, (8, 100), generator=draw).tolist()
    rows = torch.cat([model[1].run(one).values["resid_post", 1] for one in prompts])
    for name in TRAINED:
        given = {"k": 8} if "TopK" in name else {}
        saelens.write_trained(name, found / name, rows, HOOK, **given)
    return found


@pytest.fixture(scope="module")
def served(model: tuple[Path, Oracle], folders: Path) -> Iterator[Served]:
    names = [*KINDS, *TRAINED]
    settings = {
        "sites": ["resid_pre", "resid_post", "mlp_in"],
        "readout_bytes": len(names) * 4 * (192 * (WIDTH + 2) + 256),
        "saes": {name: str(folders / name) for name in names},
    }
    with engine(model[0], **ROOM, midstream=settings) as llm:
        yield Served("llama", model[1], llm)


def test_features_are_those_of_sae_lens(served: Served, folders: Path) -> None:
    """Of every architecture and normalisation, on the device and on the host."""
    errors = {}
    for name in (*KINDS, *TRAINED):
        sae = saelens.read(folders / name)
        is_mlp = "hook_name_out" in KINDS.get(name, ("", {}))[1]
        prompts = [LONG, PROMPTS[0]]
        asked = Features(name, 20, features=[3, 119])
        outputs = served.ask(prompts, 2, capture=asked)
        for prompt, output in zip(prompts, outputs, strict=True):
            rows = output.features[name]
            assert (rows.site, rows.layer) == (("mlp_in", 2) if is_mlp else ("resid_post", 1))
            seen = served.oracle.run([*prompt, *generated(output)][:-1])
            x = seen.values[rows.site, rows.layer]
            active = saelens.features(sae, x)
            assert 0 < int((active > 0).sum()) < active.numel()
            assert torch.equal(rows.l0, (active > 0).sum(-1)), name
            best = active.topk(20)
            scale = float(active.max())
            for mine, wanted in (
                (rows.values, best.values),
                (rows.feature_values, active[:, [3, 119]]),
                (SAE.load(folders / name).encode(x), active),
                (SAE.from_saelens(saelens.read(folders / name)).encode(x), active),
            ):
                errors[name] = float((mine - wanted).abs().max()) / max(scale, 1)
                assert errors[name] <= TOLERANCE, errors
            assert torch.equal(rows.ids, torch.where(best.values > 0, best.indices, -1)), name


def test_a_factor_of_the_input_is_that_of_sae_lens(folders: Path, tmp_path: Path) -> None:
    sae = saelens.read(folders / "standard")
    sae.cfg.normalize_activations = "expected_average_only_in"
    sae.to(torch.float32).save_model(tmp_path)
    mine = SAE.load(tmp_path, input_scale=0.25)
    sae.to(torch.float64).fold_activation_norm_scaling_factor(0.25)
    x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))
    active = saelens.features(sae, x)
    assert float((mine.encode(x) - active).abs().max()) <= 1e-5
    assert float((mine.decode(active) - sae.decode(active).detach()).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", [*SINGLE, *TRAINED])
def test_an_edited_feature_is_that_of_sae_lens(served: Served, folders: Path, name: str) -> None:
    """With the error term, of prompts of several steps and of generated tokens."""
    sae, mine = saelens.read(folders / name), SAE.load(folders / name)
    rows = served.oracle.run(LONG).values["resid_post", 1]
    active = saelens.features(sae, rows)
    index = int((active > 0).sum(0).argmax())
    for mode, value in (("set", 3.0), ("add", -2.0), ("scale", 0.0)):
        edit = mine.feature(index, mode, value)  # type: ignore[arg-type]
        by = By(lambda h, m=mode, v=value: saelens.edited(sae, h, {index: v}, m))
        capture = Capture([1, 2], "resid_post")
        outputs = served.ask([LONG, PROMPTS[1]], 3, edits=[edit], capture=capture)
        for prompt, output in zip((LONG, PROMPTS[1]), outputs, strict=True):
            assert output.receipt.status == "ok"
            served.assert_is(prompt, output, At(by))
        seen = served.oracle.run(LONG, [At(by)])
        assert seen.touched(("resid_post", 1)) > 10


@pytest.mark.parametrize("name", sorted({*KINDS} - {*SINGLE}))
def test_a_single_feature_that_depends_on_others_is_refused(folders: Path, name: str) -> None:
    with pytest.raises(SpecError, match="a feature cannot be changed by itself"):
        SAE.load(folders / name).feature(0, value=1.0)
