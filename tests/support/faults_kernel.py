"""Faults of the launch of the `site` op's kernels; see `support.faults`."""

from __future__ import annotations

from support.fault import Fault

_ROWS = "tests/unit/ops/test_row_pairs.py::"

KERNELS: tuple[Fault, ...] = (
    Fault(
        "A kernel that was compiled for aligned rows is launched for others",
        "ops/site_triton.py",
        " or (address | other) % 16 or",
        " or",
        "tests/unit/ops/test_site_triton.py"
        "::test_rows_that_are_not_aligned_never_reach_a_kernel_that_was_compiled_for_aligned_ones",
    ),
    Fault(
        "A table that is bound to other buffers launches the kernel for the earlier ones",
        "ops/site.py",
        "    buffers.relaunches[table.data_ptr()] = {}\n",
        "    buffers.relaunches.setdefault(table.data_ptr(), {})\n",
        "tests/unit/ops/test_site.py::test_a_table_uses_the_buffers_that_it_was_bound_to_last",
    ),
    Fault(
        "A kernel for one layout of the stream is launched for another",
        "ops/site_triton.py",
        "        residual.shape == hidden.shape, residual.stride(), residual.dtype\n",
        "        residual.shape == hidden.shape, residual.dtype\n",
        "tests/unit/ops/test_site_triton.py"
        "::test_streams_that_need_another_kernel_are_of_another_kind",
    ),
    Fault(
        "The kernel of maps multiplies all rows of a tile with the matrix of one",
        "ops/map_kernel.py",
        "        mine = (start == first)[:, None]\n",
        "        mine = has_map[:, None]\n",
        "tests/unit/ops/test_site_triton.py"
        "::test_the_interpreted_kernels_do_what_their_references_do",
    ),
    Fault(
        "Rows that were computed without work are said to be cached",
        "runtime/worker/step/position_states.py",
        "        self._catch_up()\n        reached = self._reached[slot]\n",
        "        reached = self._reached[slot]\n",
        "tests/unit/runtime/worker/step/test_step_planner.py"
        "::test_rows_without_work_in_decode_steps_like_the_last_were_computed_and_not_cached",
    ),
    Fault(
        "A short row that replaces a long one has the rounding of the long one",
        "ops/row_pairs.py",
        "    target = hidden if residual is None else residual\n",
        "    target = hidden\n    row = row if rest is None else row - rest\n"
        "    lost, residual = None, None\n",
        _ROWS + "test_a_result_is_the_asked_row_to_within_the_rounding_of_that_row",
    ),
    Fault(
        "An edit of the stream leaves rounding noise where it asked for zero",
        "ops/reference_state.py",
        "        self.delta[rows] = made if chosen is None else made.where(chosen, "
        "self.now(rows))\n",
        "        made = made if chosen is None else made.where(chosen, self.now(rows))\n"
        "        if self.whole is None:\n"
        "            made = self.entered[rows] + (made - self.entered[rows]) * (1 - 2**-23)\n"
        "        self.delta[rows] = made\n",
        _ROWS + "test_a_zero_is_zero_in_both_halves",
    ),
    Fault(
        "A row is scaled by a change that is rounded to the digits of the row",
        "ops/site_ref.py",
        "            return ((1 - gate) + gate * params[:, layout.A])[:, None] * base\n",
        "            return base + (params[:, layout.A] - 1)[:, None] * gate[:, None] * base\n",
        _ROWS + "test_a_result_is_the_asked_row_to_within_the_rounding_of_that_row",
    ),
    Fault(
        "A steered row loses what is too small for a sum of both halves in float32",
        "ops/row_pairs.py",
        "        lower = ((row - upper.float()) + lost).to(hidden.dtype)\n",
        "        lower = (row - upper.float()).to(hidden.dtype)\n",
        _ROWS + "test_an_addition_is_as_exact_as_both_halves_can_be_or_as_a_change_of_one_alone",
    ),
    Fault(
        "The kernel computes a short row as a difference to a long one",
        "ops/site_kernel.py",
        "                            vector = kept * base + vector\n",
        "                            vector = (vector - factor * base) + base\n",
        "tests/unit/ops/test_site_triton.py"
        "::test_the_interpreted_kernels_do_what_their_references_do",
    ),
    Fault(
        "The kernel writes the high part of a row alone",
        "ops/row_pairs_kernel.py",
        "        low = ((row - high.to(tl.float32)) + lost).to(value.dtype)\n",
        "        low = tl.zeros_like(row).to(value.dtype)\n",
        "tests/unit/ops/test_site_triton.py"
        "::test_the_interpreted_kernels_do_what_their_references_do",
    ),
)
