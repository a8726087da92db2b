"""Faults of fits, scores of texts and `tune`; see `support.faults`."""

from __future__ import annotations

from support.fault import Fault

FIT: tuple[Fault, ...] = (
    Fault(
        "A fit takes the last prompt of one class for one of the other",
        "split_classes",
        "(_class(outputs[:positives], site), _class(outputs[positives:], site))",
        "(_class(outputs[: positives - 1], site), _class(outputs[positives - 1 :], site))",
        "tests/engine/test_fit.py::test_a_fit_on_prompts_equals_one_on_transformers_rows",
    ),
    Fault(
        "A direction is scored on rows that it was fitted on",
        "_Kept.training",
        "np.ones(len(folds), np.bool_) if fold is None else folds != fold",
        "np.ones(len(folds), np.bool_)",
        "tests/lab/fit/test_references.py::test_scores_are_those_of_fits_without_each_fold",
    ),
    Fault(
        "Moments of a held-out fold are among those of the training rows",
        "_Accumulated.training",
        "[moments for index, moments in enumerate(parts) if index != fold]",
        "[moments for index, moments in enumerate(parts)]",
        "tests/lab/fit/test_references.py::test_moments_give_what_the_rows_give",
    ),
    Fault(
        "The halves of a pair are held out apart",
        "_keyed",
        "owners[1] if first == second else owners[1] + first",
        "owners[1] + first",
        "tests/lab/fit/test_planted.py::test_class_means_project_to_one_and_minus_one_and_a_scale"
        "_of_one_joins_them",
    ),
    Fault(
        "What an answer shows is read from the steered model's prompt too",
        "tune:_read",
        "slice(len(prompts[index]), len(prompts[index] + answers[index]))",
        "slice(0, len(prompts[index] + answers[index]))",
        "tests/engine/test_tune.py::test_the_grid_is_that_of_single_requests",
    ),
    Fault(
        "The divergence of an answer is that of the unsteered model from the steered one",
        "_divergences",
        "(steered, plain)",
        "(plain, steered)",
        "tests/engine/test_tune.py::test_the_grid_is_that_of_single_requests",
    ),
)
