"""One compile cache, many settings, on a GPU."""

from __future__ import annotations

from pathlib import Path

from support.engines import GPU_MEMORY
from support.stale_check import check_no_stale_graph


def test_a_graph_compiled_under_other_settings_is_never_used(smollm2: Path, tmp_path: Path) -> None:
    check_no_stale_graph(tmp_path, smollm2, {"dtype": "float32", **GPU_MEMORY})
