"""One compile cache, many settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.stale_check import check_no_stale_graph


@pytest.mark.nightly
def test_a_graph_compiled_under_other_settings_is_never_used(
    tiny_llama: Path, tmp_path: Path
) -> None:
    check_no_stale_graph(tmp_path, tiny_llama, {})
