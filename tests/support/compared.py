"""Differences between two engines' results for the same requests."""

from typing import Any

import torch
from torch import Tensor

_WHAT = ("activations", "probes", "attention", "logits", "logprobs")


def differences(
    found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]], tolerance: float
) -> list[str]:
    """What differs, in words, by case; results as `output_results.results` gives them."""
    problems = []
    for name, wanted in expected.items():
        mine = found[name]
        if mine["generated"] != wanted["generated"]:
            problems.append(f"{name}: {mine['generated']} instead of {wanted['generated']}")
            continue
        if not same_receipt(mine["receipt"], wanted["receipt"], tolerance):
            problems.append(f"{name}: {mine['receipt']} instead of {wanted['receipt']}")
        for what in _WHAT:
            there, asked = mine.get(what) or {}, wanted.get(what) or {}
            if set(there) != set(asked):
                problems.append(f"{name}: {sorted(there)} instead of {sorted(asked)}")
                continue
            for key, (values, positions, *_) in asked.items():
                problem = _off(there[key], values, positions, tolerance)
                if problem:
                    problems.append(f"{name}, {key}: {problem}")
    return problems


def same_receipt(
    found: dict[str, Any] | None, wanted: dict[str, Any] | None, tolerance: float
) -> bool:
    """Whether two receipts are equal, doses to within a relative tolerance."""
    (found, mine), (wanted, theirs) = _without_doses(found), _without_doses(wanted)
    if found != wanted or len(mine) != len(theirs):
        return False
    for one, other in zip(mine, theirs, strict=True):
        if one.keys() != other.keys():
            return False
        for key, value in other.items():
            is_near = isinstance(value, float) and abs(one[key] - value) <= tolerance * (1 + value)
            if one[key] != value and not is_near:
                return False
    return True


def _without_doses(receipt: dict[str, Any] | None) -> tuple[Any, list[dict[str, Any]]]:
    if not receipt or not receipt.get("edited"):
        return receipt, []
    edited = {**receipt["edited"]}
    doses = edited.pop("doses", [])
    return {**receipt, "edited": edited}, doses


def _off(found: Any, values: Tensor, positions: Tensor, tolerance: float) -> str:
    rows, places = found[:2]
    if places.tolist() != positions.tolist():
        return f"positions {places.tolist()} instead of {positions.tolist()}"
    if not len(values):
        return ""
    if values.dim() == 1:
        error = (rows - values).abs() / values.abs().max()
    else:
        error = torch.linalg.vector_norm((rows - values).float(), dim=1)
        error /= torch.linalg.vector_norm(values.float(), dim=1)
    worst = int(error.argmax())
    if float(error[worst]) <= tolerance:
        return ""
    return f"position {int(positions[worst])} is off by {float(error[worst]):.2e}"


def cut_at_ties(
    found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(found, expected, names of cases that were cut): where tokens differ from some point on, as
    two that are nearly as likely may where sums are rounded otherwise, what there is up to there.
    """
    mine, theirs, cut = dict(found), dict(expected), []
    for name, wanted in expected.items():
        pair = (found[name]["generated"], wanted["generated"])
        if pair[0] == pair[1]:
            continue
        cut.append(name)
        shared = next(
            (nth for nth, (a, b) in enumerate(zip(*pair, strict=False)) if a != b),
            min(map(len, pair)),
        )
        stop = len(wanted["prompt"]) + shared
        mine[name], theirs[name] = (_cut(one[name], shared, stop) for one in (found, expected))
    return mine, theirs, cut


def _cut(result: dict[str, Any], shared: int, stop: int) -> dict[str, Any]:
    """A result without what depends on tokens from the first that differs on."""
    short = {**result, "generated": result["generated"][:shared], "receipt": None}
    for what in _WHAT:
        short[what] = {
            key: (values[positions < stop], positions[positions < stop])
            for key, (values, positions, *_) in (result.get(what) or {}).items()
            if key != "last_row"
        }
    return short
