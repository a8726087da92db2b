"""The form in which resolved plans travel: read back as written, and nothing else is read."""

from __future__ import annotations

import json
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.plans import KINDS, VECTORS, add, plan_of, probe, random_plan, rows
from support.programs import all_steps
from unit.spec.strategies import plans_by_length, reads_or_refuses, spoilt

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.sites import NAMES
from midstream.spec import (
    Ablate,
    Capture,
    Match,
    ModelShape,
    Plan,
    Probe,
    Prompt,
    ResolvedEdit,
    ResolvedPlan,
    Steer,
    Steps,
    Vector,
    Where,
)
from midstream.spec.resolve import wire as wires
from midstream.spec.resolve.resolve import resolve

SHAPE = ModelShape(4, 3, [(site, layer) for site in NAMES for layer in range(4)])
POST = ("resid_post", 1)


def _golden():
    plan = Plan.make(
        Capture(-1, positions=[0, "last"]),
        [Steer([1, 2, 3], 0), Ablate([0, 0, 2], 1), Steer([1, 2, 3], 2, positions="prompt")],
        Probe([0, 0, 1], 3, bias=0.5, name="p", positions={"tokens": [7, 5]}, phase="generated"),
    )
    assert plan is not None
    return resolve(plan, SHAPE, Prompt(10), 5)


EVERYWHERE = [[[0, None]], [], None]
HEADER = {
    "prompt_len": 10,
    "codec": "raw",
    "sharded": False,
    "vectors": [3, 3],
    "steps": [
        [[0, -1, [0], [1.0, 0.0, 0.0, 0.0], 8, -1, 0]],
        [[3, 1, [1], [-1.0, 0.0, 0.0, 0.0], 9, -1, 0]],
        [[8, 1, [], [0.5, 0.0, 0.0, 0.0], 9, 0, 0]],
    ],
    "edits": [
        {"site": "resid_post", "layer": 0, "steps": 0, "where": EVERYWHERE, "source": 0},
        {"site": "resid_post", "layer": 1, "steps": 1, "where": EVERYWHERE, "source": 1},
        {
            "site": "resid_post",
            "layer": 2,
            "steps": 0,
            "where": [[[0, 10]], [], None],
            "source": 2,
        },
    ],
    "captures": [{"taps": [["resid_post", 3]], "where": [[[0, 1]], [], 9], "source": 0}],
    "probes": [
        {
            "name": "p",
            "site": "resid_post",
            "layer": 3,
            "steps": 2,
            "where": [[], [[[[10, None]], [5, 7], False]], None],
        }
    ],
}
BODY = struct.pack("<6f", 1, 2, 3, 0, 0, 1)


def _packed(header=HEADER, body=BODY):
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"MSP3" + struct.pack("<I", len(text)) + text + body


def _survives(plan):
    data = plan.to_bytes()
    found = ResolvedPlan.from_bytes(data)
    assert found == plan
    assert found.to_bytes() == data


# ---------------------------------------------------------------- there and back


def test_the_bytes_of_a_plan_are_what_they_were():
    assert _golden().to_bytes() == _packed()
    assert ResolvedPlan.from_bytes(_packed()) == _golden()


@given(plans_by_length, st.integers(1, 14), st.integers(1, 6))
@settings(max_examples=rounds(suite=75, nightly=600))
def test_a_resolved_plan_survives_its_bytes(plan, prompt_len, max_tokens):
    try:
        resolved = resolve(plan, SHAPE, Prompt(prompt_len), max_tokens)
    except SpecError:
        return
    _survives(resolved)


@given(st.integers(0, 2**32))
@settings(max_examples=rounds(suite=75, nightly=600))
def test_a_plan_with_gates_rows_and_ids_survives_its_bytes(seed):
    plan = random_plan(random.Random(seed), 20)
    if plan is not None:
        _survives(plan)


@given(st.lists(all_steps, min_size=1, max_size=3))
@settings(max_examples=rounds(suite=75, nightly=600))
def test_instructions_of_every_kind_survive_their_bytes(several):
    edits = [
        ResolvedEdit(*POST, steps, Where(((0, 1),)), nth - 1) for nth, steps in enumerate(several)
    ]
    _survives(ResolvedPlan(3, tuple(edits), ()))


