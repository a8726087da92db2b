"""Each cell of a sweep against a hook in transformers in float32, and what holds of any sweep."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.engines import engine
from support.inner_oracle import INNER, InnerOracle
from support.sae_oracle import RandomSae
from torch import Tensor

from midstream import KL, SAE, Capture, LogitDiff, LogProb, Recovered, Text
from midstream.errors import SpecError

SITES = ["resid_pre", "attn_out", "mlp_out", "z", "resid_post", "final_norm"]
# 33, 33 and 34 tokens; the countries begin at token 14, and are of letters.
CORRUPT = "The capital of Japan is the city of"
CLEAN = "The capital of Italy is the city of"
LONGER = "The capital of France is the city of"
A, B = 70, 71
TOLERANCE = 1e-4
QUIET: dict[str, Any] = {"use_tqdm": False}
PLACE = ("resid_post", 1)
SPARSE = RandomSae("gated", 64, 40, "blocks.1.hook_resid_post")
SPARSE.tensors["W_dec"] *= 8


@pytest.fixture(scope="module")
def llm(talking_llama: Path) -> Iterator[Any]:
    settings = {"max_num_batched_tokens": 512, "max_num_seqs": 32, "block_size": 32}
    with engine(
        talking_llama,
        **settings,
        enable_prefix_caching=True,
        midstream={"sites": SITES, "readout_bytes": 1 << 16},
    ) as found:
        yield found


@pytest.fixture
def sparse(llm: Any, tmp_path: Path) -> Iterator[str]:
    for name, sae in (("sparse", SPARSE), ("top", RandomSae("topk", 64, 40, "blocks.1.hook_z"))):
        llm.saes.register(name, SAE.load(sae.write(tmp_path / name)))
    yield "sparse"
    for name in llm.saes.names:
        llm.saes.remove(name)


class Patch(NamedTuple):
    """One cell: its site and layer, and what changes [tokens, width] there in place."""

    tap: tuple[str, int]
    change: Callable[[Tensor], None]


def put(
    place: int, row: Tensor, columns: slice = slice(None), alpha: float = 1.0
) -> Callable[[Tensor], None]:
    """A change: h ← (1 − alpha) · h + alpha · row, in some columns of a position."""

    def change(hidden: Tensor) -> None:
        h = hidden[place, columns]
        h += alpha * (row[columns] - h)

    return change


class PatchOracle(InnerOracle):
    """Patches of one prompt, each cell a forward of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, INNER["llama"])

    def rows(self, tokens: Sequence[int]) -> dict[tuple[str, int], Tensor]:
        """[tokens, width] of each tap, unpatched."""
        return self.run(tokens).values

    def logprobs(self, tokens: Sequence[int], patches: Sequence[Patch] = ()) -> Tensor:
        """ln P of the token after the prompt, [patches, vocabulary]; [1, …] without patches."""
        runs = [self.changed(tokens, *patch) for patch in patches] or [self.run(tokens)]
        return torch.stack([one.logits[-1].log_softmax(-1) for one in runs])


@pytest.fixture(scope="module")
def oracle(talking_llama: Path) -> PatchOracle:
    return PatchOracle(talking_llama)


def ids(llm: Any, text: str) -> list[int]:
    return list(llm.get_tokenizer().encode(text))


def difference(logprobs: Tensor) -> np.ndarray:
    return (logprobs[:, A] - logprobs[:, B]).numpy()


def expected(
    oracle: PatchOracle, corrupt: list[int], clean: list[int], taps: Any, positions: Any
) -> np.ndarray:
    """LogitDiff(A, B) of each tap and position, patched from the same position."""
    rows = oracle.rows(clean)
    cells = [Patch(tap, put(place, rows[tap][place])) for tap, place in product(taps, positions)]
    return difference(oracle.logprobs(corrupt, cells))


