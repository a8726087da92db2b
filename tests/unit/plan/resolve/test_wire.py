"""The form in which resolved plans travel: read back as written, and nothing else is read."""

import copy
import random
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.plans import KINDS, VECTORS, add, plan_of, random_plan, rows
from support.programs import all_steps
from support.refusals import refused
from unit.plan.strategies import plans_by_length, reads_or_refuses, spoilt

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan import (
    Ablate,
    Affine,
    Between,
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
    TokenIds,
    Vector,
    Where,
)
from midstream.plan.resolve import wire as wires
from midstream.plan.resolve.resolve import resolve
from midstream.plan.resolve.wire import from_bytes, to_bytes
from midstream.sites import NAMES

SHAPE = ModelShape(4, 3, [(site, layer) for site in NAMES for layer in range(4)])
POST = ("resid_post", 1)


def _golden():
    plan = Plan.make(
        Capture(-1, positions=[0, "last_row"]),
        [Steer([1, 2, 3], 0), Ablate([0, 0, 2], 1), Steer([1, 2, 3], 2, positions="prompt")],
        Probe([0, 0, 1], 3, bias=0.5, name="p", positions={"tokens": [7, 5]}, phase="generated"),
    )
    assert plan is not None
    return resolve(plan, SHAPE, Prompt(10), 5)


EVERYWHERE = {"ranges": [[0, None]], "matches": [], "last_from": None}
MESSAGE = {
    "format": "midstream plan 13",
    "prompt_len": 10,
    "codec": "raw",
    "sharded": False,
    "vectors": [struct.pack("<3f", 1, 2, 3), struct.pack("<3f", 0, 0, 1)],
    "steps": [
        [[0, None, [0], 1.0, 0.0, 0.0, 0.0, 8, None, 0, None, 0]],
        [[3, 1, [1], -1.0, 0.0, 0.0, 0.0, 9, None, 0, None, 0]],
        [[int(Op.PROBE), 1, [], 0.5, 0.0, 0.0, 0.0, 9, 0, 0, None, 0]],
    ],
    "edits": [
        {"site": "resid_post", "layer": 0, "steps": 0, "where": EVERYWHERE, "source": 0},
        {"site": "resid_post", "layer": 1, "steps": 1, "where": EVERYWHERE, "source": 1},
        {
            "site": "resid_post",
            "layer": 2,
            "steps": 0,
            "where": {"ranges": [[0, 10]], "matches": [], "last_from": None},
            "source": 2,
        },
    ],
    "captures": [
        {
            "taps": [["resid_post", 3]],
            "where": {"ranges": [[0, 1]], "matches": [], "last_from": 9},
            "source": 0,
            "pattern": None,
            "selected": None,
        }
    ],
    "probes": [
        {
            "name": "p",
            "site": "resid_post",
            "layer": 3,
            "steps": 2,
            "where": {
                "ranges": [],
                "matches": [
                    {"ranges": [[10, None]], "ids": [5, 7], "others": False, "automaton": None}
                ],
                "last_from": None,
            },
            "attention": None,
        }
    ],
    "biases": [],
    "functions": [],
    "followed": [],
}


READ = {
    "name": "m",
    "site": "attention",
    "layer": 3,
    "steps": None,
    "where": EVERYWHERE,
    "attention": [
        0,
        {
            "kind": "mass",
            "size": 1,
            "keys": [[0, 4]],
            "heads": [2],
            "reads": [["rot_q", 3]],
            "counts": [1],
            "maps": [],
            "encoder": None,
        },
        4,
    ],
}


