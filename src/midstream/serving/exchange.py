"""One HTTP request that asks for something: its plan on the way in, its results on the way out.

The request's handler, whichever of vLLM's it is, runs in the context of whoever called it; there
the engine finds the exchange that its calls belong to.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import AsyncGeneratorType
from typing import Any

from midstream.errors import SpecError
from midstream.serving.held import Holding
from midstream.serving.wishes import Wishes

CURRENT: ContextVar[Exchange | None] = ContextVar("midstream_exchange", default=None)


@dataclass(slots=True)
class News:
    """What has come of one choice since it was last told.

    Attributes:
        probes: scores by name, the latest; all that are known.
        rows: rows that came on the way, each new since the one before.
        final: vLLM's CompletionOutput, once the choice has ended.
        request_id: vLLM's.
    """

    probes: Any = None
    rows: list[Any] = field(default_factory=list)
    final: Any = None
    request_id: str = ""


@dataclass(eq=False, slots=True)
class Exchange:
    """One HTTP request.

    Attributes:
        wishes: what it asks for.
        client: whose it is.
        messages, template: of a chat, its messages and what its template gets.
        calls: how many calls of the engine it has made.
        per_call: how many choices each of them has.
        news: by choice, what it has not been told yet.
        told: by choice and probe, how many scores it has been told.
        streams: outputs of its calls, which are closed with it.
        untold: ids of rows that are held, of which the client knows nothing yet.
        wrong: the field that the engine has refused; empty: none.
    """

    wishes: Wishes
    client: str
    messages: Any = None
    template: dict[str, Any] = field(default_factory=dict)
    calls: int = 0
    per_call: int = 1
    news: dict[int, News] = field(default_factory=dict)
    told: dict[tuple[int, str], int] = field(default_factory=dict)
    streams: list[AsyncGeneratorType[Any, None]] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)
    wrong: str = ""

    def note(self, stream: AsyncGenerator[Any, None], per_call: int) -> AsyncGenerator[Any, None]:
        """A call's outputs, of which note is taken on their way.

        Args:
            stream: the engine's.
            per_call: how many choices the call has.
        """
        first = self.calls * per_call
        self.calls += 1
        self.per_call = per_call
        noted = self._noted(stream, first)
        assert isinstance(noted, AsyncGeneratorType)
        self.streams.append(noted)
        return noted

    @property
    def is_single(self) -> bool:
        """Whether the answer has one choice only."""
        return self.calls * self.per_call == 1

    def take(self) -> dict[int, News]:
        """What is new, which counts as told from now on."""
        found, self.news = self.news, {}
        return found

    async def close(self, holding: Holding) -> None:
        """The answer is over: of a client that has left, its calls end, and what is untold goes.

        Args:
            holding: has what is untold.
        """
        for stream in self.streams:
            # A response that was cancelled while it sent may keep it for long.
            if not stream.ag_running:
                await stream.aclose()
        while self.untold:
            holding.delete(self.untold.pop())

    async def _noted(
        self, stream: AsyncGenerator[Any, None], first: int
    ) -> AsyncGenerator[Any, None]:
        try:
            async for output in stream:
                for completion in output.outputs:
                    self._see(first + completion.index, output, completion)
                yield output
        except SpecError as error:
            explained = self.wishes.explain(error)
            self.wrong = explained.path
            raise explained from None
        finally:
            await stream.aclose()

    def _see(self, choice: int, output: Any, completion: Any) -> None:
        news = self.news.setdefault(choice, News())
        news.request_id = output.request_id
        if completion.probes is not None:
            news.probes = completion.probes
        if completion.receipt is not None:
            news.final = completion
        elif completion.activations is not None:
            news.rows.append(completion.activations)
