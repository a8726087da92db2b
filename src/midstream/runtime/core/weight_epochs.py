"""Changes of weights in the engine core: no request is served blocks, scores or rows of others.

The first block of a request has a key of the weights that the core knows of, which later blocks
inherit by their hashes. A request that has not begun gets the key anew if weights changed since.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from midstream.config.config import KEY, from_additional_config
from midstream.runtime.core import vector_updates
from midstream.runtime.core.adapter_files import AdapterFiles
from midstream.runtime.protocol.rpc import (
    RPC,
    A,
    CountLoads,
    CountResets,
    NameWeights,
    ReadWeights,
    RpcRequest,
    arguments_of,
    read_answers,
)
from midstream.runtime.vllm.attributes import RESETS, WEIGHT_EPOCHS, WEIGHT_KEY


class WeightEpochs:
    """Counts changes of the weights, and of adapters by name and path."""

    def __init__(self, loads: Callable[[int], int], forget_rows: Callable[[], object]) -> None:
        """Create it; `loads` returns how often workers have loaded an adapter, by vLLM's number,
        and `forget_rows` lets the front end use none of the rows that it keeps.
        """
        self._loads, self._forget_rows = loads, forget_rows
        self._files = AdapterFiles()
        # Adapters by vLLM's number whose files have changed, with how often they were loaded then.
        self._in_doubt: dict[int, int] = {}
        self._count = 0
        self._number = 0  # of the workers' weights, as last read
        self._adapters: dict[tuple[str, str], list[int]] = {}  # vLLM's number, changes

    def see(self, number: int) -> bool:
        """Note the number of the workers' weights; return whether it is another one."""
        if number == self._number:
            return False
        self._number = number
        self._count += 1
        return True

    def see_adapter(self, adapter: Any) -> bool:
        """Note the adapter of a request; return whether it may be another one of its name."""
        known = self._adapters.setdefault(_place(adapter), [adapter.lora_int_id, 0])
        if known[0] == adapter.lora_int_id:
            return False
        self._forget(known[0])
        known[:] = adapter.lora_int_id, known[1] + 1
        return True

    def drop_adapter(self, number: int) -> None:
        self._forget(number)
        for known in self._adapters.values():
            if known[0] == number:
                known[0] = 0  # vLLM's numbers begin at 1

    def _forget(self, number: int) -> None:
        self._files.forget(number)
        self._in_doubt.pop(number, None)

    def see_files(self, adapter: Any) -> None:
        """Look at the files of an adapter. If they changed, it is in doubt until workers load it
        again: they may have what was in them before, until others displace it.
        """
        number = adapter.lora_int_id
        if self._files.have_changed(number, adapter.lora_path):
            self._in_doubt[number] = self._loads(number)

    def is_in_doubt(self, adapter: Any) -> bool:
        """Return whether workers may load an adapter with other weights when its request begins."""
        self.see_files(adapter)
        before = self._in_doubt.get(adapter.lora_int_id)
        if before is None:
            return False
        self._forget_rows()
        if self._loads(adapter.lora_int_id) == before:
            return True
        del self._in_doubt[adapter.lora_int_id]
        self._adapters.setdefault(_place(adapter), [adapter.lora_int_id, 0])[1] += 1
        return False

    def key(self, adapter: Any) -> str:
        """Return the key of the weights and a request's adapter; "" as long as nothing changed."""
        changes = 0 if adapter is None else self._adapters.get(_place(adapter), (0, 0))[1]
        return f"weights {self._count}.{changes}" if self._count or changes else ""


def _place(adapter: Any) -> tuple[str, str]:
    return adapter.lora_name, adapter.lora_path


def prepare(engine: Any) -> None:
    """Let requests of an engine core have a key of its weights, once."""
    manager = engine.scheduler.kv_cache_manager
    if WEIGHT_EPOCHS.get(manager) is None:
        loads = functools.partial(_loads, engine)
        epochs = WeightEpochs(loads, functools.partial(count_reset, engine))
        WEIGHT_EPOCHS.set(manager, epochs)


