"""Test requests of the doctor: plain ones, and one for each operation.

Edit vectors have the norm of the activations at their tap. An edit that is skipped or applied at
the wrong site therefore exceeds the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream import Ablate, Affine, Clamp, Feature, Gate, LoReFT, Probe, Replace, Scale, Steer
from midstream.lab.attribution.hooked.end_hooks import COMPARED
from midstream.lab.tools.doctor import formulas
from midstream.lab.tools.doctor.reference import Reference
from midstream.sites import ENDS, IN_LAYERS, INNER, OUTER, Tap

PROMPT_LENGTHS = (3, 13, 37)
# Index of the prompt that operations are tested on.
EDITED = 1
PLAIN_TOKENS, EDITED_TOKENS = 4, 2
FIRST_TOKEN = 4


@dataclass(frozen=True)
class Case:
    """One test request with the results of transformers.

    Attributes:
        name: name of the operation; empty for a plain request.
        tap: tap of the operation; None for a plain request.
        prompt: token ids, with those of an image.
        request: the engine's prompt.
        edit: edit with vectors by value, or None.
        probe: probe with its direction by value, or None.
        logits: float32 [T, V] over prompt and continuation, without the last token.
        values: float32 [T, H] by tap, of the taps that `compares` names.
        effect: norm of the edit's change at its tap, relative to the norm before the edit.
        heads: number of heads that the vectors at the tap are of; 0: none.
    """

    name: str
    tap: Tap | None
    prompt: list[int]
    request: dict[str, Any]
    edit: Any
    probe: Any
    tokens: list[int]
    logits: Tensor
    values: dict[Tap, Tensor]
    effect: float = 0.0
    heads: int = 0


def compares(case_tap: Tap | None, tap: Tap) -> bool:
    """Return whether a tap's values are compared in a request with an operation at `case_tap`: of
    inner sites, which take far more memory than the others, only those of the same layer.
    """
    return case_tap is None or tap[0] not in INNER or tap[1] == case_tap[1]


def prompts(vocabulary: int, seed: int) -> list[list[int]]:
    """Return random prompts (token ids) with the lengths of `PROMPT_LENGTHS`."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(FIRST_TOKEN, vocabulary, (size,), generator=draw).tolist()
        for size in PROMPT_LENGTHS
    ]


def plain_cases(reference: Reference, seed: int) -> list[Case]:
    """Return the requests that only capture."""
    cases = []
    for prompt in [*prompts(reference.vocabulary, seed), *reference.image_prompts]:
        cases.append(_case(reference, "", None, prompt, None, PLAIN_TOKENS))
    return cases


