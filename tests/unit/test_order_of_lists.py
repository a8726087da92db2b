"""Every list that a request takes keeps its order, is rejected, or has an order that means nothing.

`RULES` has a rule for each argument of a public class or method that takes a list, and a test fails
for an argument without one. A rule is checked with the list in random orders.
"""

import inspect
import random
import re
from typing import Any

import numpy as np
import pytest
from support.nightly import rounds
from unit.list_order import (
    FEATURES,
    HEAD,
    RANKS,
    ROWS,
    SOME_HEADS,
    SOME_LAYERS,
    SOME_POSITIONS,
    SOME_SITES,
    Rule,
    V,
    added,
    affine,
    as_in_steer,
    ascends,
    attention_heads,
    by_layer,
    by_rows,
    capture_heads,
    double,
    equal,
    features_by_their_rows,
    features_of,
    grid_axis,
    has_test,
    heads,
    kept,
    lens_layers,
    lens_tokens,
    logit_tokens,
    loreft,
    means_nothing,
    of_families,
    own_rules,
    paired,
    place,
    plan_of,
    plan_of_probes,
    sae_features,
    span,
    steered,
    unit_terms,
)

import midstream
from midstream import (
    LLM,
    SAE,
    Ablate,
    Affine,
    AsyncClient,
    AsyncLLM,
    Attention,
    Bias,
    Capture,
    Clamp,
    Client,
    Controller,
    Directions,
    Feature,
    Features,
    Gate,
    Lens,
    Local,
    Logits,
    LogProb,
    LoReFT,
    Norms,
    Probe,
    Reconstruct,
    Replace,
    Route,
    Scale,
    Steer,
    TokenIds,
    entries,
    extra_body,
    stack,
)
from midstream.lab.attribution import Twin, attribution_patching
from midstream.lab.fit import Direction
from midstream.lab.fit.batches import encode_prompts
from midstream.lab.fit.tune import _read_scales
from midstream.lab.sweep.alignment import align_positions, read_align
from midstream.lab.sweep.request import SweepRequest
from midstream.lab.sweep.source import read_source
from midstream.plan import CapturedRows, Mass, Plan, Positions, Reading, Sites, Switch, TopKeys

ENGINE = "tests/engine/test_row_order.py::"
MASK = [4, 1, 6]