def renew_key(manager: Any, request: Any) -> None:
    """Hash a request that has not begun anew if its key is not that of the weights by now. vLLM
    hashes a new one without a key.
    """
    epochs: WeightEpochs | None = WEIGHT_EPOCHS.get(manager)
    if epochs is None:
        return
    known = WEIGHT_KEY.get(request) or ""
    alone = f"weights of {request.request_id}"  # of blocks that no other request gets
    if known == alone:
        return
    adapter = request.lora_request
    is_alone = adapter is not None and epochs.is_in_doubt(adapter)
    key = alone if is_alone else epochs.key(adapter)
    if key != known:
        WEIGHT_KEY.set(request, key)
        del request.block_hashes[:]
        request.update_block_hashes()


def see_request(engine: Any, request: Any) -> None:
    """Note the adapter of a request that arrives."""
    adapter = getattr(request, "lora_request", None)
    if adapter is None:
        return
    epochs: WeightEpochs | None = WEIGHT_EPOCHS.get(engine.scheduler.kv_cache_manager)
    if epochs is not None and epochs.see_adapter(adapter):
        count_reset(engine)


def after(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the engine core that may change weights; see which there are afterwards."""
    try:
        return original(engine, *args, **kwargs)
    finally:
        see_weights(engine)


def see_weights(engine: Any) -> None:
    """Ask the workers which weights they have; forget what was kept if these are others."""
    if not vector_updates.is_prepared(engine):
        return
    prepare(engine)
    number = max(answer.number for answer in _answers(engine, ReadWeights()))
    epochs: Any = WEIGHT_EPOCHS.get(engine.scheduler.kv_cache_manager)
    if epochs.see(number):
        count_reset(engine)


def add_lora(original: Callable[..., Any], engine: Any, adapter: Any) -> Any:
    """Look at what an adapter is loaded from; see which weights there are afterwards."""
    epochs: WeightEpochs | None = WEIGHT_EPOCHS.get(engine.scheduler.kv_cache_manager)
    if epochs is not None:
        epochs.see_files(adapter)
    return after(original, engine, adapter)


def remove_lora(original: Callable[..., Any], engine: Any, lora_id: int) -> Any:
    """Note that the next adapter of this name may be another one."""
    epochs: WeightEpochs | None = WEIGHT_EPOCHS.get(engine.scheduler.kv_cache_manager)
    if epochs is not None:
        epochs.drop_adapter(lora_id)
    return original(engine, lora_id)


def _loads(engine: Any, adapter: int) -> int:
    return min(answer.count for answer in _answers(engine, CountLoads(adapter)))


def _answers(engine: Any, message: RpcRequest[A]) -> list[A]:
    answers = engine.model_executor.collective_rpc(RPC, args=arguments_of(message))
    return list(read_answers(message, answers))


def hear_names(engine: Any) -> None:
    """Tell the workers how callers call the weights, in releases in which they may."""
    original = getattr(engine, "set_weight_version", None)
    if original is None:
        return

    @functools.wraps(original)
    def run(weight_version: str) -> None:
        original(weight_version)
        message = arguments_of(NameWeights(str(weight_version)))
        engine.model_executor.collective_rpc(RPC, args=message)
        see_weights(engine)

    engine.set_weight_version = run


def count_reset(engine: Any) -> None:
    """Count a reset if the front end keeps rows; it learns by the workers that these are old."""
    settings = from_additional_config(engine.vllm_config.additional_config)
    if settings is None or not settings.reuse_bytes:
        return
    manager = engine.scheduler.kv_cache_manager
    resets = 1 + (RESETS.get(manager) or 0)
    RESETS.set(manager, resets)
    message = arguments_of(CountResets(resets))
    engine.model_executor.collective_rpc(RPC, args=message, non_block=True)


def extra_key(request: Any, start: int) -> tuple[tuple[str, str], ...]:
    """Return the extra key of weights of the block of a request from `start` on."""
    key = WEIGHT_KEY.get(request) if start == 0 else None
    return ((KEY, key),) if key else ()
