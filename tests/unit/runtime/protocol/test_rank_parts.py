"""Each rank's part of an edit, and rows put together from parts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.formulas import run
from support.nightly import rounds
from support.plans import plan_of
from support.stored import worker_info

from midstream import Ablate, Affine, Clamp, Gate, LoReFT, Probe, Replace, Scale, Steer
from midstream.codecs import Raw
from midstream.errors import SpecError
from midstream.plan import ModelShape, Plan, Prompt, Reading
from midstream.plan.operations import Feature
from midstream.plan.positions.position_set import Where
from midstream.plan.resolve.resolve import resolve
from midstream.plan.resolved import Pattern, ResolvedProbe, SlottedPattern, Steps
from midstream.runtime.protocol.rank_parts import (
    check_parts,
    joined_blocks,
    part_of_steps,
    probe_numbers,
)
from midstream.runtime.protocol.results import ResultBlock

TAP = ("z", 0)
SIZE, HEADS = 24, 6
SHAPE = ModelShape(1, 8, [TAP], widths={TAP: SIZE}, heads={TAP: HEADS})
numbers = st.lists(st.floats(-2, 2, width=16), min_size=4, max_size=4).filter(any)
wholes = st.lists(st.floats(-2, 2, width=16), min_size=SIZE, max_size=SIZE).filter(any)
heads = st.lists(st.integers(0, HEADS - 1), min_size=1, max_size=HEADS, unique=True)
norms = st.sampled_from([None, "keep"])


@st.composite
def edits(draw):
    """Edits of every kind: of heads, and of the whole vector where each part is on its own."""
    place = {"layer": 0, "site": "z"}
    if draw(st.booleans()):
        dims = draw(st.none() | st.lists(st.integers(0, SIZE - 1), min_size=1, unique=True))
        return draw(
            st.sampled_from(
                [
                    Steer(draw(wholes), **place),
                    Scale(0.5, **place, dims=dims),
                    Replace(draw(wholes), alpha=0.75, **place, dims=dims),
                ]
            )
        )
    u, v = draw(numbers), draw(numbers)
    place |= {"head": draw(heads)}
    return draw(
        st.sampled_from(
            [
                Steer(u, **place, norm=draw(st.sampled_from([None, "match", "keep"]))),
                Scale(-1.0, **place),
                Replace(u, **place, norm=draw(norms)),
                Ablate(u, **place, norm=draw(norms)),
                Clamp(u, low=-0.5, high=0.5, **place, norm=draw(norms)),
                Affine([u], [v], bias=[0.5], **place),
                LoReFT([[1, 0, 0, 0]], [v], [0.25], **place),
                Feature(u, v, value=1.5, bias=0.25, threshold=0.125, **place),
            ]
        )
    )


@given(edits(), st.sampled_from([2, 3, 6]), st.integers(0, 2**32 - 1))
@settings(max_examples=rounds(suite=150, nightly=2000), deadline=None)
def test_the_parts_of_an_edit_do_together_what_the_whole_edit_does(edit, parts, seed):
    resolved = resolve(Plan.make(edits=edit), SHAPE, Prompt(4), 1)
    check_parts(resolved, {TAP: parts})
    (one,) = resolved.edits
    steps = one.steps.instructions
    h = np.random.default_rng(seed).standard_normal((3, SIZE)).astype(np.float32)
    pieces = np.split(h, parts, axis=1)
    found = [run(part_of_steps(steps, nth, parts), each) for nth, each in enumerate(pieces)]
    np.testing.assert_allclose(np.concatenate(found, 1), run(steps, h), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("parts", [2, 3, 6])
@pytest.mark.parametrize("head", [None, 1])
def test_the_parts_of_a_score_add_up_to_it_with_its_bias(parts, head):
    draw = np.random.default_rng(parts)
    direction = draw.standard_normal(SIZE if head is None else 4).astype(np.float32)
    probe = Probe(direction, 0, bias=2.5, site="z", head=head)
    resolved = resolve(Plan.make(probes=probe), SHAPE, Prompt(4), 1)
    check_parts(resolved, {TAP: parts})
    steps = resolved.probes[0].steps.instructions
    h = draw.standard_normal(SIZE)
    pieces = zip(range(parts), np.split(h, parts), strict=True)
    (whole,) = steps
    scores = [
        step.read.numpy() @ piece + step.a
        for nth, piece in pieces
        for step in part_of_steps(steps, nth, parts)
    ]
    assert sum(scores) == pytest.approx(whole.read.numpy() @ h + 2.5, abs=1e-6)


@pytest.mark.parametrize(
    "edit",
    [
        Ablate([1.0] * SIZE, 0, site="z"),
        Steer([1.0] * SIZE, 0, site="z", norm="match"),
        Steer([1.0] * SIZE, 0, site="z", norm="keep"),
        Clamp([1.0] * SIZE, 0, site="z", high=0),
        Replace([1.0] * SIZE, 0, site="z", norm="keep", dims=[0, SIZE - 1]),
    ],
)
def test_an_edit_that_needs_several_parts_is_refused(edit):
    with pytest.raises(SpecError, match=r"edits\[0\]: z is split over the ranks"):
        check_parts(resolve(Plan.make(edits=edit), SHAPE, Prompt(4), 1), {TAP: 2})


def test_a_matrix_needs_the_vector_of_one_rank():
    edit = Affine(matrix=np.eye(SIZE), layer=0, site="z")
    resolved = resolve(Plan.make(edits=edit), SHAPE, Prompt(4), 1)
    with pytest.raises(SpecError, match=r"edits\[0\].matrix: z is split over 2 ranks"):
        check_parts(resolved, {TAP: 2})
    check_parts(resolved, {("z", 1): 2})


def test_gates_and_codecs_of_parts_are_refused_and_other_taps_are_not_concerned():
    both = ModelShape(1, 8, [TAP, ("resid_post", 0)], widths={TAP: SIZE}, heads={TAP: HEADS})
    gate = Gate(Scale(2.0, layer=0), Reading([1.0] * SIZE, layer=0, site="z"))
    resolved = resolve(Plan.make(edits=gate), both, Prompt(4), 1)
    with pytest.raises(SpecError, match=r"edits: z is split over .*a gate that reads it"):
        check_parts(resolved, {TAP: 2})
    check_parts(resolved, {("z", 1): 2})
    packed = plan_of(captures=[([TAP], ((0, None),))])
    object.__setattr__(packed, "codec", "full8")
    with pytest.raises(SpecError, match="capture: z is split over 2 ranks.*full8"):
        check_parts(packed, {TAP: 2})


class Result:
    """A worker's rows of `TAP` at some positions, and of another tap that each rank has whole."""

    def __init__(self, rank: int, ranks: int, parts: int, blocks: list[tuple[list[int], object]]):
        self.worker = worker_info(
            tensor_rank=rank, tensor_ranks=ranks, taps=(TAP, ("resid_post", 0)), parts=(parts, 1)
        )
        self._blocks = blocks

    def blocks(self) -> list[ResultBlock]:
        found = []
        for positions, rows in self._blocks:
            encoded = Raw().encode(torch.as_tensor(rows, dtype=torch.float32))[:, None]
            mine = np.array(positions)
            rank, parts = self.worker.tensor_rank, self.worker.parts[0]
            found.append(ResultBlock([TAP], Raw(), mine, [encoded], rank, parts=parts))
        return found


