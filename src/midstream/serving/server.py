"""One server: its engine, its limits, and what it holds."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from starlette.datastructures import Headers
from starlette.types import Scope

from midstream.config import KEY
from midstream.errors import SpecError
from midstream.runtime.chat import ChatPlan
from midstream.runtime.own_sinks import origin_of
from midstream.serving import events, metrics
from midstream.serving.answers import Answers
from midstream.serving.exchange import CURRENT, Exchange
from midstream.serving.held import Holding
from midstream.serving.refusals import Refusal
from midstream.serving.settings import HttpSettings
from midstream.serving.wishes import Wishes
from midstream.steering import TIERS, SteeringState
from midstream.version import __version__

# vLLM's endpoints whose answers can carry results.
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
# Of a chat's body, what its template gets.
_TEMPLATE = ("chat_template", "chat_template_kwargs", "add_generation_prompt",
             "continue_final_message", "tools")  # fmt: skip


class Server:
    """What middleware and routes share."""

    def __init__(self, settings: HttpSettings, *, admin: bool, has_key: bool) -> None:
        """Args:
        settings: its limits.
        admin: whether anybody may change vectors and steering.
        has_key: whether requests come here only with a key of the server's.
        """
        self.settings = settings
        self._has_key = has_key
        self.metrics = metrics.of_process()
        self._admin = admin
        self.holding = Holding(settings)
        self.started = time.time()
        self._llm: Any = None
        self._answers: Answers | None = None
        self._template: dict[str, Any] = {}

    async def start(self, llm: Any, template: Mapping[str, Any]) -> None:
        """The engine is there.

        Args:
            llm: a midstream.AsyncLLM.
            template: what the server's own settings give to chat templates.
        """
        await llm.ready()
        info = llm.info
        dtype: torch.dtype = getattr(torch, info.dtype)
        self._answers = Answers(self.settings, self.holding, info.shape.hidden_size, dtype)
        self._template = {name: value for name, value in template.items() if value is not None}
        self._llm = llm
        events.show()
        events.note("ready", version=__version__, taps=len(info.shape.taps))
        # An attribute of this one engine: calls that an exchange makes carry its plan.
        generate = llm.generate
        llm.generate = lambda *args, **named: self._generate(generate, *args, **named)

    @property
    def llm(self) -> Any:
        """The engine.

        Raises:
            Refusal: 503, it is not there yet.
        """
        if self._llm is None:
            raise Refusal(503, "the engine is not there yet")
        return self._llm

    @property
    def answers(self) -> Answers:
        """Makes what answers say."""
        assert self._answers is not None, "there is an engine wherever there is an exchange"
        return self._answers

    def client_of(self, scope: Scope) -> str:
        """Whose a request is: who has its key or, on a server without keys, one address."""
        if self._has_key:
            # The word before the key may be written in several ways.
            _, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            return hashlib.sha256(key.encode()).hexdigest()[:16]
        client = scope.get("client")
        return client[0] if client else ""

    def begin(self, scope: Scope, body: Mapping[str, Any], wishes: Wishes) -> Exchange:
        """A request that asks for something.

        Raises:
            Refusal: 503; or there is no room to hold what it captures.
        """
        _ = self.llm  # refuses while there is none
        client = self.client_of(scope)
        plan = wishes.plan
        if plan is not None and plan.captures and wishes.activations == "handle":
            self.holding.check(client)
        exchange = Exchange(wishes, client)
        messages = body.get("messages")
        if messages is not None:
            exchange.template = {
                **self._template,
                **{name: body[name] for name in _TEMPLATE if body.get(name) is not None},
            }
            exchange.messages = messages
        return exchange

    async def state(self) -> dict[str, Any]:
        """What it is, what is in use, and what it came to so far, as JSON values.

        Raises:
            Refusal: 503, the engine is not there yet.
        """
        llm = self.llm
        info = llm.info
        return {
            **asdict(origin_of(llm.vllm_config, info)),
            "codec": info.codec,
            "taps": len(info.shape.taps),
            "runner": info.workers[0]["runner"],
            "uptime_seconds": time.time() - self.started,
            "admin": self._admin,
            "steering": {"epoch": llm.steering.epoch, "digest": llm.steering.digest},
            "vectors": len(llm.vectors),
            "held": {"captures": len(self.holding), "bytes": self.holding.nbytes},
            "limits": asdict(self.settings),
            **await llm.usage(),
        }

    async def refresh_metrics(self) -> None:
        """Brings the metrics up to date, if the engine is there."""
        if self._llm is not None and not self._llm.errored:
            await self.metrics.refresh(self.state)

    def refused(self, scope: Scope, status: int, param: str | None) -> None:
        """Takes note of a request that was refused."""
        self.metrics.refused(status)
        events.note(
            "request.refused",
            status=status,
            method=scope["method"],
            path=scope["path"],
            client=self.client_of(scope),
            param=param,
        )

    def steered(self, state: SteeringState) -> None:
        """Takes note of what a change of server-wide steering has put in force."""
        edits = {tier: len(getattr(state, tier)) for tier in TIERS}
        events.note("steering.changed", epoch=state.epoch, digest=state.digest, **edits)

    def close(self) -> None:
        """Lets go of all that is held for clients. The engine closes its sinks itself."""
        events.note("closing", held_captures=len(self.holding))
        self.holding.close()

    def _generate(
        self, generate: Any, prompt: Any, params: Any, request_id: str, **named: Any
    ) -> AsyncGenerator[Any, None]:
        exchange = CURRENT.get()
        if exchange is None:
            if KEY in (getattr(params, "extra_args", None) or {}):
                raise SpecError(
                    f"extra_args.{KEY}",
                    f"this endpoint cannot answer with results; use {', '.join(PATHS)}, and the "
                    f"body's field {KEY}",
                )
            stream: AsyncGenerator[Any, None] = generate(prompt, params, request_id, **named)
            return stream
        plan = exchange.wishes.plan
        if plan is not None:
            carried: Any = plan
            if exchange.messages is not None:
                carried = ChatPlan(plan, exchange.messages, exchange.template)
            params = params.clone()
            params.extra_args = {**(params.extra_args or {}), KEY: carried}
        return exchange.note(generate(prompt, params, request_id, **named), params.n)