def operation_cases(reference: Reference, seed: int, names: Collection[str] = ()) -> list[Case]:
    """Return requests that test each operation.

    `Steer` is tested at every site of up to four layers, and at the sites without a layer. Each
    other operation is tested in the middle layer, at the last site of the stream and at one further
    site, which rotates, and at the final norm. Edits and probes of single heads and components are
    tested in the middle layer, at the sites that have these.

    Args:
        reference: transformers' model, after `find_sites`; names: operations beside `Steer`.
    """
    count = len(reference.layers)
    prompt = prompts(reference.vocabulary, seed)[EDITED]
    plain = reference.run(prompt)

    def maker(tap: Tap, offset: int = 0) -> _Maker:
        return _Maker(tap, plain.values[tap], seed + offset, reference.heads(tap))

    def can_edit(tap: Tap) -> bool:
        return reference.missing(tap) is None and not reference.is_fixed(tap)

    cases = [
        _operation_case(reference, "Steer", maker((site, layer)), prompt)
        for layer in sorted({0, count // 3, 2 * count // 3, count - 1})
        for site in IN_LAYERS
        if can_edit((site, layer))
    ]
    ends = [(site, ENDS[site] % count) for site in COMPARED if reference.missing((site, 0)) is None]
    cases += [_operation_case(reference, "Steer", maker(tap), prompt) for tap in ends]
    taps = [(site, count // 2) for site in OUTER]
    taps = [tap for tap in taps if reference.missing(tap) is None]
    # Several streams are too wide for a matrix.
    width = min(plain.values[tap].shape[1] for tap in taps)
    taps = [tap for tap in taps if plain.values[tap].shape[1] == width]
    others = [name for name in OPERATIONS if name != "Steer" and (not names or name in names)]
    for index, name in enumerate(others):
        # The engine may lack a branch site; the stream site always exists.
        for tap in dict.fromkeys((taps[index % len(taps)], taps[-1], *ends[-1:])):
            cases.append(_operation_case(reference, name, maker(tap, index), prompt))
    for prompt in reference.image_prompts:
        for tap in dict.fromkeys((taps[0], taps[-1])):
            cases += [_operation_case(reference, name, maker(tap), prompt) for name in WITH_IMAGE]
    prompt = prompts(reference.vocabulary, seed)[EDITED]
    inner = [(site, count // 2) for site in INNER if can_edit((site, count // 2))]
    for name in OF_PARTS:
        for tap in inner if "head" not in name else filter(reference.heads, inner):
            cases.append(_operation_case(reference, name, maker(tap), prompt))
    return cases


def _operation_case(reference: Reference, name: str, maker: _Maker, prompt: list[int]) -> Case:
    made = {**OPERATIONS, **OF_PARTS, **WITH_IMAGE}[name](maker)
    return _case(reference, name, maker.tap, prompt, made, EDITED_TOKENS)


def _case(
    reference: Reference,
    name: str,
    tap: Tap | None,
    prompt: list[int],
    made: Any,
    count: int,
) -> Case:
    """Run a request with an edit or a probe, or with neither (None)."""
    edit, probe = (None, made) if isinstance(made, Probe) else (made, None)
    heads = 0 if tap is None else reference.heads(tap)
    changes = {}
    if edit is not None and tap is not None:
        changes = {tap: lambda rows: formulas.apply(edit, rows, heads)}
    tokens, seen = reference.generate(prompt, count, changes)
    effect = 0.0
    if changes and tap is not None:
        moved = seen.values[tap] - seen.before[tap]
        effect = float(moved.norm() / seen.before[tap].norm())
    values = {other: rows for other, rows in seen.values.items() if compares(tap, other)}
    request = reference.request(prompt)
    return Case(name, tap, prompt, request, edit, probe, tokens, seen.logits, values, effect, heads)


class _Maker:
    """Random edit parameters for one tap, scaled to the activations there."""

    def __init__(self, tap: Tap, rows: Tensor, seed: int, heads: int = 0) -> None:
        self.tap = tap
        self.rows = rows.double()
        self.heads = heads
        self.size = float(rows.norm(dim=-1).median())
        self.place: dict[str, Any] = {"site": tap[0]}
        if tap[0] not in ENDS:
            self.place["layer"] = tap[1]
        self._draw = torch.Generator().manual_seed(seed)

    def of_last_head(self) -> _Maker:
        """Return the same for the last head's part of the vectors."""
        part = self.rows[:, -(self.rows.shape[1] // self.heads) :]
        maker = _Maker(self.tap, part.float(), self._draw.initial_seed())
        maker.place["head"] = self.heads - 1
        return maker

    def vector(self, length: float = 1.0) -> Tensor:
        """Return a random vector whose norm is `length` times the median activation norm."""
        v = torch.randn(self.rows.shape[1], generator=self._draw)
        sized: Tensor = v * (length * self.size / v.norm())
        return sized

    def direction(self) -> Tensor:
        """Return a unit vector correlated with the activations, so that products are not small."""
        row = self.rows[len(self.rows) // 2].float()
        v = torch.randn(row.shape[0], generator=self._draw)
        both = row / row.norm() + v / v.norm()
        unit: Tensor = both / both.norm()
        return unit

    def middle(self, direction: Tensor) -> float:
        """Return a threshold that splits the products in about half, as far as possible from each
        product.
        """
        products = (self.rows @ direction.double()).sort().values
        third = len(products) // 3
        gaps = products.diff()[third : len(products) - third]
        index = third + int(gaps.argmax())
        return float(products[index] + products[index + 1]) / 2

    def orthonormal(self) -> Tensor:
        """Return two orthonormal vectors, float32 [2, H]."""
        rows = torch.stack([self.direction(), self.direction()]).double()
        basis: Tensor = torch.linalg.qr(rows.T).Q.T.contiguous().float()
        return basis


def _clamp(make: _Maker) -> Clamp:
    direction = make.direction()
    middle = make.middle(direction)
    return Clamp(direction, low=middle + 0.5 * make.size, high=middle + make.size, **make.place)


def _gate(make: _Maker) -> Gate:
    direction = make.direction()
    return Gate(Steer(make.vector(), **make.place), direction, make.middle(direction))


def _feature(make: _Maker) -> Feature:
    encoder = torch.stack([make.direction(), make.direction()])
    bias = [-make.middle(row) for row in encoder]
    # The first feature writes what the second reads: both read the vector before the edit.
    decoder = torch.stack([encoder[1], make.direction()])
    value = [1.5 * make.size, 0.0]
    return Feature(encoder, decoder, value=value, bias=bias, **make.place)


def _affine(make: _Maker) -> Affine:
    read = torch.stack([make.direction(), make.direction()])
    return Affine(read, 0.5 * read.flip(0), bias=0.2 * make.size, **make.place)


def _map(make: _Maker) -> Affine:
    width = make.rows.shape[1]
    matrix = torch.stack([make.vector(1 / make.size) for _ in range(width)])
    return Affine(matrix=matrix, bias=make.vector(0.5), **make.place)


def _loreft(make: _Maker) -> LoReFT:
    weight = torch.stack([make.direction(), make.direction()])
    bias = [0.3 * make.size, -0.2 * make.size]
    return LoReFT(make.orthonormal(), weight, bias, **make.place)


OPERATIONS: dict[str, Callable[[_Maker], Any]] = {
    "Steer": lambda make: Steer(make.vector(), **make.place),
    "Ablate": lambda make: Ablate(torch.stack([make.direction(), make.direction()]), **make.place),
    "Clamp": _clamp,
    "Gate": _gate,
    "Feature": _feature,
    "Affine": _affine,
    "LoReFT": _loreft,
    "Replace": lambda make: Replace(make.vector(), alpha=0.7, **make.place),
    "Scale": lambda make: Scale(1.5, **make.place),
    "Probe": lambda make: Probe(make.direction(), bias=0.5, name="score", **make.place),
    "Affine by a matrix": _map,
}
# Edits and probes of single heads and components, at inner sites.
OF_PARTS: dict[str, Callable[[_Maker], Any]] = {
    "Steer of a head": lambda make: OPERATIONS["Steer"](make.of_last_head()),
    "Ablate of a head": lambda make: OPERATIONS["Ablate"](make.of_last_head()),
    "Probe of a head": lambda make: OPERATIONS["Probe"](make.of_last_head()),
    "Scale of components": lambda make: Scale(
        -0.5, dims=range(0, make.rows.shape[1], 2), **make.place
    ),
}
# In a prompt with an image.
WITH_IMAGE: dict[str, Callable[[_Maker], Any]] = {
    "Steer with an image": OPERATIONS["Steer"],
    "Probe with an image": OPERATIONS["Probe"],
}
