"""The norm whose output a model's head reads."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from midstream.errors import UnsupportedError
from midstream.runtime.models.final_norm import find_final_norm, gain_of, why_no_head


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


class InPlace(Model):
    def forward(self, input_ids: Any) -> Any:
        output = self.model(input_ids)
        output /= self.scale_width
        return output


class ByMethod(Model):
    def forward(self, input_ids: Any) -> Any:
        output = self.model(input_ids)
        output.div_(self.scale_width)
        return output


def test_it_is_the_one_that_the_trunk_ends_with() -> None:
    model = Model()
    assert find_final_norm(model) is model.model.norm


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (MiniCPM(), "MiniCPM gives its head output / self.scale_width, not the output of its norm"),
        (AtOnce(), r"gives its head self.model\(input_ids\) \* self.scale_width"),
        (InPlace(), "InPlace gives its head output /= self.scale_width, not"),
        (ByMethod(), r"ByMethod gives its head output.div_\(self.scale_width\), not"),
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


class Scaled(nn.Module):
    """An RMSNorm that stores its weights less one, or a LayerNorm without a bias."""

    def __init__(self, size: int, subtracts: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, dtype=torch.bfloat16))
        self.subtracts = subtracts

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h - h.mean(-1, keepdim=True) if self.subtracts else h
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
        return (h * (1 + self.weight.float())).to(x.dtype)


def layer_norm(size: int) -> nn.Module:
    norm = nn.LayerNorm(size)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm.bfloat16()


class Clipped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)


@pytest.mark.parametrize(
    ("norm", "gain", "is_centred"),
    [
        (one := Scaled(64, False), one.weight.double() + 1, False),
        (one := Scaled(64, True), one.weight.double() + 1, True),
        (one := nn.RMSNorm(64), torch.ones(64).double(), False),
        (one := layer_norm(64), one.weight.double(), True),
    ],
    ids=["less one", "subtracts", "rms", "layer"],
)
def test_the_weights_of_a_norm_are_read_from_what_it_makes_of_vectors(norm, gain, is_centred):
    found, subtracts = gain_of(norm, 64, torch.device("cpu"))
    assert subtracts is is_centred
    assert float((found / found.norm() - gain / gain.norm()).abs().max()) <= 1e-6
    assert next(iter(norm.parameters())).dtype in (torch.bfloat16, torch.float32)


def test_what_is_no_norm_has_no_weights():
    with pytest.raises(UnsupportedError, match="Clipped is neither an RMSNorm nor a LayerNorm"):
        gain_of(Clipped(), 64, torch.device("cpu"))
