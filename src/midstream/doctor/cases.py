"""The requests that are tried: plain ones, and one for each operation.

Vectors are as long as what is there, so that an edit that is missed, or done at the wrong place,
cannot hide in the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream import (
    Ablate,
    Affine,
    Clamp,
    Feature,
    Gate,
    LoReFT,
    Probe,
    Replace,
    Scale,
    Steer,
)
from midstream.doctor import formulas
from midstream.doctor.reference import Reference, Tap
from midstream.sites import NAMES

PROMPT_LENGTHS = (3, 13, 37)
# The prompt that operations are tried on.
EDITED = 1
PLAIN_TOKENS, EDITED_TOKENS = 4, 2
FIRST_TOKEN = 4


@dataclass(frozen=True)
class Case:
    """One request, and what transformers makes of it.

    Attributes:
        name: of the operation; empty for a plain request.
        tap: where it is; None for a plain request.
        prompt: token ids.
        edit: by value, or None.
        probe: by value, or None.
        tokens: the greedy continuation.
        logits: float32 [T, V] over prompt and tokens, the last token left out.
        values: float32 [T, H] of each tap.
        effect: how far the edit moved what is at its tap, relative to it.
    """

    name: str
    tap: Tap | None
    prompt: list[int]
    edit: Any
    probe: Any
    tokens: list[int]
    logits: Tensor
    values: dict[Tap, Tensor]
    effect: float = 0.0


def prompts(vocabulary: int, seed: int) -> list[list[int]]:
    """Token ids at random, as many as PROMPT_LENGTHS says."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randint(FIRST_TOKEN, vocabulary, (size,), generator=draw).tolist()
        for size in PROMPT_LENGTHS
    ]


def plain_cases(reference: Reference, seed: int) -> list[Case]:
    """Requests that only read."""
    found = []
    for prompt in prompts(reference.vocabulary, seed):
        found.append(_case(reference, "", None, prompt, None, None, PLAIN_TOKENS))
    return found


def operation_cases(reference: Reference, seed: int) -> list[Case]:
    """One request for each operation: `Steer` at each site of some layers, all of them where they
    are few; the others where the stream leaves the layer in the middle, and at its sites in turn.

    Args:
        reference: has looked for its places.
        seed: of the vectors.
    """
    count = len(reference.layers)
    prompt = prompts(reference.vocabulary, seed)[EDITED]
    plain = reference.run(prompt)

    def maker(tap: Tap, nth: int = 0) -> _Maker:
        return _Maker(tap, plain.values[tap], seed + nth)

    found = [
        _tried(reference, "Steer", maker((site, layer)), prompt)
        for layer in sorted({0, count // 3, 2 * count // 3, count - 1})
        for site in NAMES
        if reference.missing((site, layer)) is None
    ]
    taps = [(site, count // 2) for site in NAMES]
    taps = [tap for tap in taps if reference.missing(tap) is None]
    others = [name for name in OPERATIONS if name != "Steer"]
    for nth, name in enumerate(others):
        # A branch may be one that the engine lacks; the stream is always there.
        for tap in dict.fromkeys((taps[nth % len(taps)], taps[-1])):
            found.append(_tried(reference, name, maker(tap, nth), prompt))
    return found


def _tried(reference: Reference, name: str, maker: _Maker, prompt: list[int]) -> Case:
    made = OPERATIONS[name](maker)
    if isinstance(made, Probe):
        return _case(reference, name, maker.tap, prompt, None, made, EDITED_TOKENS)
    return _case(reference, name, maker.tap, prompt, made, None, EDITED_TOKENS)


def _case(
    reference: Reference,
    name: str,
    tap: Tap | None,
    prompt: list[int],
    edit: Any,
    probe: Any,
    count: int,
) -> Case:
    changes = {} if edit is None or tap is None else {tap: lambda rows: formulas.apply(edit, rows)}
    tokens, seen = reference.generate(prompt, count, changes)
    effect = 0.0
    if changes and tap is not None:
        moved = seen.values[tap] - seen.before[tap]
        effect = float(moved.norm() / seen.before[tap].norm())
    return Case(name, tap, prompt, edit, probe, tokens, seen.logits, seen.values, effect)


class _Maker:
    """Edits of one tap, sized by what is there."""

    def __init__(self, tap: Tap, rows: Tensor, seed: int) -> None:
        self.tap = tap
        self.rows = rows.double()
        self.size = float(rows.norm(dim=-1).median())
        self.place = {"site": tap[0], "layer": tap[1]}
        self._draw = torch.Generator().manual_seed(seed)

    def vector(self, length: float = 1.0) -> Tensor:
        """Of a random direction, `length` times as long as what is there."""
        v = torch.randn(self.rows.shape[1], generator=self._draw)
        sized: Tensor = v * (length * self.size / v.norm())
        return sized

    def direction(self) -> Tensor:
        """A unit vector, partly along what is there: products with it are not small."""
        row = self.rows[len(self.rows) // 2].float()
        v = torch.randn(row.shape[0], generator=self._draw)
        both = row / row.norm() + v / v.norm()
        unit: Tensor = both / both.norm()
        return unit

    def middle(self, direction: Tensor) -> float:
        """A threshold that about half of the products are past, far from each."""
        products = (self.rows @ direction.double()).sort().values
        third = len(products) // 3
        gaps = products.diff()[third : len(products) - third]
        nth = third + int(gaps.argmax())
        return float(products[nth] + products[nth + 1]) / 2

    def orthonormal(self) -> Tensor:
        """Two such rows."""
        rows = torch.stack([self.direction(), self.direction()]).double()
        found: Tensor = torch.linalg.qr(rows.T).Q.T.contiguous().float()
        return found


def _clamp(make: _Maker) -> Clamp:
    direction = make.direction()
    middle = make.middle(direction)
    return Clamp(direction, low=middle + 0.5 * make.size, high=middle + make.size, **make.place)


def _gate(make: _Maker) -> Gate:
    direction = make.direction()
    return Gate(Steer(make.vector(), **make.place), direction, make.middle(direction))


def _feature(make: _Maker) -> Feature:
    encoder = make.direction()
    bias = -make.middle(encoder)
    return Feature(encoder, make.direction(), value=1.5 * make.size, bias=bias, **make.place)


def _affine(make: _Maker) -> Affine:
    read = torch.stack([make.direction(), make.direction()])
    return Affine(read, 0.5 * read.flip(0), bias=0.2 * make.size, **make.place)


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
}
