"""pytest and Python with less work for each test and at the end, in a process of many imports."""

import atexit
import gc
import logging
import os
import sys
from multiprocessing.util import _exit_function
from typing import Any

import pytest
from _pytest import logging as pytest_logging

_silent: list[logging.Logger] = []  # loggers that hand nothing on, as of the start of the file
_own: list[str] = []  # names of midstream's loggers
_counts = {"silent": 0, "own": 0}  # loggers when each of these was listed
_status: list[int] = []  # of the session, once it has ended


class QuickLogs(pytest_logging.catching_logs):
    """pytest's handler of logs for a phase of a test. pytest searches three thousand loggers for
    those that hand nothing on, six times a test; here it has those of the start of the file.
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

    _file = ""  # of the last test

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        file, loggers = nodeid.partition("::")[0], logging.root.manager.loggerDict
        if file == self._file and len(loggers) == _counts["silent"]:
            return
        self._file, _counts["silent"] = file, len(loggers)
        _silent[:] = [
            logger
            for logger in loggers.values()
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


def own_loggers() -> list[logging.Logger]:
    """Return midstream's loggers. Three thousand others are searched only when some are new."""
    loggers = logging.root.manager.loggerDict
    if len(loggers) != _counts["own"]:
        _own[:] = [name for name in loggers if name.startswith("midstream")]
        _counts["own"] = len(loggers)
    found = (loggers[name] for name in _own)
    return [logger for logger in found if isinstance(logger, logging.Logger)]


def register(config: pytest.Config) -> None:
    """Have pytest use this."""
    pytest_logging.catching_logs = QuickLogs  # type: ignore[misc]
    config.pluginmanager.register(QuickPlugin(), "midstream-quick")
