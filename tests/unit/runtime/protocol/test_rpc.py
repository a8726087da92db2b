"""RPC requests and answers: read back as sent, and nothing else is read."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.stored import worker_info
from unit.plan.strategies import spoilt

from midstream.errors import MessageError
from midstream.plan.resolved import LensMap
from midstream.runtime.protocol import rpc
from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.codec import encode, pack
from midstream.runtime.protocol.plan_version import PlanChange, PlanVersion
from midstream.runtime.protocol.results import (
    Lease,
    LeasedSegment,
    RequestHeader,
    ResultHeader,
    RowsHeader,
    ScoresHeader,
    StepChecksum,
    WeightState,
)
from midstream.runtime.protocol.scores import RequestScores
from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.runtime.protocol.worker_info import MissingTap, WorkerRank

RANKS = [WorkerRank(0, 0), WorkerRank(1, 1)]
HEADER = RequestHeader(
    "0_x", "", 0, [1, 2], [2], 3, [RowsHeader((0, 2), "raw", [(0, 2)], 8)], [ScoresHeader([], 0)]
)
RESULTS = rpc.CollectedResults(
    encode([ResultHeader("u", [HEADER], 14, Lease(1, [LeasedSegment(7, 5, 4096)]))]),
    [b"x", None],
    [3],
    [StepChecksum(1, "ab", "cd")],
)
USAGE = rpc.WorkerUsage(0, 1, {"leases": 2}, 64, {"steps": 3})
# Each request and an answer to it.
CALLS = [
    (rpc.DescribeWorker(), worker_info(lacking=(MissingTap("mlp_in", 1, "no MLP"),))),
    (rpc.UpdateVectors([VectorUpdate(("ab",), (bytes(4),))]), rpc.Acknowledged()),
    (rpc.CountResets(3), rpc.Acknowledged()),
    (
        rpc.UpdatePlan(
            "u",
            ["0_x", "1_x"],
            PlanVersion(1, b"plan", CacheKeys((0, 4), ("", "ab"), None)),
            VectorUpdate((), (bytes(4),)),
        ),
        rpc.UpdatedPlan({"0_x": 7}),
    ),
    (rpc.StopRequests("u", ["0_x"], "controller:c", is_error=True), rpc.Acknowledged()),
    (rpc.ChangePlans([PlanChange("0_x", "u", 1, 7, b"plan")]), rpc.Acknowledged()),
    (rpc.CollectResults(["u", "v"], RANKS), RESULTS),
    (rpc.CollectPartialRows({"u": {"0_x": 3}}, []), RESULTS),
    (rpc.ReadScores({"u": (0, 4)}), rpc.RunningScores([RequestScores("u", 2, [(0, 4)])], b"abc")),
    (rpc.ReadData("u", 16, 32), rpc.ResultData(b"\x00\xff")),
    (rpc.DiscardData("u"), rpc.Acknowledged()),
    (rpc.DropScores(["00ff"]), rpc.Acknowledged()),
    (rpc.KeepSums(), rpc.Acknowledged()),
    (rpc.DropSums({"00ff": [3, 1]}), rpc.Acknowledged()),
    (rpc.ReadWeights(), WeightState(2, "step 7")),
    (rpc.CountLoads(3), rpc.AdapterLoads(2)),
    (rpc.NameWeights("step 7"), rpc.Acknowledged()),
    (rpc.BlankScores("00ff", [3, 1], [0, 7]), rpc.Acknowledged()),
    (rpc.ReleaseRequests([]), rpc.Acknowledged()),
    (rpc.ReadParameter("x", 0, 2), rpc.ParameterRows([], [2, 1], "float16", 0, b"abcd")),
    (rpc.ReadDirections(7, [LensMap(64, -1, True)]), rpc.TokenDirections(b"abcd", "")),
    (rpc.WriteWeights(128, bytes(range(8))), rpc.Acknowledged()),
    (rpc.ReadUsage(), USAGE),
    (rpc.CheckIntegrity(), rpc.IntegrityReport({"leases": 0}, 3)),
]
each_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call[0]).__name__)


def travelled(message):
    """The plain values of a message as vLLM's msgpack delivers them."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(pack(message)))


def test_there_is_a_call_of_each_operation():
    assert {type(request) for request, _ in CALLS} == set(rpc.RpcRequest.__subclasses__())


@each_call
def test_a_request_and_its_answers_are_read_as_they_were_sent(call):
    request, answer = call
    assert rpc.read_request(travelled(request)) == request
    assert rpc.arguments_of(request) == (pack(request),)
    assert rpc.read_answers(request, [travelled(answer), pack(answer)]) == [answer, answer]


def test_data_is_not_copied_on_the_way_to_vllm_and_from_it():
    data = bytes(1000)
    value = pack(rpc.ResultData(data))
    assert value["data"] is data
    [answer] = rpc.read_answers(rpc.ReadData("u", 0, 1000), [value])
    assert answer.data is data


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("collect", "there is no operation 'None'"),
        ({}, "there is no operation 'None'"),
        ({"op": "Format"}, "there is no operation .*Format"),
        ({"op": ["ReadUsage"]}, "there is no operation"),
        ({"op": "ReleaseRequests", "uids": "u"}, "uids: expected `array`, got `str`"),
        ({"op": "ReleaseRequests"}, "missing required field `uids`"),
        ({"op": "ReadUsage", "more": 1}, "unknown field `more`"),
        ({"op": "ReadData", "name": "u", "offset": -1, "size": 1}, "offset: expected `int` >= 0"),
        (object(), "there is no operation"),
    ],
)
def test_what_is_no_request_is_refused_with_the_field(value, problem):
    with pytest.raises(MessageError, match=f"malformed request to a worker: .*{problem}"):
        rpc.read_request(value)


def test_a_wrong_answer_is_refused_with_the_request_and_the_field():
    with pytest.raises(
        MessageError, match="answer of a worker to ReadData: data: expected `bytes`"
    ):
        rpc.read_answers(rpc.ReadData("u", 0, 1), [{"data": "text"}])


def _is_read_or_refused(read, value):
    try:
        msgspec.msgpack.encode(value)
    except OverflowError:
        return  # msgpack has no integers of more than 64 bits, so none arrives
    problem = ""
    try:
        found = read(value)
    except MessageError as error:
        problem = str(error)
    else:
        assert read(travelled(found)) == found
    assert len(problem) < 1000


@each_call
@given(st.data())
@settings(max_examples=rounds(suite=40, nightly=320))
def test_a_spoilt_message_is_read_or_refused(call, data):
    request, answer = call
    _is_read_or_refused(rpc.read_request, data.draw(spoilt(travelled(request))))
    _is_read_or_refused(
        lambda value: rpc.read_answers(request, [value])[0], data.draw(spoilt(travelled(answer)))
    )


def test_fields_of_a_description_are_found_by_name_as_before_they_were_attributes():
    info = worker_info(capture_limit=5)
    assert info["capture_limit"] == info.capture_limit == 5
    assert info["return"] == info.return_
    assert isinstance(info["room"], dict)
    assert info.place == "0.0.0"
    with pytest.raises(KeyError):
        info["place"]
