"""The model of one worker with its taps, and the memory that they write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from midstream.config.config import Config
from midstream.errors import UnsupportedError
from midstream.ops.sae.reference import SaeBuffers
from midstream.runtime.models.decoder import Decoder, all_lacks, find_decoder
from midstream.runtime.protocol.segments import Room
from midstream.runtime.worker.logit_bias import num_switches
from midstream.runtime.worker.readouts.lens import RankLens
from midstream.runtime.worker.readouts.rank_weights import RankWeights
from midstream.runtime.worker.tables.device_buffers import Buffers, BufferSizes
from midstream.runtime.worker.taps.tapped_model import add_taps
from midstream.runtime.worker.taps.taps import check_drafter
from midstream.sites import ENDS, Tap

_CPU_STAGING_BYTES = 2 << 30
_DEVICE_SHARE = 16


@dataclass(frozen=True, slots=True, eq=False)
class TappedRank:
    """A worker's tapped model."""

    config: Config
    runner: Any  # vLLM's model runner
    stage: int  # of the pipeline
    tensor_rank: int
    tensor_ranks: int
    hidden_size: int
    decoder: Decoder
    lacking: Mapping[Tap, str]  # why there is no such tap, of all sites
    taps: dict[Tap, int]  # index in the buffers, in the order of a forward pass
    parts: tuple[int, ...]  # by tap: into how many ranks' parts its rows are split
    weights: RankWeights
    lens: RankLens
    buffers: Buffers
    replacements: Any  # tapped layers in place of vLLM's
    ties_head: bool  # whether the head's weights are the embeddings'

    @property
    def max_tokens(self) -> int:
        """Most rows of a forward pass, padding included."""
        return self.buffers.tokens.shape[0]

    @property
    def ring_rows(self) -> int:
        """Number of vectors of the stream's width for which the staging ring has room."""
        return self.buffers.ring.numel() // self.hidden_size


def tap_model(worker: Any, vllm_config: Any, config: Config) -> TappedRank:
    """Tap the loaded model of a worker, and allocate what the taps write."""
    runner = worker.model_runner
    parallel, model_config = vllm_config.parallel_config, vllm_config.model_config
    tensor_ranks: int = parallel.tensor_parallel_size
    model = runner.get_model()
    embeds_given = getattr(model_config, "enable_prompt_embeds", False)
    embeds_given = bool(embeds_given or getattr(runner, "supports_mm_inputs", False))
    args = tensor_ranks, model_config.dtype == torch.float16
    limits = _max_width(runner.device), embeds_given
    decoder = find_decoder(model, *args, config.sites, *limits)
    lacking = {**all_lacks(model, *args, *limits), **decoder.lacking}
    taps = _choose_taps(decoder, config)
    weights = RankWeights(config.readout_bytes, runner.device)
    lens = RankLens(model, weights, model_config.dtype)
    hidden_size: int = model_config.get_hidden_size()
    inner = decoder.inner
    widths = {tap: inner[tap].width if tap in inner else hidden_size for tap in taps}
    for tap in widths:
        if tap[0] == "logits":
            widths[tap] = num_switches(hidden_size)
    parts = tuple(inner[tap].parts(tensor_ranks) if tap in inner else 1 for tap in taps)
    buffers = _allocate(widths, runner, vllm_config, config, weights)
    replacements = add_taps(model, decoder, taps, buffers, vllm_config, config)
    check_drafter(runner)
    stage, tensor_rank = _place(parallel, worker.rank)
    return TappedRank(
        config,
        runner,
        stage,
        tensor_rank,
        tensor_ranks,
        hidden_size,
        decoder,
        lacking,
        taps,
        parts,
        weights,
        lens,
        buffers,
        replacements,
        bool(getattr(model_config.hf_text_config, "tie_word_embeddings", False)),
    )


