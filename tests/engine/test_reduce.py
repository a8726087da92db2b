"""Rows that are reduced on the device, against reductions in float64 of transformers' rows."""

from typing import Any

import pytest
import torch
from engine.asking import ask_all
from engine.refusals import assert_refused
from support import tiny
from support.engine_view import inspect
from support.engines import HAS_GPU, greedy
from support.oracle_edits import EditOracle
from support.updating import Stepped
from torch import Tensor
from vllm import SamplingParams

from midstream import Capture, Probe, Steer
from midstream.errors import SpecError

LONG = [(13 * nth) % 190 + 3 for nth in range(150)]
SHORT = [5, 17, 33, 101, 8, 77, 54, 23, 9]
OTHER = [150, 44, 12, 13, 99, 180, 64]
# Of the model's own rounding; see `tests/unit/runtime/worker/test_reductions.py` for the sums.
TOLERANCE = 5e-4 if HAS_GPU else 1e-5
KINDS = ("mean", "max", "moments", "norm")


def reduced(rows: Tensor, kind: str) -> Tensor:
    """What `reduce` is defined to return."""
    rows = rows.double()
    if kind == "norm":
        return rows.square().sum(1, keepdim=True).sqrt()
    if kind == "max":
        return rows.max(0, keepdim=True).values
    mean = rows.mean(0, keepdim=True)
    if kind == "mean":
        return mean
    return torch.cat([mean, (rows - mean).square().mean(0, keepdim=True)])