def test_every_cell_is_what_a_hook_gives(llm, oracle):
    sites, positions = ["resid_pre", "attn_out", "mlp_out", "z"], list(range(12, 33, 2))
    found = llm.sweep(CORRUPT, CLEAN, LogitDiff(A, B), sites=sites, positions=positions, **QUIET)
    corrupt, clean = ids(llm, CORRUPT), ids(llm, CLEAN)
    taps = list(product(sites, range(3)))
    wanted = expected(oracle, corrupt, clean, taps, positions)
    assert found.dims == ("site", "layer", "position")
    assert found.coords == {"site": sites, "layer": [0, 1, 2], "position": positions}
    assert np.ptp(wanted) > 0.5, "the patches change nothing"
    assert np.abs(found.values.ravel() - wanted).max() < TOLERANCE
    assert found.corrupt == pytest.approx(difference(oracle.logprobs(corrupt))[0], abs=TOLERANCE)
    assert found.clean == pytest.approx(difference(oracle.logprobs(clean))[0], abs=TOLERANCE)
    assert found.noise_floor < TOLERANCE
    assert found.receipts.status == "ok"
    assert (
        found.receipts.applied + found.receipts.cached
        == found.receipts.expected
        == found.values.size
    )
    assert found.tokens[:4] == ("f", "J", "p", "n")


def test_heads_are_patched_one_by_one(llm, oracle):
    positions = [15, 32]
    found = llm.sweep(
        CORRUPT, CLEAN, LogitDiff(A, B), sites="z", heads="all", positions=positions, **QUIET
    )
    taps = [("z", layer) for layer in range(3)]
    rows = oracle.rows(ids(llm, CLEAN))
    cells = [
        Patch(tap, put(place, rows[tap][place], slice(32 * head, 32 * head + 32)))
        for tap, place, head in product(taps, positions, range(2))
    ]
    wanted = difference(oracle.logprobs(ids(llm, CORRUPT), cells))
    assert found.dims == ("site", "layer", "position", "head")
    assert found.values.shape == (1, 3, 2, 2)
    assert np.ptp(wanted) > 0.1
    assert np.abs(found.values.ravel() - wanted).max() < TOLERANCE


def of_feature(nth: int, values: dict[int, float], alpha: float = 1.0) -> Patch:
    """A hook that sets the activation of a feature at some positions, each to its value."""

    def change(hidden: Tensor) -> None:
        for place, value in values.items():
            active = SPARSE.encode(hidden[[place]])[0, nth]
            hidden[place] += (alpha * (value - active)).float() * SPARSE.tensors["W_dec"][nth]

    return Patch(PLACE, change)


@pytest.mark.parametrize(
    ("source", "alpha"), [(CLEAN, 1.0), (CLEAN, 0.25), (0, 1.0), (3.5, 1.0), ("mean:average", -0.5)]
)
def test_features_are_patched_one_by_one(llm, oracle, sparse, source, alpha):
    positions = [15, 30, 32]
    rows = oracle.rows(ids(llm, CLEAN))[PLACE]
    features = SPARSE.encode(rows[positions]).amin(0).topk(4).indices.tolist()
    average = {PLACE: 4 * rows.mean(0), ("resid_pre", 1): rows[0]}
    llm.vectors.register("average", average)
    given = {CLEAN: rows, "mean:average": average[PLACE].expand(33, -1)}
    active = SPARSE.encode(given[source]) if source in given else torch.full((33, 40), source)
    found = llm.sweep(
        CORRUPT, source, LogitDiff(A, B), sae=sparse, features=features, alpha=alpha,
        positions=positions, **QUIET,
    )  # fmt: skip
    cells = [
        of_feature(nth, {place: float(active[place, nth])}, alpha)
        for place, nth in product(positions, features)
    ]
    assert features != sorted(features)
    wanted = difference(oracle.logprobs(ids(llm, CORRUPT), cells))
    assert found.dims == ("site", "layer", "position", "feature")
    assert found.coords["feature"] == features
    assert (found.coords["site"], found.coords["layer"]) == (["resid_post"], [1])
    assert np.ptp(wanted) > 0.05
    assert np.abs(found.values.ravel() - wanted).max() < TOLERANCE
    assert found.receipts.status == "ok"