def test_a_probe_of_attention_is_read_strictly():
    read, (_, pattern, _) = _packed({**MESSAGE, "probes": [READ]}), READ["attention"]
    assert msgspec.msgpack.decode(to_bytes(from_bytes(read)))["probes"] == [READ]
    refused(
        lambda change: from_bytes(_packed({**MESSAGE, "probes": [{**READ, **change}]})),
        ({"steps": 2}, "and no instruction"),
        ({"attention": [0, {**pattern, "kind": "top"}, 4]}, "a mass or an entropy"),
        ({"attention": [0, {**pattern, "counts": []}, 4]}, "queries and heads"),
        ({"attention": [0, {**pattern, "reads": [["rot", 3]]}, 4]}, "site"),
        ({"attention": [0, pattern, 2]}, "num_heads"),
        ({"attention": None, "site": "z"}, "steps: missing"),
    )


def _packed(message=MESSAGE):
    return msgspec.msgpack.encode(message)


def _survives(plan):
    data = to_bytes(plan)
    found = from_bytes(data)
    assert found == plan
    assert to_bytes(found) == data


def test_the_message_of_a_plan_is_what_it_was():
    assert msgspec.msgpack.decode(to_bytes(_golden())) == MESSAGE
    assert from_bytes(_packed()) == _golden()


@given(plans_by_length, st.integers(1, 14), st.integers(1, 6))
@settings(max_examples=rounds(suite=40, nightly=600))
def test_a_resolved_plan_survives_its_bytes(plan, prompt_len, max_tokens):
    try:
        resolved = resolve(plan, SHAPE, Prompt(prompt_len), max_tokens)
    except SpecError:
        return
    _survives(resolved)


def test_a_plan_with_a_matrix_and_one_of_nothing_survive_their_bytes():
    edit = Affine(matrix=[[0.0, 0, 0], [0, 1, 0], [0, 0, 2]], layer=0, site="resid_pre")
    _survives(resolve(Plan(edits=(edit,)), SHAPE, Prompt(1), 1))
    _survives(ResolvedPlan(1, (), ()))


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


def test_numbers_keep_every_bit():
    for value in (-0.0, 1e-45, 3.4028234663852886e38, 1 / 3):
        plan = plan_of(edits=[(POST, VECTORS[0], value, ((0, None),))])
        _survives(plan)
        found = from_bytes(to_bytes(plan))
        assert str(found.edits[0].steps.instructions[0].a) == str(value)


def test_a_vector_or_instructions_used_often_are_sent_once():
    edits = [Steer([1, 2, 3], "all"), Steer([1, 2, 3], [1, 2], scale=2.0)]
    data = to_bytes(resolve(Plan(edits=tuple(edits)), SHAPE, Prompt(10), 5))
    assert data.count(struct.pack("<3f", 1, 2, 3)) == 1
    assert len(msgspec.msgpack.decode(data)["steps"]) == 2


def test_a_named_vector_is_sent_as_its_digest_and_read_from_what_the_reader_has():
    plan, vector = _golden(), Vector.parse([1, 2, 3])
    data = to_bytes(plan, {vector})
    assert msgspec.msgpack.decode(data) == {
        **MESSAGE,
        "vectors": [[1, vector.digest], MESSAGE["vectors"][1]],
    }
    assert from_bytes(data, {vector.digest: vector}) == plan
    other = Vector.parse([4, 2, 3])
    with pytest.raises(SpecError, match=rf"vectors\[0\]: .* '{vector.digest}' here"):
        from_bytes(data, {other.digest: other})


def test_bytes_that_are_no_plan_are_refused():
    refused(
        from_bytes,
        (b"", "truncated"),
        (_packed()[:50], "truncated"),
        (_packed()[:-1], "truncated"),
        (_packed() + b"\0", "trailing characters"),
        (b"MSP3\0\0\0\0", "expected `object`, got `int`"),
        (b"\x80\x04" + _packed(), "missing required field `format`"),
        (_packed([]), "expected `object`, got `array`"),
        (b"\x91" * 100_000, "expected `object`, got `array`"),
        (b"\xdf\xff\xff\xff\xff", "truncated"),
        (b"\x81\xa6format\xb0midstream plan 3", "format: invalid enum value 'midstream plan 3'"),
        (b"\x81\xa6format\xb0midstream plan \xff", "codec can't decode|invalid UTF-8"),
        ("MSP3", "expected `bytes`, got `str`"),
        (None, "expected `bytes`, got `None`"),
    )


