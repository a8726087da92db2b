"""Quantised weights on the CPU: rows and edits are those of hooks on the same modules.

`tests/gpu/test_quantised.py` has all methods.
"""

from pathlib import Path

import pytest
import torch
from support.engines import engine
from support.quantised import METHODS, make
from support.quantised_hooks import compare, lora_of, settings_of

# Those that vLLM's CPU build has; by day one of eight bits and one of four.
DAY = ("int8", "gptq")
STREAM = ("resid_pre", "resid_mid", "resid_post")
CPU = [
    pytest.param(name, marks=[] if name in DAY else pytest.mark.nightly)
    for name, method in METHODS.items()
    if method.cpu
]


@pytest.mark.parametrize("name", CPU)
def test_rows_and_edits_are_those_of_hooks_on_the_same_modules(name: str, tmp_path: Path) -> None:
    if name == "gptq" and not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM has no kernel for weights of four bits on this CPU")
    method = METHODS[name]
    path = make(name, tmp_path)
    with engine(path, **settings_of(method)) as llm:
        report = compare(llm, method, lora_of(method, path))
    assert not report["missed"]
    assert report["again"] == (0.0, "")
    assert report["captured"] == (0.0, "")
    assert report["rows"] == report["taps"] * 14
    for site, (error, where, moved) in report["edits"].items():
        # The engine keeps an edited stream in two halves, a hook rounds it to bfloat16 once more:
        # where weights or activations have four or eight bits, a later row shows it. Without the
        # edit a row of the stream is off by half.
        assert error <= (0.06 if site in STREAM else 1e-5), (site, where, error)
        assert moved > 0.02, site
    assert all(report["lacking"].values())
