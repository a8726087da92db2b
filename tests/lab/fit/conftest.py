"""Fixtures of the tests that fit with scikit-learn."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def _libraries_are_sought_once() -> Iterator[None]:
    """threadpoolctl reads all files that the process has open for each fit, of which there are
    thousands once vLLM is imported.
    """
    import threadpoolctl

    known = threadpoolctl.ThreadpoolController()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threadpoolctl, "ThreadpoolController", lambda: known)
        yield