def _with(path, value):
    """The message with one thing in it replaced; the value `...` removes it."""
    message = copy.deepcopy(MESSAGE)
    *parents, name = path
    place = message
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[name]
    else:
        place[name] = value
    return message


STEP = ["steps", 1, 0]
WHERE = ["edits", 0, "where"]
RANGES = [*WHERE, "ranges"]
AUTOMATON = {
    "start": 10, "ids": [5], "kinds": [1], "moves": [[0, 1], [1, 0]], "selects": [False, True]
}  # fmt: skip
SEARCH = {"ranges": [[10, None]], "ids": [], "others": False, "automaton": AUTOMATON}
MATCH = ["probes", 0, "where", "matches", 0]
INFINITE = struct.pack("<3f", 0, 0, float("inf"))


def test_a_message_with_something_wrong_is_refused():
    refused(
        lambda change: from_bytes(_packed(_with(*change))),
        ((["prompt_len"], 0), "prompt_len: expected `int` >= 1"),
        ((["prompt_len"], 2**31 + 1), "prompt_len: expected `int` <= 2147483648"),
        ((["prompt_len"], ...), "missing required field `prompt_len`"),
        ((["pickle"], 1), "unknown field `pickle`"),
        ((["codec"], 1), "codec: expected `str`"),
        ((["sharded"], 1), "sharded: expected `bool`"),
        ((["edits"], {}), "edits: expected `array`, got `object`"),
        ((["vectors", 0], 3), r"vectors\[.*\]: expected `bytes | array`"),
        (
            (["vectors", 0], [1, "ab"]),
            r"vectors\[0\]: there is no vector with the digest 'ab' here",
        ),
        ((["vectors", 0], []), r"vectors\[.*\]: expected `array` of at least length 1"),
        ((["vectors", 0], b""), r"vectors\[0\]: the vector is empty"),
        ((["vectors", 0], b"abc"), r"vectors\[0\]: 3 bytes are not a whole number of float32"),
        ((["vectors", 1], INFINITE), r"vectors\[1\]\[2\]: .*got inf"),
        ((["vectors"], [MESSAGE["vectors"][0]]), r"steps\[1\]: there is no vector 1, of 1"),
        ((["steps", 0], []), r"steps\[.*\]: expected `array` of length >= 1"),
        (([*STEP], [0]), r"expected `array` of at least length 12, got 1"),
        (([*STEP, 0], 99), r"steps\[.*\]: invalid enum value 99"),
        (([*STEP, 0], "ADD"), r"steps\[.*\]: expected `int`, got `str`"),
        (([*STEP, 1], 2), r"steps\[1\]: there is no vector 2, of 2"),
        (([*STEP, 2], [1, 2]), r"steps\[1\]: there is no vector 2"),
        (([*STEP, 3], "1"), r"steps\[.*\]: expected `float`"),
        (([*STEP, 3], 1e300), r"steps\[.*\]: expected `float` <="),
        (([*STEP, 3], float("nan")), r"steps\[.*\]: expected `float` >="),
        (([*STEP, 7], 512), r"steps\[.*\]: expected `int` <= 511"),
        (([*STEP, 8], -2), r"steps\[.*\]: expected `int` >= 0"),
        ((["edits", 0, "site"], "resid"), r"edits\[0\].site: expected one of `embed`"),
        ((["edits", 1, "layer"], -1), r"edits\[.*\].layer: expected `int` >= 0"),
        ((["edits", 0, "steps"], 3), r"edits\[0\]: there is no steps 3, of 3"),
        ((["edits", 0, "source"], 2**40), r"edits\[.*\].source: expected `int` <="),
        ((["edits", 0, "scale"], 1.0), r"edits\[.*\]: .*unknown field `scale`"),
        ((["edits", 0, "source"], ...), r"edits\[.*\]: .*missing required field `source`"),
        ((RANGES, []), r"edits\[0\].where: nothing is selected"),
        ((RANGES, [[3, 3]]), r"edits\[0\].where: expected ranges that are not empty"),
        ((RANGES, [[0, 3], [3, 4]]), "do not touch"),
        ((RANGES, [[5, 6], [0, 1]]), "sorted"),
        ((RANGES, [[-1, 3]]), r"edits\[0\].where: expected ranges that"),
        ((RANGES, [[0, 2**31 + 1]]), r"edits\[0\].where: expected an `int` from 0 to 2\*\*31"),
        ((RANGES, [[0, 1], [3]]), r"where.ranges\[.*\]: expected `array` of length 2, got 1"),
        (
            ([*WHERE, "matches"], [{"ranges": [[12, 13]], "ids": [1], "others": False}]),
            "have no position in common",
        ),
        (([*WHERE, "last_from"], 9), r"edits\[0\].where: the last row cannot be edited"),
        (([*WHERE, "last_from"], -1), r"edits\[0\].where.last_from: expected an `int` from 0"),
        (([*MATCH, "ranges"], []), r"probes\[0\].where.matches\[0\]: expected at least one range"),
        (([*MATCH, "ids"], []), r"probes\[0\].where.matches\[0\]: .*at least one id"),
        (([*MATCH, "ids"], [7, 5]), r"probes\[0\].where.matches\[0\]: .*ascending"),
        (([*MATCH, "ids"], [-1, 5]), r"where.matches\[0\].ids: expected an `int` from 0"),
        (([*MATCH, "ids"], [5, 2**40]), r"where.matches\[0\].ids: expected an `int` from 0"),
        (([*MATCH, "others"], 1), r"others: expected `bool`, got `int`"),
        (([*MATCH, "automaton"], AUTOMATON), r"where.matches\[0\]: .*no ids beside an automaton"),
        (([*MATCH], {**SEARCH, "ranges": []}), r"where.matches\[0\]: expected at least one range"),
        (([*MATCH], {**SEARCH, "others": True}), r"where.matches\[0\]: expected at least one ran"),
        (([*MATCH], {**SEARCH, "automaton": {**AUTOMATON, "kinds": []}}), "automaton.ids: .*a kin"),
        (([*MATCH], {**SEARCH, "automaton": {**AUTOMATON, "ids": [-1]}}), "automaton: .*from 0"),
        (([*MATCH], {**SEARCH, "automaton": {**AUTOMATON, "start": -1}}), "automaton: .*from 0"),
        (
            (["followed"], [{**AUTOMATON, "selects": [True]}]),
            r"followed\[0\].selects: expected one",
        ),
        ((["captures", 0, "taps"], []), r"captures\[0\].taps: expected at least one tap"),
        ((["captures", 0, "taps"], [["resid_post", 3]] * 2), r"captures\[0\].taps: .*each once"),
        ((["captures", 0, "taps", 0], ["resid_post"]), r"taps\[.*\]: expected `array` of length 2"),
        ((["captures", 0, "taps", 0], ["resid", 3]), r"taps\[0\].site: expected one of"),
        ((["captures", 0, "taps", 0], ["resid_post", -1]), r"taps\[0\].layer: expected an `int`"),
        ((["captures", 0, "where", "ranges"], [[3, 1]]), r"captures\[0\].where: expected ranges"),
        ((["captures", 0, "where", "last_from"], 9.0), r"last_from: expected `int"),
        ((["biases"], [{"tokens": [], "values": []}]), r"biases\[0\]: expected at least one token"),
        ((["biases"], [{"tokens": [1], "values": []}]), r"biases\[0\]: .* and a value for each"),
        (
            (["biases"], [{"tokens": [-1], "values": [1.0]}]),
            r"biases\[0\].tokens: expected an `int` ",
        ),
        (
            (["biases"], [{"tokens": [1], "values": [1e39]}]),
            r"biases\[0\].values: expected float32",
        ),
        ((["probes", 0, "name"], None), r"probes\[.*\].name: expected `str`, got `None`"),
        ((["probes", 0, "steps"], 0), r"probes\[0\].steps: expected PROBEs, one after"),
        (
            (["steps", 2], [MESSAGE["steps"][2][0]] * 2),
            r"probes\[0\].steps: expected PROBEs in slots that follow",
        ),
        (([*["steps", 2, 0], 8], None), r"probes\[0\].steps: expected a PROBE or SCAN with"),
        (
            ([*["steps", 2, 0], 0], int(Op.SCAN)),
            r"probes\[0\].name: expected none: a SCAN is read by gates",
        ),
        (([*["steps", 2, 0], 11], 2**30 + 1), r"steps\[.*\]: expected `int` <= 1073741824"),
    )