def test_a_feature_of_a_group_has_the_activation_of_each_of_its_positions(llm, oracle, sparse):
    groups = {"country": list(range(14, 19)), "last": [32]}
    active = SPARSE.encode(oracle.rows(ids(llm, CLEAN))[PLACE])
    features = sorted(active[14:19].amin(0).topk(2).indices.tolist())
    found = llm.sweep(
        CORRUPT, CLEAN, LogitDiff(A, B), sae=sparse, features=features, groups=groups, **QUIET
    )
    cells = [
        of_feature(nth, {place: float(active[place, nth]) for place in places})
        for places, nth in product(groups.values(), features)
    ]
    wanted = difference(oracle.logprobs(ids(llm, CORRUPT), cells))
    assert np.ptp(wanted) > 0.1
    assert np.abs(found.values.ravel() - wanted).max() < TOLERANCE


def test_alpha_interpolates_and_a_mask_chooses_components(llm, oracle):
    tap, place = PLACE, 15
    row = oracle.rows(ids(llm, CLEAN))[tap][place]
    chosen = list(range(5, 40))

    def masked(hidden: Tensor) -> None:
        hidden[place, chosen] = row[chosen]

    changes = [Patch(tap, put(place, row, alpha=0.5)), Patch(tap, masked)]
    wanted = difference(oracle.logprobs(ids(llm, CORRUPT), changes))
    asked: list[dict[str, Any]] = [{"alpha": 0.5}, {"mask": chosen}]
    assert np.ptp(wanted) > 0.01
    for more, value in zip(asked, wanted, strict=True):
        found = llm.sweep(
            CORRUPT, CLEAN, LogitDiff(A, B), layers=1, positions=place, **more, **QUIET
        )
        assert found.values.item() == pytest.approx(value, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("align", "pairs"),
    [
        ("suffix", {32: 33, 16: 17, 0: 1}),
        ("prefix", {32: 32, 16: 16, 0: 0}),
        ({16: 3, -1: -2}, {32: 32, 16: 3, 0: None}),
    ],
)
def test_prompts_of_different_lengths_are_aligned(llm, oracle, align, pairs):
    corrupt, clean = ids(llm, CORRUPT), ids(llm, LONGER)
    assert (len(corrupt), len(clean)) == (33, 34)
    found = llm.sweep(
        CORRUPT, LONGER, LogitDiff(A, B), layers=1, positions=sorted(pairs), align=align, **QUIET
    )
    rows = oracle.rows(clean)[PLACE]
    for value, place in zip(found.values.ravel(), sorted(pairs), strict=True):
        source = pairs[place]
        if source is None:
            assert np.isnan(value)
            continue
        patch = Patch(PLACE, put(place, rows[source]))
        wanted = difference(oracle.logprobs(corrupt, [patch]))[0]
        assert value == pytest.approx(wanted, abs=TOLERANCE)


def test_rows_of_an_output_are_those_of_its_prompt(llm):
    asked = {"layers": [1, 2], "positions": [15, 32], **QUIET}
    metric = Recovered(LogitDiff(A, B))
    wanted = llm.sweep(CORRUPT, CLEAN, metric, **asked)
    output = llm.generate(CLEAN, capture=Capture("all", positions="prompt"), **QUIET)[0]
    found = llm.sweep(CORRUPT, output, metric, **asked)
    assert np.abs(found.values - wanted.values).max() < TOLERANCE
    assert found.clean == pytest.approx(wanted.clean, abs=TOLERANCE)
    bare = llm.sweep(CORRUPT, output.activations, LogitDiff(A, B), **asked)
    assert bare.clean is None
    with pytest.raises(SpecError, match="end of the source prompt"):
        llm.sweep(CORRUPT, output.activations, LogitDiff(A, B), align="suffix", **asked)
    share = (bare.values - bare.corrupt) / (wanted.clean - wanted.corrupt)
    assert np.abs(share - wanted.values).max() < TOLERANCE


