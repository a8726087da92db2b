"""Faults where a model has several streams; see `faults`."""

from __future__ import annotations

from support.fault import Fault

_STREAMS = "tests/engine/test_streams.py::"

STREAMS: tuple[Fault, ...] = (
    Fault(
        "An edit of one of several streams is written to a copy",
        "_fire_columns",
        "value.copy_(wide.unflatten(1, (columns.streams, -1)).transpose(0, 1))",
        "pass",
        _STREAMS + "test_an_edit_of_one_stream_is_a_hook_there",
    ),
    Fault(
        "The rows of several streams are laid side by side by token, not by stream",
        "_fire_columns",
        "value.transpose(0, 1).flatten(1).contiguous()",
        "value.reshape(value.shape[1], -1)",
        _STREAMS + "test_rows_are_those_of_all_streams",
    ),
    Fault(
        "An SAE reads several streams as one",
        "Features.resolve",
        "if streams:",
        "if False:",
        "tests/unit/plan/test_features.py::"
        "test_where_the_model_has_several_streams_no_sae_reads_them",
    ),
    Fault(
        "An SAE reconstructs several streams as one",
        "SaeRegistry.__init__",
        "if streams := shape.num_heads((site, layer)):",
        "if streams := 0:",
        "tests/unit/runtime/frontend/test_sae_registry.py::"
        "test_where_the_model_has_several_streams_no_sae_reconstructs_them",
    ),
)
