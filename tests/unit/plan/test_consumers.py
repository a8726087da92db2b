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


def test_a_consumers_request_is_a_capture_for_its_sink():
    for asked in (ASKED, FilesystemCaptureRequest(**ASKED)):
        assert Plan.make(capture={"filesystem": asked}) == Plan((EXPECTED,))
    plan = Plan.parse(json.dumps({"capture": {"filesystem": ASKED}}))
    assert plan == Plan((EXPECTED,)) == Plan.parse(plan.to_json())


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
    at = 'capture["filesystem"]'
    refused(
        lambda change: Plan.make(capture={"filesystem": {**ASKED, **change}}),
        ({"tag": "../../etc"}, f"{at}.tag", "not starting with a dot"),
        ({"tag": "/etc"}, f"{at}.tag", "A-Z"),
        ({"request_id": "x" * 129}, f"{at}.request_id", "at most 128 characters"),
        ({"request_id": 7}, f"{at}.request_id", "expected `str`, got `int`"),
        ({"tag": "a\x00b"}, f"{at}.tag", "A-Z"),
        ({"tag": "a\n"}, f"{at}.tag", "A-Z"),
        ({"tag": "é"}, f"{at}.tag", "A-Z"),
        ({"hooks": {}}, f"{at}.hooks", "expected {hook point"),
        ({"hooks": {"post_blok": [1]}}, f'{at}.hooks["post_blok"]', "unknown site"),
        ({"hooks": {"post_block": ["1"]}}, f'{at}.hooks["post_block"][0]', "int"),
        ({"positions": "last_prmpt"}, f"{at}.positions", "did you mean `last_prompt`"),
        ({"metadata": {"a": float("nan")}}, f"{at}.metadata", "JSON"),
        ({"metadata": {"a": "x" * 70000}}, f"{at}.metadata", "at most 65536"),
        ({"metadata": {1: "x"}}, f"{at}.metadata", "names must be `str`"),
        ({"layer": 3}, at, "unknown field 'layer'"),
        ({"tags": "x"}, at, "did you mean `tag`"),
    )
    refused(lambda sink: Plan.make(capture={sink: ASKED}), ("../x", "A-Z"), (3, "expected `str`"))


def test_two_captures_for_one_place_cannot_be_described_otherwise():
    one, other = (Capture(n, sink="store", metadata={"a": n}) for n in (1, 2))
    words = r"differs from the metadata of capture\[0\]"
    refused(Plan, ((one, other), "capture[1].metadata", words))
    elsewhere = Capture(2, sink="store", tag="b", metadata={"a": 2})
    assert Plan((one, Capture(2, sink="store"), elsewhere))
