"""The norm whose output a model's head reads."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.models.final_norm import find_final_norm, why_no_head


class Norm(nn.Module):
    def forward(self, x: Any, residual: Any = None) -> Any:
        return x


class NormOfBoth(nn.Module):
    def forward(self, x: Any, residual: Any) -> Any:
        return x, residual


class Trunk(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity()])
        self.norm = norm

    def forward(self, input_ids: Any) -> Any:
        hidden_states = input_ids
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.norm(hidden_states)


class Model(nn.Module):
    def __init__(self, norm: nn.Module | None = None):
        super().__init__()
        self.model = Trunk(norm or Norm())
        self.scale_width = 2.0

    def forward(self, input_ids: Any) -> Any:
        output = self.model(input_ids)
        if isinstance(output, tuple):
            output, _ = output
        return output


class MiniCPM(Model):
    def forward(self, input_ids: Any) -> Any:
        output = self.model(input_ids)
        return output / self.scale_width


class AtOnce(Model):
    def forward(self, input_ids: Any) -> Any:
        return self.model(input_ids) * self.scale_width


def test_it_is_the_one_that_the_trunk_ends_with() -> None:
    model = Model()
    assert find_final_norm(model) is model.model.norm


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (MiniCPM(), "MiniCPM gives its head output / self.scale_width, not the output of its norm"),
        (AtOnce(), r"gives its head self.model\(input_ids\) \* self.scale_width"),
        (Model(NormOfBoth()), "NormOfBoth needs more than the stream"),
        (Model(nn.Identity()), "what it returns is not the output of one norm"),
    ],
)
def test_a_model_whose_head_reads_something_else_says_so(model: nn.Module, problem: str) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        find_final_norm(model)


def test_whether_the_head_reads_the_norm_is_known_apart_from_the_norm() -> None:
    assert why_no_head(Model(NormOfBoth())) == ""
    assert why_no_head(MiniCPM()).startswith("MiniCPM gives its head output / self.scale_width")
