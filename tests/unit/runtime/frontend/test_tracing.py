"""vLLM's spans of requests that ask for something wait for their receipts."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.results.receipt import Captured, CaptureResult, Edited, Receipt
from midstream.runtime.frontend import tracing
from midstream.runtime.frontend.tracing import DelayedSpan

RECEIPT = Receipt(
    request_id="a-0",
    prompt_tokens=5,
    generated_tokens=4,
    captured=(Captured("resid_post", 1, 8, 8), Captured("resid_post", 2, 8, 7)),
    edited=Edited(expected=8, applied=5, tokens=8, cached=3),
    dropped=1,
    kept=(("store", CaptureResult()),),
)


class Processor:
    """vLLM's, as far as spans go: what it would have sent is in `sent`."""

    def __init__(self, of: dict[str, list[DelayedSpan]]) -> None:
        self.sent: list[dict[str, Any]] = []
        tracing.delay_spans(self, of.get)

    def do_tracing(self, output: Any, state: Any, stats: Any) -> None:
        def instrument(span_name: str, start_time: int, **more: Any) -> None:
            self.sent.append({"name": span_name, "start": start_time, **more})

        def original(_: Any, output: Any, state: Any, stats: Any) -> None:
            attributes = {"id": state.request_id, "output": output, "stats": stats}
            tracing.instrument_manual(instrument, "llm_request", 5, attributes=attributes)

        tracing.do_tracing(original, self, output, state, stats)


def state(name: str, index: int = 0) -> Any:
    return SimpleNamespace(request_id=name, request_index=index)


def test_a_request_that_asks_for_nothing_has_its_span_at_once_and_as_it_was():
    processor = Processor({})
    processor.do_tracing("out", state("a"), "stats")
    told = {"id": "a", "output": "out", "stats": "stats"}
    assert processor.sent == [{"name": "llm_request", "start": 5, "attributes": told}]


def test_a_held_span_says_what_its_receipt_says_and_ends_when_it_would_have():
    spans: list[DelayedSpan] = []
    processor = Processor({"a": spans, "b": spans})
    before = time.time_ns()
    processor.do_tracing("out", state("a", 0), "stats")
    processor.do_tracing("out", state("b", 1), "stats")
    after = time.time_ns()
    assert processor.sent == []
    assert [span.completion for span in spans] == [0, 1]
    time.sleep(0.01)
    spans[0].finish(RECEIPT)
    spans[1].finish(replace(RECEIPT, edited=None, kept=(), problems=("no",)))
    first, second = processor.sent
    assert before <= first["end_time"] <= second["end_time"] <= after
    assert first["attributes"] == {
        "id": "a",
        "output": "out",
        "stats": "stats",
        "midstream.receipt.status": "partial",
        "midstream.captured.rows": 15,
        "midstream.captured.dropped": 1,
        "midstream.probes.scores": 0,
        "midstream.edits.applied": 5,
        "midstream.edits.cached": 3,
        "midstream.edits.tokens": 8,
        "midstream.sinks": ["store: ok"],
    }
    assert second["attributes"]["midstream.receipt.status"] == "error"
    assert "midstream.edits.applied" not in second["attributes"]


def test_without_a_receipt_a_held_span_says_what_vllm_says():
    spans: list[DelayedSpan] = []
    processor = Processor({"a": spans})
    processor.do_tracing("out", state("a"), "stats")
    spans[0].finish(None)
    [sent] = processor.sent
    assert set(sent["attributes"]) == {"id", "output", "stats"}
    # What was for this one is not for the next.
    other = Processor({})
    other.do_tracing("out", state("c"), "stats")
    assert "end_time" not in other.sent[0]


@pytest.mark.parametrize("attributes", [None, {"x": 1}])
def test_other_spans_are_as_they_were(attributes):
    made = []
    given = {} if attributes is None else {"attributes": attributes}
    tracing.instrument_manual(
        lambda *args, **named: made.append((args, named)), "other", 1, **given
    )
    assert made == [(("other", 1), given)]


def test_what_a_span_has_begun_makes_spans_of_its_own():
    spans: list[DelayedSpan] = []
    processor = Processor({"a": spans})
    processor.do_tracing("out", state("a"), "stats")
    (held,) = spans
    held.finish(RECEIPT)
    # A task or a timer that an exporter begins keeps the context of the span.
    held.context.run(processor.do_tracing, "out", state("plain"), "stats")
    told = {"id": "plain", "output": "out", "stats": "stats"}
    assert processor.sent[-1] == {"name": "llm_request", "start": 5, "attributes": told}
