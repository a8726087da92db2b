"""A field that asks for something is read, or rejected with what to write instead."""

from __future__ import annotations

import ast
import json
import re

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.misspelling import ASKED, misspelt

import midstream
from midstream.compat.foreign_fields import (
    FOREIGN,
    OWN,
    check_body,
    check_extra_args,
    names_in,
)
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


@pytest.mark.parametrize("name", FOREIGN)
def test_a_field_of_another_tool_is_rejected_with_what_to_write(name):
    field = FOREIGN[name]
    for problem in (
        rejected_body({"prompt": "a", name: [1]}, name),
        rejected_body({"vllm_xargs": {name: "[1]"}}, f"vllm_xargs.{name}"),
    ):
        assert field.tool in problem
        assert field.instead in problem
    with pytest.raises(SpecError, match=field.tool) as caught:
        check_extra_args({"other": 1, name: [1]})
    assert caught.value.path == f"extra_args[{name!r}]"


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


@pytest.mark.parametrize("name", [*FOREIGN, *OWN])
def test_a_field_that_vllm_defines_is_vllms(name):
    body = {"prompt": "a", name: ASKED.get(name, 1)}
    assert not names_in(json.dumps({"prompt": "a", name: 1}).encode(), {"prompt", name})
    check_body(body, {"prompt", name})


@pytest.mark.parametrize("name", [*FOREIGN, *OWN])
def test_null_asks_for_nothing(name):
    check_body({"prompt": "a", name: None, "vllm_xargs": {name: None}}, KNOWN)
    check_extra_args({name: None})


@pytest.mark.parametrize("name", OWN)
def test_a_field_of_ours_at_a_wrong_level_is_rejected_with_the_right_place(name):
    value = ASKED[name]
    problem = rejected_body({"prompt": "a", name: value}, name)
    assert f'{{"midstream": {{"{name}": …}}}}' in problem
    for outer in PLACES:
        rejected_body({"prompt": "a", outer: {name: value}}, f"{outer}.{name}")
    with pytest.raises(SpecError, match=rf"midstream\.SamplingParams\({name}=…\)") as caught:
        check_extra_args({name: value})
    assert caught.value.path == f"extra_args[{name!r}]"


@pytest.mark.parametrize("outer", PLACES[:-1])
def test_the_field_midstream_in_a_dict_that_vllm_ignores_is_rejected(outer):
    problem = rejected_body({outer: {"midstream": ASKED}}, f"{outer}.midstream")
    assert "top level" in problem


@given(name=misspelt("midstream"), value=st.sampled_from([*ASKED.values(), ASKED, "{}", 1]))
@example(name="midstreem", value=ASKED)
@example(name="Midstream", value=ASKED)
@example(name="mid-stream", value=ASKED)
def test_midstream_misspelt_is_rejected_everywhere(name, value):
    assume(name not in ("midstream", "mainstream"))
    for place in ("", *PLACES):
        body = {"prompt": "a", place: {name: value}} if place else {"prompt": "a", name: value}
        path = f"{place}.{name}" if place else name
        assert "did you mean `midstream`?" in rejected_body(body, path)
    with pytest.raises(SpecError, match="did you mean `midstream`"):
        check_extra_args({name: value})


@given(st.sampled_from(OWN).flatmap(lambda own: st.tuples(st.just(own), misspelt(own))))
@example(("edits", "edit"))
@example(("capture", "captures"))
@example(("probes", "probe"))
def test_a_field_of_ours_misspelt_and_misplaced_is_rejected_everywhere(pair):
    own, name = pair
    value = ASKED[own]
    assume(len(name) >= 3 and name not in KNOWN)
    for place in ("", *PLACES):
        body = {"prompt": "a", place: {name: value}} if place else {"prompt": "a", name: value}
        rejected_body(body, f"{place}.{name}" if place else name)
    with pytest.raises(SpecError):
        check_extra_args({name: value})


def test_python_values_are_recognized_in_extra_args():
    for name, value in (("captures", Capture([1])), ("edit", [Steer([1.0], layer=1)])):
        with pytest.raises(SpecError, match="did you mean"):
            check_extra_args({name: value})


@pytest.mark.parametrize("empty", [[], {}, ()])
@pytest.mark.parametrize(
    ("name", "own"),
    [("edit", "edits"), ("captures", "capture"), ("Probe", "probes"), ("eidts", "edits"),
     ("steering", None), ("controllers", "controller"), ("capturr", "capture")],
)  # fmt: skip
def test_a_misspelt_field_that_is_empty_is_rejected_too(name, own, empty):
    for place in ("", *PLACES):
        body = {"prompt": "a", place: {name: empty}} if place else {"prompt": "a", name: empty}
        problem = rejected_body(body, f"{place}.{name}" if place else name)
        assert own is None or f"did you mean `{own}`?" in problem
    with pytest.raises(SpecError, match=re.escape(f"extra_args[{name!r}]")):
        check_extra_args({name: empty})


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


@pytest.mark.parametrize("fields", OTHERS)
def test_fields_of_others_pass(fields):
    body = {"prompt": "a", **fields}
    check_body(body, KNOWN)
    check_extra_args(fields)


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "max_tokens", "temperature", "stream", "stop", "n", "user"]),
        st.text() | st.integers() | st.lists(st.text(), max_size=3),
    )
)
def test_bodies_with_vllms_fields_alone_are_not_parsed(body):
    if "\\" not in json.dumps(body):
        assert not names_in(json.dumps(body).encode(), frozenset(body))


@pytest.mark.parametrize("depth", [5, 900])
def test_lists_that_are_nested_deeply_are_of_others(depth):
    check_body({"other": json.loads("[" * depth + "]" * depth), "prompt": "a"}, KNOWN)


def test_very_many_fields_are_rejected_before_they_are_compared():
    many = {f"steer{n}": 1 for n in range(5000)}
    assert names_in(json.dumps(many).encode(), ())
    with pytest.raises(SpecError, match="at most 4096 fields"):
        check_body(many, ())


@pytest.mark.parametrize("length", range((1 << 20) - 60, (1 << 20) + 60, 7))
def test_a_key_anywhere_in_a_long_body_is_found(length):
    head = b'{"prompt": "'
    body = head + b"x" * (length - len(head)) + b'", "midstreem"  : {}}'
    assert names_in(body, KNOWN)
    assert not names_in(body.replace(b"midstreem", b"something"), KNOWN)


@pytest.mark.parametrize("spaces", [0, 5000, 3 << 20])
@pytest.mark.parametrize("length", range((1 << 20) - 100, (1 << 20) + 60, 9))
def test_a_key_is_found_however_far_its_colon_is(length, spaces):
    head = b'{"prompt": "'
    key = b'", "midstreem"' + b" " * spaces + b": {}}"
    assert names_in(head + b"x" * (length - len(head)) + key, KNOWN)
    # A colon before it, in the text or in the key.
    assert names_in(head + b"x" * (length - 20 - len(head)) + b":" * 20 + key, KNOWN)
    assert names_in(head + b"x" * (length - len(head)) + key.replace(b"ee", b":"), KNOWN)


@given(st.binary(max_size=300))
def test_bytes_that_are_no_json_break_nothing(body):
    names_in(body, ())
