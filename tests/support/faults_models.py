"""Ways to break the choice between vLLM's own model and the tapped one."""

from __future__ import annotations

from support.fault import Fault

MODELS: tuple[Fault, ...] = (
    Fault(
        "A step with work runs the untapped model",
        "runtime/worker/model_runner/hooks.py",
        "        self._switch.use(self._session.before_forward(batch))\n",
        "        self._session.before_forward(batch)\n",
        "tests/engine/test_two_models.py::test_a_step_without_work_reaches_no_tap",
    ),
    Fault(
        "A step without work runs the tapped model",
        "runtime/worker/session.py",
        "        return plan is not None\n",
        "        return True\n",
        "tests/engine/test_two_models.py::test_a_step_without_work_reaches_no_tap",
    ),
    Fault(
        "The tapped model's steps replay the untapped model's CUDA graphs",
        "runtime/worker/model_runner/graph_sets.py",
        "= self._sets[tapped]\n",
        "= self._sets[False]\n",
        "tests/unit/runtime/worker/model_runner/test_model_switch.py"
        "::test_each_model_replays_its_own_graphs",
    ),
    Fault(
        "The tapped model is compiled into the untapped model's entry in the compile cache",
        "runtime/worker/taps/tapped_model.py",
        "    with set_current_vllm_config(vllm_config), set_model_tag(_TAG):\n",
        "    vllm_config = without_midstream(vllm_config)\n"
        "    with set_current_vllm_config(vllm_config), set_model_tag(_TAG):\n",
        "tests/unit/runtime/worker/taps/test_tapped_model.py"
        "::test_each_model_has_entries_of_its_own_in_the_compile_cache",
    ),
    Fault(
        "Queries that an op has rotated in place are tapped where they are",
        "runtime/worker/taps/taps.py",
        "            if columns.copies:\n",
        "            if columns.copies and columns.by_head is None:\n",
        "tests/engine/test_inner_sites.py::test_compiled_too",
    ),
)
