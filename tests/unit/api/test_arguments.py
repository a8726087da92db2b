"""What `LLM.generate` makes of its arguments, without an engine."""

import copy
from types import SimpleNamespace

import pytest
import torch
from support.refusals import refused
from vllm import SamplingParams
from vllm.outputs import CompletionOutput

from midstream import Ablate, Capture, Probe, Steer
from midstream.api.arguments import CallArguments, PromptArguments, check_names, per_prompt
from midstream.api.default_capture import DefaultCapture
from midstream.api.offline_call import OfflineCall
from midstream.errors import ConfigError, SpecError
from midstream.plan import Plan, Positions
from midstream.plan.shape import ModelShape
from midstream.results.activations import Activations
from midstream.results.receipt import Receipt

READ = Capture(layers=[1])
OTHER = Capture(layers=[2], positions="prompt")
ADD = Steer([1.0, 2.0], layer=1)
TAKE = Steer([1.0, 2.0], layer=2, scale=-1)
DROP = Ablate([[1.0, 2.0]], layer=1)
ASK = Probe([1.0, 2.0], layer=1)


def test_one_value_or_a_list_of_one_edit_is_for_all_prompts():
    for name in ("capture", "steer", "edits", "probes"):
        for value in (None, READ, ADD, {"layers": [1]}):
            found = per_prompt(name, value, 3)
            assert len(found) == 3
            assert all(one is value for one in found)
        if name == "capture":
            continue
        for value in ([ADD], (TAKE,), [{"layer": 1}], []):
            found = per_prompt(name, value, 2)
            assert len(found) == 2
            assert all(one is value for one in found)
        for value in ([ADD], (ADD, TAKE, ADD), []):
            assert per_prompt(name, value, 1) == [value]
        for count in (2, 4):
            problem = rf"^{name}: a flat list of 3 (edits|probes) for {count} prompts .* give one l"
            refused(
                lambda value, given=(name, count): per_prompt(given[0], value, given[1]),
                ([ADD, TAKE, ADD], problem),
            )


def test_a_list_of_captures_or_of_lists_is_one_entry_per_prompt():
    for name, value in (
        *(("steer", value) for value in ([[ADD], None], ([ADD, TAKE], [TAKE]), [None, None])),
        *(("capture", value) for value in ([READ, OTHER], (None, [READ, OTHER]), [READ, None])),
    ):
        assert per_prompt(name, value, 2) == list(value)
    refused(
        lambda given: per_prompt(*given),
        (("capture", [READ, OTHER], 1), "^capture: 2 entries for 1 prompt"),
        (("capture", [READ], 2), "^capture: 1 entries for 2 prompt"),
        (("capture", [], 1), "^capture: 0 entries for 1 prompt"),
        (("steer", [[ADD]], 2), "^steer: 1 entries for 2 prompt"),
        (("steer", [None, None, None], 2), "^steer: 3 entries for 2 prompt"),
    )


def test_an_argument_of_another_tool_is_rejected_with_what_to_write():
    instead = {
        "hooks": "edits=.* to change activations, capture=.* to read them",
        "fwd_hooks": "edits=",
        "capure": "capture=",
        "steering": "steer=Steer",
        "steer_vector_request": "steer=Steer",
        "probe": "probes=",
        "layers": "capture=Capture",
    }
    refused(
        lambda name: check_names("f", [name], lambda use_tqdm: None),
        *((name, rf"^{name}: f\(\) .* did you mean .*{words}") for name, words in instead.items()),
    )
    check_names("f", ["use_tqdm", "nonsense", "hooks"], lambda use_tqdm, hooks: None)


def test_a_default_capture_of_a_layer_that_the_model_lacks_is_rejected():
    shape = ModelShape(30, 8, [("resid_post", layer) for layer in range(20)])
    parse = DefaultCapture.parse
    parse([19, -30], True, True, False, False).check(shape)
    for layer, problem in ((99, "layer 99 is out of range: .* 30 layers"), (25, "is not tapped")):
        with pytest.raises(SpecError, match=rf"^layers: .*{problem}"):
            parse([layer], True, True, False, False).check(shape)