def test_the_prefix_cache_serves_what_comes_before_the_first_patched_position(llm):
    llm.reset_prefix_cache()
    places = [10, 40, 100, 170]
    prompt = ids(llm, CORRUPT * 6)
    found = llm.sweep(prompt, prompt[::-1], LogProb(A), layers=[0, 1, 2], positions=places, **QUIET)
    # Blocks of 32 tokens; the unpatched runs have all whole ones but that of the last token.
    before = [0, 32, 96, 160]
    unpatched = 3 * 192
    assert found.receipts.cached_tokens == 3 * sum(before) + unpatched
    again = llm.sweep(prompt, prompt[::-1], LogProb(A), layers=[0, 1, 2], positions=places, **QUIET)
    assert np.abs(found.values - again.values).max() < TOLERANCE


def test_what_cannot_be_done_is_refused_by_its_argument(llm, sparse):
    of_sae = {"sae": sparse, "features": 3, "layers": 1}
    for path, more in (
        ("align", {"source": LONGER}),
        ("source", {"source": "mean:nothing"}),
        ("metric", {"metric": LogProb(100_000)}),
        ("metric.logprob", {"metric": LogProb(" Paris and more")}),
        ("metric", {"source": CORRUPT, "metric": Recovered(LogProb(A))}),
        ("sampling_params", {"sampling_params": object()}),
        ("temperature", {"temperature": 1.0}),
        ("tools", {"tools": []}),
        ("positions", {"positions": Text("Peru")}),
        ("sae", {"sae": "gone", "features": 3}),
        ("sae", {**of_sae, "sae": "top", "sites": "resid_pre"}),
        ("features", {**of_sae, "features": [3, 40]}),
        ("sites", {**of_sae, "sites": "mlp_in"}),
        ("layers", {**of_sae, "layers": 3}),
    ):
        given = {"source": CLEAN, "metric": LogProb(A), **QUIET, **more}
        with pytest.raises(SpecError) as error:
            llm.sweep(CORRUPT, **given)
        assert error.value.path == path


QUESTION = ("The capital of Japan is the city of", "The capital of Italy is the city of")
STREAM = ["resid_pre", "attn_out", "mlp_out"]


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[Any]:
    settings = {"max_num_batched_tokens": 256, "max_num_seqs": 32, "enable_prefix_caching": True}
    with engine(smollm2, **settings, midstream={"sites": [*STREAM, "final_norm"]}) as found:
        yield found


@pytest.mark.model
@pytest.mark.nightly
def test_the_whole_grid_of_smollm2_is_what_hooks_give(smol, smollm2):
    oracle = PatchOracle(smollm2)
    corrupt, clean = (ids(smol, text) for text in QUESTION)
    assert len(corrupt) == len(clean) == 8
    rome, tokyo = (ids(smol, text)[0] for text in (" Rome", " Tokyo"))
    taps = list(product(STREAM, range(30)))
    rows = oracle.rows(clean)
    cells = [Patch(tap, put(place, rows[tap][place])) for tap, place in product(taps, range(8))]
    found = oracle.logprobs(corrupt, cells)
    own, other = oracle.logprobs(corrupt)[0], oracle.logprobs(clean)[0]
    asked = {"sites": STREAM, **QUIET}
    start, end = (float(each[rome] - each[tokyo]) for each in (own, other))
    wanted = (found[:, rome] - found[:, tokyo]).numpy()
    share = smol.sweep(*QUESTION, Recovered(LogitDiff(" Rome", " Tokyo")), **asked)
    assert share.clean == pytest.approx(end, abs=TOLERANCE)
    assert share.corrupt == pytest.approx(start, abs=TOLERANCE)
    assert np.abs(share.values.ravel() * (end - start) + start - wanted).max() < TOLERANCE
    best = share.best(1)[0]
    assert (best["site"], best["token"]) == ("resid_pre", " Japan")
    assert share.noise_floor < 1e-5
    one = smol.sweep(*QUESTION, LogProb(" Rome"), **asked)
    assert np.abs(one.values.ravel() - found[:, rome].numpy()).max() < TOLERANCE
    kl = smol.sweep(*QUESTION, KL(), **asked)
    p, q = other.double(), found.double()
    # It sums over the vocabulary, and reaches 15 nats here.
    error = np.abs(kl.values.ravel() - (p.exp() * (p - q)).sum(-1).numpy()).max()
    assert error < 5 * TOLERANCE
