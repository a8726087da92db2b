from types import SimpleNamespace

import torch
from vllm.multimodal.inputs import PlaceholderRange

from midstream.plan.positions.prompt import MediaItem
from midstream.results.media_span import MediaSpan
from midstream.runtime.frontend.request.prompt.media import (
    media_of,
    places_of,
    places_of_rendered,
    spans_of,
)


def _request(*features, known=None):
    return SimpleNamespace(
        mm_features=[
            SimpleNamespace(modality=kind, mm_position=place, mm_hash=known, data=object())
            for kind, place in features
        ]
    )


def test_items_are_in_the_order_of_the_prompt_and_hold_what_vllm_marks_as_embeddings():
    held = torch.tensor([False, True, True, False, True])
    request = _request(
        ("image", PlaceholderRange(9, 3)), ("video", PlaceholderRange(2, 5, is_embed=held))
    )
    wanted = (MediaItem("video", 2, 7, ((3, 5), (6, 7))), MediaItem("image", 9, 12, ((9, 12),)))
    assert media_of(request) == wanted
    places = places_of(request)
    assert media_of(SimpleNamespace(mm_features=places)) == wanted
    assert not any(hasattr(place, "data") for place in places)


def test_a_rendered_prompt_has_the_items_of_its_request():
    prompt = {
        "type": "multimodal",
        "prompt_token_ids": [1] * 12,
        "mm_placeholders": {"image": [PlaceholderRange(9, 3)], "audio": [PlaceholderRange(1, 2)]},
    }
    found = media_of(SimpleNamespace(mm_features=places_of_rendered(prompt)))
    assert found == (MediaItem("audio", 1, 3, ((1, 3),)), MediaItem("image", 9, 12, ((9, 12),)))


def test_a_prompt_without_media_has_none():
    assert media_of(SimpleNamespace(mm_features=None)) == media_of(SimpleNamespace()) == ()
    assert places_of_rendered({"prompt_token_ids": [1]}) == []


def test_results_name_each_item_by_its_kind_and_number():
    request = _request(
        ("image", PlaceholderRange(9, 3)),
        ("video", PlaceholderRange(2, 5)),
        ("image", PlaceholderRange(0, 1)),
        known="a1",
    )
    assert spans_of(request) == (
        MediaSpan("image", 0, 0, 1, "a1"),
        MediaSpan("video", 0, 2, 5, "a1"),
        MediaSpan("image", 1, 9, 3, "a1"),
    )
