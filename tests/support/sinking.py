"""Made-up deliveries to sinks, and sinks that record their calls."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from midstream.plan import Capture, Plan
from midstream.results.activations import Activations
from midstream.results.receipt import Captured, CaptureResult, Receipt
from midstream.sinks import Delivery, Origin, Sink
from midstream.sinks.queue import SinkQueue

WIDTH = 8
ORIGIN = Origin("a/model", "main", 4, WIDTH, "float32", "0.32.0", "0.1.0")
# An engine with a tap that is not as wide as its residual stream.
WIDE = ("attn_out", 1)
WIDE_ORIGIN = replace(ORIGIN, widths={WIDE: 12})
RECEIPT = Receipt("7", 3, 2, (Captured("resid_post", 1, 2, 2),), None)


def activations(
    taps: Sequence[tuple[str, int]] = (("resid_post", 1),),
    positions: Sequence[int] = (0, 2),
    dtype: torch.dtype = torch.float32,
    origin: Origin = ORIGIN,
) -> Activations:
    """Row p of layer l at a site is l + p + i/8 in place i, plus the length of the site's name."""
    at = torch.tensor(positions, dtype=torch.int64)
    values = {}
    for site, layer in taps:
        steps = torch.arange(origin.width((site, layer))) / 8
        values[site, layer] = (at[:, None] + steps + layer + len(site)).to(dtype)
    return Activations(values, dict.fromkeys(values, at), torch.arange(100, 104))


def put_now(queue: SinkQueue, one: Delivery, size: int) -> CaptureResult:
    """Queue a delivery, and return its result without waiting for others, as `LLM` does."""
    result = queue.put(one, size)
    queue.drain()
    return result.result(10)


def delivery(name: str = "r", **changes: Any) -> Delivery:
    """A completion of three prompt tokens and two generated ones, with two rows of one tap."""
    made = Delivery(
        name=name,
        tag="",
        metadata={},
        request_id="7",
        completion=0,
        completions=1,
        prompt="abc",
        prompt_token_ids=(100, 101, 102),
        prompt_tokens=3,
        text="de",
        generated_token_ids=(103, 104),
        finish_reason="length",
        plan=Plan((Capture(1, sink="store"),)),
        receipt=RECEIPT,
        activations=activations(),
    )
    return replace(made, **changes)


class Noting(Sink):
    """Notes what is called; can be made to wait and to fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self.fails: set[str] = set()
        self.threads: set[str] = set()
        self.results: Sequence[CaptureResult] | None = None

    def write(self, delivery: Delivery) -> CaptureResult | None:
        assert self.go.wait(30)
        self._note(f"write {delivery.name}")
        return CaptureResult(paths=(delivery.name,))

    def flush(self) -> Sequence[CaptureResult] | None:
        self._note("flush")
        return self.results

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        self.calls.append(what)
        self.threads.add(threading.current_thread().name)
        if what in self.fails:
            raise OSError(f"no {what}")


class Keeping(Noting):
    """Keeps what it is given, too."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Delivery] = []

    def write(self, delivery: Delivery) -> CaptureResult | None:
        self.given.append(delivery)
        return super().write(delivery)


class AsTheyCome(Keeping):
    """Wants rows while requests run, as often as can be."""

    wants = "rows"
    piece_seconds = 0.0

    def whole(self, request_id: str, completion: int = 0) -> tuple[dict[Any, Any], list[Delivery]]:
        """What came of one completion: per tap its encoded rows, positions and token ids put
        together; and the deliveries, of which the last is the last.
        """
        mine = [
            one
            for one in self.given
            if (one.request_id, one.completion) == (request_id, completion)
        ]
        assert [one.piece for one in mine] == list(range(len(mine)))
        assert [one.is_last for one in mine] == [False] * (len(mine) - 1) + [True]
        rows = {
            tap: tuple(
                torch.cat([part(one.activations) for one in mine])
                for part in (
                    lambda got, tap=tap: got.encoded(*tap),
                    lambda got, tap=tap: got.positions_of(*tap),
                    lambda got, tap=tap: got.token_ids_of(*tap),
                )
            )
            for tap in mine[-1].activations
        }
        return rows, mine


class Failing(Sink):
    """Cannot write what is tagged `write`, nor flush what is tagged `flush`."""

    def __init__(self) -> None:
        self._tags: set[str] = set()

    def write(self, delivery: Delivery) -> None:
        self._tags.add(delivery.tag)
        if delivery.tag == "write":
            raise OSError(28, "No space left on device")

    def flush(self) -> None:
        tags, self._tags = self._tags, set()
        if "flush" in tags:
            raise RuntimeError("the disk is gone")
