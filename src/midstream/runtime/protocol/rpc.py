"""The RPC of the workers: a request class per operation, each with the class of its answer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar, get_args

from midstream.errors import MessageError
from midstream.plan.resolved import LensMap
from midstream.runtime.protocol.codec import Natural, ProtocolMessage, pack, unpack
from midstream.runtime.protocol.plan_version import PlanChange, PlanVersion
from midstream.runtime.protocol.results import StepChecksum, WeightState
from midstream.runtime.protocol.scores import RequestScores, Span
from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.runtime.protocol.worker_info import WorkerInfo, WorkerRank
from midstream.runtime.vllm.attributes import ENDPOINT
from midstream.validation import show

# Name of the method of vLLM's workers.
RPC = ENDPOINT.name

A = TypeVar("A", bound=ProtocolMessage)


# -- answers ------------------------------------------------------------------------------------


class AdapterLoads(ProtocolMessage, frozen=True):
    """How often a worker has loaded an adapter."""

    count: Natural


class Acknowledged(ProtocolMessage, frozen=True):
    """Answer of an operation that returns nothing."""


class UpdatedPlan(ProtocolMessage, frozen=True):
    """The engine core changed the plan of running requests, from positions by vLLM's id on."""

    positions: dict[str, Natural]


class CollectedResults(ProtocolMessage, frozen=True):
    """Results that a worker has put into its buffer."""

    # `encode`d list of a `ResultHeader` for each name that was requested, in that order
    headers: bytes
    inline: list[bytes | None]  # per header; None: too large, and read with `ReadData`
    retired: list[int]  # arena segments that this front end knows and that no longer exist
    checksums: list[StepChecksum]  # the latest, with the setting `check_ranks`; otherwise empty


class ResultData(ProtocolMessage, frozen=True):
    """A part of a result's data."""

    data: bytes


class RunningScores(ProtocolMessage, frozen=True):
    """Scores of running requests: float32 [positions, slots] of one after the other."""

    requests: list[RequestScores]
    data: bytes


class WorkerUsage(ProtocolMessage, frozen=True):
    """Memory that a worker uses, and totals of its steps."""

    stage: int
    tensor_rank: int
    arena: dict[str, int]  # bytes and counts of `Arena.used`, and `budget_bytes`
    ring_rows: int  # capacity of the staging ring, in vectors of the stream's width
    steps: dict[str, int]  # totals of `StepCounts`
    weight_version: Natural = 0  # see `WeightState`, of the next step
    weight_name: str = ""


class IntegrityReport(ProtocolMessage, frozen=True):
    """A worker's invariants hold."""

    arena: dict[str, int]  # bytes and counts of `Arena.used`
    vectors: Natural  # number of those stored for the front end, which plans name


class ParameterRows(ProtocolMessage, frozen=True):
    """Rows of a parameter of the model, along its first dimension."""

    names: list[str] = []  # the parameters that the worker has, if it does not have this one
    shape: list[Natural] = []  # of the whole parameter; empty: the worker does not have it
    dtype: str = ""
    first: Natural = 0  # number of the first row in `data`
    data: bytes = b""
    problem: str = ""  # why the parameter cannot be read


class TokenDirections(ProtocolMessage, frozen=True):
    """Directions of a token."""

    data: bytes = b""  # float32 [maps, width] of length 1; empty: another worker has the token
    problem: str = ""  # why this worker has none


# -- requests -----------------------------------------------------------------------------------


class RpcRequest(ProtocolMessage, Generic[A], frozen=True, tag_field="op", tag=True):
    """Base of the operations; `A` is what each worker answers."""


class DescribeWorker(RpcRequest[WorkerInfo], frozen=True):
    """Return the worker's description."""


class UpdateVectors(RpcRequest[Acknowledged], frozen=True):
    """Store vectors that later plans name, drop others, in this order, ahead of the first step."""

    updates: list[VectorUpdate]


class CountResets(RpcRequest[Acknowledged], frozen=True):
    """Report how often the prefix cache was reset; from the engine core, before the next step."""

    resets: Natural


class ReadWeights(RpcRequest[WeightState], frozen=True):
    """Return the state of the weights that the next step runs on."""


class CountLoads(RpcRequest[AdapterLoads], frozen=True):
    """Return how often an adapter was loaded, by vLLM's number."""

    adapter: Natural


class NameWeights(RpcRequest[Acknowledged], frozen=True):
    """Call the weights of the next step by a name of the caller's; from the engine core."""

    name: str


class DropScores(RpcRequest[Acknowledged], frozen=True):
    """Forget kept scores by key, also those of running requests; from the engine core."""

    keys: list[str]


class BlankScores(RpcRequest[Acknowledged], frozen=True):
    """Keep NaN as the score of tokens of cached blocks; from the engine core."""

    key: str
    blocks: list[Natural]
    tokens: list[Natural]  # of each block, from 0


