"""The Triton kernel against the reference op."""

from __future__ import annotations

import pytest
import torch
from helpers.site_cases import assert_same, random_case

import midstream.ops.site  # noqa: F401
from midstream.ops.site_ref import site_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 80, 576, 640, 1024, 4096, 5120])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("max_edits", [0, 1, 5])
def test_the_kernel_does_what_the_reference_does(dtype, width, residual, max_edits):
    case = random_case(
        rows=37, width=width, dtype=dtype, residual=residual, max_edits=max_edits, seed=width
    )
    found = case.copy("cuda")
    torch.ops.midstream.site(*found.arguments())
    site_ref(*case.arguments())
    # Fused multiply-adds round once where the reference rounds twice: floats agree to rounding.
    assert_same(found, case, exact=False)


def test_the_kernel_replays_in_a_graph_over_new_contents():
    case = random_case(
        rows=16, width=576, dtype=torch.bfloat16, residual=True, max_edits=3, seed=1
    ).copy("cuda")
    torch.ops.midstream.site(*case.copy("cuda").arguments())
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.ops.midstream.site(*case.arguments())
    for seed in (2, 3):
        fresh = random_case(
            rows=16, width=576, dtype=torch.bfloat16, residual=True, max_edits=3, seed=seed
        )
        for name, value in vars(fresh).items():
            getattr(case, name).copy_(value)
        graph.replay()
        site_ref(*fresh.arguments())
        assert_same(case, fresh, exact=False)


def test_rows_that_are_strided_are_read_and_written_in_place():
    case = random_case(rows=8, width=64, dtype=torch.float32, residual=True, max_edits=3, seed=4)
    found = case.copy("cuda")
    wide = torch.full((8, 128), 5.0, device="cuda")
    wide[:, :64] = found.hidden
    found.hidden = wide[:, :64]
    torch.ops.midstream.site(*found.arguments())
    site_ref(*case.arguments())
    assert_same(found, case, exact=False)
    assert bool((wide[:, 64:] == 5.0).all())
