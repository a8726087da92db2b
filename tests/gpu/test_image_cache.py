"""1,000 requests with 6 images under 3 texts in a prefix cache, on the GPU's own kernel, whose
attention is two-way among the tokens of an image.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.image_cache import Served, cases_of, served, shuffled

from midstream.runtime.core import prefix_cache

COUNT = 1000
CASES = cases_of(texts=3, images=6)


@pytest.fixture(scope="module")
def images(tiny_models: Path) -> Iterator[Served]:
    with served(tiny_models) as found:
        found.ask_alone(CASES)
        yield found


def test_of_1000_requests_with_edits_in_and_beside_images_each_gets_what_it_gets_alone(
    images: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    images.llm.reset_prefix_cache()
    wrong, hits = images.wrong(shuffled(CASES, COUNT, seed=1))
    with capsys.disabled():
        sys.stdout.write(f"\nimages: {COUNT} requests, {hits} cached, {len(wrong)} differ\n")
    assert not wrong, wrong[:10]
    assert hits > COUNT // 2


def test_with_keys_of_the_edited_tokens_alone_some_differ(
    images: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without what it must find, the test above would show nothing."""
    monkeypatch.setattr(prefix_cache, "end_of_images", lambda request, stop: stop)
    images.llm.reset_prefix_cache()
    wrong, _ = images.wrong(shuffled(CASES, COUNT, seed=1))
    with capsys.disabled():
        sys.stdout.write(f"\nimages: without the mark {len(wrong)} of {COUNT} differ\n")
    assert wrong
    images.llm.reset_prefix_cache()
