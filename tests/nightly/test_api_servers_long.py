"""Two API server processes before two replicas, under a long load; metrics of both."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import serving
from support.api_servers import (
    Both,
    Judge,
    V,
    command,
    load,
    set_and_ask,
    totals,
)
from support.serving import Running

from midstream import Probe

ROUNDS = 24


@pytest.fixture
def server(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    replicas = ("--data-parallel-size=2", "--max-num-seqs=16")
    folder = tmp_path_factory.mktemp("long")
    # Fresh: prometheus_client reads PROMETHEUS_MULTIPROC_DIR when it is imported.
    with serving.running(command(talking_llama, *replicas), folder, fresh=True) as found:
        yield found


def test_a_long_load_is_right_and_counted_once(server, talking_oracle, talking_llama):
    judge = Judge(talking_oracle, talking_llama)
    with ExitStack() as stack:
        both = Both(server, stack)
        set_and_ask(both, judge)
        # A guard's scores are counted once, in whichever process.
        both.clients[0].guards.put("toxic", Probe(V, layer=1, phase="generated"), above=-1e6)
        before = totals(both.http[0])
        load(both, judge, ROUNDS)
        status = server.wait_until_idle()
        assert {worker["replica"] for worker in status["workers"]} == {0, 1}
        assert all(worker["arena"]["leases"] == 0 for worker in status["workers"])
        time.sleep(1.1)  # the engine is asked once a second at most
        for http in both.http.values():
            found = totals(http)
            completions = found["midstream:completions"] - before["midstream:completions"]
            assert completions == 4 * ROUNDS
            assert found["midstream:guard_requests"] == 4 * ROUNDS
            assert found["midstream:guard_actions"] == 4 * ROUNDS
            # Replicas step together; an idle one makes steps of its own.
            steps = sum(worker["steps"]["active"] for worker in server.status()["workers"])
            assert found["midstream:active_steps"] == steps
            assert found["midstream:requests_running"] == 0
