"""A server of which a part hangs: requests that need it end, others go on, and so does its end."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support import serving
from support.left_over import nothing_left
from support.serving import NAME

from midstream.sinks import Sink

SHORT = {"model": NAME, "prompt": "abcdefgh", "max_tokens": 3}
FOREVER = 120
SINK = {"class": "system.test_serving_hangs:HangingSink", "call_seconds": 1}


class HangingSink(Sink):
    """One that never returns, as one on a network disk that does not answer."""

    def write(self, delivery):
        threading.Event().wait()


def post(server, path, body, **given):
    return httpx.post(f"{server.url}{path}", json=body, timeout=FOREVER, **given)


def captured(**capture):
    return {**SHORT, "midstream": {"capture": {"layers": [1], **capture}}}


def test_a_sink_that_does_not_return_ends_its_requests_and_neither_others_nor_the_end(
    talking_llama, tmp_path
):
    options = ("--sites=resid_post", serving.settings(sinks={"disk": SINK}))
    with (
        nothing_left() as note,
        serving.running(serving.command(talking_llama, *options), tmp_path) as server,
    ):
        note(server)
        failed = post(server, "/v1/completions", captured(sink="disk"))
        assert failed.status_code == 500
        assert "sink disk: write has not returned for 1 s" in failed.text
        refused = post(server, "/v1/completions", captured(sink="disk"))
        assert refused.status_code == 503
        assert "the sink 'disk' stores nothing now" in refused.text
        assert int(refused.headers["retry-after"]) >= 1
        for body in (SHORT, captured()):
            assert post(server, "/v1/completions", body).status_code == 200
        assert server.wait_until_idle()["requests"] == 0
        assert server.stop() == 0, server.log[-3000:]
        assert "the sink disk: write has not returned" in server.log


def test_while_the_engine_is_stopped_clients_that_leave_are_forgotten_and_the_server_ends(
    talking_llama, tmp_path
):
    with (
        nothing_left() as note,
        serving.running(serving.command(talking_llama, "--sites=resid_post"), tmp_path) as server,
    ):
        note(server)
        assert post(server, "/v1/completions", captured()).status_code == 200
        os.kill(server.engine, signal.SIGSTOP)

        def leave(path, body):
            with pytest.raises(httpx.ReadTimeout):
                pytest.fail(httpx.post(f"{server.url}{path}", json=body, timeout=3).text)

        sweep = {
            "prompt": [1, 2, 3],
            "source": [4, 5, 6],
            "metric": {"logprob": 7},
            "layers": [1],
            "sites": "resid_post",
        }
        fit = {"positive": ["a b", "b a"], "negative": ["c d", "d c"]}
        asked = [
            ("/v1/completions", captured()),
            ("/v1/completions", {**captured(), "stream": True}),
            ("/v1/midstream/sweep", {**sweep, "stream": False}),
            ("/v1/midstream/fit", fit),
        ]
        with ThreadPoolExecutor(len(asked)) as threads:
            list(threads.map(lambda one: leave(*one), asked))
        assert server.is_healthy()
        assert server.status()["workers_age_seconds"] != 0
        status = server.stop(FOREVER)
        # On its way out vLLM asks the process at its port for its command; one that has just ended
        # is an error of psutil's.
        assert status == 0 or "psutil.ZombieProcess" in server.log, server.log[-3000:]
