"""`system_fingerprint` names the server-wide steering that is active."""

from types import SimpleNamespace

import pytest

from midstream.plan import ModelShape, Steer
from midstream.runtime.install import set_front_end
from midstream.server.app import fingerprint
from midstream.steering import VectorRegistry
from midstream.steering.tiers import Steering

VLLMS = "vllm-0.32.0-1234abcd"


@pytest.fixture
def steering() -> Steering:
    return Steering(VectorRegistry(ModelShape(2, 2, frozenset({("resid_post", 1)}))))


@pytest.fixture
def handler(steering, monkeypatch):
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    # So that the property is removed afterwards.
    monkeypatch.setattr(GenerateBaseServing, "system_fingerprint", None, raising=False)
    fingerprint.install()
    made = object.__new__(GenerateBaseServing)
    made.engine_client = SimpleNamespace(input_processor=SimpleNamespace())
    set_front_end(made.engine_client, SimpleNamespace(steering=steering))
    made.system_fingerprint = VLLMS
    return made


def test_a_handlers_fingerprint_follows_the_steering(handler, steering):
    assert handler.system_fingerprint == VLLMS
    state = steering.set(base=Steer([1.0, 2.0], 1))
    assert handler.system_fingerprint == f"{VLLMS}-midstream-{state.digest[:8]}"
    other = steering.set(base=Steer([1.0, 3.0], 1))
    assert handler.system_fingerprint == f"{VLLMS}-midstream-{other.digest[:8]}"
    assert other.digest[:8] != state.digest[:8]
    steering.clear()
    assert handler.system_fingerprint == VLLMS


def test_an_engine_without_midstream_keeps_vllms(handler):
    handler.engine_client = SimpleNamespace()
    assert handler.system_fingerprint == VLLMS


def test_a_server_that_gives_none_still_gives_none(handler, steering):
    steering.set(base=Steer([1.0, 2.0], 1))
    handler.system_fingerprint = None
    assert handler.system_fingerprint is None
