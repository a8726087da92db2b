"""pytest and Python with less work for each test and at the end, in a process of many imports."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
from multiprocessing.util import _exit_function
from typing import Any

import pytest
from _pytest import logging as pytest_logging

_silent: list[logging.Logger] = []  # loggers that hand nothing on, as of the start of the test
_status: list[int] = []  # of the session, once it has ended


class QuickLogs(pytest_logging.catching_logs):
    """pytest's handler of logs for a phase of a test. pytest searches three thousand loggers for
    those that hand nothing on, six times a test; here it has those of the start of the test.
    """

    def __enter__(self) -> Any:
        if self.level is not None:
            return super().__enter__()
        for logger in (logging.root, *_silent):
            logger.addHandler(self.handler)
            self.attached_loggers.append(logger)
        return self.handler


class QuickPlugin:
    """Hooks of pytest, registered by tests/conftest.py."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        _silent[:] = [
            logger
            for logger in logging.root.manager.loggerDict.values()
            if isinstance(logger, logging.Logger) and not logger.propagate
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        # pytest searches for garbage twice to find exceptions in finalizers; once is enough.
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        _status[:] = [int(exitstatus)]


@atexit.register
def _end() -> None:
    """End the process here: to free the objects of all imports takes ten seconds. What vLLM and
    torch do at the end is done, as they were imported later than this module.
    """
    if _status and not hasattr(sys, "last_type"):  # no exception ended the process
        _exit_function()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status[0])


def register(config: pytest.Config) -> None:
    """Have pytest use this."""
    pytest_logging.catching_logs = QuickLogs  # type: ignore[misc]
    config.pluginmanager.register(QuickPlugin(), "midstream-quick")
