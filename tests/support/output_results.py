"""Results of an output or a completion as plain values, which can be saved and compared."""

from typing import Any

import torch


def results(holder: Any) -> dict[str, Any]:
    """An output's or a completion's results, as plain values."""
    found: dict[str, Any] = {"activations": None, "probes": scores(holder), "receipt": None}
    if getattr(holder, "activations", None) is not None:
        found["activations"] = {
            tap: (rows, holder.activations.positions_of(*tap))
            for tap, rows in holder.activations.items()
        }
    if getattr(holder, "attention", None) is not None:
        found["attention"] = {
            key: (rows.values.flatten(1), rows.positions) for key, rows in holder.attention.items()
        }
    if getattr(holder, "logits", None) is not None:
        logits = holder.logits
        found["logits"] = {
            "values": (logits.values, logits.positions),
            "logsumexp": (logits.logsumexp, logits.positions),
        }
    if getattr(holder, "receipt", None) is not None:
        found["receipt"] = {**holder.receipt.to_dict(), "request_id": ""}
    return found


def scores(holder: Any) -> Any:
    """Per probe: scores, positions, the tokens there."""
    probes = getattr(holder, "probes", None)
    if probes is None:
        return None
    return {n: (s, probes.positions_of(n), probes.token_ids_of(n)) for n, s in probes.items()}


def logprobs(output: Any) -> dict[str, Any]:
    """The log probability of each generated token, at the position that it was sampled from."""
    (one,) = output.outputs
    if not one.logprobs:
        return {}
    found = [each[token].logprob for token, each in zip(one.token_ids, one.logprobs, strict=True)]
    first = len(output.prompt_token_ids) - 1
    positions = torch.arange(first, first + len(found))
    return {"logprobs": {"sampled": (torch.tensor(found), positions)}}
