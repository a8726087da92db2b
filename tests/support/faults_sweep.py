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
        "The activation of a source's feature lacks the SAE's bias",
        "sweep/feature_patch.py",
        "@ one.encoder[0].numpy() + one.bias[0]",
        "@ one.encoder[0].numpy()",
        ENGINE + "::test_features_are_patched_one_by_one",
    ),
    Fault(
        "A patched feature gets all of the source's activation, whatever alpha is",
        "sweep/feature_patch.py",
        '("add", alpha * value)',
        '("add", value)',
        ENGINE + "::test_features_are_patched_one_by_one",
    ),
    Fault(
        "The feature of a group is patched at all positions with each of the activations",
        "sweep/feature_patch.py",
        "else [[one] for one in positions]",
        "else [list(positions)] * len(values)",
        ENGINE + "::test_a_feature_of_a_group_has_the_activation_of_each_of_its_positions",
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
    Fault(
        "Runs of sweeps start while an ordinary request waits for its first token",
        "server/sweep_pace.py",
        "return not now.starting and self.running",
        "return self.running",
        "tests/unit/server/test_sweep_pace.py"
        "::test_an_ordinary_request_has_its_first_token_before_any_further_run_starts",
    ),
    Fault(
        "The runs of a sweep go on when its client has disconnected",
        "server/routes/sweep.py",
        "await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)",
        "await asyncio.wait((gone, work), return_when=asyncio.ALL_COMPLETED)",
        "tests/unit/server/routes/test_sweep.py::test_a_client_that_disconnects_ends_the_remaining_"
        "cells",
    ),
    Fault(
        "Rows by value lose their positions on the way to a server",
        "sweep/source.py",
        "        if len(counts) > 1 or default != self.positions or counts != {self.length}:\n",
        "        if len(counts) > 1:\n",
        "tests/unit/server/routes/test_sweep.py"
        "::test_rows_by_value_keep_their_positions_and_the_prompt_that_they_are_of",
    ),
)
