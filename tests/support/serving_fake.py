"""A fake engine, and an app like vLLM's around it, with midstream's endpoints."""

import asyncio
import functools
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
import torch
from fastapi import APIRouter, FastAPI
from msgspec.structs import replace

from midstream.errors import SpecError
from midstream.plan import ModelShape, Plan
from midstream.results.activations import Activations
from midstream.results.plan_update import PlanUpdate
from midstream.results.probe_scores import Probes
from midstream.results.readouts import RESULTS
from midstream.results.receipt import Captured, Receipt
from midstream.results.site_table import SiteTable
from midstream.runtime.frontend.engine_info import FrontEnds
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.intake import Intake
from midstream.server.app import endpoint_plugin as plugin
from midstream.server.app.endpoint_plugin import Endpoints
from midstream.server.server import Server
from midstream.sinks.server_captures import ServerCaptures
from midstream.sinks.sink_set import SinkSet
from midstream.steering import VectorRegistry
from midstream.steering.guards import Guards
from midstream.steering.tiers import Steering
from support.serving_endpoints import Params, add_endpoints
from support.sinking import ORIGIN
from support.sweep_fake import FakeSweeps

WIDTH = 3
SHAPE = ModelShape(4, WIDTH, [("resid_post", n) for n in range(4)] + [("resid_mid", 2)])
TOKENS = 3  # that are generated


CHARACTERS = SimpleNamespace(
    encode=lambda text, **_: list(map(ord, text)),
    decode=lambda ids, **_: "".join(map(chr, ids)),
)


def rows(layers: tuple[int, ...], count: int, first: int = 0) -> Activations:
    """Rows `first` … `count` − 1; row p of layer l is 10·p + l in each place."""
    at = torch.arange(first, count)
    values = {
        ("resid_post", layer): (10.0 * at[:, None] + layer).expand(-1, WIDTH).contiguous()
        for layer in layers
    }
    return Activations(values, dict.fromkeys(values, at), torch.arange(100, 100 + count))


def scores(
    names: list[str], count: int, classes: Mapping[str, tuple[str, ...]] = MappingProxyType({})
) -> Probes:
    """Score p is p / 8; of two classes, p and p / 8."""
    at = torch.arange(count)
    tokens = torch.arange(100, 100 + count)
    of_names = {
        name: torch.stack([at.float(), at / 8], 1) if name in classes else at / 8 for name in names
    }
    return Probes(of_names, dict.fromkeys(names, at), tokens, classes)


