"""Engines for tests: in this process, small, float32."""

import functools
import gc
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest import mock

from support import once
from support.nightly import NIGHTLY

HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))
# A KV cache of a given size: vLLM would measure how much memory is left, and engines that start
# side by side on one GPU would count each other's.
GPU_MEMORY: dict[str, Any] = (
    {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2 << 30} if HAS_GPU else {}
)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Triton rounds products of float32 numbers to TF32 by default, in vLLM's attention too.
    "TRITON_F32_DEFAULT": "ieee",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# One entry for each engine of this process that starts or runs.
_live: list[object] = []
# Blocks of KV cache of an engine on a tiny model. vLLM zeroes what it takes, by default a GiB.
_BLOCKS, _TINY = 512, 64
# Prompts come in chunks, prefixes are cached, and running requests are taken off for lack of room.
SMALL_CACHE: dict[str, Any] = {
    "enable_prefix_caching": True,
    "block_size": 32,
    "num_gpu_blocks_override": 16,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 6,
    "disable_log_stats": False,
}
ALL_SITES = ["resid_pre", "resid_mid", "resid_post"]


# Dynamo traces the model, and PyTorch runs its graph. Inductor takes ten times as long on a CPU.
_TRACED = {"mode": 2, "backend": "eager", "ir_enable_torch_wrap": False}


@contextmanager
def engine(
    model: Path, *, plain: bool = False, inductor: bool = HAS_GPU or NIGHTLY, **args: Any
) -> Iterator[Any]:
    """A midstream.LLM, or a plain vllm.LLM, that is gone afterwards."""
    import torch

    settings = {
        "dtype": "float32",
        "max_model_len": 256,
        "enforce_eager": True,
        "skip_tokenizer_init": not (model / "tokenizer.json").exists(),
        "disable_log_stats": True,
        "seed": 0,
        **GPU_MEMORY,
        **args,
    }
    if not settings["enforce_eager"] and not inductor:
        settings["compilation_config"] = {**_TRACED, **settings.get("compilation_config", {})}
    if json.loads((model / "config.json").read_text()).get("hidden_size", _TINY) <= _TINY:
        settings.setdefault("num_gpu_blocks_override", _BLOCKS)
    if plain:
        from vllm import LLM
    else:
        from midstream import LLM

        settings.setdefault("midstream", {"sites": ALL_SITES})
        name_vectors()
    prepare_vllm()
    entry, frozen = object(), _freeze()
    _live.append(entry)
    try:
        with mock.patch.multiple(gc, freeze=_nothing, unfreeze=_nothing):
            llm = LLM(str(model), **settings)
    except BaseException:
        _live.remove(entry)
        raise
    # Something in the process or its environment may turn compilation off without a word.
    compiled = bool(llm.llm_engine.vllm_config.compilation_config.mode)
    assert compiled or settings["enforce_eager"] or "enable_lora" in settings
    try:
        yield llm
    finally:
        _live.remove(entry)
        _shut_down(llm)
        del llm
        _collect(frozen)
        torch._dynamo.reset()


@contextmanager
def closing() -> Iterator[list[Any]]:
    """A list of engines that other code makes in this block; they are gone afterwards."""
    prepare_vllm()
    entry, frozen, made = object(), _freeze(), []
    _live.append(entry)
    try:
        with mock.patch.multiple(gc, freeze=_nothing, unfreeze=_nothing):
            yield made
    finally:
        _live.remove(entry)
        for llm in made:
            _shut_down(llm)
        made.clear()
        _collect(frozen)


# vLLM collects garbage five times as an engine starts and three times as it ends. All that the
# process has imported takes half a second each time, so it is frozen, and what an engine makes is
# not: it is collected at the engine's end.
_freezes = 0
# Engines that ended when a later freeze had some of their objects; and how many of them there are
# when all objects are searched for theirs. On a GPU each has much of its memory.
_uncollected, _MOST = 0, 1 if HAS_GPU else 4


