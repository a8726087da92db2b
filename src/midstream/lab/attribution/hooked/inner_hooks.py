"""Hooks on transformers' layers at the sites inside attention and the MLP."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from torch import Tensor, nn

from midstream.lab.attribution.hooked.call_recorder import STREAMS
from midstream.lab.attribution.hooked.inner_finder import (
    AttentionCall,
    InnerSitePlace,
    InnerSitePlaces,
    SubmoduleCall,
    find_inner,
    rows_of,
)

# Called with the rows at a site, [T, W]; returns what takes their place, or None.
Record = Callable[[Tensor], Tensor | None]
# Called with a layer, the path of its attention, and the queries, keys and values, each
# [1, heads, T, width]; returns the queries and keys to use.
_Spy = Callable[[int, str, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
_FUNCTION = "eager_attention_forward"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class InnerHooks:
    """The inner sites of a transformers model's layers; `find` sets `places`, one per layer."""

    def __init__(self, layers: Sequence[nn.Module], config: Any) -> None:
        """Create for decoder layers; `config` is that of the text model."""
        self._layers = layers
        self._width = int(config.hidden_size)
        counts = (getattr(config, name, None) for name in _EXPERTS)
        self._experts = next((count for count in counts if isinstance(count, int) and count), 0)
        self.places: list[InnerSitePlaces] = []

    def find(self, run: Callable[[], object], length: int, mlp_outs: Sequence[str | None]) -> None:
        """Find the sites of every layer by `run`, one plain forward pass of `length` tokens."""
        calls: list[SubmoduleCall] = []
        attention: list[AttentionCall] = []
        self.places = []
        handles = []

        def after(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
                tensors = [
                    argument
                    for argument in (*args, *kwargs.values())
                    if isinstance(argument, Tensor)
                ]
                several = isinstance(out, tuple) and len(out) > 1
                first = out[0] if isinstance(out, tuple) and out else out
                rows = rows_of(tensors[0], length) if tensors else None
                calls.append(SubmoduleCall(path, module, rows, rows_of(first, length), several))

            return hook

        def ended(index: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                added = (call.returned for call in calls if call.path == mlp_outs[index])
                self.places.append(
                    find_inner(calls, attention, next(added, None), self._width, self._experts)
                )
                calls.clear()
                attention.clear()

            return hook

        def spy(
            _: int, path: str, query: Tensor, key: Tensor, value: Tensor
        ) -> tuple[Tensor, Tensor]:
            states = [rows_of(tensor, length) for tensor in (query, key, value)]
            if all(state is not None for state in states):
                heads = (query.shape[1], key.shape[1], value.shape[1])
                attention.append(AttentionCall(path, tuple(states), heads))  # type: ignore[arg-type]
            return query, key

        for index, layer in enumerate(self._layers):
            for path, module in layer.named_modules():
                if path:
                    handles.append(module.register_forward_hook(after(path), with_kwargs=True))
            handles.append(layer.register_forward_hook(ended(index)))
        with removing(handles), self._attention(spy):
            run()

    @contextmanager
    def recording(self, records: Mapping[tuple[str, int], Record]) -> Iterator[None]:
        """Call a function with the rows at each of some (site, layer) while this is open."""
        arguments: dict[tuple[int, str], Record] = {}
        handles = []
        for (site, index), record in records.items():
            place = self.places[index].found[site]
            if place.at in ("query", "key"):
                arguments[index, place.at] = record
                continue
            module = self._layers[index].get_submodule(place.path)
            replaced = partial(_with_columns, place, record)
            if place.at == "input":
                hook = entry_hook(replaced)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                handles.append(module.register_forward_hook(exit_hook(replaced)))

        def spy(
            index: int, _: str, query: Tensor, key: Tensor, __: Tensor
        ) -> tuple[Tensor, Tensor]:
            return (
                _replaced(query, arguments.get((index, "query"))),
                _replaced(key, arguments.get((index, "key"))),
            )

        with removing(handles), self._attention(spy):
            yield

    @contextmanager
    def _attention(self, spy: _Spy) -> Iterator[None]:
        """Wrap the attention functions of the model's code, which the reference has as eager."""
        owners = {
            id(module): (index, path)
            for index, layer in enumerate(self._layers)
            for path, module in layer.named_modules()
        }
        files = {
            cls.__module__
            for layer in self._layers
            for module in layer.modules()
            for cls in type(module).__mro__
            if hasattr(sys.modules.get(cls.__module__), _FUNCTION)
        }

        def wrapped(plain: Callable[..., Any]) -> Callable[..., Any]:
            def attend(
                module: nn.Module,
                query: Tensor,
                key: Tensor,
                value: Tensor,
                *rest: Any,
                **more: Any,
            ) -> Any:
                if id(module) in owners:
                    query, key = spy(*owners[id(module)], query, key, value)
                return plain(module, query, key, value, *rest, **more)

            return attend

        with ExitStack() as stack:
            for name in files:
                plain = getattr(sys.modules[name], _FUNCTION)
                stack.enter_context(mock.patch.object(sys.modules[name], _FUNCTION, wrapped(plain)))
            yield


@contextmanager
def removing(handles: Sequence[Any]) -> Iterator[None]:
    """Remove hooks in the end."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def entry_hook(replaced: Record) -> Callable[..., Any]:
    """Return a pre-forward hook that replaces the module's first tensor argument."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and isinstance(args[0], Tensor):
            changed = replaced(args[0])
            return None if changed is None else ((changed, *args[1:]), kwargs)
        name = next(name for name in STREAMS if isinstance(kwargs.get(name), Tensor))
        changed = replaced(kwargs[name])
        return None if changed is None else (args, {**kwargs, name: changed})

    return hook


def exit_hook(replaced: Record) -> Callable[..., Any]:
    """Return a forward hook that replaces the module's first result."""

    def hook(_module: nn.Module, _args: tuple[Any, ...], out: Any) -> Any:
        changed = replaced(out[0] if isinstance(out, tuple) else out)
        if changed is None:
            return None
        return (changed, *out[1:]) if isinstance(out, tuple) else changed

    return hook


def _with_columns(place: InnerSitePlace, record: Record, whole: Tensor) -> Tensor | None:
    """Return a tensor with some columns replaced; None if they stay."""
    rows = whole.reshape(-1, whole.shape[-1])
    changed = record(rows[:, place.start : place.start + place.width])
    if changed is None:
        return None
    rows = rows.clone()
    rows[:, place.start : place.start + place.width] = changed
    return rows.reshape(whole.shape)


def _replaced(states: Tensor, record: Record | None) -> Tensor:
    """Return queries or keys [1, heads, T, width] after a function of their rows."""
    if record is None:
        return states
    changed = record(states[0].transpose(0, 1).flatten(1))
    if changed is None:
        return states
    reshaped: Tensor = changed.unflatten(1, (states.shape[1], -1)).transpose(0, 1)[None]
    return reshaped.contiguous()