def test_dicts_under_steer_need_not_say_that_they_steer():
    given = {"layer": 1, "vector": [1.0, 2.0]}
    assert (
        PromptArguments(steer=given).plan()
        == PromptArguments(steer=[given]).plan()
        == PromptArguments(steer=ADD).plan()
    )
    assert given == {"layer": 1, "vector": [1.0, 2.0]}, "the caller's dict was changed"
    with pytest.raises(SpecError, match=r"^edits\.?.*missing field `op`"):
        PromptArguments(edits=given).plan()


def test_the_edits_of_steer_come_before_those_of_edits():
    plan = PromptArguments(capture=READ, steer=[ADD, TAKE], edits=DROP, probes=[ASK]).plan()
    assert plan == Plan(captures=(READ,), edits=(ADD, TAKE, DROP), probes=(ASK,))
    assert PromptArguments(steer=ADD, edits=[DROP, TAKE]).plan().edits == (ADD, DROP, TAKE)
    assert PromptArguments(steer=[DROP]).plan().edits == (DROP,)
    assert PromptArguments().plan() is None


def test_calls_with_the_very_same_parts_share_a_plan_and_those_with_equal_ones_need_not():
    shared = PromptArguments(capture=READ, edits=DROP).plan()
    assert PromptArguments(capture=READ, edits=DROP).plan() is shared
    assert PromptArguments(capture=READ, edits=ADD).plan() != shared
    assert PromptArguments(capture=READ, steer=DROP).plan() == shared


def test_a_dict_or_list_that_is_changed_between_two_calls_gives_another_plan():
    given, several = {"layers": [1]}, [DROP]
    first = PromptArguments(capture=given, edits=several).plan()
    given["layers"] = [2]
    several.append(ADD)
    second = PromptArguments(capture=given, edits=several).plan()
    assert first == Plan(captures=(Capture([1]),), edits=(DROP,))
    assert second == Plan(captures=(Capture([2]),), edits=(DROP, ADD))


def test_a_call_knows_whether_anything_was_asked():
    assert CallArguments().nothing
    for name in ("capture", "steer", "edits", "probes"):
        assert not CallArguments(**{name: []}).nothing


def test_each_argument_is_dealt_out_by_itself():
    first, second = CallArguments(READ, [[ADD], None], [None, [DROP]], ASK).per_prompt(2)
    assert first.plan() == Plan(captures=(READ,), edits=(ADD,), probes=(ASK,))
    assert second.plan() == Plan(captures=(READ,), edits=(DROP,), probes=(ASK,))


