"""Segments of a plan on the ranks of a tensor-parallel group."""

from dataclasses import replace
from typing import Any

from hypothesis import given, reject
from hypothesis import strategies as st

from midstream import Attention, Capture, Probe, Steer
from midstream.errors import SpecError
from midstream.plan import Entropy, ModelShape, Plan, Prompt, TopKeys
from midstream.plan.resolve.resolve import resolve
from midstream.runtime.protocol.segments import RankShare, cut

STREAM = [("resid_post", layer) for layer in range(3)]
SPLIT = [(site, layer) for site in ("rot_q", "z") for layer in range(3)]
TAPS = STREAM + SPLIT
SHAPE = ModelShape(
    3, 16, TAPS, {}, widths=dict.fromkeys(SPLIT, 24), heads=dict.fromkeys(SPLIT, 6)
)  # fmt: skip
POSITIONS = st.sampled_from(["all", "last_prompt", "generated", [1, 4], slice(2, 7)])
LAYERS = st.sampled_from([0, 1, [0, 2], "all"])
ASKED: st.SearchStrategy[Any] = st.one_of(
    st.builds(Capture, LAYERS, st.sampled_from(["resid_post", ["z", "resid_post"]]), POSITIONS),
    st.builds(Capture, LAYERS, st.just("resid_post"), POSITIONS, reduce=st.just("norm")),
    st.builds(
        Capture, LAYERS, st.sampled_from(["resid_post", "z"]),
        st.sampled_from(["prompt", "last_prompt", [1, 4]]),
        reduce=st.sampled_from(["mean", "max", "moments"]),
    ),
    st.builds(Attention, LAYERS, queries=POSITIONS, reduce=st.just(TopKeys(2))),
    st.builds(Attention, LAYERS, st.just([0]), queries=POSITIONS, reduce=st.just("full")),
    st.builds(Probe, st.just([1.0] * 16), layer=st.sampled_from([0, 2]), positions=POSITIONS),
    st.builds(
        Probe, attention=st.just(Entropy()), layer=st.sampled_from([0, 2]),
        head=st.sampled_from(["all", 3]), positions=POSITIONS,
    ),
    st.builds(Steer, st.just([1.0] * 16), st.sampled_from([0, 2]), positions=POSITIONS),
)  # fmt: skip


@given(
    asked=st.lists(ASKED, min_size=1, max_size=4, unique_by=repr),
    sharded=st.booleans(),
    ranks=st.sampled_from([2, 3, 6]),
    stage=st.sampled_from([TAPS, [tap for tap in TAPS if tap[1] != 1]]),
)
def test_all_ranks_run_the_tapped_model_at_the_same_positions(asked, sharded, ranks, stage):
    """Where one rank alone captures, or computes rows, too: a CUDA graph reads the memory of the
    same graph on the other ranks.
    """
    named = [
        one if isinstance(one, Capture | Attention | Steer) else one.replace(name=f"n{nth}")
        for nth, one in enumerate(asked)
    ]
    kinds = [Capture | Attention, Steer, Probe]
    lists = [[one for one in named if isinstance(one, kind)] or None for kind in kinds]
    try:
        plan = replace(resolve(Plan.make(*lists), SHAPE, Prompt(9), 4), sharded=sharded)
    except SpecError:  # two captures of one site that a request may not have
        reject()
    parts = tuple(min(ranks, 3) if site in ("rot_q", "z") else 1 for site, _ in stage)
    index = {tap: nth for nth, tap in enumerate(stage)}
    segments = [cut(plan, index, RankShare(rank, ranks, parts)) for rank in range(ranks)]
    shown = [[(one.start, one.stop, one.runs_tapped) for one in each] for each in segments]
    assert all(each == shown[0] for each in shown)
    # It runs where some rank has something to do, and nowhere else.
    for several in zip(*segments, strict=True):
        has_work = any(one.edits or one.captured or one.scored for one in several)
        assert several[0].runs_tapped == has_work