RULES: dict[str, Rule] = {
    **own_rules("Capture", {
        "layers": means_nothing(lambda order: Capture(order), SOME_LAYERS),
        "sites": means_nothing(lambda order: Capture(1, order), SOME_SITES),
        "positions": ascends(lambda order: Capture(1, positions=order)),
        "exclude": means_nothing(lambda order: Capture(1, exclude=order), SOME_POSITIONS),
        "heads": kept(capture_heads, SOME_HEADS),
        "metadata": equal(lambda order: Capture(1, metadata=dict(order)), [("a", 1), ("b", 2)]),
    }),
    **own_rules("Attention", {
        "layers": means_nothing(lambda order: Attention(order, reduce=TopKeys(2)), SOME_LAYERS),
        "heads": kept(attention_heads, SOME_HEADS),
        "queries": ascends(lambda order: Attention(1, queries=order, reduce=TopKeys(2))),
        "exclude": means_nothing(
            lambda order: Attention(1, exclude=order, reduce=TopKeys(2)), SOME_POSITIONS
        ),
        "reduce": means_nothing(
            lambda order: Attention(1, reduce={"mass": {"positions": order}}), [5, 2, -1]
        ),
        "metadata": equal(
            lambda order: Attention(1, reduce=TopKeys(2), metadata=dict(order)),
            [("a", 1), ("b", 2)],
        ),
    }),
    **own_rules("Mass", {
        "positions": means_nothing(lambda order: Attention(1, reduce=Mass(order)), [5, 2, -1]),
        "exclude": means_nothing(
            lambda order: Attention(1, reduce=Mass("prompt", exclude=order)), [5, 2, -1]
        ),
    }),
    **own_rules("Lens", {
        "layers": kept(lens_layers, SOME_LAYERS),
        "tokens": kept(lens_tokens, [9, 3, 7]),
        "positions": ascends(lambda order: Lens(1, positions=order)),
        "exclude": means_nothing(lambda order: Lens(1, exclude=order), SOME_POSITIONS),
    }),
    **own_rules("Logits", {
        "tokens": kept(logit_tokens, [9, 3, 7]),
        "positions": ascends(lambda order: Logits(2, positions=order)),
        "exclude": means_nothing(lambda order: Logits(2, exclude=order), SOME_POSITIONS),
    }),
    **own_rules("Norms", {
        "layers": means_nothing(lambda order: Norms(order), SOME_LAYERS),
        "sites": means_nothing(lambda order: Norms(1, order), SOME_SITES),
        "positions": ascends(lambda order: Norms(1, positions=order)),
        "exclude": means_nothing(lambda order: Norms(1, exclude=order), SOME_POSITIONS),
        "metadata": equal(lambda order: Norms(1, metadata=dict(order)), [("a", 1), ("b", 2)]),
    }),
    **own_rules("Features", {
        "features": kept(sae_features, [9, 3, 7]),
        "positions": ascends(
            lambda order: Features("s", positions=order, layer=1, site="resid_post")
        ),
        "exclude": means_nothing(
            lambda order: Features("s", exclude=order, layer=1, site="resid_post"), SOME_POSITIONS
        ),
    }),
    **own_rules("Probe", {
        **dict.fromkeys(
            ("direction", "layer"), by_layer(lambda rows, layers: Probe(rows, layer=layers))
        ),
        "site": means_nothing(lambda order: Probe(V, 1, site=order[0]), ["resid_mid"]),
        "positions": ascends(lambda order: Probe(V, 1, positions=order)),
        "exclude": means_nothing(lambda order: Probe(V, 1, exclude=order), SOME_POSITIONS),
        "head": means_nothing(
            lambda order: Probe(attention=Mass(0), layer=1, head=order), SOME_HEADS
        ),
        "attention": means_nothing(
            lambda order: Probe(attention={"mass": order}, layer=1), [5, 2, -1]
        ),
        "mlp": equal(
            lambda order: Probe(layer=1, mlp=dict(order)),
            [("hidden", [V, V]), ("hidden_bias", [1, 2]), ("output", [3, 4])],
        ),
        "act": equal(lambda order: Probe(V, 1, act={"stop": dict(order)}),
                     [("above", 2.0), ("for", 3)]),
    }),
    **own_rules("Reading", {
        "direction": paired(
            lambda rows, layers: Gate(Steer(V, 4), Reading(rows, layer=layers)), ROWS[:3], [2, 0, 1]
        ),
        "layer": means_nothing(
            lambda order: Gate(Steer(V, 4), Reading({layer: ROWS[layer] for layer in order})),
            [2, 0, 1],
        ),
        "site": equal(lambda order: Reading(V, layer=1, site=order[0]), ["resid_mid"]),
    }),
    **own_rules("MLP", dict.fromkeys(
        ("hidden", "hidden_bias", "output"),
        equal(unit_terms, [(ROWS[nth], nth + 1.0, nth + 0.5) for nth in range(4)]),
    )),
    **of_families(),
    **own_rules("Steer", {
        **place(Steer, vector=V),
        "vector": by_layer(steered),
        "rows": by_rows(Steer),
        "head": heads(lambda **where: Steer(HEAD, **where)),
    }),
    **own_rules("Replace", {
        **place(Replace, rows=V),
        "rows": by_rows(Replace),
        "head": heads(lambda **where: Replace(HEAD, **where)),
        "dims": means_nothing(lambda order: Replace(V, 1, dims=order), [6, 0, 3]),
    }),
    **own_rules("Ablate", {
        **place(Ablate, directions=V),
        "directions": equal(span, list(ROWS[:3])),
        "head": heads(lambda **where: Ablate(HEAD, **where)),
    }),
    **own_rules("Clamp", {
        **place(Clamp, direction=V, value=1.0),
        "head": heads(lambda **where: Clamp(HEAD, value=1.0, **where)),
    }),
    **own_rules("Scale", {
        **place(Scale, factor=2.0),
        "head": heads(lambda **where: Scale(2.0, **where)),
        "dims": means_nothing(lambda order: Scale(2.0, 1, dims=order), [6, 0, 3]),
    }),
    **own_rules("Affine", {
        **place(Affine, read=[V], write=[V]),
        **dict.fromkeys(("read", "write", "bias"), added(affine, RANKS)),
        "head": heads(lambda **where: Affine([HEAD], [HEAD], **where)),
    }),
    **own_rules("LoReFT", {
        **place(LoReFT, rotation=[ROWS[0]], weight=[V], bias=0.0),
        **dict.fromkeys(("rotation", "weight", "bias"), added(loreft, RANKS)),
        "head": heads(lambda **where: LoReFT([[1.0, 0.0]], [HEAD], 0.0, **where)),
    }),
    **own_rules("Feature", {
        **place(Feature, encoder=V, decoder=V, value=1.0),
        **dict.fromkeys(
            ("encoder", "decoder", "value", "bias", "threshold"),
            added(lambda order: features_of(*order), FEATURES),
        ),
        "index": equal(
            lambda order: Feature(
                sae="s", index=[one for one, _ in order], value=[two for _, two in order]
            ),
            [(9, 1.0), (4, 2.0), (7, 3.0)],
        ),
        "head": heads(lambda **where: Feature(HEAD, HEAD, value=1.0, **where)),
    }),
    **own_rules("Reconstruct", {
        **dict.fromkeys(("layer", "site", "positions", "exclude"), as_in_steer(Reconstruct)),
        **dict.fromkeys(("index", "value"), equal(
            lambda order: Reconstruct(
                "s", [one for one, _ in order], value=[two for _, two in order]
            ),
            [(9, 1.0), (4, 2.0), (7, 3.0)],
        )),
    }),
    **own_rules("Route", {
        **place(Route, activate=3, site="router"),
        "site": as_in_steer(Route),
        "activate": means_nothing(lambda order: Route(activate=order, layer=1), [6, 3]),
        "deactivate": means_nothing(lambda order: Route(deactivate=order, layer=1), [6, 3, 0]),
        "bias": means_nothing(lambda order: Route(bias=dict(order), layer=1), [(6, 1), (3, 2)]),
    }),
    **own_rules("Bias", {
        "tokens": means_nothing(lambda order: Bias(dict(order)), [(9, 1.0), (3, 2.0), (7, 3.0)]),
        "positions": means_nothing(lambda order: Bias({3: 1.0}, positions=order), [12, -1, 10]),
        "exclude": means_nothing(lambda order: Bias({3: 1.0}, exclude=order), [12, -1, 10]),
    }),
    **own_rules("Local", place(Local, fn=double)),
    **own_rules("Gate", {
        "edit": equal(lambda order: Gate(dict(order), V), [("op", "scale"), ("factor", 2.0),
                                                           ("layer", 1)]),
        "probe": equal(lambda order: Gate(Scale(2.0, 1), dict(order)), [("direction", V),
                                                                        ("bias", 1.0)]),
    }),
    "Switch.edits": kept(
        lambda order: [
            one.scale for one in Switch([Steer(V, 1, scale) for scale in order], above=1.0).edits
        ],
        [3.0, 1.0, 2.0],
    ),
    "Sites.sites": kept(lambda order: Sites(order).names, SOME_SITES),
    "Controller.edits": kept(
        lambda order: [
            one.name
            for one in Controller("guard", mode="sync", edits=dict.fromkeys(order, [])).edits
        ],
        ["b", "c", "a"],
    ),
    "CapturedRows.positions": kept(lambda order: CapturedRows("a", order).positions, [5, 2, 7]),
    **own_rules("Positions", {
        "include": has_test(
            "tests/unit/plan/resolve/test_row_placement.py"
            "::test_rows_follow_the_items_whatever_these_are"
        ),
        "exclude": means_nothing(
            lambda order: Steer(V, 1, positions=Positions("all", "all", order)), SOME_POSITIONS
        ),
    }),
    "TokenIds.ids": means_nothing(
        lambda order: Steer(V, 1, positions=TokenIds(order)), [9, 3, 7]
    ),
    **own_rules("Plan.make", {
        "capture": kept(
            lambda order: [
                one.layers.indices[0] for one in Plan.make([Capture(nth) for nth in order]).captures
            ],
            [3, 0, 1],
        ),
        "edits": kept(
            lambda order: [
                one.steps.instructions[0].a
                for one in plan_of([Steer(V, 1, scale) for scale in order]).edits
            ],
            [3.0, 1.0, 2.0],
        ),
        "probes": kept(
            lambda order: [
                one.name for one in plan_of_probes([Probe(V, 1, name=name) for name in order])
            ],
            ["c", "a", "b"],
        ),
    }),
    **own_rules("SweepRequest", {
        "layers": kept(grid_axis("layers"), [3, 0, 1]),
        "sites": kept(grid_axis("sites"), SOME_SITES),
        "positions": kept(grid_axis("positions"), [5, 2, 9, 7]),
        "heads": kept(grid_axis("heads"), SOME_HEADS),
        "features": kept(grid_axis("features"), [9, 3, 7]),
        "groups": kept(
            lambda order: grid_axis("groups")({one: int(one) for one in order}), ["5", "2", "7"]
        ),
        "exclude": equal(lambda order: grid_axis("positions")(["prompt"], order), [5, 2, -1]),
        "mask": equal(lambda order: SweepRequest(0, LogProb(3), mask=order).dims, MASK),
        "source": kept(
            lambda order: [
                int(np.flatnonzero((row == ROWS).all(1))[0])
                for row in read_source({("z", 1): ROWS[order]}).rows["z", 1]
            ],
            [3, 0, 5],
        ),
        "align": equal(
            lambda order: align_positions(read_align(dict(order)), 10, 10),
            [(5, 1), (2, 7), (-1, 3)],
        ),
        "metric": kept(
            lambda order: SweepRequest(0, {"logit_diff": order}).metric.tokens, [9, 3]
        ),
    }),
}  # fmt: skip


