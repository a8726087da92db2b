"""Answers of a worker about parameters of its model: rows of them, and directions of tokens."""

from __future__ import annotations

import torch
from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.models.parameters import find_head, find_parameters
from midstream.runtime.protocol.rpc import (
    ParameterRows,
    ReadDirections,
    ReadParameter,
    TokenDirections,
)
from midstream.runtime.worker.readouts.lens import RankLens


def parameter_rows(
    model: nn.Module, ties_head: bool, tensor_rank: int, request: ReadParameter
) -> ParameterRows:
    """Return the rows of a parameter that this worker sends: of shared ones, the first rank's."""
    parameters = find_parameters(model, ties_head)
    parameter = parameters.get(request.name)
    if parameter is None:
        return ParameterRows(names=sorted(parameters))
    begin = max(request.first, parameter.first)
    stop = min(request.first + request.count, parameter.first + parameter.rows.shape[0])
    data = b""
    if begin < stop and not (parameter.shared and tensor_rank):
        rows = parameter.rows[begin - parameter.first : stop - parameter.first].cpu().contiguous()
        data = rows.view(torch.uint8).numpy().tobytes()
    return ParameterRows(
        shape=list(parameter.shape),
        dtype=str(parameter.rows.dtype).removeprefix("torch."),
        first=begin,
        data=data,
        problem=parameter.problem,
    )


def token_directions(
    model: nn.Module, ties_head: bool, lens: RankLens, request: ReadDirections
) -> TokenDirections:
    """Return the directions of a token, if this worker has its row of the head."""
    if lens.reason:
        return TokenDirections(problem=lens.reason)
    head = find_head(model, ties_head)
    if head is None or head.problem:
        why = "it is unknown where" if head is None else head.problem
        return TokenDirections(problem=f"the head cannot be read: {why}")
    row = request.token - head.first
    if not 0 <= row < head.rows.shape[0]:
        return TokenDirections()
    try:
        directions = lens.directions(head.rows[row], request.maps)
    except UnsupportedError as error:
        return TokenDirections(problem=str(error))
    return TokenDirections(directions.cpu().numpy().tobytes())
