"""Taps: a layer's class is swapped for a subclass whose `__call__` calls the `site` op.

`__call__`, not `forward`: weight offloaders put an instance-level `forward` in the way of a
class-level one, and every tap would be passed by in silence. The swap is done after the weights
are loaded and before anything is traced, so that it is part of whatever graph is compiled.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

import midstream.ops.site  # noqa: F401  (defines torch.ops.midstream.site)
from midstream.errors import TapError, UnsupportedError
from midstream.runtime.buffers import Buffers, Tap
from midstream.runtime.conventions import LayerConvention, Returns
from midstream.runtime.layers import DecoderLayer

# The buffers are plain attributes of the tapped module, so that graph compilation sees tensors at
# fixed addresses, and sleep mode, state dicts and weight reloading see nothing.
_SHARED = ("tokens", "tally", "edit_rows", "edit_scales", "bank", "ring")


class TappedLayer(nn.Module):
    """First base of a tapped decoder layer's class: `resid_pre` at entry, `resid_post` at exit."""

    midstream_pre: Tensor | None
    midstream_post: Tensor | None
    midstream_returns: Returns
    midstream_hidden: tuple[str, int]
    midstream_residual: tuple[str, int] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.midstream_pre is not None:
            hidden = _argument(args, kwargs, self.midstream_hidden)
            residual = None
            if self.midstream_residual is not None:
                residual = _argument(args, kwargs, self.midstream_residual)
            _fire(self, self.midstream_pre, hidden, residual)
        out = super().__call__(*args, **kwargs)
        if self.midstream_post is not None:
            hidden, residual = _split(out, self.midstream_returns)
            _fire(self, self.midstream_post, hidden, residual)
        return out


class TappedEntry(nn.Module):
    """First base of the class of the module at whose entry `resid_mid` stands."""

    midstream_mid: Tensor

    def __call__(self, stream: Tensor, *args: Any, **kwargs: Any) -> Any:
        residual = args[0] if args else kwargs.get("residual")
        _fire(self, self.midstream_mid, stream, residual)
        return super().__call__(stream, *args, **kwargs)


def tap_layer(layer: DecoderLayer, taps: dict[Tap, int], buffers: Buffers) -> None:
    """Taps one layer at those of `taps` that are its own.

    Args:
        layer: the layer; its class (and that of the module at `resid_mid`) is swapped in place.
        taps: every tap of this rank, with its index in `buffers.table`.
        buffers: what the taps work on.

    Raises:
        UnsupportedError: the layer is not as its convention says.
    """

    def table(site: str) -> Tensor | None:
        index = taps.get((site, layer.index))
        return None if index is None else buffers.table[index]

    module: Any = layer.module
    convention = layer.convention
    pre, mid, post = table("resid_pre"), table("resid_mid"), table("resid_post")
    if pre is not None or post is not None:
        parameters = _parameters(module, convention)
        _swap(module, TappedLayer, buffers)
        module.midstream_pre, module.midstream_post = pre, post
        module.midstream_returns = convention.returns
        module.midstream_hidden = parameters[0]
        module.midstream_residual = parameters[1]
    if mid is not None:
        entry = _find_entry(module, convention)
        _swap(entry, TappedEntry, buffers)
        entry.midstream_mid = mid


def _fire(module: Any, table: Tensor, hidden: Tensor, residual: Tensor | None) -> None:
    width = hidden.shape[-1]
    # Transformers' own layers carry a batch dimension of one: [1, T, H].
    flat = hidden if hidden.dim() == 2 else hidden.view(-1, width)
    if residual is not None and residual.dim() != 2:
        residual = residual.view(-1, width)
    torch.ops.midstream.site(
        flat,
        residual,
        module.midstream_tokens,
        module.midstream_tally,
        table,
        module.midstream_edit_rows,
        module.midstream_edit_scales,
        module.midstream_bank,
        module.midstream_ring,
    )


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], where: tuple[str, int]) -> Any:
    name, index = where
    if name in kwargs:
        return kwargs[name]
    return args[index] if index < len(args) else None


def _split(out: Any, returns: Returns) -> tuple[Tensor, Tensor | None]:
    """The two halves of the stream in what a layer returned."""
    if returns is Returns.SINGLE:
        if isinstance(out, torch.Tensor):
            return out, None
    elif isinstance(out, tuple) and len(out) == 2:
        hidden, residual = out
        if returns is Returns.PAIR:
            return hidden, residual
        if returns is Returns.PAIR_DEAD or residual is None:
            return hidden, None
    raise TapError(
        f"a layer returned {_describe(out)}, its convention says {returns.name}: {returns.value}"
    )


def _describe(out: Any) -> str:
    if isinstance(out, tuple):
        return f"a tuple of {len(out)}: ({', '.join(type(part).__name__ for part in out)})"
    return type(out).__name__


def _parameters(
    module: nn.Module, convention: LayerConvention
) -> tuple[tuple[str, int], tuple[str, int] | None]:
    """(name, position) of the parameters that carry the two halves of the stream at entry."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    def find(name: str) -> tuple[str, int]:
        if name not in names:
            raise UnsupportedError(
                f"{type(module).__qualname__}.forward has no parameter {name!r}; it has "
                f"{', '.join(names)}"
            )
        return name, names.index(name)

    residual = convention.residual
    return find(convention.hidden), None if residual is None else find(residual)


def _find_entry(module: nn.Module, convention: LayerConvention) -> Any:
    assert convention.mid is not None
    entry: Any = module
    for name in convention.mid.split("."):
        entry = getattr(entry, name, None)
    if not isinstance(entry, nn.Module):
        raise UnsupportedError(
            f"{type(module).__qualname__} has no module {convention.mid!r}, at whose entry "
            "resid_mid is to be found"
        )
    return entry


def _swap(module: Any, tapped: type[nn.Module], buffers: Buffers) -> None:
    cls = type(module)
    if issubclass(cls, (TappedLayer, TappedEntry)):
        raise UnsupportedError(f"a {cls.__qualname__} is shared by several layers")
    # What looks at a class's module (logs, vLLM's registries) sees the original's.
    namespace = {"__module__": cls.__module__, "__qualname__": f"Tapped{cls.__qualname__}"}
    module.__class__ = type(f"Tapped{cls.__name__}", (tapped, cls), namespace)
    for name in _SHARED:
        setattr(module, f"midstream_{name}", getattr(buffers, name))
