"""Faults of sweeps. See `faults`."""

from __future__ import annotations

from support.fault import Fault

ENGINE = "tests/engine/test_sweep.py"

SWEEPS: tuple[Fault, ...] = (
    Fault(
        "A position is patched from the same number of a prompt of another length",
        "PatchRows.of",
        "self.places[tap][self.aligned[position]]",
        "self.places[tap].get(position, 0)",
        ENGINE + "::test_prompts_of_different_lengths_are_aligned",
    ),
    Fault(
        "Each head of a sweep is patched with the first head's part of the row",
        "_of_head",
        "return rows[:, cell.head * size : (cell.head + 1) * size]",
        "return rows[:, :size]",
        ENGINE + "::test_heads_are_patched_one_by_one",
    ),
    Fault(
        "The activation of a source's feature lacks the SAE's bias",
        "FeaturePatch.activations",
        "rows.astype(np.float64) @ feature.encoder[0].numpy() + feature.bias[0]",
        "rows.astype(np.float64) @ feature.encoder[0].numpy()",
        ENGINE + "::test_features_are_patched_one_by_one",
    ),
    Fault(
        "A patched feature gets all of the source's activation, whatever alpha is",
        "FeaturePatch.edits",
        'changes = [("scale", 1.0 - alpha), ("add", alpha * value)]',
        'changes = [("scale", 1.0 - alpha), ("add", value)]',
        ENGINE + "::test_features_are_patched_one_by_one",
    ),
    Fault(
        "The feature of a group is patched at all positions with each of the activations",
        "FeaturePatch.edits",
        "[[position] for position in positions]",
        "[list(positions)] * len(values)",
        ENGINE + "::test_a_feature_of_a_group_has_the_activation_of_each_of_its_positions",
    ),
    Fault(
        "The values of cells are in the order of the runs instead of the grid's",
        "SweepJob.add",
        "self._values[run.cell.index] = value",
        "self._values.flat[int((~np.isnan(self._values)).sum())] = value",
        ENGINE + "::test_every_cell_is_what_a_hook_gives",
    ),
    Fault(
        "KL of a sweep has its two distributions exchanged",
        "KL.value",
        "np.exp(p[possible]) * (p[possible] - q[possible])",
        "np.exp(q[possible]) * (q[possible] - p[possible])",
        "tests/lab/sweep/test_metrics.py::test_kl_is_the_relative_entropy",
    ),
    Fault(
        "Runs of sweeps start while an ordinary request waits for its first token",
        "SweepPace._is_free",
        "not now.starting and self.running < max(1, now.seats // _SEATS)",
        "self.running < max(1, now.seats // _SEATS)",
        "tests/lab/server/test_sweep_pace.py"
        "::test_an_ordinary_request_has_its_first_token_before_any_further_run_starts",
    ),
    Fault(
        "The runs of a sweep go on when its client has disconnected",
        "_SweepResponse.__call__",
        "asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)",
        "asyncio.wait((gone, work), return_when=asyncio.ALL_COMPLETED)",
        "tests/lab/server/routes/test_sweep.py::test_a_client_that_disconnects_ends_the_remaining_"
        "cells",
    ),
    Fault(
        "Rows by value lose their positions on the way to a server",
        "RowsSource.emit",
        "len(counts) > 1 or default != self.positions or counts != {self.length}",
        "len(counts) > 1",
        "tests/lab/server/routes/test_sweep.py"
        "::test_rows_by_value_keep_their_positions_and_the_prompt_that_they_are_of",
    ),
)
