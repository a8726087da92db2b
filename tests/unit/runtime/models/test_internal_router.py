"""The router of a mixture whose experts' module calls it itself, on modules made here."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

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


class Matrix(nn.Module):
    """A matrix as vLLM's, without numbers."""

    tp_size, output_size, skip_bias_add = 1, 8, False

    def __init__(self) -> None:
        super().__init__()
        self.bias: nn.Parameter | None = None


class Whole(Matrix):
    pass


class Name:
    def __init__(self, value: str) -> None:
        self.value = value


class Experts(nn.Module):
    layer_name = "layers.1.mlp.experts"
    is_sequence_parallel = _fse_fuse_gate = False

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.moe_config = self

    def _encode_layer_name(self) -> Name | str:
        return Name(self.layer_name)

    def _forward_impl(self, hidden_states: Any) -> Any:
        router_logits, _ = self.gate(hidden_states)
        return router_logits


class OtherExperts(Experts):
    def _forward_impl(self, hidden_states: Any) -> Any:
        return hidden_states


class ExpertsInOrder(Experts):
    def _encode_layer_name(self) -> Name | str:
        return "from_forward_context"


class Mixture(nn.Module):
    """As vLLM's, whose releases before 0.28 ask the experts who calls the router."""

    is_internal_router = True

    def __init__(
        self, experts: type[Experts] = Experts, gate: Matrix | None = None, **has: Any
    ) -> None:
        super().__init__()
        self.gate = gate or Whole()
        self.experts = experts(self.gate)
        for name, value in has.items():
            setattr(self.experts, name, value)

    def forward(self, hidden_states: Any) -> Any:
        if self.is_internal_router:
            return self.experts(hidden_states, router_logits=hidden_states)
        router_logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states, router_logits=router_logits)


class Twice(Mixture):
    def forward(self, hidden_states: Any) -> Any:
        router_logits, _ = self.gate(hidden_states)
        return self.experts(hidden_states, router_logits=hidden_states) + router_logits


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden_states: Any) -> Any:
        return self.mlp(hidden_states)


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    none = type("Absent", (nn.Module,), {})
    classes = dict.fromkeys(Types.__slots__, none)
    fake = Types(**{**classes, "linear": Matrix, "replicated": Whole, "experts": Experts})
    monkeypatch.setattr(Types, "of_vllm", staticmethod(lambda: fake))


def router_of(mixture: nn.Module) -> Found:
    return find_inner_sites(Layer(mixture))["router"]


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


def _with_bias(gate: Matrix, skip_bias_add: bool) -> Matrix:
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
        (Mixture(gate=_with_bias(Whole(), True)), BIAS),
        (Mixture(gate=Matrix()), UNPROVEN),
    ],
    ids=["forward", "release", "by order", "fused", "split", "twice", "bias", "part"],
)
def test_one_that_cannot_be_tapped_says_why(mixture: nn.Module, reason: str) -> None:
    assert router_of(mixture) == Lack(reason)


def test_a_bias_that_the_matrix_adds_itself_does_no_harm() -> None:
    assert isinstance(router_of(Mixture(gate=_with_bias(Whole(), False))), InnerPlace)
