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
from support.inner_served import PROMPTS, ROOM, TOLERANCE, Served, assert_rows
from support.oracle_edits import At
from support.saelens import KINDS
from torch import Tensor
from vllm import SamplingParams

from midstream import SAE, Capture, Feature, Features, Gate, Reconstruct, SpecError, Steer
from midstream.ops import sae_ref
from midstream.ops.sae_layout import size
from midstream.runtime.frontend.sae_registry import SaeRegistry
from midstream.runtime.frontend.weight_memory import WeightMemory
from midstream.spec import ModelShape

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
    """An edit of the reference: what it makes of vectors, and where; of those of another tap, too,
    where it reads one."""

    change: Callable[..., Tensor]
    taps: tuple[tuple[str, int], ...] = (("resid_post", 1),)
    reads: tuple[str, int] | None = None


class Oracle(EndOracle):
    """Any changes too."""

    def taps(self, edit: Any) -> set[Any]:
        return set(edit.taps) if isinstance(edit, By) else super().taps(edit)

    def _apply(self, one: At, tap: Any, h: np.ndarray) -> np.ndarray:
        if not isinstance(one.edit, By):
            return super()._apply(one, tap, h)
        chosen = [position for position in range(len(h)) if one.where(position)]
        out = h.copy()
        given = [torch.from_numpy(h[chosen])]
        if one.edit.reads is not None:
            given.append(self._seen.values[one.edit.reads][chosen].double())
        out[chosen] = one.edit.change(*given).numpy()
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
        "sites": ["resid_pre", "resid_post", "mlp_in", "mlp_out"],
        "reconstruct": {"resid_post:1": 192, "resid_post:0": 120, "mlp_in:2": 120},
        "readout_bytes": len(names) * 4 * size(WIDTH, 192, True),
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
            # Rounding may take one activation of them all past 0.
            assert int((rows.l0 - (active > 0).sum(-1)).abs().sum()) <= 1, name
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
    other = SAE.from_saelens(sae, input_scale=0.25)
    with pytest.raises(SpecError, match="does not have the factor; give `input_scale`"):
        SAE.from_saelens(sae)
    sae.to(torch.float64).fold_activation_norm_scaling_factor(0.25)
    x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))
    active = saelens.features(sae, x)
    for one in (mine, other):
        assert float((one.encode(x) - active).abs().max()) <= 1e-5
    assert float((mine.decode(active) - sae.decode(active).detach()).abs().max()) <= 1e-4


