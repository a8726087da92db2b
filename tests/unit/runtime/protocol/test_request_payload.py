"""Request payloads: read once in each process, and nothing else is read."""

import copy
import pickle
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from unit.plan.strategies import reads_or_refuses, spoilt

from midstream.errors import SpecError
from midstream.runtime.protocol.cache_keys import CacheKeys
from midstream.runtime.protocol.request_payload import RequestPayload, payload_of, uid_of
from midstream.runtime.protocol.vector_update import VectorUpdate

UPDATE = VectorUpdate(("cd",), (bytes(8), bytes(4)))
PAYLOAD = RequestPayload("u", b"plan", CacheKeys((0, 4), ("", "ab"), 3), UPDATE)


def params(value):
    return SimpleNamespace(extra_args={"midstream": value, "other": 1})


def travelled(value):
    """As vLLM's msgpack delivers a value that it has no type for."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


@pytest.mark.parametrize(
    "given", [SimpleNamespace(), SimpleNamespace(extra_args=None), SimpleNamespace(extra_args={})]
)
def test_a_request_without_a_plan_has_no_payload(given):
    assert payload_of(given) is None
    assert uid_of(given) is None


def test_a_payload_is_read_once_in_a_process():
    found = params(travelled(PAYLOAD))
    payload = payload_of(found)
    assert payload == PAYLOAD
    assert payload_of(found) is payload
    assert uid_of(found) == "u"
    assert found.extra_args["other"] == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_payload_survives_the_ways_in_which_vllm_copies_parameters(copied):
    assert payload_of(copied(params(PAYLOAD))) == PAYLOAD


def test_a_pickle_of_other_keys_is_refused():
    state = CacheKeys.__reduce__(PAYLOAD.keys)
    with pytest.raises(ValueError, match="expected ascending `starts`"):
        state[0]((4, 0), ("", ""), None)


@pytest.mark.parametrize(
    "value",
    [
        {},
        "u",
        [],
        ["u", b"plan"],
        ["u", b"plan", [[0], [""], None], 1],
        [b"u", b"plan", [[0], [""], None]],
        ["u", "plan", [[0], [""], None]],
        ["u", b"plan", [[1], [""], None]],
        {"uid": "u", "plan": b"plan", "keys": [[0], [""], None]},
        object(),
    ],
)
def test_what_is_no_payload_is_refused(value):
    with pytest.raises(
        SpecError, match=r"extra_args\['midstream'\]: reached .* without having been"
    ):
        payload_of(params(value))


@given(st.data())
@settings(max_examples=rounds(suite=150, nightly=1200))
def test_a_spoilt_payload_is_read_or_refused(data):
    value = data.draw(spoilt(travelled(PAYLOAD)))
    found = reads_or_refuses(payload_of, params(value))
    if found is not None:
        assert payload_of(params(travelled(found))) == found
