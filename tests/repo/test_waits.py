"""Waits of the package: each has a limit, or is in docs/internal/promises.md with what ends it."""

import ast
import functools
from pathlib import Path
from typing import NamedTuple

from support.syntax import dotted, tree_of, walk

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "midstream"
PAGE = ROOT / "docs" / "internal" / "promises.md"

# Calls that wait without a limit, by file and function, each with its row of the page's table.
# "" is no wait: what is asked for its result has ended, or is no future.
UNLIMITED = {
    "lab/api/sweep.py: run_offline": "",
    "lab/attribution/check.py: measure": "",
    "cli/studio.py: studio": "`midstream studio`: its server",
    "deadlines.py: within": "",
    "deadlines.py: _undo": "",
    "lab/jobs/ray/actor.py: chunk_numbers": "capture jobs on Ray: the cluster",
    "lab/jobs/ray/engine_thread.py: EngineThread.__init__": "capture jobs on Ray: the cluster",
    "lab/jobs/ray/engine_thread.py: EngineThread._receive": "a thread that waits for work",
    "lab/jobs/ray/executor.py: RayExecutor._get": "capture jobs on Ray: the cluster",
    "lab/jobs/ray/executor.py: RayExecutor._wait_for_start": "",
    "lab/jobs/ray/actor.py: EngineActor.__init__": "capture jobs on Ray: the cluster",
    "lab/jobs/ray/worker.py: Worker.wait": "capture jobs on Ray: the cluster",
    "lab/jobs/ray/worker.py: Worker._receive": "a thread that waits for work",
    "lab/jobs/store_writer.py: StoreWriter.check": "",
    "runtime/core/controller_calls.py: _CallThread._run": "a thread that waits for work",
    "runtime/frontend/results/delivery.py: PendingDelivery.set_results": "a sink's write or flush",
    "runtime/frontend/rpc/replicas.py: call": "",
    "runtime/frontend/rpc/rpc_client.py: carry_out_whole": "`LLM`: the engine's answer",
    "runtime/frontend/step_controllers.py: StepControllers._finish_call": "",
    "runtime/frontend/sync_frontend.py: FrontEnd._receive": "`LLM`: the engine's answer",
    "server/results_json.py: ResultEncoder._discard": "",
    "server/routes/activations.py: _open.end": "",
    "lab/server/routes/fit.py: fit": "",
    "lab/server/routes/sweep.py: _SweepResponse.__call__": "",
    "lab/server/served_sweep.py: ServedSweep.events": "",
    "lab/server/served_sweep.py: ServedSweep._start": "",
    "sinks/daemon_threads.py: _make_calls": "a thread that waits for work",
    "sinks/daemon_threads.py: in_threads": "a sink's write or flush",
    "sinks/queue.py: SinkQueue.put": "a sink's write or flush",
    "sinks/tcp/spool.py: Spool.write": "a sink's write or flush",
    "store/epoch_dataset.py: EpochDataset._read_ahead": "a batch that a dataset reads ahead",
    "store/epoch_dataset.py: EpochDataset._read_when": "a batch that a dataset reads ahead",
    "store/format/checksums.py: Summing.finish": "",
    "store/format/checksums.py: Summing._start": "",
    "store/reader_threads.py: _make_calls": "a thread that waits for work",
    "lab/sweep/async_run.py: run_job": "",
    "transport/arena.py: Arena._make": "",
}
# The interpreter joins their threads when it exits, so they may only compute.
EXECUTORS = {
    "runtime/frontend/request/heavy_work.py",
    "store/format/checksums.py",
    "transport/arena.py",
}
# A wait of one of these names has no limit if it is called without arguments.
ON_LOOP_THREADS = {
    "api/registered.py: AsyncLenses.register",
    "api/registered.py: AsyncSaes.register",
    "lab/fit/directions.py: Directions.fit_async",
    "lab/fit/probes/fitted_probe.py: FittedProbe.fit_async",
    "lab/server/routes/fit.py: fit",
    "runtime/frontend/request/heavy_work.py: in_thread",
    "runtime/frontend/results/async_completion.py: AsyncCompletion._finish",
    "runtime/frontend/results/call.py: GenerateCall.take_names",
    "server/cached_rows/capture_cache.py: expire_in_time",
    "server/results_json.py: ResultEncoder._inline",
    "server/results_json.py: ResultEncoder._whole",
    "server/routes/activations.py: _open",
    "server/routes/parameters.py: parameter",
    "server/server.py: Server.fill",
}
WITHOUT_ARGUMENTS = {"wait", "join", "acquire", "result", "get"}
LOCKS = {"flock", "lockf"}
PROCESSES = {"subprocess.run", "urllib.request.urlopen"}
# What CUDA and the worker's ring wait for is the device, which has no deadline.
DEVICE = ("shipment", "arrival")