def test_the_path_of_an_error_is_as_the_caller_would_write_it():
    for path, given, nth, wanted in (
        ("edits.layer", {"steer": {}}, 0, "steer.layer"),
        ("edits[0].layer", {"steer": {}}, 0, "steer.layer"),
        ("edits[0].layer", {"steer": [None, None, None, [{}]]}, 3, "steer[3][0].layer"),
        ("edits.layer", {"steer": [None, {}]}, 1, "steer[1].layer"),
        ("edits[0].vector[3]", {"steer": [None, {}]}, 1, "steer[1].vector[3]"),
        ("edits[2].positions[1]", {"steer": [[{}, {}, {}]]}, 0, "steer[0][2].positions[1]"),
        ("edits", {"steer": [[]]}, 0, "steer[0]"),
        ("edits", {"steer": []}, 0, "steer"),
        ("capture.layers[2]", {"capture": {}}, 0, "capture.layers[2]"),
        ("capture.layers", {"capture": [None, {}]}, 1, "capture[1].layers"),
        ("capture[1].sites", {"capture": [None, [{}, {}]]}, 1, "capture[1][1].sites"),
        ("edits[0].layer", {"capture": {}}, 0, "edits[0].layer"),
        ("edits[0].layer", {"edits": [{}]}, 0, "edits[0].layer"),
        ("edits[1].layer", {"edits": [None, [{}, {}]]}, 1, "edits[1][1].layer"),
        ("edits[0].layer", {"steer": {}, "edits": {}}, 0, "steer.layer"),
        ("edits[1].layer", {"steer": {}, "edits": {}}, 0, "edits.layer"),
        ("edits[3].layer", {"steer": [None, [{}, {}]], "edits": [{}, {}]}, 1, "edits[1].layer"),
        ("edits[1].layer", {"steer": [None, [{}, {}]], "edits": [{}, {}]}, 0, "edits[1].layer"),
        ("edits.layer", {"steer": [None, {}], "edits": {}}, 0, "edits.layer"),
        ("edits[0].edit.layer", {"edits": {}}, 0, "edits.edit.layer"),
        ("probes[1].direction", {"probes": [{}, {}]}, 0, "probes[1].direction"),
        ("probes[0].layer", {"probes": [None, {}]}, 1, "probes[1].layer"),
        ("steering[0].layer", {"steer": {}}, 0, "steering[0].layer"),
        ("prompt", {"capture": {}}, 0, "prompt"),
        ("", {"capture": {}, "steer": {}}, 0, ""),
        ("extra_args['midstream'].edits", {"steer": {}}, 0, "extra_args['midstream'].edits"),
    ):
        found = CallArguments(**given).explain(SpecError(path, "is wrong"), nth)
        assert found.path == wanted, path
        assert found.problem.startswith("is wrong")


def test_what_is_wrong_with_a_value_that_is_for_all_says_for_which_prompt():
    found = CallArguments(steer={}, edits=[[{}], None]).explain(
        SpecError("edits[0].layer", "bad"), 1
    )
    assert str(found) == "steer.layer: bad (prompt 1)"
    found = CallArguments(edits=[[{}], None]).explain(SpecError("edits[0].layer", "bad"), 0)
    assert str(found) == "edits[0][0].layer: bad"


def test_a_malformed_field_is_refused_by_the_path_to_it():
    refused(
        lambda asked: plans(2, SamplingParams(), **asked),
        ({"steer": [None, [ADD, {"vector": [1], "layer": "x"}]]}, r"^steer\[1\]\[1\]\.layer: "),
        ({"steer": [None, {"vector": [1, "x"], "layer": 0}]}, r"^steer\[1\]\.vector\[1\]: "),
        ({"steer": {"vector": [1], "layer": 1.5}}, r"^steer\.layer: "),
        ({"steer": [[], None]}, r"^steer\[0\]: the list is empty"),
        ({"steer": []}, r"^steer: the list is empty"),
        ({"capture": [None, {"layers": [0, 0]}]}, r"^capture\[1\]\.layers\[1\]: "),
        ({"capture": [None, [READ, READ]]}, r"^capture\[1\]\[1\]: duplicate of capture\[1\]\[0\]$"),
        ({"probes": [None, [ASK, ASK]]}, r"^probes\[1\]\[1\]\.name: .* of probes\[1\]\[0\]; use"),
        ({"capture": {"layers": "some"}}, r"^capture\.layers: "),
        ({"capture": [3, 3]}, r"^capture\.layers\[1\]: layer 3 is listed twice"),
        ({"capture": ["al", None]}, r"^capture\[0\]\.sites: unknown site 'al'"),
        ({"capture": [1.5, None]}, r"^capture\[0\]: expected a `Capture`.* or short: True, layers"),
        ({"edits": [None, {"op": "scale", "factor": "x", "layer": 0}]}, r"^edits\[1\]\.factor: "),
        ({"edits": {"op": "scal", "factor": 1, "layer": 0}}, r"^edits\.op: .*scale"),
        ({"steer": ADD, "edits": {"op": "scale", "factor": "x", "layer": 0}}, r"^edits\.factor: "),
        (
            {"steer": [None, ADD], "edits": {"op": "scale", "factor": "x", "layer": 0}},
            r"^edits\.factor: .* \(prompt 0\)",
        ),
    )