def test_a_release_is_loaded_by_sae_lens(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, but for the download: the Hub is a folder here."""
    from huggingface_hub.errors import EntryNotFoundError
    from sae_lens.loading import pretrained_sae_loaders

    def download(repo_id: str, filename: str, **_given: Any) -> str:
        assert repo_id == "someone/saes"
        if not (folders / filename).exists():
            raise EntryNotFoundError.__new__(EntryNotFoundError)
        return str(folders / filename)

    monkeypatch.setattr(pretrained_sae_loaders, "hf_hub_download", download)
    x = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1))
    for name in ("jumprelu", "gated", "topk-norms", "skip"):
        found = SAE.load("someone/saes", name)
        assert found.hook_name == SAE.load(folders / name).hook_name
        active = saelens.features(saelens.read(folders / name), x)
        assert float((found.encode(x) - active).abs().max()) <= 1e-4
    for release, sae_id, problem in (
        ("gemma-scope-2b-pt-res-canonical", "layer_1/width_1k/canonical", "ID .* not found"),
        ("no-release", "layer_1", "Release no-release not found"),
    ):
        with pytest.raises(SpecError, match=f"{release}: sae_lens cannot load .*{problem}"):
            SAE.load(release, sae_id)


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


@pytest.mark.parametrize("name", ["jumprelu", "gated", "BatchTopKTrainingSAE"])
def test_edited_features_are_those_of_sae_lens(served: Served, folders: Path, name: str) -> None:
    """Of several in one edit, all activations are of the vector before it: of an SAE, or of a
    registered one by its name."""
    sae, mine = saelens.read(folders / name), SAE.load(folders / name)
    active = saelens.features(sae, served.oracle.run(LONG).values["resid_post", 1])
    ids = (active > 0).sum(0).topk(12).indices.tolist()
    prompts = [LONG, *PROMPTS]
    for mode, values in (
        ("set", {nth: 0.5 * place for place, nth in enumerate(ids)}),
        ("scale", dict.fromkeys(ids, 0.0)),
        ("add", {nth: (-1.0) ** place for place, nth in enumerate(ids)}),
    ):
        edits = [
            mine.features(values, mode),  # type: ignore[arg-type]
            Feature(sae=name, index=values, mode=mode),  # type: ignore[arg-type]
            {"op": "feature", "sae": name, "mode": mode,
             "index": {str(nth): value for nth, value in values.items()}},
            Feature(sae=name, index=values, mode=mode, layer=0, phase="generated"),  # type: ignore[arg-type]
        ]  # fmt: skip
        by = At(By(lambda h, v=values, m=mode: saelens.edited(sae, h, v, m)))
        capture = Capture([0, 1, 2], "resid_post")
        outputs = served.ask(prompts, 3, edits=[[one] for one in edits], capture=capture)
        for prompt, output in zip(prompts[:3], outputs, strict=False):
            edited = output.receipt.edited
            assert edited.expected == edited.applied == len(prompt) + 2, "one for each token"
            served.assert_is(prompt, output, by)
        below = At(By(by.edit.change, (("resid_post", 0),)), lambda at: at >= len(prompts[3]))
        served.assert_is(prompts[3], outputs[3], below)
        # The features that it makes are read back.
        if mode == "scale":
            one_by_one = [mine.feature(nth, mode, 0.0) for nth in ids]
            (other,) = served.ask([LONG], 3, edits=[one_by_one], capture=capture)
            found = [each.activations["resid_post", 1] for each in (other, outputs[0])]
            assert float((found[0] - found[1]).abs().max()) > 0.1, "one after the other is the same"


def test_features_in_gates_tiers_and_several_completions(served: Served, folders: Path) -> None:
    """Cached blocks of one edit are not those of another."""
    sae, llm = saelens.read(folders / "jumprelu"), served.llm
    first, second = {3: 4.0, 8: 0.0, 9: 1.0}, {3: 4.0, 8: 0.0, 9: 2.0}
    capture = Capture([1, 2], "resid_post", positions=["last_prompt", "generated"])
    prompt = PROMPTS[2] * 4
    for values, completions, cached in ((first, 1, 0), (second, 1, 0), (first, 2, 64)):
        edit = Feature(sae="jumprelu", index=values)
        params = SamplingParams(
            n=completions, temperature=1.0, max_tokens=3, ignore_eos=True, detokenize=False
        )
        (output,) = served.ask([prompt], params=params, edits=[[edit]], capture=capture)
        assert output.num_cached_tokens == cached
        by = At(By(lambda h, v=values: saelens.edited(sae, h, v, "set")))
        for one in output.outputs:
            seen = served.oracle.run([*prompt, *one.token_ids][:-1], [by])
            assert_rows(one.activations or output.activations, seen)
    by = At(By(lambda h: saelens.edited(sae, h, first, "set")))
    never = torch.zeros(WIDTH)
    llm.vectors.register("edit", {"edits": [Feature(sae="jumprelu", index=first)]})
    (output,) = served.ask(PROMPTS[:1], 3, edits=[[Steer("edit")]], capture=Capture([1, 2]))
    served.assert_is(PROMPTS[0], output, by)
    for threshold, wanted in ((-1.0, [by]), (1.0, [])):
        gate = Gate(Feature(sae="jumprelu", index=first), never, threshold=threshold)
        (output,) = served.ask(PROMPTS[:1], 3, edits=[[gate]], capture=Capture([1, 2]))
        served.assert_is(PROMPTS[0], output, *wanted)
    llm.steering.set(base=Feature(sae="jumprelu", index=first))
    try:
        (output,) = served.ask(PROMPTS[:1], 3, capture=Capture([1, 2]))
    finally:
        llm.steering.clear()
        llm.vectors.remove("edit")
    served.assert_is(PROMPTS[0], output, by)


@pytest.mark.parametrize(
    ("edit", "path", "problem"),
    [
        (Feature(sae="gone", index={1: 2.0}), "edits.sae", "no SAE 'gone'; there is `standard`"),
        (Feature(sae="jumprelu", index={FEATURES: 2.0}), "edits.index", "expected 0 to 119"),
        (Feature(sae="topk", index={1: 2.0}), "edits", "TopK .* depends on all of them; the mode"),
        (Feature(sae="rescaled", index={1: 2.0}), "edits", "normalised"),
        (Feature(sae="jumprelu", index=range(65), value=1), "edits", "65 instructions"),
    ],
)
def test_features_that_cannot_be_edited_are_refused(
    served: Served, edit: Any, path: str, problem: str
) -> None:
    with pytest.raises(SpecError, match=problem) as caught:
        served.ask(PROMPTS[:1], 1, edits=edit, capture=None)
    assert caught.value.path == path


@pytest.mark.parametrize("name", sorted({*KINDS} - {*SINGLE}))
def test_a_single_feature_that_depends_on_others_is_refused(folders: Path, name: str) -> None:
    with pytest.raises(SpecError, match="a feature cannot be changed by itself"):
        SAE.load(folders / name).feature(0, value=1.0)


MLP_TAPS = ("mlp_in", 2), ("mlp_out", 2)
CHANGED = {3: 4.0, 8: 0.0, 77: -1.5}


def is_transcoder(name: str) -> bool:
    return "hook_name_out" in KINDS.get(name, ("", {}))[1]


def as_saelens(folders: Path, name: str, **asked: Any) -> By:
    """The reference of `Reconstruct(name, …)`."""
    sae = saelens.read(folders / name)
    index, mode = asked.get("index") or {}, asked.get("mode", "set")
    values = index if isinstance(index, dict) else dict.fromkeys(index, asked.get("value", 0.0))
    error = asked.get("error", False)

    def change(h: Tensor, x: Tensor | None = None) -> Tensor:
        return saelens.reconstructed(sae, h if x is None else x, h, values, mode, error)

    if is_transcoder(name):
        return By(change, MLP_TAPS[1:], MLP_TAPS[0])
    return By(change)


@pytest.mark.parametrize("name", [*KINDS, *TRAINED])
def test_a_reconstruction_is_that_of_sae_lens(folders: Path, name: str) -> None:
    """Within 1e-5 of a row's length, of the op on the CPU, without an engine."""
    width, taps = WIDTH, frozenset([("resid_post", 1), *MLP_TAPS])
    registry = SaeRegistry(
        WeightMemory(1 << 20, lambda _: False, lambda: None),
        ModelShape(3, width, taps),
        {("resid_post", 1): 192, MLP_TAPS[0]: 192},
    )
    memory = torch.full((1 << 18,), torch.nan)
    with registry.adding(name, SAE.load(folders / name)) as messages:
        for message in messages:
            numbers = torch.frombuffer(bytearray(message.data), dtype=torch.float32)
            memory[message.offset // 4 : message.offset // 4 + len(numbers)] = numbers
    sae = saelens.read(folders / name)
    x = 2 * torch.randn(40, width, generator=torch.Generator().manual_seed(5)) + 0.3
    for asked in (
        {},
        {"index": CHANGED},
        {"index": CHANGED, "error": True},
        {"index": [3, 8, 77], "mode": "ablate"},
        {"index": CHANGED, "mode": "add", "error": True},
        {"index": CHANGED, "mode": "scale"},
        {"index": list(range(100)), "mode": "scale", "value": 0.5, "error": True},
    ):
        (edit,) = Reconstruct(name, **asked).bind(lambda of: registry.source(of.name))
        where = edit.reads_elsewhere(width)
        code = edit.instructions(width)[0] if where is None else where[1]
        assert is_transcoder(name) == (where is not None)
        found = sae_ref.reconstruct(x, torch.from_numpy(code.read.numpy().copy()), memory)
        by = as_saelens(folders, name, **asked)
        wanted = by.change(torch.zeros(len(x), width), x) if where else by.change(x)
        if asked.get("error") and not where:
            wanted = wanted - x
        error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-3)
        assert float(error.max()) <= 1e-5, (name, asked, float(error.max()))
    with torch.no_grad():
        assert float((sae(x.double()) - x).norm()) > 0.1 * float(x.norm()), "the identity"


@pytest.mark.parametrize("name", [*KINDS, *TRAINED])
def test_a_model_runs_on_reconstructions(served: Served, folders: Path, name: str) -> None:
    """Of prompts of several steps and of generated tokens, beside requests without an edit."""
    asked: list[dict[str, Any]] = [
        {},
        {"index": CHANGED},
        {"index": CHANGED, "error": True},
        {"index": CHANGED, "mode": "scale", "positions": slice(2, 5)},
    ]
    prompts = [LONG, PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    edits = [[Reconstruct(name, **one)] for one in asked]
    capture = Capture([1, 2], ["resid_post", "mlp_in", "mlp_out"])
    outputs = served.ask(prompts, 3, edits=[*edits, None], capture=capture)
    for prompt, output, one in zip(prompts, outputs, [*asked, None], strict=True):
        assert output.receipt.status == "ok", output.receipt
        if one is None:
            served.assert_is(prompt, output)
            continue
        where = slice(2, 5) if "positions" in one else slice(None)
        chosen = range(len(prompt) + 2)[where]
        by = At(as_saelens(folders, name, **one), lambda position, c=chosen: position in c)
        served.assert_is(prompt, output, by)
        edited = output.receipt.edited
        assert edited.expected == edited.applied == (1 + is_transcoder(name)) * len(chosen)