@pytest.mark.parametrize(
    "steps", [*KINDS, rows(3, 5), probe()], ids=lambda steps: steps[-1].op.name
)
def test_each_kind_of_edit_survives_its_bytes(steps):
    _survives(plan_of(edits=[(POST, steps, ((5, 8),))]))


def test_a_plan_of_nothing_survives_its_bytes():
    _survives(ResolvedPlan(1, (), ()))


@pytest.mark.parametrize("value", [-0.0, 1e-45, 3.4028234663852886e38, 1 / 3])
def test_numbers_keep_every_bit(value):
    _survives(plan_of(edits=[(POST, VECTORS[0], value, ((0, None),))]))
    found = ResolvedPlan.from_bytes(
        plan_of(edits=[(POST, VECTORS[0], value, ((0, 1),))]).to_bytes()
    )
    assert str(found.edits[0].steps.instructions[0].a) == str(value)


def test_a_vector_or_instructions_used_often_are_sent_once():
    edits = [Steer([1, 2, 3], "all"), Steer([1, 2, 3], [1, 2], scale=2.0)]
    data = resolve(Plan(edits=tuple(edits)), SHAPE, Prompt(10), 5).to_bytes()
    assert data.count(struct.pack("<3f", 1, 2, 3)) == 1
    assert len(json.loads(data[8 : 8 + struct.unpack("<I", data[4:8])[0]])["steps"]) == 2


# ---------------------------------------------------------------- nothing else is read


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "at least 8 bytes, got 0"),
        (b"MSP3\0\0\0", "at least 8 bytes, got 7"),
        (b"MSP2" + _packed()[4:], "starts with b'MSP3', got b'MSP2'"),
        (b"\x80\x04" + _packed(), "starts with b'MSP3'"),
        (_packed()[:50], "the header is cut off: 42 of"),
        (b"MSP3\xff\xff\xff\xff", "the header is cut off: 0 of 4294967295 bytes"),
        (b"MSP3\0\0\0\0", "expected JSON"),
        (_packed()[:-1], r"vectors\[1\]: the vector is cut off at 23 of 24 bytes"),
        (_packed() + b"\0", "vectors: expected 24 bytes of vectors, got 25"),
        (
            _packed(body=BODY[:-4] + struct.pack("<f", float("inf"))),
            r"vectors\[1\]\[2\]: .*got inf",
        ),
        (_packed(body=BODY[:12] * 2), "not in the form in which plans are written"),
        (_packed({**HEADER, "vectors": [3]}, BODY[:12]), "there is no vector 1, of 1"),
        (_packed({**HEADER, "vectors": [3, 3, 3]}, BODY * 2)[:-12], "not in the form"),
        (b"MSP3\x02\0\0\0[]", "expected a dict"),
        (b"MSP3\x05\0\0\0" + b"[" * 5, "expected JSON"),
        (b"MSP3\xa0\x86\x01\0" + b"[" * 100_000, "nested too deeply|expected JSON"),
        ("MSP3", "expected `bytes`, got `str`"),
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


