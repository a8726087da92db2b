"""Images, audio and videos of a prompt: where vLLM's placeholders are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from midstream.plan.positions.prompt import MediaItem
from midstream.plan.positions.ranges import Ranges, merge
from midstream.results.media_span import MediaSpan


def media_of(request: Any) -> tuple[MediaItem, ...]:
    """Return the items of vLLM's request, in the order of its prompt."""
    return tuple(_item(feature.modality, feature.mm_position) for feature in _features_of(request))


def spans_of(request: Any) -> tuple[MediaSpan, ...]:
    """Return the items of vLLM's request for results."""
    counts: Counter[str] = Counter()
    spans = []
    for feature in _features_of(request):
        kind, place = feature.modality, feature.mm_position
        known = feature.mm_hash or ""
        spans.append(MediaSpan(kind, counts[kind], place.offset, place.length, known))
        counts[kind] += 1
    return tuple(spans)


def places_of(request: Any) -> list[SimpleNamespace]:
    """Return what `media_of` reads of a request's features, without the media themselves."""
    return [
        SimpleNamespace(modality=feature.modality, mm_position=feature.mm_position)
        for feature in getattr(request, "mm_features", None) or ()
    ]


def places_of_rendered(prompt: Mapping[str, Any]) -> list[SimpleNamespace]:
    """Return the same of a rendered prompt, of which vLLM will make a request."""
    return [
        SimpleNamespace(modality=kind, mm_position=place)
        for kind, places in (prompt.get("mm_placeholders") or {}).items()
        for place in places
    ]


def _features_of(request: Any) -> list[Any]:
    """Return vLLM's features of a request in the order of its prompt."""
    features: Iterable[Any] = getattr(request, "mm_features", None) or ()
    return sorted(features, key=lambda feature: feature.mm_position.offset)


def _item(kind: str, place: Any) -> MediaItem:
    ranges: Ranges = ((place.offset, place.offset + place.length),)
    if place.is_embed is not None:
        ranges = merge((first, last + 1) for first, last in place.extract_embeds_range())
    return MediaItem(kind, place.offset, place.offset + place.length, ranges)
