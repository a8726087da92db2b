"""Attention weights, computed again from the paged cache, against transformers' eager attention."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine.asking import ask_all
from engine.attention_served import (
    MODELS,
    TOLERANCE,
    AttentionServed,
    difference,
    reference,
)
from engine.refusals import assert_refused
from support.engines import HAS_GPU, engine, greedy
from support.inner_served import PROMPTS, ROOM
from support.updating import Stepped

from midstream import Attention, Capture, Probe, Scale
from midstream.errors import SpecError
from midstream.plan import Entropy, Mass, TopKeys
from midstream.results.readouts.attention import AttentionResults, AttentionRows

LONG = PROMPTS[2] * 5  # more than a step takes, and than a sliding window
EVERYTHING = [
    Attention("all", reduce="full"),
    Attention("all", heads=[1], reduce=TopKeys(7), name="top"),
    Attention([1, 2], heads=0, queries=slice(3, None), reduce=Mass(slice(2, 9)), name="mass"),
    Attention(-1, queries=["last_prompt", "generated"], reduce=Entropy(), name="entropy"),
    Attention([1, 2], heads=[1, 0], queries=slice(1, None), reduce="scores", name="scores"),
]
PROBES = [
    Probe(attention=Mass(slice(2, 9)), layer=1, heads=[0, 3], name="mass"),
    Probe(attention=Mass(slice(0, 4)), layer=1, head=2, phase="generated", name="generated"),
    Probe(attention=Entropy(), layer=-1, positions=slice(3, None), name="entropy"),
]


def serve(
    name: str, folder: Any, sinks: dict[str, Any] | None = None, **more: Any
) -> Iterator[AttentionServed]:
    path, model = reference(name, folder)
    own = {"sites": ["resid_post", MODELS[name][1]], "sinks": sinks or {}}
    with engine(path, **ROOM, midstream=own, **more) as llm:
        yield AttentionServed(model, llm)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttentionServed]:
    folder = tmp_path_factory.mktemp("attention")
    sinks = {kind: {"root": str(folder / kind)} for kind in ("npz", "store")}
    yield from serve("llama", folder, sinks=sinks)


@pytest.fixture(autouse=True)
def fresh(request: pytest.FixtureRequest) -> None:
    if "served" in request.fixturenames:
        assert request.getfixturevalue("served").llm.reset_prefix_cache()


@pytest.mark.parametrize("name", list(MODELS))
def test_weights_are_those_of_transformers(name, tmp_path, request):
    if name == "llama":
        check_weights(request.getfixturevalue("served"))
    else:
        for mine in serve(name, tmp_path):
            check_weights(mine)


def check_weights(mine: AttentionServed) -> None:
    prompts = [LONG, *PROMPTS]
    for asked in (EVERYTHING, [replace_queries(one) for one in EVERYTHING]):
        for prompt, output in zip(prompts, mine.ask(prompts, asked), strict=True):
            assert output.receipt.status == "ok"
            assert not hasattr(output, "activations")
            assert mine.assert_is(prompt, output, asked) <= TOLERANCE


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.nightly) for one in ("llama", "gemma2")]
)
def test_compiled_too(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "compiled"))
    for mine in serve(name, tmp_path, enforce_eager=False):
        assert int(mine.llm.llm_engine.vllm_config.compilation_config.mode) > 0
        check_weights(mine)


def replace_queries(one: Attention) -> Attention:
    """The same of the last queries alone, so that most of a prompt is served from the cache."""
    return Attention(
        one.layers, one.heads, ["last_prompt", "generated"], reduce=one.reduce, name=one.name
    )


def test_probes_read_the_means_of_weights(served):
    prompts = [LONG, *PROMPTS]
    vector = torch.randn(64, generator=torch.Generator().manual_seed(5))
    linear = Probe(vector, 1, name="linear")
    for capture in (None, [EVERYTHING[0], Capture([1], "resid_post")]):
        probes = [[*PROBES[:1], linear, *PROBES[1:]]] * len(prompts)
        outputs = served.ask(prompts, capture, probes=probes)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.receipt.status == "ok"
            assert served.scores_are(prompt, output, PROBES) <= TOLERANCE
            read = {(one.name, one.site, one.layer) for one in output.receipt.probed}
            assert ("mass", "attention", 1) in read
            if capture is not None:
                assert served.assert_is(prompt, output, capture[:1]) <= TOLERANCE
                expected = output.activations["resid_post", 1] @ vector
                torch.testing.assert_close(output.probes["linear"], expected, rtol=1e-4, atol=1e-3)
    (output,) = served.ask([LONG], None, probes=PROBES[1])
    assert output.num_cached_tokens >= 64
    assert output.probes.positions_of("generated").tolist() == [len(LONG) + nth for nth in range(3)]
    assert served.scores_are(LONG, output, PROBES[1:2]) <= TOLERANCE


def test_sinks_get_the_weights_that_outputs_have(served):
    names = ["full", "top", "mass", "entropy", "scores"]
    for layout in ("per_file", "packed", "sharded"):
        stored = [
            Attention(one.layers, one.heads, one.positions, reduce=one.reduce, name=name,
                      sink="npz", tag=layout, layout=layout, metadata={"nth": 3})
            for name, one in zip(names, EVERYTHING, strict=True)
        ]  # fmt: skip
        vectors = Capture([1], "resid_post", sink="npz", tag=layout, layout=layout)
        asked = [*stored, vectors, Capture([2], "resid_post"), EVERYTHING[0]]
        (output,) = served.ask([LONG], asked)
        result = output.capture_results["npz"]
        assert result.status == output.receipt.status == "ok"
        assert output.activations.keys() == (("resid_post", 2),)
        assert set(output.attention) == {("", 0), ("", 1), ("", 2)}
        assert served.assert_is(LONG, output, EVERYTHING[:1]) <= TOLERANCE
        files = {(one["site"], one["layer"]): one for one in result.manifest["files"]}
        assert result.manifest["metadata"] == {"nth": 3}
        weights = served.weights(LONG, output)
        for one in stored:
            layers = [layer for site, layer in files if site == f"attention.{one.name}"]
            every = range(3) if one.layers.indices == "all" else one.layers.indices
            assert layers == [layer % 3 for layer in every]
            for layer in layers:
                rows = kept(files.pop((f"attention.{one.name}", layer)))
                assert difference(rows, one, weights[layer], LONG) <= TOLERANCE
        ((tap, one),) = files.items()
        assert tap == ("resid_post", 1)
        assert one["rows"] == len(LONG) + 3


def kept(file: dict[str, Any]) -> AttentionRows:
    """Attention of one layer, as a manifest describes it."""
    start = file.get("prefix", "")
    with np.load(file["path"]) as found:
        arrays = {name: found[start + name] for name in file["arrays"]}
    assert file["rows"] == len(arrays["positions"])
    for name, form in file["arrays"].items():
        assert form == {"shape": list(arrays[name].shape), "dtype": str(arrays[name].dtype)}
    heads = tuple(arrays.pop("heads").tolist())
    tensors = {name: torch.from_numpy(each) for name, each in arrays.items()}
    return AttentionRows(
        file["reduce"], tensors["values"], tensors.get("keys"), tensors["positions"], heads
    )


def test_sinks_that_keep_vectors_alone_are_rejected_by_name(served):
    with pytest.raises(SpecError, match=r"^capture.*sink: the sink 'store' does not.*, `npz` can"):
        served.ask([LONG], [Attention(1, reduce=Entropy(), sink="store")])
    with pytest.raises(SpecError, match=r"^stream: stream=True requires the sink \"memory\""):
        Attention(1, reduce=Entropy(), sink="npz", stream=True)


def test_vectors_beside_attention_stay_what_they_are(served):
    captures = [Capture("all", ["resid_post", "rot_q"]), *EVERYTHING]
    (plain,) = served.ask([LONG], captures[:1])
    assert served.llm.reset_prefix_cache()
    (output,) = served.ask([LONG], captures)
    assert output.activations.keys() == plain.activations.keys()
    for tap, rows in plain.activations.items():
        assert torch.equal(output.activations[tap], rows)
        assert torch.equal(
            output.activations.positions_of(*tap), plain.activations.positions_of(*tap)
        )
    assert served.assert_is(LONG, output, EVERYTHING) <= TOLERANCE
    read = Capture([1], "rot_q", positions=slice(4, 9), codec="full8")
    (output,) = served.ask([PROMPTS[2]], [read, EVERYTHING[1]])
    assert output.activations.codec.spec == "full8"
    assert served.assert_is(PROMPTS[2], output, EVERYTHING[1:2]) <= TOLERANCE


def test_requests_with_and_without_attention_run_together(served):
    prompts = [LONG, PROMPTS[0], PROMPTS[1], PROMPTS[2], LONG[7:]]
    asked = [EVERYTHING, None, [EVERYTHING[2]], Capture([1]), [EVERYTHING[0], EVERYTHING[3]]]
    outputs = ask_all(
        served.llm, prompts, [greedy(3 + nth, detokenize=False) for nth in range(5)], capture=asked
    )
    for prompt, output, mine in zip(prompts, outputs, asked, strict=True):
        if isinstance(mine, list):
            assert served.assert_is(prompt, output, mine) <= TOLERANCE
        else:
            assert getattr(output, "attention", None) is None


def test_preempted_requests_have_each_row_once(served):
    run, prompts = Stepped(served.llm), {"first": LONG, "second": PROMPTS[2]}
    for name, prompt in prompts.items():
        params = greedy(8, detokenize=False)
        run.add(name, prompt, params, capture=EVERYTHING, probes=PROBES)
    run.step(5)  # both have generated
    assert served.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    for name, output in run.finish().items():
        assert output.receipt.status == "ok"
        assert served.assert_is(prompts[name], output, EVERYTHING) <= TOLERANCE
        assert served.scores_are(prompts[name], output, PROBES) <= TOLERANCE


def test_in_bfloat16_the_weights_are_those_of_the_queries_and_keys(tmp_path):
    """Which are not quite those of a float32 model: the reference is what is captured."""
    path, _ = reference("llama", tmp_path)
    settings = {**ROOM, "dtype": "bfloat16", "midstream": {"sites": ["rot_q", "rot_k"]}}
    with engine(path, **settings) as llm:
        captures = [Attention("all", reduce="full"), Capture("all", ["rot_q", "rot_k"])]
        (output,) = AttentionServed(None, llm).ask([LONG], captures)
        for layer in range(3):
            q, k = (output.activations[site, layer].float() for site in ("rot_q", "rot_k"))
            expected = softmax_of(q, k)
            assert (output.attention[layer].values - expected).abs().max() <= 1e-5


@pytest.mark.skipif(
    not (HAS_GPU or torch.cpu._is_avx512_supported()), reason="vLLM has no such cache here"
)
@pytest.mark.parametrize("name", ["fp8", pytest.param("fp8_e5m2", marks=pytest.mark.nightly)])
def test_of_a_quantised_cache_the_weights_are_those_of_what_it_holds(name, tmp_path, monkeypatch):
    if HAS_GPU and name == "fp8_e5m2":
        pytest.skip("vLLM's FlashAttention has no such cache")
    from vllm.model_executor.layers.attention import attention

    default_scales = attention.set_default_quant_scales

    def with_scales(layer: Any, register_buffer: bool = False) -> None:
        default_scales(layer, register_buffer)
        for what, scale in (("k", 0.25), ("v", 4.0)):
            getattr(layer, f"_{what}_scale").fill_(scale)
            setattr(layer, f"_{what}_scale_float", scale)

    monkeypatch.setattr(attention, "set_default_quant_scales", with_scales)
    path, _ = reference("llama", tmp_path)
    sites = ["rot_q", "rot_k", "v", "z"]
    settings = {**ROOM, "kv_cache_dtype": name, "midstream": {"sites": sites}}
    if HAS_GPU:
        settings["dtype"] = "bfloat16"
    with engine(path, **settings) as llm:
        captures = [Attention("all", reduce="full"), Capture("all", sites)]
        (output,) = AttentionServed(None, llm).ask([LONG], captures)
        assert output.receipt.status == "ok"
        (quantised,) = llm.apply_model(has_quantised_queries)
    for layer in range(3):
        q, k, v, z = (output.activations[site, layer].float() for site in sites)
        if quantised:
            q = q.to(torch.float8_e4m3fn).float()
        exact = softmax_of(q, k)
        k, v = stored(k, name, 0.25), stored(v, name, 4.0).repeat_interleave(2, 1)
        expected = softmax_of(q, k)
        assert (exact - expected).abs().max() >= 1e-3
        values = output.attention[layer].values
        assert (values - expected).abs().max() <= 1e-5
        if not HAS_GPU:
            assert (torch.einsum("qhk,khd->qhd", values, v) - z).abs().max() <= TOLERANCE


def softmax_of(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Weights of queries [queries, heads, head_dim] over keys of half as many heads."""
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, 1)) * q.shape[-1] ** -0.5
    late = torch.arange(len(q))[None, None] > torch.arange(len(q))[:, None, None]
    return torch.softmax(scores.masked_fill(late, -torch.inf), -1)