STEP = ["steps", 1, 0]
WHERE = ["edits", 0, "where"]
MATCH = ["probes", 0, "where", 1, 0]


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (["prompt_len"], 0, "prompt_len: expected at least 1, got 0"),
        (["prompt_len"], True, "prompt_len: expected `int`, got `bool`"),
        (["prompt_len"], ..., "missing field `prompt_len`"),
        (["pickle"], 1, "unknown field 'pickle'"),
        (["edits"], {}, "edits: expected a list, got `dict`"),
        (["captures"], None, "captures: expected a list, got `None`"),
        (["probes"], 0, "probes: expected a list, got `int`"),
        (["vectors"], 3, "vectors: expected a list, got `int`"),
        (["vectors", 0], -3, r"vectors\[0\]: expected at least 1, got -3"),
        (["vectors", 0], 2**31, r"vectors\[0\]: the vector is cut off"),
        (["steps", 0], [], r"steps\[0\]: expected at least one instruction"),
        (["steps", 0], {}, r"steps\[0\]: expected a list"),
        (["steps", 1], HEADER["steps"][0], "not in the form"),
        ([*STEP], [0], r"steps\[1\]\[0\]: expected 7 items, got 1"),
        ([*STEP, 0], 9, r"steps\[1\]\[0\]: 9 is not a valid Op"),
        ([*STEP, 0], -1, r"steps\[1\]\[0\]: expected at least 0, got -1"),
        ([*STEP, 0], "ADD", r"steps\[1\]\[0\]: expected `int`, got `str`"),
        ([*STEP, 1], 2, r"steps\[1\]\[0\]: there is no vector 2, of 2"),
        ([*STEP, 1], -2, r"steps\[1\]\[0\]: expected at least 0, got -2"),
        ([*STEP, 2], [1, 2], r"steps\[1\]\[0\]: there is no vector 2"),
        ([*STEP, 2], 1, r"steps\[1\]\[0\].*expected a list"),
        ([*STEP, 3], [1.0, 2.0, 3.0], r"steps\[1\]\[0\]: expected 4 items, got 3"),
        ([*STEP, 3, 0], "1", r"steps\[1\]\[0\]: expected a number"),
        ([*STEP, 3, 0], 1e300, r"steps\[1\]\[0\]: 1e\+300 overflows"),
        ([*STEP, 3, 0], 1, "not in the form"),
        ([*STEP, 4], 128, r"steps\[1\]\[0\]: unknown flags 128|not a valid Flags"),
        ([*STEP, 4], 2**31, r"steps\[1\]\[0\]: unknown flags|not a valid Flags"),
        ([*STEP, 4], -8, r"steps\[1\]\[0\]: expected at least 0"),
        ([*STEP, 5], -2, r"steps\[1\]\[0\]: expected at least 0"),
        ([*STEP, 6], -1, r"steps\[1\]\[0\]: expected at least 0"),
        (["edits", 0, "site"], "resid", r"edits\[0\].site: expected one of `resid_pre`"),
        (["edits", 0, "site"], "post_block", r"edits\[0\].site: expected one of"),
        (["edits", 1, "layer"], -1, r"edits\[1\].layer: expected at least 0, got -1"),
        (["edits", 0, "steps"], 3, r"edits\[0\].steps: there are no steps 3, of 3"),
        (["edits", 0, "steps"], 1, "not in the form"),
        (["edits", 0, "source"], "0", r"edits\[0\].source: expected `int`"),
        (["edits", 0, "where"], [], r"edits\[0\].where: expected 3 items, got 0"),
        (["edits", 0, "scale"], 1.0, r"edits\[0\]: unknown field 'scale'"),
        (["edits", 0, "source"], ..., r"edits\[0\]: missing field `source`"),
        ([*WHERE, 0], [], r"edits\[0\].where: nothing is selected"),
        ([*WHERE, 0], [[3, 3]], r"edits\[0\].where: expected ranges that are not empty"),
        ([*WHERE, 0], [[0, 3], [3, 4]], "do not touch"),
        ([*WHERE, 0], [[5, 6], [0, 1]], "sorted"),
        ([*WHERE, 0], [[0, None], [9, 10]], "sorted"),
        ([*WHERE, 0], [[-1, 3]], r"edits\[0\].where\[0\]: expected at least 0"),
        ([*WHERE, 0], [[0, 1], [3]], r"edits\[0\].where\[1\]: expected 2 items, got 1"),
        ([*WHERE, 1], None, r"edits\[0\].where: expected a list"),
        ([*WHERE, 1], [[[[12, 13]], [1], False]], "have no position in common"),
        ([*WHERE, 2], 9, r"edits\[0\].where: the last row cannot be edited"),
        ([*WHERE, 2], -1, r"edits\[0\].where: expected at least 0"),
        ([*MATCH, 0], [], r"probes\[0\].where.matches\[0\]: expected at least one range"),
        ([*MATCH, 1], [], r"probes\[0\].where.matches\[0\]: .*at least one id"),
        ([*MATCH, 1], [7, 5], r"probes\[0\].where.matches\[0\]: .*ascending"),
        ([*MATCH, 1], [5, 5], r"probes\[0\].where.matches\[0\]: .*ascending"),
        ([*MATCH, 1], [-1, 5], r"probes\[0\].where.matches\[0\]: expected at least 0"),
        ([*MATCH, 2], 1, r"probes\[0\].where.matches\[0\]: expected `bool`, got `int`"),
        ([*MATCH], [], r"probes\[0\].where.matches\[0\]: expected 3 items"),
        (["captures", 0, "taps"], [], r"captures\[0\].taps: expected at least one tap"),
        (["captures", 0, "taps"], [["resid_post", 3]] * 2, r"captures\[0\].taps: .*each once"),
        (["captures", 0, "taps", 0], "ab", r"captures\[0\].taps\[0\]: expected a list"),
        (["captures", 0, "taps", 0], ["resid_post"], r"taps\[0\]: expected 2 items, got 1"),
        (["captures", 0, "where"], [[], [], None], r"captures\[0\].where: nothing is selected"),
        (["captures", 0, "source"], "0", r"captures\[0\].source: expected `int`, got `str`"),
        (["captures", 0, "where", 2], 9.0, r"captures\[0\].where: expected `int`"),
        (["probes", 0, "name"], None, r"probes\[0\].name: expected `str`, got `None`"),
        (["probes", 0, "steps"], 0, r"probes\[0\].steps: expected one PROBE"),
        (["steps", 2], [HEADER["steps"][2][0]] * 2, r"probes\[0\].steps: expected one PROBE"),
        (["steps", 2, 0, 5], -1, r"probes\[0\].steps: expected a PROBE with a slot"),
    ],
)
def test_a_header_with_something_wrong_is_refused(path, value, problem):
    with pytest.raises(SpecError, match=problem):
        ResolvedPlan.from_bytes(_packed(_with(path, value)))


