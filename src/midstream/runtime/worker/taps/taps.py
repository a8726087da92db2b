"""Taps: a module's class is replaced by one whose `__call__` calls the `site` op."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from midstream.errors import TapError, UnsupportedError
from midstream.ops.site import bind
from midstream.runtime.models.convention import Half, Input, LayerConvention, Output, Returns
from midstream.runtime.models.decoder import DecoderLayer
from midstream.runtime.models.inner_sites import InnerPlace
from midstream.runtime.worker.tables.device_buffers import Buffers
from midstream.sites import BY_NAME, Tap


class TappedLayer(nn.Module):
    """First base of a tapped decoder layer's class. Taps at entry: `embed`, if the first layer gets
    that, `resid_pre`; at exit: a branch that is the first half of what it returns, `resid_post`.
    """

    midstream_embed: Tensor | None
    midstream_pre: Tensor | None
    midstream_branch: Tensor | None
    midstream_post: Tensor | None
    midstream_returns: Returns
    midstream_hidden: tuple[str, int]
    midstream_residual: tuple[str, int] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.midstream_embed is not None:
            hidden = _argument(args, kwargs, self.midstream_hidden)
            _fire(self, self.midstream_embed, hidden, None)
        if self.midstream_pre is not None:
            hidden = _argument(args, kwargs, self.midstream_hidden)
            residual = None
            if self.midstream_residual is not None:
                residual = _argument(args, kwargs, self.midstream_residual)
            _fire(self, self.midstream_pre, hidden, residual)
        out = super().__call__(*args, **kwargs)
        if self.midstream_branch is not None or self.midstream_post is not None:
            hidden, residual = _split(out, self.midstream_returns)
            if self.midstream_branch is not None:
                _fire(self, self.midstream_branch, hidden, None)
            if self.midstream_post is not None:
                _fire(self, self.midstream_post, hidden, residual)
        return out


class TappedModule(nn.Module):
    """First base of the class of a tapped module inside a layer. At entry: `attn_out` of a pair,
    `resid_mid`, the input, copied first if others use it, columns of arguments, copied if rotated
    in place. At exit: a branch, columns of what it returns, or the switches of `LogitBias`.
    """

    midstream_half: Tensor | None
    midstream_mid: Tensor | None
    midstream_input: Tensor | None
    midstream_parameter: tuple[str, int] | None
    midstream_copies: bool
    midstream_output: Tensor | None
    midstream_taken: tuple[_Columns, ...]
    midstream_given: tuple[_Columns, ...]
    midstream_logits: Tensor | None
    midstream_switches: Tensor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.midstream_half is not None:
            _fire(self, self.midstream_half, _first(args, self), None)
        if self.midstream_mid is not None:
            residual = args[1] if len(args) > 1 else kwargs.get("residual")
            _fire(self, self.midstream_mid, _first(args, self), residual)
        if self.midstream_input is not None:
            where = self.midstream_parameter
            value = _first(args if where is None else (_argument(args, kwargs, where),), self)
            if self.midstream_copies:
                value = value.clone()
                args, kwargs = _with_argument(value, args, kwargs, where or ("", 0))
            _fire(self, self.midstream_input, value, None)
        for columns in self.midstream_taken:
            taken = _first((_argument(args, kwargs, columns.parameter),), self)
            if columns.copies:
                taken = taken.clone()
                args, kwargs = _with_argument(taken, args, kwargs, columns.parameter)
            _fire_columns(self, columns, taken)
        out = super().__call__(*args, **kwargs)
        # Attention on the Transformers backend, some mixtures of experts and vLLM's linear layers
        # return more than the value of the tap.
        returned = out if isinstance(out, tuple) else (out,)
        if self.midstream_output is not None:
            _fire(self, self.midstream_output, _first(returned, self), None)
        for columns in self.midstream_given:
            _fire_columns(self, columns, _first(returned, self))
        if self.midstream_logits is not None:
            # All rows of the buffer: a part of it would be a view of another tensor in each graph.
            _fire(self, self.midstream_logits, self.midstream_switches, None)
        return out


class _Columns(NamedTuple):
    """A site that is columns of a tensor."""

    table: Tensor
    start: int
    by_head: bool  # they are of heads, which are a dimension of their own in some models
    # (name, index) of that with the tensor; not read at an exit
    parameter: tuple[str, int] = ("", 0)
    copies: bool = False  # the module gets a copy of the tensor, which is tapped
    streams: int = 0  # of a tensor [streams, T, H]; 0: it has a row for each token


@dataclass(frozen=True, slots=True)
class _Role:
    """One site at a module of a layer."""

    attribute: str  # of `TappedModule`, for the table of the tap
    path: str  # of the module within the layer
    site: str
    copies: bool = False  # its input is copied first
    parameter: str | None = None  # with its input; None: the first one


def modules_to_tap(layer: DecoderLayer, sites: Collection[str]) -> list[nn.Module]:
    """Return the layer, and the modules in it and beside it whose class `tap_layer` replaces."""
    roles = [role for role in _roles(layer.convention) if role.site in sites]
    paths = [(role.path, role.site) for role in roles]
    paths += [(place.path, site) for site, place in layer.inner.items() if site in sites]
    ends = [end for site, end in layer.ends.items() if site in sites and end is not None]
    return [layer.module, *(_find_module(layer.module, *path) for path in paths), *ends]


def tap_layer(layer: DecoderLayer, taps: dict[Tap, int], buffers: Buffers) -> None:
    """Add a layer's taps, replacing its modules' classes in place; `taps` are this rank's."""
    module: Any = layer.module
    convention = layer.convention
    tables = {}
    for (site, number), index in taps.items():
        if number == layer.index:
            tables[site] = buffers.table[index]
            bind(tables[site], buffers, buffers.width(index))
    at_exit = [site for site, place in convention.branches.items() if place is Half.AT_EXIT]
    entry = {"resid_pre"}
    if "embed" in layer.ends and layer.ends["embed"] is None:
        entry.add("embed")
    if (tables.keys() - layer.inner.keys()) & {*entry, "resid_post", *at_exit}:
        residual = convention.residual
        hidden_at = _parameter(module, convention.hidden)
        residual_at = None if residual is None else _parameter(module, residual)
        _swap(module, TappedLayer, buffers)
        module.midstream_pre = tables.get("resid_pre")
        module.midstream_post = tables.get("resid_post")
        module.midstream_embed = tables.get("embed") if "embed" in entry else None
        module.midstream_branch = next((tables[s] for s in at_exit if s in tables), None)
        module.midstream_returns = convention.returns
        module.midstream_hidden, module.midstream_residual = hidden_at, residual_at
    swapped: list[Any] = []
    for role in _roles(convention):
        if role.site not in tables:
            continue
        inner = _find_module(module, role.path, role.site)
        _tap_module(inner, swapped, buffers)
        if getattr(inner, role.attribute) is not None:
            raise UnsupportedError(
                f"{type(layer.module).__qualname__}: {role.site} and another site are both the "
                f"{role.attribute.removeprefix('midstream_')} of {role.path!r}"
            )
        setattr(inner, role.attribute, tables[role.site])
        inner.midstream_copies |= role.copies
        if role.parameter is not None:
            # The class is a tapped one by now, whose forward is the module's own.
            inner.midstream_parameter = _parameter(inner, role.parameter)
    for site, place in sorted(layer.inner.items(), key=lambda item: BY_NAME[item[0]].order):
        if site in tables:
            inner = _find_module(module, place.path, site)
            _tap_module(inner, swapped, buffers)
            copies = site in ("rot_q", "rot_k") and _rotates_in_place(module)
            _add_columns(inner, place, tables[site], copies)
    for site, end in layer.ends.items():
        if site in tables and end is not None:
            _tap_module(end, swapped, buffers)
            name = "midstream_logits" if site == "logits" else "midstream_output"
            setattr(end, name, tables[site])


