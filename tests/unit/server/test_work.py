"""The work for each list that a client can send grows at most as the list does."""

import itertools
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from support.long_lists import (
    BODIES,
    BODY,
    CAPTURES,
    FORMS,
    KNOWN,
    READ,
    SINGLE,
    SINGLE_OF_BODIES,
    edits,
    field_of,
    fields,
    list_of,
    sets,
    steps,
    texts,
    whole,
)
from support.nightly import rounds
from support.resolving_engine import TEMPLATE, ResolvingEngine, front_end
from support.serving_fake import make, serving
from support.tokenizers import byte_level
from unit.server.long_bodies import (
    ELSEWHERE,
    INNER,
    OTHERS,
    PLAIN_OTHERS,
    REST,
    ROUTES,
    VLLM,
    declared,
    others_body,
    others_fields,
    run_route,
    run_vllm,
)

from midstream.errors import HttpError, MidstreamError, SpecError
from midstream.lab.server import fit_body
from midstream.plan import Capture, Steer
from midstream.plan.operations import KINDS_BY_OP
from midstream.plan.probe import Probe
from midstream.plan.readouts import KINDS
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.server.body_values import is_long, prompts_of
from midstream.server.request_field import MidstreamField, read_field, take_field

pytestmark = pytest.mark.anyio

SIZES = (6, 20, rounds(suite=120, nightly=360))
# At 360 some are above a budget; before, they cost the product.
TOGETHER_SIZES = (6, 60, 360)
# Work may grow by twice as much as the list: a logarithm, and what is short in a short list.
MOST = 2.0
# Lines of work that ends above a budget, some 0.5 s.
MOST_REFUSED = 5_000_000
BUDGETS = ("budget is", "separate ranges of positions")
TOKENIZER = byte_level()
FRONT = front_end(TOKENIZER)
WORDS = "".join(f"w{nth} " for nth in range(20))
TOKENS = [5] * 500


def resolve(field: dict[str, Any], prompt: Any = WORDS) -> None:
    """Read a field and resolve its plan for a prompt, in a new front end's way."""
    messages = prompt if isinstance(prompt, list) and isinstance(prompt[0], dict) else None
    if messages is not None:
        prompt = TOKENIZER.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
    if isinstance(prompt, str):
        prompt = TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    resolve_read(read_field(field), prompt, messages)


def resolve_read(found: MidstreamField, prompt: list[int], messages: Any = None) -> None:
    request = SimpleNamespace(
        prompt_token_ids=prompt,
        prompt_is_token_ids=None,
        sampling_params=SimpleNamespace(max_tokens=4, n=1),
    )
    FRONT._resolver._prompts.__init__()
    FRONT.plans.resolve(request, CallPlan(found.plan, messages), (), ())


def sized(body: Any, run: Any, prompt: Any = "") -> tuple[int, Any]:
    """Bytes of a body, and the work on it."""
    return len(body) if isinstance(body, bytes) else len(json.dumps([body, prompt])), run


def check(name: str, make: Any, sizes: tuple[int, ...] = SIZES) -> None:
    """Check that the work grows at most `MOST` times as much as the bytes of what is long.

    What the body has besides does not grow, and counts for nothing: where it is most of a short
    body, lines that are added one by one would grow by more than twice as much as all bytes do.
    """
    points = []
    for nbytes, run in map(make, sizes):
        count, error = steps(run)
        assert error is None or isinstance(error, (MidstreamError, HttpError)), repr(error)
        points.append((nbytes, count, error))
    of_element = (points[1][0] - points[0][0]) / (sizes[1] - sizes[0])
    fixed = max(0.0, points[0][0] - sizes[0] * of_element)
    for (size, count, _), (longer, more, error) in itertools.pairwise(points[1:]):
        is_over = error is not None and any(one in str(error) for one in BUDGETS)
        growth = max(1.0, (longer - fixed) / max(1.0, size - fixed))
        allowed = MOST_REFUSED if is_over else MOST * count * growth
        assert more <= allowed, f"{name}: {count} lines for {size} bytes, {more} for {longer}"


def test_the_bound_holds_for_what_is_added_line_by_line_and_not_for_its_square():
    def work(lines, fixed):
        def make_work(size):
            return fixed + 4 * size, lambda: [None for _ in range(lines(size))]

        return make_work

    for fixed in (0, 240, 100_000):
        check("line by line", work(lambda n: 300 * n, fixed), (6, 20, 360))
        with pytest.raises(AssertionError, match="squared: "):
            check("squared", work(lambda n: 10 * n * n, fixed), (6, 20, 60))


