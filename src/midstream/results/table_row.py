"""Outputs as rows of a table: plain values under flat names."""

from __future__ import annotations

from typing import Any

from midstream.errors import SpecError


def to_dict(self: Any) -> dict[str, Any]:
    """Return the text and what was measured, flat: for a table of pandas, trackio or W&B.

    Returns:
        Strings, numbers, lists of strings, and None where nothing is known: `request_id` and
        offline `prompt`, of an output; `index`, `text`, `finish_reason`, `prompt_tokens`,
        `generated_tokens`; `probe.NAME.max` and `.mean`, `norms.SITE.LAYER.max` and `.mean`
        over the rows; `sink.NAME`, its status; and of the receipt `status`, `problems`,
        `actions` as NAME:KIND, `captured`, the number of rows, and `edited.expected`,
        `.applied`, `.tokens`, `.cached`. A name that the request did not ask for is absent.

    Raises:
        SpecError: the output has several completions, each with its own row.
    """
    outputs = getattr(self, "outputs", None)
    return _row_of(self) if outputs is None else _output_row(self, outputs)


def _output_row(output: Any, completions: list[Any]) -> dict[str, Any]:
    if len(completions) != 1:
        raise SpecError(
            "outputs",
            f"expected one completion, got {len(completions)}, each with its own row: "
            "[completion.to_dict() for completion in output.outputs]",
        )
    row = _row_of(completions[0])
    usage = (getattr(output, "raw", None) or {}).get("usage") or {}
    ids = getattr(output, "prompt_token_ids", None)
    prompt_tokens = usage.get("prompt_tokens", usage.get("input_tokens"))
    counts = {
        "prompt_tokens": prompt_tokens if ids is None else len(ids),
        "generated_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
    }
    row |= {name: count for name, count in counts.items() if row[name] is None}
    prompt = {"prompt": output.prompt} if hasattr(output, "prompt") else {}
    return {"request_id": output.request_id, **prompt, **row}


def _row_of(completion: Any) -> dict[str, Any]:
    receipt = getattr(completion, "receipt", None)
    tokens = getattr(completion, "token_ids", None)
    row: dict[str, Any] = {name: getattr(completion, name) for name in _OF_COMPLETION}
    row["prompt_tokens"] = receipt and receipt.prompt_tokens
    row["generated_tokens"] = None if tokens is None else len(tokens)
    for name, scores in (getattr(completion, "probes", None) or {}).items():
        outputs = completion.probes.outputs_of(name)
        for index, output in enumerate(outputs):
            row |= _summary(f"probe.{name}.{output}", scores[:, index])
        if not outputs:
            row |= _summary(f"probe.{name}", scores)
    for (site, layer), norms in (getattr(completion, "norms", None) or {}).items():
        row |= _summary(f"norms.{site}.{layer}", norms.values)
    for sink, result in (getattr(completion, "capture_results", None) or {}).items():
        row[f"sink.{sink}"] = result.status
    if receipt is None:
        return row
    row |= {
        "generated_tokens": receipt.generated_tokens,
        "status": receipt.status,
        "problems": [*receipt.problems],
        "actions": [f"{action.name}:{action.kind}" for action in receipt.actions],
    }
    if receipt.captured:
        row["captured"] = sum(captured.actual for captured in receipt.captured)
    if receipt.edited is not None:
        row |= {f"edited.{name}": getattr(receipt.edited, name) for name in _OF_EDITED}
    return row


_OF_COMPLETION = ("index", "text", "finish_reason")
_OF_EDITED = ("expected", "applied", "tokens", "cached")


def _summary(name: str, values: Any) -> dict[str, float | None]:
    """Return the maximum and the mean of values [rows], a tensor or an array."""
    if not len(values):
        return {f"{name}.max": None, f"{name}.mean": None}
    return {f"{name}.max": float(values.max()), f"{name}.mean": float(values.mean())}
