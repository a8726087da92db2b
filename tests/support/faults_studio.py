"""Faults of fits over HTTP and of Studio; see `support.faults`."""

from __future__ import annotations

from support.fault import Fault

STUDIO: tuple[Fault, ...] = (
    Fault(
        "A client that may not change vectors registers a name by a fit",
        "fit:fit",
        "admin(request)",
        "pass",
        "tests/lab/server/routes/test_fit.py::test_a_name_needs_what_changes_of_vectors_need_and_a"
        "_fit_alone_does_not",
    ),
    Fault(
        "A server has Studio's page though the setting is off",
        "Endpoints.attach_router",
        "if settings.studio:",
        "if settings is not None:",
        "tests/unit/server/routes/test_studio.py::test_without_the_setting_there_is_no_page",
    ),
)
