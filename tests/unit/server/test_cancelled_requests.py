"""Every coroutine of the server, cancelled at each of its awaits: each ends, and leaves nothing."""

import asyncio
import json

import pytest
import torch
from lab.server.routes import test_fit
from msgspec.structs import force_setattr
from support.cancelling import every_run
from support.nightly import NIGHTLY
from support.serving_fake import make, scope_of

CAPTURE = {"layers": [1], "positions": "all"}
STEER = {"op": "steer", "vector": [1.0, 0.0, 0.0], "layer": 1}
ASKED = {"prompt": "abc", "midstream": {"capture": CAPTURE, "activations": "handle"}}
SWEEP = {
    "prompt": "ab",
    "source": "ef",
    "metric": {"logit_diff": ["x", "z"]},
    "layers": [0, 1],
    "sites": "resid_post",
}
OWN = "/v1/midstream"
HEAD = "lm_head.weight"


class Requests:
    def __init__(self, site):
        self.site = site

    async def __call__(self, method, path, body=None):
        """Send a request whose client stays until the answer is complete; return its body."""
        content = b"" if body is None else json.dumps(body).encode()
        messages, sent = [{"type": "http.request", "body": content, "more_body": False}], []

        async def receive():
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message):
            await asyncio.sleep(0)
            sent.append(message)

        scope = {
            **scope_of(str(len(content))),
            "method": method,
            "path": path,
            "raw_path": path.encode(),
        }
        await self.site.app(scope, receive, send)
        assert sent[0]["status"] < 300, sent
        return b"".join(one.get("body", b"") for one in sent)


async def completion(send):
    await send("POST", "/v1/completions", ASKED)


async def stream(send):
    await send("POST", "/v1/completions", {**ASKED, "stream": True})


async def rows(send):
    answer = json.loads(await send("POST", "/v1/completions", ASKED))
    handle = answer["midstream"]["activations"]
    assert await send("GET", f"{OWN}/activations/{handle['id']}")
    await send("DELETE", f"{OWN}/activations/{handle['id']}")


async def two_sweeps_of_which_one_waits_for_the_other(send):
    send.site.engine.limit_seats(1)
    bodies = ({**SWEEP, "layers": [layer], "positions": [1]} for layer in (0, 1))
    await asyncio.gather(*(send("POST", f"{OWN}/sweep", body) for body in bodies))


async def fit(send):
    send.site.engine.script = test_fit.script
    body = {"positive": ["good a", "nice b"], "negative": ["bad f", "sad g"], "name": "good"}
    await send("POST", f"{OWN}/fit", body)


async def two_reads_of_a_parameter(send):
    settings = send.site.server.settings
    force_setattr(settings, "parameters", (HEAD,))
    send.site.engine.parameters[HEAD] = torch.ones(2, 2)
    await asyncio.gather(*(send("GET", f"{OWN}/parameters/{HEAD}") for _ in range(2)))


async def update(send):
    go = asyncio.Event()
    send.site.engine.pause = go.wait
    asked = {"prompt": "abc", "midstream": {"edits": [STEER]}}
    running = asyncio.ensure_future(send("POST", "/v1/completions", asked))
    try:
        while not send.site.engine.running:
            await asyncio.sleep(0)
        await send("POST", f"{OWN}/requests/cmpl/update", {"scale": 0.5})
    finally:
        go.set()
        await running


async def registries(send):
    await send("PUT", f"{OWN}/vectors/one", {"resid_post.1": [1.0, 0.0, 0.0]})
    await send("PUT", f"{OWN}/steering", {"base": {"1": [1.0, 0.0, 0.0]}})
    await send("GET", f"{OWN}/status")
    await send("DELETE", f"{OWN}/steering")


async def server_wide_capture(send):
    await send("PUT", f"{OWN}/captures/watch", {"capture": CAPTURE})
    await send("POST", f"{OWN}/captures/watch/collect")
    await send("DELETE", f"{OWN}/captures/watch")


@pytest.mark.parametrize(
    "requests",
    [
        completion,
        stream,
        rows,
        two_sweeps_of_which_one_waits_for_the_other,
        fit,
        two_reads_of_a_parameter,
        update,
        registries,
        server_wide_capture,
    ],
)
def test_at_whatever_await_a_coroutine_is_cancelled_it_ends_and_leaves_nothing(requests):
    sites = []

    async def scenario():
        sites.append(await make())
        sites[-1].server._expiry.cancel()  # the timer of cached rows, which is no request's
        await requests(Requests(sites[-1]))

    for run in every_run(scenario, each_once=not NIGHTLY):
        site = sites[-1]
        assert run.ended, run
        assert run.left == (), run
        assert run.is_cancelled or run.cancels is None or run.cancels.task > 0
        if run.cancels is None:
            assert run.outcome is None
        elif run.cancels.task == 0:
            assert isinstance(run.outcome, asyncio.CancelledError), run
        server = site.server
        assert site.engine.running == server.sweeps.running == server.sweeps.sweeps == 0, run
        assert not server.parameter_lock.locked(), run
        server.close()
    assert len(sites) > 5
