"""Features and their edits, against `sae_lens` in float64 on vectors of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.refusals import assert_refused
from support import saelens, tiny
from support.engines import engine, greedy
from support.inner_served import PROMPTS, ROOM, TOLERANCE, Served, assert_rows
from support.oracle_edits import At
from support.sae_cases import bound, described, stored
from support.saelens import CHANGED, KINDS, By, Oracle, as_saelens, is_transcoder
from support.updating import Stepped
from torch import Tensor
from vllm import SamplingParams

from midstream import SAE, Capture, Feature, Gate, Reconstruct, Steer, TokenIds
from midstream.errors import BusyError, SpecError
from midstream.ops.sae.layout import size
from midstream.ops.sae.reference import reconstruct

WIDTH, FEATURES = 64, 120
LONG = [(13 * nth) % 190 + 3 for nth in range(150)]
HOOK = "blocks.1.hook_resid_post"
WIDE = 192  # features of the SAE `wide`
# Features of these can be changed one by one.
SINGLE = (
    "standard", "standard-unbiased", "jumprelu", "gated", "batchtopk", "batchtopk-norms",
    "matryoshka",
)  # fmt: skip
# Those whose reconstructions run in an engine; each kind is computed without one.
ENGINE = ("standard", "topk", "jumprelu", "transcoder")


@pytest.fixture(scope="module")
def model(tiny_models: Path) -> tuple[Path, Oracle]:
    path = tiny.make("llama-bias", tiny_models, tiny.MODELS["llama"])
    return path, Oracle(path, "llama")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random SAEs, by name."""
    found = tmp_path_factory.mktemp("saelens")
    for kind in KINDS:
        saelens.write_random(kind, found / kind, WIDTH, FEATURES, HOOK)
    saelens.write_random("standard", found / "wide", WIDTH, WIDE, HOOK)
    return found


@pytest.fixture(scope="module")
def served(model: tuple[Path, Oracle], folders: Path) -> Iterator[Served]:
    names = [*KINDS, "wide"]
    settings = {
        "sites": ["resid_pre", "resid_post", "mlp_in", "mlp_out"],
        "reconstruct": {"resid_post:1": WIDE, "resid_post:0": 120, "mlp_in:2": 120},
        "readout_bytes": len(names) * 4 * size(WIDTH, WIDE, True),
        "saes": {name: str(folders / name) for name in names},
    }
    with engine(model[0], **ROOM, midstream=settings) as llm:
        yield Served("llama", model[1], llm)


def test_features_are_those_of_sae_lens(folders):
    """Of every architecture and normalisation, on the host; `test_features` has the device."""
    x = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1))
    for name in KINDS:
        sae = saelens.read(folders / name)
        active = saelens.features(sae, x)
        assert 0 < int((active > 0).sum()) < active.numel()
        for mine in (SAE.load(folders / name), SAE.from_saelens(sae)):
            error = float((mine.encode(x) - active).abs().max()) / max(float(active.max()), 1)
            assert error <= TOLERANCE, (name, error)


@pytest.mark.parametrize("name", SINGLE)
def test_edited_features_are_those_of_sae_lens(served, folders, name):
    mine = SAE.load(folders / name)
    active = saelens.features(
        saelens.read(folders / name), served.oracle.run(LONG).values["resid_post", 1]
    )
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
        by = At(as_saelens(folders, name, index=values, mode=mode, error=True))
        capture = Capture([0, 1, 2], "resid_post")
        outputs = served.ask(prompts, 3, edits=[[one] for one in edits], capture=capture)
        for prompt, output in zip(prompts[:3], outputs, strict=False):
            edited = output.receipt.edited
            assert edited.expected == edited.applied == len(prompt) + 2, "one for each token"
            served.assert_is(prompt, output, by)
        below = At(By(by.edit.change, (("resid_post", 0),)), lambda at: at >= len(prompts[3]))
        served.assert_is(prompts[3], outputs[3], below)
        if mode == "scale":
            one_by_one = [mine.feature(nth, mode, 0.0) for nth in ids]
            (other,) = served.ask([LONG], 3, edits=[one_by_one], capture=capture)
            found = [each.activations["resid_post", 1] for each in (other, outputs[0])]
            assert float((found[0] - found[1]).abs().max()) > 0.1, "one after the other is the same"


