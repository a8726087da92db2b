"""Capacity of the workers that running requests take: with "block" no step waits for room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from midstream.codecs import parse_codec
from midstream.config.config import Config
from midstream.errors import SpecError
from midstream.ops import layout
from midstream.ops.layout import Op
from midstream.plan import ModelShape, Plan, ResolvedPlan, Vector
from midstream.plan.positions.range_set import overlay
from midstream.plan.positions.ranges import count as count_positions
from midstream.plan.resolved import ON_DEVICE, ResolvedEdit, path_of
from midstream.plan.sink_target import MEMORY
from midstream.plan.vectors.device_row import DeviceRow
from midstream.runtime.frontend.engine_info import EngineInfo
from midstream.runtime.frontend.rpc.remote_worker import MOST_HELD, RemoteWorker
from midstream.runtime.protocol.segments import (
    WHOLE,
    PlanSegment,
    RankShare,
    Room,
    cut,
    device_rows_of,
    vectors_of,
)
from midstream.sites import Tap, show_tap

# Per kind of capacity: its setting, and what it counts.
_KINDS = {
    "bank_rows": "vectors",
    "maps": "matrices",
    "programs": "combinations of edits",
    "groups": "combinations of captures",
    "max_edits": "instructions",
    "token_ids": "token ids in lists",
}
# Bytes of captured rows, which are released when they were fetched, later than the rest.
ROWS = "rows"
# Per count of a request's own: the field that is wrong where it never fits, and the problem.
_COUNTS = {
    ROWS: (
        "capture",
        "the rows may take {count} bytes, and one request has room for {limit}; capture fewer "
        "layers or positions, lower max_tokens, raise midstream's setting arena_bytes, or let rows "
        'that do not fit go to the disk with overflow="spill"',
    ),
    "readout_rows": (
        "capture",
        "the lenses and SAEs may read {count} rows (positions times layers, of all completions) in "
        "one step, and a step has room for {limit}; choose fewer positions or layers, lower "
        "max_num_batched_tokens, or raise midstream's setting readout_rows",
    ),
    "reductions": (
        "capture",
        "the reductions need {count} vectors of sums (of all completions), and there is room for "
        "{limit}; choose fewer layers, or raise midstream's setting reductions",
    ),
    "gate_states": (
        "edits",
        "gates with hold, smooth or release need {count} states (one for each tap that is read, of "
        "all completions), and there is room for {limit}; raise midstream's setting gate_states, "
        "or name one layer that the gate reads",
    ),
}


# Sites of a layer that a forward pass may reach between the input and the output of its MLP.
_WITHIN = ("attn_in", "attn_out", "resid_mid", "mlp_out")


@dataclass(frozen=True, slots=True)
class Need:
    """Capacity that one plan takes."""

    kinds: dict[str, dict[Hashable, int]]  # by kind, the amount of each thing, which requests share
    # What each request takes for itself, at most: "rows", bytes of captured rows until they are
    # fetched, where ranks share rows those of one rank; "readout_rows", positions times layers,
    # that lenses and SAEs read in a step; "reductions", vectors of sums; "gate_states", states of
    # gates with memory.
    counts: Mapping[str, int] = field(default_factory=dict)
    vectors: tuple[Vector, ...] = ()  # named by digest; the workers must store them
    # (kind, name) of the registered weights that it reads
    weights: tuple[tuple[str, str], ...] = ()
    device_rows: int = 0  # that it leaves on the device
    sources: tuple[str, ...] = ()  # requests whose rows on the device it has in its edits

    @property
    def rows(self) -> int:
        return self.counts.get(ROWS, 0)

    def with_rows(self, nbytes: int) -> Need:
        return replace(self, counts={**self.counts, ROWS: nbytes})

    def times(self, count: int) -> Need:
        if count == 1:
            return self
        return replace(self, counts={name: count * amount for name, amount in self.counts.items()})

    def total(self, kind: str) -> int:
        return sum(self.kinds.get(kind, {}).values())


@dataclass(frozen=True, slots=True)
class RowLimit:
    """What there is room for, over all workers, of what each request takes for itself."""

    limits: Mapping[str, int]  # see `Need.counts`; requests do not wait for what is not in it
    held: Callable[[], int]  # bytes of rows that readers lease


NO_LIMIT = RowLimit({}, lambda: 0)


def need_of(
    plan: ResolvedPlan,
    taps: dict[Tap, int],
    room: Room,
    edits_per_site: int,
    hidden_size: int,
    ranks: int = 1,
) -> Need:
    """Return a plan's capacity; vectors above `hidden_size` count as several `bank_rows`."""
    pieces, order = cut(plan, taps, WHOLE), list(taps)
    kinds: dict[str, dict[Hashable, int]] = {kind: {} for kind in _KINDS}
    # Segments with the same content need the same.
    for piece in {
        (id(segment.edits), id(segment.taps), id(segment.patterns)): segment for segment in pieces
    }.values():
        _check_sites(piece, order, edits_per_site)
        _check_maps(piece, order, hidden_size)
        _check_codes(piece, order)
        if piece.edits:
            kinds["programs"][piece.edits] = 1
            length = sum(len(edit.steps) for edit in piece.edits)
            kinds["max_edits"][piece.edits] = length
        if piece.captured:
            kinds["groups"][piece.captured if ranks == 1 else piece.shared(plan.sharded)] = 1
        for edit in piece.edits:
            if edit.ids:
                kinds["token_ids"][edit.ids] = len(edit.ids)
            for step in edit.steps:
                for vectors in vectors_of(step):
                    if step.op is Op.MAP and vectors == (step.read,):
                        kinds["maps"][vectors] = 1
                        continue
                    rows_each = -(-vectors[0].size // hidden_size)
                    kinds["bank_rows"][vectors] = len(vectors) * rows_each
    need = Need({kind: things for kind, things in kinds.items() if things})
    check_tables(need, room)
    if plan.slots > room.probes:
        raise SpecError(
            "probes",
            f"the request reads {plan.slots} scores (probes, one for each class, query, value or "
            f"hidden unit, and probes of gates at other sites), and a token has room for "
            f"{room.probes}; raise midstream's setting probes",
        )
    return need


def with_device_rows(need: Need, plan: ResolvedPlan, info: EngineInfo) -> Need:
    """Return what a plan takes, with the rows that it leaves on the device, and the requests that
    left those of its edits. Raises SpecError where this engine cannot do it.
    """
    num_left, rows = 0, list(device_rows_of(plan))
    for capture in plan.captures:
        if capture.kind == ON_DEVICE:
            _check_alone(capture.source, info)
            num_left += len(capture.taps) * count_positions(capture.where.ranges, plan.prompt_len)
    _check_only_written(plan)
    if not num_left and not rows:  # as of nearly all plans
        return need
    sources = tuple(_placed_sources(rows, info)) if rows else ()
    return replace(need, device_rows=num_left, sources=sources)


def _placed_sources(
    rows: Sequence[tuple[ResolvedEdit, DeviceRow]], info: EngineInfo
) -> dict[str, None]:
    """Return the requests that left rows, which must be where their edits are."""
    stages = {tap: worker.stage for worker in info.workers for tap in worker.taps}
    split = {
        tap
        for worker in info.workers
        for tap, parts in zip(worker.taps, worker.parts, strict=True)
        if parts > 1
    }
    sources: dict[str, None] = {}
    for edit, row in rows:
        sources[row.source] = None
        stage = stages[edit.site, edit.layer]
        if (edit.site, edit.layer) in split:
            raise SpecError(
                f"{path_of(edit.source)}.rows",
                f"{edit.site} is split over the ranks under tensor parallelism, and each has whole "
                "rows on its device; use a site of the residual stream, or capture the rows "
                'without reduce="device"',
            )
        if stages.get(row.tap, stage) != stage:
            raise SpecError(
                f"{path_of(edit.source)}.rows",
                f"the rows of {show_tap(row.tap)} are on another pipeline stage than layer "
                f'{edit.layer}; capture them without reduce="device", which sends them',
            )
    return sources


def _check_only_written(plan: ResolvedPlan) -> None:
    """Check that rows on the device are nowhere but where `device_rows_of` counts them."""
    for edit in plan.edits:
        for step in edit.steps.instructions:
            for vector in (step.read, step.mask):
                if isinstance(vector, DeviceRow):
                    raise vector.only_written().under(path_of(edit.source))
    for probe in plan.probes:
        for step in probe.steps.instructions:
            for vector in (step.read, step.mask, *step.write):
                if isinstance(vector, DeviceRow):
                    is_gate = not probe.name and not probe.part_of
                    raise vector.only_written().under(
                        "edits" if is_gate else f"probes[{probe.source}]"
                    )


def _check_alone(source: int, info: EngineInfo) -> None:
    replicas = 1 + max(worker.replica for worker in info.workers)
    for what, number in (("replicas", replicas), ("API servers", info.front_ends.count)):
        if number > 1:
            raise SpecError(
                f"capture[{source}].reduce",
                f'reduce="{ON_DEVICE}" leaves rows with one engine, for requests of one front end, '
                f"and this engine has {number} {what}; capture the rows as they are",
            )


def left_taps(plan: ResolvedPlan) -> frozenset[Tap]:
    """Return the taps whose rows a plan leaves on the device."""
    return frozenset(
        tap
        for capture in plan.captures
        if capture.kind == ON_DEVICE and capture.pattern is not None
        for tap in capture.pattern.reads
    )


def check_tables(need: Need, room: Room) -> None:
    """Check that a plan fits into the tables of an idle worker."""
    for kind, limit in _limits(room).items():
        count = need.total(kind)
        if count > limit:
            setting = "programs" if kind == "groups" else kind
            problem = f"the request needs {count} {_KINDS[kind]}, and there is room for {limit}"
            raise SpecError("", f"{problem}; raise midstream's setting {setting}")


class CapacityBudget:
    """Counts the capacity that admitted plans take together; things that they share count once."""

    def __init__(self, room: Room, rows: RowLimit = NO_LIMIT) -> None:
        self._limits = _limits(room)
        self._row_limit = rows
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.used = dict.fromkeys(_KINDS, 0)
        self._users: dict[str, Counter[Hashable]] = {kind: Counter() for kind in _KINDS}
        # Requests of one plan share `Need.kinds`, which is counted once for all of them: the number
        # of these requests, by its identity.
        self._requests: Counter[int] = Counter()

    def fits(self, need: Need) -> bool:
        """Return whether a plan fits beside the admitted ones."""
        for name, count in need.counts.items():
            limit = self._row_limit.limits.get(name)
            if count and limit is not None:
                held = self._row_limit.held() if name == ROWS else 0
                if self.counts[name] + count + held > limit:
                    return False
        return id(need.kinds) in self._requests or all(
            self.used[kind] + self._new(kind, things) <= self._limits[kind]
            for kind, things in need.kinds.items()
        )

    def take(self, need: Need) -> None:
        """Take the capacity of a plan that fits. Pair with `release_tables` and `release_rows`."""
        for name, count in need.counts.items():
            self.counts[name] += count
        self._requests[id(need.kinds)] += 1
        if self._requests[id(need.kinds)] > 1:
            return
        for kind, things in need.kinds.items():
            self.used[kind] += self._new(kind, things)
            self._users[kind].update(things.keys())

    def release_tables(self, need: Need) -> None:
        """Release the capacity of a plan, except for its rows."""
        for name, count in need.counts.items():
            if name != ROWS:
                self.counts[name] -= count
        self._requests[id(need.kinds)] -= 1
        if self._requests[id(need.kinds)]:
            return
        del self._requests[id(need.kinds)]
        for kind, things in need.kinds.items():
            users = self._users[kind]
            for thing, size in things.items():
                users[thing] -= 1
                if users[thing] == 0:
                    del users[thing]
                    self.used[kind] -= size

    def release_rows(self, need: Need) -> None:
        self.counts[ROWS] -= need.rows

    def _new(self, kind: str, things: dict[Hashable, int]) -> int:
        users = self._users[kind]
        return sum(size for thing, size in things.items() if thing not in users)


def _limits(room: Room) -> dict[str, int]:
    return {
        "bank_rows": room.bank_rows,
        "maps": room.maps,
        "programs": room.programs - layout.FIRST_FREE_PROGRAM,
        "groups": room.programs - layout.FIRST_FREE_GROUP,
        "max_edits": room.max_edits,
        "token_ids": room.token_ids,
    }


def _check_sites(piece: PlanSegment, taps: list[Tap], limit: int) -> None:
    at_tap: Counter[int] = Counter()
    for edit in piece.edits:
        at_tap[edit.tap] += len(edit.steps)
    for tap, count in at_tap.items():
        if count > limit:
            site, layer = taps[tap]
            raise SpecError(
                "edits",
                f"{count} instructions for one token at {site} of layer {layer} (an edit takes one "
                "or more, a probe one, or one for each class, query, value or unit), and the limit "
                f"is {limit}; raise midstream's setting edits_per_site",
            )


def _check_maps(piece: PlanSegment, taps: list[Tap], hidden_size: int) -> None:
    """Check that each matrix is multiplied with what enters its site, and is not too wide."""
    for tap in {edit.tap for edit in piece.edits for step in edit.steps if step.op is Op.MAP}:
        steps = [step for edit in piece.edits if edit.tap == tap for step in edit.steps]
        site, layer = taps[tap]
        try:
            layout.kind_of([step.op for step in steps])
        except ValueError:
            raise SpecError(
                "edits",
                "an Affine with a matrix must be the first edit of a token at a site, and the only "
                f"one with a matrix; another comes before it at {site} of layer {layer} "
                "(server-wide edits come before those of a request)",
            ) from None
        width = max(step.write[0].size for step in steps if step.op is Op.MAP)
        if width > hidden_size:
            raise SpecError(
                "edits",
                f"a matrix can be at most as wide as the residual stream, {hidden_size}, and the "
                f"vectors of {site} have {width} numbers",
            )


def _check_codes(piece: PlanSegment, taps: list[Tap]) -> None:
    """Check that one SAE at a time reconstructs a token, of what enters its site."""
    ops: dict[int, list[Op]] = {}
    for edit in piece.edits:
        ops.setdefault(edit.tap, []).extend(step.op for step in edit.steps)
    reads = {taps[tap] for tap, of_tap in ops.items() if Op.CODE in of_tap}
    for tap, of_tap in ops.items():
        site, layer = taps[tap]
        if Op.CODE in of_tap or Op.RECONSTRUCT in of_tap:
            try:
                layout.kind_of(of_tap)
            except ValueError:
                raise SpecError(
                    "edits",
                    "a Reconstruct must be the first edit of a token at the site that it reads, "
                    "and the only Reconstruct or Affine with a matrix there and at the site that "
                    f"it writes; another is at {site} of layer {layer} (server-wide edits come "
                    "before those of a request)",
                ) from None
        is_transcoder = Op.CODE in of_tap and Op.RECONSTRUCT not in of_tap
        others = {other for other in reads if other[1] == layer and other[0] in _WITHIN} - {
            (site, layer)
        }
        if is_transcoder and others:
            raise SpecError(
                "edits",
                f"beside a transcoder of layer {layer}, no other SAE can reconstruct the same "
                f"token within that layer; another is at {min(others)[0]}",
            )


def all_taps(taps: Iterable[Tap]) -> dict[Tap, int]:
    return {tap: index for index, tap in enumerate(taps)}


def row_limit(workers: Sequence[RemoteWorker], config: Config, front_ends: int = 1) -> RowLimit:
    """Return the row memory of each front end; each stage's first rank transfers the most rows."""
    capturing = [worker for worker in workers if worker.info.tensor_rank == 0]
    limits = {name: getattr(config, name) // front_ends for name in _COUNTS if name != ROWS}
    if config.overflow != "block":
        return RowLimit(limits, lambda: 0)
    limits[ROWS] = sum(worker.arena_bytes for worker in capturing)
    return RowLimit(limits, lambda: sum(worker.held for worker in capturing))


def max_row_bytes(
    plan: ResolvedPlan,
    shape: ModelShape,
    length: int,
    ranks: int,
    parts: Mapping[Tap, int] = MappingProxyType({}),
) -> int:
    """Return the first rank's bytes of rows of `length` tokens; `parts`: of vectors, by tap."""
    if not plan.captures:
        return 0
    sizes = row_sizes(plan, shape)
    first = RankShare(0, ranks)
    positions: Counter[tuple[int, ...]] = Counter()  # by the captures that apply
    for start, stop, indices in overlay([capture.returned for capture in plan.captures]):
        positions[indices] += max(0, (length if stop is None else min(stop, length)) - start)
    nbytes = 0
    for indices, count in positions.items():
        taps = tuple({tap for index in indices for tap in plan.captures[index].taps})
        whole = first.of(tuple(tap for tap in taps if tap not in parts), plan.sharded)
        split = sum(sizes[tap] // parts[tap] for tap in taps if tap in parts)
        nbytes += (sum(sizes[tap] for tap in whole) + split) * count
    return nbytes


def row_sizes(plan: ResolvedPlan, shape: ModelShape) -> dict[Tap, int]:
    """Return the bytes of an encoded row of each tap that a plan captures; do not change them."""

    def make() -> dict[Tap, int]:
        codec, dtype = parse_codec(plan.codec), getattr(torch, shape.dtype)
        patterns = plan.pattern_widths
        return {
            tap: 4 * patterns[tap] if tap in patterns else codec.row_bytes(shape.width(tap), dtype)
            for tap in plan.taps
        }

    return plan.remember(("row sizes", shape.dtype), 0, make)


def check_rows(need: Need, room: RowLimit) -> None:
    """Check that the rows of a request, and those of its read-outs, fit in an idle engine."""
    for name, count in need.counts.items():
        limit = room.limits.get(name)
        if limit is None:
            continue
        if name == ROWS:
            limit = int(limit * (1 - MOST_HELD))  # leases of readers may take the other part
        if count > limit:
            path, problem = _COUNTS[name]
            raise SpecError(path, problem.format(count=count, limit=limit))


def returned_captures(plan: ResolvedPlan, own: Plan) -> tuple[int, ...]:
    """Return the captures whose rows are returned to the caller of a request."""
    return tuple(
        [
            index
            for index, capture in enumerate(plan.captures)
            if capture.source >= 0 and own.captures[capture.source].sink == MEMORY
        ]
    )


def prompt_bytes(plan: ResolvedPlan, captures: tuple[int, ...], shape: ModelShape) -> int:
    """Return the bytes of the rows of a request's prompt that some of its captures select."""
    if not captures:
        return 0
    sizes = row_sizes(plan, shape)
    rows = plan.only(captures).expected_rows(plan.prompt_len, ())
    return sum(
        (min(count, 1) if tap in plan.reduced else count) * sizes[tap]
        for tap, count in rows.items()
    )


def check_returned(nbytes: int, most: int) -> None:
    """Check that the rows of a prompt can be returned to its caller; see `prompt_bytes`."""
    if nbytes > most:
        raise SpecError(
            "capture",
            f"the rows of the prompt alone take {nbytes} bytes, and this server returns at most "
            f"{most} (http.inline_bytes, http.client_bytes); capture less, or use a sink",
        )
