"""A request's parameters have at most one plan, in midstream's words or in another tool's."""

from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.misspelling import ASKED, misspelt
from support.others_words import ROWS, TRANSLATED

from midstream.compat.foreign_fields import FOREIGN, OWN
from midstream.errors import SpecError
from midstream.plan import Capture, Plan
from midstream.runtime.frontend.request.call_plan import (
    CallPlan,
    has_plan,
    merged_plan,
    other_args,
    plan_of,
    with_plan,
)

PLAN = Plan((Capture([1]),))


def params(**extra_args):
    return SimpleNamespace(extra_args=extra_args or None)


def asked(name):
    return {name: TRANSLATED[name]} | ({"patch_vectors": ROWS} if name == "patch" else {})


@pytest.mark.parametrize("name", TRANSLATED)
def test_a_translated_field_gives_the_plan_and_leaves_the_parameters(name):
    given_params = params(other=1, **asked(name))
    before = dict(given_params.extra_args)
    plan = plan_of(given_params)
    assert {each for each, _ in plan.coming_from} == set(asked(name))
    attached = with_plan(given_params, CallPlan(plan))
    assert attached.extra_args.keys() == {"other", "midstream"}
    assert given_params.extra_args == before
    assert plan_of(attached).plan is plan
    assert other_args(given_params) == {"other": 1}


@pytest.mark.parametrize("name", TRANSLATED)
def test_two_plans_are_rejected(name):
    both = params(midstream={"capture": {"layers": [1]}}, **asked(name))
    first = next(iter(asked(name)))
    with pytest.raises(SpecError, match="give one") as caught:
        plan_of(both)
    assert caught.value.path == f"extra_args[{first!r}]"
    with pytest.raises(SpecError, match="give it in one place") as caught:
        merged_plan(PLAN, params(**asked(name)))
    assert caught.value.path == f"sampling_params.extra_args[{first!r}]"


@pytest.mark.parametrize("name", [*FOREIGN, *OWN])
def test_a_field_that_is_not_understood_is_rejected_with_its_place(name):
    with pytest.raises(SpecError) as caught:
        plan_of(params(**{name: ASKED.get(name, 1)}))
    assert caught.value.path.startswith(f"extra_args[{name!r}]")


@given(
    st.sampled_from(["midstream", *OWN]).flatmap(lambda own: st.tuples(st.just(own), misspelt(own)))
)
def test_a_misspelt_field_is_rejected_with_its_place(pair):
    own, name = pair
    assume(name not in ("midstream", *OWN, *FOREIGN))
    with pytest.raises(SpecError) as caught:
        plan_of(params(**{name: ASKED.get(own, ASKED)}))
    assert caught.value.path == f"extra_args[{name!r}]"


def test_fields_of_others_are_left_alone():
    for extra_args in ({}, {"kv_transfer_params": {"a": 1}, "mainstream": 1}, {"midstream": None}):
        assert plan_of(params(**extra_args)) is None
        assert not has_plan(params(**extra_args))
    assert plan_of(SimpleNamespace()) is None
    assert has_plan(params(midstream=3))
    assert merged_plan(PLAN, params(other=1)) is PLAN
