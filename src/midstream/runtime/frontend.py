"""The front door of one engine: plans are checked there, and results join the outputs there."""

from __future__ import annotations

import copy
import hashlib
import json
import uuid
from collections.abc import Callable, Container
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from midstream.config import KEY
from midstream.errors import SpecError, UnsupportedError
from midstream.receipt import Receipt
from midstream.runtime.admission import Admission
from midstream.runtime.asking import Asking
from midstream.runtime.assembly import ATTRIBUTES, assemble
from midstream.runtime.budget import Budget, Need
from midstream.runtime.buffers import Room
from midstream.runtime.carried import Carried, carried
from midstream.runtime.worker import RPC
from midstream.spec import ModelShape, ResolvedPlan
from midstream.steering import Steering
from midstream.vectors import VectorRegistry

# Finished requests are fetched together: at most so many, or so many bytes, at a time.
_BATCH_REQUESTS = 64
_BATCH_BYTES = 64 << 20
_READ_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """A request under way that asks for something."""

    uid: str
    plan: ResolvedPlan


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the workers of one engine said of themselves.

    Attributes:
        shape: for resolving plans.
        dtype: name of the model's dtype, in which rows come.
        room: how much the running requests can hold together.
        workers: each worker's own description.
    """

    shape: ModelShape
    dtype: str
    room: Room
    workers: tuple[dict[str, Any], ...]


class FrontEnd:
    """One engine's front door; lives as long as its `LLMEngine`."""

    def __init__(self, engine: Any) -> None:
        self._rpc: Callable[..., list[dict[str, Any]]] = engine.collective_rpc
        self._has_unfinished: Callable[[], bool] = engine.has_unfinished_requests
        self.info = _describe(self._call("describe"))
        self.vectors = VectorRegistry(self.info.shape)
        self.steering = Steering(self.vectors)
        self._asking = Asking(self.info, engine)
        self._admission = Admission(Budget(self.info.room))
        self._under_way: dict[str, Asked] = {}
        self._needs: dict[str, Need] = {}
        self._finished: list[tuple[Asked, Any]] = []
        self._finished_bytes = 0
        self._problems: list[Receipt] = []

    def steers(self, params: Any) -> bool:
        """Whether server-wide edits apply to a request: to all that generate."""
        return hasattr(params, "output_kind") and bool(self.steering.plan_edits())

    def admit(self, request: Any, asked_for: Any) -> None:
        """Checks a processed request's plan and lets it ride; the caller's params stay as they are.

        Args:
            request: vLLM's EngineCoreRequest, whose sampling params are its own copy.
            asked_for: a Plan, a ChatPlan, or None; the server-wide edits come before its own.

        Raises:
            SpecError: the request cannot be served as asked.
        """
        resolved, need, packed = self._asking.resolve(
            asked_for, self.steering.plan_edits(), self.vectors.lookup, request
        )
        if not (resolved.edits or resolved.captures or resolved.probes):
            return
        if getattr(request, "resumable", False):
            raise SpecError("", "streaming input sessions cannot be captured or edited yet")
        if request.request_id in self._under_way:
            raise SpecError(
                "", f"a request with the id {request.request_id!r} is under way; use another id"
            )
        params = copy.copy(request.sampling_params)
        kind = params.output_kind.name
        if kind == "DELTA" or (params.n > 1 and kind != "FINAL_ONLY"):
            raise SpecError(
                "",
                f"results come with the whole of a request's output, and output_kind={kind} with "
                f"n={params.n} never shows it; use FINAL_ONLY",
            )
        asked = Asked(uuid.uuid4().hex, resolved)
        params.extra_args = {**(params.extra_args or {}), KEY: Carried(asked.uid, packed).pack()}
        if resolved.captures_prompt or resolved.edits:
            # What the cache serves is not computed: there would be nothing to read, and nothing
            # to show that the KV there was made under these edits.
            params.skip_reading_prefix_cache = True
        if resolved.edits:
            request.cache_salt = _salt(request.cache_salt, resolved)
        request.sampling_params = params
        self._under_way[request.request_id] = asked
        self._needs[asked.uid] = need

    def send(self, request: Any, deliver: Callable[[Any], object]) -> None:
        """Hands a request to the engine, when there is room for what it asks for.

        Args:
            request: vLLM's EngineCoreRequest, as the engine's client is given it.
            deliver: the client's own way of sending it.
        """
        riding = carried(request.sampling_params)
        if riding is None:
            deliver(request)
            return
        # With n > 1 the children carry their parent's uid, and it is by that that they share.
        need = self._needs.get(riding.uid)
        if need is None:
            raise SpecError("", f"request {request.request_id!r} is not under way any more")
        self._admission.submit(riding.uid, need, lambda: deliver(request))

    def after_step(self, outputs: list[Any]) -> list[Any]:
        """The outputs of one engine step; results of finished requests are put on them.

        What finished a moment ago may get its results a few steps later, in one fetch with
        others, but never later than the engine's last step.

        Raises:
            ReceiptError: what was done for a request is not what it asked for. Raised once the
                engine is idle, when every output has its results.
        """
        ended: list[str] = []
        for output in outputs:
            completions = output.outputs if isinstance(output.outputs, list) else []
            for holder in (output, *completions):
                for name in ATTRIBUTES:
                    setattr(holder, name, None)
            if output.finished and output.request_id in self._under_way:
                asked = self._under_way.pop(output.request_id)
                self._keep(asked, output)
                ended.append(asked.uid)
        self._leave(ended)
        idle = not self._has_unfinished()
        full = len(self._finished) >= _BATCH_REQUESTS or self._finished_bytes >= _BATCH_BYTES
        if self._finished and (idle or full):
            self.fetch()
        if idle:
            self.let_go()
            problems, self._problems = self._problems, []
            for receipt in problems:
                receipt.check()
        return outputs

    def fetch(self) -> None:
        """Fetches the results of all finished requests."""
        finished, self._finished = self._finished, []
        self._finished_bytes = 0
        for start in range(0, len(finished), _BATCH_REQUESTS):
            batch = finished[start : start + _BATCH_REQUESTS]
            data = self._collect([asked.uid for asked, _ in batch])
            for asked, output in batch:
                assemble(output, asked.plan, data[asked.uid], self.info.dtype)
                self._problems += [c.receipt for c in output.outputs if c.receipt.problems]

    def after_abort(self, alive: Container[str]) -> None:
        """Lets go of the requests under way whose ids are no longer among those alive."""
        self._release([name for name in self._under_way if name not in alive])

    def let_go(self) -> None:
        """Has the workers forget what was asked for by requests that ended without an output."""
        self._release(list(self._under_way))

    def drop(self, request_ids: Container[str]) -> None:
        """Lets go of some requests, results that wait to be fetched included: the call that made
        them was given up.
        """
        finished, self._finished = self._finished, []
        self._finished_bytes = 0
        for asked, output in finished:
            if output.request_id in request_ids:
                self._under_way[output.request_id] = asked
            else:
                self._keep(asked, output)
        self._problems = [p for p in self._problems if p.request_id not in request_ids]
        self._release([name for name in self._under_way if name in request_ids])

    def _keep(self, asked: Asked, output: Any) -> None:
        """A finished request's results wait to be fetched."""
        self._finished.append((asked, output))
        self._finished_bytes += self._size(asked.plan, output)

    def _release(self, names: list[str]) -> None:
        """Has the workers forget these requests under way."""
        if names:
            uids = [self._under_way.pop(name).uid for name in names]
            self._call("release", uids)
            self._leave(uids)

    def _leave(self, uids: list[str]) -> None:
        """These requests need their room no more."""
        for uid in uids:
            self._needs.pop(uid, None)
        if uids:
            self._admission.finish(uids)

    def _size(self, plan: ResolvedPlan, output: Any) -> int:
        """About how many bytes a finished request's rows take."""
        taps = sum(len(capture.taps) for capture in plan.captures)
        rows = _num_rows(output) * len(output.outputs)
        return rows * (taps * self.info.shape.hidden_size + plan.slots) * 4

    def _collect(self, uids: list[str]) -> dict[str, list[tuple[dict[str, Any], bytes]]]:
        """Per uid, (header, data) of each pipeline stage, in order; problems of every worker."""
        found: dict[str, list[tuple[dict[str, Any], bytes]]] = {uid: [] for uid in uids}
        answers = self._call("collect", uids)
        large: set[str] = set()
        for worker, answer in zip(self.info.workers, answers, strict=True):
            for header, data in zip(json.loads(answer["json"]), answer["inline"], strict=True):
                if data is None:
                    large.add(header["uid"])
                found[header["uid"]].append(({**header, "worker": worker}, data or b""))
        for uid in large:
            found[uid] = self._read(uid, found[uid])
        return found

    def _read(
        self, uid: str, entries: list[tuple[dict[str, Any], bytes]]
    ) -> list[tuple[dict[str, Any], bytes]]:
        pieces: list[list[bytes]] = [[data] for _, data in entries]
        longest = max(header["nbytes"] for header, _ in entries)
        held = [not data for _, data in entries]
        for offset in range(0, longest, _READ_BYTES):
            for nth, answer in enumerate(self._call("read", [uid, offset, _READ_BYTES])):
                if held[nth]:
                    pieces[nth].append(answer["data"])
        self._call("release", [uid])
        return [
            (header, b"".join(parts)) for (header, _), parts in zip(entries, pieces, strict=True)
        ]

    def _call(self, op: str, argument: object = None) -> list[dict[str, Any]]:
        return self._rpc(RPC, args=(op, json.dumps(argument)))


def _describe(answers: list[dict[str, Any]]) -> EngineInfo:
    workers = tuple(json.loads(answer["json"]) for answer in answers)
    lacking = {(site, layer): why for worker in workers for site, layer, why in worker["lacking"]}
    taps = frozenset((site, layer) for worker in workers for site, layer in worker["taps"])
    if not taps:
        raise UnsupportedError("no site of any layer is tapped; see midstream's settings")
    first = workers[0]
    shape = ModelShape(
        num_layers=first["num_layers"],
        hidden_size=first["hidden_size"],
        taps=taps,
        reasons=MappingProxyType(lacking),
    )
    return EngineInfo(shape, first["dtype"], Room(**first["room"]), workers)


def _num_rows(output: Any) -> int:
    longest = max((len(completion.token_ids) for completion in output.outputs), default=1)
    return len(output.prompt_token_ids or ()) + max(0, longest - 1)


def _salt(own: str | None, plan: ResolvedPlan) -> str:
    """Keeps KV computed under these edits apart from all other KV, the user's salt included."""
    return hashlib.sha256(f"midstream:{plan.digest}:{own or ''}".encode()).hexdigest()