def _freeze() -> int:
    """Exclude all objects of now from garbage collection; return which freeze this is."""
    global _freezes
    gc.collect()
    gc.freeze()
    _freezes += 1
    return _freezes


def freeze_again() -> None:
    """Exclude what has been imported and made since from searches for garbage too, each of which
    takes half a second otherwise. At the end of an engine that lives now, all of it is searched.
    """
    global _freezes
    gc.freeze()
    _freezes += 1


def _collect(frozen: int) -> None:
    """Collect the garbage of what was made since a freeze; not yet what a later freeze has."""
    global _uncollected
    if frozen == _freezes:
        gc.collect()
    else:
        _uncollected += 1


def collect_all() -> None:
    """Collect what is left, between modules of tests."""
    global _uncollected
    if _uncollected >= _MOST:
        gc.unfreeze()
        _uncollected = 0
    gc.collect()


def _shut_down(llm: Any) -> None:
    with mock.patch.multiple(gc, collect=_nothing, unfreeze=_nothing):
        llm.llm_engine.engine_core.shutdown()


def _nothing(*_args: Any) -> int:
    return 0


@functools.cache
def prepare_vllm() -> None:
    """Have vLLM leave the process groups, which all engines of a process share, as long as there is
    an engine: it takes them down with each one that ends, however late that is collected.
    """
    from vllm.v1.engine import core

    if not HAS_GPU:
        once.for_all_engines()
    take_down = core.cleanup_dist_env_and_memory

    def unless_used(*args: Any, **kwargs: Any) -> None:
        if not _live:
            take_down(*args, **kwargs)

    core.cleanup_dist_env_and_memory = unless_used


def name_vectors() -> None:
    """Have the vectors of tiny models sent as those of large ones are: once, ahead of the plans
    that name them. The workers keep few of them.
    """
    from midstream.runtime.frontend.request import sent_vectors

    sent_vectors.MOST_BY_VALUE, sent_vectors.MOST_UNUSED = 0, 8 * 4 * _TINY


def greedy(max_tokens: int, **more: Any) -> Any:
    """SamplingParams without randomness that never stop early."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def tokens(prompt: Sequence[int]) -> dict[str, list[int]]:
    """A prompt of token ids."""
    return {"prompt_token_ids": list(prompt)}


def finish(llm: Any) -> dict[str, Any]:
    """Step the engine until all its requests have ended; return each one's last output, by id."""
    found: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            found[output.request_id] = output
    return found


def generated(output: Any) -> list[int]:
    """The tokens of an output's only completion."""
    return list(output.outputs[0].token_ids)


@contextmanager
def stopped_at(llm: Any, number: int) -> Iterator[None]:
    """A call within raises KeyboardInterrupt in place of the engine's step of this number."""
    effects = chain(repeat(mock.DEFAULT, number - 1), [KeyboardInterrupt], repeat(mock.DEFAULT))
    step = mock.Mock(wraps=llm.llm_engine.step, side_effect=effects)
    with mock.patch.object(llm.llm_engine, "step", step):
        yield


@contextmanager
def reading_stopped(llm: Any) -> Iterator[list[str]]:
    """The worker sends no rows with its answers, and a call within raises KeyboardInterrupt in
    place of reading them. Yields the names of what it would have read.
    """
    from midstream.runtime.protocol.rpc import ReadData, read_request
    from midstream.runtime.worker import result_buffer

    front, rpc, names = llm._front_end, llm._front_end._rpc, list[str]()

    def stopped(name: str, args: Any) -> list[object]:
        request = read_request(*args)
        if isinstance(request, ReadData):
            names.append(request.name)
            raise KeyboardInterrupt
        return rpc(name, args=args)

    with (
        mock.patch.multiple(result_buffer, LEASED_BYTES=1 << 40, INLINE_BYTES=10),
        mock.patch.object(front, "_rpc", stopped),
    ):
        yield names