@pytest.mark.parametrize("name", list(KINDS))
def test_a_reconstruction_is_that_of_sae_lens(folders, name):
    registry, memory = stored({name: SAE.load(folders / name)}, WIDTH)
    sae = saelens.read(folders / name)
    x = 2 * torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(5)) + 0.3
    for asked in (
        {},
        {"index": CHANGED},
        {"index": CHANGED, "error": True},
        {"index": [3, 8, 77], "mode": "ablate"},
        {"index": CHANGED, "mode": "add", "error": True},
        {"index": CHANGED, "mode": "scale"},
        {"index": list(range(100)), "mode": "scale", "value": 0.5, "error": True},
    ):
        edit = bound(registry, name, **asked)
        found = reconstruct(x, described(edit, WIDTH), memory)
        by = as_saelens(folders, name, **asked)
        if is_transcoder(name):
            wanted = by.change(torch.zeros(len(x), WIDTH), x)
        else:
            wanted = by.change(x) - (x if asked.get("error") else 0)
        error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-3)
        assert float(error.max()) <= 1e-5, (name, asked, float(error.max()))
    with torch.no_grad():
        assert float((sae(x.double()) - x).norm()) > 0.1 * float(x.norm()), "the identity"


@pytest.mark.parametrize("name", ENGINE)
def test_a_model_runs_on_reconstructions(served, folders, name):
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


