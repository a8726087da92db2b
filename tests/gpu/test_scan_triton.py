"""The Triton kernel of gates with memory against the reference."""

import pytest
import torch
from support.gate_memory import check_steps

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.ops.scan.launch import scan_triton
from midstream.ops.scan.reference import scan_ref

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SITE = 7


def on_device(*given):
    """Run the kernel on copies of tensors, and copy back what it wrote."""
    moved = [each.cuda() for each in given]
    scan_triton(*moved)
    for ours, theirs in zip(given, moved, strict=True):
        ours.copy_(theirs)


def wide(counts, width, dtype, residual=True):
    """States of which each has so many rows, which read vectors whose sums are exact; smoothed."""
    rows = sum(counts)
    generator = torch.Generator().manual_seed(rows + width)

    def small(*shape):
        return torch.randint(-2, 3, shape, generator=generator)

    tokens = torch.zeros(rows, layout.TOKEN_COLUMNS, dtype=torch.int32)
    tokens[:, layout.PROGRAM] = 2
    scans = torch.zeros(len(counts), layout.SCAN_COLUMNS, dtype=torch.int32)
    row = 0
    for nth, count in enumerate(counts):
        scans[nth] = torch.tensor([row, count, 1, SITE])
        tokens[row : row + count, layout.POSITION] = torch.arange(3, 3 + count)
        row += count
    table = torch.zeros(3, layout.TABLE_COLUMNS, dtype=torch.int32)
    table[0, layout.CODE] = SITE
    table[2, layout.EDIT_COUNT] = 1
    scan = [int(Op.SCAN), 1, layout.HELD, 1, int(Flags.COUNTED), 0, 0, 0]
    return [
        small(rows, width).to(dtype),
        small(rows, width).to(dtype) if residual else None,
        tokens,
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(rows, layout.TALLY_COLUMNS, dtype=torch.int32),
        table,
        torch.tensor([scan], dtype=torch.int32),
        torch.tensor([[1.5, 300.0, 200.0, 0.25]]),
        torch.zeros(1, dtype=torch.int32),
        small(2, width).float(),
        torch.full((rows, 3 + 2 * len(counts)), -9.0),
        scans,
        torch.zeros(len(counts), 4, layout.STATE_COLUMNS, dtype=torch.int32),
    ]


def assert_alike(found, wanted):
    for nth, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert one is other is None or torch.equal(one.cpu(), other), nth


@pytest.mark.parametrize("seed", range(12))
def test_scores_are_those_of_a_loop_over_the_tokens_however_the_steps_are_cut(seed):
    assert check_steps(on_device, seed, DTYPES[seed % 3]) > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [80, 576, 4096, 5120])
@pytest.mark.parametrize("residual", [True, False])
def test_one_row_and_many_are_read_as_in_the_reference(width, residual, dtype):
    wanted = wide([1, 40, 0, 1, 3, 1], width, dtype, residual)
    found = [None if each is None else each.cuda() for each in wanted]
    for _ in range(2):  # the second computes the same positions again
        scan_triton(*found)
        scan_ref(*wanted)
    assert_alike(found, wanted)


def test_the_kernel_replays_in_a_graph_over_rows_of_other_requests():
    steps = [
        wide(counts, 4096, torch.bfloat16) for counts in ([1] * 40, [0] * 37 + [1, 38, 1], [8] * 5)
    ]
    states = max(len(each[11]) for each in steps)
    found = [each.cuda() for each in steps[0]]
    scan_triton(*found)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scan_triton(*found)
    for given in steps:
        lacking = states - len(given[11])  # of as many states as there are in the graph
        for nth in (11, 12):
            rest = given[nth].new_zeros(lacking, *given[nth].shape[1:])
            given[nth] = torch.cat([given[nth], rest])
        given[10] = torch.nn.functional.pad(given[10], (0, 2 * lacking), value=-9.0)
        for ours, theirs in zip(found, given, strict=True):
            ours.copy_(theirs)
        graph.replay()
        scan_ref(*given)
        assert_alike(found, given)
