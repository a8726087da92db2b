"""Puts midstream into one worker: taps on the loaded model, buffers, session, RPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any

import torch

from midstream.config.config import Config
from midstream.errors import UnsupportedError
from midstream.ops.sae.reference import SaeBuffers
from midstream.plan.readouts.attention import ATTENTION
from midstream.plan.readouts.lens import LENS
from midstream.plan.readouts.logits import HEAD
from midstream.runtime.models.decoder import Decoder, all_lacks, find_decoder
from midstream.runtime.protocol import rpc
from midstream.runtime.protocol.codec import ProtocolMessage, encode, pack
from midstream.runtime.protocol.results import partial_name
from midstream.runtime.protocol.scores import RequestScores
from midstream.runtime.protocol.segments import RankShare, Room
from midstream.runtime.protocol.worker_info import MissingTap, WorkerInfo, WorkerRank, this_process
from midstream.runtime.vllm import seams
from midstream.runtime.vllm.additional_config import replicas_of
from midstream.runtime.vllm.attributes import ENDPOINT
from midstream.runtime.vllm.engine_rules import check_settings
from midstream.runtime.worker.logit_bias import num_switches
from midstream.runtime.worker.model_runner import v1, v2
from midstream.runtime.worker.model_runner.hooks import Hooks
from midstream.runtime.worker.model_runner.model_switch import ModelSwitch
from midstream.runtime.worker.parameter_answers import parameter_rows, token_directions
from midstream.runtime.worker.rank_agreement import RankLinks, all_ranks, sum_over_ranks
from midstream.runtime.worker.rank_check import RankChecksum
from midstream.runtime.worker.readouts.head_adapters import HeadAdapters
from midstream.runtime.worker.readouts.layers import RankAttention
from midstream.runtime.worker.readouts.lens import RankLens
from midstream.runtime.worker.readouts.logits import PART_BYTES, Head, LogitReader
from midstream.runtime.worker.readouts.rank_weights import RankWeights
from midstream.runtime.worker.readouts.reader import WORKSPACE_BYTES, PatternReader
from midstream.runtime.worker.readouts.sae import SaeReader
from midstream.runtime.worker.reductions import Reductions
from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.result_buffer import ResultBuffer
from midstream.runtime.worker.row_block import RowBlock
from midstream.runtime.worker.row_index import Scores
from midstream.runtime.worker.session import StepRules, WorkerSession
from midstream.runtime.worker.step_recorder import RankMemory
from midstream.runtime.worker.tables.device_buffers import Buffers, BufferSizes
from midstream.runtime.worker.taps.sum_check import check_model
from midstream.runtime.worker.taps.tapped_model import add_taps
from midstream.runtime.worker.taps.taps import check_drafter
from midstream.sites import ENDS, Tap
from midstream.transport.arena import Arena
from midstream.transport.ring_copy import host_transport
from midstream.transport.sizing import arena_settings

_CPU_STAGING_BYTES = 2 << 30
_DEVICE_SHARE = 16


def attach(worker: Any, vllm_config: Any, config: Config) -> None:
    """Prepare a worker whose device is initialized and whose model is not loaded yet."""
    check_settings(vllm_config)
    load_model: Callable[..., Any] = worker.load_model

    def load_and_tap(*args: Any, **kwargs: Any) -> Any:
        out = load_model(*args, **kwargs)
        # The loader's memory pool is not active any more: sleep mode must not free these buffers.
        ENDPOINT.set(worker, WorkerEndpoint(worker, vllm_config, config))
        return out

    worker.load_model = load_and_tap


class WorkerEndpoint:
    """Midstream in one worker: sets it up, and answers RPCs of the front end."""

    def __init__(self, worker: Any, vllm_config: Any, config: Config) -> None:
        runner = worker.model_runner
        parallel = vllm_config.parallel_config
        self._stage, self._tensor_rank = _place(parallel, worker.rank)
        model = runner.get_model()
        args = parallel.tensor_parallel_size, vllm_config.model_config.dtype == torch.float16
        embeds_given = getattr(vllm_config.model_config, "enable_prompt_embeds", False)
        embeds_given = bool(embeds_given or getattr(runner, "supports_mm_inputs", False))
        limits = _max_width(runner.device), embeds_given
        self._decoder = find_decoder(model, *args, config.sites, *limits)
        self._lacking = {**all_lacks(model, *args, *limits), **self._decoder.lacking}
        self._taps = _choose_taps(self._decoder, config)
        self._weights = RankWeights(config.readout_bytes, runner.device)
        self._lens = RankLens(model, self._weights, vllm_config.model_config.dtype)
        self._hidden_size: int = vllm_config.model_config.get_hidden_size()
        inner = self._decoder.inner
        widths = {
            tap: inner[tap].width if tap in inner else self._hidden_size for tap in self._taps
        }
        for tap in widths:
            if tap[0] == "logits":
                widths[tap] = num_switches(self._hidden_size)
        self._parts = tuple(
            inner[tap].parts(parallel.tensor_parallel_size) if tap in inner else 1
            for tap in self._taps
        )
        self._buffers = _allocate(widths, runner, vllm_config, config, self._weights)
        self._config = config
        self._tensor_ranks: int = parallel.tensor_parallel_size
        replacements = add_taps(
            model, self._decoder, self._taps, self._buffers, vllm_config, config
        )
        check_drafter(runner)
        reductions = Reductions(config.reductions, self._hidden_size, runner.device)
        if hasattr(runner, "model_memory_usage"):  # by which alone 0.28 sizes the KV cache
            own = self._buffers.nbytes + self._weights.nbytes + reductions.nbytes
            runner.model_memory_usage += own
        self._max_tokens = self._buffers.tokens.shape[0]
        # Vectors of the stream's width for which the staging ring has room.
        self._ring_rows = self._buffers.ring.numel() // self._hidden_size
        device = self._buffers.ring.device.type
        workers = parallel.world_size * replicas_of(vllm_config)
        self._arena = Arena(arena_settings(config, workers), device == "cuda")
        self._checksum = RankChecksum() if config.check_ranks else None
        is_v2 = seams.is_v2_runner(runner)
        seams.check_runner(runner, is_v2)
        adapter = v2 if is_v2 else v1
        self._attention = RankAttention(
            self._decoder,
            self._taps,
            runner,
            parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size,
            lambda group: adapter.block_size(runner, group),
        )
        is_alone, head = self._tensor_ranks == 1, _head(model, vllm_config)
        self._session = WorkerSession(
            RankMemory(
                self._buffers,
                self._taps,
                host_transport(self._buffers.ring, self._arena),
                self._arena,
            ),
            StepRules(
                vllm_config.model_config.max_model_len,
                config.on_nonfinite,
                only_armed=bool(replacements),
                calls_functions=config.hooks == "local",
            ),
            RankLinks(
                RankShare(self._tensor_rank, self._tensor_ranks, self._parts),
                self._checksum,
                agree=None if is_alone else all_ranks,
                add_up=None if is_alone else sum_over_ranks,
            ),
            PatternReader(
                self._attention.at,
                lambda group: adapter.block_table(runner, group),
                # As the head is before biases are added to what it returns.
                logits=None if head is None else LogitReader(head, PART_BYTES, self._lens),
                saes=SaeReader(self._weights, WORKSPACE_BYTES),
            ),
            reductions,
        )
        if self._session.bias is not None:
            self._session.bias.attach(model)
        self._results = ResultBuffer(self._arena, self._session.encoding)
        switch = ModelSwitch(
            worker,
            replacements,
            config.tapped_model == "lazy",
            is_v2,
            lambda run: check_model(self._buffers, self._decoder.layers, self._taps, run),
        )
        switch.attach()
        adapter.attach(runner, Hooks(self._session, switch, _ahead(vllm_config)))
        self._runner = runner
        self._ties_head = bool(
            getattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", False)
        )
        self._runner_name = "v2" if is_v2 else "v1"
        self._functions = this_process() if config.hooks == "local" else ""

    def __call__(self, request: object) -> Any:
        """Carry out an RPC request, which is one of `protocol.rpc` as plain values."""
        return pack(self._carry_out(rpc.read_request(request)))

    def _carry_out(self, request: rpc.RpcRequest[Any]) -> ProtocolMessage:
        match request:
            case rpc.DescribeWorker():
                return self._describe()
            case rpc.UpdateVectors():
                for update in request.updates:
                    self._session.requests.plans.update_vectors(update)
            case rpc.CountResets():
                self._session.requests.resets = request.resets
            case rpc.ChangePlans():
                self._session.requests.change(request.changes)
            case rpc.CollectResults():
                return self._collect(request)
            case rpc.CollectPartialRows():
                self._arena.sweep()
                with self._session.collection.collect_partial(request.stops) as rows:
                    return self._put({partial_name(uid): rows[uid] for uid in rows}, request)
            case rpc.ReadScores():
                scores = self._session.collection.read_scores(request.spans)
                return pack_scores(scores.values())
            case rpc.ReadData():
                return rpc.ResultData(
                    self._results.read(request.name, request.offset, request.size)
                )
            case rpc.DiscardData():
                self._results.release(request.name)
            case rpc.ReleaseRequests():
                with self._session.collection.collect(request.uids):
                    pass
                for uid in request.uids:
                    self._results.release(uid)
                    self._results.release(partial_name(uid))
            case rpc.WriteWeights():
                self._weights.write(request.offset, request.data)
            case rpc.ReadParameter():
                model = self._runner.get_model()
                return parameter_rows(model, self._ties_head, self._tensor_rank, request)
            case rpc.ReadDirections():
                model = self._runner.get_model()
                return token_directions(model, self._ties_head, self._lens, request)
            case rpc.ReadUsage():
                return self._usage()
            case rpc.CheckIntegrity():
                self._session.check_integrity()
                self._arena.sweep()
                vectors = self._session.requests.plans.count_vectors(request.front_end)
                return rpc.IntegrityReport(self._arena.used, vectors)
        return rpc.Acknowledged()

    def _describe(self) -> WorkerInfo:
        inner = self._decoder.inner
        lacking = dict(self._lacking)
        lacking |= {(ATTENTION, layer): why for layer, why in self._attention.reasons.items()}
        last = self._decoder.num_layers - 1
        if any(layer.index == last for layer in self._decoder.layers):
            reasons = {(LENS, last): self._lens.reason, (HEAD, last): self._lens.no_logits}
            lacking |= {tap: why for tap, why in reasons.items() if why}
        return WorkerInfo(
            stage=self._stage,
            tensor_rank=self._tensor_rank,
            tensor_ranks=self._tensor_ranks,
            num_layers=self._decoder.num_layers,
            hidden_size=self._hidden_size,
            taps=tuple(self._taps),
            widths=tuple(map(self._buffers.width, self._taps.values())),
            parts=self._parts,
            heads=tuple(inner[tap].heads if tap in inner else 0 for tap in self._taps),
            routing=tuple(inner[tap].routing if tap in inner else 0 for tap in self._taps),
            lacking=tuple(MissingTap(*tap, why) for tap, why in lacking.items()),
            dtype=str(self._buffers.ring.dtype).removeprefix("torch."),
            capture_limit=self._ring_rows // self._max_tokens,
            step_tokens=self._max_tokens,
            buffer_bytes=self._buffers.nbytes,
            room=_room(self._config),
            edits_per_site=self._config.edits_per_site,
            runner=self._runner_name,
            codec=self._config.codec,
            return_=self._config.return_,
            arena=self._arena.leases.address,
            arena_bytes=self._arena.budget,
            device=str(self._buffers.ring.device.type),
            functions=self._functions,
        )

    def _usage(self) -> rpc.WorkerUsage:
        self._arena.sweep()
        steps = asdict(self._session.counts)
        for name in ("ring_last", "ring_most"):
            steps[name] = -(-steps[name] * self._buffers.unit // self._hidden_size)
        return rpc.WorkerUsage(
            stage=self._stage,
            tensor_rank=self._tensor_rank,
            arena={**self._arena.used, "budget_bytes": self._arena.budget},
            ring_rows=self._ring_rows,
            steps=steps,
        )

    def _collect(self, request: rpc.CollectResults) -> rpc.CollectedResults:
        self._arena.sweep()
        with self._session.collection.collect(request.uids) as taken:
            return self._put(taken, request)

    def _put(
        self,
        requests: dict[str, list[RequestState]],
        request: rpc.CollectResults | rpc.CollectPartialRows,
    ) -> rpc.CollectedResults:
        """Put requests into the buffer under names, and return what the front end needs of it."""
        is_mapped = WorkerRank(self._stage, self._tensor_rank) in request.mapped
        resets = self._session.requests.resets
        headers = self._results.put(requests, is_mapped, resets, request.front_end)
        return rpc.CollectedResults(
            headers=encode(headers),
            inline=self._results.inline(list(requests), request.front_end),
            retired=self._arena.take_retired(request.front_end),
            checksums=[] if self._checksum is None else self._checksum.marks,
        )


def pack_scores(scores: Iterable[tuple[RequestState, RowBlock[Scores]]]) -> rpc.RunningScores:
    requests = []
    parts = []
    for state, block in scores:
        slots = state.plan.slots
        requests.append(RequestScores(state.uid, slots, block.spans))
        parts.append(block.values[:, 0, :slots].contiguous().numpy().tobytes())
    return rpc.RunningScores(requests, b"".join(parts))


def _ahead(vllm_config: Any) -> int:
    """Return how many steps may be scheduled before the outcome of a step's drafts is known."""
    if not vllm_config.scheduler_config.async_scheduling:
        return 0  # a request is scheduled again only when the outcome is known
    steps: int = vllm_config.max_concurrent_batches
    return steps - 1


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
        BufferSizes(max_tokens, hidden_size, _room(config), ring_rows, drafts),
        dtype=model_config.dtype,
        device=runner.device,
        sae=sae,
        reconstructed=config.reconstructed,
    )


def _room(config: Config) -> Room:
    return Room(**{field.name: getattr(config, field.name) for field in fields(Room)})


def _head(model: Any, vllm_config: Any) -> Head | None:
    """Return a model's head; None if it has none, as a model that embeds texts."""
    compute_logits = getattr(model, "compute_logits", None)
    if compute_logits is None:
        return None
    adapters = None if vllm_config.lora_config is None else HeadAdapters(model)
    return Head(compute_logits, int(vllm_config.model_config.get_vocab_size()), adapters)


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
