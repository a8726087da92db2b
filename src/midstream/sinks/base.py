"""What a sink is, and what it is given.

A sink keeps captured rows. It lives in the process of the caller, in a thread of its own, where it
may be slow and may fail without the engine noticing more than that its rows wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from midstream.results.activations import Activations
from midstream.results.receipt import CaptureResult, Receipt
from midstream.spec import Plan

Wants = Literal["rows", "requests"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where rows come from: the same for all that an engine gives its sinks.

    Attributes:
        model, revision: as the engine was given them; revision may be empty.
        num_layers, hidden_size: of the model.
        dtype: name of the model's dtype, as "bfloat16".
        vllm, midstream: versions.
        tensor_parallel_size: of the engine.
    """

    model: str
    revision: str
    num_layers: int
    hidden_size: int
    dtype: str
    vllm: str
    midstream: str
    tensor_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class Delivery:
    """Captured rows of one completion, and whose they are.

    Attributes:
        name: under which to keep them: the `request_id` of the capture; or, where there is none,
            the request's id and something that no other request has. A file may be called so.
        tag: of the capture; may be empty. A folder may be called so.
        metadata: JSON values, of the capture.
        request_id: vLLM's id of the request.
        completion: which of the request's completions, from 0.
        completions: how many it has.
        prompt: its text; None where the prompt was given as tokens or embeddings.
        prompt_token_ids: None where it was given as embeddings.
        prompt_tokens: how many there are.
        text: what was generated; empty without a tokenizer, and while the request runs.
        generated_token_ids: as far as they are known; the last of them was not computed on, and
            with the last piece never will be, so it has no row.
        finish_reason: vLLM's, as "stop" or "length"; None while the request runs.
        plan: what the request asked for itself; None: these are captures of every request.
        receipt: what was done for the completion. While the request runs it says how many rows have
            come of each site and layer, up to and with this piece (as `expected` and as `actual`),
            and nothing else.
        activations: the rows; of a sink that wants them as they come, those of this piece. A site
            and layer of which it has none is there with no rows.
        piece: of a sink that wants rows as they come, the how manieth piece, from 0.
        is_last: whether no other piece follows; the receipt is that of the whole then.
    """

    name: str
    tag: str
    metadata: Mapping[str, object]
    request_id: str
    completion: int
    completions: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    prompt_tokens: int
    text: str
    generated_token_ids: tuple[int, ...]
    finish_reason: str | None
    plan: Plan | None
    receipt: Receipt
    activations: Activations = field(repr=False)
    piece: int = 0
    is_last: bool = True


class Sink(ABC):
    """Keeps captured rows. What its constructor takes by name are its settings.

    The constructor only checks its settings, and may be called several times; it raises ValueError
    or TypeError for what is wrong, which comes out as a ConfigError that names the sink. Of one
    that is used, `open` is called first and `close` last. All methods but the constructor, `open`
    and `check` are called from one thread.

    Attributes:
        wants: "requests": each completion's rows in one delivery, once it has ended. "rows": in
            pieces, as they come. Of one completion they come in order, each row once, and the last
            says so: it ends those before it, also where the completion failed or was aborted, in
            which case it has no rows, the finish reason "abort" and a receipt that says so. What is
            short comes in one piece, which is the last, and what is aborted before its first piece
            does not come at all. Pieces of several completions come mixed.
        group_seconds: how long a write may wait for others to be flushed with it, where a caller
            waits for it.
        piece_seconds: with "rows", after how long a running completion's rows are sent for.
        piece_bytes: with "rows", at how many bytes of them that is, if it comes first. How much of
            a prompt has been computed is known only with the first token.
    """

    wants: ClassVar[Wants] = "requests"
    group_seconds: float = 0.0
    piece_seconds: float = 1.0
    piece_bytes: int = 16 << 20

    def open(self, origin: Origin) -> None:
        """Called once, before anything else; what it raises keeps the engine from starting."""
        return

    def check(self, tag: str, request_id: str) -> None:
        """Whether rows can be kept under a tag and id that a caller gave; both may be empty.

        Called at the front door, on the thread that steps the engine: it must be quick.

        Raises:
            SpecError: they cannot; the path is "tag" or "request_id".
        """
        return

    @abstractmethod
    def write(self, delivery: Delivery) -> CaptureResult | None:
        """Takes a delivery.

        Returns:
            What became of it; None: all is well. It is told to the caller after `flush`.

        Raises:
            Exception: of any kind; the request's receipt says so, and nobody else's.
        """

    def flush(self) -> Sequence[CaptureResult] | None:
        """Makes durable what was written. Only then are callers told that it is kept.

        Returns:
            For each write since the last flush that did not raise, in order, what became of it;
            None: what `write` said.

        Raises:
            Exception: of any kind; it is taken for the result of all of those writes.
        """
        return None

    def close(self) -> None:
        """Called once, after the last flush."""
        return