def _tap_module(module: Any, swapped: list[Any], buffers: Buffers) -> None:
    """Make a module a `TappedModule` without taps, unless `swapped`, which it joins, has it."""
    if any(module is other for other in swapped):
        return
    _swap(module, TappedModule, buffers)
    module.midstream_half = module.midstream_mid = None
    module.midstream_input = module.midstream_output = None
    module.midstream_copies, module.midstream_parameter = False, None
    module.midstream_taken = module.midstream_given = ()
    module.midstream_logits, module.midstream_switches = None, buffers.switches
    swapped.append(module)


def _add_columns(module: Any, place: InnerPlace, table: Tensor, copies: bool) -> None:
    by_head = place.heads > 0
    streams = place.heads if place.streams else 0
    if place.at == "output":
        module.midstream_given += (_Columns(table, place.start, by_head, streams=streams),)
        return
    # The class is a tapped one by now, whose forward is the module's own.
    names = _parameter_names(module)
    parameter = _parameter(module, place.argument or names[0])
    module.midstream_taken += (_Columns(table, place.start, by_head, parameter, copies, streams),)


def _rotates_in_place(layer: nn.Module) -> bool:
    """Return whether rotary embeddings are an op that changes queries and keys in place: vLLM's
    passes write its result over its input, and miss other changes of these.
    """
    rotary = [module for module in layer.modules() if "Rotary" in type(module).__name__]
    chosen = [getattr(module, "_forward_method", module.forward) for module in rotary]
    return any(method.__name__ != "forward_native" for method in chosen)


def _roles(convention: LayerConvention) -> list[_Role]:
    roles = []
    if convention.mid is not None:
        roles.append(_Role("midstream_mid", convention.mid, "resid_mid"))
        if convention.attn_out is Half.AT_MID:
            roles.append(_Role("midstream_half", convention.mid, "attn_out"))
    for site, place in convention.branches.items():
        if isinstance(place, Input):
            roles.append(_Role("midstream_input", place.path, site, place.shared, place.parameter))
        elif isinstance(place, Output):
            roles.append(_Role("midstream_output", place.path, site))
    return roles


