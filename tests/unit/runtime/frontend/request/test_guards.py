"""Guards in a front end: what a request gets of them, and what it can have beside them."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.resolving_engine import WIDTH, front_end
from support.tokenizers import byte_level

from midstream import Controller, Probe, Steer, Threshold
from midstream.errors import SpecError
from midstream.plan import Plan, Stop, Switch
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.switches import everywhere, without_switches
from midstream.steering.guard_definition import probe_name

V, W = [1.0] * WIDTH, [2.0] * WIDTH
EDIT = Steer(W, layer=1)


def guard(act: Any, number: int = 1) -> Probe:
    return Probe(V, layer=1, name=probe_name("g", number), act=act, phase="generated")


SWITCH = guard(Switch([EDIT], above=1.0))
STOP = guard(Stop(above=1.0), 2)


@pytest.fixture(scope="module")
def front() -> Any:
    return front_end(byte_level())


def resolved(front: Any, plan: Plan | None, *guards: Probe) -> Any:
    request = SimpleNamespace(
        prompt_token_ids=[5] * 8,
        prompt_is_token_ids=None,
        sampling_params=SimpleNamespace(max_tokens=4, n=1),
    )
    call_plan = CallPlan(plan, guards=guards)
    return front.plans.resolve(request, call_plan, front.before(call_plan), ())


def test_a_request_without_a_plan_gets_the_probes_and_the_later_edits_of_guards(front):
    prepared = resolved(front, None, SWITCH, STOP)
    assert [probe.name for probe in prepared.plan.probes] == ["guard:g:1", "guard:g:2"]
    assert [probe.source for probe in prepared.plan.probes] == [-2, -1]
    assert [(act.name, act.version is None) for act in prepared.acts] == [
        ("guard:g:1", False), ("guard:g:2", True),
    ]  # fmt: skip
    (later,) = prepared.later.values()
    assert later.source == "probe:guard:g:1"
    assert [edit.layer for edit in later.plan.edits] == [1]
    assert [probe.name for probe in later.plan.probes] == ["guard:g:1", "guard:g:2"]


def test_a_guard_switches_the_edits_of_a_request_that_has_some_and_a_switch_of_its_own(front):
    own = Probe(V, layer=0, name="own", act=Switch([Steer(V, layer=0)], above=2.0))
    plan = Plan(edits=(Steer(V, layer=2),), probes=(own,))
    prepared = resolved(front, plan, SWITCH)
    by_source = {later.source: later.plan for later in prepared.later.values()}
    assert set(by_source) == {"probe:own", "probe:guard:g:1"}
    assert [edit.layer for edit in by_source["probe:guard:g:1"].edits] == [1]
    assert [edit.layer for edit in by_source["probe:own"].edits] == [0]


def test_a_request_with_a_controller_is_rejected_under_a_guard_that_switches(front):
    own = Probe(V, layer=1, name="p")
    law = Controller(Threshold("p", above=2.0, below=1.0))
    plan = Plan(edits=(EDIT,), probes=(own,), controller=law)
    assert resolved(front, plan, STOP).control is not None
    with pytest.raises(SpecError, match="this server's guards switch the edits") as caught:
        resolved(front, plan, SWITCH)
    assert caught.value.path == "controller"


def test_a_clients_probe_cannot_have_the_name_of_a_guards(front):
    plan = Plan(probes=(Probe(V, layer=1, name=STOP.name),))
    with pytest.raises(SpecError, match="a probe of the request is named `guard:g:2` as well"):
        resolved(front, plan, STOP)


def test_guards_that_requests_cannot_have_together_are_rejected_when_they_are_put(front):
    many = tuple(guard(Stop(above=1.0), number) for number in range(3))
    front._check_guards(many)
    with pytest.raises(SpecError, match="as well"):
        front._check_guards((many[0], many[0]))
    with pytest.raises(SpecError, match="there is no layer|out of range"):
        front._check_guards((Probe(V, layer=99, name="guard:g:1"),))


def test_what_is_checked_when_a_guard_is_put_depends_on_no_prompt():
    placed = Probe(V, layer=1, name="g", positions=[40], act=Switch([EDIT], above=1.0))
    (checked,) = everywhere((EDIT, placed))
    assert checked == Probe(V, layer=1, name="g")
    assert without_switches((EDIT, STOP)) == (EDIT, STOP)