class KeepSums(RpcRequest[Acknowledged], frozen=True):
    """Keep sums of reduced rows at the ends of blocks until `DropSums`; from the engine core."""


class DropSums(RpcRequest[Acknowledged], frozen=True):
    """Forget kept sums, by key those of some blocks; from the engine core."""

    blocks: dict[str, list[Natural]]


class UpdatePlan(RpcRequest[UpdatedPlan], frozen=True):
    """Change running requests' plans from the next unscheduled position. The core answers."""

    uid: str
    request_ids: list[str]
    version: PlanVersion
    # What the workers must do to have those of its plan, even if the requests have ended.
    vectors: VectorUpdate | None = None


class StopRequests(RpcRequest[Acknowledged], frozen=True):
    """End running requests, stopped or failed, with their next tokens. The core answers."""

    uid: str
    request_ids: list[str]
    reason: str
    is_error: bool = False


class ChangePlans(RpcRequest[Acknowledged], frozen=True):
    """Change plans in this order, sent by the core ahead of the first step with the change."""

    changes: list[PlanChange]


class CollectResults(RpcRequest[CollectedResults], frozen=True):
    """Finish requests and return their results; the worker forgets the requests."""

    uids: list[str]
    mapped: list[WorkerRank]  # workers whose arena the front end maps
    front_end: Natural = 0


class CollectPartialRows(RpcRequest[CollectedResults], frozen=True):
    """Return rows of running requests, each row once; the worker forgets these rows."""

    stops: dict[str, dict[str, int]]  # by uid and vLLM's id, where to stop
    mapped: list[WorkerRank]  # workers whose arena the front end maps
    front_end: Natural = 0


class ReadScores(RpcRequest[RunningScores], frozen=True):
    """Return scores of running requests; the worker keeps them."""

    spans: dict[str, Span]  # per uid, [start, stop) of positions whose forward pass has been queued


class ReadData(RpcRequest[ResultData], frozen=True):
    """Return a part of the data under a name, in bytes; nothing if all of it was inline."""

    name: str
    offset: Natural
    size: Natural


class DiscardData(RpcRequest[Acknowledged], frozen=True):
    """Forget the data under a name."""

    name: str


class ReleaseRequests(RpcRequest[Acknowledged], frozen=True):
    """Finish requests and forget them and their results."""

    uids: list[str]


class ReadParameter(RpcRequest[ParameterRows], frozen=True):
    """Return rows of a parameter outside the decoder layers, each from one worker of a stage."""

    name: str
    first: Natural
    count: Natural


class ReadDirections(RpcRequest[TokenDirections], frozen=True):
    """Return the directions along which lenses read a token: see `Steer.token`."""

    token: Natural
    maps: list[LensMap]


class WriteWeights(RpcRequest[Acknowledged], frozen=True):
    """Write into the memory for registered weights: maps of lenses, and encoders of SAEs."""

    offset: Natural
    data: bytes


class ReadUsage(RpcRequest[WorkerUsage], frozen=True):
    """Return the worker's usage."""


class CheckIntegrity(RpcRequest[IntegrityReport], frozen=True):
    """Check the worker's invariants, which hold between steps."""

    front_end: Natural = 0


_REQUESTS: dict[object, type[RpcRequest[Any]]] = {
    request.__name__: request for request in RpcRequest.__subclasses__()
}


_CALLS = itertools.count(1)

# -- reading ------------------------------------------------------------------------------------


def arguments_of(request: RpcRequest[Any]) -> tuple[Any]:
    """Return the arguments with which vLLM's `collective_rpc` calls the method `RPC`."""
    return (pack(request),)


def utility_of(request: RpcRequest[Any]) -> tuple[int, str, tuple[Any, ...]]:
    """Return a call of the engine core that passes a request on: a number, a method, arguments."""
    # vLLM's own have numbers of `uuid1`, which locks a file; their last 16 bits are never all 0.
    return next(_CALLS) << 16, "collective_rpc", (RPC, None, arguments_of(request), None)


def read_request(value: object) -> RpcRequest[Any]:
    """Read the argument of the method `RPC`."""
    op = value.get("op") if isinstance(value, Mapping) else None
    kind = _REQUESTS.get(op) if isinstance(op, str) else None
    if kind is None:
        raise MessageError(f"malformed request to a worker: there is no operation {show(str(op))}")
    request: RpcRequest[Any] = unpack(kind, value, "request to a worker")
    return request


def read_answers(request: RpcRequest[A], values: Sequence[object]) -> list[A]:
    """Read the workers' answers to a request, as `collective_rpc` returned them."""
    name = f"answer of a worker to {type(request).__name__}"
    (answer,) = get_args(vars(type(request))["__orig_bases__"][0])
    return [unpack(answer, value, name) for value in values]
