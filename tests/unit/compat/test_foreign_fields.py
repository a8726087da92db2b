"""A field that asks for something is read, or rejected with what to write instead."""

import ast
import json
import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.misspelling import ASKED, misspelt
from support.refusals import refused

import midstream
from midstream.compat.foreign_fields import FOREIGN, OWN, check_body, check_extra_args, names_in
from midstream.errors import SpecError
from midstream.plan import Capture, Steer
from midstream.plan.operations.plain import PLAIN
from midstream.server.request_field import RETURNS
from midstream.sites import NAMES

PLACES = ("extra_body", "extra_args", "sampling_params", "vllm_xargs")
KNOWN = frozenset({"prompt", "seed", "stop", "user", "vllm_xargs"})


def rejected_body(body, path):
    """Check that a body is found by its keys, and rejected at a path."""
    assert names_in(json.dumps(body).encode(), KNOWN)
    with pytest.raises(SpecError) as caught:
        check_body(body, KNOWN)
    assert caught.value.path == path
    return caught.value.problem


def test_a_field_of_another_tool_is_rejected_with_what_to_write():
    for name, field in FOREIGN.items():
        for problem in (
            rejected_body({"prompt": "a", name: [1]}, name),
            rejected_body({"vllm_xargs": {name: "[1]"}}, f"vllm_xargs.{name}"),
        ):
            assert field.tool in problem
            assert field.instead in problem
        refused(check_extra_args, ({"other": 1, name: [1]}, f"extra_args[{name!r}]", field.tool))


# What stands for a value in a recommended call.
VALUES = {
    "vector": [1.0, 0.5], "row": [1.0, 0.5], "direction": [1.0, 0.5], "edit": Steer([1.0], layer=1),
    "function": test_a_field_of_another_tool_is_rejected_with_what_to_write,
    "layer": 3, "scale": 2.0, "low": 0.0, "high": 1.0, "threshold": 0.5,
}  # fmt: skip
DENIALS = re.compile(r"\bno (site|kind|operation)|\bcannot|unsupported|not supported|\black")


def recommended(text):
    """The calls in a text, as (name, positional values, values by name)."""
    for match in re.finditer(r"\b[A-Z]\w*\(", text):
        depth = 0
        for end in range(match.end() - 1, len(text)):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            if not depth:
                break
        source = text[match.start() : end + 1].replace("{…}", "{7: 2.0}").replace("[…]", "[3]")
        call = ast.parse(source.replace("…", "..."), mode="eval").body
        named = {one.arg: value(one.value, one.arg) for one in call.keywords}
        yield call.func.id, [value(one, "") for one in call.args], named


def value(node, name):
    if isinstance(node, ast.Name):
        return VALUES[node.id]
    found = ast.literal_eval(node)
    return VALUES[name] if found is ... else found


def test_every_call_that_is_recommended_can_be_written_so():
    """A renamed class, parameter or site makes a recommendation out of date."""
    calls = {name: list(recommended(field.instead)) for name, field in FOREIGN.items()}
    for name, found in calls.items():
        for kind, values, named in found:
            assert kind in midstream.__all__, name
            getattr(midstream, kind)(*values, **named)
    without = {name for name, found in calls.items() if not found}
    assert without == {"activations_transport", "capture_wait"}
    (capture,) = calls["output_qk"]
    assert set(capture[2]["sites"]) == {"q", "k", "rot_q", "rot_k"} <= set(NAMES)
    assert [kind for kind, *_ in calls["output_attentions"]] == ["Attention"]
    assert [kind for kind, *_ in calls["sae_full_reconstruction_specs"]] == ["Reconstruct"]
    for when, phase in (("prefill", "prompt"), ("decode", "generated")):
        for what in ("vectors", "clamps"):
            ((_, _, named),) = calls[f"{when}_steering_{what}"]
            assert named["phase"] == phase
    for operation in PLAIN:
        assert operation in FOREIGN["apply_hooks"].instead
    for returned in RETURNS:
        assert returned in FOREIGN["activations_transport"].instead


def test_nothing_is_denied_and_every_field_that_is_named_is_one():
    for name, field in FOREIGN.items():
        assert not DENIALS.search(field.instead), name
        named = set(re.findall(r"`(\w+)`", field.instead))
        assert named <= {*OWN, "midstream", "activations"}, name


def test_a_field_that_vllm_defines_is_vllms_and_null_asks_for_nothing():
    for name in (*FOREIGN, *OWN):
        body = {"prompt": "a", name: ASKED.get(name, 1)}
        assert not names_in(json.dumps({"prompt": "a", name: 1}).encode(), {"prompt", name})
        check_body(body, {"prompt", name})
        check_body({"prompt": "a", name: None, "vllm_xargs": {name: None}}, KNOWN)
        check_extra_args({name: None})


def test_a_field_of_ours_at_a_wrong_level_is_rejected_with_the_right_place():
    for name in OWN:
        problem = rejected_body({"prompt": "a", name: ASKED[name]}, name)
        assert f'{{"midstream": {{"{name}": …}}}}' in problem
        for outer in PLACES:
            rejected_body({"prompt": "a", outer: {name: ASKED[name]}}, f"{outer}.{name}")
        words = rf"midstream\.SamplingParams\({name}=…\)"
        refused(check_extra_args, ({name: ASKED[name]}, f"extra_args[{name!r}]", words))
    for outer in PLACES[:-1]:
        problem = rejected_body({outer: {"midstream": ASKED}}, f"{outer}.midstream")
        assert "top level" in problem


