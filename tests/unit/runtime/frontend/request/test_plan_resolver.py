"""A plan that was resolved is resolved again for whatever makes a difference, and only for that."""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.stored import worker_info

from midstream.config.config import Config
from midstream.errors import SpecError
from midstream.plan import (
    Attention,
    Bias,
    Capture,
    Entropy,
    Gate,
    Norms,
    Plan,
    Probe,
    Prompt,
    Replace,
    Steer,
    Stop,
    Switch,
)
from midstream.plan.plan import read_prompts
from midstream.plan.probe_files.info import ProbeInfo
from midstream.plan.vectors.vector import Vector
from midstream.runtime.frontend.engine_info import EngineInfo, describe
from midstream.runtime.frontend.request import plan_resolver
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.plan_resolver import PlanResolver
from midstream.runtime.protocol.segments import Room

HIDDEN = 4


def info(layers: int = 3, sites: Sequence[str] = ("resid_post",), heads: int = 0) -> EngineInfo:
    inner = [site for site in sites if site != "logits"]
    taps = tuple((site, layer) for layer in range(layers) for site in inner)
    taps += (("logits", layers - 1),) * ("logits" in sites)
    room = Room(100, 100, 100, 100, 4)
    of_heads = tuple(0 if site in ("resid_post", "logits") else heads for site, _ in taps)
    worker = worker_info(
        num_layers=layers, taps=taps, heads=of_heads, capture_limit=100, step_tokens=100,
        room=room, edits_per_site=8, arena_bytes=1 << 20,
    )  # fmt: skip
    return describe([[worker]])


@pytest.fixture
def resolver(monkeypatch) -> Any:
    """A resolver, whose attribute `made` counts how often a plan was resolved."""
    made = []
    resolve = plan_resolver.resolve
    monkeypatch.setattr(
        plan_resolver, "resolve", lambda *given: (made.append(given), resolve(*given))[1]
    )
    model = SimpleNamespace(max_model_len=64, model="org/Small")
    config = SimpleNamespace(model_config=model, additional_config={})
    found = PlanResolver(info(), SimpleNamespace(vllm_config=config), lookup)
    return SimpleNamespace(resolver=found, made=made)


def prepare(resolver: Any, plan: Plan | None, ids=(1, 2, 3), tokens=4, before=(), also=()) -> Any:
    request = SimpleNamespace(
        prompt_token_ids=list(ids),
        prompt_is_token_ids=None,
        sampling_params=SimpleNamespace(max_tokens=tokens),
    )
    return resolver.resolver.resolve(CallPlan(plan), before, also, request)


@pytest.fixture
def of_heads(resolver) -> Any:
    """A resolver for `z` of 2 heads."""
    known = info(sites=["z"], heads=2)
    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64), additional_config={})
    resolver.resolver = PlanResolver(known, SimpleNamespace(vllm_config=config), lookup)
    return resolver


def test_with_a_largest_dose_an_edit_of_what_ranks_split_is_refused(of_heads, monkeypatch):
    resolver = of_heads.resolver
    prepare(of_heads, Plan.make(edits=Steer([1.0] * HIDDEN, 1, site="z")))
    monkeypatch.setattr(resolver, "_parts", {("z", 1): 2})
    monkeypatch.setattr(resolver, "_config", Config(doses=64, max_dose=1e6))
    split = Plan.make(edits=Steer([2.0] * HIDDEN, 1, site="z"))
    with pytest.raises(SpecError, match=r"edits\[0\].*z is split over 2 ranks.*max_dose"):
        prepare(of_heads, split)
    prepare(of_heads, Plan.make(edits=Steer([2.0] * HIDDEN, 2, site="z")))


REGISTERED: dict[str, Any] = {"v": {None: Vector.parse([1.0] * HIDDEN)}}


def lookup(name: str) -> Any:
    if name not in REGISTERED:
        raise SpecError("", f"no vectors are registered as {name}")
    return REGISTERED[name]


