"""`midstream.SamplingParams`, which is vLLM's with steering and captures as arguments."""

import copy
import importlib.util
import inspect
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from support.refusals import refused

from midstream.api.sampling_params import OWN, SamplingParams
from midstream.errors import SpecError
from midstream.plan import Capture, Plan, Steer, Vector
from midstream.plan.vectors.named_vector import Named

vllm = pytest.importorskip("vllm")

V, W = [0.5, 0.25], [1.0, -2.0]
KEY = "midstream"


def plan_of(params) -> Plan | None:
    from midstream.runtime.install import plan_of

    return plan_of(params)


def test_what_it_makes_is_vllms_own():
    params = SamplingParams(2, temperature=0.5, max_tokens=7, steering_vectors={1: V})
    assert type(params) is vllm.SamplingParams
    assert (params.n, params.temperature, params.max_tokens) == (2, 0.5, 7)
    assert isinstance(params, SamplingParams)
    assert isinstance(vllm.SamplingParams(), SamplingParams)
    assert not isinstance(object(), SamplingParams)
    assert issubclass(vllm.SamplingParams, SamplingParams)
    assert not issubclass(dict, SamplingParams)


def test_without_arguments_of_its_own_it_makes_just_what_vllm_makes():
    assert SamplingParams(max_tokens=3) == vllm.SamplingParams(max_tokens=3)
    given = vllm.SamplingParams(extra_args={"a": 1})
    assert SamplingParams(extra_args={"a": 1}) == given


def test_other_attributes_are_vllms():
    assert SamplingParams.from_optional is vllm.SamplingParams.from_optional
    assert SamplingParams.from_optional(max_tokens=5).max_tokens == 5
    assert "from_optional" in dir(SamplingParams)
    with pytest.raises(AttributeError):
        _ = SamplingParams.nothing_of_the_kind


def test_its_signature_has_vllms_arguments_and_its_own():
    names = set(inspect.signature(SamplingParams).parameters)
    assert names == {*inspect.signature(vllm.SamplingParams).parameters, *OWN}
    for name in OWN:
        assert f"    {name}: " in SamplingParams.__doc__


def test_vllms_own_errors_are_vllms():
    with pytest.raises(TypeError, match="qqqqqq"):
        SamplingParams(qqqqqq=1)
    for make in (vllm.SamplingParams, SamplingParams):
        with pytest.raises(Exception, match="temperature must be non-negative") as caught:
            make(temperature=-1)
        assert not isinstance(caught.value, SpecError)


def test_other_extra_args_are_kept_and_not_changed():
    extra = {"a": [1]}
    params = SamplingParams(extra_args=extra, steering_vectors={1: V})
    assert extra == {"a": [1]}
    assert params.extra_args["a"] == [1]
    assert plan_of(params) is not None


def test_the_tiers_add_up_in_order():
    params = SamplingParams(
        steering_module_ref=("happy", 1.5),
        steering_vectors={"post_block": {15: {"vector": V, "scale": 2.0}}},
        prefill_steering_vectors={"post_attn": {3: W}},
        decode_steering_vectors={"pre_attn": {15: V, 16: W}},
        edits=Steer(W, 0),
    )
    assert plan_of(params) == Plan(
        edits=(
            Steer(Named("happy", 1.5)),
            Steer(V, 15, 2.0, "resid_post"),
            Steer(W, 3, 1.0, "resid_mid", phase="prompt"),
            Steer(V, 15, 1.0, "resid_pre", phase="generated"),
            Steer(W, 16, 1.0, "resid_pre", phase="generated"),
            Steer(W, 0),
        )
    )


def test_every_form_of_a_vector_and_of_a_name_says_the_same():
    forms = (V, np.asarray(V), torch.tensor(V, dtype=torch.bfloat16), Vector.parse(V))
    for vector in (*forms, {"vector": V}):
        for hooks in ("post_block", "resid_post"):
            params = SamplingParams(steering_vectors={hooks: {"15": vector}})
            assert plan_of(params) == Plan(edits=(Steer(V, 15, site="resid_post"),))
    for ref in ("happy", ("happy", 1), {"name": "happy"}, Named("happy")):
        assert plan_of(SamplingParams(steering_module_ref=ref)) == Plan(edits=(Steer("happy"),))


