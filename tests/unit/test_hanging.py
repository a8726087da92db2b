"""What hangs, on purpose: pipes without a writer, stopped processes, engines that do not answer.

Each wait ends with an error that names what hangs. No test measures time: one that has not ended
after `FOREVER` seconds has failed.
"""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.cancelling import bounded
from support.sinking import ORIGIN, Noting

from midstream import plugin
from midstream.config.sinks import plain_sinks, read_sinks
from midstream.errors import BusyError, HttpError, MidstreamError, StoreError
from midstream.lab.fit import Directions
from midstream.lab.jobs import directory_lock
from midstream.lab.report.pairs import read_pairs
from midstream.lab.sweep import Sweep
from midstream.lenses import JacobianLens, TunedLens
from midstream.plan import Capture, Plan
from midstream.results.activations import Activations
from midstream.runtime.frontend.engine_info import FrontEnds
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.results.call import GenerateCall
from midstream.runtime.frontend.rpc import replicas
from midstream.runtime.protocol.rpc import ReadUsage
from midstream.sae.sae import SAE
from midstream.server import peers
from midstream.sinks import name_claims, sink_set
from midstream.sinks.daemon_threads import begin
from midstream.steering.files import read_file, read_json_file
from midstream.store import open_store

FOREVER = 30.0


def ended(call):
    """What a call returns or raises, in a thread of its own."""
    made = begin(call)
    assert wait((made,), FOREVER).done, "it hangs"
    return made.result(0)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("vectors.json", read_json_file),
        ("vectors.safetensors", read_file),
        ("vectors.npz", read_file),
        ("vectors.gguf", read_file),
        ("directions.safetensors", Directions.load),
        ("directions.gguf", Directions.from_gguf),
        ("sae/cfg.json", lambda path: SAE.load(path.parent)),
        ("sae/sae_weights.safetensors", lambda path: SAE.load(path.parent)),
        ("params.npz", SAE.load),
        ("sae.safetensors", SAE.load),
        ("lens/config.json", lambda path: TunedLens.load(path.parent)),
        ("lens.pt", JacobianLens.load),
        ("lens.safetensors", JacobianLens.load),
        ("rows.safetensors", Activations.load),
        ("sweep.json", Sweep.load),
        ("pairs.jsonl", read_pairs),
        ("store", open_store),
    ],
)
def test_a_named_pipe_in_place_of_a_file_is_an_error_and_no_wait(tmp_path, name, read):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name.endswith("sae_weights.safetensors"):
        (path.parent / "cfg.json").write_text(
            '{"d_in": 4, "d_sae": 8, "architecture": "standard", "hook_name": '
            '"blocks.1.hook_resid_post"}'
        )
    elif name == "sae/cfg.json":
        (path.parent / "sae_weights.safetensors").touch()
    os.mkfifo(path)
    with pytest.raises((MidstreamError, OSError), match=r"(?i)not a (regular file|directory)"):
        ended(lambda: read(path))


def test_options_that_come_through_a_pipe_are_left_to_vllm(tmp_path):
    path = tmp_path / "options.yaml"
    os.mkfifo(path)
    assert ended(lambda: plugin._file_enables(str(path))) is False


class Deaf(Noting):
    """A sink whose `check` waits for `go`."""

    def check(self, tag, request_id):
        assert self.go.wait(FOREVER)


def test_a_sink_whose_check_hangs_refuses_requests_and_names_itself(monkeypatch):
    monkeypatch.setattr(sink_set, "CHECK_SECONDS", 0.05)
    sink = Deaf()
    sinks = sink_set.SinkSet(read_sinks(plain_sinks({"disk": sink})), ORIGIN)
    plan = Plan((Capture([1], sink="disk", request_id="r"),))
    sink.go.clear()
    for _ in range(2):  # the second one does not wait
        with pytest.raises(BusyError, match="the sink 'disk' stores nothing now: check has not"):
            ended(lambda: sinks.check_places(plan))
    assert ended(lambda: sinks.check_places(Plan((Capture([1]),)))) is None
    sink.go.set()
    while True:
        try:
            sinks.check_places(plan)
            break
        except BusyError:
            pass
    sinks.close()


def test_the_event_loop_turns_while_a_sink_checks_a_request():
    sink = Deaf()
    sinks = sink_set.SinkSet(read_sinks(plain_sinks({"disk": sink})), ORIGIN)
    plan = Plan((Capture([1], sink="disk", request_id="r"),))
    sink.go.clear()

    async def ask():
        asked = asyncio.ensure_future(GenerateCall(CallPlan(plan)).take_names(sinks))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not asked.done()
        sinks.check(plan)  # what is left for the event loop does not wait for the sink
        sink.go.set()
        await asked

    bounded(ask())
    sinks.close()


class DeafLocks:
    """The module `fcntl`, whose locks wait for `go`."""

    def __init__(self):
        self.go = threading.Event()

    def fcntl(self, *args):
        assert self.go.wait(FOREVER)
        return fcntl.fcntl(*args)

    def __getattr__(self, name):
        return getattr(fcntl, name)


