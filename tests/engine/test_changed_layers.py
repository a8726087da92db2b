"""Layers that run another forward than the one that midstream knows: the engine does not start."""

from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
from support.engines import engine

from midstream.errors import UnsupportedError

SITES = ["resid_pre", "attn_in", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post"]


def _halved(self: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
    """The forward of a Llama layer, but the skip connection is halved."""
    if residual is None:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
    else:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
    hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
    hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
    return self.mlp(hidden_states), residual * 0.5


def _scaled_skip(layer: Any) -> None:
    """As of a norm of DeepNorm's kind: it scales the skip connection."""
    norm = layer.post_attention_layernorm
    forward = norm.forward

    def scaling(hidden: Any, residual: Any = None) -> Any:
        return forward(hidden, residual if residual is None else residual * 1.1)

    norm.forward = scaling


def _own_forward(layer: Any) -> None:
    layer.forward = MethodType(_halved, layer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_scaled_skip, "resid_mid of layer 0 [+] mlp_out of layer 0 is not resid_post of layer 0"),
        (_own_forward, "its `forward` was replaced on the layer, by .*_halved"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_that_was_changed_after_it_was_built_is_refused(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Any], None],
    message: str,
    dtype: str,
) -> None:
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    build = LlamaDecoderLayer.__init__

    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        change(self)

    monkeypatch.setattr(LlamaDecoderLayer, "__init__", changed)
    with (
        pytest.raises(UnsupportedError, match=message),
        engine(tiny_llama, midstream={"sites": SITES}, dtype=dtype),
    ):
        pass


def test_a_layer_class_whose_forward_was_replaced_is_refused_whatever_is_tapped(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.models.llama import LlamaDecoderLayer

    monkeypatch.setattr(LlamaDecoderLayer, "forward", _halved)
    message = "`forward` of its class was replaced, by .*_halved"
    with pytest.raises(UnsupportedError, match=message), engine(tiny_llama):
        pass
