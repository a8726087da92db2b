"""The prefix cache beside edits of images whose tokens attend both ways, as they do on a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.image_cache import BLOCK, Served, cases_of, served, shuffled

from midstream.runtime.core import prefix_cache

COUNT = 150


@pytest.fixture(scope="module")
def images(tiny_models: Path) -> Iterator[Served]:
    with served(tiny_models) as found:
        found.ask_alone(cases_of(texts=2, images=2))
        yield found


def test_requests_with_edits_in_and_beside_images_get_what_they_get_alone(images):
    images.llm.reset_prefix_cache()
    wrong, hits = images.wrong(shuffled(cases_of(texts=2, images=2), COUNT, seed=1))
    assert not wrong, wrong[:10]
    assert hits > COUNT // 2


def test_that_it_would_be_seen_if_keys_were_of_the_edited_tokens_alone(images, monkeypatch):
    places = images.image_tokens(0)
    assert places[0] // BLOCK < places[-1] // BLOCK, places
    monkeypatch.setattr(prefix_cache, "end_of_images", lambda request, stop: stop)
    images.llm.reset_prefix_cache()
    wrong, _ = images.wrong(shuffled(cases_of(texts=2, images=2), COUNT, seed=1))
    assert wrong
    images.llm.reset_prefix_cache()
