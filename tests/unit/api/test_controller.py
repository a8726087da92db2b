"""Controllers: what they are given, what becomes of their answers, and of their failures."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch

from midstream import Capture, Controller, Probe, Threshold
from midstream.api.controller import ControlledRequest, check_controlled
from midstream.errors import BusyError, ControllerError, SpecError
from midstream.plan import Plan, Switch
from midstream.plan.control.control_laws import Observed

CALL_PLAN = object()


class Changes:
    """What a controller changes."""

    def __init__(self, raises=None):
        self.found = []
        self.raises = raises

    async def update_later(self, call_plan, edits, scale, source):
        assert call_plan is CALL_PLAN
        if self.raises is not None:
            raise self.raises
        self.found.append((edits, scale, source))

    async def stop_later(self, call_plan, reason):
        assert call_plan is CALL_PLAN
        self.found.append(reason)


def output_of(scores, finished=False, rows=None):
    completion = SimpleNamespace(probes={"p": torch.tensor(scores)}, activations=rows)
    return SimpleNamespace(finished=finished, outputs=[completion])


def run(decide, outputs, changes=None, **given):
    """Show outputs to a controller, each once it is done with the one before."""
    changes = changes or Changes()

    async def shown():
        found = ControlledRequest(Controller(decide, **given), changes, CALL_PLAN, "r")
        try:
            for nth, output in enumerate(outputs):
                found.observe(output, nth + 1)
                if found._task is not None:
                    await found._task
        finally:
            found.close()

    asyncio.run(shown())
    return changes.found


def test_it_gets_each_score_once_and_its_answers_become_updates():
    seen = []

    def decide(observed):
        seen.append((observed.request_id, observed.tokens, observed.scores["p"].tolist()))
        return [0.5, 0.5, None, {"edits": [], "scale": 1.0}, {"scale": 1.0}][len(seen) - 1]

    outputs = [output_of(list(map(float, range(n)))) for n in (3, 4, 6, 6, 7, 8)]
    found = run(decide, [*outputs, output_of([0.0] * 9, finished=True)], name="mine")
    assert seen == [
        ("r", 1, [0.0, 1.0, 2.0]), ("r", 2, [3.0]), ("r", 3, [4.0, 5.0]), ("r", 5, [6.0]),
        ("r", 6, [7.0]),
    ]  # fmt: skip
    # The same scale as before is no change.
    assert found == [(None, 0.5, "controller:mine"), ([], 1.0, "controller:mine")]


def test_it_gets_the_rows_so_far_of_captures_that_stream():
    rows = []
    outputs = [output_of([0.0], rows="one row"), output_of([0.0, 1.0], rows="two rows")]
    run(lambda observed: rows.append(observed.rows), outputs)
    assert rows == ["one row", "two rows"]


def fails(observed):
    raise KeyError("it")


def hangs(observed):
    threading.Event().wait(30)


def test_a_failure_is_what_the_policy_says_and_it_is_not_called_again(caplog):
    outputs = [output_of([0.0] * n) for n in (1, 2, 3)]
    for decide, problem in (
        (fails, "KeyError"),
        (hangs, "took too long"),
        (lambda _: "much", "expected a number"),
        (lambda _: float("nan"), "finite"),
        (lambda _: {"stop": False}, "expected a scale"),
        (lambda _: {"stop": True, "scale": 1}, "expected a scale"),
        (lambda _: {"scales": 1}, "expected a scale"),
    ):
        calls = []

        def counted(observed, calls=calls, decide=decide):
            calls.append(observed)
            return decide(observed)

        caplog.clear()
        assert run(counted, outputs, seconds=0.05) == []
        assert problem in caplog.text
        found = run(counted, outputs, on_error="off", seconds=0.05)
        assert found == [(None, 0.0, "controller:local")], problem
        with pytest.raises(ControllerError, match=problem):
            run(counted, outputs, on_error="end", seconds=0.05)
        assert len(calls) == 3, problem


def test_after_an_answer_that_stops_the_request_it_is_not_called_again():
    answers = [0.5, {"stop": True}, 0.25]
    outputs = [output_of([0.0] * n) for n in (1, 2, 3)]
    found = run(lambda _: answers.pop(0), outputs, name="guard")
    assert found == [(None, 0.5, "controller:guard"), "controller:guard"]
    assert answers == [0.25]


def test_while_it_computes_the_outputs_go_on_and_scores_gather():
    go, seen, changes = threading.Event(), [], Changes()

    def slow(observed):
        seen.append(observed.scores["p"].tolist())
        go.wait(5)
        return 0.0

    async def shown():
        found = ControlledRequest(Controller(slow, seconds=5), changes, CALL_PLAN, "r")
        for n in (1, 2, 3):
            found.observe(output_of([float(at) for at in range(n)]), n)
            await asyncio.sleep(0.02)
        go.set()
        await found._task
        found.observe(output_of([0.0, 1.0, 2.0, 3.0]), 4)
        await found._task
        found.close()

    asyncio.run(shown())
    assert seen == [[0.0], [1.0, 2.0, 3.0]]
    assert changes.found == [(None, 0.0, "controller:local")]


def test_a_request_that_ends_meanwhile_and_tables_that_are_full_are_no_failures():
    outputs = [output_of([0.0]), output_of([0.0, 0.0])]
    for error in (SpecError("request_id", "it has ended"), BusyError("no room", 1)):
        assert run(lambda _: 0.5, outputs, Changes(error), on_error="end") == []
    with pytest.raises(ControllerError, match="no strength"):
        run(lambda _: 0.5, outputs, Changes(SpecError("scale", "no strength")), on_error="end")


def test_each_request_has_a_state_of_its_own():
    """Between the thresholds the answer depends on what came before in the same request."""
    law = Threshold("p", above=1.0, below=-1.0)
    outputs = [output_of([0.0]), output_of([0.0, 2.0]), output_of([0.0, 2.0, 0.0])]
    for _ in range(2):
        assert [scale for _, scale, _ in run(law, outputs)] == [0.0, 1.0]
    assert not law._is_on


def test_a_threshold_is_on_above_one_score_until_another():
    law = Threshold("p", above=1.0, below=-1.0, on=2.0, off=0.5)
    calls = ([0.0], [1.5], [0.0, -0.5], [-1.0], [1.0], [3.0, -3.0])
    answers = [law(Observed("r", 1, {"p": torch.tensor(scores)})) for scores in calls]
    assert answers == [0.5, 2.0, 2.0, 0.5, 0.5, 0.5]


def test_what_is_malformed_says_so():
    for make, path in (
        (lambda: Controller(3), "decide"),
        (lambda: Controller(fails, seconds=0), "seconds"),
        (lambda: Controller(fails, on_error="stop"), "on_error"),
        (lambda: Threshold("p", 1.0, 2.0), "below"),
    ):
        with pytest.raises(SpecError) as caught:
            make()
        assert caught.value.path == path
    kind = SimpleNamespace(name="DELTA")
    params = SimpleNamespace(n=1, output_kind=kind, stop=["controller:a"])
    plan, controller = Plan.make(probes=Probe([1.0], 0)), Controller(fails, name="b")
    check_controlled(plan, params, controller)
    with pytest.raises(SpecError, match="is the stop reason of the controller"):
        check_controlled(plan, params, Controller(fails, name="a"))
    streaming = Plan.make(Capture(1, stream=True), probes=Probe([1.0], 0))
    switching = Plan.make(probes=Probe([1.0], 0, act=Switch([], above=1)))
    for one, n, name in (
        (None, 1, "DELTA"), (plan, 2, "DELTA"), (plan, 1, "FINAL_ONLY"), (switching, 1, "DELTA"),
        (streaming, 1, "DELTA"),
    ):  # fmt: skip
        kind.name, params.n = name, n
        with pytest.raises(SpecError) as caught:
            check_controlled(one, params, controller)
        assert caught.value.path == "controller"
