"""Sink `store`: a directory of shards, which `midstream.open_store` reads."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from midstream.errors import ExistsError, SpecError, StoreError
from midstream.plan import Plan
from midstream.results.activations import Activations
from midstream.results.media_span import spans_to_json
from midstream.results.receipt import CaptureResult, Receipt
from midstream.sinks.base import Delivery, Origin, Sink
from midstream.sinks.name_claims import NameClaims
from midstream.sites import Tap
from midstream.store import Entry, Header, TapRows, Writer
from midstream.store.backends.local import folder_of
from midstream.store.stored_activations import MEDIA, OWN
from midstream.store.stored_ids import StoredIds
from midstream.store.writer import SHARD_BYTES
from midstream.validation import show

# The file whose bytes are locked for the ids of running requests, in a local store.
LOCKS = ".names.lock"
# Fields of a receipt that the entry contains anyway.
_REDUNDANT = ("request_id", "prompt_tokens", "generated_tokens")


class StoreSink(Sink):
    """Writes a shard at each flush; if it cannot, discards its deliveries and reports errors."""

    reserved = (OWN,)

    def __init__(
        self,
        root: str,  # the store's directory, created if missing, or `s3://bucket/prefix`
        shard_bytes: int = SHARD_BYTES,  # target
        group_seconds: float = 0.05,  # a caller of `AsyncLLM` waits so long to share a shard
        prompts: bool = False,  # whether to store the prompt's text and the generated text
    ) -> None:
        if not isinstance(root, str) or not root:
            raise ValueError(f"root: expected the path of a store, got {root!r}")
        if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
            raise ValueError(f"shard_bytes: expected a number of bytes, got {shard_bytes!r}")
        if isinstance(group_seconds, bool) or not isinstance(group_seconds, int | float):
            raise ValueError(f"group_seconds: expected a number, got {group_seconds!r}")
        if not 0 <= group_seconds <= 60:
            raise ValueError(f"group_seconds: expected 0 to 60, got {group_seconds}")
        if not isinstance(prompts, bool):
            raise ValueError(f"prompts: expected `bool`, got {prompts!r}")
        self._root = root if "://" in root else os.path.abspath(os.path.expanduser(root))
        self._shard_bytes = shard_bytes
        self._prompts = prompts
        self.group_seconds = float(group_seconds)
        self._origin: Origin | None = None
        self._writers: dict[str, Writer] = {}  # by codec
        self._ids: StoredIds | None = None

    def open(self, origin: Origin) -> None:
        self._origin = origin
        self._ids = StoredIds(folder_of(self._root))
        self._writer("raw")  # raises if the store is not writable
        self.names = NameClaims(_locks_of(self._root))

    def check(self, tag: str, request_id: str) -> None:
        """Reject an id that the store has already, from whichever client, process or run it is."""
        if not request_id:
            return
        assert self._ids is not None, "the sink is not open"
        try:
            is_stored = self._ids.has(request_id)
        except StoreError as error:
            raise SpecError(
                "request_id", f"cannot be compared with the ids of the store: {error}; omit it"
            ) from None
        if is_stored:
            raise ExistsError(
                "request_id", f"{self._root} has {show(request_id)} already; use another id"
            )

    def name_of(self, tag: str, request_id: str) -> str:
        return request_id  # by which `get` finds rows, whatever their tag

    def write(self, delivery: Delivery) -> CaptureResult:
        if OWN in delivery.metadata:
            raise ValueError(f"metadata: the key {OWN!r} is reserved; use another")
        rows = delivery.activations
        self._writer(rows.codec.spec).add(
            Entry(
                request=delivery.name,
                child=delivery.completion,
                tag=delivery.tag,
                prompt_tokens=delivery.prompt_tokens,
                metadata={**delivery.metadata, OWN: self._known(delivery)},
                taps=_taps(rows),
            )
        )
        place = {"request": delivery.name, "child": delivery.completion, "tag": delivery.tag}
        return CaptureResult(paths=(self._root,), manifest={"store": self._root, **place})

    def flush(self) -> None:
        try:
            for writer in self._writers.values():
                writer.flush()
        except StoreError:
            # Buffered entries would grow while the disk is full, and might be written later
            # although their callers got an error.
            self._writers.clear()
            raise

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        super().close()

    def _writer(self, codec: str) -> Writer:
        origin, ids = self._origin, self._ids
        assert origin is not None
        assert ids is not None
        if codec not in self._writers:
            header = Header(
                model=origin.model,
                revision=origin.revision,
                hidden_size=origin.hidden_size,
                widths=tuple(origin.widths.items()),
                dtype=origin.dtype,
                codec=codec,
                vllm=origin.vllm,
                midstream=origin.midstream,
            )
            self._writers[codec] = Writer(self._root, header, self._shard_bytes, ids.add)
        return self._writers[codec]

    def _known(self, delivery: Delivery) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "request_id": delivery.request_id,
            "completions": delivery.completions,
            "generated_tokens": len(delivery.generated_token_ids),
            "finish_reason": delivery.finish_reason,
            "receipt": brief(delivery.receipt),
        }
        if delivery.activations.positions_of_media:
            metadata[MEDIA] = spans_to_json(delivery.activations.positions_of_media)
        if delivery.plan is not None:
            metadata["plan"] = outline(delivery.plan)
        if self._prompts:
            metadata["prompt"] = delivery.prompt
            metadata["text"] = delivery.text
        return metadata


def _locks_of(root: str) -> str:
    """Return the file to lock for ids; for an object store, one of this machine and user."""
    if "://" not in root:
        return os.path.join(root, LOCKS)
    digest = hashlib.sha256(root.encode()).hexdigest()[:32]
    return os.path.join(tempfile.gettempdir(), f"midstream-{os.getuid()}-{digest}.lock")


def _taps(rows: Activations) -> dict[Tap, TapRows]:
    """Return rows by (site, layer); taps with the same positions share their index tensors."""
    tokens: dict[int, Tensor] = {}
    by_tap = {}
    for tap in rows:
        positions = rows.positions_of(*tap)
        if id(positions) not in tokens:
            tokens[id(positions)] = rows.token_ids_of(*tap)
        by_tap[tap] = TapRows(rows.encoded(*tap), positions, tokens[id(positions)])
    return by_tap


@functools.lru_cache(maxsize=64)
def outline(plan: Plan) -> Any:
    """Return a plan's JSON form with SHA-256 digests in place of its vectors' numbers."""
    return _without_numbers(plan.to_dict())


def brief(receipt: Receipt) -> dict[str, Any]:
    """Return a receipt's short JSON form: layers of equal counts in ranges, no empty fields."""
    layers: dict[tuple[str, int, int], list[int]] = {}
    for tap in receipt.captured:
        layers.setdefault((tap.site, tap.expected, tap.actual), []).append(tap.layer)
    captured = [
        {"site": site, "layers": _ranges(which), "expected": expected, "actual": actual}
        for (site, expected, actual), which in layers.items()
    ]
    plain = dataclasses.replace(receipt, captured=()).to_dict() | {"captured": captured}
    return {name: value for name, value in plain.items() if value and name not in _REDUNDANT}


def _ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return [start, stop) of each run of consecutive numbers."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        fields = {name: _without_numbers(part) for name, part in value.items()}
        if isinstance(value.get("f32"), str):
            del fields["f32"]
            fields["sha256"] = hashlib.sha256(base64.b64decode(value["f32"])).hexdigest()
        return fields
    return [_without_numbers(part) for part in value] if isinstance(value, list) else value