def error_of(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    assert found.dtype == torch.float32
    return float((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1))


def assert_reduced(
    oracle: EditOracle, prompt: list[int], one: Any, asked: Capture, where: list[int]
) -> None:
    """All taps of a capture, of one completion."""
    seen = oracle.run([*prompt, *one.token_ids][:-1])
    taps = [tap for tap in one.activations if tap[0] in asked.sites.names]
    assert taps
    for tap in taps:
        wanted = reduced(seen.values[tap][where], asked.reduce)
        assert error_of(one.activations[tap], wanted) <= TOLERANCE, (tap, asked.reduce)
        positions = one.activations.positions_of(*tap).tolist()
        last = [where[-1]] * (2 if asked.reduce == "moments" else 1)
        assert positions == (where if asked.reduce == "norm" else last)
    named = [c for c in one.receipt.captured if c.site.startswith(f"{asked.reduce}.")]
    assert len(named) == len(taps)
    assert {(c.expected, c.actual) for c in named} == {(len(where), len(where))}
    assert one.receipt.status == "ok"


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_several_steps(llm, oracle, kind):
    inner = slice(70, 140, 3)
    for where, positions in [(range(150), "prompt"), (range(150)[inner], inner)] * 2:
        asked = Capture("all", reduce=kind, positions=positions)
        (output,) = ask_all(llm, [LONG], 3, capture=asked)
        assert_reduced(oracle, LONG, output.outputs[0], asked, list(where))
        assert output.activations.layers == (0, 1, 2)


def test_sites_of_other_requests_and_whole_rows_beside_them(wide, oracle):
    mean = Capture("all", ["resid_pre", "mlp_out"], "prompt", reduce="mean")
    moments = Capture([0, 2], "attn_out", slice(1, 6), reduce="moments")
    whole = Capture([1], "resid_post")
    steer = Steer(torch.ones(tiny.HIDDEN), 0, positions="generated")
    probe = Probe(torch.ones(tiny.HIDDEN), 1, name="p")
    plans = [
        {"capture": [mean, whole, moments]},
        {"capture": Capture("all", "resid_post", reduce="norm"), "probes": probe},
        {"capture": whole},
        {"edits": [steer], "capture": Capture(1, reduce="max", positions="prompt")},
    ]
    for _ in range(2):
        run = Stepped(wide)
        for nth, (prompt, plan) in enumerate(zip([SHORT, OTHER] * 2, plans, strict=True)):
            run.add(f"m{nth}", prompt, greedy(4, detokenize=False), **plan)
        outputs = run.finish()
        one = outputs["m0"].outputs[0]
        assert_reduced(oracle, SHORT, one, mean, list(range(len(SHORT))))
        assert_reduced(oracle, SHORT, one, moments, list(range(1, 6)))
        rows = oracle.run([*SHORT, *one.token_ids][:-1]).values["resid_post", 1]
        assert error_of(one.activations["resid_post", 1], rows.double()) <= TOLERANCE
        norms = outputs["m1"].outputs[0]
        where = list(range(len(OTHER) + 3))
        assert_reduced(oracle, OTHER, norms, Capture("all", reduce="norm"), where)
        largest = outputs["m3"].outputs[0]
        wanted = oracle.run(OTHER).values["resid_post", 1].max(0, keepdim=True).values
        assert error_of(largest.activations["resid_post", 1], wanted.double()) <= TOLERANCE
    assert not inspect(wide).leftovers()


def test_rows_that_are_computed_again_count_once(llm, oracle):
    asked = [
        Capture(0, reduce="mean", positions="prompt"),
        Capture(1, reduce="moments", positions=slice(3, 120)),
        Capture(2, reduce="max", positions=slice(60, 70)),
    ]
    where = [list(range(150)), list(range(3, 120)), list(range(60, 70))]
    run = Stepped(llm)
    run.add("a", LONG, greedy(8, detokenize=False), capture=asked)
    run.add("b", SHORT, greedy(8, detokenize=False), capture=asked[:1])
    for steps in (2, 5):
        run.step(steps)
        assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    outputs = run.finish()
    one = outputs["a"].outputs[0]
    seen = oracle.run(LONG).values
    for capture, mine in zip(asked, where, strict=True):
        (layer,) = capture.layers.indices
        wanted = reduced(seen["resid_post", layer][mine], capture.reduce)
        assert error_of(one.activations["resid_post", layer], wanted) <= TOLERANCE
    counts = {c.site: (c.expected, c.actual) for c in one.receipt.captured}
    assert counts == {
        "mean.resid_post": (150, 150),
        "moments.resid_post": (117, 117),
        "max.resid_post": (10, 10),
    }
    assert_reduced(oracle, SHORT, outputs["b"].outputs[0], asked[0], list(range(len(SHORT))))


def test_each_completion_has_its_own_and_an_aborted_request_leaves_nothing(llm, oracle):
    asked = Capture("all", reduce="mean", positions="prompt")
    several = SamplingParams(n=3, max_tokens=4, seed=4, ignore_eos=True, detokenize=False)
    (output,) = ask_all(llm, [SHORT], several, capture=asked)
    assert len(output.outputs) == 3
    for one in output.outputs:
        assert_reduced(oracle, SHORT, one, asked, list(range(len(SHORT))))
    run = Stepped(llm)
    run.add("gone", LONG, greedy(4, detokenize=False), capture=asked)
    run.step()  # 64 rows are counted
    llm.llm_engine.abort_request(["gone"])
    run.add("next", OTHER, greedy(4, detokenize=False), capture=asked)
    one = run.finish()["next"].outputs[0]
    assert_reduced(oracle, OTHER, one, asked, list(range(len(OTHER))))
    assert not inspect(llm).leftovers()
    inspect(llm).check_integrity()


def test_requests_wait_for_room_or_are_refused_by_its_setting(llm, oracle):
    asked = Capture("all", reduce="moments", positions="prompt")
    prompts = [LONG[nth : nth + 5 + nth] for nth in range(40)]
    outputs = ask_all(llm, prompts, 2, capture=asked)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_reduced(oracle, prompt, output.outputs[0], asked, list(range(len(prompt))))
    many = SamplingParams(n=29, max_tokens=2)
    with pytest.raises(SpecError, match=r"need 261 vectors .* room for 256; .* setting reductions"):
        ask_all(llm, [SHORT], many, capture=asked)


def test_what_cannot_be_reduced_is_refused_by_name(llm):
    more, coded = Capture([0, 1], reduce="norm"), Capture(0, codec="full8")
    assert_refused(
        lambda asked: ask_all(llm, [SHORT], 2, capture=[asked]),
        [
            ([Capture(0, reduce="mean")], "capture[0][0].positions", 'reduce="mean" is of tokens'),
            (
                [Capture(0, reduce="max", positions="last_row")],
                "capture[0][0].positions",
                "9 here",
            ),
            ([Capture(0), more], "capture[0][1]", "selects resid_post of layer 0 too"),
            ([coded, Capture(1, reduce="norm")], "capture[0][1].reduce", "have the codec full8"),
        ],
    )
