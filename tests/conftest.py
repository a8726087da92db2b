"""Fixtures of all tests; which tests are run by default, and in which order."""

import functools
import gc
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from support import quick_lookups, quick_pytest, releases
from support.engines import HAS_GPU
from support.nightly import NIGHTLY

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
# How long an example takes says nothing here: a first one imports what it needs.
DEV_EXAMPLES = 10
settings.register_profile("dev", deadline=None, max_examples=DEV_EXAMPLES)
settings.register_profile(
    "nightly", deadline=None, max_examples=500, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("nightly" if NIGHTLY else "dev")
if not HAS_GPU:
    # Two engines at a time, on models too small for several threads: those of one must not wait
    # for those of the other. PyTorch reads this when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

quick_lookups.install()
# pytest caches the tests that it has rewritten; without the cache each process rewrites them again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Imports make objects that stay. To search them for garbage takes a third of the collection's time.
gc.disable()
# New objects before the next search. Python's 700 would cost a twentieth of the processor's time.
GARBAGE = 20_000


# Before all others: they run Phi in transformers. Once vLLM has run a model by transformers' code,
# as it does with Phi, that class is vLLM's for good in the process.
FIRST = ("lab/tools/doctor/test_reference.py", "lab/attribution/test_gradients.py")
# Files without a record of their own, by folder: those with processes of their own before the rest.
SLOW = ("engine/", "system/", "browser/", "nightly/", "gpu/")
# Files whose tests take seconds without an engine: they fit classifiers, draw charts, count the
# lines that a server runs, read the sources of several releases of vLLM, or wait for what hangs.
LONG = (
    "contract/test_inner_sites.py",
    "lab/export/test_saelens.py",
    "lab/fit/test_fitted_probe.py",
    "lab/fit/test_probe_statistics.py",
    "lab/report/test_page.py",
    "lab/tools/doctor/test_judge.py",
    "lab/tools/doctor/test_reference.py",
    "repo/test_faults.py",
    "repo/test_seam_contract.py",
    "unit/server/test_heavy_bodies.py",
    "unit/server/test_pipelining.py",
    "unit/server/test_work.py",
    "unit/sinks/events/test_event_log.py",
    "unit/sinks/events/test_webhook.py",
    "unit/sinks/test_tcp.py",
    "unit/viz/test_charts.py",
)


# Tests of a GPU are not there without one.
collect_ignore = [] if HAS_GPU else ["gpu"]
pytest_plugins = ["support.engine_fixtures"]


def pytest_configure(config: pytest.Config) -> None:
    quick_pytest.register(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the tests of engines where the options leave all of them out."""
    without = config.option.markexpr.strip() == "not engine"
    left = (TESTS / name for name in (*SLOW, *LONG))
    return True if without and collection_path in left else None


def durations() -> dict[str, float]:
    """Seconds that each file of tests took when that was recorded; see scripts/durations.py."""
    found: dict[str, float] = json.loads((TESTS / "durations.json").read_text())["files"]
    return found


def name_of(item: pytest.Item) -> str:
    """The file of a test, relative to `tests`."""
    return _name_of(item.path)


@functools.cache
def _name_of(path: Path) -> str:
    return path.relative_to(TESTS).as_posix() if TESTS in path.parents else ""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        name = name_of(item)
        if name.startswith("nightly/"):
            item.add_marker(pytest.mark.nightly)
        if name.startswith(("engine/", "system/", "browser/", "nightly/")) or name in LONG:
            item.add_marker(pytest.mark.engine)
        # A server of objects is a process.
        if "object_server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)
        if not NIGHTLY:
            _cap_examples(item)
    if not NIGHTLY and not _names_nightly(config):
        left = [item for item in items if item.get_closest_marker("nightly") is not None]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.get_closest_marker("nightly") is None]
    known = durations()

    def when(item: pytest.Item) -> float:
        name = name_of(item)
        if name in FIRST:
            return float("-inf")
        return -known.get(name, 5.0 if name.startswith(SLOW) else 1.0)

    # The longest first: begun last, it would keep one process busy while the other has nothing.
    items.sort(key=when)


def pytest_collection_finish() -> None:
    """Exclude all objects of the collection from garbage collection, and switch that on again."""
    gc.freeze()
    gc.set_threshold(GARBAGE, 10, 10)
    gc.enable()
    # pytest adds its handlers to each logger that hands nothing on, six times a test. Of those in
    # torch there are ninety; the one of torch itself, where they hand on to now, is enough.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


def _cap_examples(item: pytest.Item) -> None:
    """Have a property tried with few examples, though it asks for more: those are for the night."""
    test = getattr(item, "obj", None)
    given = getattr(test, "_hypothesis_internal_use_settings", None)
    if given is not None and given.max_examples > DEV_EXAMPLES:
        test._hypothesis_internal_use_settings = settings(given, max_examples=DEV_EXAMPLES)


def _names_nightly(config: pytest.Config) -> bool:
    """Whether the command line asks for tests that are left out by default."""
    named = any("nightly" in word or "::" in word for word in config.args)
    return named or "nightly" in (config.option.markexpr or "")


@pytest.fixture(autouse=True)
def _logger() -> None:
    """Undo what earlier tests did to loggers: servers that log JSON lines, and other libraries."""
    if logging.root.manager.disable != logging.NOTSET:
        logging.disable(logging.NOTSET)
    logging.getLogger("midstream").handlers.clear()
    for logger in quick_pytest.own_loggers():
        logger.propagate, logger.disabled = True, False
        if logger.level != logging.NOTSET:
            logger.setLevel(logging.NOTSET)
    if logging.root.level != logging.WARNING:
        logging.root.setLevel(logging.WARNING)


@pytest.fixture
def anyio_backend() -> str:
    """What tests of coroutines run on, as servers and clients do."""
    return "asyncio"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, made when absent (a download of 90 MB)."""
    from midstream.lab.demo.model.smollm2 import NAME, make_smollm2

    return make_smollm2(Path(os.environ.get("MIDSTREAM_MODELS", ROOT / ".models")) / NAME)


@pytest.fixture(scope="module", params=releases.names())
def release(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The `vllm` folder of each release whose sources are checked, one after the other."""
    from support import sources  # which imports torch, and many tests do without

    folder = releases.folder_of(request.param)
    with sources.sources_in(folder):
        yield folder
