"""What changes the weights of a worker."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from midstream.runtime.worker.step.weight_states import WeightStates


def watch_weights(worker: Any, states: WeightStates, forget: Callable[[], None]) -> None:
    """Note what changes the weights of a worker whose model is loaded; call `forget` first, which
    drops what was made of them.
    """
    runner = worker.model_runner

    def change(*_args: Any, **_kwargs: Any) -> None:
        forget()
        states.change()

    # By the model's own method too: trainers in the worker's process call nothing else.
    for owner, names in (
        (runner.get_model(), ("load_weights",)),
        (runner, ("reload_weights",)),
        (worker, ("update_weights", "finish_weight_update", "reset_weights")),
    ):
        for name in names:
            if hasattr(owner, name):
                _before(owner, name, change)

    def fall_asleep(level: int = 1) -> None:
        if level > 1:  # which drops them; level 1 brings the same ones back
            change()

    _before(worker, "sleep", fall_asleep)
    adapters = getattr(runner, "lora_manager", None)
    if adapters is not None:
        _noting_adapters(adapters, "_load_adapter", states)


def _before(owner: Any, name: str, note: Callable[..., None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, run)


def _noting_adapters(manager: Any, name: str, states: WeightStates) -> None:
    """Note adapters that are loaded with other weights than the last one of their name."""
    load, digests = getattr(manager, name), dict[str, bytes]()

    @functools.wraps(load)
    def run(request: Any) -> Any:
        adapter = load(request)
        states.loads[request.lora_int_id] += 1
        digest = _adapter_digest(adapter)
        if digests.get(request.lora_name, digest) != digest:
            states.change()
        digests[request.lora_name] = digest
        return adapter

    setattr(manager, name, run)


def _adapter_digest(adapter: Any) -> bytes:
    digest = hashlib.blake2b()
    for name, layer in sorted(adapter.loras.items()):
        digest.update(name.encode())
        for tensor in _tensors([layer.lora_a, layer.lora_b]):
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


def _tensors(parts: Any) -> Iterator[torch.Tensor]:
    """Yield tensors of lists of them, which layers of several projections have."""
    if isinstance(parts, torch.Tensor):
        yield parts
    elif isinstance(parts, list | tuple):
        for part in parts:
            yield from _tensors(part)
