"""Functions that workers import, where the engine is a process of its own."""

import torch
from support.own_process import python


def test_a_function_runs_in_the_process_of_the_worker_which_imports_it(tiny_llama, tmp_path):
    python("-m", "nightly.local_async", tiny_llama, tmp_path / "found.pt", timeout=580)
    found = torch.load(tmp_path / "found.pt")
    torch.testing.assert_close(found["local"], 0.5 * found["plain"], rtol=1e-5, atol=1e-5)
    assert found["called"] == ("support.local_functions:halve", 150, 1)
    assert found["rejected"].startswith("edits")
    assert "cannot import" in found["rejected"]
    # One that fails ends its request alone.
    assert "raised ValueError: not today" in found["failed"]
    torch.testing.assert_close(found["beside"], found["plain"])
