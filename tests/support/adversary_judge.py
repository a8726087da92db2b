"""Comparison of a request's results with the same request alone, or with hooks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.sites import Tap
from support.adversary_mix import Ask
from support.inner_oracle import InnerOracle
from support.oracle_edits import At, EditOracle, row_error


@dataclass(frozen=True)
class Measure:
    """What counts as the same."""

    rows: float = 1e-4  # largest relative difference of rows, as `error` measures it, and of scores
    tie: float = 2e-3  # largest difference of logprobs
    # Whether tokens may part where two of them are as likely, to within `tie`. What was computed
    # before that is compared, and what came after is not. Tokens that were sampled are as likely
    # as chance has it: that they part at times is for the caller to bound.
    splits: bool = False
    error: Callable[[Tensor, Tensor], float] = row_error  # of two [rows, hidden]


def completions(output: Any) -> list[tuple[Any, Any]]:
    """(completion, what holds its results) of each."""
    several = len(output.outputs) > 1
    return [(one, one if several else output) for one in output.outputs]


def computed(ask: Ask, completion: Any) -> list[int]:
    """The ids of the tokens that were computed."""
    return [*ask.prompt, *completion.token_ids][: len(ask.prompt) + len(completion.token_ids) - 1]


def differences(ask: Ask, found: Any, expected: Any, measure: Measure) -> list[str]:
    """In what a request's output differs from that of the same request alone."""
    if found.prompt_token_ids != ask.prompt:
        return ["it has another prompt"]
    said = []
    pairs = zip(completions(found), completions(expected), strict=True)
    for nth, ((mine, holder), (theirs, reference)) in enumerate(pairs):
        sampled = bool(ask.params.get("temperature"))
        split, wrong = _tokens(mine, theirs, sampled, measure)
        wrong += _results(ask, (mine, holder), (theirs, reference), split, measure)
        said += [f"completion {nth}: {each}" for each in wrong]
    cap = _first_read(ask)
    if cap is not None and found.num_cached_tokens > cap:
        said.append(
            f"{found.num_cached_tokens} tokens were served by the cache, though position {cap} "
            "is to be read"
        )
    return said


def parted(found: Any, expected: Any) -> bool:
    """Whether any of two outputs' completions have other tokens."""
    return any(
        list(mine.token_ids) != list(theirs.token_ids)
        for mine, theirs in zip(found.outputs, expected.outputs, strict=True)
    )


def against_hooks(ask: Ask, output: Any, oracle: EditOracle, measure: Measure) -> list[str]:
    """In what each completion differs from one forward over its tokens, with hooks."""
    said = []
    for completion, holder in completions(output):
        ids = computed(ask, completion)
        edits = [At(edit, frozenset(place.chosen(ids)).__contains__) for edit, place in ask.parts]
        seen = oracle.run(ids, edits)
        for tap, value in (getattr(holder, "activations", None) or {}).items():
            where = holder.activations.positions_of(*tap)
            expected = _of_heads(ask, oracle, tap, seen.values[tap][where])
            said += _rows_apart(tap, value, expected, measure)
        for probe in ask.probes:
            where = holder.probes.positions_of(probe.name)
            scores = torch.from_numpy(oracle.scores(probe, seen))[where]
            said += _apart(f"probe {probe.name}", holder.probes[probe.name], scores, measure)
        said += _placed(ask, holder, ids)
        if ask.params["temperature"] == 0:
            rows = seen.logits[len(ask.prompt) - 1 :]
            for nth, (row, token) in enumerate(zip(rows, completion.token_ids, strict=True)):
                if not float(row.max() - row[token]) <= 5 * measure.tie:
                    said.append(f"token {nth} is not the most likely")
    return said


# -- inside -----------------------------------------------------------------------------------


def _first_read(ask: Ask) -> int | None:
    """The first position of the prompt that must be computed, since it is captured."""
    firsts = []
    for place in ask.reads:
        # The final row is one of the prompt's where one token is generated.
        if place.last_only:
            firsts.append(len(ask.prompt) - 1)
        else:
            firsts += place.chosen(ask.prompt)[:1]
    return min(firsts, default=None)


