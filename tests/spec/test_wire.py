from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec.strategies import plans, spoilt

from midstream.errors import SpecError
from midstream.sites import NAMES
from midstream.spec import Capture, ModelShape, Plan, ResolvedPlan, Steer, resolve

SHAPE = ModelShape(4, 3, [(site, layer) for site in NAMES for layer in range(4)])


def _golden():
    plan = Plan.make(
        Capture(-1, positions=[0, "last"]),
        [Steer([1, 2, 3], 0), Steer([4, 5, 6], 1, 0.5), Steer([1, 2, 3], 2, positions="prompt")],
    )
    assert plan is not None
    return resolve(plan, SHAPE, 10, 5)


HEADER = {
    "prompt_len": 10,
    "vectors": [3, 3],
    "edits": [
        {"site": "resid_post", "layer": 0, "vector": 0, "scale": 1.0, "ranges": [[0, None]]},
        {"site": "resid_post", "layer": 1, "vector": 1, "scale": 0.5, "ranges": [[0, None]]},
        {"site": "resid_post", "layer": 2, "vector": 0, "scale": 1.0, "ranges": [[0, 10]]},
    ],
    "captures": [{"taps": [["resid_post", 3]], "ranges": [[0, 1]], "last_from": 9}],
}
BODY = struct.pack("<6f", 1, 2, 3, 4, 5, 6)


def _packed(header=HEADER, body=BODY):
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"MSP1" + struct.pack("<I", len(text)) + text + body


def test_the_bytes_of_a_plan_are_what_they_were():
    assert _golden().to_bytes() == _packed()
    assert ResolvedPlan.from_bytes(_packed()) == _golden()


@given(plans, st.integers(1, 14), st.integers(1, 6))
@settings(max_examples=200)
def test_a_resolved_plan_survives_its_bytes(plan, prompt_len, max_tokens):
    try:
        resolved = resolve(plan, SHAPE, prompt_len, max_tokens)
    except SpecError:
        return
    data = resolved.to_bytes()
    found = ResolvedPlan.from_bytes(data)
    assert found == resolved
    assert found.digest == resolved.digest
    assert found.to_bytes() == data


def test_a_vector_used_often_is_sent_once():
    edits = [Steer([1, 2, 3], layer) for layer in (0, 1, 2, 3)]
    resolved = resolve(Plan(edits=tuple(edits)), SHAPE, 10, 5)
    assert resolved.to_bytes().count(struct.pack("<3f", 1, 2, 3)) == 1


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "at least 8 bytes, got 0"),
        (b"MSP1\0\0\0", "at least 8 bytes, got 7"),
        (b"MSP2" + _packed()[4:], "starts with b'MSP1', got b'MSP2'"),
        (b"\x80\x04" + _packed(), "starts with b'MSP1'"),
        (_packed()[:50], "the header is cut off: 42 of"),
        (b"MSP1\xff\xff\xff\xff", "the header is cut off: 0 of 4294967295 bytes"),
        (b"MSP1\0\0\0\0", "expected JSON"),
        (_packed()[:-1], r"vectors\[1\]: the vector is cut off at 23 of 24 bytes"),
        (_packed() + b"\0", "vectors: expected 24 bytes of vectors, got 25"),
        (
            _packed(body=BODY[:-4] + struct.pack("<f", float("inf"))),
            r"vectors\[1\]\[2\]: .*got inf",
        ),
        (_packed(body=BODY[:12] * 2), "vectors: expected the edits' vectors, each once"),
        ("MSP1", "expected `bytes`, got `str`"),
        (None, "expected `bytes`, got `None`"),
    ],
)
def test_bytes_that_are_no_plan_are_refused(data, problem):
    with pytest.raises(SpecError, match=problem):
        ResolvedPlan.from_bytes(data)