# Arguments that are one value, whatever their type says.
ONE_VALUE = {
    "Capture.codec", "Local.fn", "Positions.phase", "Plan.make.controller", "Affine.matrix",
    "Clamp.direction", "Scale.factor", "Scale.shift", "Feature.decoder_bias",
}  # fmt: skip
LISTS = re.compile(
    r"(Layers|Sites|Indices|Positions|Rows|Features|Matrix|Vector)(Like|OrNames?)\b|Sequence|Mapping"
    r"|tuple|list\[|Iterable|\bAny\b|\bobject\b"
)
# Arguments of functions and methods, which hand them on to the classes above.
HANDED_ON = {
    "capture": "Plan.make.capture", "edits": "Plan.make.edits", "steer": "Plan.make.edits",
    "probes": "Plan.make.probes", "layer": "Steer.layer", "layers": "Capture.layers",
    "site": "Steer.site", "sites": "Capture.sites", "positions": "Capture.positions",
    "exclude": "Capture.exclude", "heads": "Capture.heads", "features": "Features.features",
    "index": "Feature.index", "value": "Feature.value", "groups": "SweepRequest.groups",
    "mask": "SweepRequest.mask", "align": "SweepRequest.align", "source": "SweepRequest.source",
    "metric": "SweepRequest.metric",
}  # fmt: skip
CALLS: dict[str, Rule] = {
    **dict.fromkeys(
        ("generate.prompts", "generate.sampling_params", "chat.sampling_params"),
        has_test(ENGINE + "test_a_shuffled_call_has_shuffled_outputs"),
    ),
    **dict.fromkeys(
        ("score.texts", "score.prompts"), has_test(ENGINE + "test_scores_are_those_of_their_texts")
    ),
    **dict.fromkeys(
        ("ask.sources", "ask.question"),
        has_test(
            "tests/engine/test_ask.py::"
            "test_several_questions_are_answered_in_one_batch_each_with_its_own_rows"
        ),
    ),
    "stack.outputs": has_test(ENGINE + "test_outputs_are_stacked_in_the_order_of_the_list"),
    **dict.fromkeys(
        (f"{method}.{field}" for method in ("fit", "fit_async", "from_rows")
         for field in ("positive", "negative")),
        has_test("tests/lab/fit/test_references.py::test_a_group_that_leaks_is_held_out_together"),
    ),
    "tune.scales": kept(lambda order: _read_scales(order), [2.0, 0.5, 1.0]),
    "tune.prompts": kept(
        lambda order: encode_prompts("prompts", order, lambda: None),
        [[5], [2], [9]],
    ),
    "weights_of.ids": kept(features_by_their_rows, [6, 0, 3]),
}  # fmt: skip
# Arguments of functions and methods that are one prompt, one chat, an object or options.
ONE_OF = {
    "activations.prompt", "ask.chat", "ask.lora_request", "ask.use_tqdm",
    "attribution_patching.clean", "attribution_patching.corrupt",
    "attribution_patching.llm", "attribution_patching.twin", "beam_search.args", "call.json",
    "card.self",
    "chat.args", "chat.messages", "complete.prompt", "cosine.rows", "enqueue.args",
    "enqueue_chat.args", "extra_body.controller", "fit.llm", "fit.method", "fit_async.llm",
    "fit_async.method", "from_repeng.control_vector", "from_rows.method", "from_saelens.sae",
    "from_store.method", "generate.prompt", "gradients.prompt", "plot.ax", "prepare_sweep.prompt",
    "prepare_sweep.template", "project.rows", "read.answer", "register.llm", "run_sweep.vllm_args",
    "run_with_cache.prompt",
    "stack.row", "stream.messages", "stream.prompt", "sweep.lora_request", "sweep.prompt",
    "sweep.template", "sweep.use_tqdm", "to_folder.self", "tokens.prompt", "tune.directions",
    "tune.effect",
    "tune.sampling_params", "update_all.requests",
}  # fmt: skip


