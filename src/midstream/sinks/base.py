"""Sink interface and the deliveries that sinks receive, in threads of the caller's process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from midstream.plan import Plan
from midstream.results.activations import Activations
from midstream.results.receipt import CaptureResult, Receipt
from midstream.sinks.name_claims import NameClaims
from midstream.sites import Tap

if TYPE_CHECKING:
    from midstream.results.readouts.attention import AttentionResults

Wants = Literal["rows", "requests"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of rows; the same for all deliveries of an engine.

    Attributes:
        model, revision: as passed to the engine; revision may be empty.
        num_layers, hidden_size: of the model.
        dtype: name of the model's dtype, for example "bfloat16".
        vllm, midstream: versions.
        tensor_parallel_size: of the engine.
        widths: the taps whose vectors are not as wide as `hidden_size`, each with its width.
    """

    model: str
    revision: str
    num_layers: int
    hidden_size: int
    dtype: str
    vllm: str
    midstream: str
    tensor_parallel_size: int = 1
    widths: Mapping[Tap, int] = field(default_factory=dict)

    def width(self, tap: Tap) -> int:
        """Return the width of a tap's vectors before encoding."""
        return self.widths.get(tap, self.hidden_size)


@dataclass(frozen=True, slots=True)
class Delivery:
    """Captured rows of one completion, with the request's context.

    Attributes:
        name: name under which to store the rows: the `request_id` of the capture or, without one,
            the request's id with a unique suffix. Valid as a file name.
        tag: tag of the capture; may be empty. Valid as a folder name.
        metadata: metadata of the capture, JSON values.
        request_id: vLLM's id of the request.
        completion: index of the completion, from 0.
        completions: number of completions of the request.
        prompt: text of the prompt; None if the prompt was tokens or embeddings.
        prompt_token_ids: None if the prompt was embeddings.
        prompt_tokens: number of prompt tokens.
        text: generated text; empty without a tokenizer, and while the request runs.
        generated_token_ids: the tokens known so far. The last one was not computed on yet, and
            after the last piece never will be, so it has no row.
        finish_reason: vLLM's, for example "stop" or "length"; None while the request runs.
        plan: the request's own plan; None for captures that sinks apply to every request.
        receipt: receipt of the completion. While the request runs it only has the number of rows
            delivered per site and layer, including this piece, as `expected` and as `actual`.
        activations: the rows; for a sink with `wants = "rows"` those of this piece. A site and
            layer without rows is present and empty. [rows, width] at every site: the heads of q,
            k, v, rot_q, rot_k and z are one after the other.
        piece: index of the piece, from 0, for a sink with `wants = "rows"`.
        is_last: whether this is the last piece; its receipt covers the whole completion.
        return_: "sharded" or "gathered", as the captures have it; see `Capture`.
        ranks: per tap with rows, the tensor-parallel ranks that transferred them; empty before
            the last piece.
        layout: layout that the captures name; empty: the sink's own choice.
        readouts: results of the read-outs that the sink keeps, by their kind: "attention" is an
            `AttentionResults`, "norms" a `NormResults`. A kind that was not asked for is missing.
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
    return_: str = "gathered"
    ranks: Mapping[Tap, tuple[int, ...]] = field(default_factory=dict)
    layout: str = ""
    readouts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def attention(self) -> AttentionResults | None:
        """Attention weights; None: none were asked for."""
        return self.readouts.get("attention")


class Sink(ABC):
    """Destination for captured rows. The constructor's keyword arguments are the sink's settings.

    The constructor only checks the settings and may be called several times. ValueError and
    TypeError of it are reported as a ConfigError that names the sink. For a sink in use, `open` is
    called first and `close` last. All methods except the constructor, `open` and `check` are called
    from one thread.

    Attributes:
        wants: "requests": one delivery per completion, after its end. "rows": pieces while the
            completion runs. Pieces of a completion arrive in order, contain each row once, and the
            last one has `is_last`. A completion that failed or was aborted also ends with such a
            piece; it has no rows, the finish reason "abort" and a receipt with the problem. A short
            completion is a single piece. A completion that is aborted before its first piece is not
            delivered. Pieces of several completions are interleaved.
        layouts: layouts that a capture may name; empty: none.
        reserved: keys that a capture's metadata must not have, as the sink stores its own data
            under them.
        keeps: kinds of read-outs that the sink stores besides captured rows, as "attention" and
            "norms"; only with "requests". An `Attention` or a `Norms` for another is rejected.
        group_seconds: how long a write may wait to be flushed together with others, in seconds, if
            a caller waits for it.
        piece_seconds: with "rows", the interval after which rows of a running completion are
            collected, in seconds.
        piece_bytes: with "rows", the size in bytes at which they are collected earlier. The
            computed part of a prompt is known only with the first generated token.
        wait_seconds: how long a write may wait for a reader, besides the time of a call.
        names: the names that running requests have taken; set by `open`. None: requests may give
            their rows the same name.
    """

    wants: ClassVar[Wants] = "requests"
    layouts: ClassVar[tuple[str, ...]] = ()
    reserved: ClassVar[tuple[str, ...]] = ()
    keeps: ClassVar[tuple[str, ...]] = ()
    group_seconds: float = 0.0
    piece_seconds: float = 1.0
    piece_bytes: int = 16 << 20
    wait_seconds: float = 0.0
    names: NameClaims | None = None

    def open(self, origin: Origin) -> None:
        """Open the sink. Called once, before other methods; an exception aborts engine start."""
        return

    def name_of(self, tag: str, request_id: str) -> str:
        """Return what no two requests may have in common, of a caller's tag and id."""
        return f"{tag}/{request_id}"

    def check(self, tag: str, request_id: str) -> None:
        """Check whether rows can be stored under a caller's tag and id; both may be empty.

        Called during request validation, in a thread of its own, for at most a few seconds: it must
        be quick.

        Raises:
            SpecError: they cannot; the path is "tag" or "request_id".
        """
        return

    @abstractmethod
    def write(self, delivery: Delivery) -> CaptureResult | None:
        """Write a delivery.

        Returns:
            The result, which the caller gets after `flush`; None for success.

        Raises:
            Exception: any kind; it is reported in the receipt of this request only.
        """

    def flush(self) -> Sequence[CaptureResult] | None:
        """Make all writes durable. Callers get their results only afterwards.

        Returns:
            The results of the writes since the last flush that did not raise, in order; None to
            use the results of `write`.

        Raises:
            Exception: any kind; it becomes the result of all of these writes.
        """
        return None

    def close(self) -> None:
        """Close the sink. Called once, after the last flush."""
        if self.names is not None:
            self.names.close()