@given(st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 3)]), st.integers(0, 2**32 - 1))
@settings(max_examples=rounds(suite=60, nightly=600), deadline=None)
def test_a_score_is_the_sum_of_what_each_rank_has_of_it_and_others_are_the_first_ranks(split, seed):
    ranks, parts = split
    draw = np.random.default_rng(seed)
    plan = plan_of(probes=[("linear", ("resid_post", 0), ((0, None),))])
    pattern = Pattern("mass", 1, (), (), (TAP,), (HEADS,))
    mean = ResolvedProbe(
        "mean", "attention", 0, Steps(()), Where(((0, None),)), SlottedPattern(1, pattern, HEADS)
    )
    scores = draw.standard_normal((ranks, 8, 2)).astype(np.float32)
    sent = []
    for rank in range(ranks):
        worker = worker_info(
            tensor_rank=rank, tensor_ranks=ranks, taps=(TAP, ("resid_post", 0)), parts=(parts, 1)
        )
        cuts = sorted(draw.integers(0, 9, 2).tolist())
        pieces = [range(cuts[0]), range(cuts[0], cuts[1]), range(cuts[1], 8)]
        for nth in draw.permutation(3).tolist():
            at = np.array(pieces[nth], np.int64)
            sent.append((worker, at, scores[rank, at]))
    of_others = ranks // parts  # neighbours have the same part, and the first of them counts
    for probe, expected in (
        (plan.probes[0], scores[0, :, 0]),
        (mean, scores[::of_others, :, 1].sum(0)),
    ):
        found = probe_numbers(probe, sent)
        order = np.argsort(np.concatenate([at for at, _ in found]))
        assert np.concatenate([at for at, _ in found])[order].tolist() == list(range(8))
        mine = np.concatenate([values for _, values in found])[order, 0]
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
    if parts > 1:
        last = [one for one in sent if one[0].tensor_rank != ranks - of_others]
        assert probe_numbers(mean, last) == []


@given(st.sampled_from([(2, 2), (3, 3), (4, 2), (6, 3)]), st.integers(0, 2**32 - 1))
@settings(max_examples=rounds(suite=60, nightly=600), deadline=None)
def test_rows_come_together_by_part_whatever_blocks_each_rank_has_them_in(split, seed):
    ranks, parts = split
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((8, 6 * parts)).astype(np.float32)
    dropped = int(draw.integers(9))  # by the last part; 8: none
    results = []
    for rank in range(ranks):
        part, copies = rank // (ranks // parts), ranks // parts
        if rank % copies:
            results.append(Result(rank, ranks, parts, []))
            continue
        here = [p for p in range(8) if part < parts - 1 or p != dropped]
        cuts = sorted(draw.integers(0, len(here) + 1, 2).tolist())
        pieces = [here[: cuts[0]], here[cuts[0] : cuts[1]], here[cuts[1] :]]
        blocks = [(each, rows[each, 6 * part : 6 * part + 6]) for each in pieces if each]
        order = draw.permutation(len(blocks))
        results.append(Result(rank, ranks, parts, [blocks[nth] for nth in order]))
    (found,) = joined_blocks(results)
    wanted = [p for p in range(8) if p != dropped]
    assert found.positions.tolist() == wanted
    (chunk,) = found.chunks
    assert torch.equal(chunk[:, 0].view(torch.float32), torch.from_numpy(rows[wanted]))
