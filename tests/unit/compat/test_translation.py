"""Other tools' requests give the plans that the same requests in midstream's words give."""

import json
import pickle
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.others_words import ROWS, TRANSLATED, V, direction, encoded, lens_array, packed
from support.refusals import refused

from midstream.api.sampling_params import read_plan
from midstream.compat import easysteer, vllm_fork, vllm_lens
from midstream.compat.translation import translate, without_translated
from midstream.errors import SpecError
from midstream.plan import Ablate, Capture, Clamp, Plan, Replace, Span, Steer, TokenIds, Window

W = [0.5, 0.0, -1.0]
BOTH = {"prompt": "all", "generation": "all"}


def plan(*edits, capture=None):
    return Plan.make(capture=capture, edits=list(edits) or None)


def steering(apply, **more):
    return {"steering": {"vectors": [{"data": direction({1: V, 2: W}), "apply": apply, **more}]}}


def two(layer, **more):
    """EasySteer's steering with two vectors, the second at a layer."""
    vectors = [{"data": direction({at: row}), "apply": BOTH} for at, row in ((1, V), (layer, W))]
    return {"steering": {"vectors": vectors, **more}}


def rows(values, layers, **more):
    """A vector of vllm-lens."""
    return {"activations": lens_array(values), "layer_indices": layers, **more}


def lens(*vectors):
    return {"apply_steering_vectors": list(vectors)}


def patch(**more):
    return {"patch": [{**TRANSLATED["patch"][0], **more}], "patch_vectors": ROWS}


VECTORS = rows([V, W], [1, 2])
OBJECT = SimpleNamespace(activations=torch.tensor([V]), layer_indices=[1], scale=-1.0,
                         norm_match=False, position_indices=None)  # fmt: skip