def test_json_that_means_the_same_in_other_words_is_refused():
    text = json.dumps(HEADER).encode()  # with spaces
    data = b"MSP3" + struct.pack("<I", len(text)) + text + BODY
    with pytest.raises(SpecError, match="not in the form in which plans are written"):
        ResolvedPlan.from_bytes(data)


@given(st.data())
@settings(max_examples=rounds(suite=100, nightly=800))
def test_a_spoilt_header_is_read_or_refused(data):
    header = data.draw(spoilt(HEADER))
    found = reads_or_refuses(ResolvedPlan.from_bytes, _packed(header))
    if found is not None:
        _survives(found)


BUSY = plan_of(
    edits=[(POST, steps, ((nth, None),)) for nth, steps in enumerate(KINDS)]
    + [(POST, rows(3, 2), ((2, 5),))]
    + [(POST, add(), Where(((0, 3),), (Match(((9, None),), (1, 4), True),)))],
    captures=[([POST], Where(((0, 2),), last_from=7))],
    probes=[("a", POST, ((0, 4),)), ("", POST, ((1, 3),))],
).to_bytes()


@given(st.integers(0, len(BUSY) - 1), st.integers(0, 255))
@settings(max_examples=rounds(suite=200, nightly=1600))
def test_a_changed_byte_never_gives_another_error_than_a_refusal(index, byte):
    data = bytearray(BUSY)
    data[index] = byte
    found = reads_or_refuses(ResolvedPlan.from_bytes, bytes(data))
    if found is not None:
        assert found.to_bytes() == bytes(data)


@given(st.lists(st.tuples(st.integers(0, len(BUSY) - 1), st.integers(0, 7)), max_size=6))
@settings(max_examples=rounds(suite=150, nightly=1200))
def test_flipped_bits_never_give_another_error_than_a_refusal(flips):
    data = bytearray(BUSY)
    for index, bit in flips:
        data[index] ^= 1 << bit
    found = reads_or_refuses(ResolvedPlan.from_bytes, bytes(data))
    if found is not None:
        assert found.to_bytes() == bytes(data)


def test_a_plan_cut_off_anywhere_is_refused():
    for length in range(len(BUSY)):
        with pytest.raises(SpecError):
            ResolvedPlan.from_bytes(BUSY[:length])


def test_every_code_of_an_instruction_is_known():
    assert len(Op) == 9
    assert wires._ALL_FLAGS == 127
    assert Steps(add()).digest != Steps(add(Vector.parse([1.0, 2.0, 3.0, 4.0]))).digest
