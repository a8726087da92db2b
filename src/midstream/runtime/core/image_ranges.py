"""Ranges of images and videos in a request, whose tokens attend to each other both ways."""

from __future__ import annotations

from typing import Any

from midstream.runtime.protocol.request_payload import payload_of

# Audio is causal in every model: neither of vLLM's model runners lets it attend ahead.
_CAUSAL = "audio"


def end_of_images(request: Any, stop: int) -> int:
    """Return `stop`, or the end of the image there: the KV before it depends on what is below."""
    for start, end in image_ranges(request):
        if start < stop:
            stop = max(stop, end)
    return stop


def start_of_images(request: Any, position: int) -> int:
    """Return the first token whose KV depends on `position`: itself, or the first of its image."""
    for start, end in reversed(image_ranges(request)):
        if position < end:
            position = min(position, start)
    return position


def image_ranges(request: Any) -> list[tuple[int, int]]:
    """Return [start, stop) of a `Request`'s images whose tokens attend both ways, ascending."""
    payload = payload_of(request.sampling_params)
    if payload is None or not payload.mm_prefix:
        return []
    places = [feature.mm_position for feature in request.mm_features if feature.modality != _CAUSAL]
    return [(place.offset, place.offset + place.length) for place in places]