def test_the_same_plan_is_prepared_once(resolver):
    plan = Plan.make(capture=Capture([1], positions="last_prompt"))
    assert prepare(resolver, plan) is prepare(resolver, plan, ids=(7, 8, 9))
    assert len(resolver.made) == 1


def test_plans_of_the_same_objects_are_prepared_once_and_others_are_told_apart(resolver):
    probe, other = Probe([1.0] * 4, 1, name="p"), Probe([2.0] * 4, 1, name="q")
    plan = Plan(probes=(probe, other))
    known = [(replace(plan), prepare(resolver, plan))]
    for plan in (Plan(probes=(other, probe)), Plan(probes=(probe,)), Plan()):
        prepared = prepare(resolver, plan)
        assert all(prepared is not earlier for _, earlier in known)
        known.append((replace(plan), prepared))
    for plan, prepared in known:
        assert resolver.resolver.known(plan, (), (), 3, 4) is prepared
        named = replace(plan, coming_from=(("edits[0]", "name"),))
        assert resolver.resolver.known(named, (), (), 3, 4) is None


def test_a_prompt_of_another_length_has_positions_of_its_own(resolver):
    plan = Plan.make(capture=Capture([1], positions="last_prompt"))
    for length in (3, 5, 3):
        found = prepare(resolver, plan, ids=range(length))
        assert found.plan.prompt_len == length
        assert found.plan.captures[0].where.ranges == ((length - 1, length),)
    assert len(resolver.made) == 2


def test_a_probe_that_says_that_it_is_of_another_model_is_refused_by_its_first_request(resolver):
    bare = Probe([1.0] * HIDDEN, layer=1)
    prepared = prepare(resolver, Plan.make(probes=[bare]))
    for model in ("org/Small", "me/small"):
        plan = Plan.make(probes=[bare.with_info(ProbeInfo(model, HIDDEN, 3))])
        assert prepare(resolver, plan) == prepared
    assert len(resolver.made) == 1
    for known in (ProbeInfo("org/Large"), ProbeInfo("org/Small", 2), ProbeInfo("org/Small", 4, 9)):
        other = [bare, bare.replace(name="other").with_info(known)]
        for _ in range(2):
            with pytest.raises(SpecError, match=r"probes\[1\]: .*fitted on org/.* runs org/Small"):
                prepare(resolver, Plan.make(probes=other))


def test_steering_and_captures_of_every_request_and_max_tokens_make_a_difference(resolver):
    plan = Plan.make(capture=Capture([1]))
    steering = (Steer([1.0] * HIDDEN, 0),)
    assert prepare(resolver, plan).plan.edits == ()
    assert len(prepare(resolver, plan, before=steering).plan.edits) == 1
    assert prepare(resolver, plan).plan.edits == ()
    assert len(prepare(resolver, plan, also=(Capture([2]),)).plan.captures) == 2
    rows = {prepare(resolver, plan, tokens=number).need.rows for number in (1, 2)}
    assert len(rows) == 2


def test_a_plan_at_token_ids_is_resolved_for_each_prompt(resolver):
    from midstream.plan.positions.items import TokenIds

    plan = Plan.make(capture=Capture([1], positions=TokenIds([7])))
    found = [prepare(resolver, plan, ids=ids).plan.captures[0].where for ids in ((7, 1), (1, 7))]
    assert [where.final(2, ids) for where, ids in zip(found, ((7, 1), (1, 7)), strict=True)] == [
        ((0, 1),),
        ((1, 2),),
    ]


def test_a_name_that_stands_for_another_vector_is_bound_anew(resolver, monkeypatch):
    plan = Plan.make(edits=Steer("v", 1), probes=Probe("v", 2))
    first = prepare(resolver, plan)
    assert prepare(resolver, plan) is first
    with monkeypatch.context() as other:
        other.setitem(REGISTERED, "v", {None: Vector.parse([2.0] * HIDDEN)})
        assert prepare(resolver, plan).packed != first.packed
    with monkeypatch.context() as none:
        none.delitem(REGISTERED, "v")
        with pytest.raises(SpecError, match="no vectors are registered as v") as caught:
            prepare(resolver, plan)
        assert caught.value.path == "edits[0]"


