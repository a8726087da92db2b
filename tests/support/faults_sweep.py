"""Faults of sweeps. See `faults`."""

from __future__ import annotations

from support.fault import Fault

ENGINE = "tests/engine/test_sweep.py"

SWEEPS: tuple[Fault, ...] = (
    Fault(
        "A position is patched from the same number of a prompt of another length",
        "sweep/edits.py",
        "[self.places[tap][self.aligned[one]] for one in positions]",
        "[self.places[tap].get(one, 0) for one in positions]",
        ENGINE + "::test_prompts_of_different_lengths_are_aligned",
    ),
    Fault(
        "Each head of a sweep is patched with the first head's part of the row",
        "sweep/edits.py",
        "rows[:, cell.head * size : (cell.head + 1) * size]",
        "rows[:, :size]",
        ENGINE + "::test_heads_are_patched_one_by_one",
    ),
    Fault(
        "The values of cells are in the order of the runs instead of the grid's",
        "sweep/job.py",
        "            self._values[run.cell.index] = value\n",
        "            self._values.flat[int((~np.isnan(self._values)).sum())] = value\n",
        ENGINE + "::test_every_cell_is_what_a_hook_gives",
    ),
    Fault(
        "KL of a sweep has its two distributions exchanged",
        "sweep/metrics.py",
        "(np.exp(p[possible]) * (p[possible] - q[possible]))",
        "(np.exp(q[possible]) * (q[possible] - p[possible]))",
        "tests/unit/sweep/test_metrics.py::test_kl_is_the_relative_entropy",
    ),
)
