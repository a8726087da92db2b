"""One engine over several ranks gives what one rank gives."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import controlling, kept_by_ranks, tiny
from support.adversary import Bench, Totals
from support.adversary_edits import catalogue
from support.adversary_mix import Mix, Shape
from support.adversary_run import assert_idle_and_clean
from support.engines import GPU_MEMORY, engine, greedy, tokens
from support.inner_oracle import INNER, InnerOracle
from support.nightly import rounds
from support.oracle import Oracle
from support.oracle_edits import EVERY_SITE
from support.ranks import GPUS, HOOKED, MEASURE, PIPELINE, ranks, usage
from support.updating import check_versions, steer, vector

from midstream import Capture, Controller, Gate, Probe, Replace, Steer, Threshold
from midstream.errors import SpecError
from midstream.plan.operations import KINDS_BY_OP
from midstream.sites import INNER as INSIDE

SEED = int(os.environ.get("MIDSTREAM_ADVERSARY_SEED", "20261122"))
REQUESTS = rounds(suite=24, nightly=80)
CHUNK, LONGEST = 48, 192
BLOCKS = 14  # of 32 tokens, one of which is nobody's: two long requests and a bit
TENSOR = {"tensor_parallel_size": 2}
DEVICE_ROWS = 64
COMMON = {"max_model_len": LONGEST, "max_num_seqs": 8, **GPU_MEMORY}


# The two heads of queries and the neurons are split over two ranks; the one of keys both have.
EVERY = [*EVERY_SITE, *(site for site in INSIDE if site != "router")]
SPLIT = {"q", "rot_q", "z", "mlp_pre", "mlp_pre_linear", "mlp_act"}


def settings(**more: Any) -> dict[str, Any]:
    return {
        "sites": EVERY,
        "check_ranks": True,
        "gate_states": 8,
        "doses": 64,
        "controllers": controlling.DECLARED,
        "device_rows": DEVICE_ROWS,
        **more,
    }


def mixed(**more: Any) -> dict[str, Any]:
    return {
        "enable_prefix_caching": True,
        "block_size": 32,
        "num_gpu_blocks_override": BLOCKS,
        "max_num_batched_tokens": CHUNK,
        "disable_log_stats": False,
        **COMMON,
        **more,
    }


class Model:
    def __init__(self, name: str, folder: Path, single: Any) -> None:
        self.path = tiny.make(name, folder)
        self.hooks = InnerOracle(self.path, INNER[name])
        self.single = single
        draw = torch.Generator().manual_seed(SEED)
        self.families = tuple(
            tuple(torch.randint(3, tiny.VOCAB, (140,), generator=draw).tolist()) for _ in range(2)
        )

    def mix(self, stages: dict[int, int], split: set[str], count: int) -> Mix:
        # Where a score may fall on either side of a threshold, no edit jumps there.
        found = catalogue(self.hooks, self.families[0][:24], SEED, jumps=not GPUS, memory=True)
        edits = tuple(
            edit
            for edit in found.edits
            if not _reads_another_stage(edit, stages) and not _needs_several_ranks(edit, split)
        )
        probes = tuple(probe for probe in found.probes if probe.sites.names[0] not in split)
        shape = Shape(self.families, LONGEST, CHUNK, sampled=False)
        return Mix(SEED, count, shape, replace(found, edits=edits, probes=probes))


def _reads_another_stage(edit: Any, stages: dict[int, int]) -> bool:
    """Whether it is a gate whose score is on another stage, which is refused."""
    read = edit.probe.tap if isinstance(edit, Gate) else None
    return read is not None and stages[read[1]] != stages[edit.layers.indices[0]]


def _needs_several_ranks(edit: Any, split: set[str]) -> bool:
    """Whether it reads a whole vector that the ranks have in parts, which is refused."""
    if isinstance(edit, Gate):
        read = edit.probe.tap or (edit.edit.sites.names[0], 0)
        return read[0] in split or _needs_several_ranks(edit.edit, split)
    if edit.sites.names[0] not in split or edit.heads:
        return False
    return edit.op not in ("steer", "scale", "replace") or getattr(edit, "norm", None) is not None


@pytest.fixture(scope="module")
def alone(tiny_models: Path) -> Iterator[Callable[[str], Model]]:
    with ExitStack() as stack:

        @functools.cache
        def make(name: str) -> Model:
            single = engine(
                tiny.make(name, tiny_models),
                enable_prefix_caching=False,
                max_num_batched_tokens=1024,
                midstream={"sites": EVERY, "gate_states": 8},
                **COMMON,
            )
            return Model(name, tiny_models, stack.enter_context(single))

        yield make


@pytest.fixture(scope="module")
def model(alone: Callable[[str], Model]) -> Model:
    return alone("llama")


def run_the_mix(model: Model, llm: Any, folder: Path, count: int = REQUESTS) -> None:
    parallel = any(worker.tensor_rank for worker in llm.info.workers)
    stages = {layer: w.stage for w in llm.info.workers for _, layer in w.taps}
    mix = model.mix(stages, SPLIT if parallel else set(), count)
    drawn = {edit.op for edit in mix.catalogue.edits}
    # The model has no router and no SAE, and the reference model's hooks see no logits.
    assert drawn == set(KINDS_BY_OP) - {"route", "bias", "reconstruct"}, f"the mix has {drawn}"
    totals = Totals()
    Bench(llm, model.single, model.hooks, MEASURE, CHUNK, folder, HOOKED).run(mix, totals)
    assert totals.requests == count
    shown = {
        "edited": 2, "captured": 3, "probed": 8, "given_up": 40, "chunked": 5,
        "held_against_hooks": 15, "inner_edits": 5, "inner_rows": 5, "of_heads": 10,
    }  # fmt: skip
    for name in shown if count == REQUESTS else ("edited", "captured", "probed"):
        few = f"{name}: the mix shows little\n{totals}"
        assert getattr(totals, name) > count / shown[name], few
    assert totals.parted < REQUESTS / 20, totals
    # How many of the mix's requests find their prompt cached depends on timing. These do.
    row = torch.full((tiny.HIDDEN,), 0.5)
    captured = _cached_and_alone(
        model, llm, {}, capture=Capture("all", list(EVERY_SITE), positions="last_row")
    )
    taps = [set(output.activations) for output in captured]
    assert taps[0] == taps[1]
    for tap in taps[0]:
        cached, alone = (output.activations[tap] for output in captured)
        assert MEASURE.error(cached, alone) < MEASURE.rows
    edited = {"steer": Steer(row, layer=0), "probes": Probe(row, layer=0)}
    cached, alone = (
        output.probes["probe"] for output in _cached_and_alone(model, llm, edited, **edited)
    )
    assert len(cached) == len(alone)
    assert MEASURE.error(cached, alone) < MEASURE.rows


def _cached_and_alone(
    model: Model, llm: Any, before: dict[str, Any], **asked: Any
) -> tuple[Any, Any]:
    """Return what a request gives whose prompt `before` had computed, and alone on one rank."""
    prompt = tokens(model.families[1][:70])
    llm.generate(prompt, greedy(1, detokenize=False), use_tqdm=False, **before)
    cached, alone = (
        some.generate(prompt, greedy(4, detokenize=False), use_tqdm=False, **asked)[0]
        for some in (llm, model.single)
    )
    assert cached.num_cached_tokens >= CHUNK
    assert not alone.num_cached_tokens
    return cached, alone


@pytest.fixture(scope="module")
def tensor(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    sinks = {"npz": {"root": str(tmp_path_factory.mktemp("npz"))}}
    with ranks(model.path, **mixed(**TENSOR, midstream=settings(sinks=sinks))) as llm:
        yield llm


def test_two_tensor_ranks_give_what_one_rank_gives(model, tensor, tmp_path):
    assert [(w.stage, w.tensor_rank) for w in tensor.info.workers] == [(0, 0), (0, 1)]
    run_the_mix(model, tensor, tmp_path)


def one(llm: Any, model: Model, prompt: int, **asked: Any) -> Any:
    ids = model.families[0][prompt : prompt + 20]
    found = llm.generate(tokens(ids), greedy(4, detokenize=False), use_tqdm=False, **asked)[0]
    assert_idle_and_clean(llm)
    return found


@pytest.mark.parametrize(
    "codec",
    ["raw", "full8"]
    + [pytest.param(name, marks=pytest.mark.nightly) for name in ("topk8:k=8", "rp8:k=16")],
)
def test_shards_make_up_what_the_first_rank_gathers(model, tensor, codec):
    steer = [Steer(torch.full((tiny.HIDDEN,), 0.5), layer=1)]
    found = {}
    for nth, way in enumerate(("gathered", "sharded")):
        # Alone, so that both are computed in steps of the same shape; nothing of either is cached.
        assert tensor.reset_prefix_cache()
        found[way] = one(
            tensor, model, 3, steer=steer,
            capture=Capture("all", list(EVERY_SITE), codec=codec, return_=way),
        )  # fmt: skip
        last = [worker["steps"]["ring_last"] for worker in usage(tensor)]
        every = len(EVERY_SITE) * tiny.LAYERS
        assert last == ([every, 0], [every - every // 2, every // 2])[nth]
    gathered, sharded = found["gathered"].activations, found["sharded"].activations
    assert list(gathered) == list(sharded)
    assert len(list(gathered)) == len(EVERY_SITE) * tiny.LAYERS
    for tap in gathered:
        assert gathered.positions_of(*tap).tolist() == list(range(23))
        mine, theirs = gathered.encoded(*tap), sharded.encoded(*tap)
        if GPUS:
            # Each rank compiles kernels for itself, and their sums may be in other orders.
            error = MEASURE.error(gathered[tap], sharded[tap])
            assert error < (1e-5 if codec == "raw" else MEASURE.rows)
        else:
            assert torch.equal(mine, theirs)


def test_each_file_of_sharded_rows_is_of_one_rank(model, tensor):
    written = {}
    for way in ("gathered", "sharded"):
        assert tensor.reset_prefix_cache()
        capture = Capture("all", codec="full8", return_=way, sink="npz")
        manifest = one(tensor, model, 5, capture=capture).activation_manifest
        assert manifest["return"] == way
        ranks_of = [each["ranks"] for each in manifest["files"]]
        assert ranks_of == ([[0], [0], [0]] if way == "gathered" else [[0], [1], [0]])
        written[way] = [np.load(each["path"]) for each in manifest["files"]]
    for gathered, sharded in zip(written["gathered"], written["sharded"], strict=True):
        assert set(gathered) == set(sharded)
        for name in gathered:
            np.testing.assert_array_equal(gathered[name], sharded[name])


def test_shards_of_captures_that_differ_by_position_come_together(model, tensor):
    captures = [
        Capture([0, 2], ["resid_post", "mlp_out"], "prompt"),
        Capture(1, "resid_mid", [0, 5, -1]),
        Capture("all", "resid_pre", "generated"),
    ]
    here = one(tensor, model, 40, capture=[captures])
    expected = one(model.single, model, 40, capture=[captures])
    assert list(here.activations) == list(expected.activations)
    for tap, rows in expected.activations.items():
        assert torch.equal(
            here.activations.positions_of(*tap), expected.activations.positions_of(*tap)
        )
        assert MEASURE.error(here.activations[tap], rows) < MEASURE.rows


def test_controllers_change_edits_on_both_ranks_before_the_same_step(model, tensor):
    check_controllers(tensor, model)


def check_controllers(llm: Any, model: Model) -> None:
    (own, hook), (calm, calm_hook) = steer(vector(1), 1, 2.0), steer(vector(2), 0, 3.0)
    prompt, last = list(model.families[0][30:50]), tiny.LAYERS - 1
    probe = Probe(vector(3), last, name="p")
    asked = {"edits": own, "probes": probe, "capture": Capture("all"), "use_tqdm": False}
    params = greedy(16, detokenize=False)
    free = model.single.generate(tokens(prompt), params, **asked)[0]
    middle = float(free.probes["p"][len(prompt) :].median())
    controllers = [
        Threshold("p", above=middle, on=0.5, off=1.5),
        Controller("script", edits={"calm": calm}),
        Controller("halving"),
        Controller("raises", on_error="off"),
        None,
    ]
    outputs = llm.generate(
        [tokens(prompt)] * len(controllers), params, controller=controllers, **asked
    )
    assert_idle_and_clean(llm)
    oracle = Oracle(model.path, "model.layers", "post_attention_layernorm")
    sets = {"": [hook], "calm": [calm_hook]}
    for output in outputs:
        (found,) = output.outputs
        check_versions(oracle, prompt, found, sets, is_greedy=not GPUS)
    threshold, script, halving, failed, plain = (output.outputs[0] for output in outputs)
    assert len(threshold.receipt.versions) > 1
    assert len(halving.receipt.versions) > 5
    assert script.stop_reason == "controller:script"
    assert [one.source for one in script.receipt.versions] == [
        "request", "controller:script/calm", "controller:script",
    ]  # fmt: skip
    assert [one.source for one in failed.receipt.versions] == [
        "request", "controller:raises failed",
    ]  # fmt: skip
    assert plain.receipt.versions == ()
    assert plain.token_ids == free.outputs[0].token_ids or GPUS


def test_a_cached_prompt_has_what_one_rank_gives_without_a_cache(model, tensor):
    kept_by_ranks.check_kept(tensor, model.single)


def test_doses_over_two_ranks_are_those_of_plain_hooks(model, tensor):
    kept_by_ranks.check_doses(tensor, model.path)


def test_parameters_are_put_together_from_those_of_the_ranks(tensor, model):
    for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"):
        assert torch.equal(tensor.parameter(name), model.single.parameter(name))


def test_captures_of_one_request_leave_in_one_way(tensor, model):
    both = [Capture(0, return_="gathered"), Capture(1, return_="sharded")]
    with pytest.raises(SpecError, match=r"\[1\]\.return: sharded, and that of .* is gathered"):
        one(tensor, model, 0, capture=[both])


@pytest.mark.parametrize(
    ("name", "args", "places"),
    [
        pytest.param(
            "llama",
            {**TENSOR, "midstream": settings(**{"return": "gathered"})},
            [(0, 0), (0, 1)],
            id="gathered",
            # There it is held against what is sharded, above, to the bit.
            marks=pytest.mark.skipif(not GPUS, reason="takes a minute on two cores"),
        ),
        pytest.param(
            "llama",
            # Tensor-parallel ranks measure no dose of what is split over them, and refuse it then.
            {**PIPELINE, "midstream": settings(max_dose=1e6)},
            [(0, 0), (1, 0)],
            id="pipeline",
        ),
        pytest.param(
            "mixtral",
            {**TENSOR, "enable_expert_parallel": True},
            [(0, 0), (0, 1)],
            id="experts",
            marks=pytest.mark.skipif(not GPUS, reason="vLLM on a CPU ends with it, taps or none"),
        ),
        pytest.param(
            "llama",
            {**TENSOR, "distributed_executor_backend": "ray"},
            [(0, 0), (0, 1)],
            id="ray-executor",
            marks=pytest.mark.skipif(
                GPUS < 2 or not find_spec("ray"), reason="vLLM needs Ray and two GPUs"
            ),
        ),
        pytest.param(
            "llama",
            {**TENSOR, **PIPELINE},
            [(0, 0), (0, 1), (1, 0), (1, 1)],
            id="tensor-pipeline",
            marks=pytest.mark.skipif(GPUS < 4, reason="needs four GPUs"),
        ),
    ],
)
def test_ranks_give_what_one_rank_gives(alone, name, args, places, tmp_path):
    model = alone(name)
    with ranks(model.path, **mixed(**{"midstream": settings(), **args})) as llm:
        assert [(w.stage, w.tensor_rank) for w in llm.info.workers] == places
        run_the_mix(model, llm, tmp_path, REQUESTS if GPUS else rounds(suite=8, nightly=REQUESTS))
        if places[-1][0]:
            kept_by_ranks.check_kept(llm, model.single)
            kept_by_ranks.check_doses(llm, model.path)
            check_no_score_of_two_stages(llm, model)
            check_device_rows(llm, model)
            check_controllers(llm, model)


def check_no_score_of_two_stages(llm: Any, model: Model) -> None:
    rows = torch.stack([vector(nth) for nth in range(tiny.LAYERS)])
    probe = Probe(rows, layer=range(tiny.LAYERS))
    with pytest.raises(SpecError, match="layer 0 is on another pipeline stage than the last"):
        one(llm, model, 0, probes=probe)
    gate = Gate(Steer(vector(3), tiny.LAYERS - 1), probe)
    with pytest.raises(SpecError, match="layer 0, which is on another pipeline stage"):
        one(llm, model, 0, edits=gate)


def test_each_rank_of_a_tensor_parallel_group_has_the_rows_that_stay_on_the_device(model, tensor):
    check_device_rows(tensor, model)
    with pytest.raises(SpecError, match=r"z is split over the ranks|as wide as the residual"):
        one(tensor, model, 0, capture=Capture([1], "z", "prompt", reduce="device"))
    source = one(tensor, model, 0, capture=Capture([1], positions="prompt", reduce="device"))
    row = source.activations.on_device("resid_post", 1, [3])
    with pytest.raises(SpecError, match=r"edits.*rows: z is split over the ranks"):
        one(tensor, model, 0, edits=Replace(row, 1, site="z"))


def check_device_rows(llm: Any, model: Model) -> None:
    """Rows that stay on the device do what the same rows do by value, on one rank."""
    stages = {layer: worker.stage for worker in llm.info.workers for _, layer in worker.taps}
    last = tiny.LAYERS - 1
    for number in range(1 + DEVICE_ROWS // 40):  # freed rows' room is used again
        rows, wanted = (
            some.generate(
                tokens(model.families[0][number : number + 20]),
                greedy(1, detokenize=False),
                capture=Capture([0, last], positions="prompt", reduce=reduce),
                use_tqdm=False,
            )[0].activations
            for some, reduce in ((llm, "device"), (model.single, ""))
        )
        for layer, into in ((0, 0), (last, last), (0, last))[number:]:
            by_value = wanted["resid_post", layer][[7, 2]]
            here = rows.on_device("resid_post", layer, [7, 2])
            if stages[layer] != stages[into]:
                with pytest.raises(SpecError, match="layer 0 are on another pipeline stage than"):
                    one(llm, model, 1, edits=Replace(here, into, positions=[4, 5]))
                continue
            asked = {"capture": Capture(last, positions="prompt")}
            mine = one(llm, model, 1, edits=Replace(here, into, positions=[4, 5]), **asked)
            theirs = model.single.generate(
                tokens(model.families[0][1:21]),
                greedy(4, detokenize=False),
                edits=Replace(by_value, into, positions=[4, 5]),
                use_tqdm=False,
                **asked,
            )[0]
            found, other = (out.activations["resid_post", last] for out in (mine, theirs))
            assert mine.receipt.status == theirs.receipt.status == "ok"
            assert MEASURE.error(found, other) < MEASURE.rows
        del rows
