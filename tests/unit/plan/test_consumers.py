from __future__ import annotations

import json

import pytest
from support.refusals import refused

from midstream.compat.consumers import FilesystemCaptureRequest
from midstream.errors import SpecError
from midstream.plan import Capture, Plan

ASKED = {
    "request_id": "probe_0001",
    "tag": "mnist-probe-v1",
    "hooks": {"post_block": [12]},
    "positions": "last_prompt",
}
EXPECTED = Capture(
    12,
    "resid_post",
    "last_prompt",
    sink="filesystem",
    tag="mnist-probe-v1",
    request_id="probe_0001",
)


@pytest.mark.parametrize(
    "asked", [ASKED, FilesystemCaptureRequest(**ASKED)], ids=["dict", "dataclass"]
)
def test_a_consumers_request_is_a_capture_for_its_sink(asked):
    assert Plan.make(capture={"filesystem": asked}) == Plan((EXPECTED,))


def test_it_is_read_from_json_and_written_as_captures():
    text = json.dumps({"capture": {"filesystem": ASKED}})
    plan = Plan.parse(text)
    assert plan == Plan((EXPECTED,))
    assert Plan.parse(plan.to_json()) == plan


def test_any_sink_may_be_asked_and_several_at_once():
    hooks = {"pre_attn": [0], "post_attn": "all"}
    asked = {"store": {"hooks": hooks, "metadata": {"a": 1}}, "memory": {"hooks": {"mlp_out": 1}}}
    assert Plan.make(capture=asked).captures == (
        Capture(0, "resid_pre", sink="store", metadata={"a": 1}),
        Capture("all", "resid_mid", sink="store", metadata={"a": 1}),
        Capture(1, "mlp_out"),
    )


def test_the_fields_of_a_capture_are_not_taken_for_consumers():
    asked = {"layers": 1, "positions": {"slice": [0, 2]}, "metadata": {"hooks": {}}}
    assert Plan.make(capture=asked).captures == (
        Capture(1, positions=slice(0, 2), metadata={"hooks": {}}),
    )
    with pytest.raises(SpecError, match="missing field `layers`"):
        Plan.make(capture={"positions": {"slice": [0, 2]}})


def test_what_is_wrong_is_refused_by_its_path():
    refused(
        lambda change: Plan.make(capture={"filesystem": {**ASKED, **change}}),
        ({"tag": "../../etc"}, 'capture["filesystem"].tag', "not starting with a dot"),
        ({"tag": "/etc"}, 'capture["filesystem"].tag', "A-Z"),
        ({"request_id": "."}, 'capture["filesystem"].request_id', "A-Z"),
        ({"request_id": "x" * 129}, 'capture["filesystem"].request_id', "at most 128 characters"),
        ({"request_id": 7}, 'capture["filesystem"].request_id', "expected `str`, got `int`"),
        ({"tag": "a\x00b"}, 'capture["filesystem"].tag', "A-Z"),
        ({"tag": "a\n"}, 'capture["filesystem"].tag', "A-Z"),
        ({"tag": "é"}, 'capture["filesystem"].tag', "A-Z"),
        ({"hooks": {}}, 'capture["filesystem"].hooks', "expected {hook point"),
        ({"hooks": {"post_blok": [1]}}, 'capture["filesystem"].hooks["post_blok"]', "unknown site"),
        ({"hooks": {"post_block": ["1"]}}, 'capture["filesystem"].hooks["post_block"][0]', "int"),
        ({"positions": "lst"}, 'capture["filesystem"].positions', "lst"),
        ({"metadata": {"a": float("nan")}}, 'capture["filesystem"].metadata', "JSON"),
        ({"metadata": {"a": "x" * 70000}}, 'capture["filesystem"].metadata', "at most 65536"),
        ({"metadata": {1: "x"}}, 'capture["filesystem"].metadata', "names must be `str`"),
        ({"layer": 3}, 'capture["filesystem"]', "unknown field 'layer'"),
    )


def test_a_sink_whose_name_is_none_is_refused():
    with pytest.raises(SpecError, match="A-Z"):
        Plan.make(capture={"../x": ASKED})
    with pytest.raises(SpecError, match="expected `str`"):
        Plan.make(capture={3: ASKED})


def test_two_captures_for_one_place_cannot_be_described_otherwise():
    one, other = (Capture(n, sink="store", metadata={"a": n}) for n in (1, 2))
    with pytest.raises(SpecError, match=r"differs from the metadata of capture\[0\]") as caught:
        Plan((one, other))
    assert caught.value.path == "capture[1].metadata"
    elsewhere = Capture(2, sink="store", tag="b", metadata={"a": 2})
    assert Plan((one, Capture(2, sink="store"), elsewhere))
