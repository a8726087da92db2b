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
        "runtime/worker/split_scores.py",
        "        flat[places] = total if self._rank == 0 else 0.0\n",
        "        flat[places] = total\n",
        "tests/unit/runtime/worker/test_split_scores.py",
    ),
    Fault(
        "A probe acts by the first rank's part of its score",
        "runtime/worker/step_recorder.py",
        "            if self._slots.num_reporting and self._split_scores is not None:\n",
        "            if False:\n",
        "tests/system/test_inner_ranks.py::test_probes_of_split_vectors_act_by_their_whole_scores",
    ),
    Fault(
        "The token that was sampled with the score that stops its request is shown",
        "runtime/core/probe_stops.py",
        "    kept = max(firing.position + 1 - one.known, 0)\n",
        "    kept = max(firing.position + 2 - one.known, 0)\n",
        ENGINE + "::test_a_preempted_completion_stops_where_it_would_have",
    ),
    Fault(
        "Scores of draft tokens that were rejected stop a request",
        "runtime/core/probe_stops.py",
        "        stop = known + max(len(new) - 1, 0)\n",
        "        stop = known + 8\n",
        CORE,
    ),
    Fault(
        "A position that is computed again after a preemption counts twice for a condition",
        "runtime/core/probe_stops.py",
        "start, end = max(first, reached), min(",
        "start, end = first, min(",
        CORE,
    ),
    Fault(
        "A guard of the tier `generated` reads the prompt too",
        "steering/edit_forms.py",
        "    return probe if phase is None else probe.replace(phase=phase)\n",
        "    return probe\n",
        "tests/unit/server/test_steering_routes.py",
    ),
    Fault(
        "The score that stopped a completion is missing from its results",
        "runtime/frontend/results/actions.py",
        "    if completion.token_ids:\n        return tokens\n",
        "    if completion.token_ids:\n        return tokens[:-1]\n",
        ENGINE + "::test_captures_and_edits_reach_to_the_token_that_a_probe_stopped_at",
    ),
    Fault(
        "A probe that meets its condition again switches the edits again",
        "runtime/core/probe_stops.py",
        "            each[nth] = None\n",
        "            each[nth] = Progress()\n",
        SWITCHES + "::test_several_probes_switch_one_after_the_other_and_a_stop_ends_it",
    ),
    Fault(
        "A score within the threshold passes unseen after one beyond it, and the run of tokens goes on",
        "runtime/core/probe_stops.py",
        "                if progress.run or not",
        "                if not",
        PASSES,
    ),
    Fault(
        "A score passes a law unseen that answers another scale to it",
        "spec/control_laws.py",
        "        return is_on is self._is_on and scale",
        "        return scale",
        PASSES,
    ),
    Fault(
        "It is forgotten how far the conditions of a request are",
        "runtime/core/probe_stops.py",
        "                watched.reached, watched.each = progress\n",
        "                pass\n",
        SWITCHES + "::test_what_is_computed_again_after_a_preemption_has_the_edits_that_it_had",
    ),
    Fault(
        "A switch leaves the blocks after it under the keys of the edits before",
        "runtime/core/plan_versions.py",
        "        _set_keys(request, position, version, scheduler.hash_block_size)\n",
        "",
        SWITCHES + "::test_names_are_bound_and_blocks_of_other_edits_are_not_reused",
    ),
    Fault(
        "A request brings the vectors of its own edits, and not those that it may switch to",
        "runtime/frontend/request/switches.py",
        "        vectors=tuple(dict.fromkeys(one for need in needs for one in need.vectors)),\n",
        "",
        SWITCHES + "::test_vectors_that_the_workers_lack_are_sent_with_the_request",
    ),
    Fault(
        "The layers of a probe overwrite its score, which is that of the last one",
        "ops/site_ref.py",
        "        score = read + a + torch.where(adds, self._device.scores[place], 0.0)\n",
        "        score = read + a\n",
        FORMS + "::test_a_probe_of_several_layers_sums_their_products_and_has_its_bias_once",
    ),
    Fault(
        "The layers of a probe have each other's vectors, if they are not listed in their order",
        "spec/resolve/resolve.py",
        "                steps = (steps[place_of(self._shape, tap, probe.layers)],)\n",
        "                steps = (steps[len(found)],)\n",
        FORMS + "::test_a_probe_of_several_layers_sums_their_products_and_has_its_bias_once",
    ),
    Fault(
        "A gate of several layers reads the last one alone",
        "spec/resolve/gates.py",
        "        added = replace(gate, slot=slot, flags=gate.flags | Flags.ADDS)\n",
        "        added = gate\n",
        FORMS + "::test_a_gate_reads_the_sum_of_several_layers_at_the_last_of_them_or_later",
    ),
    Fault(
        "Parts of a probe's score are in the keys of the prefix cache",
        "runtime/protocol/cache_keys.py",
        "        if not probe.name and not probe.part_of:\n",
        "        if not probe.name:\n",
        FORMS + "::test_a_probe_of_several_layers_shares_the_cache_with_requests_without_it",
    ),
    Fault(
        "A version of a plan holds one position late on the worker",
        "runtime/worker/request_state.py",
        "        return splice(self.segments, segments, later.position)\n",
        "        return splice(self.segments, segments, later.position + 1)\n",
        CORE,
    ),
)