def test_a_plan_that_is_gone_does_not_lend_its_id_to_another(resolver):
    for layer in range(3):
        # Each is freed but for the resolver, which keeps what it has prepared.
        found = prepare(resolver, Plan.make(capture=Capture([layer])))
        assert found.plan.taps == (("resid_post", layer),)


def test_bytes_that_are_returned_are_counted_for_the_captures_that_return_them(resolver):

    places = [Capture([1], sink="store"), Capture([2])]
    both, one = Plan.make(capture=[Capture([1]), Capture([2])]), Plan.make(capture=places)
    prepared, shape = prepare(resolver, both), info().shape
    for _ in range(2):
        assert prepared.returned_bytes(both, shape) == 2 * 3 * HIDDEN * 4
        assert prepared.returned_bytes(one, shape) == 3 * HIDDEN * 4


def test_captures_of_heads_send_what_captures_of_whole_vectors_send(of_heads):
    whole = prepare(of_heads, Plan((Capture(0, "z"),)))
    assert prepare(of_heads, Plan((Capture(0, "z", heads=1),))) == whole


@pytest.mark.parametrize("codec", ["rp8:k=2,seed=0", None])
def test_heads_of_sketches_are_refused(of_heads, codec):
    if codec is None:  # the engine's setting
        known = of_heads.resolver._info
        of_heads.resolver._info = replace(known, codec="rp8:k=2,seed=0")
    plan = Plan((Capture(1, "z", codec=codec), Capture(0, "z", codec=codec, heads=1)))
    with pytest.raises(SpecError, match="are sketches of whole vectors") as caught:
        prepare(of_heads, plan)
    assert caught.value.path == "capture[1].heads"


@functools.cache
def with_queries() -> PlanResolver:
    """A resolver for an engine of which attention can be read."""
    model = SimpleNamespace(max_model_len=64, model="org/Small", get_vocab_size=lambda: 9)
    config = SimpleNamespace(
        model_config=model, additional_config={}, speculative_config=None,
        parallel_config=SimpleNamespace(),
    )  # fmt: skip
    known = info(sites=["rot_q", "resid_post", "logits"], heads=2)
    return PlanResolver(known, SimpleNamespace(vllm_config=config), lookup)


SWITCH = Switch([Steer([1.0] * HIDDEN, 1)], above=1.0)


def edits_and_probes() -> Any:
    """A strategy of plans, most of whose parts are of every token."""
    where = st.sampled_from(["all"] * 12 + ["prompt", "generated"])
    layer = st.integers(0, 1)
    vector = st.sampled_from([[1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 0.0, 3.0]])
    steer = st.builds(Steer, vector, layer, positions=where)
    gate = st.builds(
        lambda edit, read: Gate(edit, probe=Probe(read, 0), threshold=0.5), steer, vector
    )
    rows = st.builds(lambda count: Replace([[1.0] * HIDDEN] * count, 1), st.integers(1, 6))
    act = st.sampled_from(
        [None, None, Stop(above=1.0), Switch([Steer([1.0] * HIDDEN, 1)], above=1)]
    )
    probe = st.builds(lambda read, at, act: Probe(read, at, name="p", act=act), vector, layer, act)
    attends = st.just(Probe(attention=Entropy(), layer=0, name="entropy"))
    bias = st.builds(Bias, st.just({1: 2.0}), positions=where)
    capture = st.sampled_from([None, None, Capture([1]), Attention([0], reduce="full"), Norms([1])])
    return st.builds(
        lambda edits, probes, capture: Plan.make(
            edits=edits or None, probes=probes or None, capture=capture
        ),
        st.lists(st.one_of(steer, steer, gate, rows, bias), max_size=3, unique_by=repr),
        st.lists(st.one_of(probe, probe, attends), max_size=1),
        capture,
    )


