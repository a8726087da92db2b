"""Engines that tests share: each is started on first use, and cleared after each test."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from midstream.sites import OUTER
from support import controlling, engines
from support.engine_view import inspect

EVERY_SITE = list(OUTER)
PROFILES: dict[str, dict[str, Any]] = {
    # Steps of 64 tokens: longer prompts come in chunks. Rows are kept.
    "standard": {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "midstream": {
            "sites": engines.ALL_SITES,
            "reuse_bytes": 8 << 20,
            "controllers": controlling.DECLARED,
            "doses": 64,
        },
    },
    # Every site, and steps that hold whole batches.
    "wide": {
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
        "midstream": {"sites": EVERY_SITE, "maps": 4, "gate_states": 12, "doses": 64},
    },
    # The same without a prefix cache: what it gives depends on no earlier request.
    "uncached": {
        "max_num_batched_tokens": 512,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "midstream": {"sites": EVERY_SITE, "maps": 4, "gate_states": 12, "doses": 64},
    },
}
_COMMON = {"block_size": 32, "enable_prefix_caching": True}


class Pool:
    """The engines of one process of tests, by profile, all on one model."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._engines: dict[str, tuple[Any, ExitStack]] = {}

    def use(self, profile: str) -> Iterator[Any]:
        """Yield the engine of a profile, and clear it afterwards; if that fails, end it."""
        yield self._get(profile)
        try:
            clear(self._get(profile))
        except BaseException:
            self._end(profile)
            raise

    def close(self) -> None:
        """End all engines; they are started again when they are wanted."""
        for profile in list(self._engines):
            self._end(profile)

    def _get(self, profile: str) -> Any:
        if profile not in self._engines:
            stack = ExitStack()
            settings = {**_COMMON, **PROFILES[profile]}
            llm = stack.enter_context(engines.engine(self._model, **settings))
            self._engines[profile] = llm, stack
        return self._engines[profile][0]

    def _end(self, profile: str) -> None:
        _, stack = self._engines.pop(profile)
        stack.close()


def clear(llm: Any) -> None:
    """Take back what tests leave in an engine, and check that no request or row is left."""
    llm.steering.clear()
    llm.captures.clear()
    for one in llm.vectors.list():
        llm.vectors.remove(one.name)
    view = inspect(llm)
    assert not view.leftovers(), view.leftovers()
    if view.arena_used()["leases"]:
        gc.collect()  # rows of a failed test, or in a cycle
        assert not view.arena_used()["leases"], "somebody holds rows of an earlier test"
    assert llm.reset_prefix_cache(), "blocks of KV cache are in use"
