"""What a worker sent, cut by its header."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.plans import plan_of
from support.stored import outbox_of, put_one, rows_block, score_rows, worker_info
from unit.plan.strategies import spoilt

from midstream.errors import MessageError
from midstream.runtime.protocol.codec import pack, unpack
from midstream.runtime.protocol.results import ResultHeader, WorkerAnswer, split
from midstream.runtime.protocol.runs import expand, expand_runs
from midstream.runtime.protocol.scores import RequestScores, score_blocks
from midstream.runtime.worker.request_state import RequestState

TAPS = [("resid_pre", 0), ("resid_mid", 0), ("resid_post", 1)]
WIDTH = 3
WORKER = worker_info(hidden_size=WIDTH, taps=tuple(TAPS))

positions = st.sets(st.integers(0, 20), min_size=1, max_size=6).map(sorted)
places = st.sets(st.integers(0, 2), min_size=1).map(lambda found: tuple(sorted(found)))


@st.composite
def requests(draw: st.DrawFn, name: str) -> RequestState:
    """A finished request of two probes, with random rows and scores."""
    plan = plan_of(probes=[(f"p{n}", TAPS[0], ((0, None),)) for n in range(2)])
    found = RequestState(name, "u", plan, 0, [])
    found.done = np.array(draw(st.lists(st.integers(0, 0xFFFF), max_size=5)), np.uint16)
    found.problem = draw(st.sampled_from(["", "bad"]))
    seed = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    for taps in draw(st.lists(places, max_size=3, unique=True)):
        at = np.array(draw(positions))
        values = torch.randn(at.size, len(taps), WIDTH, generator=seed)
        found.blocks.append(rows_block(taps, at, values))
    if draw(st.booleans()):
        at = np.array(draw(positions))
        found.scores.append(score_rows(at, torch.randn(at.size, 4, generator=seed)))
    return found


def travelled(header):
    """A header as it arrives through vLLM's msgpack."""
    value = msgspec.msgpack.decode(msgspec.msgpack.encode(pack(header)))
    return unpack(ResultHeader, value, "header")


@settings(max_examples=100)
@given(st.data(), st.permutations(range(11)))
def test_what_goes_into_an_outbox_comes_out_of_its_parts(data, order):
    sent = [data.draw(requests(f"{n}_x")) for n in order[: data.draw(st.integers(1, 4))]]
    outbox = outbox_of()
    header = put_one(outbox, "u", sent, mapped=False)
    answers = [WorkerAnswer(WORKER, header, outbox.read("u", 0, 10**9))]
    found = split(answers, num_completions=12)
    assert set(found) == {int(request.id.split("_")[0]) for request in sent}
    for request in sent:
        (part,) = found[int(request.id.split("_")[0])]
        assert part.problem == request.problem
        assert part.states.tolist() == request.done.tolist()
        blocks = part.blocks()
        assert [block.taps for block in blocks] == [
            tuple(TAPS[tap] for tap in block.taps) for block in request.blocks
        ]
        for block, wanted in zip(blocks, request.blocks, strict=True):
            assert block.positions.tolist() == wanted.positions.tolist()
            assert torch.equal(torch.cat(block.chunks), wanted.values)
        scores = part.scores()
        assert len(scores) == len(request.scores)
        for (at, values), wanted in zip(scores, request.scores, strict=True):
            assert at.tolist() == expand_runs(wanted.spans).tolist()
            assert np.array_equal(values, wanted.values[:, :2])
    assert sum(one.nbytes for one in header.requests) == header.nbytes
    assert travelled(header) == header


@pytest.mark.parametrize("name", ["x", "7_x", "no-number_x", "_"])
def test_a_lone_completion_has_all_whatever_its_request_is_called(name):
    outbox = outbox_of()
    header = put_one(outbox, "u", [RequestState(name, "u", plan_of(), 0, [])], mapped=False)
    assert list(split([WorkerAnswer(WORKER, header, b"")], 1)) == [0]


@given(st.data())
@settings(max_examples=rounds(suite=150, nightly=1200))
def test_results_that_do_not_fit_their_header_are_refused_with_the_worker_that_sent_them(data):
    """A spoilt header, or data that is cut off or too long."""
    outbox = outbox_of()
    sent = [data.draw(requests("0_x")), data.draw(requests("1_x"))]
    value = data.draw(spoilt(pack(put_one(outbox, "u", sent, mapped=False))))
    body = outbox.read("u", 0, 10**9)
    cut = data.draw(st.integers(-3, 3))
    body = body[:cut] if cut < 0 else body + b"\0" * cut
    problem = ""
    try:
        header = unpack(ResultHeader, value, "header")
        for parts in split([WorkerAnswer(WORKER, header, body)], 12).values():
            for part in parts:
                for block in part.blocks():
                    assert sum(len(chunk) for chunk in block.chunks) == block.positions.size
                for positions, values in part.scores():
                    assert len(values) == positions.size
    except MessageError as error:
        problem = str(error)
    assert len(problem) < 1000


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"taps": (3,)}, "taps"),
        ({"codec": "zip"}, "codec 'zip'"),
        ({"runs": [(4, 2)]}, "12 bytes of 2 positions and 12 bytes a record"),
    ],
)
def test_a_block_that_does_not_fit_the_worker_is_refused(change, problem):
    outbox = outbox_of()
    request = RequestState("x", "u", plan_of(), 0, [])
    request.blocks = [rows_block((0,), [4], torch.ones(1, 1, WIDTH))]
    header = put_one(outbox, "u", [request], mapped=False)
    [one] = header.requests
    one.rows = [msgspec.structs.replace(one.rows[0], **change)]
    [part] = split([WorkerAnswer(WORKER, header, outbox.read("u", 0, 99))], 1)[0]
    with pytest.raises(MessageError, match=f"worker 0.0.0 sent malformed results: .*{problem}"):
        part.blocks()


def test_ranges_as_positions():
    assert expand([(2, 4), (9, 10)]).tolist() == [2, 3, 9]
    assert expand([]).dtype == expand([(0, 1)]).dtype == np.int64


@pytest.mark.parametrize("data", [b"", b"abc", bytes(15), bytes(17)])
def test_scores_that_are_cut_off_or_too_long_are_refused(data):
    requests = [RequestScores("u", 2, [(3, 1), (7, 1)])]
    assert [uid for uid, _ in score_blocks(WORKER, requests, bytes(16))] == ["u"]
    with pytest.raises(MessageError, match=f"worker 0.0.0 sent {len(data)} bytes .* described 16"):
        list(score_blocks(WORKER, requests, data))
