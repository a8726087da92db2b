"""Features of registered SAEs, against formulas in float64 on vectors of transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask_all
from engine.refusals import assert_refused
from safetensors.torch import save_file
from support import tiny
from support.end_oracle import EndOracle
from support.engines import engine, generated
from support.inner_served import PROMPTS, ROOM, TOLERANCE, Served
from support.oracle_edits import At, Seen
from support.sae_oracle import KINDS, RandomSae
from torch import Tensor
from vllm import SamplingParams

from midstream import SAE, Capture, Features, Lens, Steer, TokenIds
from midstream.errors import ConfigError, SpecError
from midstream.results.readouts.features import FeatureRows

SITES = ["resid_pre", "resid_post", "mlp_in", "mlp_out"]
LONG = [(13 * nth) % 190 + 3 for nth in range(150)]
WIDTH, FEATURES = 64, 300
HOOKS = {"resid_post": "blocks.1.hook_resid_post", "mlp_in": "blocks.2.mlp.hook_in"}
# Room for all of them and for a lens, and for nothing else.
BYTES = len(KINDS) * (4 * FEATURES * (WIDTH + 2) + 256) + 4 * WIDTH * WIDTH


@pytest.fixture(scope="module")
def saes() -> dict[str, RandomSae]:
    """By kind; those of transcoders read what enters an MLP."""
    found = {}
    for kind in KINDS:
        site = "mlp_in" if kind in ("transcoder", "skip") else "resid_post"
        found[kind] = RandomSae(kind, WIDTH, FEATURES, HOOKS[site])
    return found


@pytest.fixture(scope="module")
def served(
    tiny_models: Path, saes: dict[str, RandomSae], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    path = tiny.make("llama-bias", tiny_models, tiny.MODELS["llama"])
    oracle = EndOracle(path, "llama")
    folder = tmp_path_factory.mktemp("saes")
    start = {"standard": str(saes["standard"].write(folder / "standard"))}
    save_file({"1": torch.eye(WIDTH)}, folder / "same.safetensors")
    lenses = {"same": str(folder / "same.safetensors")}
    settings = {"sites": SITES, "readout_bytes": BYTES, "saes": start, "lenses": lenses}
    with engine(path, **ROOM, midstream=settings) as llm:
        assert (llm.saes.names, llm.lenses.names) == (("standard",), ("same",))
        for kind, sae in saes.items():
            llm.saes.register(name_of(kind), SAE.load(sae.write(folder / kind)))
        yield Served("llama", oracle, llm)


def name_of(kind: str) -> str:
    return kind.replace(" ", "-")


def tap_of(sae: RandomSae) -> tuple[str, int]:
    return ("mlp_in", 2) if "mlp" in sae.config["hook_name"] else ("resid_post", 1)


def assert_features(rows: FeatureRows, asked: Features, active: Tensor) -> float:
    """Against activations [T, features]; returns the largest error of an activation."""
    mine = active[rows.positions]
    assert rows.ids.shape == rows.values.shape == (len(mine), asked.top)
    assert rows.values.dtype == rows.feature_values.dtype == torch.float32
    assert rows.ids.dtype == rows.l0.dtype == torch.int64
    assert_counts(rows.l0, mine)
    best = mine.topk(asked.top)
    assert torch.equal(rows.ids, torch.where(best.values > 0, best.indices, -1))
    errors = [rows.values - best.values]
    assert rows.features == asked.features
    errors.append(rows.feature_values - mine[:, list(asked.features)])
    return max(float(one.abs().max()) for one in errors if one.numel())


def assert_counts(found: Tensor, active: Tensor) -> None:
    """Numbers of active features; rounding may take one activation of them all past 0."""
    assert int((found - (active > 0).sum(-1)).abs().sum()) <= 1


def expected(sae: RandomSae, seen: Seen) -> Tensor:
    """Of a JumpReLU, an activation that rounding takes over its threshold would be another; the
    drawn ones are not so close.
    """
    return sae.encode(seen.values[tap_of(sae)])


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_architecture_encodes_as_its_formulas_do(served, saes, kind):
    steer = At(Steer(torch.linspace(-1, 1, WIDTH), 1))
    every = Features(name_of(kind), 12, features=[299, 0, 17])
    few = Features(name_of(kind), 300, ["last_prompt", "generated"], name="few")
    chosen = Features(name_of(kind), 0, slice(2, 5), features=42)
    asked: list[Any] = [
        [every, Capture([1], "resid_post"), few],
        [chosen],
        None,
        [every, Lens([1, 2], 2, kind="same")],
    ]
    prompts = [LONG, PROMPTS[0], PROMPTS[1], PROMPTS[2]]
    edits = [None, None, None, [steer.edit]]
    outputs = served.ask(prompts, 4, capture=asked, edits=edits)
    errors = []
    for prompt, output, given, edit in zip(prompts, outputs, asked, edits, strict=True):
        if given is None:
            assert not hasattr(output, "features")
            continue
        assert output.receipt.status == "ok", output.receipt
        seen = served.oracle.run([*prompt, *generated(output)][:-1], [steer] if edit else [])
        active = expected(saes[kind], seen)
        for one in given:
            if isinstance(one, Features):
                rows = output.features[one.name]
                assert (rows.site, rows.layer) == tap_of(saes[kind])
                errors.append(assert_features(rows, one, active))
    assert max(errors) <= TOLERANCE, errors
    rows = outputs[0].features[name_of(kind)]
    assert int(rows.l0.min()) > 0
    assert int(rows.l0.max()) < FEATURES
    assert [len(outputs[0].features["few"]), len(outputs[1].features[name_of(kind)])] == [4, 3]
    assert set(outputs[0].activations) == {("resid_post", 1)}
    assert not hasattr(outputs[1], "activations")
    counts = {(one.site, one.layer): one.actual for one in outputs[0].receipt.captured}
    assert counts[f"features.{name_of(kind)}", tap_of(saes[kind])[1]] == 153


def test_saes_of_a_request_are_read_where_it_says(served, saes):
    asked = [
        [Features("gated", 3), Features("topk", 8), Features("gated", 3, layer=0, name="below")],
        [Features("gated", 3, site="mlp_out", layer=-1), Features("jumprelu", 4, TokenIds([7, 9]))],
    ]
    prompts = [PROMPTS[0], [7, 8, 9, 7, 50]]
    outputs = served.ask(prompts, 3, capture=asked)
    first, second = (
        served.oracle.run([*prompt, *generated(one)][:-1]).values
        for prompt, one in zip(prompts, outputs, strict=True)
    )
    wanted = [
        {"gated": first["resid_post", 1], "topk": first["resid_post", 1],
         "below": first["resid_post", 0]},
        {"gated": second["mlp_out", 2], "jumprelu": second["resid_post", 1]},
    ]  # fmt: skip
    for given, output, vectors in zip(asked, outputs, wanted, strict=True):
        for one in given:
            active = saes[one.sae].encode(vectors[one.name])
            assert assert_features(output.features[one.name], one, active) <= TOLERANCE
    assert outputs[1].features["jumprelu"].positions.tolist()[:3] == [0, 2, 3]


def test_features_that_are_asked_for_together_are_each_requests_own(served, saes):
    asked = [Features("gated", 2, features=[3 + nth, 90 - nth, 150]) for nth in range(6)]
    prompts = [PROMPTS[nth % 3] for nth in range(6)]
    outputs = served.ask(prompts, 3, capture=[[one] for one in asked])
    for prompt, one, output in zip(prompts, asked, outputs, strict=True):
        seen = served.oracle.run([*prompt, *generated(output)][:-1])
        rows = output.features["gated"]
        assert assert_features(rows, one, expected(saes["gated"], seen)) <= TOLERANCE


def test_features_that_cannot_be_had_are_refused(served, tiny_models):
    again = [[Features("topk"), Features("topk", 3)]]
    assert_refused(
        lambda asked: ask_all(served.llm, [PROMPTS[0]], 1, capture=asked),
        [
            (Features("gone"), "capture.sae", "no SAE 'gone'; there is `standard`, .*register"),
            (Features("topk", 301), "capture.top", "the SAE 'topk' has 300 features"),
            (Features("topk", features=[1, 300]), "capture.features[1]", "is no feature 300"),
            (Features("topk", layer=3), "capture.layer", "layer 3 is out of range"),
            (Features("topk", site="attn_out"), "capture.site", "attn_out"),
            (again, "capture[0][1].name", "is a `Features` of this name too"),
        ],
    )
    params = SamplingParams(n=300, max_tokens=1, ignore_eos=True, detokenize=False)
    with pytest.raises(SpecError, match="may read 19200 rows .* a step has room for 16384"):
        served.ask([LONG], params=params, capture=Features("topk"))
    path = tiny.make("llama-bias", tiny_models, tiny.MODELS["llama"])
    for name in ("saes", "lenses"):
        wrong = rf"{name}\.a: there is no file or folder 'no/such/folder'"
        with pytest.raises(ConfigError, match=wrong):
            engine(path, midstream={name: {"a": "no/such/folder"}}).__enter__()


def test_a_name_is_what_it_was_last_registered_as(served, saes, tmp_path):
    llm, other = served.llm, RandomSae("jumprelu", WIDTH, 40, "blocks.0.hook_resid_pre")
    llm.saes.remove("skip")
    kept = saes["jumprelu"].write_npz(tmp_path / "params.npz")
    for sae, given in (
        (other, SAE.load(other.write(tmp_path / "other"))),
        (saes["jumprelu"], SAE.load(tmp_path, hook_name="blocks.1.hook_resid_post")),
    ):
        llm.saes.register("again", given)
        asked = Features("again", 6)
        (output,) = served.ask([PROMPTS[0]], 2, capture=asked)
        seen = served.oracle.run([*PROMPTS[0], *generated(output)][:-1])
        rows = output.features["again"]
        active = sae.encode(seen.values[rows.site, rows.layer])
        assert assert_features(rows, asked, active) <= TOLERANCE
    assert kept.exists()
    unplaced = SAE.load(kept)
    llm.saes.register("again", unplaced)
    with pytest.raises(SpecError, match="has no hook point; give both"):
        served.ask([PROMPTS[0]], 1, capture=Features("again", 6))
    with pytest.raises(SpecError, match=f"readout_bytes is {BYTES}, of which"):
        llm.saes.register("more", unplaced)
    narrow = SAE.load(RandomSae("topk", 8, 9, "blocks.0.hook_resid_pre").write(tmp_path / "narrow"))
    with pytest.raises(SpecError, match="sae: it reads vectors of 8 numbers, the model's 64"):
        llm.saes.register("again", narrow)
    llm.saes.remove("again")
    llm.saes.register("skip", SAE.load(saes["skip"].write(tmp_path / "skip")))
