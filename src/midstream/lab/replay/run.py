"""Recorded requests run again, in another order and mix: what differs, to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream.errors import ReceiptError, SpecError
from midstream.lab.replay.engine_identity import check_identity, identify
from midstream.lab.replay.record import (
    RecordedRequest,
    RecordedResult,
    attached,
    results_of,
    sampling_of,
)
from midstream.results.activations import Activations
from midstream.validation import at, read_count

if TYPE_CHECKING:
    from midstream.api.llm import LLM

MIX = 64


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which one kind of result differs from its record.

    Attributes:
        request: index of the request in the record, from 0.
        completion: index of the completion.
        what: "tokens", "logprobs", "scores NAME", "rows SITE.LAYER" or "receipt".
        position: of the token in the request, prompt first; −1: of none.
        amount: the largest absolute difference at any position; None: it is no number, or the
            record has digests alone.
        recorded, replayed: the values there, as text.
    """

    request: int
    completion: int
    what: str
    position: int
    amount: float | None = None
    recorded: str = ""
    replayed: str = ""

    def __str__(self) -> str:
        place = f" at position {self.position}" if self.position >= 0 else ""
        values = f": {self.recorded} was {self.replayed}" if self.recorded else ""
        amount = "" if self.amount is None else f", by at most {self.amount:.3g}"
        return f"request {self.request}.{self.completion}: {self.what}{place}{values}{amount}"


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What differs of requests that ran again.

    Attributes:
        requests: number of requests that ran.
        tokens, scores, rows: how many generated tokens, scores and rows were compared.
        differences: by request; empty: every bit is the same.
    """

    requests: int
    tokens: int
    scores: int
    rows: int
    differences: tuple[Difference, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        differ = len({difference.request for difference in self.differences})
        return (
            f"{self.requests:,} requests with {self.tokens:,} tokens, {self.scores:,} scores and "
            f"{self.rows:,} rows: {differ:,} differ"
        )


def replay(
    llm: LLM,
    records: Sequence[RecordedRequest],
    *,
    mix: int = MIX,
    seed: int = 0,
    anyway: bool = False,
) -> ReplayReport:
    """Run recorded requests again, in another order, and compare every bit of their results.

    Args:
        llm: an engine as the recorded one.
        records: see `read_records`.
        mix: number of requests that are sent at a time.
        seed: of the order.
        anyway: also run on an engine that differs in what the bits depend on.

    Raises:
        SpecError: the engine differs; the path is the field.
    """
    with at("mix"):
        read_count(mix, 1)
    if not anyway:
        here = identify(llm)
        for record in records:
            check_identity(record.engine, here)
    order = list(range(len(records)))
    random.Random(seed).shuffle(order)
    differences: list[Difference] = []
    for start in range(0, len(order), mix):
        chosen = order[start : start + mix]
        for index, output in zip(
            chosen, _run(llm, [records[index] for index in chosen]), strict=True
        ):
            differences += _compare(index, records[index], output)
    results = [result for record in records for result in record.results]
    return ReplayReport(
        len(records),
        sum(len(result.tokens) for result in results),
        sum(len(scores.positions) for result in results for scores in result.scores.values()),
        sum(len(rows.positions) for result in results for rows in result.rows.values()),
        tuple(sorted(differences, key=lambda difference: difference.request)),
    )


def _run(llm: LLM, records: Sequence[RecordedRequest]) -> list[Any]:
    params = [attached(sampling_of(record.sampling), record.plan) for record in records]
    adapters = [_adapter(record.adapter) for record in records]
    prompts = [{"prompt_token_ids": list(record.prompt)} for record in records]
    try:
        return llm.generate(
            prompts, params, use_tqdm=False, lora_request=adapters if any(adapters) else None
        )
    except ReceiptError as error:  # their receipts differ, which the report says
        return list(error.outputs)


def _adapter(fields: Mapping[str, Any] | None) -> Any:
    if fields is None:
        return None
    from vllm.lora.request import LoRARequest

    try:
        return LoRARequest(fields["name"], fields["id"], fields["path"])
    except (KeyError, ValueError) as error:
        raise SpecError("request.adapter", f"expected name, id and path: {error}") from None


def _compare(index: int, record: RecordedRequest, output: Any) -> Iterator[Difference]:
    results = results_of(output)
    if len(results) != len(record.results):
        counts = str(len(record.results)), str(len(results))
        yield Difference(index, 0, "completions", -1, None, *counts)
    stored = record.stored() if record.stored is not None else None
    for number, (before, after) in enumerate(zip(record.results, results, strict=False)):
        activations = None
        if stored is not None:
            owner = output if len(results) == 1 else output.outputs[number]
            activations = stored, owner.activations
        yield from _compare_results((index, number), len(record.prompt), before, after, activations)


def _compare_results(
    which: tuple[int, int],
    length: int,
    before: RecordedResult,
    after: RecordedResult,
    activations: tuple[Activations, Activations] | None,
) -> Iterator[Difference]:
    """Yield what differs, without what comes after a token that differs, which follows from it."""
    same = _common(before.tokens, after.tokens)
    if before.tokens != after.tokens:
        shown = [
            str(tokens[same]) if same < len(tokens) else "the end"
            for tokens in (before.tokens, after.tokens)
        ]
        yield Difference(*which, "tokens", length + same, None, *shown)
    pairs = before.logprobs[:same], after.logprobs[:same]
    texts = [[*map(repr, logprobs)] for logprobs in pairs]  # which tell all bits, and NaN is NaN
    first = _common(*texts)
    if first < same:
        shown = [part[first] for part in texts]
        with np.errstate(invalid="ignore"):
            gap = float(np.abs(np.subtract(*pairs)).max())
        amount = gap if np.isfinite(gap) else None
        yield Difference(*which, "logprobs", length + first, amount, *shown)
    end = length + same if before.tokens != after.tokens else 1 << 62
    for name in sorted({*before.scores, *after.scores}):
        yield from _compare_scores(which, name, end, before, after)
    for name in sorted({*before.rows, *after.rows}):
        yield from _compare_rows(which, name, end, (before, after), activations)
    if end == 1 << 62 and before.receipt != after.receipt:
        yield Difference(*which, "receipt", -1)


def _compare_scores(
    which: tuple[int, int], name: str, end: int, before: RecordedResult, after: RecordedResult
) -> Iterator[Difference]:
    pair = before.scores.get(name), after.scores.get(name)
    if pair[0] is None or pair[1] is None:
        yield Difference(*which, f"scores {name}", -1, None, *map(_presence, pair))
        return
    bits = [
        dict(zip(scores.positions, map(bytes, scores.numbers()), strict=True))
        for scores in (pair[0], pair[1])
    ]
    position = _first(bits[0], bits[1], end)
    if position is None:
        return
    numbers = [
        dict(zip(scores.positions, scores.numbers(), strict=True)) for scores in (pair[0], pair[1])
    ]
    shared = [place for place in numbers[0] if place in numbers[1] and place < end]
    gaps = [np.abs(numbers[0][place] - numbers[1][place]).max() for place in shared]
    shown = [str(values.get(position, np.array([])).tolist()) for values in numbers]
    amount = float(np.nanmax(gaps)) if gaps and not np.isnan(gaps).all() else None
    yield Difference(*which, f"scores {name}", position, amount, *shown)


def _compare_rows(
    which: tuple[int, int],
    name: str,
    end: int,
    results: tuple[RecordedResult, RecordedResult],
    activations: tuple[Activations, Activations] | None,
) -> Iterator[Difference]:
    pair = [result.rows.get(name) for result in results]
    if pair[0] is None or pair[1] is None:
        yield Difference(*which, f"rows {name}", -1, None, *map(_presence, pair))
        return
    digests = [dict(zip(rows.positions, rows.digests, strict=True)) for rows in pair if rows]
    position = _first(digests[0], digests[1], end)
    if position is not None:
        amount = None if activations is None else _gap(name, end, activations)
        yield Difference(*which, f"rows {name}", position, amount)


def _gap(name: str, end: int, activations: tuple[Activations, Activations]) -> float | None:
    """Return the largest difference of the decoded rows that both have before a position."""
    site, _, layer = name.rpartition(".")
    rows = [
        dict(zip(part.positions_of(site, int(layer)).tolist(), part[site, int(layer)].float(),
                 strict=True))
        for part in activations
    ]  # fmt: skip
    gaps = [
        float((rows[0][place].flatten() - rows[1][place].flatten()).abs().max())
        for place in rows[0]
        if place in rows[1] and place < end
    ]
    return max(gaps, default=None)


def _first(before: Mapping[int, Any], after: Mapping[int, Any], end: int) -> int | None:
    """Return the first position before `end` at which two differ; None: there is none."""
    places = (place for place in sorted({*before, *after}) if place < end)
    return next((place for place in places if before.get(place) != after.get(place)), None)


def _common(before: Sequence[Any], after: Sequence[Any]) -> int:
    """Return the number of entries with which both begin."""
    pairs = enumerate(zip(before, after, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(before), len(after)))


def _presence(part: Any) -> str:
    return "none" if part is None else "some"
