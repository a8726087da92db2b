"""vLLM's spans of requests that ask for something wait for their receipts."""

import contextvars
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.plan import Capture, Flag, ModelShape, Norms, Plan, Probe, Scale, Steer
from midstream.plan.positions.prompt import Prompt
from midstream.plan.resolve.resolve import resolve
from midstream.results.receipt import Action, Captured, CaptureResult, Edited, Receipt
from midstream.runtime.frontend import tracing
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.tracing import DelayedSpan

SHAPE = ModelShape(4, 8, {(site, n) for site in ("resid_post", "rot_q") for n in range(4)})
PLAN = Plan.make(
    capture=[Capture([1, 2]), Norms([3])],
    edits=[Steer([1.0] * 8, [0, 1]), Scale(2.0, 3)],
    probes=Probe([1.0] * 8, layer=2, name="mood"),
)
ADMITTED = AdmittedRequest("u", resolve(PLAN, SHAPE, Prompt(5), 5), PLAN)
ASKED = {
    "midstream.asked.captures": 2,
    "midstream.asked.edits": 2,
    "midstream.asked.probes": 1,
    "midstream.asked.sites": ["norms", "resid_post"],
    "midstream.asked.layers": 4,
}
FIRED = Action("mood", "flag", 6, 1.5)
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
    spans[0].finish(ADMITTED, RECEIPT, SHAPE)
    told = replace(RECEIPT, edited=None, kept=(), problems=("no",), actions=(FIRED,))
    spans[1].finish(replace(ADMITTED, own=None), told, SHAPE)
    first, second = processor.sent
    assert before <= first["end_time"] <= second["end_time"] <= after
    assert first["attributes"] == {
        "id": "a",
        "output": "out",
        "stats": "stats",
        "midstream.receipt.status": "partial",
        **ASKED,
        "midstream.captured.rows": 15,
        "midstream.captured.bytes": 15 * 8 * 4,
        "midstream.captured.dropped": 1,
        "midstream.probes.scores": 0,
        "midstream.edits.applied": 5,
        "midstream.edits.cached": 3,
        "midstream.edits.tokens": 8,
        "midstream.sinks": ["store: ok"],
    }
    assert second["attributes"]["midstream.receipt.status"] == "error"
    assert "midstream.edits.applied" not in second["attributes"]
    assert second["attributes"]["midstream.probes.fired"] == ["mood: flag at 6"]
    nothing = dict.fromkeys(("captures", "edits", "probes"), 0)
    assert {name: second["attributes"][f"midstream.asked.{name}"] for name in nothing} == nothing
    assert second["attributes"]["midstream.asked.layers"] == 4


def test_a_request_that_ends_without_a_receipt_says_what_it_asked():
    spans: list[DelayedSpan] = []
    processor = Processor({"a": spans})
    processor.do_tracing("out", state("a"), "stats")
    spans[0].finish(ADMITTED, None, SHAPE)
    [sent] = processor.sent
    told = {name: value for name, value in sent["attributes"].items() if "midstream" in name}
    assert told == ASKED


def test_a_span_has_the_versions_of_the_guards_of_its_request_and_which_acted():
    guards = tuple(
        Probe([1.0] * 8, layer=2, name=f"guard:{name}", act=Flag(above=1.0))
        for name in ("calm:1", "toxic:3")
    )
    own = replace(PLAN, probes=(Probe([1.0] * 8, layer=2, name="guard:mine"),))
    plan = resolve(own, SHAPE, Prompt(5), 5, guards)
    admitted = AdmittedRequest("u", plan, own)
    assert tracing.asked_of(admitted)["midstream.guards"] == ["calm:1", "toxic:3"]
    receipt = replace(RECEIPT, actions=(FIRED, Action("guard:toxic:3", "flag", 7, 2.5)))
    fired = tracing.attributes_of(receipt, plan, SHAPE)["midstream.guards.fired"]
    assert fired == ["toxic:3: 2.5 at 7"]
    assert "midstream.guards" not in tracing.asked_of(ADMITTED)
    assert "midstream.guards.fired" not in tracing.attributes_of(RECEIPT, plan, SHAPE)


def test_opentelemetry_takes_every_attribute(monkeypatch):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from vllm.tracing.otel import manual_instrument_otel

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)

    def make() -> None:
        tracing.instrument_manual(
            manual_instrument_otel, "llm_request", start_time=5, attributes={"gen_ai.x": 1}
        )

    end = time.time_ns()
    receipt = replace(RECEIPT, actions=(FIRED,))
    DelayedSpan(0, make, end, contextvars.copy_context()).finish(ADMITTED, receipt, SHAPE)
    [span] = exporter.get_finished_spans()
    assert (span.name, span.start_time, span.end_time) == ("llm_request", 5, end)
    expected = {
        "gen_ai.x": 1,
        **tracing.asked_of(ADMITTED),
        **tracing.attributes_of(receipt, ADMITTED.plan, SHAPE),
    }
    seen = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in span.attributes.items()
    }
    assert seen == expected
    assert seen["midstream.asked.sites"] == ["norms", "resid_post"]


def test_without_a_receipt_a_held_span_says_what_vllm_says():
    spans: list[DelayedSpan] = []
    processor = Processor({"a": spans})
    processor.do_tracing("out", state("a"), "stats")
    spans[0].finish(None, None, SHAPE)
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
    held.finish(ADMITTED, RECEIPT, SHAPE)
    # A task or a timer that an exporter begins keeps the context of the span.
    held.context.run(processor.do_tracing, "out", state("plain"), "stats")
    told = {"id": "plain", "output": "out", "stats": "stats"}
    assert processor.sent[-1] == {"name": "llm_request", "start": 5, "attributes": told}
