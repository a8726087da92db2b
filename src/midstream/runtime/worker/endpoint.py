"""What answers the front end in one worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from midstream.plan.readouts.attention import ATTENTION
from midstream.plan.readouts.lens import LENS
from midstream.plan.readouts.logits import HEAD
from midstream.runtime.protocol import rpc
from midstream.runtime.protocol.codec import ProtocolMessage, encode, pack
from midstream.runtime.protocol.results import partial_name
from midstream.runtime.protocol.scores import RequestScores
from midstream.runtime.protocol.worker_info import MissingTap, WorkerInfo, WorkerRank, this_process
from midstream.runtime.vllm import seams
from midstream.runtime.worker.parameter_answers import parameter_rows, token_directions
from midstream.runtime.worker.readouts.layers import RankAttention
from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.result_buffer import ResultBuffer
from midstream.runtime.worker.row_index import ScoreRows
from midstream.runtime.worker.session import WorkerSession
from midstream.runtime.worker.taps.tapped_rank import TappedRank, room_of
from midstream.transport.arena import Arena


class WorkerEndpoint:
    """Answers RPCs of the front end in one worker."""

    def __init__(
        self, rank: TappedRank, session: WorkerSession, attention: RankAttention, arena: Arena
    ) -> None:
        self._rank = rank
        self._session = session
        self._attention = attention
        self._arena = arena
        self._results = ResultBuffer(arena, session.encoding)

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
            case rpc.ReadWeights():
                return self._session.requests.weights.current
            case rpc.CountLoads():
                return rpc.AdapterLoads(self._session.requests.weights.loads[request.adapter])
            case rpc.NameWeights():
                self._session.requests.weights.name(request.name)
            case rpc.DropScores():
                self._session.drop_scores(request.keys)
            case rpc.BlankScores():
                self._session.blank_scores(request.key, request.blocks, request.tokens)
            case rpc.KeepSums():
                self._session.keep_sums()
            case rpc.DropSums():
                self._session.drop_sums(request.blocks)
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
                self._rank.weights.write(request.offset, request.data)
            case rpc.ReadParameter():
                model = self._rank.runner.get_model()
                return parameter_rows(model, self._rank.ties_head, self._rank.tensor_rank, request)
            case rpc.ReadDirections():
                model = self._rank.runner.get_model()
                return token_directions(model, self._rank.ties_head, self._rank.lens, request)
            case rpc.ReadUsage():
                return self._usage()
            case rpc.CheckIntegrity():
                self._session.check_integrity()
                self._arena.sweep()
                vectors = self._session.requests.plans.count_vectors(request.front_end)
                return rpc.IntegrityReport(self._arena.used, vectors)
        return rpc.Acknowledged()

    def _describe(self) -> WorkerInfo:
        rank, inner = self._rank, self._rank.decoder.inner
        lacking = dict(rank.lacking)
        lacking |= {(ATTENTION, layer): why for layer, why in self._attention.reasons.items()}
        last = rank.decoder.num_layers - 1
        if any(layer.index == last for layer in rank.decoder.layers):
            reasons = {(LENS, last): rank.lens.reason, (HEAD, last): rank.lens.no_logits}
            lacking |= {tap: why for tap, why in reasons.items() if why}
        return WorkerInfo(
            stage=rank.stage,
            tensor_rank=rank.tensor_rank,
            tensor_ranks=rank.tensor_ranks,
            num_layers=rank.decoder.num_layers,
            hidden_size=rank.hidden_size,
            taps=tuple(rank.taps),
            widths=tuple(map(rank.buffers.width, rank.taps.values())),
            parts=rank.parts,
            heads=tuple(inner[tap].heads if tap in inner else 0 for tap in rank.taps),
            routing=tuple(inner[tap].routing if tap in inner else 0 for tap in rank.taps),
            lacking=tuple(MissingTap(*tap, why) for tap, why in lacking.items()),
            dtype=str(rank.buffers.ring.dtype).removeprefix("torch."),
            capture_limit=rank.ring_rows // rank.max_tokens,
            step_tokens=rank.max_tokens,
            buffer_bytes=rank.buffers.nbytes,
            room=room_of(rank.config),
            edits_per_site=rank.config.edits_per_site,
            runner="v2" if seams.is_v2_runner(rank.runner) else "v1",
            codec=rank.config.codec,
            return_=rank.config.return_,
            arena=self._arena.leases.address,
            arena_bytes=self._arena.budget,
            device=str(rank.buffers.ring.device.type),
            functions=this_process() if rank.config.hooks == "local" else "",
        )

    def _usage(self) -> rpc.WorkerUsage:
        self._arena.sweep()
        steps = asdict(self._session.counts)
        for name in ("ring_last", "ring_most"):
            steps[name] = -(-steps[name] * self._rank.buffers.unit // self._rank.hidden_size)
        weights = self._session.requests.weights.current
        return rpc.WorkerUsage(
            stage=self._rank.stage,
            tensor_rank=self._rank.tensor_rank,
            arena={**self._arena.used, "budget_bytes": self._arena.budget},
            ring_rows=self._rank.ring_rows,
            steps=steps,
            weight_version=weights.number,
            weight_name=weights.name,
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
        is_mapped = WorkerRank(self._rank.stage, self._rank.tensor_rank) in request.mapped
        resets = self._session.requests.resets
        headers = self._results.put(requests, is_mapped, resets, request.front_end)
        return rpc.CollectedResults(
            headers=encode(headers),
            inline=self._results.inline(list(requests), request.front_end),
            retired=self._arena.take_retired(request.front_end),
            checksums=[] if self._session.checksum is None else self._session.checksum.marks,
        )


def pack_scores(scores: Iterable[tuple[RequestState, ScoreRows]]) -> rpc.RunningScores:
    requests = []
    parts = []
    for state, rows in scores:
        slots = state.plan.slots
        requests.append(RequestScores(state.uid, slots, rows.spans))
        parts.append(rows.values[:, :slots].tobytes())
    return rpc.RunningScores(requests, b"".join(parts))
