"""Values that a forward changes on their way: those that are not what a matrix returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from unit.runtime.models.test_inner_sites import (
    FAKE,
    MLP,
    QKV,
    Attention,
    Column,
    Layer,
    Mixture,
    SelfAttention,
    reasons,
)

from midstream.runtime.models.forward_source import Types
from midstream.runtime.models.inner_sites import UNPROVEN, InnerPlace, find_inner_sites


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Types, "of_vllm", staticmethod(lambda: FAKE))


class ByHead(SelfAttention):
    """As GPT-NeoX's checkpoints have it: query, key and value of each head are side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKV(64, 96)
        self.attn = Attention(4, 4, 8)

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        qkv, _ = self.qkv_proj(hidden_states)
        q, k, v = qkv.view(-1, 4, 24).chunk(3, dim=-1)
        return self.o_proj(self.attn(q, k, v))[0]


def test_pieces_of_each_head_are_no_columns() -> None:
    found = find_inner_sites(Layer(ByHead()))
    assert {reasons(found)[site] for site in ("q", "k", "v", "rot_q", "rot_k")} == {UNPROVEN}
    assert isinstance(found["z"], InnerPlace)


class ScaledMLP(MLP):
    def forward(self, x: Any) -> Any:
        gate_up, _ = self.gate_up_proj(x)
        x = self.act_fn(gate_up * self.multiplier)
        x, _ = self.down_proj(x)
        return x


class ShiftedMLP(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = Column(64, 96)

    def forward(self, x: Any) -> Any:
        up, _ = self.gate_up_proj(x)
        up += self.shift
        return self.down_proj(torch.nn.functional.silu(up))[0]


@pytest.mark.parametrize("mlp", [ScaledMLP, ShiftedMLP])
def test_an_activation_of_other_numbers_than_the_matrixs_leaves_only_the_neurons(
    mlp: type[nn.Module],
) -> None:
    found = find_inner_sites(Layer(mlp=mlp()))
    assert reasons(found)["mlp_pre"] == reasons(found)["mlp_pre_linear"] == UNPROVEN
    assert isinstance(found["mlp_act"], InnerPlace)


class ScaledNeurons(MLP):
    def forward(self, x: Any) -> Any:
        gate_up, _ = self.gate_up_proj(x)
        return self.down_proj(self.act_fn(gate_up.float()) * self.multiplier)[0]


def test_what_comes_after_the_activation_and_a_cast_before_it_change_nothing() -> None:
    found = find_inner_sites(Layer(mlp=ScaledNeurons()))
    for site, start in (("mlp_pre", 0), ("mlp_pre_linear", 96)):
        assert found[site] == InnerPlace("mlp.gate_up_proj", "output", None, start, 96, 0, "whole")


class BiasedMixture(Mixture):
    def forward(self, hidden_states: Any) -> Any:
        router_logits = self.gate(hidden_states)[0] + self.noise
        return self.experts(hidden_states=hidden_states, router_logits=router_logits.float())


class CastMixture(Mixture):
    def forward(self, hidden_states: Any) -> Any:
        router_logits = self.gate(hidden_states)[0].to(hidden_states.dtype)
        return self.experts(hidden_states=hidden_states, router_logits=router_logits)


def test_a_router_whose_logits_are_changed_afterwards_gives_no_place() -> None:
    assert reasons(find_inner_sites(Layer(mlp=BiasedMixture())))["router"] == UNPROVEN
    assert isinstance(find_inner_sites(Layer(mlp=CastMixture()))["router"], InnerPlace)
