"""The RPC of the workers: a request class per operation, each with the class of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from midstream.errors import MessageError
from midstream.plan.resolved import LensMap
from midstream.runtime.protocol.codec import Natural, ProtocolMessage, pack, unpack
from midstream.runtime.protocol.plan_version import PlanChange, PlanVersion
from midstream.runtime.protocol.results import StepChecksum
from midstream.runtime.protocol.scores import RequestScores, Span
from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.runtime.protocol.worker_info import WorkerInfo, WorkerRank
from midstream.runtime.vllm.attributes import ENDPOINT
from midstream.validation import show

# Name of the method of vLLM's workers.
RPC = ENDPOINT.name

A = TypeVar("A", bound=ProtocolMessage)


# -- answers ------------------------------------------------------------------------------------


class Acknowledged(ProtocolMessage, frozen=True):
    """Answer of an operation that returns nothing."""


class UpdatedPlan(ProtocolMessage, frozen=True):
    """The engine core changed the plan of running requests.

    Attributes:
        positions: by vLLM's request id, the first position at which the version holds; without the
            requests that have ended.
    """

    positions: dict[str, Natural]


class CollectedResults(ProtocolMessage, frozen=True):
    """Results that a worker has put into its buffer.

    Attributes:
        headers: `encode`d list of a `ResultHeader` for each name that was requested, in that order.
        inline: data of each header; None: it is too large, and is read with `ReadData`.
        retired: numbers of arena segments that this front end knows and that no longer exist.
        checksums: the worker's latest, with the setting `check_ranks`; otherwise empty.
    """

    headers: bytes
    inline: list[bytes | None]
    retired: list[int]
    checksums: list[StepChecksum]


class ResultData(ProtocolMessage, frozen=True):
    """A part of a result's data."""

    data: bytes


class RunningScores(ProtocolMessage, frozen=True):
    """Scores of running requests.

    Attributes:
        data: float32 [positions, slots] of one request after the other.
    """

    requests: list[RequestScores]
    data: bytes


class WorkerUsage(ProtocolMessage, frozen=True):
    """Memory that a worker uses, and totals of its steps.

    Attributes:
        stage, tensor_rank: position of the worker within its replica.
        arena: bytes and counts by name: those of `Arena.used`, and `budget_bytes`.
        ring_rows: capacity of the staging ring, in vectors of the stream's width.
        steps: totals by name: those of `StepCounts`.
    """

    stage: int
    tensor_rank: int
    arena: dict[str, int]
    ring_rows: int
    steps: dict[str, int]


class IntegrityReport(ProtocolMessage, frozen=True):
    """A worker's invariants hold.

    Attributes:
        arena: bytes and counts by name: those of `Arena.used`.
        vectors: number of vectors that are stored for the front end, which plans name.
    """

    arena: dict[str, int]
    vectors: Natural


class ParameterRows(ProtocolMessage, frozen=True):
    """Rows of a parameter of the model, along its first dimension.

    Attributes:
        names: the parameters that the worker has, if it does not have this one.
        shape: shape of the whole parameter; empty: the worker does not have it.
        dtype: name of its dtype.
        first: number of the first row in `data`.
        data: the rows that this worker sends, of those that were requested.
        problem: why the parameter cannot be read; empty if it can.
    """

    names: list[str] = []
    shape: list[Natural] = []
    dtype: str = ""
    first: Natural = 0
    data: bytes = b""
    problem: str = ""


class TokenDirections(ProtocolMessage, frozen=True):
    """Directions of a token.

    Attributes:
        data: float32 [maps, width], each of length 1; empty: another worker has the token's row of
            the head.
        problem: why this worker has none; empty if it has, or another one has.
    """

    data: bytes = b""
    problem: str = ""


# -- requests -----------------------------------------------------------------------------------


class RpcRequest(ProtocolMessage, Generic[A], frozen=True, tag_field="op", tag=True):
    """Base of the operations; `A` is what each worker answers."""

    answer: ClassVar[type[ProtocolMessage]]


class DescribeWorker(RpcRequest[WorkerInfo], frozen=True):
    """Return the worker's description."""

    answer: ClassVar[type[ProtocolMessage]] = WorkerInfo


class UpdateVectors(RpcRequest[Acknowledged], frozen=True):
    """Store the vectors that plans of later requests name, and drop others. Sent by the engine
    core, ahead of the step with the first of these requests.

    Attributes:
        updates: carried out in this order.
    """

    updates: list[VectorUpdate]
    answer: ClassVar[type[ProtocolMessage]] = Acknowledged


class CountResets(RpcRequest[Acknowledged], frozen=True):
    """Report, with all later results, how often the prefix cache was reset. Sent by the engine
    core, between the steps before and after a reset.

    Attributes:
        resets: the number of resets.
    """

    resets: Natural
    answer: ClassVar[type[ProtocolMessage]] = Acknowledged


class UpdatePlan(RpcRequest[UpdatedPlan], frozen=True):
    """Let running requests have another version of their plan, each from its next position that is
    not scheduled yet. The engine core answers this one itself; see `runtime.core.plan_versions`.

    Attributes:
        vectors: what the workers must do to have the vectors that its plan names; None: nothing.
            It is done even if the requests have ended.
    """

    uid: str
    request_ids: list[str]
    version: PlanVersion
    vectors: VectorUpdate | None = None
    answer: ClassVar[type[ProtocolMessage]] = UpdatedPlan