def _with(path, value):
    """The header with one thing in it replaced; the value `...` removes it."""
    header = json.loads(json.dumps(HEADER))
    *parents, name = path
    place = header
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return header


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (["prompt_len"], 0, "prompt_len: expected at least 1, got 0"),
        (["prompt_len"], ..., "missing field `prompt_len`"),
        (["pickle"], 1, "unknown field 'pickle'"),
        (["edits"], {}, "edits: expected a list, got `dict`"),
        (["captures"], None, "captures: expected a list, got `None`"),
        (["vectors"], 3, "vectors: expected a list, got `int`"),
        (["vectors", 0], -3, r"vectors\[0\]: expected at least 1, got -3"),
        (["vectors", 0], 2**31, r"vectors\[0\]: the vector is cut off"),
        (["edits", 0, "site"], "resid", r"edits\[0\].site: expected one of `resid_pre`"),
        (["edits", 0, "site"], "post_block", r"edits\[0\].site: expected one of"),
        (["edits", 1, "layer"], -1, r"edits\[1\].layer: expected at least 0, got -1"),
        (["edits", 0, "vector"], 2, r"edits\[0\].vector: there is no vector 2, of 2"),
        (["edits", 0, "vector"], 1, "vectors: expected the edits' vectors.*order of first use"),
        (["edits", 1, "vector"], 0, "vectors: expected the edits' vectors"),
        (["edits", 0, "scale"], "1", r"edits\[0\].scale: expected a number"),
        (["edits", 0, "scale"], 1e300, r"edits\[0\].scale: 1e\+300 overflows"),
        (["edits", 0, "ranges"], [], r"edits\[0\].ranges: expected at least one range"),
        (
            ["edits", 0, "ranges"],
            [[3, 3]],
            r"edits\[0\].ranges: expected ranges that are not empty",
        ),
        (["edits", 0, "ranges"], [[0, 3], [3, 4]], "do not touch"),
        (["edits", 0, "ranges"], [[5, 6], [0, 1]], "sorted"),
        (["edits", 0, "ranges"], [[0, None], [9, 10]], "sorted"),
        (["edits", 0, "ranges"], [[-1, 3]], r"edits\[0\].ranges\[0\]: expected at least 0"),
        (
            ["edits", 0, "ranges"],
            [[0, 1], [3]],
            r"edits\[0\].ranges\[1\]: expected \[start, stop\]",
        ),
        (["edits", 0, "op"], "steer", r"edits\[0\]: unknown field 'op'"),
        (["edits", 0, "scale"], ..., r"edits\[0\]: missing field `scale`"),
        (["captures", 0, "taps"], [], r"captures\[0\].taps: expected at least one tap"),
        (["captures", 0, "taps"], [["resid_post", 3]] * 2, r"captures\[0\].taps: .*each once"),
        (["captures", 0, "taps", 0], "ab", r"captures\[0\].taps\[0\]: expected \[site, layer\]"),
        (["captures", 0, "last_from"], 3, r"captures\[0\].last_from: expected the prompt's end"),
        (
            ["captures", 0],
            {"taps": [["resid_post", 3]], "ranges": [], "last_from": None},
            "nothing",
        ),
    ],
)
def test_a_header_with_something_wrong_is_refused(path, value, problem):
    with pytest.raises(SpecError, match=problem):
        ResolvedPlan.from_bytes(_packed(_with(path, value)))


@given(st.data())
@settings(max_examples=200)
def test_a_spoilt_header_is_read_or_refused(data):
    header = data.draw(spoilt(HEADER))
    try:
        found = ResolvedPlan.from_bytes(_packed(header))
    except SpecError:
        return
    assert ResolvedPlan.from_bytes(found.to_bytes()) == found


@given(st.integers(0, len(_packed()) - 1), st.integers(0, 255))
@settings(max_examples=200)
def test_a_changed_byte_never_gives_another_error_than_a_refusal(index, byte):
    data = bytearray(_packed())
    data[index] = byte
    try:
        found = ResolvedPlan.from_bytes(bytes(data))
    except SpecError:
        return
    assert ResolvedPlan.from_bytes(found.to_bytes()) == found


@given(st.integers(0, len(_packed()) - 1))
@settings(max_examples=50)
def test_a_plan_cut_off_anywhere_is_refused(length):
    with pytest.raises(SpecError):
        ResolvedPlan.from_bytes(_packed()[:length])
