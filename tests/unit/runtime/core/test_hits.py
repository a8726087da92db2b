"""vLLM's prefix cache serves as much after an edit as after another token or image in its place."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.plans import SMALL, plan_of

from midstream.plan.resolve.wire import to_bytes
from midstream.runtime.core import prefix_cache
from midstream.runtime.protocol.cache_keys import cache_keys
from midstream.runtime.protocol.request_payload import RequestPayload

PROMPT = list(range(93))
IMAGE = (29, 33)


@pytest.fixture(scope="module")
def vllm() -> Any:
    """vLLM's modules of the prefix cache, with midstream's keys and limits."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    original = kv_cache_utils.generate_block_hash_extra_keys
    with pytest.MonkeyPatch.context() as patch:
        keys = functools.partial(prefix_cache.extra_keys, original)
        patch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", keys)
        find = functools.partialmethod(_computed_blocks, KVCacheManager.get_computed_blocks)
        patch.setattr(KVCacheManager, "get_computed_blocks", find)
        kv_cache_utils.init_none_hash(sha256)
        yield kv_cache_utils


def _computed_blocks(manager: Any, original: Any, request: Any) -> Any:
    return prefix_cache.computed_blocks(original, manager, request)


class _Cache:
    """vLLM's prefix cache of a model with full and with sliding-window layers."""

    def __init__(self, vllm: Any, block: int, interval: int | None, window: int = 64) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            SlidingWindowSpec,
        )

        size = {"block_size": block, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        groups = [
            KVCacheGroupSpec(["full"], FullAttentionSpec(**size)),
            KVCacheGroupSpec(["sliding"], SlidingWindowSpec(**size, sliding_window=window)),
        ]
        config = KVCacheConfig(100, [], groups, prefix_cache_retention_interval=interval)
        self._manager = KVCacheManager(config, 512, block, block, enable_caching=True)
        self._hasher = vllm.get_request_block_hasher(block, sha256)

    def ask(
        self,
        prompt: list[int] = PROMPT,
        edited: int | None = None,
        image: str | None = None,
        mm_prefix: bool = False,
    ) -> int:
        """Return how many tokens are served, and compute the others."""
        from vllm import SamplingParams
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.v1.request import Request

        edits = (
            [] if edited is None else [(("resid_post", 0), SMALL[0], 1.0, [(edited, edited + 1)])]
        )
        params = SamplingParams(max_tokens=1)
        if edits:
            plan = plan_of(edits)
            payload = RequestPayload("r", to_bytes(plan), cache_keys(plan), mm_prefix=mm_prefix)
            params.extra_args = {"midstream": payload}
        place = PlaceholderRange(IMAGE[0], IMAGE[1] - IMAGE[0])
        features = [] if image is None else [MultiModalFeatureSpec(None, "image", image, place)]
        request = Request(
            "r", prompt, params, None, mm_features=features, block_hasher=self._hasher
        )
        blocks, hit, request.shared_prefix_boundary = self._manager.get_computed_blocks(request)
        self._manager.allocate_slots(request, len(prompt) - hit, hit, blocks)
        request.num_computed_tokens = len(prompt)
        self._manager.free(request)
        return int(hit)


def _with_another(position: int) -> list[int]:
    return [*PROMPT[:position], 999, *PROMPT[position + 1 :]]


@given(
    st.sampled_from([4, 8, 16, 32]),
    st.sampled_from([None, 0, 32, 64]),
    st.integers(0, len(PROMPT) - 1),
    st.sampled_from([8, 24, 64]),
)
@settings(max_examples=rounds(suite=80, nightly=600), deadline=None)
def test_an_edit_keeps_from_others_what_another_token_in_its_place_would(
    vllm, block, interval, position, window
):
    other, edited = (_Cache(vllm, block, interval, window) for _ in range(2))
    asked = [
        (other.ask(_with_another(position)), edited.ask(edited=position)),
        (other.ask(), edited.ask()),
        (other.ask(_with_another(position)), edited.ask(edited=position)),
        (other.ask(), edited.ask()),
    ]
    assert [one for one, _ in asked] == [one for _, one in asked]


@given(
    st.sampled_from([4, 8, 16, 32]),
    st.sampled_from([None, 0, 32, 64]),
    st.integers(*IMAGE).filter(lambda position: position < IMAGE[1]),
)
@settings(max_examples=rounds(suite=50, nightly=400), deadline=None)
def test_an_edit_of_an_image_keeps_from_others_what_another_image_would(
    vllm, block, interval, position
):
    other, edited = (_Cache(vllm, block, interval) for _ in range(2))
    asked = [
        (other.ask(image="b"), edited.ask(image="a", edited=position, mm_prefix=True)),
        (other.ask(image="a"), edited.ask(image="a")),
        (other.ask(image="b"), edited.ask(image="a", edited=position, mm_prefix=True)),
        (other.ask(image="a"), edited.ask(image="a")),
    ]
    # Of an edited request the image is computed whole, so its own hits may be shorter.
    assert [one for one, _ in asked[1::2]] == [one for _, one in asked[1::2]]