def test_every_kind_of_what_a_plan_has_is_among_the_forms():
    assert set(CAPTURES) == {Capture, *KINDS.values()}
    assert set(FORMS) == {*CAPTURES, Probe, *KINDS_BY_OP.values()}


def test_every_field_has_a_list_or_takes_none():
    lost = [
        f"{cls.__name__}.{name}"
        for cls, name in fields()
        if list_of(cls, name) is None and name not in SINGLE
    ]
    for route, known in KNOWN.items():
        cases = {*BODIES[route], *SINGLE_OF_BODIES[route]}
        lost += [f"{route}.{name}" for name in known if name not in cases]
    assert lost == [], "write a case in tests/support/long_lists.py"


async def test_every_field_of_every_route_has_a_list_or_takes_none():
    site = await make(studio=True)
    found = {
        f"{method} {route.path}": declared(route)
        for route in site.app.routes
        if getattr(route, "endpoint", None) and route.endpoint.__module__.startswith("midstream.")
        for method in route.methods & {"POST", "PUT", "PATCH", "DELETE"}
        if method != "DELETE" or declared(route)
    }
    cases = {route: set(fields) for route, fields in ROUTES.items()}
    cases |= {route: set(KNOWN[name]) for route, name in ELSEWHERE.items()}
    assert found == cases, "write a case in tests/unit/server/long_bodies.py"


def test_every_field_of_other_tools_has_a_list_or_takes_none():
    assert set(others_fields()) == set(OTHERS), "write a case in tests/unit/server/long_bodies.py"
    for field, names in INNER.items():
        lost = [name for name in names if name not in OTHERS[field] and name not in PLAIN_OTHERS]
        assert lost == [], f"write a case of {field} in tests/unit/server/long_bodies.py"


def test_a_list_where_none_is_expected_is_refused():
    for several in (["a", "b", "c"], [1, 2, 3]):
        for cls, name in fields():
            if list_of(cls, name) is None:
                body = field_of(cls, {**FORMS[cls], name.rstrip("_"): several})
                with pytest.raises(SpecError):
                    read_field(body)
        for route, names in SINGLE_OF_BODIES.items():
            for name in names:
                with pytest.raises(SpecError):
                    READ[route]({**BODY[route], name: several})


def test_a_field_costs_at_most_as_much_more_as_it_is_longer():
    for cls, name in fields():
        lists = list_of(cls, name)
        if lists is not None:

            def make_work(size, cls=cls, name=name, lists=lists):
                body = field_of(cls, {**FORMS[cls], name: lists(size)})
                return sized(body, lambda: resolve(body, WORDS if lists is texts else TOKENS))

            check(f"{cls.__name__}.{name}", make_work)


def test_a_list_of_a_body_costs_at_most_as_much_more_as_it_is_longer():
    for route, names in BODIES.items():
        for name, lists in names.items():

            def make_work(size, route=route, name=name, lists=lists):
                body = {**BODY[route], name: lists(size)}
                return sized(body, lambda: READ[route](body))

            check(f"{route}.{name}", make_work)


async def test_a_list_of_a_route_costs_at_most_as_much_more_as_it_is_longer():
    site = await make()
    site.engine.vectors.register("calm", {1: [1.0, 2.0, 2.0]})
    for route, listed in ROUTES.items():
        for name, forms in listed.items():
            for form, lists in forms.items():

                def make_work(size, route=route, name=name, lists=lists):
                    value = lists(size)
                    body = {**REST.get(route, {}), name: value} if name else value
                    site.engine.steering.clear()
                    site.engine.captures.clear()
                    return sized(body, lambda: run_route(route, site.server, body))

                check(f"{route} {name}, {form}", make_work)


def test_a_list_of_other_tools_costs_at_most_as_much_more_as_it_is_longer():
    for name, forms in OTHERS.items():
        for form, lists in forms.items():

            def make_work(size, name=name, lists=lists):
                body = others_body(name, lists(size))
                return sized(body, lambda: resolve_read(take_field(dict(body)), TOKENS))

            check(f"{name}, {form}", make_work)


