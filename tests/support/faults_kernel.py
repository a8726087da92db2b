"""Faults of the launch of the `site` op's kernels; see `support.faults`."""

from __future__ import annotations

from support.fault import Fault

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
        "ops/site_kernel.py",
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
)
