"""Decoder layers that compute in float32 for a while, whatever the dtype of their weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from midstream.lab.attribution.hooked.inner_hooks import removing


@contextmanager
def in_float32(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Let layers compute in float32, one at a time; the last one's output has its own dtype."""
    lower = [layer for layer in layers if any(map(_is_lower, layer.parameters()))]
    with ExitStack() as stack:
        for layer in lower:
            stack.enter_context(_one_in_float32(layer, layer is lower[-1]))
        yield


@contextmanager
def _one_in_float32(layer: nn.Module, is_last: bool) -> Iterator[None]:
    own: list[tuple[Tensor, Tensor]] = []
    dtypes: list[torch.dtype] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtypes[:] = [next(filter(_is_lower, layer.parameters())).dtype]
        for tensor in [*layer.parameters(), *layer.buffers()]:
            if _is_lower(tensor):
                own.append((tensor, tensor.data))
                tensor.data = tensor.data.float()
        return tree_map(_float, args), tree_map(_float, kwargs)

    def restore() -> None:
        while own:
            tensor, data = own.pop()
            tensor.data = data

    def after(_module: nn.Module, _args: Any, out: Any) -> Any:
        restore()
        return tree_map(lambda value: _cast(value, dtypes[0]), out) if is_last else None

    handles = [
        layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        layer.register_forward_hook(after),
    ]
    with removing(handles):
        try:
            yield
        finally:
            restore()


def _is_lower(value: Any) -> bool:
    """Return whether a value is a tensor of a float dtype below float32."""
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _float(value: Any) -> Any:
    return value.float() if _is_lower(value) else value


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
