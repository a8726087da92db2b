"""Hypothesis strategies for what this package reads: plans and their parts, well formed and not."""

from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from unit.plan.position_strategies import capture_positions, edit_positions

from midstream.errors import SpecError
from midstream.plan import (
    Ablate,
    Affine,
    Capture,
    Clamp,
    Feature,
    Gate,
    LoReFT,
    Named,
    Plan,
    Positions,
    Probe,
    Replace,
    Scale,
    Steer,
    Vector,
)
from midstream.plan.operations import Edit, PlainEdit, Reading
from midstream.sites import IN_LAYERS

WIDTH = 3

json_scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["all", "prompt", "last_row", "steer", "gate", "resid_post", "AACAPw=="])
)
field_names = st.sampled_from(
    ["capture", "edits", "probes", "layers", "sites", "positions", "phase", "exclude", "vector"]
    + ["layer", "scale", "site", "op", "slice", "f32", "shape", "name", "edit", "probe", "value"]
) | st.text(max_size=4)
json_values = st.recursive(
    json_scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(field_names, inner, max_size=4),
    max_leaves=12,
)

floats32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Eighths: sums and products of a few are exact in float32, so that no two evaluations of one
# formula come down on different sides of a threshold.
eighths = st.integers(-32, 32).map(lambda number: number / 8)
biases = eighths | floats32.filter(lambda number: abs(number) < 1e3)

layers = st.just("all") | st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)
sites = st.lists(st.sampled_from(IN_LAYERS), min_size=1, max_size=3, unique=True)
names = st.sampled_from(["happy", "org/refuse", "a.b:c-1"])


def numbers(width: int) -> st.SearchStrategy[list[float]]:
    return st.lists(eighths, min_size=width, max_size=width)


def directions(width: int) -> st.SearchStrategy[Vector]:
    """Vectors that are not zero."""
    return numbers(width).filter(any).map(Vector.parse)


def rows(width: int, rank: int | None = None) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(numbers(width), min_size=rank or 1, max_size=rank or 3)


def where(
    positions: st.SearchStrategy[Positions] = edit_positions,
) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"layer": layers, "site": sites, "positions": positions})


@st.composite
def subspaces(draw: st.DrawFn, width: int) -> list[list[float]]:
    """Linearly independent rows."""
    found = draw(rows(width).filter(lambda rows: len(rows) <= width))
    assume(np.linalg.svd(np.array(found), compute_uv=False).min() > 0.1)
    return found


@st.composite
def rotations(draw: st.DrawFn, width: int) -> np.ndarray:
    """Orthonormal rows."""
    found = np.array(draw(subspaces(width)))
    return np.linalg.qr(found.T)[0].T


@st.composite
def clamps(draw: st.DrawFn, width: int, places: st.SearchStrategy[dict[str, Any]]) -> Clamp:
    low, high = draw(
        st.tuples(eighths, eighths).map(sorted)
        | st.tuples(st.none(), eighths)
        | st.tuples(eighths, st.none())
    )
    strength = draw(eighths)
    return Clamp(draw(directions(width)), low=low, high=high, strength=strength, **draw(places))


@st.composite
def features(draw: st.DrawFn, width: int, places: st.SearchStrategy[dict[str, Any]]) -> Feature:
    mode = draw(st.sampled_from(["set", "add", "scale", "ablate"]))
    count = draw(st.integers(1, 3))
    each = eighths | st.lists(eighths, min_size=count, max_size=count)
    row = st.lists(numbers(width), min_size=count, max_size=count)
    return Feature(
        draw(row),
        draw(row),
        mode=mode,
        value=None if mode == "ablate" else draw(each),
        bias=draw(each),
        threshold=draw(st.none() | eighths.map(abs)),
        decoder_bias=draw(st.none() | numbers(width)),
        **draw(places),
    )


@st.composite
def affines(draw: st.DrawFn, width: int, places: st.SearchStrategy[dict[str, Any]]) -> Affine:
    if draw(st.booleans()):
        square = st.lists(numbers(width), min_size=width, max_size=width)
        bias = draw(numbers(width) | eighths)
        return Affine(matrix=draw(square), bias=bias, scale=draw(eighths), **draw(places))
    read = draw(rows(width))
    rank = len(read)
    write, bias = draw(rows(width, rank)), draw(numbers(rank) | eighths)
    return Affine(read, write, bias=bias, scale=draw(eighths), **draw(places))


@st.composite
def lorefts(draw: st.DrawFn, width: int, places: st.SearchStrategy[dict[str, Any]]) -> LoReFT:
    rotation = draw(rotations(width))
    weight, bias = draw(rows(width, len(rotation))), draw(numbers(len(rotation)))
    return LoReFT(rotation, weight, bias, **draw(places))


def steers(width: int, places: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Steer]:
    norms = st.sampled_from([None, "match", "keep"])
    scales = eighths | floats32.filter(lambda number: abs(number) < 1e3)
    several = rows(width).filter(lambda found: any(number for row in found for number in row))
    return st.builds(
        lambda vector, scale, norm, place: Steer(vector, scale=scale, norm=norm, **place),
        directions(width),
        scales,
        norms,
        places,
    ) | st.builds(
        lambda found, scale, norm, place: Steer(rows=found, scale=scale, norm=norm, **place),
        several,
        scales,
        norms,
        places,
    )