def _tokens(
    mine: Any, theirs: Any, sampled: bool, measure: Measure
) -> tuple[int | None, list[str]]:
    """Where the tokens part by a tie (None: nowhere), and what is wrong."""
    found, expected = list(mine.token_ids), list(theirs.token_ids)
    pairs = list(zip(found, expected, strict=False))
    split = next((nth for nth, (a, b) in enumerate(pairs) if a != b), None)
    if split is None and len(found) != len(expected):
        return None, [f"{len(found)} tokens came, expected {len(expected)}"]
    wrong = []
    for nth in range(len(found) if split is None else split):
        told, expects = mine.logprobs[nth], theirs.logprobs[nth]
        off = abs(told[found[nth]].logprob - expects[found[nth]].logprob)
        if not off <= measure.tie:
            wrong.append(f"the logprob of token {nth} is {off:.2e} off")
    if split is None:
        if (mine.text, mine.finish_reason, mine.stop_reason) != (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        ):
            wrong.append(
                f"it ended as {mine.text!r}, {mine.finish_reason}, {mine.stop_reason}; expected "
                f"{theirs.text!r}, {theirs.finish_reason}, {theirs.stop_reason}"
            )
        return None, wrong
    gap = _gap(theirs.logprobs[split], found[split], expected[split])
    if measure.splits and (sampled or (gap is not None and gap <= measure.tie)):
        return split, wrong
    return split, [
        *wrong,
        f"token {split} is {found[split]}, expected {expected[split]} (logprobs "
        f"{'unknown' if gap is None else f'{gap:.2e}'} apart): {found} instead of {expected}",
    ]


def _gap(step: Any, one: int, other: int) -> float | None:
    """How far apart two tokens' logprobs are, where both are known."""
    if one not in step or other not in step:
        return None
    return abs(float(step[one].logprob - step[other].logprob))


def _results(
    ask: Ask,
    found: tuple[Any, Any],
    expected: tuple[Any, Any],
    split: int | None,
    measure: Measure,
) -> list[str]:
    (mine, holder), (_, reference) = found, expected
    ids = computed(ask, mine)
    # Rows of tokens up to where two runs parted; the token that differs is itself a later row.
    rows = len(ids) if split is None else len(ask.prompt) + split
    names = ("activations", "probes", "receipt")
    given, wanted = ([getattr(one, name, None) for name in names] for one in (holder, reference))
    said = _activations(given[0], wanted[0], ids, rows, measure)
    said += _scores(given[1], wanted[1], rows, measure)
    receipt, told = given[2], wanted[2]
    if (receipt is None) != (told is None):
        return [*said, f"the receipt is {receipt}, expected {told}"]
    if receipt is None:
        return said
    if receipt.status != "ok" or told.status != "ok":
        said.append(f"the receipt says {receipt.problems}, alone {told.problems}")
    if split is None:
        said += _receipts(receipt, told)
    edited = receipt.edited
    if edited is not None and edited.applied + edited.cached != edited.expected:
        said.append(f"the receipt does not add up: {edited}")
    return said


def _receipts(receipt: Any, told: Any) -> list[str]:
    said = [
        f"receipt.{name} is {getattr(receipt, name)}, expected {getattr(told, name)}"
        for name in ("prompt_tokens", "generated_tokens", "captured", "probed")
        if getattr(receipt, name) != getattr(told, name)
    ]
    # Server-wide edits have names of their own, and alone they are edits like others.
    if [one.positions for one in receipt.selected] != [one.positions for one in told.selected]:
        said.append(f"receipt.selected is {receipt.selected}, expected {told.selected}")
    if (receipt.edited is None) != (told.edited is None):
        said.append(f"receipt.edited is {receipt.edited}, expected {told.edited}")
    elif receipt.edited is not None:
        mine, theirs = receipt.edited, told.edited
        if (mine.expected, mine.tokens) != (theirs.expected, theirs.tokens):
            said.append(f"receipt.edited is {mine}, expected {theirs}")
        if theirs.applied != theirs.expected:
            said.append(f"alone, without a cache, the receipt is {theirs}")
    return said