def _is_read_or_refused(data):
    """What is read of spoilt bytes is a plan like any other."""
    found = reads_or_refuses(from_bytes, data)
    if found is not None:
        _survives(found)


@given(st.data())
@settings(max_examples=rounds(suite=100, nightly=800))
def test_a_spoilt_message_is_read_or_refused(data):
    message = {**MESSAGE, "vectors": [list(one) for one in MESSAGE["vectors"]]}
    message = data.draw(spoilt(message))
    if isinstance(message, dict) and isinstance(message.get("vectors"), list):
        message["vectors"] = [_bytes_if_possible(one) for one in message["vectors"]]
    try:
        packed = _packed(message)
    except OverflowError:  # an int that msgpack does not have
        return
    _is_read_or_refused(packed)


def _bytes_if_possible(value):
    try:
        return bytes(value)
    except (TypeError, ValueError, OverflowError, MemoryError):
        return value


BUSY = to_bytes(
    plan_of(
        edits=[(POST, steps, ((nth, None),)) for nth, steps in enumerate(KINDS)]
        + [(POST, rows(3, 2), ((2, 5),))]
        + [(POST, add(), Where(((0, 3),), (Match(((9, None),), (1, 4), True),)))],
        captures=[([POST], Where(((0, 2),), last_from=7))],
        probes=[("a", POST, ((0, 4),)), ("", POST, ((1, 3),))],
    )
)