class StopRequests(RpcRequest[Acknowledged], frozen=True):
    """End running requests with the tokens of their next step. The engine core answers this one
    itself; see `runtime.core.ended_requests`. Requests that have ended are ignored.

    Attributes:
        is_error: whether they end with an error, and not as stopped.
    """

    uid: str
    request_ids: list[str]
    reason: str
    is_error: bool = False
    answer: ClassVar[type[ProtocolMessage]] = Acknowledged


class ChangePlans(RpcRequest[Acknowledged], frozen=True):
    """Change the plans of requests from a position on that no step has reached. Sent by the engine
    core, ahead of the first step with such a position.

    Attributes:
        changes: carried out in this order.
    """

    changes: list[PlanChange]
    answer: ClassVar[type[ProtocolMessage]] = Acknowledged


class CollectResults(RpcRequest[CollectedResults], frozen=True):
    """Finish requests and return their results; the worker forgets the requests.

    Attributes:
        mapped: workers whose arena the front end maps.
        front_end: number of the front end.
    """

    uids: list[str]
    mapped: list[WorkerRank]
    front_end: Natural = 0
    answer: ClassVar[type[ProtocolMessage]] = CollectedResults


class CollectPartialRows(RpcRequest[CollectedResults], frozen=True):
    """Return rows of running requests, each row once; the worker forgets these rows.

    Attributes:
        stops: per uid and vLLM's request id, the position below which rows are returned.
        mapped: workers whose arena the front end maps.
        front_end: number of the front end.
    """

    stops: dict[str, dict[str, int]]
    mapped: list[WorkerRank]
    front_end: Natural = 0
    answer: ClassVar[type[ProtocolMessage]] = CollectedResults


class ReadScores(RpcRequest[RunningScores], frozen=True):
    """Return scores of running requests; the worker keeps them.

    Attributes:
        spans: per uid, [start, stop) of positions whose forward pass has been queued.
    """

    spans: dict[str, Span]
    answer: ClassVar[type[ProtocolMessage]] = RunningScores


class ReadData(RpcRequest[ResultData], frozen=True):
    """Return a part of the data under a name; nothing if all of it was inline.

    Attributes:
        offset, size: the part, in bytes.
    """

    name: str
    offset: Natural
    size: Natural
    answer: ClassVar[type[ProtocolMessage]] = ResultData


class DiscardData(RpcRequest[Acknowledged], frozen=True):
    """Forget the data under a name."""

    name: str
    answer: ClassVar[type[ProtocolMessage]] = Acknowledged


class ReleaseRequests(RpcRequest[Acknowledged], frozen=True):
    """Finish requests and forget them and their results."""

    uids: list[str]
    answer: ClassVar[type[ProtocolMessage]] = Acknowledged


class ReadParameter(RpcRequest[ParameterRows], frozen=True):
    """Return rows of a parameter outside the decoder layers. Each row is returned by one worker of
    each pipeline stage that has the parameter.
    """

    name: str
    first: Natural
    count: Natural
    answer: ClassVar[type[ProtocolMessage]] = ParameterRows


class ReadDirections(RpcRequest[TokenDirections], frozen=True):
    """Return the directions along which lenses read a token: see `Steer.token`."""

    token: Natural
    maps: list[LensMap]
    answer: ClassVar[type[ProtocolMessage]] = TokenDirections


class WriteWeights(RpcRequest[Acknowledged], frozen=True):
    """Write into the memory for registered weights: maps of lenses, and encoders of SAEs.

    Attributes:
        data: the bytes.
    """

    offset: Natural
    data: bytes
    answer: ClassVar[type[ProtocolMessage]] = Acknowledged


class ReadUsage(RpcRequest[WorkerUsage], frozen=True):
    """Return the worker's usage."""

    answer: ClassVar[type[ProtocolMessage]] = WorkerUsage


class CheckIntegrity(RpcRequest[IntegrityReport], frozen=True):
    """Check the worker's invariants, which hold between steps.

    Attributes:
        front_end: number of the front end.
    """

    front_end: Natural = 0
    answer: ClassVar[type[ProtocolMessage]] = IntegrityReport


_REQUESTS: dict[object, type[RpcRequest[Any]]] = {
    request.__name__: request
    for request in (
        DescribeWorker,
        UpdateVectors,
        CountResets,
        UpdatePlan,
        StopRequests,
        ChangePlans,
        CollectResults,
        CollectPartialRows,
        ReadScores,
        ReadData,
        DiscardData,
        ReleaseRequests,
        ReadParameter,
        ReadDirections,
        WriteWeights,
        ReadUsage,
        CheckIntegrity,
    )
}


# -- reading ------------------------------------------------------------------------------------


def arguments_of(request: RpcRequest[Any]) -> tuple[Any]:
    """Return the arguments with which vLLM's `collective_rpc` calls the method `RPC`."""
    return (pack(request),)


def read_request(value: object) -> RpcRequest[Any]:
    """Read the argument of the method `RPC`."""
    op = value.get("op") if isinstance(value, Mapping) else None
    kind = _REQUESTS.get(op) if isinstance(op, str) else None
    if kind is None:
        raise MessageError(f"malformed request to a worker: there is no operation {show(str(op))}")
    request: RpcRequest[Any] = unpack(kind, value, "request to a worker")
    return request


def read_answers(request: RpcRequest[A], values: Sequence[object]) -> list[A]:
    """Read the workers' answers to a request.

    Args:
        values: what `collective_rpc` returned, one value per worker.
    """
    name = f"answer of a worker to {type(request).__name__}"
    return [unpack(request.answer, value, name) for value in values]