def guard_of(act: Any) -> Probe:
    return Probe([2.0] * HIDDEN, 1, name="guard", act=act)


def switching(positions: Any) -> Probe:
    """A guard that switches to an edit at some positions."""
    return guard_of(Switch([Steer([1.0] * HIDDEN, 1, positions=positions)], above=2.0))


GUARD = guard_of(Stop(above=2.0))
SWITCHING = [switching(positions) for positions in (-2, "prompt", "all")]


@example(Plan.make(edits=Steer([1.0] * HIDDEN, 1), probes=Probe([1.0] * HIDDEN, 0)), 5, 4, ())
@example(Plan.make(probes=Probe([1.0] * HIDDEN, 0, act=SWITCH)), 5, 4, ())
@example(Plan.make(capture=Capture([1])), 5, 4, ())
@example(Plan.make(capture=Attention([0], reduce="full")), 5, 4, ())
@example(Plan.make(edits=Bias({1: 2.0}, positions="all")), 5, 4, ())
@example(
    Plan.make(edits=[Bias({1: 2.0}, positions="all"), Replace([[1.0] * HIDDEN] * 2, 1)]), 2, 4, ()
)
@example(Plan.make(probes=Probe(attention=Entropy(), layer=0)), 5, 4, ())
@example(None, 5, 4, (SWITCHING[0],))
@example(None, 5, 4, (SWITCHING[1],))
@given(
    plan=edits_and_probes(),
    length=st.integers(1, 9),
    tokens=st.integers(1, 9) | st.none(),
    before=st.sampled_from([(), (GUARD,), *((guard,) for guard in SWITCHING)]),
)
def test_parts_of_every_token_are_prepared_for_a_length_as_if_for_it_alone(
    plan, length, tokens, before
):
    resolver = SimpleNamespace(resolver=with_queries())
    with suppress(SpecError):  # those of another length come first
        prepare(resolver, plan, range(length + 3), tokens, before)

    def outcome(make: Callable[[], Any]) -> Any:
        try:
            return make()
        except SpecError as error:
            return str(error)

    alone = outcome(lambda: resolver.resolver._finish(plan, before, (), Prompt(length), tokens))
    assert outcome(lambda: prepare(resolver, plan, range(length), tokens, before)) == alone


def test_a_guard_that_switches_to_edits_at_token_ids_reads_the_prompt():
    assert read_prompts((switching({"tokens": [5]}),), ())
    assert not read_prompts((GUARD, *SWITCHING), ())


def test_what_has_no_name_is_kept_for_nobody(resolver):
    for size in range(3):
        with pytest.raises(SpecError):
            prepare(resolver, Plan.make(edits=Steer([1.0] * (size + 1), 1)))
    prepare(resolver, Plan.make(edits=Steer([1.0] * HIDDEN, 1)))
    assert len(resolver.resolver._plans._bound) == 0
    prepare(resolver, Plan.make(edits=Steer("v", 1)))
    assert len(resolver.resolver._plans._bound) == 1


def test_probes_of_every_token_are_prepared_once_for_prompts_of_all_lengths(resolver):
    plan = Plan.make(probes=Probe([1.0] * HIDDEN, 1, name="p"))
    guard = Probe([2.0] * HIDDEN, 1, name="guard")
    found = [
        prepare(resolver, plan, range(length), length, before=(guard,)) for length in (3, 5, 7)
    ]
    assert len(resolver.made) == 1
    assert [prepared.plan.prompt_len for prepared in found] == [3, 5, 7]
    prepare(resolver, Plan.make(probes=Probe([1.0] * HIDDEN, 1, name="p", positions="prompt")))
    prepare(resolver, plan, also=(Capture([1]),))
    assert len(resolver.made) == 3