def test_captures_and_probes_are_taken_in_every_form():
    wanted = Capture(12, "resid_post", "last_prompt")
    consumer = {"memory": {"hooks": {"post_block": [12]}, "positions": "last_prompt"}}
    for capture in (wanted, [{"layers": 12, "positions": "last_prompt"}], consumer):
        assert plan_of(SamplingParams(capture=capture)) == Plan(captures=(wanted,))
    plan = plan_of(SamplingParams(probes={"name": "truth", "direction": V, "layer": 3}))
    assert [each.name for each in plan.probes] == ["truth"]


def test_a_consumers_hooks_are_a_capture_each_at_its_positions():
    for theirs, ours in (
        ("all_prompt", "prompt"),
        ("all_generated", "generated"),
        ("all", "all"),
        ([1, 2], [1, 2]),
    ):
        asked = {"hooks": {"pre_attn": [0], "post_attn": "all"}, "positions": theirs}
        assert plan_of(SamplingParams(capture={"memory": asked})) == Plan(
            captures=(Capture(0, "resid_pre", ours), Capture("all", "resid_mid", ours))
        )


def test_what_is_wrong_is_refused_when_it_is_made_with_its_path():
    refused(
        lambda given: SamplingParams(**given),
        (
            {"decode_steering_vectors": {"pre_attn": {15: {"vector": [1.0, None]}}}},
            'decode_steering_vectors["pre_attn"][15].vector[1]',
            "expected a number",
        ),
        (
            {"prefill_steering_vectors": {"pre_attn": {15: {"vector": V, "scale": None}}}},
            'prefill_steering_vectors["pre_attn"][15].scale',
            "expected a number",
        ),
        ({"steering_vectors": V}, "steering_vectors", "expected {layer: vector}"),
        ({"steering_vectors": {}}, "steering_vectors", "empty"),
        ({"steering_module_ref": 3}, "steering_module_ref", r"\(name, scale\)"),
        ({"steering_module_ref": ("a b", 1)}, "steering_module_ref.name", "A-Z"),
        ({"steering_module_ref": ("a", True)}, "steering_module_ref.scale", "number"),
        ({"edits": [{"op": "stear"}]}, "edits[0].op", "did you mean `steer`"),
        ({"capture": {"layers": "al"}}, "capture.layers", "expected"),
        (
            {"steering_vectors": {1: V}, "extra_args": {KEY: {"edits": []}}},
            "extra_args['midstream']",
            "give it in one place",
        ),
        (
            {"capture": {"memory": {"hooks": {"post_block": [1, 1]}}}},
            'capture["memory"].hooks["post_block"][1]',
            "listed twice",
        ),
    )


@pytest.fixture
def params():
    return SamplingParams(
        max_tokens=3,
        steering_vectors={"post_block": {15: {"vector": V, "scale": 2.0}}},
        decode_steering_vectors={"pre_attn": {15: V}},
        steering_module_ref="happy",
        capture={"memory": {"hooks": {"post_block": [12]}, "positions": "last_prompt"}},
    )


def through_msgpack(params):
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    return MsgpackDecoder(vllm.SamplingParams).decode(MsgpackEncoder().encode(params))


def test_the_plan_survives_every_way_of_copying_and_its_use(params):
    plan, before = plan_of(params), pickle.dumps(params)
    for made in (
        copy.copy(params),
        copy.deepcopy(params),
        params.clone(),
        pickle.loads(before),
        through_msgpack(params),
    ):
        assert type(made) is vllm.SamplingParams
        assert (plan_of(made), made.max_tokens) == (plan, 3)
    assert pickle.dumps(params) == before


def test_it_prints_without_the_numbers(params):
    assert "'midstream': <midstream plan: 1 capture, 3 edits>" in repr(params)
    assert "f32" not in repr(params)


def test_the_arguments_that_type_checkers_know_are_those_of_the_installed_vllm():
    path = Path(__file__).parents[3] / "scripts" / "vllm_arguments.py"
    spec = importlib.util.spec_from_file_location("vllm_arguments", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = script.FILE.read_text()
    if f'VERSION = "{vllm.__version__}"' not in written:
        pytest.skip("the file is of another release of vLLM")
    assert script.text() == written
    for name in ("max_tokens", "enforce_eager", "use_tqdm", "chat_template_kwargs"):
        assert f'"{name}": Any' in written
