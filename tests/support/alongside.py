"""One completion against transformers with hooks: its rows, its edits and its receipt."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from midstream import Capture, Steer
from support.engines import ALL_SITES
from support.oracle import HookEdit, Oracle, Tap, relative_error
from support.tiny import HIDDEN, LAYERS

TOLERANCE = 2e-5
EVERYTHING = Capture("all", ALL_SITES)
PUSH = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(77))


def push(layer: int = 1, scale: float = 2.0, **where: Any) -> Steer:
    """An edit that is felt."""
    return Steer(PUSH, layer, scale, site="resid_mid", **where)


def hooked(layer: int = 1, scale: float = 2.0, where: Any = lambda _: True) -> HookEdit:
    """The same for the oracle."""
    return HookEdit("resid_mid", layer, PUSH, scale, where)


def rows_of(prompt: Sequence[int], generated: Iterable[int]) -> list[int]:
    """The token of every row: the last sampled one is never fed back."""
    return [*prompt, *generated][:-1]


def check_rows(
    oracle: Oracle, holder: Any, tokens: Sequence[int], edits: Sequence[HookEdit] = ()
) -> Tensor:
    """Holds all rows of an EVERYTHING capture, and the receipt, against one forward over the same
    tokens; returns its logits [T, V].
    """
    logits, seen = oracle.run(tokens, edits)
    check_captured(holder, seen, range(len(tokens)))
    assert holder.activations.token_ids.tolist() == list(tokens)
    receipt = holder.receipt
    assert receipt.status == "ok"
    assert receipt.prompt_tokens + receipt.generated_tokens - 1 == len(tokens)
    expected = sum(edit.where(position) for edit in edits for position in range(len(tokens)))
    if edits:
        assert receipt.edited.expected == receipt.edited.applied == expected
    else:
        assert receipt.edited is None
    return logits


def check_captured(holder: Any, seen: dict[Tap, Tensor], positions: Iterable[int]) -> None:
    """Holds every site of every layer, at these positions, against what the oracle saw."""
    wanted = list(positions)
    taps = {(site, layer) for site in ALL_SITES for layer in range(LAYERS)}
    assert set(holder.activations) == taps
    for tap in taps:
        assert holder.activations.positions_of(*tap).tolist() == wanted
        error = relative_error(holder.activations[tap], seen[tap][wanted])
        assert error < TOLERANCE, f"{tap}: {error}"
