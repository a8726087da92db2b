"""How the scheduler of an engine in this process cuts up the work."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def chunks(llm: Any, size: int) -> Iterator[list[int]]:
    """Prompts are computed so many tokens at a time, beside what else there is. Gives the sizes of
    the chunks, which are filled in as they come.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config, schedule = scheduler.scheduler_config, scheduler.schedule
    before = config.long_prefill_token_threshold
    seen: list[int] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = schedule(*args, **kwargs)
        seen.extend(out.num_scheduled_tokens.values())
        return out

    config.long_prefill_token_threshold = size
    scheduler.schedule = watched
    try:
        yield seen
    finally:
        config.long_prefill_token_threshold = before
        scheduler.schedule = schedule
