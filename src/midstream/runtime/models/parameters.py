"""Parameters of a loaded model outside its decoder layers: embeddings, final norm, head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from midstream.runtime.models.decoder import find_layers, find_root

HEAD = "lm_head.weight"
# A LoRA module holds the module that it replaces under this name.
_REPLACED = "base_layer."


@dataclass(frozen=True, slots=True)
class OuterParameter:
    """This rank's part of a parameter: rows [first, first + n) of its first dimension."""

    rows: Tensor
    first: int
    total: int  # rows of the whole parameter
    shared: bool  # every rank of the tensor-parallel group has the same rows
    problem: str = ""  # why the whole cannot be read; empty if it can

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.total, *self.rows.shape[1:])


def find_parameters(model: nn.Module, ties_head: bool) -> dict[str, OuterParameter]:
    """Return this rank's part of each parameter outside the layers, by the model's name for it."""
    root = find_root(model)
    inside = {id(parameter) for parameter in find_layers(model).parameters()}
    parameters: dict[str, OuterParameter] = {}
    embedding: OuterParameter | None = None
    for path, module in root.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in inside:
                continue
            part = _part(module, parameter)
            parameters[f"{path}.{name}".replace(_REPLACED, "")] = part
            if embedding is None and isinstance(module, VocabParallelEmbedding):
                embedding = part
    if ties_head and embedding is not None:
        parameters.setdefault(HEAD, embedding)
    return parameters


def find_head(model: nn.Module, ties_head: bool) -> OuterParameter | None:
    """Return this rank's part of the head, [vocabulary, width]; None: it has none of it."""
    heads: dict[int, OuterParameter] = {}
    embedding: OuterParameter | None = None
    for module in find_root(model).modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, VocabParallelEmbedding) or not isinstance(weight, Tensor):
            continue
        part = _part(module, weight)
        if isinstance(module, ParallelLMHead):
            heads[id(weight)] = part
        elif embedding is None:
            embedding = part
    if len(heads) == 1:
        return next(iter(heads.values()))
    return embedding if ties_head and not heads else None


def _part(module: nn.Module, parameter: Tensor) -> OuterParameter:
    rows, dtype = parameter.detach(), parameter.dtype
    problem = ""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        problem = f"it is quantised, as {str(dtype).removeprefix('torch.')}"
    elif not rows.dim():
        problem = "it has no dimension"
    elif isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.tp_size > 1:
        problem = (
            f"it belongs to a {type(module).__name__} that is split over {module.tp_size} GPUs"
        )
    if problem:
        return OuterParameter(rows, 0, 0, True, problem)
    if isinstance(module, VocabParallelEmbedding):
        # Rows after these are padding.
        places = module.shard_indices
        first, stop = places.org_vocab_start_index, places.org_vocab_end_index
        return OuterParameter(rows[: stop - first], first, module.org_vocab_size, False)
    return OuterParameter(rows, 0, rows.shape[0], True)