def test_reconstructions_in_gates_tiers_names_and_several_completions(served, folders):
    llm, size = served.llm, len(PROMPTS[0])
    capture = Capture([1, 2], ["resid_post", "mlp_out"])
    vector = served.vector("resid_post", 1, part=False)
    rows = served.oracle.run(PROMPTS[0]).values["resid_post", 1]
    # Between two rows, so that rounding opens no gate.
    middle = (rows @ vector).sort().values[len(rows) // 2 - 1 :][:2]
    threshold = float(middle.mean())

    def by(name: str, **asked: Any) -> At:
        return At(as_saelens(folders, name, **asked))

    # Of the vectors before, which the reference reads in float64.
    def behind(gated: By, h: Tensor) -> Tensor:
        is_open = (h @ vector.double() > threshold)[:, None]
        return torch.where(is_open, gated.change(h), h)

    def kept(one: By, h: Tensor) -> Tensor:
        made = one.change(h)
        return made * (h.norm(dim=-1, keepdim=True) / made.norm(dim=-1, keepdim=True))

    top, jumps = as_saelens(folders, "topk"), as_saelens(folders, "jumprelu", index=CHANGED)
    steer = Steer(vector, 1)
    gate = Gate(Reconstruct("topk"), vector, threshold=threshold)
    named = Reconstruct("jumprelu", CHANGED, positions=TokenIds(PROMPTS[0][2:5]), layer=0)
    chosen = By(jumps.change, (("resid_post", 0),))
    given: list[tuple[Any, list[At]]] = [
        ([gate, steer], [At(By(lambda h: behind(top, h))), At(steer)]),
        ([Reconstruct("topk", norm="keep")], [At(By(lambda h: kept(top, h)))]),
        ([Gate(Reconstruct("jumping"), vector, threshold=-1e9, sharpness=1.0), steer],
         [by("jumping"), At(steer)]),
        ([Gate(Reconstruct("skip"), vector, threshold=1e9)], []),
        ([Reconstruct("jumping"), Reconstruct("gated")], [by("jumping"), by("gated")]),
        ([named], [At(chosen, lambda position: 2 <= position < 5)]),
    ]  # fmt: skip
    outputs = served.ask([PROMPTS[0]] * len(given), 1, edits=[one for one, _ in given],
                         capture=capture)  # fmt: skip
    for output, (_, edits) in zip(outputs, given, strict=True):
        served.assert_is(PROMPTS[0], output, *edits)
    params = SamplingParams(
        n=2, temperature=1.0, max_tokens=3, ignore_eos=True, detokenize=False, logprobs=2
    )
    edits = [[Reconstruct("topk-norms", phase="generated")]]
    (output,) = served.ask(PROMPTS[:1], params=params, edits=edits, capture=capture)
    for one in output.outputs:
        where = At(as_saelens(folders, "topk-norms"), lambda position: position >= size)
        seen = served.oracle.run([*PROMPTS[0], *one.token_ids][:-1], [where])
        assert_rows(one.activations, seen)
    llm.vectors.register("edit", {"prompt": [Reconstruct("jumprelu", CHANGED)]})
    llm.steering.set(generated=Reconstruct("gated"))
    try:
        (output,) = served.ask(PROMPTS[:1], 3, edits=[[Steer("edit")]],
                               capture=capture)  # fmt: skip
        served.assert_is(
            PROMPTS[0], output, At(jumps, lambda position: position < size),
            At(as_saelens(folders, "gated"), lambda position: position >= size),
        )  # fmt: skip
        llm.saes.register("jumprelu", SAE.load(folders / "topk"))
        with pytest.raises(SpecError, match="was registered again since this edit was"):
            served.ask(PROMPTS[:1], 3, edits=[[Steer("edit")]], capture=capture)
    finally:
        llm.steering.clear()
        llm.vectors.remove("edit")
        llm.saes.register("jumprelu", SAE.load(folders / "jumprelu"))


def test_kv_of_reconstructed_tokens_is_shared_by_equal_requests_alone(served, folders):
    prompt = PROMPTS[2][::-1] * 4
    capture = Capture([1, 2], "resid_post", positions=["last_prompt", "generated"])
    asked: list[tuple[Any, int]] = [
        (None, 0),
        ({}, 0),
        ({"index": CHANGED}, 0),
        ({"index": CHANGED, "error": True}, 0),
        ({"index": {**CHANGED, 8: 1.0}}, 0),
        ({"index": CHANGED}, 64),
        ({}, 64),
        (None, 64),
    ]
    llm = served.llm
    for one, cached in asked:
        edits = None if one is None else [[Reconstruct("topk", **one)]]
        (output,) = served.ask([prompt], 3, edits=edits, capture=capture)
        assert output.num_cached_tokens == cached, one
        served.assert_is(
            prompt, output, *([] if one is None else [At(as_saelens(folders, "topk", **one))])
        )
    llm.saes.register("topk", SAE.load(folders / "topk-norms"))
    try:
        (output,) = served.ask([prompt], 3, edits=[[Reconstruct("topk")]], capture=capture)
        assert output.num_cached_tokens == 0
        served.assert_is(prompt, output, At(as_saelens(folders, "topk-norms")))
    finally:
        llm.saes.register("topk", SAE.load(folders / "topk"))


def test_what_cannot_be_edited_or_reconstructed_is_refused(served, folders):
    steer, first = Steer([1.0] * WIDTH, 1), "must be the first edit"
    one_by_one = "TopK .* depends on all of them; the mode"
    many = "192 features.* allows 120 at resid_post:0"
    assert_refused(
        lambda edits: served.ask(PROMPTS[:1], 1, edits=edits, capture=None),
        [
            (Feature(sae="gone", index={1: 2.0}), "edits.sae", "no SAE 'gone'; there is `standar"),
            (Feature(sae="jumprelu", index={FEATURES: 2.0}), "edits.index", "expected 0 to 119"),
            (Feature(sae="topk", index={1: 2.0}), "edits", one_by_one),
            (Feature(sae="rescaled", index={1: 2.0}), "edits", "normalised"),
            (Feature(sae="jumprelu", index=range(65), value=1), "edits", "65 instructions"),
            (Reconstruct("gone"), "edits.sae", "no SAE 'gone'; there is `standard`"),
            (Reconstruct("topk", {FEATURES: 2.0}), "edits.index", "expected 0 to 119"),
            (Reconstruct("topk", layer=2), "edits.layer", "does not name resid_post:2; it names"),
            (Reconstruct("topk", site="resid_pre"), "edits.layer", "not name resid_pre:1"),
            (Reconstruct("wide", layer=0), "edits.sae", many),
            (Reconstruct("skip", site="mlp_out"), "edits.site", "a transcoder reads mlp_in"),
            ([steer, Reconstruct("topk")], "edits", first),
            ([Reconstruct("gated"), Reconstruct("topk")], "edits", first),
            ([Reconstruct("skip"), Reconstruct("jumping")], "edits", first),
        ],
    )
    for name in {*KINDS} - {*SINGLE}:
        with pytest.raises(SpecError, match="a feature cannot be changed by itself"):
            SAE.load(folders / name).feature(0, value=1.0)


def test_a_running_request_keeps_its_sae_and_may_change_what_is_done_with_it(served, folders):
    run, llm, prompt = Stepped(served.llm), served.llm, PROMPTS[0]
    capture = Capture([1, 2], "resid_post")
    run.add("a", prompt, greedy(6, logprobs=2, detokenize=False), edits=Reconstruct("topk"),
            capture=capture)  # fmt: skip
    run.step(2)
    for call in (llm.saes.remove, lambda name: llm.saes.register(name, SAE.load(folders / name))):
        with pytest.raises(BusyError, match="running requests use the SAE 'topk'"):
            call("topk")
    with pytest.raises(SpecError, match="not which SAE reconstructs where"):
        llm.update("a", edits=Reconstruct("topk-norms"))
    changed = Reconstruct("topk", CHANGED, error=True)
    (start,) = llm.update("a", edits=changed).positions.values()
    output = run.finish()["a"]
    first = At(as_saelens(folders, "topk"), lambda position: position < start)
    later = as_saelens(folders, "topk", index=CHANGED, error=True)
    served.assert_is(prompt, output, first, At(later, lambda position: position >= start))
    assert len(prompt) < start < len(prompt) + 5
    llm.saes.register("topk", SAE.load(folders / "topk"))