def _place(parallel: Any, rank: int) -> tuple[int, int]:
    """Return (pipeline stage, rank within the tensor-parallel group) of a worker."""
    tensor_parallel_size = parallel.tensor_parallel_size
    within = rank % (tensor_parallel_size * parallel.pipeline_parallel_size)
    return within // tensor_parallel_size, within % tensor_parallel_size


def _choose_taps(decoder: Decoder, config: Config) -> dict[Tap, int]:
    """Return the taps of this rank, in the order of a forward pass, with their indices."""
    wanted = set(config.resolve_layers(decoder.num_layers))
    taps = [
        (site, layer.index)
        for layer in decoder.layers
        for site in config.sites
        if (site in layer.ends if site in ENDS else layer.index in wanted)
        if (site, layer.index) not in decoder.lacking
    ]
    in_layers = set(config.sites) - set(ENDS)
    if not taps and in_layers and any(layer.index in wanted for layer in decoder.layers):
        reasons = "; ".join(sorted(set(decoder.lacking.values())))
        raise UnsupportedError(
            f"none of the sites {', '.join(config.sites)} exists in this model: {reasons}"
        )
    return {tap: index for index, tap in enumerate(taps)}


def _max_width(device: torch.device) -> int | None:
    """Return the largest width of vectors that the op supports on a device; None: no limit."""
    if device.type != "cuda":
        return None
    from midstream.ops.site_triton import MAX_WIDTH

    return MAX_WIDTH


def _allocate(
    widths: dict[Tap, int],
    runner: Any,
    vllm_config: Any,
    config: Config,
    weights: RankWeights,
) -> Buffers:
    model_config = vllm_config.model_config
    max_tokens = _largest_step(runner, vllm_config)
    hidden_size = model_config.get_hidden_size()
    row_bytes = hidden_size * model_config.dtype.itemsize
    # Rows of two steps: those of one are copied while the next step fills the others.
    at_once = 2 if runner.device.type == "cuda" else 1
    rows_needed = at_once * max_tokens * max(1, -(-sum(widths.values()) // hidden_size))
    ring_rows = min(rows_needed, _staging_bytes(runner.device, config) // row_bytes)
    least = max_tokens * -(-max(widths.values(), default=1) // hidden_size)
    if ring_rows < least:
        raise UnsupportedError(
            f"the staging ring must hold one vector for each of the {max_tokens} tokens that a "
            f"step may have, which takes {least * row_bytes} bytes; raise staging_bytes, or "
            "lower max_num_batched_tokens"
        )
    sae = None
    if any(tap in widths for tap in config.reconstructed):
        features = max(config.reconstructed.values())
        numbers = weights.numbers(torch.float32)
        sae = SaeBuffers.allocate(numbers, max_tokens, hidden_size, features)
    speculative = vllm_config.speculative_config
    drafts = 0 if speculative is None else int(speculative.num_speculative_tokens)
    return Buffers.allocate(
        widths,
        BufferSizes(max_tokens, hidden_size, room_of(config), ring_rows, drafts, config.doses),
        dtype=model_config.dtype,
        device=runner.device,
        sae=sae,
        reconstructed=config.reconstructed,
    )


def room_of(config: Config) -> Room:
    return Room(**{field.name: getattr(config, field.name) for field in fields(Room)})


def _largest_step(runner: Any, vllm_config: Any) -> int:
    """Return the most rows of a forward pass, padding included."""
    largest_graph = getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None)
    largest: int = max(
        vllm_config.scheduler_config.max_num_batched_tokens,
        getattr(runner, "max_num_tokens", 0),
        largest_graph or 0,
        vllm_config.scheduler_config.max_num_seqs,
    )
    return largest


def _staging_bytes(device: torch.device, config: Config) -> int:
    if config.staging_bytes is not None:
        return config.staging_bytes
    if device.type != "cuda":
        return _CPU_STAGING_BYTES
    return int(torch.cuda.get_device_properties(device).total_memory) // _DEVICE_SHARE