def arguments(function: Any) -> list[str]:
    """The arguments of a function that take a list."""
    return [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.kind is not one.VAR_KEYWORD and LISTS.search(str(one.annotation))
    ]


def classes() -> dict[str, type]:
    """What requests are made of."""
    public = {name: getattr(midstream, name) for name in midstream.__all__}
    public |= {name: entries.public(name) for name in entries.MOVED}
    found = {
        name: one
        for name, one in public.items()
        if inspect.isclass(one)
        and one.__module__.startswith(("midstream.plan", "midstream.lab.sweep.m"))
    }
    return {**found, "SweepRequest": SweepRequest}


def test_every_list_of_a_function_or_method_has_a_rule_or_is_handed_on() -> None:
    owners: list[Any] = [LLM, AsyncLLM, Client, AsyncClient, Direction, Directions, SAE, Twin]
    methods = [
        (name, inspect.unwrap(one))
        for owner in owners
        for name, one in inspect.getmembers(owner, callable)
        if not name.startswith("_")
    ]
    functions = [(one.__name__, one) for one in (attribution_patching, stack, extra_body)]
    found = {
        f"{name}.{field}"
        for name, one in [*methods, *functions]
        if inspect.isfunction(one) and one.__module__.startswith("midstream")
        for field in arguments(one)
        if field not in HANDED_ON
    }
    assert found == {*CALLS, *ONE_OF}
    assert set(HANDED_ON.values()) <= set(RULES)


