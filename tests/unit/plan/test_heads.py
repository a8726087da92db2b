"""Edits and probes of single heads and components, against the same on the parts alone."""

import numpy as np
import pytest
from support.formulas import run
from support.refusals import refused, refused_calls

from midstream import Ablate, Affine, Clamp, Gate, LoReFT, Probe, Replace, Scale, Steer
from midstream.errors import SpecError
from midstream.ops.layout import Flags
from midstream.plan import ModelShape, Plan, Prompt, Reading
from midstream.plan.operations import Feature
from midstream.plan.resolve.resolve import resolve
from midstream.plan.shape import VectorSize
from midstream.sites import Tap

SIZE, HEADS = 12, 3
WHOLE = VectorSize(SIZE, "the width", HEADS)
U, V, W = [1.0, -0.5, 2.0, 0.25], [0.5, 1.5, -1.0, 1.0], [0.25, 0.0, -0.5, 1.0]
ROTATION = [[0.6, 0.8, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
EDITS = {
    "steer": lambda **k: Steer(V, 0, 0.5, **k),
    "steer match": lambda **k: Steer(V, 0, 0.5, norm="match", **k),
    "steer keep": lambda **k: Steer(V, 0, 0.5, norm="keep", **k),
    "scale": lambda **k: Scale(0.25, 0, **k),
    "scale by components": lambda **k: Scale(U, 0, **k),
    "scale and shift": lambda **k: Scale(0.5, 0, shift=V, **k),
    "scale by components and shift": lambda **k: Scale(U, 0, shift=W, **k),
    "replace": lambda **k: Replace(W, 0, 0.75, **k),
    "replace keep": lambda **k: Replace(W, 0, norm="keep", **k),
    "ablate": lambda **k: Ablate([U, V], 0, **k),
    "ablate keep": lambda **k: Ablate(U, 0, norm="keep", **k),
    "clamp": lambda **k: Clamp(U, 0, low=-0.25, high=0.5, **k),
    "affine": lambda **k: Affine([U], [V], 0, bias=[0.5], **k),
    "loreft": lambda **k: LoReFT(ROTATION, [U, V], [0.5, -1.0], 0, **k),
    "feature": lambda **k: Feature(U, V, 0, value=2.0, **k),
}


def streams() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((7, SIZE)).astype(np.float32)


def on_parts(edit, heads):
    """The edit on each head's part of the vectors, as if it were the whole."""
    h = streams().astype(np.float64)
    parts = h.reshape(len(h), HEADS, -1)
    for head in heads:
        parts[:, head] = run(edit.instructions(SIZE // HEADS), parts[:, head])
    return parts.reshape(h.shape)


def test_an_edit_of_heads_does_to_each_what_it_does_to_a_vector_of_that_size():
    for name in EDITS:
        for heads in ((0,), (2,), (0, 2), (0, 1, 2)):
            edit = EDITS[name](head=heads if len(heads) > 1 else heads[0])
            found = run(edit.steps(WHOLE), streams())
            np.testing.assert_allclose(found, on_parts(EDITS[name](), heads), rtol=1e-6, atol=1e-7)
            assert sum(Flags.COUNTED in step.flags for step in edit.steps(WHOLE)) == 1


def test_a_gates_direction_has_the_size_of_what_it_reads_whatever_the_edit_has():
    shape = ModelShape(1, 8, [("resid_pre", 0), ("attn_out", 0)], widths={("attn_out", 0): SIZE},
                       heads={("attn_out", 0): HEADS})  # fmt: skip

    def gated(size, **edit):
        reading = {"direction": [1.0] * size, "site": "resid_pre", "layer": 0}
        return Plan.make(edits=Gate(Scale(0, 0, site="attn_out", **edit), reading))

    for edit in ({}, {"head": 1}):
        found = resolve(gated(8, **edit), shape, Prompt(4), 1)
        (read,) = found.probes
        assert (read.site, read.layer) == ("resid_pre", 0)
        assert read.steps.instructions[0].read.size == 8
        with pytest.raises(SpecError, match=r"^edits\[0\]\.probe\.direction: expected 8 numbers"):
            resolve(gated(SIZE, **edit), shape, Prompt(4), 1)


def test_a_gate_reads_the_whole_vector_or_its_head_and_changes_the_head():
    for name in EDITS:
        width, edit = SIZE // HEADS, EDITS[name](head=1)
        site, layer = edit.sites.names[0], edit.layers.indices[0]
        whole, part = np.linspace(-1, 1, SIZE), np.linspace(-1, 1, width)
        of_head = streams()[:, 2 * width :] @ part
        for probe, score in (
            (whole, streams() @ whole),
            ({"direction": part, "head": 2}, of_head),
            (Reading(part, head=2), of_head),
            (Probe(part, layer, site=site, head=2), of_head),
        ):
            is_open = score > 0
            assert 0 < is_open.sum() < len(is_open)
            wanted = np.where(is_open[:, None], on_parts(EDITS[name](), (1,)), streams())
            found = run(Gate(edit, probe).steps(WHOLE, WHOLE), streams())
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


def test_a_head_that_a_gate_cannot_read_is_refused():
    refused(
        lambda probe: Gate(Scale(0, 0, site="z"), probe).steps(WHOLE),
        ({"direction": [1.0], "head": [0, 1]}, "probe.head", "a gate reads one head, got 2"),
        ({"direction": [1.0], "head": -1}, "probe.head", "expected an index from 0 on, got -1"),
        ({"direction": [1.0], "head": HEADS}, "probe.head", f"head {HEADS} is out of range"),
        ({"direction": [1.0] * SIZE, "head": 0}, "probe.direction", r"expected \d+ numbers"),
    )
    refused(
        lambda probe: Gate(Scale(0, 0), probe).steps(VectorSize(8)),
        ({"direction": [1.0], "head": 0}, "probe.head", "the vectors of the site that it reads"),
    )


def test_a_probe_reads_its_head_alone():
    scores: dict[int, object] = {}
    (step,) = Probe(U, 0, bias=0.5, head=2).steps(WHOLE)
    object.__setattr__(step, "slot", 0)
    run((step,), streams(), scores)
    np.testing.assert_allclose(scores[0], streams()[:, 8:] @ U + 0.5, rtol=1e-6)


def test_scale_and_replace_change_these_components_alone():
    h, row = streams(), np.arange(SIZE) / 4
    for dims in ([0], [3, 1], range(0, 12, 2)):
        scaled, replaced, chosen = h.astype(np.float64), h.astype(np.float64), sorted(dims)
        scaled[:, chosen] *= 0.25
        replaced[:, chosen] = 0.5 * replaced[:, chosen] + 0.5 * row[chosen]
        found = run(Scale(0.25, 0, dims=dims).steps(WHOLE), h)
        np.testing.assert_allclose(found, scaled, rtol=1e-6)
        found = run(Replace(row, 0, 0.5, dims=dims).steps(WHOLE), h)
        np.testing.assert_allclose(found, replaced, rtol=1e-6)


def test_components_of_a_head_are_counted_within_it():
    h = streams()
    wanted = h.astype(np.float64)
    wanted[:, [5, 9]] *= 3
    np.testing.assert_allclose(run(Scale(3, 0, head=[1, 2], dims=1).steps(WHOLE), h), wanted)


def test_each_position_gets_its_row_in_each_head():
    shape = ModelShape(1, 8, [("attn_out", 0)], widths={("attn_out", 0): SIZE},
                       heads={("attn_out", 0): HEADS})  # fmt: skip
    edit = Replace([U, V, W], 0, site="attn_out", positions=[1, 2, 5], head=[0, 2])
    found = resolve(Plan.make(edits=edit), shape, Prompt(8), 1)
    assert [one.where.ranges for one in found.edits] == [((1, 3),), ((5, 6),)]
    h = np.zeros((3, SIZE))
    for one, rows, positions in zip(found.edits, ([U, V], [W]), ([1, 2], [5]), strict=True):
        got = run(one.steps.instructions, h[: len(rows)], positions=np.array(positions))
        parts = got.reshape(len(rows), HEADS, -1)
        np.testing.assert_allclose(parts[:, 0], rows)
        np.testing.assert_allclose(parts[:, 2], rows)
        assert not parts[:, 1].any()


def test_wrong_heads_and_components_are_refused_by_name():
    refused_calls(
        (lambda: Steer(V, 0, head=-1), "head: expected an index from 0 on, got -1"),
        (lambda: Steer(V, 0, head="all"), "head: expected an `int` or a list"),
        (lambda: Probe(V, 0, head=[0, 1]), "head: a probe reads one head"),
        (lambda: Steer(V, 0, head=3).steps(WHOLE), "head: head 3 is out of range: there are 3"),
        (lambda: Steer(V, 0, head=0).steps(VectorSize(12)), "head: .*are not of heads"),
        (lambda: Steer([1.0] * 12, 0, head=0).steps(WHOLE), "expected 4 numbers, the size of a h"),
        (lambda: Steer(V, 0).steps(WHOLE), "expected 12 numbers, the width, got 4"),
        (lambda: Scale(0, 0, dims=12).steps(WHOLE), "dims: 12 is out of range"),
        (lambda: Scale(0, 0, head=0, dims=4).steps(WHOLE), "dims: 4 is out of range"),
    )


def test_an_edit_of_a_head_is_refused_where_a_site_of_the_same_width_has_none():
    taps: list[Tap] = [("z", 0), ("resid_post", 0)]
    shape = ModelShape(1, SIZE, taps, heads={taps[0]: HEADS})
    for edit in (Scale(0, 0, site=["z", "resid_post"], head=1), Scale(0, 0, head=1)):
        with pytest.raises(SpecError, match=r"edits\[0\].head: .*are not of heads"):
            resolve(Plan.make(edits=edit), shape, Prompt(2), 1)
    found = resolve(Plan.make(edits=Scale(0, 0, site="z", head=1)), shape, Prompt(2), 1)
    assert [(one.site, one.layer) for one in found.edits] == [("z", 0)]


def test_one_edit_at_taps_of_different_widths_fits_each():
    taps: list[Tap] = [("attn_out", 0), ("mlp_out", 0)]
    shape = ModelShape(1, 8, taps, widths={taps[0]: SIZE}, heads={taps[0]: HEADS})
    scale = Plan.make(edits=Scale(0, 0, site=["attn_out", "mlp_out"]))
    assert len(resolve(scale, shape, Prompt(2), 1).edits) == 2
    steer = Plan.make(edits=Steer([1.0] * 12, 0, site=["attn_out", "mlp_out"]))
    with pytest.raises(SpecError, match="expected 8 numbers, the model's hidden size, got 12"):
        resolve(steer, shape, Prompt(2), 1)
