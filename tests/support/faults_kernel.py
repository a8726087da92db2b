"""Faults of the `site` op and of the launch of its kernels; see `support.faults`."""

from __future__ import annotations

from support.fault import Fault

_ROWS = "tests/unit/ops/test_row_pairs.py::"
_INTERPRETED = (
    "tests/unit/ops/test_site_triton.py::test_the_interpreted_kernels_do_what_their_references_do"
)

KERNELS: tuple[Fault, ...] = (
    Fault(
        "A kernel that was compiled for aligned rows is launched for others",
        "Relaunch.__call__",
        "not 0 < rows <= self.most or (address | other) % 16 or tally.data_ptr() != self.tally",
        "not 0 < rows <= self.most or tally.data_ptr() != self.tally",
        "tests/unit/ops/test_site_triton.py"
        "::test_rows_that_are_not_aligned_never_reach_a_kernel_that_was_compiled_for_aligned_ones",
    ),
    Fault(
        "A table that is bound to other buffers launches the kernel for the earlier ones",
        "bind",
        "buffers.relaunches[table.data_ptr()] = {}",
        "buffers.relaunches.setdefault(table.data_ptr(), {})",
        "tests/unit/ops/test_site.py::test_a_table_uses_the_buffers_that_it_was_bound_to_last",
    ),
    Fault(
        "A kernel for one layout of the stream is launched for another",
        "site_triton:kind_of",
        "(residual.shape == hidden.shape, residual.stride(), residual.dtype)",
        "(residual.shape == hidden.shape, residual.dtype)",
        "tests/unit/ops/test_site_triton.py"
        "::test_streams_that_need_another_kernel_are_of_another_kind",
    ),
    Fault(
        "The kernel of maps multiplies all rows of a tile with the matrix of one",
        "map_kernel",
        "mine = (start == first)[:, None]",
        "mine = has_map[:, None]",
        _INTERPRETED,
    ),
    Fault(
        "Rows that were computed without work are said to be cached",
        "PositionStates.advance",
        "self._catch_up()",
        "",
        "tests/unit/runtime/worker/step/test_step_planner.py"
        "::test_rows_without_work_in_decode_steps_like_the_last_were_computed_and_not_cached",
    ),
    Fault(
        "A short row that replaces a long one has the rounding of the long one",
        "write_rows",
        "target = hidden if residual is None else residual",
        """
        target = hidden
        row = row if rest is None else row - rest
        lost, residual = None, None
        """,
        _ROWS + "test_a_result_is_the_asked_row_to_within_the_rounding_of_that_row",
    ),
    Fault(
        "An edit of the stream leaves rounding noise where it asked for zero",
        "EditedRows.make",
        "self.delta[rows] = made if chosen is None else made.where(chosen, self.now(rows))",
        """
        made = made if chosen is None else made.where(chosen, self.now(rows))
        if self.whole is None:
            made = self.entered[rows] + (made - self.entered[rows]) * (1 - 2 ** -23)
        self.delta[rows] = made
        """,
        _ROWS + "test_a_zero_is_zero_in_both_halves",
    ),
    Fault(
        "A row is scaled by a change that is rounded to the digits of the row",
        "_Work._replaced",
        "return (1 - gate + gate * params[:, layout.A])[:, None] * base",
        "return base + (params[:, layout.A] - 1)[:, None] * gate[:, None] * base",
        _ROWS + "test_a_result_is_the_asked_row_to_within_the_rounding_of_that_row",
    ),
    Fault(
        "A steered row loses what is too small for a sum of both halves in float32",
        "write_rows",
        "lower = (row - upper.float() + lost).to(hidden.dtype)",
        "lower = (row - upper.float()).to(hidden.dtype)",
        _ROWS + "test_an_addition_is_as_exact_as_both_halves_can_be_or_as_a_change_of_one_alone",
    ),
    Fault(
        "The kernel computes a short row as a difference to a long one",
        "site_kernel:_run",
        "vector = kept * base + vector",
        "vector = vector - factor * base + base",
        _INTERPRETED,
    ),
    Fault(
        "The kernel writes the high part of a row alone",
        "store_row",
        "low = tl.where(same, widened(value), short).to(value.dtype)",
        "low = tl.zeros_like(row).to(value.dtype)",
        _INTERPRETED,
    ),
    Fault(
        "The kernel writes a component again that an edit of the whole row left as it was",
        "is_entered",
        "row.to(tl.int32, bitcast=True) == entered.to(tl.int32, bitcast=True)",
        "row != row",
        _INTERPRETED,
    ),
    Fault(
        "The kernel does not flag a value that saturated",
        "write_row",
        "tl.store(flags, 1, mask=spoiled)",
        "tl.store(flags, 1, mask=flags != flags)",
        _INTERPRETED,
    ),
    Fault(
        "An engine uses the buffers of an engine that ran before it in the process",
        "bind",
        "_BUFFERS[table.data_ptr()] = buffers",
        "_BUFFERS.setdefault(table.data_ptr(), buffers)",
        "tests/unit/ops/test_site.py::test_a_table_uses_the_buffers_that_it_was_bound_to_last",
    ),
    Fault(
        "A compiler may remove or exchange the work of two sites",
        "site:_SCHEMA",
        '"site(Tensor(a!) hidden, Tensor(b!)? residual, Tensor table, Tensor(c!) tally, int? start=None) -> ()"',
        '"site(Tensor(a!) hidden, Tensor(b!)? residual, Tensor table, Tensor tally, int? start=None) -> ()"',
        "tests/unit/ops/test_site.py::test_the_op_is_defined_as_its_schema_says",
    ),
)