FILES = {"request_id": "r", "tag": "t", "hooks": {"post_block": [1, 2]}, "positions": "last_prompt"}
SAME = {
    "lens capture": ({"output_residual_stream": [3, 1]}, plan(capture=Capture([3, 1]))),
    "lens capture as text": ({"output_residual_stream": "[3]"}, plan(capture=Capture([3]))),
    "lens capture of all": ({"output_residual_stream": True}, plan(capture=Capture("all"))),
    "lens vectors": (lens({**VECTORS, "scale": 2.0}), plan(Steer(V, 1, 2.0), Steer(W, 2, 2.0))),
    "lens vectors as text": (
        {"apply_steering_vectors": json.dumps([VECTORS])}, plan(Steer(V, 1), Steer(W, 2))
    ),
    "lens vectors, norm matched": (
        lens({**VECTORS, "norm_match": True, "position_indices": None}),
        plan(Steer(V, 1, norm="match"), Steer(W, 2, norm="match")),
    ),
    "lens vectors as an object": (lens(OBJECT), plan(Steer(V, 1, -1.0))),
    "lens vectors at positions": (
        lens(rows([[V, W]], [2], position_indices=[4, 0])),
        plan(Steer(V, 2, positions=4), Steer(W, 2, positions=0)),
    ),
    "lens vectors at the first positions": (
        lens(rows([[V, W]], [2])), plan(Steer(V, 2, positions=0), Steer(W, 2, positions=1))
    ),
    "lens vectors and capture": (
        {**lens(VECTORS), "output_residual_stream": [2]},
        plan(Steer(V, 1), Steer(W, 2), capture=Capture([2])),
    ),
    "easysteer everywhere": (steering(BOTH, scale=2.0), plan(Steer(V, 1, 2.0), Steer(W, 2, 2.0))),
    "easysteer, an earlier form": (
        steering({"phases": ["prompt", "generation"]}), plan(Steer(V, 1), Steer(W, 2))
    ),
    "easysteer at one layer": (steering(BOTH, layers=[2], name="x"), plan(Steer(W, 2))),
    "easysteer normalized": (
        steering({"prompt": "all"}, normalize=True, layers=[1]),
        plan(Steer(V, 1, norm="keep", phase="prompt")),
    ),
    "easysteer at prompt positions and all generated tokens": (
        steering({"prompt_positions": [-1, 0], "generation": "all"}, layers=[1]),
        plan(Steer(V, 1, positions=[-1, 0], phase="prompt"), Steer(V, 1, phase="generated")),
    ),
    "easysteer windows": (
        steering({"prompt_window": [-4, None], "generation_window": [0, 4]}, layers=[1]),
        plan(
            Steer(V, 1, positions=Span(-4, None), phase="prompt"),
            Steer(V, 1, positions=Window(0, 4), phase="generated"),
        ),
    ),
    "easysteer tokens and steps": (
        steering(
            {"generation_tokens": [7], "generation_positions": [2], "generation_window": [5, None]},
            layers=[1],
        ),
        plan(
            Steer(V, 1, positions=[TokenIds([7]), Window(2, 3), Window(5, None)], phase="generated")
        ),
    ),
    "easysteer exclusions": (
        steering(
            {"prompt": "all", "exclude_prompt_tokens": [3], "exclude_prompt_positions": [0]},
            layers=[1],
        ),
        plan(Steer(V, 1, phase="prompt", exclude=[TokenIds([3]), 0])),
    ),
    "easysteer erase": (steering(BOTH, algorithm="erase", layers=[1]), plan(Ablate(V, 1))),
    "easysteer replace": (
        steering({"prompt_positions": [1]}, algorithm="replace", scale=2.0, layers=[1]),
        plan(Replace([2 * x for x in V], 1, positions=[1], phase="prompt")),
    ),
    "easysteer, two in order": (two(1, conflict="sequential"), plan(Steer(V, 1), Steer(W, 1))),
    "easysteer, two that do not meet": (two(2), plan(Steer(V, 1), Steer(W, 2))),
    "fork packed": (
        {"steering_vectors": {"pre_attn": packed([V, W], [2, 0], scales=[2.0, 0.5])}},
        plan(Steer(V, 2, 2.0, site="resid_pre"), Steer(W, 0, 0.5, site="resid_pre")),
    ),
    "fork tiers": (
        {
            "decode_steering_vectors": {"post_attn": {"1": V}},
            "steering_vectors": {"post_block": {"1": {"vector": V, "scale": 2.0}}},
            "prefill_steering_vectors": {"post_block": packed([W], [2])},
        },
        plan(
            Steer(V, 1, 2.0), Steer(W, 2, phase="prompt"),
            Steer(V, 1, site="resid_mid", phase="generated"),
        ),
    ),
    "fork name": ({"steering_name": "calm"}, plan(Steer("calm"))),
    "fork name and scale": (
        {"steering_module_ref": ["calm", 1.5]}, plan(Steer({"name": "calm", "scale": 1.5}))
    ),
    "fork clamps": (
        {
            "steering_clamps": {"post_block": {"2": [
                {"vector": V, "max": 4.0}, {"vector": W, "value": 8.0, "strength": 0.5}
            ]}},
            "decode_steering_clamps": {"pre_attn": {1: [{"vector": V, "min": -1, "max": 1}]}},
            "steering_vectors": {"post_block": {"2": W}},
        },
        plan(
            Steer(W, 2), Clamp(V, 2, high=4.0), Clamp(W, 2, 8.0, strength=0.5),
            Clamp(V, 1, low=-1, high=1, site="resid_pre", phase="generated"),
        ),
    ),
    "fork clamps, packed": (
        {"prefill_steering_clamps": {"post_block": packed(
            [V, W], [2, 2], bounds=[[-2.0, None], [0.0, 0.0]], strengths=[1.0, 0.5]
        )}},
        plan(Clamp(V, 2, low=-2.0, phase="prompt"), Clamp(W, 2, 0.0, strength=0.5, phase="prompt")),
    ),
    "fork capture": (
        {"capture": {"filesystem": FILES}, "capture_wait": True},
        plan(capture=Capture([1, 2], positions="last_prompt", sink="filesystem", tag="t",
                             request_id="r")),
    ),
    "fork capture before an edit": (
        {"capture": {"memory": {"hooks": {"pre_attn": [1]}}},
         "steering_vectors": {"post_block": {"1": V}}},
        plan(Steer(V, 1), capture=Capture([1], "resid_pre")),
    ),
    "fork patch": (
        {"patch": [
            {"layer": 2, "hook": "pre_attn", "dest_position": 6, "source_inline": 1, "alpha": 0.5},
            {"layer": 1, "hook": "post_block", "dest_position": 0, "source_inline": 0},
         ],
         "patch_vectors": {"dtype": "float64", "shape": [2, 3], "data": encoded([V, W], "float64")},
         "steering_vectors": {"post_block": {"1": W}}},
        plan(
            Replace(W, 2, 0.5, site="resid_pre", positions=[6]), Replace(V, 1, positions=[0]),
            Steer(W, 1),
        ),
    ),
}  # fmt: skip


def test_their_words_give_the_plan_of_our_words():
    for what, (theirs, ours) in SAME.items():
        found = translate({"prompt": "abc", "max_tokens": 3, **theirs})
        assert found == ours, what
        assert {name for name, _ in found.coming_from} == set(theirs), what
        assert without_translated({"prompt": "abc", **theirs}) == {"prompt": "abc"}
        assert pickle.loads(pickle.dumps(found)).coming_from == found.coming_from


def test_fields_of_several_tools_add_up():
    found = translate({**SAME["fork name"][0], **SAME["lens capture"][0]})
    assert found == plan(Steer("calm"), capture=Capture([3, 1]))
    assert found.coming_from == (
        ("steering_name", "the vLLM fork with steering"),
        ("output_residual_stream", "vllm-lens"),
    )


def test_nothing_of_others_is_no_plan():
    fields = {"prompt": "a", "capture": {"layers": [1]}, "steering": None, "patch": None}
    assert translate(fields) is None
    assert without_translated(fields) == fields
    assert translate(TRANSLATED, frozenset(TRANSLATED)) is None


def test_the_forks_arguments_of_sampling_params_are_read_alike():
    for name in ("fork packed", "fork tiers", "fork clamps", "fork clamps, packed", "fork patch"):
        theirs, ours = SAME[name]
        assert read_plan(dict(theirs)) == ours