def plain_kinds(
    width: int = WIDTH, places: st.SearchStrategy[dict[str, Any]] | None = None
) -> list[st.SearchStrategy[PlainEdit]]:
    """A strategy for each operation but Gate, with vectors by value."""
    at = where() if places is None else places
    kinds = (
        steers(width, at),
        st.builds(
            lambda rows, strength, place: Ablate(rows, strength=strength, subspace=True, **place),
            subspaces(width),
            eighths,
            at,
        ),
        clamps(width, at),
        features(width, at),
        affines(width, at),
        lorefts(width, at),
        st.builds(
            lambda rows, alpha, place: Replace(rows, alpha=alpha, **place), rows(width), eighths, at
        ),
        st.builds(
            lambda factor, shift, place: Scale(factor, shift=shift, **place),
            eighths | numbers(width),
            st.none() | numbers(width),
            at,
        ),
    )
    norms = st.sampled_from([None, "keep"])
    return [st.builds(_with_norm, kind, norms) for kind in kinds]


def plain_edits(
    width: int = WIDTH, places: st.SearchStrategy[dict[str, Any]] | None = None
) -> st.SearchStrategy[PlainEdit]:
    """Any of them."""
    return st.one_of(plain_kinds(width, places))


def _with_norm(edit: PlainEdit, norm: str | None) -> PlainEdit:
    return edit if isinstance(edit, Steer | Scale) else edit.replace(norm=norm)


def readings(width: int = WIDTH, own: bool = True) -> st.SearchStrategy[Reading]:
    """What a gate reads; where the edit is, or if not `own`, also elsewhere."""
    here = st.builds(Reading, numbers(width), eighths)
    if own:
        return here
    return here | st.builds(
        Reading, numbers(width), eighths, st.integers(-2, 3), st.sampled_from(IN_LAYERS)
    )


def gates(
    width: int = WIDTH, places: st.SearchStrategy[dict[str, Any]] | None = None, own: bool = False
) -> st.SearchStrategy[Gate]:
    sharpness = st.none() | eighths.filter(bool)
    return st.builds(Gate, plain_edits(width, places), readings(width, own), eighths, sharpness)


def edits(
    width: int = WIDTH, places: st.SearchStrategy[dict[str, Any]] | None = None
) -> st.SearchStrategy[Edit]:
    """Every operation, with vectors by value."""
    return plain_edits(width, places) | gates(width, places)


@st.composite
def named_edits(draw: st.DrawFn) -> Edit:
    """Every operation that takes a name, with one; its place may be left out."""
    place = draw(where())
    for name in draw(st.sets(st.sampled_from(["layer", "site"]))):
        del place[name]
    name = draw(names)
    return draw(
        st.sampled_from(
            [
                Steer(Named(name, draw(eighths)), **place),
                Ablate(name, **place),
                Ablate([name, "another", [1.0, 0.0, 0.0]], **place),
                Clamp(name, value=1, **place),
                Replace(name, alpha=draw(eighths), **place),
                Replace([name, [1.0, 0.0, 0.0]], **place),
                Gate(Steer(name, **place), name),
            ]
        )
    )


def probes(positions: st.SearchStrategy[Positions] = capture_positions) -> st.SearchStrategy[Probe]:
    return st.builds(
        Probe,
        numbers(WIDTH),
        layer=st.integers(0, 3),
        bias=biases,
        site=st.sampled_from(IN_LAYERS),
        positions=positions,
    )


places = {
    "sink": st.sampled_from(["memory", "store", "a.b-1"]),
    "tag": st.sampled_from(["", "v1"]),
    "request_id": st.sampled_from(["", "r_1"]),
}
# Two captures that go to one place have to be described alike.
# And only rows that are for memory are shown on the way.
captures = st.one_of(
    *(
        st.builds(
            Capture,
            layers=layers,
            sites=sites,
            positions=capture_positions,
            metadata=st.just({"of": ["all", 1.5, None]}),
            **{**places, **more},
        )
        for more in ({}, {"sink": st.just("memory"), "stream": st.booleans()})
    )
)


@st.composite
def _plans(
    draw: st.DrawFn,
    captures: st.SearchStrategy[Capture],
    edits: st.SearchStrategy[Edit],
    probes: st.SearchStrategy[Probe],
) -> Plan:
    least = draw(st.sampled_from([(1, 0, 0), (0, 1, 0), (0, 0, 1)]))
    scores = draw(st.lists(probes, min_size=least[2], max_size=2))
    return Plan(
        tuple(draw(st.lists(captures, min_size=least[0], max_size=2, unique=True))),
        tuple(draw(st.lists(edits, min_size=least[1], max_size=3))),
        tuple(probe.replace(name=f"p{nth}") for nth, probe in enumerate(scores)),
    )


def _of_length(positions: st.SearchStrategy[Positions]) -> st.SearchStrategy[Positions]:
    return positions.filter(lambda found: not found.needs_prompt)


# Of all that there is, names of vectors among it.
plans = _plans(captures, edits() | named_edits(), probes())
# Those for which a prompt's length is enough, with all vectors by value.
plans_by_length = _plans(
    st.builds(Capture, layers=layers, sites=sites, positions=_of_length(capture_positions)),
    edits(WIDTH, where(_of_length(edit_positions))),
    probes(_of_length(capture_positions)),
)


@st.composite
def spoilt(draw: st.DrawFn, value: Any) -> Any:
    """`value`, of lists and dicts, with something in it replaced, removed or added."""
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], draw(spoilt(value[index])), *value[index + 1 :]]
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        name = draw(st.sampled_from(sorted(value)))
        match draw(st.integers(0, 5)):
            case 0:
                return {key: each for key, each in value.items() if key != name}
            case 1:
                return {**value, draw(field_names): draw(json_values)}
            case _:
                return {**value, name: draw(spoilt(value[name]))}
    return draw(json_values)


def reads_or_refuses(read: Any, value: Any) -> Any:
    """What is read; None if it is refused, in a message that never grows with what was sent."""
    problem = ""
    try:
        return read(value)
    except SpecError as error:
        problem = str(error)
    assert len(problem) < 1000
    return None