def _fire(module: Any, table: Tensor, hidden: Tensor, residual: Tensor | None) -> None:
    width = hidden.shape[-1]
    # The layers of transformers have a batch dimension of one: [1, T, H].
    flat = hidden if hidden.dim() == 2 else hidden.view(-1, width)
    if residual is not None and residual.dim() != 2:
        residual = residual.view(-1, width)
    torch.ops.midstream.site(flat, residual, table, module.midstream_tally)


def _fire_columns(module: Any, columns: _Columns, value: Tensor) -> None:
    if columns.streams:
        wide = value.transpose(0, 1).flatten(1).contiguous()
        torch.ops.midstream.site(wide, None, columns.table, module.midstream_tally, columns.start)
        value.copy_(wide.unflatten(1, (columns.streams, -1)).transpose(0, 1))
        return
    flat = value
    if value.dim() != 2:
        # [T, heads, size], or of the layers of transformers [1, T, width]. A view fails where a
        # copy would be needed, on which an edit would be lost.
        rows = value.shape[0] if columns.by_head else -1
        flat = value.view(rows, -1 if columns.by_head else value.shape[-1])
    torch.ops.midstream.site(flat, None, columns.table, module.midstream_tally, columns.start)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], where: tuple[str, int]) -> Any:
    name, index = where
    if name in kwargs:
        return kwargs[name]
    return args[index] if index < len(args) else None


def _with_argument(
    value: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], where: tuple[str, int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another value of one."""
    name, index = where
    if name in kwargs:
        return args, {**kwargs, name: value}
    return (*args[:index], value, *args[index + 1 :]), kwargs


def _first(values: tuple[Any, ...], module: nn.Module) -> Tensor:
    if values and isinstance(values[0], torch.Tensor):
        return values[0]
    raise TapError(
        f"a {type(module).__qualname__} was called with or returned {_describe(values)}; "
        "expected a tensor first"
    )


def _split(out: Any, returns: Returns) -> tuple[Tensor, Tensor | None]:
    """Return the two halves of the residual stream in what a layer returned."""
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
        f"a layer returned {_describe(out)}; its convention is {returns.name}: {returns.value}"
    )


def _describe(out: Any) -> str:
    if isinstance(out, tuple):
        return f"a tuple of {len(out)}: ({', '.join(type(part).__name__ for part in out)})"
    return type(out).__name__


def _parameter(module: nn.Module, name: str) -> tuple[str, int]:
    """Return (name, index) of a parameter of a module's forward."""
    names = _parameter_names(module)
    if name not in names:
        raise UnsupportedError(
            f"{type(module).__qualname__}.forward has no parameter {name!r}; it has "
            f"{', '.join(names)}"
        )
    return name, names.index(name)


def _parameter_names(module: nn.Module) -> list[str]:
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _find_module(module: nn.Module, path: str, site: str) -> Any:
    submodule: Any = module
    for name in path.split(".") if path else ():
        submodule = getattr(submodule, name, None)
    if not isinstance(submodule, nn.Module):
        raise UnsupportedError(
            f"{type(module).__qualname__} has no module {path!r}, where its convention has {site}"
        )
    return submodule


def _swap(module: Any, tapped: type[nn.Module], buffers: Buffers) -> None:
    cls = type(module)
    if issubclass(cls, (TappedLayer, TappedModule)):
        raise UnsupportedError(f"a {cls.__qualname__} is shared by several layers")
    # Logs and vLLM's registries that read a class's module get the original's.
    namespace = {"__module__": cls.__module__, "__qualname__": f"Tapped{cls.__qualname__}"}
    module.__class__ = type(f"Tapped{cls.__name__}", (tapped, cls), namespace)
    # Tables and tally are plain attributes of the tapped module, so that graph compilation sees
    # tensors at fixed addresses, and sleep mode, state dicts and weight reloading see nothing.
    module.midstream_tally = buffers.tally


def check_drafter(runner: Any) -> None:
    """Reject a drafter that shares tapped modules with the model: it would fire the taps."""
    drafter = _drafter(runner)
    if drafter is None:
        return
    for name, module in drafter.named_modules():
        if isinstance(module, TappedLayer | TappedModule):
            raise UnsupportedError(
                f"the drafter of speculative_config, a {type(drafter).__name__}, shares its {name} "
                "with the model: draft tokens would be captured and edited too"
            )


def _drafter(runner: Any) -> nn.Module | None:
    """Return the drafter's model; None for drafters without one, such as n-grams."""
    for name in ("drafter", "speculator"):
        model = getattr(getattr(runner, name, None), "model", None)
        unwrap = getattr(model, "unwrap", None)
        if callable(unwrap) and not isinstance(model, nn.Module):
            model = unwrap()  # a wrapper that replays the model's graphs
        if isinstance(model, nn.Module):
            return model
    return None
