"""Ways to break the choice between vLLM's own model and the tapped one."""

from __future__ import annotations

from support.fault import Fault

MODELS: tuple[Fault, ...] = (
    Fault(
        "A step with work runs the untapped model",
        "Hooks.before_forward",
        "self._switch.use(self._session.before_forward(batch))",
        "self._session.before_forward(batch)",
        "tests/engine/test_two_models.py::test_a_step_without_work_reaches_no_tap",
    ),
    Fault(
        "A step without work runs the tapped model",
        "WorkerSession.before_forward",
        "return plan is not None",
        "return True",
        "tests/engine/test_two_models.py::test_a_step_without_work_reaches_no_tap",
    ),
    Fault(
        "A step of the second runner has the padding of its batch as requests",
        "v2:_batch",
        "batch.num_scheduled_tokens[:num_requests]",
        "batch.num_scheduled_tokens",
        "tests/unit/runtime/worker/model_runner/test_v2.py"
        "::test_a_step_has_the_requests_of_the_batch_and_none_of_its_padding",
    ),
    Fault(
        "The tapped model's steps replay the untapped model's CUDA graphs",
        "GraphSets.use",
        "self._sets[tapped]",
        "self._sets[False]",
        "tests/unit/runtime/worker/model_runner/test_model_switch.py"
        "::test_each_model_replays_its_own_graphs",
    ),
    Fault(
        "The tapped model is compiled into the untapped model's entry in the compile cache",
        "separate_compilation",
        """
        for name in _COMPILED:
            vars(tapped).pop(name, None)
        """,
        """
        for name in _COMPILED:
            vars(tapped).pop(name, None)
        vllm_config = without_midstream(vllm_config)
        """,
        "tests/unit/runtime/worker/taps/test_tapped_model.py"
        "::test_each_model_has_entries_of_its_own_in_the_compile_cache",
    ),
    Fault(
        "Queries that an op has rotated in place are tapped where they are",
        "TappedModule.__call__",
        "if columns.copies:",
        "if columns.copies and columns.by_head is None:",
        "tests/engine/test_inner_sites.py::test_compiled_too",
    ),
    Fault(
        "A layer that multiplies its skip connection is captured as if it did not",
        "sum_check:check_model",
        "if not error <= tolerance:",
        "if error > 1.0:",
        "tests/unit/runtime/worker/taps/test_sum_check.py"
        "::test_a_sum_that_does_not_hold_is_refused_by_layer_and_site",
    ),
    Fault(
        "The sums of the stream are compared on what memory had in a trial run",
        "_trial",
        "tap[0] in _SITES and tap not in totals",
        "False",
        "tests/unit/runtime/worker/taps/test_sum_check.py"
        "::test_what_branches_return_in_a_trial_does_not_matter",
    ),
    Fault(
        "A check of the sums leaves a program for the first token",
        "_trial",
        "tensor.copy_(before)",
        "pass",
        "tests/unit/runtime/worker/taps/test_sum_check.py"
        "::test_a_check_leaves_the_buffers_as_they_were",
    ),
    Fault(
        "A layer whose forward was replaced is captured as if it were not",
        "find_decoder",
        "replaced is not None",
        "False",
        "tests/engine/test_changed_layers.py"
        "::test_a_layer_class_whose_forward_was_replaced_is_refused_whatever_is_tapped",
    ),
)
