"""Requests to consumers of captures, as dataclasses: `SamplingParams(capture={"filesystem": …})`.

A consumer is a sink (see `midstream.sinks`). Any of them may be asked by a dict with these fields;
the classes here are that dict with names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FilesystemCaptureRequest:
    """What the sink `filesystem` is to keep of a request, in the directory `root/tag/request_id`.

    Its values are read, and refused by name, when `SamplingParams` or a call of `generate` is
    given it.

    Attributes:
        request_id: name of the request's directory.
        tag: name of the directory that this one is in; empty: the sink's root.
        hooks: by hook point (`pre_attn`, `post_attn`, `post_block`, or any site) the layers.
        positions: as of Capture; also "all_prompt" and "all_generated".
        metadata: JSON values for the manifest.
    """

    request_id: str = ""
    tag: str = ""
    hooks: Mapping[str, object] = field(default_factory=dict)
    positions: object = "all"
    metadata: Mapping[str, object] | None = None
