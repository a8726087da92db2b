"""Rules of lists that requests take: what a list in another order gives, and how that is seen."""

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from midstream import (
    SAE,
    Ablate,
    Affine,
    Attention,
    Capture,
    Feature,
    Features,
    Lens,
    Local,
    Logits,
    LogProb,
    LoReFT,
    Probe,
    Steer,
)
from midstream.errors import SpecError
from midstream.lab.sweep.cells import plan_grid
from midstream.lab.sweep.request import SweepRequest
from midstream.plan import MLP, AttentionPool, Classes, Hidden, Mass, ModelShape, Plan, Prompt
from midstream.plan.operation import Operation
from midstream.plan.readouts import ReadOut
from midstream.plan.resolve.resolve import resolve
from midstream.plan.resolved import ResolvedPlan
from midstream.results.activations import Activations
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.results.readouts import parted
from midstream.sites import IN_LAYERS

ROOT = Path(__file__).parents[2]
LAYERS, WIDTH, HEADS, EXPERTS = 5, 8, 4, 8
TAPS = [(site, layer) for site in IN_LAYERS for layer in range(LAYERS)]
SHAPE = ModelShape(
    LAYERS,
    WIDTH,
    [*TAPS, ("embed", 0), ("final_norm", LAYERS - 1), ("logits", LAYERS - 1)],
    heads={tap: HEADS for tap in TAPS if tap[0] in ("q", "k", "v", "rot_q", "rot_k", "z")},
    routing={tap: 2 for tap in TAPS if tap[0] == "router"},
)
PROMPT = Prompt(10, tuple(range(10)))
V = [1.0, -2.0, 3.0, 0.5, 0.0, 1.0, -1.0, 2.0]
HEAD = V[:2]
ROWS = np.linalg.qr(np.random.default_rng(3).normal(size=(WIDTH, WIDTH)))[0].astype(np.float32)

# The lists of most rules, in no order.
SOME_LAYERS = [3, 0, -1, 1]
SOME_SITES = ["resid_post", "attn_out", "resid_pre"]
SOME_POSITIONS = [5, 2, -1, 7, 11]
SOME_HEADS = [2, 0, 3]

Rule = Callable[[random.Random], None]


def plan_of(value: Any) -> ResolvedPlan:
    is_capture, is_probe = isinstance(value, ReadOut), isinstance(value, Probe)
    name = "capture" if is_capture else "probes" if is_probe else "edits"
    return resolve(Plan.make(**{name: value}), SHAPE, PROMPT, 4)


def orders(draw: random.Random, listed: Sequence[Any]) -> list[Any]:
    order = list(listed)
    draw.shuffle(order)
    return order


def plan_of_probes(probes: list[Probe]) -> Sequence[Any]:
    return resolve(Plan.make(probes=probes), SHAPE, PROMPT, 4).probes


def means_nothing(make: Callable[[list[Any]], Any], listed: Sequence[Any]) -> Rule:
    """In any order it is one request to the workers."""

    def check(draw: random.Random) -> None:
        assert plan_of(make(orders(draw, listed))) == plan_of(make(list(listed)))

    return check


def equal(make: Callable[[list[Any]], Any], listed: Sequence[Any]) -> Rule:
    """In any order it is one value."""

    def check(draw: random.Random) -> None:
        assert make(orders(draw, listed)) == make(list(listed))

    return check


def kept(view: Callable[[list[Any]], Sequence[Any]], listed: Sequence[Any]) -> Rule:
    """The kth of the result is of the kth listed: `view` returns what its parts are of."""

    def check(draw: random.Random) -> None:
        order = orders(draw, listed)
        assert list(view(order)) == order

    return check