def _activations(
    found: Any, expected: Any, ids: Sequence[int], rows: int, measure: Measure
) -> list[str]:
    if (found is None) != (expected is None):
        return [f"activations are {found}, expected {expected}"]
    if found is None:
        return []
    if found.keys() != expected.keys():
        return [f"activations are of {found.keys()}, expected {expected.keys()}"]
    said = []
    for tap, value in found.items():
        positions = found.positions_of(*tap)
        own = [int(ids[position]) for position in positions.tolist()]
        if found.token_ids_of(*tap).tolist() != own or value.shape[0] != len(own):
            said.append(f"{tap}: the rows are not of the tokens at their positions")
            continue
        keep, kept = positions < rows, expected.positions_of(*tap) < rows
        theirs = expected.positions_of(*tap)[kept]
        if positions[keep].tolist() != theirs.tolist():
            # The final row is where each of two runs ended.
            if rows == len(ids):
                said.append(f"{tap}: positions {positions.tolist()}, expected {theirs.tolist()}")
            continue
        said += _rows_apart(tap, value[keep], expected[tap][kept], measure)
    return said


def _scores(found: Any, expected: Any, rows: int, measure: Measure) -> list[str]:
    if (found is None) != (expected is None) or list(found or ()) != list(expected or ()):
        return [f"probes are {found}, expected {expected}"]
    said = []
    for name in found or ():
        mine, theirs = found.positions_of(name), expected.positions_of(name)
        keep, kept = mine < rows, theirs < rows
        if mine[keep].tolist() != theirs[kept].tolist():
            said.append(f"probe {name}: positions {mine.tolist()}, expected {theirs.tolist()}")
            continue
        said += _apart(f"probe {name}", found[name][keep], expected[name][kept], measure)
    return said


def _rows_apart(tap: Any, found: Any, expected: Any, measure: Measure) -> list[str]:
    # A selection may be empty, for example if no generated token has one of its ids.
    if found.shape != expected.shape:
        return [f"{tap} is {tuple(found.shape)}, expected {tuple(expected.shape)}"]
    error = measure.error(found.flatten(1), expected.flatten(1)) if len(expected) else 0.0
    return [] if error <= measure.rows else [f"{tap} is {error:.2e} off"]


def _of_heads(ask: Ask, oracle: EditOracle, tap: Tap, rows: Tensor) -> Tensor:
    """Rows of all heads as those of the heads that the request's captures of the tap name."""
    if not isinstance(oracle, InnerOracle) or not oracle.heads(tap[0]):
        return rows
    every = list(range(oracle.heads(tap[0])))
    named = [
        capture.get("heads")
        for capture in (ask.alone or {})["capture"]
        if tap[0] in capture["sites"] and tap[1] in capture["layers"]
    ]
    # In the order in which they are listed, each once.
    heads = every if None in named else list(dict.fromkeys(head for one in named for head in one))
    return rows.unflatten(-1, (-1, oracle.head_dim))[:, heads]


def _apart(name: str, found: Any, expected: Any, measure: Measure) -> list[str]:
    if not len(expected):
        return []
    error = float((found.double() - expected.double()).abs().max())
    # A score is a sum of many products, which are larger than what is left of them.
    bound = 10 * measure.rows * (float(expected.abs().max()) + 1.0)
    return [] if error <= bound else [f"{name} is {error:.2e} off"]


def _placed(ask: Ask, holder: Any, ids: Sequence[int]) -> list[str]:
    """The receipt's selections against the positions by hand; of the request's own edits."""
    if getattr(holder, "receipt", None) is None:
        return []
    told = {one.what: one.positions for one in holder.receipt.selected}
    own = ask.parts[len([what for what in told if what.startswith("steering")]) :]
    said = []
    for nth, (_, place) in enumerate(own):
        ranges = told.get(f"edits[{nth}]", ())
        positions = [position for start, stop in ranges for position in range(start, stop)]
        if positions != place.chosen(ids):
            said.append(f"edits[{nth}] is said to be at {ranges}, expected {place.chosen(ids)}")
    return said