def has_quantised_queries(model: Any) -> bool:
    return any(getattr(each, "query_quant", None) is not None for each in model.modules())


def stored(values: torch.Tensor, name: str, scale: float) -> torch.Tensor:
    """What a cache holds of some numbers; vLLM's CPU backend rounds them down."""
    dtype = torch.float8_e5m2 if name == "fp8_e5m2" else torch.float8_e4m3fn
    exact = values / scale
    found = exact.to(dtype)
    if not HAS_GPU:
        above = found.float().abs() > exact.abs()
        found = (found.view(torch.uint8) - above.byte()).view(dtype)
    return found.float() * scale


def test_edits_of_queries_and_keys_are_in_the_weights(served):
    """Queries of zero attend to all keys alike."""
    asked = Attention([1], queries="prompt", reduce="full")
    edit = Scale(0.0, layer=1, site="rot_q", head=2)
    (output,) = served.ask([PROMPTS[2]], asked, edits=edit)
    rows = output.attention[1]
    for nth, position in enumerate(rows.positions.tolist()):
        assert torch.allclose(rows.values[nth, 2, : position + 1], torch.tensor(1 / (position + 1)))


def test_wrong_requests_are_refused(served, llm):
    two = [EVERYTHING[0], Attention([1], reduce=Entropy())]
    assert_refused(
        lambda asked: served.ask([PROMPTS[0]], asked),
        [
            (Attention([9], reduce="full"), "capture[0].layers", "the model has 3 layers"),
            (Attention([0], heads=[4], reduce="full"), "capture[0].heads", "4 heads"),
            (Attention([0], queries=300, reduce="full"), "capture[0].queries", "300"),
            (
                Attention([0], reduce=Mass("last_row")),
                "capture[0].reduce.positions",
                "known before",
            ),
            (Attention([0], reduce=Mass(200)), "capture[0].reduce.positions", "200"),
            (two, "capture[0][1].name", "another `name`"),
            (Attention([0], reduce="full", stream=True), "capture[0].stream", "AsyncLLM"),
        ],
    )
    for asked in ({"probes": PROBES[0]}, {"capture": Attention([0], reduce="full")}):
        with pytest.raises(SpecError, match=r'add "rot_q" to midstream.s setting `sites`'):
            ask_all(llm, [PROMPTS[0]], 2, **asked)


def test_results_are_the_same_as_json(served):
    (output,) = served.ask([PROMPTS[2]], EVERYTHING)
    again = AttentionResults(AttentionResults.from_json(output.attention.to_json()), 3)
    assert repr(again) == repr(output.attention)
    for key, rows in output.attention.items():
        mine = again[key]
        assert (mine.reduce, mine.heads) == (rows.reduce, rows.heads)
        assert torch.equal(mine.values, rows.values)
        assert torch.equal(mine.positions, rows.positions)
        assert mine.keys is rows.keys is None or torch.equal(mine.keys, rows.keys)
    assert again[-1] is again["", 2]
    with pytest.raises(KeyError, match="there is no attention of 7; there is 0, 1, 2"):
        again[7]
