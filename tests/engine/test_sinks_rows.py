"""Rows in sinks that want them as they come: put together they are those of the request's end."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import preempting
from support.engine_view import inspect
from support.engines import ALL_SITES, engine, greedy, reading_stopped, stopped_at, tokens
from support.sinking import AsTheyCome

from midstream import Capture
from midstream.errors import ReceiptError
from midstream.runtime.frontend.results import row_streamer
from midstream.runtime.protocol.results import partial_name
from midstream.runtime.protocol.rpc import CollectPartialRows, CollectResults
from midstream.sinks import registry as finding

PROMPTS = [tokens(list(range(3 + n, 8 + 3 * n))) for n in range(12)]
PARAMS = greedy(5, detokenize=False)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[Any]:
    offered = {"keeping": "Keeping", "rows": "AsTheyCome"}
    entries = [
        EntryPoint(name, f"support.sinking:{cls}", finding.GROUP) for name, cls in offered.items()
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "entry_points", lambda group: entries)
        with engine(
            tiny_llama,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            midstream={"sites": ALL_SITES, "sinks": list(offered)},
        ) as found:
            yield found


def run(llm: Any, prompts: Any, capture: Any, params: Any = PARAMS) -> list[Any]:
    outputs: list[Any] = llm.generate(prompts, params, capture=capture, use_tqdm=False)
    return outputs


@pytest.fixture
def rows(llm: Any, monkeypatch: pytest.MonkeyPatch) -> AsTheyCome:
    """The sink that wants them so, which gets them after every step."""
    monkeypatch.setattr(row_streamer, "CHECK_SECONDS", 0.0)
    found = inspect(llm).sink("rows")
    assert isinstance(found, AsTheyCome)
    found.given.clear()
    return found


def assert_whole(sink: AsTheyCome, output: Any, completion: int = 0) -> list[Any]:
    """What came in pieces of a completion is, bit by bit, what the output has; the pieces."""
    found, pieces = sink.whole(output.request_id, completion)
    expected = output.outputs[completion].activations
    assert list(found) == list(expected)
    for tap, (encoded, positions, ids) in found.items():
        assert torch.equal(encoded, expected.encoded(*tap)), tap
        assert torch.equal(positions, expected.positions_of(*tap))
        assert torch.equal(ids, expected.token_ids_of(*tap))
    last = pieces[-1]
    assert last.receipt.captured == output.outputs[completion].receipt.captured
    assert last.generated_token_ids == tuple(output.outputs[completion].token_ids)
    return pieces


def both(positions: Any = "all", codec: str = "raw") -> list[Capture]:
    return [
        Capture("all", ALL_SITES, positions, codec=codec, sink=sink) for sink in ("memory", "rows")
    ]


@pytest.mark.parametrize(
    ("codec", "positions"),
    [
        ("raw", "all"),
        ("full8", ["last_prompt", "last_row"]),
        ("rp8:k=16", "generated"),
        ("topk8:k=8", "all"),
    ],
)
def test_pieces_put_together_are_the_rows_in_memory_bit_by_bit(llm, rows, codec, positions):
    long = [tokens([5 + n] * (60 + 40 * n)) for n in range(3)]  # their prompts come in chunks
    outputs = run(llm, [*PROMPTS, *long], [both(positions, codec)] * 15)
    for output in outputs:
        pieces = assert_whole(rows, output)
        assert output.receipt.status == "ok"
        assert output.capture_results["rows"].status == "ok"
        assert len(pieces) > 1 or positions != "all"
        for piece in pieces[:-1]:
            assert piece.finish_reason is None
            assert piece.receipt.status == "ok"
            assert len(piece.activations.positions)
    # What the sink was given is what an engine gives that hands nothing over before the end.
    plain = run(llm, [*PROMPTS, *long], Capture("all", ALL_SITES, positions, codec=codec))
    for output, expected in zip(outputs, plain, strict=True):
        for tap, values in expected.activations.items():
            torch.testing.assert_close(output.activations[tap], values, rtol=1e-4, atol=1e-4)
    if positions == "all":
        assert any(not one.generated_token_ids for one in rows.given), "no prompt came in chunks"
    del outputs, output, pieces, plain, expected, values
    rows.given.clear()
    assert inspect(llm).arena_used()["leases"] == 0
    assert not inspect(llm).streaming()


def test_rows_that_go_nowhere_else_come_once_though_running_requests_are_reset(llm, rows):
    params = greedy(20, detokenize=False)
    asked = [both()] * 4 + [Capture("all", sink="rows")] * 4
    with preempting(llm, 6, 11, 17):
        outputs = run(llm, PROMPTS[:8], asked, params)
    plain = run(llm, PROMPTS[4:8], Capture("all"), params)
    for output in outputs[:4]:
        assert len(assert_whole(rows, output)) > 5
    for output, expected in zip(outputs[4:], plain, strict=True):
        assert not hasattr(output, "activations")
        assert output.receipt.status == "ok"
        found, pieces = rows.whole(output.request_id)
        assert len(pieces) > 5
        assert pieces[-1].receipt.captured == expected.receipt.captured
        for tap, (encoded, positions, ids) in found.items():
            assert positions.tolist() == expected.activations.positions.tolist()
            assert ids.tolist() == expected.activations.token_ids.tolist()
            values = encoded.contiguous().view(torch.float32)
            torch.testing.assert_close(values, expected.activations[tap], rtol=1e-4, atol=1e-4)


def test_each_of_several_completions_comes_in_its_own_pieces(llm, rows):
    from vllm import SamplingParams

    params = SamplingParams(n=3, temperature=1.0, max_tokens=9, ignore_eos=True, seed=1)
    params.detokenize = False
    (output,) = run(llm, [PROMPTS[2]], [both()], params)
    for nth in range(3):
        pieces = assert_whole(rows, output, nth)
        assert len(pieces) > 2
        assert all(piece.completions == 3 for piece in pieces)


def test_a_piece_that_a_sink_cannot_write_is_an_error_of_its_request(llm, rows, monkeypatch):
    write = rows.write

    def broken(delivery: Any) -> Any:
        if delivery.request_id == wrong and delivery.piece == 1:
            raise OSError("no room")
        return write(delivery)

    monkeypatch.setattr(rows, "write", broken)
    wrong = str(llm.request_counter.counter)
    with pytest.raises(ReceiptError, match="sink rows: OSError: no room") as caught:
        run(llm, PROMPTS[:2], [both()] * 2)
    first, second = caught.value.outputs
    assert first.capture_results["rows"].status == "error"
    assert first.receipt.problems == ("sink rows: OSError: no room",)
    assert second.receipt.status == "ok"
    assert_whole(rows, second)


def test_a_call_that_is_given_up_ends_for_the_sink_that_had_some_of_it(llm, rows):
    with stopped_at(llm, 9), pytest.raises(KeyboardInterrupt):
        run(llm, PROMPTS, Capture(1, sink="rows"), greedy(8, detokenize=False))
    run(llm, PROMPTS[:1], Capture(1, sink="rows"))
    ended = {one.request_id: one for one in rows.given if one.is_last}
    assert {one.request_id for one in rows.given} == set(ended), "a request has no end"
    given_up = [one for one in ended.values() if one.finish_reason == "abort"]
    assert len(given_up) >= 8
    for one in given_up:
        rows.whole(one.request_id)
        assert one.receipt.status == "error"
        assert len(one.activations.positions) == 0
    assert not inspect(llm).streaming()
    inspect(llm).check_integrity()


def test_a_call_that_is_given_up_while_rows_are_read_leaves_none_on_the_worker(llm, rows):
    with reading_stopped(llm) as read, pytest.raises(KeyboardInterrupt):
        run(llm, PROMPTS[:4], Capture("all", ALL_SITES, sink="rows"))
    assert read == [partial_name(read[0].split()[0])]
    assert not inspect(llm).leftovers()


def test_without_such_a_sink_a_step_asks_the_workers_nothing(llm, rows, monkeypatch):
    calls: list[type] = []
    front = llm._front_end
    call, start = front._call, front._start
    monkeypatch.setattr(front, "_call", lambda one: (calls.append(type(one)), call(one))[1])
    monkeypatch.setattr(front, "_start", lambda one: (calls.append(type(one)), start(one))[1])
    run(llm, PROMPTS, Capture("all", sink="keeping"))
    assert set(calls) == {CollectResults}
    run(llm, PROMPTS, Capture("all", sink="rows"))
    assert CollectPartialRows in calls
