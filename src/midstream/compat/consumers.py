"""Capture requests by sink as dataclasses, typed forms of the dict that every sink accepts:
`SamplingParams(capture={"filesystem": …})`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FilesystemCaptureRequest:
    """Captures for the sink `filesystem`, stored in the directory `root/tag/request_id`.

    The values are validated when the object is passed to `SamplingParams` or `generate`, which
    raise SpecError with the field's name.

    Attributes:
        request_id: name of the request's directory; empty: vLLM's request id.
        tag: name of the parent directory; empty: the sink's root.
        hooks: layers by hook point (`pre_attn`, `post_attn`, `post_block`, or any site).
        positions: as for Capture; also "all_prompt" and "all_generated".
        layout: "per_file", "packed" or "sharded"; empty: that of the sink's settings.
    """

    request_id: str = ""
    tag: str = ""
    hooks: Mapping[str, object] = field(default_factory=dict)
    positions: object = "all"
    metadata: Mapping[str, object] | None = None
    layout: str = ""
