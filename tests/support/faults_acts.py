"""Faults of probes that act."""

from __future__ import annotations

from support.fault import Fault

CORE = "tests/unit/runtime/core/test_probe_stops.py"
PASSES = (
    "tests/unit/runtime/core/test_scores_that_pass.py::test_what_passes_is_what_changes_nothing"
)
ENGINE = "tests/engine/test_probe_stops.py"
SWITCHES = "tests/engine/test_switches.py"
FORMS = "tests/engine/test_probe_forms.py"

ACTS: tuple[Fault, ...] = (
    Fault(
        "The front end counts parts of a score twice that the ranks added up",
        "SplitScores.join",
        "flat[places] = total if self._rank == 0 else 0.0",
        "flat[places] = total",
        "tests/unit/runtime/worker/test_split_scores.py",
    ),
    Fault(
        "A probe acts by the first rank's part of its score",
        "StepRecorder.record",
        "if self._slots.num_reporting and self._split_scores is not None:",
        "if False:",
        "tests/system/test_inner_ranks.py::test_probes_of_split_vectors_act_by_their_whole_scores",
    ),
    Fault(
        "The token that was sampled with the score that stops its request is shown",
        "probe_stops:_cut",
        "kept = max(firing.position + 1 - evaluation.known, 0)",
        "kept = max(firing.position + 2 - evaluation.known, 0)",
        ENGINE + "::test_a_preempted_completion_stops_where_it_would_have",
    ),
    Fault(
        "Scores of draft tokens that were rejected stop a request",
        "_evaluate",
        "stop = known + max(len(new) - 1, 0)",
        "stop = known + 8",
        CORE,
    ),
    Fault(
        "A position that is computed again after a preemption counts twice for a condition",
        "advance",
        "max(first, reached)",
        "first",
        CORE,
    ),
    Fault(
        "A guard of the tier `generated` reads the prompt too",
        "_narrowed_probe",
        "return probe if phase is None else probe.replace(phase=phase)",
        "return probe",
        "tests/unit/server/test_steering_routes.py",
    ),
    Fault(
        "The score that stopped a completion is missing from its results",
        "tokens_of_rows",
        """
        if completion.token_ids:
            return tokens
        """,
        """
        if completion.token_ids:
            return tokens[:-1]
        """,
        ENGINE + "::test_captures_and_edits_reach_to_the_token_that_a_probe_stopped_at",
    ),
    Fault(
        "A probe that meets its condition again switches the edits again",
        "advance",
        "probe_progress[probe_index] = None",
        "probe_progress[probe_index] = Progress()",
        SWITCHES + "::test_several_probes_switch_one_after_the_other_and_a_stop_ends_it",
    ),
    Fault(
        "A score within the threshold passes unseen after one beyond it, and the run of tokens goes on",
        "Watched.passes",
        "if progress.run or not start <= position < stop:",
        "if not start <= position < stop:",
        PASSES,
    ),
    Fault(
        "A score passes a law unseen that answers another scale to it",
        "Threshold.holds",
        "is_on is self._is_on and scale == (self.on if is_on else self.off)",
        "scale == (self.on if is_on else self.off)",
        PASSES,
    ),
    Fault(
        "It is forgotten how far the conditions of a request are",
        "_evaluate",
        "watched.reached, watched.each = progress",
        "pass",
        SWITCHES + "::test_what_is_computed_again_after_a_preemption_has_the_edits_that_it_had",
    ),
    Fault(
        "A switch leaves the blocks after it under the keys of the edits before",
        "change_plans",
        "_set_keys(request, position, version, scheduler.hash_block_size)",
        "",
        SWITCHES + "::test_names_are_bound_and_blocks_of_other_edits_are_not_reused",
    ),
    Fault(
        "A request brings the vectors of its own edits, and not those that it may switch to",
        "joint_need",
        "tuple(dict.fromkeys(vector for need in needs for vector in need.vectors))",
        "needs[0].vectors",
        SWITCHES + "::test_vectors_that_the_workers_lack_are_sent_with_the_request",
    ),
    Fault(
        "The layers of a probe overwrite its score, which is that of the last one",
        "_Work._store",
        "read + a + torch.where(adds, self._device.scores[place], 0.0)",
        "read + a",
        FORMS + "::test_a_probe_of_several_layers_sums_their_products_and_has_its_bias_once",
    ),
    Fault(
        "The layers of a probe have each other's vectors, if they are not listed in their order",
        "_Resolver._resolve_probe",
        "steps = (steps[gates.place_of(self._shape, tap, probe.layers)],)",
        "steps = (steps[len(probes)],)",
        FORMS + "::test_a_probe_of_several_layers_sums_their_products_and_has_its_bias_once",
    ),
    Fault(
        "A gate of several layers reads the last one alone",
        "gated_steps",
        "added = replace(gate, slot=slot, flags=gate.flags | Flags.ADDS)",
        "added = gate",
        FORMS + "::test_a_gate_reads_the_sum_of_several_layers_at_the_last_of_them_or_later",
    ),
    Fault(
        "Parts of a probe's score are in the keys of the prefix cache",
        "cache_keys:_parts",
        "if not probe.name and not probe.part_of:",
        "if not probe.name:",
        FORMS + "::test_a_probe_of_several_layers_shares_the_cache_with_requests_without_it",
    ),
    Fault(
        "A version of a plan holds one position late on the worker",
        "RequestState.change",
        "return splice(self.segments, segments, later.position)",
        "return splice(self.segments, segments, later.position + 1)",
        CORE,
    ),
)
