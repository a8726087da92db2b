"""Prompts of two classes, captured in one batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.fit.folds import Indices
from midstream.plan.readouts.capture import Capture
from midstream.results.arrays import to_numpy
from midstream.validation import kind, show


@dataclass(frozen=True)
class CapturedClass:
    """Rows of one class's prompts."""

    rows: Mapping[int, NDArray[Any]]  # by layer, [rows, width], float32 or float16
    owners: Indices  # int64 [rows], the prompt of each row


def capture_rows(
    llm: Any, positive: Any, negative: Any, capture: Capture
) -> tuple[CapturedClass, CapturedClass]:
    prompts = [*read_prompts("positive", positive), *read_prompts("negative", negative)]
    with naming_fields():
        outputs = run_prompts(llm, prompts, capture)
    return split_classes(outputs, len(positive), capture.sites.names[0])


def read_capture(layers: Any, site: Any, positions: Any, reduce: str) -> Capture:
    if reduce not in ("", "mean"):
        raise SpecError("reduce", f'expected "" or "mean", got {show(str(reduce))}')
    return Capture(layers, site, positions, reduce=reduce)


@contextmanager
def naming_fields(layers: str = "layers") -> Iterator[None]:
    """Have errors name the arguments of a fit, of which its `Capture` is made."""
    try:
        yield
    except SpecError as error:
        field = error.path.removeprefix("capture.")
        raise type(error)(
            {"sites": "site", "layers": layers}.get(field, field), error.problem
        ) from None


def split_classes(
    outputs: Sequence[Any], positives: int, site: str
) -> tuple[CapturedClass, CapturedClass]:
    """Return the rows of both classes from the outputs, those of the positives first."""
    return rows_of_outputs(outputs[:positives], site), rows_of_outputs(outputs[positives:], site)


def read_classes(llm: Any, positive: Any, negative: Any) -> tuple[Any, Any]:
    """Return the prompts of both classes, without `negative` those of pairs; check the engine."""
    if not hasattr(llm, "generate"):
        name = f"; write LLM({llm!r})" if isinstance(llm, str) else ""
        raise SpecError("llm", f"expected an LLM, got {kind(llm)}{name}")
    if negative is not None:
        texts = isinstance(positive, list) and all(isinstance(text, str) for text in positive)
        if texts and positive and positive == negative:
            raise SpecError("negative", "these are the positive prompts, so there is no direction")
        return positive, negative
    classes: tuple[list[Any], list[Any]] = [], []
    for pair in read_prompts("positive", positive):
        if hasattr(pair, "positive") and hasattr(pair, "negative"):  # repeng's DatasetEntry
            pair = pair.positive, pair.negative
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise SpecError(
                "negative", "missing: give the negative prompts, or pairs (positive, negative)"
            )
        for prompts, prompt in zip(classes, pair, strict=True):
            prompts.append(prompt)
    return classes


def read_prompts(path: str, prompts: Any) -> list[Any]:
    """Check that prompts are a list, and not one prompt."""
    if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Sequence):
        raise SpecError(path, f"expected a list of prompts, got {kind(prompts)}")
    if not prompts:
        raise SpecError(path, "expected at least one prompt")
    if isinstance(prompts[0], (int, np.integer)) or is_message(prompts[0]):
        raise SpecError(path, "expected a list of prompts, got one prompt; put it into a list")
    return list(prompts)


def is_message(value: object) -> bool:
    return isinstance(value, Mapping) and "role" in value


def is_chat(prompt: object) -> bool:
    """Return whether a prompt is a chat: a list of messages."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and is_message(prompt[0])


def run_prompts(
    llm: Any, prompts: list[Any], capture: Capture, path: str = "positive"
) -> list[Any]:
    """Run the prompts for one token each, in one batch, and return the outputs; `path` is the
    argument that they are.
    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    chats = [is_chat(prompt) for prompt in prompts]
    if not any(chats):
        inputs = [
            {"prompt_token_ids": list(prompt)} if isinstance(prompt, (list, tuple)) else prompt
            for prompt in prompts
        ]
        outputs: list[Any] = llm.generate(inputs, params, capture=capture, use_tqdm=False)
        return outputs
    if not all(chats):
        raise SpecError(path, "expected either chats alone, or texts and token ids alone")
    ends = {prompt[-1]["role"] == "assistant" for prompt in prompts}
    if len(ends) > 1:
        raise SpecError(
            path, "expected that all chats end with the assistant's turn, or that none does"
        )
    goes_on = ends == {True}
    answers: list[Any] = llm.chat(
        prompts,
        params,
        capture=capture,
        use_tqdm=False,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )
    return answers


def rows_of_outputs(outputs: Sequence[Any], site: str) -> CapturedClass:
    """Return the rows of prompts by layer; `site` is the one that was captured."""
    layers = outputs[0].activations.layers
    if not layers:
        raise SpecError("site", f"{site} has no layers; fit a site that has, such as resid_post")
    rows = {
        layer: [to_numpy(output.activations[site, layer]) for output in outputs] for layer in layers
    }
    counts = {tuple(map(len, arrays)) for arrays in rows.values()}
    if len(counts) > 1 or any(array.ndim != 2 for array in rows[layers[0]]):
        raise SpecError(
            "site", f"the vectors of {site} are of heads; fit a site as wide as the model"
        )
    return CapturedClass(
        {layer: np.concatenate(arrays) for layer, arrays in rows.items()},
        np.repeat(np.arange(len(outputs)), counts.pop()),
    )