@given(st.integers(0, len(BUSY) - 1), st.integers(0, 255))
@settings(max_examples=rounds(suite=200, nightly=1600))
def test_a_changed_byte_never_gives_another_error_than_a_refusal(index, byte):
    data = bytearray(BUSY)
    data[index] = byte
    _is_read_or_refused(bytes(data))


@given(st.binary(max_size=200))
@settings(max_examples=rounds(suite=100, nightly=800))
def test_any_bytes_are_read_or_refused(data):
    _is_read_or_refused(data)


def test_a_plan_cut_off_anywhere_is_refused():
    for length in range(len(BUSY)):
        with pytest.raises(SpecError):
            from_bytes(BUSY[:length])


def test_every_code_of_an_instruction_is_known():
    assert len(Op) == 16
    # Any number up to the sum of the flags is a combination of them.
    assert wires._ALL_FLAGS == 511
    assert sorted(int(flag) for flag in Flags) in (
        [1 << n for n in range(9)],
        [0] + [1 << n for n in range(9)],
    )
    assert Steps(add()).digest != Steps(add(Vector.parse([1.0, 2.0, 3.0, 4.0]))).digest


def test_a_plan_with_marks_survives_its_bytes():
    steer = Steer(
        [1.0, 2, 3], 0, positions=[Between(5, [6, 7]), TokenIds(4)], exclude=Between(1, 2)
    )
    _survives(resolve(Plan(edits=(steer,)), SHAPE, Prompt(4, (5, 1, 2, 5)), 9))