class Call(NamedTuple):
    """A call of the package."""

    file: str  # below the package
    node: ast.Call  # the call
    name: str  # the name of what is called, with dots
    functions: tuple[str, ...]  # the functions and classes that the call is in
    is_awaited: bool  # whether it is awaited


@functools.cache
def trees():
    files = sorted(PACKAGE.rglob("*.py"))
    return {file.relative_to(PACKAGE).as_posix(): tree_of(file) for file in files}


@functools.cache
def calls():
    calls = []

    def add(file, node, functions, is_awaited):
        for child in ast.iter_child_nodes(node):
            inner, awaits = functions, isinstance(child, ast.Await)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = (*functions, child.name)
            if isinstance(child, ast.Call):
                name = dotted(child.func)
                calls.append(Call(file, child, name, functions, is_awaited))
                # What `within` is given is a coroutine, which it awaits.
                awaits = name == "within"
            add(file, child, inner, awaits)

    for file, tree in trees().items():
        add(file, tree, (), False)
    return calls


def has_no_limit(call, name):
    last = name.rpartition(".")[2]
    if last in LOCKS:
        return not any(flag in ast.unparse(call) for flag in ("LOCK_NB", "LOCK_UN", "how |"))
    if name in PROCESSES:
        return not any(one.arg == "timeout" for one in call.keywords)
    if name in ("ray.get", "self._ray.get", "wait_for"):
        return True
    if last not in WITHOUT_ARGUMENTS or "." not in name or call.args or call.keywords:
        return False
    value = call.func.value
    is_text = isinstance(value, ast.Constant | ast.JoinedStr)
    return not is_text and name.split(".")[-2] not in (*DEVICE, "_ADDED", "ASKER", "CURRENT")


def unlimited():
    return {
        f"{call.file}: {'.'.join(call.functions)}"
        for call in calls()
        if not call.is_awaited and has_no_limit(call.node, call.name)
    }


def rows():
    """The first column of the table of deadlines."""
    text = PAGE.read_text().partition("## Deadlines\n")[2].partition("\n## ")[0]
    return {line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if "|" in line}


def test_no_coroutine_waits_by_a_function_that_loses_cancellations():
    """`asyncio.wait_for` of Python 3.10 and 3.11 does; `asyncio.timeout` is of 3.11 and later."""
    found = []
    for file, tree in trees().items():
        # Most files do not have the word, and to look at all nodes takes a second.
        nodes = walk(tree) if "asyncio" in (PACKAGE / file).read_text() else ()
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                names = {f"{node.value.id}.{node.attr}"}
            elif isinstance(node, ast.ImportFrom) and node.module == "asyncio":
                names = {f"asyncio.{one.name}" for one in node.names}
            else:
                continue
            wrong = names & {"asyncio.wait_for", "asyncio.timeout", "asyncio.timeout_at"}
            found += [f"{file}: {name}; use midstream.deadlines.within" for name in wrong]
    assert found == []


def test_every_wait_without_a_limit_is_known_and_what_ends_it_is_in_the_table():
    assert unlimited() == set(UNLIMITED)
    assert set(UNLIMITED.values()) - {""} <= rows()


def test_only_what_computes_runs_on_threads_that_the_exit_waits_for():
    pools = {call.file for call in calls() if call.name.endswith("PoolExecutor")}
    assert pools == EXECUTORS


def test_what_the_end_of_a_server_waits_for_on_threads_of_its_event_loop_is_known():
    """`asyncio.run` joins these threads: each of them works, or waits with a limit."""
    users = {
        f"{call.file}: {'.'.join(call.functions)}"
        for call in calls()
        if call.name.rpartition(".")[2] in ("to_thread", "run_in_executor")
    }
    assert users == ON_LOOP_THREADS


def test_every_thread_is_a_daemon():
    found = [
        f"{call.file}: {ast.unparse(call.node)[:60]}"
        for call in calls()
        if call.name in ("threading.Thread", "Thread")
        and not any(
            word.arg == "daemon" and ast.unparse(word.value) == "True"
            for word in call.node.keywords
        )
    ]
    assert found == []