A, S, C = "apply_steering_vectors[0]", "steering.vectors[0]", 'steering_clamps["post_block"]'


def clamps(layer="1", **more):
    return {"steering_clamps": {"post_block": {layer: [{"vector": V, **more}]}}}


REJECTED = (
    ({"output_residual_stream": []}, "output_residual_stream"),
    ({"output_residual_stream": [-1]}, "output_residual_stream[0]"),
    ({"output_residual_stream": False}, "output_residual_stream"),
    (lens(rows([V], [1, 2])), f"{A}.activations"),
    (lens({**VECTORS, "position_indices": [1]}), f"{A}.position_indices"),
    (lens({**VECTORS, "pre": True}), A),
    (
        lens({"activations": {**lens_array([V]), "shape": [1, 4]}, "layer_indices": [1]}),
        f"{A}.activations.data",
    ),
    ({"steering": {"vectors": [{"source": "/etc/passwd", "apply": BOTH}]}}, f"{S}.source"),
    (steering(BOTH, algorithm="loreft"), f"{S}.algorithm"),
    (two(1), "steering.conflict"),
    ({"steering": False}, "steering"),
    (steering({}), f"{S}.apply"),
    (steering({"prompt": "all", "exclude_generation_tokens": [1]}), f"{S}.apply"),
    (steering({"phases": [{}]}), f"{S}.apply.phases"),
    (steering(BOTH, layers=[1, 9]), f"{S}.layers"),
    (steering(BOTH, algorithm="erase", normalize=True), f"{S}.normalize"),
    ({"steering": [{"when": {"kind": "always"}}]}, "steering"),
    (
        {"patch": [{"layer": 1, "hook": "post_block", "dest_position": 0, "source_run": "clean",
                    "source_position": 0}]},
        "patch[0].source_run",
    ),
    (patch(mask={"dims": [1]}), "patch[0].mask"),
    ({"patch": TRANSLATED["patch"]}, "patch[0].source_inline"),
    (patch(source_inline=0.0), "patch[0].source_inline"),
    (patch(source_inline=False), "patch[0].source_inline"),
    ({"patch_vectors": ROWS}, "patch_vectors"),
    ({"steering_vectors": {"nowhere": {"1": V}}}, 'steering_vectors["nowhere"]'),
    (
        {"steering_vectors": {"post_block": packed([V, W], [1, 1])}},
        'steering_vectors["post_block"].layer_indices',
    ),
    (clamps(), f'{C}["1"][0]'),
    (clamps("9" * 5000, max=1), f'{C}["{"9" * 60}…"]'),
    (clamps(max=1, strength=2), f'{C}["1"][0].strength'),
    (
        {"capture": {"memory": {"hooks": {"post_block": "all"}}}, "steering_name": "calm"},
        "capture",
    ),
    (
        {"capture": {"patch_source": {"run": "clean", "hooks": {"post_block": "all"}}}},
        'capture["patch_source"]',
    ),
    ({"capture_wait": True}, "capture_wait"),
)  # fmt: skip


def test_what_has_no_equal_here_is_rejected_by_name():
    refused(translate, *((theirs, path, "") for theirs, path in REJECTED))


NAMES = st.sampled_from(
    [*vllm_lens.FIELDS, *easysteer.FIELDS, *vllm_fork.FIELDS, "vectors", "data", "apply", "prompt",
     "activations", "layer_indices", "shape", "dtype", "post_block", "1", "vector", "min", "layer"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
    | st.sampled_from(["all", "float32", "zstd", encoded(V)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None)
@given(name=st.sampled_from(sorted(TRANSLATED)), value=VALUES, data=st.data())
def test_any_value_is_translated_or_rejected(name, value, data):
    if data.draw(st.booleans()):
        value = changed(TRANSLATED[name], value, data.draw)
    with suppress(SpecError):
        found = translate({name: value} | ({"patch_vectors": ROWS} if name == "patch" else {}))
        assert found is None or found.captures or found.edits


def changed(value, other, draw):
    """Return a copy of a value with one part replaced."""
    if isinstance(value, dict) and value:
        key = draw(st.sampled_from(sorted(value, key=str)))
        return {**value, key: changed(value[key], other, draw)}
    if isinstance(value, list) and value and draw(st.booleans()):
        return [changed(value[0], other, draw), *value[1:]]
    return other


def test_arrays_of_every_dtype_are_read_as_float32():
    bfloat16 = torch.tensor([V]).bfloat16().view(torch.int16).numpy()
    for array in (
        lens_array([V]),
        lens_array([V], "float16"),
        lens_array([V], "float64"),
        {**lens_array(bfloat16, "int16"), "original_dtype": "torch.bfloat16"},
    ):
        found = translate(
            {"apply_steering_vectors": [{"activations": array, "layer_indices": [1]}]}
        )
        assert found == plan(Steer(V, 1))
    for rows in (torch.tensor([V]).bfloat16(), np.array([V])):
        vector = {"activations": rows, "layer_indices": [1]}
        assert translate({"apply_steering_vectors": [vector]}) == plan(Steer(V, 1))