def paired(make: Callable[[list[Any], list[Any]], Any], one: Any, other: Any) -> Rule:
    """The kth of one list is for the kth of another: shuffled together they are one request, and
    one alone is another request, or rejected.
    """

    def check(draw: random.Random) -> None:
        order = orders(draw, range(len(one)))
        shuffled = [one[nth] for nth in order], [other[nth] for nth in order]
        base = plan_of(make(list(one), list(other)))
        assert plan_of(make(*shuffled)) == base
        if order != sorted(order):
            assert plan_of(make(shuffled[0], list(other))) != base

    return check


def ascends(make: Callable[[list[Any]], Any]) -> Rule:
    """Rows are in the order of positions: any other list of single positions is rejected."""

    def view(order: list[Any]) -> list[Any]:
        plan = plan_of(make(order))
        (part,) = plan.captures or plan.probes
        return [place for span in part.where.ranges for place in range(*span)]

    def check(draw: random.Random) -> None:
        order = orders(draw, [5, 2, 9, 7, 11])
        if order == sorted(order):
            assert view(order) == order
            return
        with pytest.raises(SpecError, match="rows are in the order of their positions"):
            view(order)

    return check


def place(make: Callable[..., Any], **fixed: Any) -> dict[str, Rule]:
    """Rules of where an edit of one vector is: it is at all of its places alike."""
    fixed.setdefault("layer", [0, 1])
    without = {name: value for name, value in fixed.items() if name != "layer"}
    return {
        "layer": means_nothing(lambda order: make(**without, layer=order), SOME_LAYERS),
        "site": means_nothing(lambda order: make(**fixed, site=order), SOME_SITES),
        "positions": means_nothing(lambda order: make(**fixed, positions=order), SOME_POSITIONS),
        "exclude": means_nothing(lambda order: make(**fixed, exclude=order), SOME_POSITIONS),
    }


def heads(make: Callable[..., Any]) -> Rule:
    return means_nothing(lambda order: make(layer=1, site="z", head=order), SOME_HEADS)


def as_in_steer(cls: type) -> Rule:
    """An edit's place is read, and found, by the code of all edits."""

    def check(_: random.Random) -> None:
        assert issubclass(cls, Operation)
        assert cls._set_place is Operation._set_place

    return check