def test_a_folder_whose_lock_hangs_refuses_ids_and_holds_nobody_who_gives_one_back(
    tmp_path, monkeypatch
):
    locks = DeafLocks()
    monkeypatch.setattr(name_claims, "fcntl", locks)
    monkeypatch.setattr(name_claims, "TAKE_SECONDS", 0.05)
    names = name_claims.NameClaims(str(tmp_path / "names"))
    locks.go.set()
    assert names.take("first")
    locks.go.clear()
    for _ in range(2):  # the second one does not wait
        with pytest.raises(BusyError, match="names does not answer"):
            ended(lambda: names.take("second"))
    assert ended(lambda: names.take("first")) is False
    assert ended(lambda: names.give("first")) is None
    locks.go.set()
    # What hung is undone once it answers: neither name is locked.
    other = name_claims.NameClaims(str(tmp_path / "names"))
    monkeypatch.setattr(name_claims, "TAKE_SECONDS", FOREVER)
    for name in ("first", "second"):
        assert any(other.take(name) or time.sleep(0.05) for _ in range(100)), name
    other.close()
    locks.go.clear()
    monkeypatch.setattr(name_claims, "TAKE_SECONDS", 0.05)
    with pytest.raises(BusyError):
        names.take("third")
    assert ended(names.close) is None
    locks.go.set()


def test_a_sink_that_is_stalled_refuses_requests_before_they_are_computed():
    sink = Noting()
    given = {"disk": {"instance": sink, "call_seconds": 0.05}}
    sinks = sink_set.SinkSet(read_sinks(plain_sinks(given)), ORIGIN)
    plan = Plan((Capture([1], sink="disk"),))
    sink.go.clear()
    told = sinks.queue("disk").put(SimpleNamespace(name="r"), 1)
    assert told.result(FOREVER).status == "error"
    with pytest.raises(BusyError, match="'disk' stores nothing now: write has not returned for"):
        sinks.check(plan)
    sink.go.set()
    ended(sinks.close)


@contextmanager
def stopped(script, *args):
    """A process that has run a script up to its line `ready`, and gets no time any more."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait(FOREVER)
        process.stdin.close()
        process.stdout.close()


_LISTENING = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[1])
server.listen()
print("ready", flush=True)
sys.stdin.read()
"""
_LOCKING = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_peer_process_that_is_stopped_is_an_error_for_every_request_that_needs_it(monkeypatch):
    monkeypatch.setattr(peers, "_SECONDS", 0.2)
    scope = {"type": "http", "method": "GET", "path": "/v1/midstream/captures", "headers": []}

    async def each():
        return [one async for one in mine.each(scope)]

    sent = []

    async def send(message):
        sent.append(message)

    async def change():
        await mine._change_all(answered, {**scope, "method": "PUT"}, b"{}", send)

    async def answered(send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    with tempfile.TemporaryDirectory(prefix="midstream-") as folder:
        path = str(Path(folder) / "api-1")
        with stopped(_LISTENING, path):
            mine = peers.Peers(Path(folder), FrontEnds(2, 0))
            with pytest.raises(HttpError, match="did not answer within"):
                bounded(each())
            bounded(mine.refresh_metrics(scope))
            with pytest.raises(HttpError, match="did not answer within"):
                ended(lambda: mine.read_rows(scope, "x"))
            with pytest.raises(HttpError) as late:
                bounded(change())
            assert late.value.status == 504

            async def one_after_the_other():
                """Changes wait for each other, and no longer than the first one may take."""
                async with mine._changing:
                    await change()

            with pytest.raises(HttpError) as waiting:
                bounded(one_after_the_other())
            assert (waiting.value.status, sent) == (503, [])


def test_a_stopped_process_that_holds_the_lock_of_a_job_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(directory_lock, "PATIENCE", 0.2)
    (tmp_path / directory_lock.WRITERS).write_text("mark")
    asked = SimpleNamespace(out=str(tmp_path))
    with stopped(_LOCKING, str(tmp_path / directory_lock.WRITERS)):
        with pytest.raises(StoreError, match=r"another process has held its lock"):
            ended(lambda: directory_lock.join_writers(asked, "mark"))
        with pytest.raises(StoreError, match="still write into it"):
            ended(lambda: directory_lock._wait_for_writers(str(tmp_path)))


class SilentClient:
    """vLLM's client of an engine core that is stopped: it answers nothing."""

    core_engines = (b"engine",)
    client_index = 0
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self):
        self.utility_results = {}

    async def _send_input(self, *_):
        pass

    def _ensure_output_queue_task(self):
        pass


def test_an_engine_that_answers_nothing_is_an_error_after_the_limit(monkeypatch):
    monkeypatch.setattr(replicas, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(replicas, "ANSWER_SECONDS", 0.05)
    with pytest.raises(BusyError, match="has not answered for 0.05 seconds"):
        bounded(replicas.call(SilentClient(), 0, ReadUsage()))


def test_whoever_waits_for_an_engine_that_answers_nothing_can_be_cancelled():
    async def main():
        task = asyncio.ensure_future(replicas.call(SilentClient(), 0, ReadUsage()))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait((task,), timeout=FOREVER)
        assert task.cancelled()

    bounded(main())
