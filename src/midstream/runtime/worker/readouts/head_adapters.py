"""LoRA adapters of the head, for other rows than those that vLLM samples from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class HeadAdapters:
    """Applies to each row through the head its request's adapter: vLLM's LoRA wrapper has metadata
    of sampled rows only, and gets another object in place.
    """

    def __init__(self, model: nn.Module) -> None:
        from vllm.lora.layers.logits_processor import LogitsProcessorWithLoRA

        self._processors: list[Any] = [
            module for module in model.modules() if isinstance(module, LogitsProcessorWithLoRA)
        ]
        # Of each processor, the slots whose adapter changes the head: few adapters do.
        self._slots: list[set[int]] = [_watched(processor) for processor in self._processors]

    @contextmanager
    def of_rows(self, rows: Tensor) -> Iterator[None]:
        """Let the processors apply the adapters of these rows of the step's batch, int64 [n]."""
        wrappers = [wrapped.punica_wrapper for wrapped in self._processors]
        try:
            for processor, wrapper, slots in zip(
                self._processors, wrappers, self._slots, strict=True
            ):
                processor.punica_wrapper = _OfRows(wrapper.token_lora_indices[rows], sorted(slots))
            yield
        finally:
            for processor, wrapper in zip(self._processors, wrappers, strict=True):
                processor.punica_wrapper = wrapper


class _OfRows:
    """Stands for vLLM's `PunicaWrapper`; `of_row`: int64 [n], each row's slot of adapters or −1."""

    def __init__(self, of_row: Tensor, slots: Sequence[int]) -> None:
        self._of_row = of_row
        self._slots = slots

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        **_: Any,
    ) -> Tensor:
        """Add scale · B·A·x to y [n, vocabulary + padding], with the matrices of each row's
        adapter: x [n, hidden], A [slots, 1, rank, hidden], B [slots, 1, vocabulary, rank].
        """
        for slot in self._slots:
            small = x.float() @ lora_a_stacked[slot, 0].float().T * scale
            # Not a product: a value that is not finite stays in its own row.
            small = torch.where((self._of_row == slot)[:, None], small, 0.0)
            added = small @ lora_b_stacked[slot, 0].float().T
            y[:, : added.shape[1]] += added.to(y.dtype)
        return y


def _watched(processor: Any) -> set[int]:
    """Return the slots of a processor that hold matrices, which changes with the adapters."""
    slots: set[int] = set()
    set_lora, reset_lora = processor.set_lora, processor.reset_lora

    def set_watched(index: int, *args: Any, **kwargs: Any) -> None:
        set_lora(index, *args, **kwargs)
        slots.add(index)

    def reset_watched(index: int) -> None:
        reset_lora(index)
        slots.discard(index)

    processor.set_lora, processor.reset_lora = set_watched, reset_watched
    return slots