def has_test(test: str) -> Rule:
    """The rule is that of a test of an engine, or of a part that is shared."""

    def check(_: random.Random) -> None:
        path, name = test.split("::")
        assert re.search(rf"^\s*(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)

    return check


def shown(capture: Any, value: Callable[[Any, int], Any]) -> Any:
    """What a request returns of a capture whose rows hold, in each number, which part it is of.

    Args:
        value: returns the numbers of a row of a tap, by its place in the capture.
    """
    own = Plan.make(capture)
    plan = resolve(own, SHAPE, PROMPT, 4)
    (made,) = plan.captures
    rows = {
        tap: torch.tensor([value(made, nth)], dtype=torch.float32)
        for nth, tap in enumerate(made.taps)
    }
    positions = dict.fromkeys(rows, torch.tensor([0]))
    rows_of_plan = Activations(rows, positions, [0], LAYERS)
    return SimpleNamespace(**parted(rows_of_plan, AdmittedRequest("a", plan, own)).readouts)


def lens_layers(order: list[int]) -> list[int]:
    made = shown(Lens(order, top=1, tokens=[3]), lambda one, nth: [0, one.taps[nth][1], 0, 0, 0])
    rows = made.lens["logit"]
    assert list(rows.layers) == [layer % LAYERS for layer in order]
    found = rows.values[0, :, 0].int().tolist()
    return [next(one for one in order if one % LAYERS == layer) for layer in found]


def lens_tokens(order: list[int]) -> list[int]:
    def row(made: Any, _: int) -> list[float]:
        tokens = [token for token, _ in made.pattern.keys]
        return [*tokens, *[0] * len(tokens), 0]

    rows = shown(Lens(1, top=0, tokens=order), row).lens["logit"]
    assert list(rows.tokens) == order
    return rows.token_values[0, 0].int().tolist()


def logit_tokens(order: list[int]) -> list[int]:
    def row(made: Any, _: int) -> list[float]:
        return [*(token for span in made.pattern.keys for token in range(*span)), 0]

    rows = shown(Logits(tokens=order), row).logits
    assert rows.ids[0].tolist() == order
    return rows.values[0].int().tolist()


def sae_features(order: list[int]) -> list[int]:
    def row(made: Any, _: int) -> list[float]:
        return [*(feature for feature, _ in made.pattern.keys), 0]

    asked = Features("s", top=0, features=order, layer=1, site="resid_post")
    rows = shown(asked, row).features["s"]
    assert list(rows.features) == order
    return rows.feature_values[0].int().tolist()


def attention_heads(order: list[int]) -> list[int]:
    def row(made: Any, _: int) -> list[float]:
        return list(made.pattern.heads)

    rows = shown(Attention([1], heads=order, reduce=Mass(0)), row).attention[1]
    assert list(rows.heads) == order
    return rows.values[0].int().tolist()


def capture_heads(order: list[int]) -> list[int]:
    own = Plan.make(Capture(1, "z", heads=order))
    admitted = AdmittedRequest("a", resolve(own, SHAPE, PROMPT, 4), own)
    rows = {("z", 1): torch.arange(HEADS).repeat_interleave(2)[None].float()}
    found = Activations(rows, {("z", 1): torch.tensor([0])}, [0], LAYERS,
                        admitted.heads((0,), SHAPE))  # fmt: skip
    return found["z", 1][0, :, 0].int().tolist()


def grid_axis(name: str) -> Callable[..., list[Any]]:
    """The labels of an axis, and that each cell is what its labels say."""

    def view(order: Any, exclude: Any = None) -> list[Any]:
        fixed: dict[str, Any] = {"layers": [1, 3], "sites": ["z"], "positions": [0, 4]}
        if name == "groups":
            del fixed["positions"]
        if name == "features":
            fixed |= {"sae": "s", "sites": ["resid_post"]}
        request = SweepRequest(0, LogProb(3), **{**fixed, name: order}, exclude=exclude)
        grid = plan_grid(request, SHAPE, PROMPT, None)
        for cell in grid.cells:
            labels = {
                dim: grid.coords[dim][nth] for dim, nth in zip(grid.dims, cell.index, strict=True)
            }
            assert (labels["site"], labels["layer"]) == cell.tap
            if name == "groups":
                assert cell.positions == (int(labels["position"]),)
            else:
                assert cell.positions == (labels["position"],)
            assert labels.get("head") == cell.head
            assert labels.get("feature") == cell.feature
        return grid.coords[AXES[name]]

    return view


AXES = {
    "layers": "layer", "sites": "site", "positions": "position", "heads": "head",
    "features": "feature", "groups": "position",
}  # fmt: skip


def by_rows(kind: Any) -> Rule:
    """Rows at listed positions."""
    return paired(
        lambda rows, places: kind(rows=rows, layer=1, positions=places), ROWS[:4], [5, 2, 11, 7]
    )


def by_layer(make: Callable[[Any, Any], Any]) -> Rule:
    """Vectors at listed layers."""
    return paired(make, ROWS[:3], [3, 0, -1])


def steered(rows: list[Any], layers: list[int]) -> list[Any]:
    """The parts of an edit, one for each layer, in the order of the layers."""
    parts = Steer(rows, layer=layers).per_layer()
    return sorted(parts, key=lambda one: one.layers.indices[0] % LAYERS)


def span(order: list[Any]) -> Any:
    """What is kept of vectors that an Ablate of directions leaves; exact but for rounding."""
    found = Ablate(order, 1).instructions(WIDTH)
    reads = np.stack([step.read.numpy() for step in found])
    return [round(float(one), 4) for one in (reads.T @ reads).ravel()]


def features_of(*order: Any) -> Feature:
    encoder, decoder, value, bias, threshold = zip(*order, strict=True)
    return Feature(encoder, decoder, 1, value=list(value), bias=list(bias),
                   threshold=list(threshold))  # fmt: skip


def features_by_their_rows(order: list[int]) -> list[int]:
    matrix, zeros = torch.from_numpy(ROWS), torch.zeros(WIDTH)
    weights = SAE(matrix.T, zeros, matrix, zeros).weights_of(order, "add")
    return [int(np.flatnonzero((row == ROWS).all(1))[0]) for row in weights["decoder"].numpy()]


FEATURES = [(ROWS[nth], ROWS[nth + 2], 1.5 * nth + 1, 0.5 * nth, 0.1 * nth) for nth in range(4)]
RANKS = [(ROWS[nth], ROWS[nth + 3], 0.5 * nth) for nth in range(3)]


def terms(edit: Any) -> set[Any]:
    """The terms of an edit that are added up, in no order."""
    steps = edit.instructions(WIDTH)
    return {(one.op, one.read, one.write, one.a, one.b, one.c, one.d) for one in steps}


def added(make: Callable[[list[Any]], Any], listed: Sequence[Any]) -> Rule:
    """The kth of several lists belong together, and are added up."""

    def check(draw: random.Random) -> None:
        assert terms(make(orders(draw, listed))) == terms(make(list(listed)))

    return check


def affine(order: list[Any]) -> Affine:
    read, write, bias = zip(*order, strict=True)
    return Affine(list(read), list(write), 1, bias=list(bias))


def loreft(order: list[Any]) -> LoReFT:
    rotation, weight, bias = zip(*order, strict=True)
    return LoReFT(np.stack(rotation), np.stack(weight), list(bias), 1)


def unit_terms(order: list[Any]) -> Any:
    hidden, bias, output = zip(*order, strict=True)
    units = MLP(np.stack(hidden), list(bias), list(output)).units(WIDTH)
    return {(one.read, one.a, one.b) for one in units}


def class_terms(order: list[Any]) -> Any:
    """Of each class what it reads, its bias, and its name, by its column."""
    weights, bias, names = zip(*order, strict=True)
    classes = Classes(np.stack(weights), list(bias), list(names))
    steps = classes.instructions(WIDTH)
    return [(step.read.numpy().tolist(), step.a, name)
            for step, name in zip(steps, classes.names, strict=True)]  # fmt: skip


def head_terms(order: list[Any]) -> Any:
    """Of each head what its query and its value read."""
    query, value = zip(*order, strict=True)
    steps = AttentionPool(query=np.stack(query), value=np.stack(value)).instructions(WIDTH)
    rows = [step.read.numpy().tolist() for step in steps]
    return list(zip(rows[: len(order)], rows[len(order) :], strict=True))


def own_rules(name: str, rules: dict[str, Rule]) -> dict[str, Rule]:
    return {f"{name}.{field}": rule for field, rule in rules.items()}


def unit_sums(order: list[Any]) -> Any:
    """Of each unit of a hidden layer what it reads, and its bias, by its column."""
    weights, bias = zip(*order, strict=True)
    steps = Hidden(np.stack(weights), list(bias)).instructions(WIDTH)
    return [(step.read.numpy().tolist(), step.a) for step in steps]


def of_families() -> dict[str, Rule]:
    """The rules of probes with classes and of attention probes."""
    classes = [(ROWS[nth].tolist(), nth + 1.0, f"c{nth}") for nth in range(4)]
    heads = [(ROWS[nth].tolist(), ROWS[nth + 4].tolist()) for nth in range(4)]
    return {
        "Probe.classes": kept(class_terms, classes),
        "Probe.attention_pool": kept(head_terms, heads),
        "Probe.hidden": kept(unit_sums, [(ROWS[nth].tolist(), nth + 1.0) for nth in range(4)]),
    }


def double(h: torch.Tensor, _: Any) -> torch.Tensor:
    return h * 2


# A function has its key as long as an edit with it exists.
LOCAL = Local(double, 0)