def plans(count, params, capture=None, steer=None, edits=None, probes=None, default=None):
    """The plans of a call of an LLM without an engine."""
    llm = SimpleNamespace(get_default_sampling_params=SamplingParams)
    front = SimpleNamespace(steering=SimpleNamespace(epoch=0))
    asked = CallArguments(capture, steer, edits, probes)
    made = OfflineCall(llm, front, default, asked, [None] * count).with_plans(params)
    return made, [(one.extra_args or {}).get("midstream") for one in made]


def test_each_prompt_gets_its_own_plan():
    _, found = plans(3, SamplingParams(), [READ, None, [READ, OTHER]], [[ADD], None, [TAKE]])
    assert found == [
        Plan(captures=(READ,), edits=(ADD,)),
        None,
        Plan(captures=(READ, OTHER), edits=(TAKE,)),
    ]


def test_the_callers_sampling_params_are_never_changed():
    params = SamplingParams(max_tokens=3, extra_args={"theirs": [1]})
    extra = params.extra_args
    before = copy.deepcopy(params)
    made, found = plans(2, params, READ, [ADD])
    assert params == before
    assert params.extra_args is extra == {"theirs": [1]}
    assert all(one is not params for one in made)
    assert all(one.extra_args["theirs"] == [1] for one in made)
    assert found[0] == Plan(captures=(READ,), edits=(ADD,))


def test_params_given_one_each_stay_with_their_prompts():
    given = [SamplingParams(max_tokens=n + 1) for n in range(3)]
    made, found = plans(3, given, [None, READ, None])
    assert [one.max_tokens for one in made] == [1, 2, 3]
    assert found == [None, Plan(captures=(READ,)), None]
    with pytest.raises(SpecError, match="^sampling_params: 3 for 2 prompts; give one, or one each"):
        plans(2, given)


def test_what_is_shared_is_parsed_once():
    made, _ = plans(1000, SamplingParams(), READ, [ADD], DROP, (ASK,))
    assert len({id(one.extra_args["midstream"]) for one in made}) == 1


def test_a_plan_may_ride_in_already_but_not_beside_arguments():
    carried = {"capture": {"layers": [1]}}
    params = SamplingParams(extra_args={"midstream": carried})
    assert plans(2, params)[1] == [Plan(captures=(READ,))] * 2
    with pytest.raises(SpecError, match=r"extra_args\['midstream'\]: there is a plan here and in"):
        plans(2, params, READ)
    for more in ({"steer": ADD}, {"edits": DROP}, {"probes": ASK}):
        with pytest.raises(SpecError, match="give it in one place"):
            plans(2, params, **more)


def default(
    layers="all", include_prefill=False, include_decode=True, last_prefill=False, last=False
):
    return DefaultCapture.parse(layers, include_prefill, include_decode, last_prefill, last)


def test_the_default_capture_asks_for_the_rows_that_its_switches_say():
    for given, positions in (
        ({}, ["generated"]),
        ({"include_prefill": True}, ["prompt", "generated"]),
        ({"last_prefill": True}, ["last_prompt", "generated"]),
        ({"last_prefill": True, "include_prefill": True}, ["last_prompt", "generated"]),
        ({"include_prefill": True, "include_decode": False}, ["prompt"]),
        ({"include_decode": False, "last": True}, ["generated"]),
    ):
        plan = default([1, -1], **given).join(None, 16)
        assert plan == Plan(captures=(Capture([1, -1], "resid_post", Positions.parse(positions)),))


def test_a_default_capture_of_nothing_is_refused():
    with pytest.raises(
        ConfigError, match="layers: these settings capture no positions; set include_decode"
    ):
        default(include_decode=False)
    with pytest.raises(SpecError, match="layers|layer"):
        default([0, 0])


def test_the_default_capture_joins_a_requests_own_plan():
    own = Plan(captures=(READ,), edits=(ADD,))
    joined = default([1]).join(own, 16)
    assert joined.edits == (ADD,)
    assert joined.captures == (READ, Capture([1], "resid_post", Positions.parse(["generated"])))
    assert default([1]).join(joined, 16) == joined, "the same capture is there once"
    assert own == Plan(captures=(READ,), edits=(ADD,))