class FakeEngine(FakeSweeps):
    """What serving needs of a `midstream.AsyncLLM`.

    Attributes:
        calls: (prompt, params, request id) of every call.
        states: the calls under way, by request id; True: one has an output.
        log: "call" or "output" and the request id, in this order.
        seats: how many calls run at the same time; others wait in the order in which they came.
        updates: (plan, edits, scale) of each change of a running request.
        refuses: is raised in place of a change.
        script: gives a call's outputs in place of those that a plan asks for.
        parameters: the model's, by name.
        pause: is awaited before each output.
    """

    def __init__(self) -> None:
        self.vectors = VectorRegistry(SHAPE)
        self.steering = Steering(self.vectors)
        self.guards = Guards(self.vectors)
        self.sinks = SinkSet((), ORIGIN)
        self.captures = ServerCaptures(self.sinks, SHAPE)
        self.info = SimpleNamespace(
            shape=SHAPE,
            dtype="float32",
            codec="raw",
            workers=(SimpleNamespace(runner="fake"),),
            front_ends=FrontEnds(),
        )
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                model="fake",
                revision=None,
                hf_config=SimpleNamespace(model_type="fake"),
                get_vocab_size=lambda: 0x110000,
                max_model_len=512,
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            scheduler_config=SimpleNamespace(policy="fcfs", max_num_batched_tokens=8192),
        )
        self.lenses = self.saes = SimpleNamespace(names=())
        self.errored = False
        self.intake = Intake()
        self.calls: list[tuple[Any, Params, str]] = []
        self.states: dict[str, bool] = {}
        self.log: list[tuple[str, str]] = []
        self.seats = 64
        self._seats = asyncio.Semaphore(self.seats)
        self.parameters: dict[str, torch.Tensor] = {}
        self.updates: list[tuple[Plan | None, Any, float | None]] = []
        self.refuses: Exception | None = None
        self.script: Callable[..., list[Any]] | None = None
        self.pause: Callable[[], Any] = lambda: asyncio.sleep(0)

    @property
    def running(self) -> int:
        """How many calls are under way."""
        return len(self.states)

    async def ready(self) -> None:
        """It is."""

    def limit_seats(self, seats: int) -> None:
        """Set the number of calls that run at the same time."""
        self.seats, self._seats = seats, asyncio.Semaphore(seats)

    async def parameter(self, name: str) -> torch.Tensor:
        await self.pause()
        if name not in self.parameters:
            raise SpecError("name", f"there is no parameter {name!r}")
        return self.parameters[name]

    def sites(self) -> SiteTable:
        return SiteTable.of(SHAPE)

    async def update(
        self, request_id: CallPlan, *, edits: Any = None, scale: float | None = None
    ) -> PlanUpdate:
        """Record a change; `refuses` is raised in place of it."""
        if self.refuses is not None:
            raise self.refuses
        self.updates.append((request_id.plan, edits, scale))
        return PlanUpdate(len(self.updates), {0: 10 * len(self.updates)})

    async def update_all(
        self, requests: Sequence[CallPlan], *, edits: Any = None, scale: float | None = None
    ) -> list[PlanUpdate | None]:
        """As `update` of each; `refuses` may say that they have ended."""
        if isinstance(self.refuses, SpecError) and self.refuses.path == "request_id":
            return [None] * len(requests)
        return [await self.update(one, edits=edits, scale=scale) for one in requests]

    async def usage(self, timeout: float | None = None) -> dict[str, Any]:
        found = {"requests": self.running, "waiting": 0, "workers": []}
        return {**found, "workers_age_seconds": 0.0}

    def get_tokenizer(self) -> Any:
        """Its tokens are characters."""
        return CHARACTERS

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, capture: Any = None, **given: Any
    ) -> AsyncGenerator[Any, None]:
        if getattr((params.extra_args or {}).get("midstream"), "is_own", False):
            prompt = "".join(map(chr, prompt["prompt_token_ids"]))
        if capture is not None:
            params = SimpleNamespace(n=1, extra_args={"midstream": Plan(captures=(capture,))})
            prompt = "".join(map(chr, prompt["prompt_token_ids"]))
            self.vllm_args = {name: each for name, each in given.items() if each is not None}
        self.calls.append((prompt, params, request_id))
        self.log.append(("call", request_id))
        own = f"{request_id}-{len(self.calls)}"
        self.states[own] = False
        try:
            async with self._seats:
                script = self.script or outputs_of
                for output in script(prompt, params, request_id):
                    await self.pause()
                    if isinstance(output, Exception):
                        raise output
                    self.states[own] = True
                    self.log.append(("output", request_id))
                    yield output
        finally:
            del self.states[own]


def completion(index: int = 0, **changes: Any) -> SimpleNamespace:
    """vLLM's CompletionOutput, of which nothing was asked."""
    made: dict[str, Any] = {
        "index": index,
        "text": "",
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": [],
        "logprobs": None,
        "probes": None,
        "activations": None,
        "receipt": None,
        "capture_results": None,
        **dict.fromkeys(RESULTS),
    }
    return SimpleNamespace(**{**made, **changes})