@given(name=misspelt("midstream"), value=st.sampled_from([*ASKED.values(), ASKED, "{}", 1]))
@example(name="midstreem", value=ASKED)
@example(name="Midstream", value=ASKED)
@example(name="mid-stream", value=ASKED)
def test_midstream_misspelt_is_rejected_everywhere(name, value):
    assume(name not in ("midstream", "mainstream"))
    for problem in rejected_everywhere(name, value):
        assert "did you mean `midstream`?" in problem
    refused(check_extra_args, ({name: value}, "did you mean `midstream`"))


@given(st.sampled_from(OWN).flatmap(lambda own: st.tuples(st.just(own), misspelt(own))))
@example(("edits", "edit"))
@example(("capture", "captures"))
@example(("probes", "probe"))
def test_a_field_of_ours_misspelt_and_misplaced_is_rejected_everywhere(pair):
    own, name = pair
    assume(len(name) >= 3 and name not in KNOWN)
    assert list(rejected_everywhere(name, ASKED[own]))
    refused(check_extra_args, ({name: ASKED[own]}, ""))


def test_python_values_are_recognized_in_extra_args():
    values = {"captures": Capture([1]), "edit": [Steer([1.0], layer=1)]}
    refused(check_extra_args, *(({name: values[name]}, "did you mean") for name in values))


def rejected_everywhere(name, value):
    """What is said of a field at each level of a body."""
    for place in ("", *PLACES):
        body = {"prompt": "a", place: {name: value}} if place else {"prompt": "a", name: value}
        yield rejected_body(body, f"{place}.{name}" if place else name)


def test_a_misspelt_field_that_is_empty_is_rejected_too():
    owns = {"edit": "edits", "captures": "capture", "Probe": "probes", "eidts": "edits"}
    owns |= {"steering": None, "controllers": "controller", "capturr": "capture"}
    for name, own in owns.items():
        for empty in ([], {}, ()):
            for problem in rejected_everywhere(name, empty):
                assert own is None or f"did you mean `{own}`?" in problem
            refused(check_extra_args, ({name: empty}, re.escape(f"extra_args[{name!r}]")))


OTHERS = (
    {"credits": []}, {"units": []}, {"steps": []}, {"hits": {}}, {"props": {}},
    {"mainstream": True}, {"stream": True}, {"upstream": "x"}, {"downstream": {"layers": 1}},
    {"step": 3}, {"steps": [1, 2]}, {"probs": True}, {"props": {"a": 1}}, {"edited": 1},
    {"culture": "nl"}, {"rapture": 1}, {"audit": {"id": 3}}, {"user": "x"}, {"seed": 3},
    {"metadata": {"midstream": 1, "edits": [{"layer": 3}]}},
    {"messages": [{"role": "user", "content": '"midstreem": "edits": "steering_vectors": '}]},
    {"tools": [{"function": {"parameters": {"properties": {"midstreams": {"layer": 1}}}}}]},
    {"chat_template_kwargs": {"edit": 1}}, {"kv_transfer_params": {"steer": 1}},
)  # fmt: skip


def test_fields_of_others_pass():
    for fields in OTHERS:
        check_body({"prompt": "a", **fields}, KNOWN)
        check_extra_args(fields)
    for depth in (5, 900):
        check_body({"other": json.loads("[" * depth + "]" * depth), "prompt": "a"}, KNOWN)


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "max_tokens", "temperature", "stream", "stop", "n", "user"]),
        st.text() | st.integers() | st.lists(st.text(), max_size=3),
    )
)
def test_bodies_with_vllms_fields_alone_are_not_parsed(body):
    if "\\" not in json.dumps(body):
        assert not names_in(json.dumps(body).encode(), frozenset(body))


def test_very_many_fields_are_rejected_before_they_are_compared():
    many = {f"steer{n}": 1 for n in range(5000)}
    assert names_in(json.dumps(many).encode(), ())
    with pytest.raises(SpecError, match="at most 4096 fields"):
        check_body(many, ())


def test_a_key_anywhere_in_a_long_body_is_found():
    head = b'{"prompt": "'
    for length in range((1 << 20) - 60, (1 << 20) + 60, 7):
        body = head + b"x" * (length - len(head)) + b'", "midstreem"  : {}}'
        assert names_in(body, KNOWN), length
        assert not names_in(body.replace(b"midstreem", b"something"), KNOWN), length


@pytest.mark.parametrize("spaces", [0, 5000, 3 << 20])
def test_a_key_is_found_however_far_its_colon_is(spaces):
    head = b'{"prompt": "'
    key = b'", "midstreem"' + b" " * spaces + b": {}}"
    for length in range((1 << 20) - 100, (1 << 20) + 60, 9 if not spaces else 27):
        assert names_in(head + b"x" * (length - len(head)) + key, KNOWN)
        # A colon before it, in the text or in the key.
        assert names_in(head + b"x" * (length - 20 - len(head)) + b":" * 20 + key, KNOWN)
        assert names_in(head + b"x" * (length - len(head)) + key.replace(b"ee", b":"), KNOWN)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_json_break_nothing(body):
    names_in(body, ())
