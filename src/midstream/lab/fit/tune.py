"""Layer and strength of a direction, tried as one batch, whose answers a second one reads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from midstream.errors import SpecError
from midstream.lab.fit.batches import PromptBatch, Steps, encode_prompts
from midstream.lab.fit.direction import Direction
from midstream.lab.fit.direction_set import DirectionSet
from midstream.lab.fit.guards import Guard, MaxKL, MaxPerplexity
from midstream.lab.fit.text_scores import logprobs_of, perplexity_of, reading_params
from midstream.lab.fit.tune_result import Tuning
from midstream.plan.positions.items import Window
from midstream.plan.readouts.logits import Logits, tap_of_logits
from midstream.plan.shape import ModelShape
from midstream.plan.tap_lookup import check_tapped
from midstream.results.arrays import to_numpy
from midstream.validation import at, is_int, kind, read_float32

Effect = Callable[[Any], float]
_MAX_TOKENS = 32


@dataclass(frozen=True)
class Tune:
    """What is tried, as it is asked for; see `LLM.tune`. `where` is for `Steer`."""

    directions: Any
    prompts: Any
    layers: Any
    scales: Any
    guard: Any
    read_layer: Any = None
    effect: Any = None
    sampling_params: Any = None
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TuneRequest:
    """What is tried, checked."""

    directions: dict[int, Direction]  # by layer
    prompts: list[list[int]]
    scales: tuple[float, ...]
    reading: Direction | None  # what reads the answers; None with `effect`
    effect: Effect | None
    guard: Guard | None
    params: Any
    where: dict[str, Any]

    @property
    def kl_tokens(self) -> int:
        """Tokens of each answer of which a divergence is measured."""
        return self.guard.tokens if isinstance(self.guard, MaxKL) else 0


@dataclass(frozen=True)
class _Reading:
    """What the unsteered model says of one answer: effect, log probabilities and divergences."""

    effect: float
    logprobs: Any
    kl: Any


def read_tune(llm: Any, asked: Tune) -> TuneRequest:
    """Check what is tried on an `LLM`, or an `AsyncLLM` that is ready, before anything is run."""
    guard, effect, read_layer = asked.guard, asked.effect, asked.read_layer
    chosen = _read_layers(asked.directions, asked.layers)
    if guard is not None and not isinstance(guard, (MaxPerplexity, MaxKL)):
        raise SpecError("guard", f"expected MaxPerplexity, MaxKL or None, got {kind(guard)}")
    if effect is not None and not callable(effect):
        raise SpecError("effect", f"expected a function of an output, got {kind(effect)}")
    if effect is not None and read_layer is not None:
        raise SpecError("read_layer", "`effect` replaces what is read; omit one of them")
    reading = None if effect is not None else _reading_of(asked.directions, read_layer)
    if reading is not None:
        reading.probe("effect")  # it has a midpoint
    shape: ModelShape = llm.info.shape
    for direction in chosen.values():
        with at("layers"):
            check_tapped((direction.site, direction.layer), shape, "", "")
        direction.steer(**asked.where)
    if reading is not None:
        with at("read_layer"):
            check_tapped((reading.site, reading.layer), shape, "", "")
    if isinstance(guard, MaxKL):
        with at("guard"):
            tap_of_logits(shape)
    prompt_ids = encode_prompts("prompts", asked.prompts, llm.get_tokenizer)
    max_model_len = llm.model_config.max_model_len
    params = _read_params(asked.sampling_params)
    for index, ids in enumerate(prompt_ids):
        if len(ids) + params.max_tokens >= max_model_len:
            raise SpecError(
                f"prompts[{index}]",
                f"{len(ids)} tokens and max_tokens={params.max_tokens} leave no room to read the "
                f"answer within max_model_len={max_model_len}",
            )
    scales, where = _read_scales(asked.scales), dict(asked.where)
    return TuneRequest(chosen, prompt_ids, scales, reading, effect, guard, params, where)


def tune_steps(request: TuneRequest) -> Steps[Tuning]:
    """Write the answers of all cells in one batch, and read them in another."""
    cells: list[tuple[int, float] | None] = [None]
    cells += [(layer, scale) for layer in request.directions for scale in request.scales]
    steered = [
        None
        if cell is None or cell[1] == 0
        else [request.directions[cell[0]].steer(cell[1], **request.where)]
        for cell in cells
    ]
    count = len(request.prompts)
    edits = [edit for edit in steered for _ in range(count)]
    prompts = request.prompts * len(cells)
    first = request.kl_tokens
    logits = Logits(tokens="all", positions=Window(-1, first - 1)) if first else None
    written = yield PromptBatch(
        prompts,
        [request.params] * len(prompts),
        capture=None if logits is None else [logits] * len(prompts),
        edits=edits,
    )
    read = yield from _read(request, prompts, written)
    parts = [slice(index * count, (index + 1) * count) for index in range(len(cells))]
    return _gather(request, cells, [(read[part], written[part]) for part in parts])


def _read(
    request: TuneRequest, prompts: list[list[int]], written: Sequence[Any]
) -> Steps[list[_Reading]]:
    """Have the unsteered model read every answer that has tokens."""
    answers = [list(output.outputs[0].token_ids) for output in written]
    full = [index for index, answer in enumerate(answers) if answer]
    first = request.kl_tokens
    batch = PromptBatch(
        [[*prompts[index], *answers[index]] for index in full],
        [reading_params()] * len(full),
        capture=[_first_logits(len(prompts[index]), len(answers[index]), first) for index in full]
        if first
        else None,
        probes=[
            [
                request.reading.probe(
                    "effect",
                    positions=slice(len(prompts[index]), len(prompts[index] + answers[index])),
                )
            ]
            for index in full
        ]
        if request.reading is not None
        else None,
    )
    outputs = (yield batch) if full else []
    readings = [_Reading(math.nan, np.empty(0), np.empty(0))] * len(written)
    for answer_index, output in zip(full, outputs, strict=True):
        readings[answer_index] = _Reading(
            _effect_of(request, output, written[answer_index]),
            logprobs_of(output, len(prompts[answer_index])).astype(np.float64),
            _divergences(written[answer_index].logits, output.logits) if first else np.empty(0),
        )
    return readings


def _first_logits(prompt: int, answer: int, first: int) -> Logits:
    """Return the logits from which the first tokens of an answer were chosen."""
    return Logits(tokens="all", positions=slice(prompt - 1, prompt - 1 + min(first, answer)))


def _effect_of(request: TuneRequest, read: Any, written: Any) -> float:
    if request.effect is not None:
        return float(request.effect(written))
    return float(to_numpy(read.probes["effect"]).astype(np.float64).mean())


def _divergences(steered: Any, plain: Any) -> Any:
    """Return KL(steered ‖ plain) of each position, float64 [positions], in nats."""
    p, q = (
        to_numpy(logits.values).astype(np.float64)
        - to_numpy(logits.logsumexp).astype(np.float64)[:, None]
        for logits in (steered, plain)
    )
    weights = np.exp(p)
    # A token that cannot follow has −∞ in both, or in the steered model alone.
    return np.where(weights > 0, weights * (p - q), 0.0).sum(1)


def _gather(
    request: TuneRequest,
    cells: Sequence[tuple[int, float] | None],
    cell_results: Sequence[tuple[Sequence[_Reading], Sequence[Any]]],
) -> Tuning:
    numbers = [
        (
            _mean([reading.effect for reading in read]),
            perplexity_of(_mean(np.concatenate([reading.logprobs for reading in read]))),
            _mean(np.concatenate([reading.kl for reading in read])),
        )
        for read, _ in cell_results
    ]
    texts = [tuple(output.outputs[0].text for output in written) for _, written in cell_results]
    shape = len(request.directions), len(request.scales)
    effect, perplexity, kl = (
        np.array(column[1:]).reshape(shape) for column in zip(*numbers, strict=True)
    )
    return Tuning(
        layers=tuple(request.directions),
        scales=request.scales,
        effect=effect,
        perplexity=perplexity,
        kl=kl if request.kl_tokens else None,
        plain_effect=numbers[0][0],
        plain_perplexity=numbers[0][1],
        answers={cell: text for cell, text in zip(cells, texts, strict=True) if cell is not None},
        plain_answers=texts[0],
        guard=request.guard,
    )


def _mean(values: Any) -> float:
    """Return the mean of what is finite; NaN of nothing."""
    array = np.asarray(values, np.float64)
    array = array[~np.isnan(array)]
    return float(array.mean()) if len(array) else math.nan


def _read_layers(directions: Any, layers: Any) -> dict[int, Direction]:
    if isinstance(directions, Direction):
        if layers is not None:
            raise SpecError("layers", "a `Direction` is of one layer; omit it, or give Directions")
        return {directions.layer: directions}
    if not isinstance(directions, DirectionSet):
        raise SpecError("directions", f"expected Directions or a Direction, got {kind(directions)}")
    if layers is None:
        return {directions.best_layer: directions[directions.best_layer]}
    if isinstance(layers, str):
        if layers != "all":
            raise SpecError("layers", f'expected layers or "all", got {layers!r}')
        return {direction.layer: direction for direction in directions}
    listed = [layers] if is_int(layers) else list(layers)
    if not listed or len(set(listed)) < len(listed):
        raise SpecError("layers", "expected at least one layer, each once")
    return {int(layer): _direction_at("layers", directions, layer) for layer in listed}


def _reading_of(directions: Any, layer: Any) -> Direction:
    if isinstance(directions, Direction):
        if layer is not None and layer != directions.layer:
            raise SpecError("read_layer", "a `Direction` is of one layer; give Directions")
        return directions
    if layer is None:
        layer = directions.best_layer
    return _direction_at("read_layer", directions, layer)


def _direction_at(path: str, directions: DirectionSet, layer: Any) -> Direction:
    try:
        return directions[layer]
    except SpecError as error:
        raise SpecError(path, error.problem) from None


def _read_scales(scales: Any) -> tuple[float, ...]:
    if isinstance(scales, (str, bytes)) or not hasattr(scales, "__iter__"):
        raise SpecError("scales", f"expected a list of numbers, got {kind(scales)}")
    numbers = []
    for index, scale in enumerate(scales):
        with at(f"scales[{index}]"):
            numbers.append(read_float32(scale))
    if not numbers or len(set(numbers)) < len(numbers):
        raise SpecError("scales", "expected at least one number, each once")
    return tuple(numbers)


def _read_params(sampling_params: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if sampling_params is None:
        sampling_params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS)
    if not isinstance(sampling_params, SamplingParams):
        raise SpecError(
            "sampling_params", f"expected one SamplingParams, got {kind(sampling_params)}"
        )
    if sampling_params.n != 1 or sampling_params.max_tokens is None:
        raise SpecError("sampling_params", "expected n=1 and a number of max_tokens")
    params = copy.copy(sampling_params)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params