def outputs_of(prompt: str, params: Params, request_id: str) -> list[Any]:
    """An output for each token, with what the plan asks for, as `AsyncLLM.generate` has it."""
    carried = (params.extra_args or {}).get("midstream")
    plan = carried.plan if isinstance(carried, CallPlan) else carried
    assert plan is None or isinstance(plan, Plan)
    captures = plan.captures if plan is not None else ()
    layers = tuple(index for one in captures for index in one.layers.indices)
    streams = any(one.stream for one in captures)
    probes = plan.probes if plan is not None else ()
    probes += carried.guards if isinstance(carried, CallPlan) else ()
    found = []
    for nth in range(1, TOKENS + 1):
        count, is_last = len(prompt) + nth - 1, nth == TOKENS
        each = []
        for index in range(params.n):
            made = completion(index, text=f"t{nth}")
            if probes and (params.n == 1 or is_last):
                classes = {one.name: one.classes.names for one in probes if one.classes}
                made.probes = scores([one.name for one in probes], count, classes)
            if layers and is_last:
                made.activations = rows(layers, count)
            elif streams and params.n == 1:
                made.activations = rows(layers, count, 0 if nth == 1 else count - 1)
            if plan is not None and is_last:
                captured = tuple(Captured("resid_post", each, count, count) for each in layers)
                made.receipt = Receipt(
                    request_id, len(prompt), nth, captured, None, coming_from=plan.coming_from
                )
            if is_last:
                made.finish_reason = "length"
            each.append(made)
        output = SimpleNamespace(request_id=request_id, outputs=each, finished=is_last)
        output.prompt_token_ids = list(map(ord, prompt)) if isinstance(prompt, str) else None
        found.append(output)
    return found


@dataclass
class Site:
    """An app and its engine."""

    app: FastAPI  # with vLLM's endpoints, as far as tests call them, and midstream's
    engine: FakeEngine  # behind it
    seen: list[Any] = field(default_factory=list)  # the bodies that vLLM's endpoints were given

    @property
    def server(self) -> Server:
        server: Server = self.app.state.midstream
        return server

    def client(self, address: str = "127.0.0.1", **more: Any) -> httpx.AsyncClient:
        """A client with an address."""
        transport = httpx.ASGITransport(
            self.app, raise_app_exceptions=False, client=(address, 5000)
        )
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", **more)


async def make(
    *,
    host: str | None = "127.0.0.1",
    has_key: bool = False,
    origins: Any = ("*",),
    engine: Any = None,
    events: Any = None,
    **http: Any,
) -> Site:
    """An app whose engine is there."""
    app, engine = FastAPI(), FakeEngine() if engine is None else engine
    app.state.args = Namespace(
        api_key=None,
        host=host,
        uds=None,
        allowed_origins=[*origins],
        worker_cls="auto",
        additional_config={"midstream": {"http": http or True, "events": events or {}}},
    )
    site = Site(app, engine)
    add_endpoints(site)
    endpoints = Endpoints()
    with (
        # It imports vLLM, which takes seconds.
        patch.object(plugin, "_has_key", lambda args: has_key),
        patch.object(FastAPI, "include_router", _include_router),
        patch.object(plugin.fingerprint, "install", _install),
    ):
        endpoints.attach_router(app)
    await endpoints.init_state(engine, app.state, app.state.args)
    return site


# It looks through modules of vLLM, of which a process has one.
_install = functools.cache(plugin.fingerprint.install)
_include = FastAPI.include_router
_routes: dict[int, list[Any]] = {}


def _include_router(app: FastAPI, router: APIRouter) -> None:
    """As FastAPI does, which takes a tenth of a second for all of them, once for each router: they
    are the same in every app.
    """
    before = len(app.router.routes)
    if id(router) in _routes:
        app.router.routes += _routes[id(router)]
    else:
        _include(app, router)
        _routes[id(router)] = app.router.routes[before:]


@asynccontextmanager
async def serving(
    *, stall_seconds: float | None = None, **settings: Any
) -> AsyncIterator[tuple[Site, httpx.AsyncClient]]:
    """An app, and a client of it."""
    site = await make(**settings)
    if stall_seconds is not None:
        site.server.settings = replace(site.server.settings, stall_seconds=stall_seconds)
    async with site.client() as client:
        yield site, client
    site.server.close()


async def refused(answer: Any, status: int, problem: str = "") -> dict[str, Any]:
    """The error of an answer that refuses, once it is there."""
    found = await answer
    assert found.status_code == status, found.text
    error: dict[str, Any] = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert problem in error["message"]
    return error


def scope_of(length: str | None = None) -> dict[str, Any]:
    """A request for a completion, as an ASGI server has it."""
    headers = [(b"content-type", b"application/json")]
    if length is not None:
        headers.append((b"content-length", length.encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 5000),
        "server": ("test", 80),
        "scheme": "http",
    }