def test_with_one_token_to_generate_there_is_no_generated_row_to_ask_for():
    assert default([1]).join(None, 1) is None
    assert default([1], include_prefill=True).join(None, 1).captures[0].positions == (
        Positions.parse(["prompt"])
    )
    assert default([1]).join(Plan(captures=(READ,)), 1) == Plan(captures=(READ,))


def completion(index=0, activations=None, prompt_tokens=3):
    """vLLM's own class, with what midstream puts on it."""
    made = CompletionOutput(index, "", [7, 8, 9], None, None)
    made.activations = activations
    made.receipt = Receipt("x", prompt_tokens, 3, (), None)
    return made


def output(*completions, prompt=3):
    ids = None if prompt is None else list(range(prompt))
    return SimpleNamespace(prompt_token_ids=ids, outputs=list(completions))


def activations(**by_layer):
    """`_1=[positions]`; each row tells its layer and position."""
    taps = {("resid_post", int(name[1:])): found for name, found in by_layer.items()}
    return Activations(
        {
            tap: torch.tensor([[float(tap[1]), p] for p in found]).view(-1, 2)
            for tap, found in taps.items()
        },
        {tap: torch.tensor(found, dtype=torch.int64) for tap, found in taps.items()},
        torch.arange(10),
    )


def positions(found):
    return {layer: rows[:, 1].tolist() for layer, rows in found.items()}


def test_an_output_has_its_rows_by_layer_as_plain_dicts():
    for given, decode, prefill in (
        ({}, [3, 4], None),
        ({"last": True}, [4], None),
        ({"include_prefill": True}, [3, 4], [0, 1, 2]),
        ({"last_prefill": True}, [3, 4], [2]),
        ({"include_prefill": True, "include_decode": False}, None, [0, 1, 2]),
        ({"last_prefill": True, "last": True}, [4], [2]),
    ):
        found = output(completion(activations=activations(_1=range(5), _15=range(5))))
        default([1, 15], **given).attach(found, 30)
        for name, wanted in (("hidden_states", decode), ("prefill_hidden_states", prefill)):
            every = {} if wanted is None else {1: wanted, 15: wanted}
            assert positions(getattr(found, name)) == every
            assert getattr(found, name) is getattr(found.outputs[0], name)


def test_without_generated_rows_the_layers_are_there_and_empty():
    found = output(completion(activations=activations(_1=range(3))))
    default([1], include_prefill=True, last=True).attach(found, 30)
    assert positions(found.hidden_states) == {1: []}
    assert positions(found.prefill_hidden_states) == {1: [0, 1, 2]}


def test_several_completions_have_their_rows_each():
    every = [completion(n, activations(_1=range(3 + n))) for n in range(3)]
    found = output(*every)
    default([1]).attach(found, 30)
    assert [positions(one.hidden_states)[1] for one in every] == [[], [3], [3, 4]]
    assert not hasattr(found, "hidden_states")


def test_a_request_that_asked_for_nothing_has_empty_dicts():
    # max_tokens=1 and only generated rows: nothing rides along, and nothing is put on it.
    plain = CompletionOutput(0, "", [7], None, None)
    found = output(plain)
    default([1]).attach(found, 30)
    assert found.hidden_states == {}
    assert found.prefill_hidden_states == {}


def test_a_prompt_of_embeddings_is_as_long_as_its_receipt_says():
    found = output(completion(activations=activations(_1=range(5))), prompt=None)
    default([1], include_prefill=True).attach(found, 30)
    assert positions(found.prefill_hidden_states) == {1: [0, 1, 2]}
    assert positions(found.hidden_states) == {1: [3, 4]}


def test_layers_that_only_the_requests_own_capture_named_are_not_among_the_default_ones():
    found = output(completion(activations=activations(_1=range(3, 5), _2=[4])))
    default([1]).attach(found, 30)
    assert positions(found.hidden_states) == {1: [3, 4]}