def test_every_list_of_a_class_that_requests_are_made_of_has_a_rule() -> None:
    found = {
        f"{name}.{field}"
        for name, one in classes().items()
        if name != "Plan"
        for field in arguments(one.__init__)
    }
    found |= {f"Plan.make.{field}" for field in arguments(Plan.make)}
    missing, gone = found - ONE_VALUE - set(RULES), set(RULES) - found
    assert not missing, f"say in RULES what the order of these means: {sorted(missing)}"
    assert not gone, f"rules for what no class has: {sorted(gone)}"


@pytest.mark.parametrize("name", [*RULES, *CALLS])
def test_a_list_in_another_order_has_the_result_in_that_order_or_is_rejected(name: str) -> None:
    draw = random.Random(name)
    for _ in range(rounds(suite=8, nightly=200)):
        {**RULES, **CALLS}[name](draw)


def test_the_rules_tell_orders_apart() -> None:
    """A rule that any result passes would find nothing."""

    class Backwards(random.Random):
        def shuffle(self, order: Any) -> None:
            order.reverse()

    for rule in (
        kept(lambda order: sorted(order), [0, 1, 2]),
        equal(lambda order: order, [0, 1, 2]),
        means_nothing(lambda order: Steer(V, 1, scale=order[0] + 1.0), [0, 1, 2]),
        paired(
            lambda rows, places: Replace(rows[0], 1, positions=sorted(places)), ROWS[:3], [0, 1, 2]
        ),
        added(lambda order: affine([RANKS[nth][:2] + (order[0],) for nth in order]), [0, 1, 2]),
    ):
        with pytest.raises(AssertionError):
            rule(Backwards())