async def test_a_list_of_vllms_bodies_costs_at_most_as_much_more_as_it_is_longer():
    site = await make()
    for name, lists in VLLM.items():

        def make_work(size, lists=lists):
            body = lists(size)
            return sized(body, lambda: run_vllm(body, site.server))

        check(name, make_work)


def _captures(count, **more):
    return [{"layers": [1], "positions": [nth], **more} for nth in range(count)]


def _probes(count, **more):
    v = [1.0, 2.0, 2.0]
    return [{"direction": v, "layer": 1, "name": f"p{nth}", **more} for nth in range(count)]


def _messages(count):
    return [{"role": "user", "content": f"word {nth % 7}"} for nth in range(count)]


def _root(size):
    return max(2, int(size**0.5))


_SWITCH = {"switch": {"above": 0.5, "edits": [{"op": "scale", "factor": 2.0, "layer": 1}]}}
# Fields and prompts in which several lengths grow: of each a product could be the cost.
TOGETHER: dict[str, Any] = {
    "captures": lambda n: ({"capture": _captures(n)}, TOKENS),
    "edits": lambda n: ({"edits": edits(n)}, TOKENS),
    # A vector of its own: what another test read is not read again.
    "steer": lambda n: ({"steer": [{"vector": [1, 2, n], "layer": 1}] * n}, TOKENS),
    "probes": lambda n: ({"probes": _probes(n)}, TOKENS),
    "captures by sink": lambda n: (
        {"capture": {f"s{nth}": {"hooks": {"resid_post": [1]}, "positions": "all"}
                     for nth in range(n)}}, TOKENS),
    "texts, prompt": lambda n: (
        {"capture": {"layers": [1], "exclude": texts(n)}}, "the cat " * n),
    "texts of all lengths, prompt": lambda n: (
        {"capture": {"layers": [1], "exclude": [{"text": "a" * (k + 1)} for k in range(_root(n))]}},
        "a" * n),
    "texts within texts, prompt": lambda n: (
        {"capture": {"layers": [1], "exclude": [{"text": "b" * n + "a"}]}}, "b" * (4 * n)),
    "token ids, prompt": lambda n: (
        {"capture": {"layers": [1], "positions": [{"tokens": [k]} for k in range(n)]}},
        [nth % 7 + 20 for nth in range(n)]),
    "captures with texts, prompt": lambda n: (
        {"capture": [{"layers": [1], "exclude": [{"text": f"w{k}"}, {"text": f"x{nth}"}]}
                     for nth in range(_root(n)) for k in range(2)]}, "the cat " * n),
    "captures with ids, prompt": lambda n: (
        {"capture": [{"layers": [1], "positions": [{"tokens": [5, 99 + nth]}]}
                     for nth in range(n)]}, [5, 6] * n),
    "captures with steps": lambda n: (
        {"capture": [{"layers": [1], "exclude": [nth],
                      "positions": [{"slice": [0, 8 * n, 2]}, {"slice": [1, 8 * n, 2]}]}
                     for nth in range(n)]}, [5] * 8 * n),
    "roles, messages": lambda n: (
        {"capture": {"layers": [1], "positions": [{"role": "user", "message": k}
                                                  for k in range(n)]}}, _messages(n)),
    "captures of all layers": lambda n: ({"capture": _captures(n, layers="all")}, TOKENS),
    "overlapping edits": lambda n: (
        {"edits": [{"op": "scale", "factor": 2.0, "layer": 1,
                    "positions": [{"slice": [k, 2 * n - k]}]} for k in range(n)]}, [5] * 3 * n),
    "probes that switch": lambda n: (
        {"edits": [], "probes": _probes(n, act=_SWITCH), "capture": _captures(n)}, TOKENS),
    "sets of a controller": lambda n: (
        {"edits": edits(2), "probes": _probes(1), "controller": sets(n)}, WORDS),
}  # fmt: skip


def test_lists_that_grow_together_cost_at_most_as_much_more_or_are_above_a_budget():
    for name, lists in TOGETHER.items():

        def make_work(size, lists=lists):
            body, prompt = lists(size)
            return sized(body, lambda: resolve(body, prompt), prompt)

        check(name, make_work, TOGETHER_SIZES)


