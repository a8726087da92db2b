"""What one call of `AsyncLLM.generate` asks for, on its way through vLLM and back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midstream.runtime.frontend.admitted import AdmittedRequest
    from midstream.runtime.frontend.input_session import InputSession
    from midstream.runtime.frontend.request.prompt.chat import ChatPlan
    from midstream.runtime.frontend.results.partial_rows import PartialRows
    from midstream.runtime.frontend.results.partial_scores import StreamState
    from midstream.runtime.frontend.rpc.replicas import Replica
    from midstream.runtime.frontend.tracing import HeldSpan
    from midstream.spec import Plan


@dataclass(eq=False, slots=True)
class GenerateCall:
    """One call. It rides in the sampling parameters up to the front door.

    Attributes:
        plan: what is asked for; None: nothing but what is for all requests.
        asked: what the front door made of it; None before that, and where it comes to nothing.
        is_delta: whether each output has only the tokens since the one before.
        ids: the ids by which the engine knows its requests: several with n > 1.
        replica: the engine that its requests are on; None: none has been sent yet.
        deliveries: its requests that waited for room and are being sent.
        streamed: what is known so far, once there was an output.
        settled: whether the workers hold nothing of it any more.
        is_over: whether its caller has left, which may be before the front door has looked at it.
        failure: why it could not be sent.
        session: of streaming input; None: an ordinary prompt.
        pieces: its rows that come before its end; None: none are to.
        passing: held while some of them are fetched and passed on.
        spans: of its requests, in vLLM's tracing, until the receipts are there.
    """

    plan: Plan | ChatPlan | None
    asked: AdmittedRequest | None = None
    is_delta: bool = False
    ids: list[str] = field(default_factory=list)
    replica: Replica | None = None
    deliveries: list[asyncio.Task[None]] = field(default_factory=list)
    streamed: StreamState | None = None
    settled: bool = False
    is_over: bool = False
    failure: BaseException | None = None
    session: InputSession | None = None
    pieces: PartialRows | None = None
    passing: asyncio.Lock = field(default_factory=asyncio.Lock)
    spans: list[HeldSpan] = field(default_factory=list)

    def __deepcopy__(self, _memo: dict[int, object]) -> GenerateCall:
        # vLLM copies a request's parameters; whoever made the order waits for what is put on it.
        return self
