"""Quantised weights on a GPU: rows and edits against hooks on the same modules, eagerly, and what a
capture changes in a compiled FP8 model.

Each engine has a process of its own, and four run at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import own_process
from support.quantised import METHODS
from support.quantised_compiled import RUNS, apart

AT_ONCE = 4
SECONDS = 240  # of one process, those before it in the queue not counted
# The rounding of a changed row may come out otherwise in the last digit.
EDITED = 0.05
MOVED = 0.02
Process = tuple[int, str, str]


def start(pool: ThreadPoolExecutor, folder: Path, *arguments: str | Path) -> Future[Process]:
    """Start a process of its own, with compiled graphs of its own in `folder`."""
    place = str(folder / "-".join(map(str, arguments[:2])))
    env = own_process.environment(VLLM_CACHE_ROOT=place)
    return pool.submit(own_process.run, "-m", *arguments, timeout=SECONDS, env=env)


def report_of(ended: Process) -> Any:
    """Return what a process printed last, as JSON."""
    code, out, error = ended
    assert code == 0, f"exit {code}\n{out[-2000:]}\n{error[-6000:]}"
    return json.loads(out.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Process]]:
    """The comparisons with hooks, by method."""
    folder = tmp_path_factory.mktemp("quantised")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {
            name: start(pool, folder, "support.quantised_hooks", name, folder) for name in METHODS
        }


@pytest.mark.parametrize("name", METHODS)
def test_rows_and_edits_are_those_of_hooks_on_the_same_modules(
    compared: dict[str, Future[Process]], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(compared[name].result())
    edits: dict[str, Sequence[Any]] = report["edits"]
    worst = max(edits, key=lambda site: edits[site][0])
    with capsys.disabled():
        sys.stdout.write(
            f"\nquantised {name}: {report['taps']} taps, again {report['again']}, captured "
            f"{report['captured']}, edits at worst {worst} {edits[worst]}\n"
        )
    assert not report["missed"], report["missed"]
    if report["again"][0] == 0:
        assert report["captured"][0] == 0, report["captured"]
    else:  # the kernels themselves give other digits each time
        assert report["captured"][0] <= EDITED, report["captured"]
    for site, (error, where, moved) in edits.items():
        assert error <= EDITED, (site, where, error)
        assert moved > MOVED, site
    for site in METHODS[name].lacking:
        assert report["lacking"][site], site


@pytest.fixture(scope="module")
def compiled(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Process]]:
    """Tokens and logprobs of SmolLM2 in FP8, compiled: by run."""
    folder = tmp_path_factory.mktemp("compiled")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {
            name: start(pool, folder, "support.quantised_compiled", name, smollm2) for name in RUNS
        }


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.plain])
def test_what_a_capture_changes_in_a_compiled_fp8_model(
    compiled: dict[str, Future[Process]], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, report = RUNS[name], report_of(compiled[name].result())
    plain = report_of(compiled[run.plain].result())["idle"]
    idle, captured = apart(report["idle"], plain), apart(report["captured"], plain)
    moved = apart(report["captured"], report["idle"])
    with capsys.disabled():
        sys.stdout.write(
            f"\ncompiled {name}: idle and plain {idle}, captured and plain {captured}, "
            f"captured and idle {moved}\n"
        )
    assert apart(report["again"], report["idle"]).same
    assert idle.same or run.always
    assert moved.same or not run.unchanged
