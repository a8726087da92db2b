"""The router of a mixture, which its block calls or its experts, on modules made here."""

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from unit.runtime.models.inner_modules import (
    FAKE,
    Experts,
    Layer,
    Linear,
    Mixture,
    Name,
    Replicated,
)

from midstream.runtime.models.convention import Lack
from midstream.runtime.models.expert_choice import (
    BY_ORDER,
    FUSED_GATE,
    INTERNAL_GATE,
    SPLIT,
    TWICE,
    UNKNOWN,
)
from midstream.runtime.models.forward_source import Types
from midstream.runtime.models.inner_sites import BIAS, UNPROVEN, Found, InnerPlace, find_inner_sites


class OtherExperts(Experts):
    def _forward_impl(self, hidden_states: Any) -> Any:
        return hidden_states


class ExpertsInOrder(Experts):
    def _encode_layer_name(self) -> Name | str:
        return "from_forward_context"


class Twice(Mixture):
    def forward(self, hidden_states: Any) -> Any:
        router_logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states, router_logits=hidden_states) + router_logits


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Types, "of_vllm", staticmethod(lambda: FAKE))


def router_of(mixture: nn.Module) -> Found:
    return find_inner_sites(Layer(mlp=mixture))["router"]


def test_it_is_what_the_block_calls() -> None:
    place = InnerPlace("mlp.gate", "output", None, 0, 8, 0, "whole", 1, UNKNOWN)
    assert router_of(Mixture(is_inside=False)) == place
    for setting, reason in (("is_internal_router", UNPROVEN), ("is_sequence_parallel", SPLIT)):
        mixture = Mixture(is_inside=False)
        setattr(mixture, setting, True)
        assert router_of(mixture) == Lack(reason)


def test_it_is_what_the_experts_have_as_gate() -> None:
    place = InnerPlace("mlp.experts.gate", "output", None, 0, 8, 0, "whole", 1, UNKNOWN)
    assert router_of(Mixture()) == place


def _call(self: Any, hidden_states: Any) -> Any:
    return self.experts(hidden_states, router_logits=hidden_states)


def test_a_forward_of_the_instance_counts_in_place_of_the_classs() -> None:
    mixture: Any = Twice()
    mixture.forward = MethodType(_call, mixture)
    assert isinstance(router_of(mixture), InnerPlace)
    mixture = Mixture()
    mixture.forward = MethodType(Twice.forward, mixture)
    assert router_of(mixture) == Lack(TWICE)


def _with_bias(gate: Linear, skip_bias_add: bool) -> Linear:
    gate.bias, gate.skip_bias_add = nn.Parameter(torch.zeros(8)), skip_bias_add
    return gate


@pytest.mark.parametrize(
    ("mixture", "reason"),
    [
        (Mixture(OtherExperts), INTERNAL_GATE),
        (Mixture(_fse_fuse_gate=None), INTERNAL_GATE),
        (Mixture(ExpertsInOrder), BY_ORDER),
        (Mixture(_fse_fuse_gate=True), FUSED_GATE),
        (Mixture(is_sequence_parallel=True), SPLIT),
        (Twice(), TWICE),
        (Mixture(gate=_with_bias(Replicated(64, 8), True)), BIAS),
        (Mixture(gate=Linear(64, 8)), UNPROVEN),
    ],
    ids=["forward", "release", "by order", "fused", "split", "twice", "bias", "part"],
)
def test_one_that_cannot_be_tapped_says_why(mixture: nn.Module, reason: str) -> None:
    assert router_of(mixture) == Lack(reason)


def test_a_bias_that_the_matrix_adds_itself_does_no_harm() -> None:
    assert isinstance(router_of(Mixture(gate=_with_bias(Replicated(64, 8), False))), InnerPlace)
