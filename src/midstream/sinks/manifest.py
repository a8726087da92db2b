"""Manifest of a delivery in the sinks `npz` and `filesystem`."""

from __future__ import annotations

from typing import Any

from midstream.results.media_span import spans_to_json
from midstream.sinks.base import Delivery, Origin

FORMAT = "midstream.npz"
VERSION = 1


def manifest_of(
    delivery: Delivery, origin: Origin, layout: str, files: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the manifest of a delivery, with the descriptions of its files, as JSON values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": delivery.name,
        "tag": delivery.tag,
        "metadata": dict(delivery.metadata),
        "request_id": delivery.request_id,
        "completion": delivery.completion,
        "completions": delivery.completions,
        "prompt_tokens": delivery.prompt_tokens,
        "generated_tokens": len(delivery.generated_token_ids),
        "media": spans_to_json(delivery.activations.positions_of_media),
        "finish_reason": delivery.finish_reason,
        "status": delivery.receipt.status,
        "problems": list(delivery.receipt.problems),
        "model": origin.model,
        "revision": origin.revision,
        "hidden_size": origin.hidden_size,
        "dtype": origin.dtype,
        "codec": delivery.activations.codec.spec,
        # The residual stream is identical on all ranks: the files are the same in both cases, and
        # differ by the ranks that transferred their rows.
        "return": delivery.return_,
        "layout": layout,
        "vllm": origin.vllm,
        "midstream": origin.midstream,
        "files": files,
    }
