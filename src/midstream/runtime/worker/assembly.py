"""Puts midstream into one worker: the tapped model, its session, and the hooks of the runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from midstream.config.config import Config
from midstream.runtime.protocol.segments import RankShare
from midstream.runtime.vllm import seams
from midstream.runtime.vllm.additional_config import replicas_of
from midstream.runtime.vllm.attributes import ENDPOINT
from midstream.runtime.vllm.engine_rules import check_settings
from midstream.runtime.vllm.kv_cache import full_attention_blocks
from midstream.runtime.worker.endpoint import WorkerEndpoint
from midstream.runtime.worker.model_runner import v1, v2
from midstream.runtime.worker.model_runner.hooks import Hooks
from midstream.runtime.worker.model_runner.model_switch import ModelSwitch
from midstream.runtime.worker.model_runner.weight_changes import watch_weights
from midstream.runtime.worker.rank_agreement import RankLinks, all_ranks, sum_over_ranks
from midstream.runtime.worker.rank_check import RankChecksum
from midstream.runtime.worker.readouts.head_adapters import HeadAdapters
from midstream.runtime.worker.readouts.layers import RankAttention
from midstream.runtime.worker.readouts.logits import PART_BYTES, Head, LogitReader
from midstream.runtime.worker.readouts.reader import WORKSPACE_BYTES, PatternReader
from midstream.runtime.worker.readouts.sae import SaeReader
from midstream.runtime.worker.reductions import Reductions
from midstream.runtime.worker.session import StepRules, WorkerSession
from midstream.runtime.worker.step.score_cache import ScoreCache
from midstream.runtime.worker.step.sum_cache import SumCache
from midstream.runtime.worker.step_recorder import RankMemory
from midstream.runtime.worker.tables.device_rows import DeviceRowTable
from midstream.runtime.worker.taps.sum_check import check_model
from midstream.runtime.worker.taps.tapped_rank import TappedRank, tap_model
from midstream.transport.arena import Arena
from midstream.transport.ring_copy import host_transport
from midstream.transport.sizing import arena_settings


def attach(worker: Any, vllm_config: Any, config: Config) -> None:
    """Prepare a worker whose device is initialized and whose model is not loaded yet."""
    check_settings(vllm_config)
    load_model: Callable[..., Any] = worker.load_model

    def load_and_tap(*args: Any, **kwargs: Any) -> Any:
        out = load_model(*args, **kwargs)
        # The loader's memory pool is not active any more: sleep mode must not free these buffers.
        ENDPOINT.set(worker, assemble_worker(worker, vllm_config, config))
        return out

    worker.load_model = load_and_tap


def assemble_worker(worker: Any, vllm_config: Any, config: Config) -> WorkerEndpoint:
    """Tap a worker's loaded model, hook its runner, and return what answers the front end."""
    rank = tap_model(worker, vllm_config, config)
    runner, buffers, parallel = rank.runner, rank.buffers, vllm_config.parallel_config
    reductions = Reductions(config.reductions, rank.hidden_size, runner.device)
    ring = buffers.ring
    device_rows = DeviceRowTable(
        config.device_rows, rank.hidden_size, rank.taps, ring.dtype, ring.device
    )
    if hasattr(runner, "model_memory_usage"):  # by which alone 0.28 sizes the KV cache
        owned = (buffers, rank.weights, reductions, device_rows)
        runner.model_memory_usage += sum(memory.nbytes for memory in owned)
    workers = parallel.world_size * replicas_of(vllm_config)
    arena = Arena(arena_settings(config, workers), ring.device.type == "cuda")
    is_v2 = seams.is_v2_runner(runner)
    seams.check_runner(runner, is_v2)
    adapter = v2 if is_v2 else v1
    attention = RankAttention(
        rank.decoder,
        rank.taps,
        runner,
        parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
        lambda group: adapter.block_size(runner, group),
    )
    head = _head(runner.get_model(), vllm_config)
    max_model_len = vllm_config.model_config.max_model_len
    transport = host_transport(buffers.ring, arena)
    kept = sums = None
    if vllm_config.cache_config.enable_prefix_caching:
        columns = buffers.scores.shape[1]
        kept = ScoreCache(
            lambda: full_attention_blocks(runner.kv_cache_config), columns, max_model_len
        )
        sums = SumCache(kept.blocks, transport.copy)
    session = WorkerSession(
        RankMemory(buffers, rank.taps, transport, arena, kept, sums, device_rows),
        StepRules(
            max_model_len,
            config.on_nonfinite,
            config.max_dose,
            only_armed=bool(rank.replacements),
            calls_functions=config.hooks == "local",
        ),
        _links(rank),
        PatternReader(
            attention.at,
            lambda group: adapter.block_table(runner, group),
            # As the head is before biases are added to what it returns.
            logits=None if head is None else LogitReader(head, PART_BYTES, rank.lens),
            saes=SaeReader(rank.weights, WORKSPACE_BYTES),
        ),
        reductions,
    )
    if session.bias is not None:
        session.bias.attach(runner.get_model())
    switch = ModelSwitch(
        worker,
        rank.replacements,
        config.tapped_model == "lazy",
        is_v2,
        lambda run: check_model(buffers, rank.decoder.layers, rank.taps, run),
    )
    switch.attach()
    watch_weights(worker, session.requests.weights, attention.forget)
    adapter.attach(runner, Hooks(session, switch, _ahead(vllm_config)))
    return WorkerEndpoint(rank, session, attention, arena)


def _links(rank: TappedRank) -> RankLinks:
    is_alone = rank.tensor_ranks == 1
    return RankLinks(
        RankShare(rank.tensor_rank, rank.tensor_ranks, rank.parts),
        RankChecksum() if rank.config.check_ranks else None,
        agree=None if is_alone else all_ranks,
        add_up=None if is_alone else sum_over_ranks,
    )


def _ahead(vllm_config: Any) -> int:
    """Return how many steps may be scheduled before the outcome of a step's drafts is known."""
    if not vllm_config.scheduler_config.async_scheduling:
        return 0  # a request is scheduled again only when the outcome is known
    steps: int = vllm_config.max_concurrent_batches
    return steps - 1


def _head(model: Any, vllm_config: Any) -> Head | None:
    """Return a model's head; None if it has none, as a model that embeds texts."""
    compute_logits = getattr(model, "compute_logits", None)
    if compute_logits is None:
        return None
    adapters = None if vllm_config.lora_config is None else HeadAdapters(model)
    return Head(compute_logits, int(vllm_config.model_config.get_vocab_size()), adapters)