async def test_prompts_times_a_plan_have_a_budget():
    field = {"capture": {"layers": [0, 1, 2, 3], "exclude": texts(3000)}}
    async with serving() as (site, client):
        body = {"prompt": ["a"] * 400, "midstream": field}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 400
        problem = answer.json()["error"]["message"]
        assert "prompt: 400 prompts times 3005 taps and positions" in problem
        assert "above the budget of 1048576; send fewer prompts" in problem
        assert site.engine.calls == []
        assert prompts_of({"prompt": [5] * 400}) == 1, "token ids are one prompt"
        one = {"prompt": "a", "midstream": field}
        assert (await client.post("/v1/completions", json=one)).status_code == 200


def test_prompts_of_a_fit_times_its_positions_have_a_budget():
    prompts = ["a"] * 2000
    body = {"positive": prompts, "negative": prompts, "positions": whole(300)}
    with pytest.raises(SpecError, match="4000 prompts times 300 taps and positions") as caught:
        fit_body.read_fit(body, 4096)
    assert caught.value.path == "positions"
    fit_body.read_fit({**body, "positions": whole(200)}, 4096)


async def test_a_large_plan_is_resolved_once_and_in_a_thread(monkeypatch):
    engine, threads = ResolvingEngine(), []
    resolve = engine.front._resolver.resolve

    def noting(*given):
        threads.append(threading.get_ident())
        return resolve(*given)

    monkeypatch.setattr(engine.front._resolver, "resolve", noting)
    here = threading.get_ident()
    for field, is_here in (
        ({"capture": {"layers": [1], "positions": "prompt"}}, True),
        ({"edits": edits(600)}, False),
        ({"capture": {"layers": [1], "exclude": texts(2000)}}, False),
    ):
        threads.clear()
        await engine.resolve([5] * 700, CallPlan(read_field(field).plan), "r")
        assert [one == here for one in threads] == [is_here]
    # Steering that changed meanwhile is not passed over.
    plan = CallPlan(read_field({"edits": edits(600)}).plan)
    rendered = {"type": "token", "prompt_token_ids": [5] * 700}
    params = SimpleNamespace(n=1, max_tokens=4)
    await engine.front.plans.resolve_ahead(plan, rendered, params, (), ())
    request = SimpleNamespace(
        prompt_token_ids=[5] * 700, prompt_is_token_ids=None, sampling_params=params
    )
    steering = (Steer([1.0, 2.0, 2.0], 0),)
    prepared = engine.front.plans.resolve(request, plan, steering, ())
    assert len(prepared.plan.edits) == 601


async def test_a_plan_that_is_prepared_ahead_knows_the_images_of_its_prompt():
    engine = ResolvingEngine()
    plan = CallPlan(
        read_field({"edits": [*edits(600), {**edits(1)[0], "positions": {"image": 0}}]}).plan
    )
    rendered = {
        "type": "multimodal",
        "prompt_token_ids": [5] * 700,
        "mm_placeholders": {"image": [SimpleNamespace(offset=640, length=9, is_embed=None)]},
    }
    params = SimpleNamespace(n=1, max_tokens=4)
    await engine.front.plans.resolve_ahead(plan, rendered, params, (), ())
    request = SimpleNamespace(prompt_token_ids=[5] * 700, sampling_params=params)
    prepared = engine.front.plans.resolve(request, plan, (), ())
    assert prepared.plan.edits[-1].where.ranges == ((640, 649),)


def test_combinations_of_parts_have_a_budget_in_all_versions_of_a_plan():
    def nested(count):
        return [
            {"op": "scale", "factor": 2.0, "layer": 1, "positions": [{"slice": [k, 1000 - k]}]}
            for k in range(count)
        ]

    problem = "in 80200 combinations .*, and the budget is 32768"
    resolve({"edits": nested(200)}, [5] * 600)
    with pytest.raises(SpecError, match=problem):
        resolve({"edits": nested(400)}, [5] * 1000)
    # Each version of the plan counts.
    with pytest.raises(SpecError, match="and in each version of the plan"):
        resolve({"edits": nested(60), "probes": _probes(30, act=_SWITCH)}, [5] * 600)


def test_bodies_that_are_long_or_become_long_are_parsed_in_a_thread():
    for body, is_in_thread in (
        (b'{"prompt": "abc"}', False),
        (b"[" + b"1," * 2000 + b"1]", True),
        (b" " * (1 << 19), True),
        (b'{"apply_steering_vectors": {"compression": "zstd"}}', True),
    ):
        assert is_long(body) == is_in_thread, body[:40]
