"""Output of `midstream plan` as text and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from midstream.console import visible
from midstream.tools.capacity.advice import PACE, Advice
from midstream.tools.capacity.job import PlannedJob
from midstream.tools.capacity.load import BUS, NETWORK, STORE, WRITER, Load, Resource
from midstream.tools.capacity.rates import Figure, Rates
from midstream.tools.capacity.shape import ModelSize

_WIDTH = 96


def render(job: PlannedJob, loads: Sequence[Load], advice: Advice, rates: Rates) -> str:
    """Return the whole estimate as text."""
    chosen = advice.load
    parts = [
        _head(job),
        _columns(_codec_rows(loads), "<<" + ">" * 5 + "<"),
        "bandwidth needed at the model's speed without captures, "
        f"{chosen.model_rate:,.0f} tokens/s in total:",
        _columns(_needs_rows(loads), "<<>>>>"),
        _per_token(chosen),
        _columns(_resource_rows(chosen), "<<>>>< "),
        _advice(advice),
        "estimated from:\n" + _columns(_figure_rows(chosen, rates), "<><<"),
    ]
    return "\n\n".join(parts) + "\n"


def to_dict(job: PlannedJob, loads: Sequence[Load], advice: Advice, rates: Rates) -> dict[str, Any]:
    """Return the whole estimate as JSON values, in bytes, seconds and tokens."""
    return {
        "model": {**_fields(job.size), "vector_bytes": job.size.vector_bytes},
        "job": {
            "taps": [list(tap) for tap in job.taps],
            "widths": [job.size.width(tap) for tap in job.taps],
            "tokens": job.tokens,
            "request_tokens": job.request_tokens,
            "fraction": job.fraction,
            "step_tokens": job.step_tokens,
            "fleet": asdict(job.fleet),
        },
        "rates": {
            name: {"value": one.value, "basis": one.basis, "source": one.source}
            for name, one in _figures(advice.load, rates).items()
        },
        "loads": [_load_dict(one) for one in loads],
        "advice": {
            "codec": advice.load.codec,
            "return": advice.load.returned,
            "reasons": list(advice.reasons),
            "notes": list(advice.notes),
            "room": [asdict(one) for one in advice.capacities],
        },
    }


def _fields(size: ModelSize) -> dict[str, Any]:
    return {name: value for name, value in asdict(size).items() if name != "inner"}


def _load_dict(load: Load) -> dict[str, Any]:
    return {
        "codec": load.codec,
        "return": load.returned,
        "row_bytes": load.row_bytes,
        "rows_per_token": load.rows,
        "bytes_per_token": load.token_bytes,
        "stored_bytes_per_token": load.stored_bytes,
        "rank_bytes_per_token": [list(stage) for stage in load.rank_bytes],
        "ring_bytes": load.ring_bytes,
        "total_bytes": load.total_bytes,
        "tokens_per_second": load.rate,
        "seconds": load.seconds,
        "saturates_first": load.first.name,
        "resources": [asdict(one) for one in load.resources],
    }


def _head(job: PlannedJob) -> str:
    size, fleet = job.size, job.fleet
    weights = "" if size.weights is None else f", {size.weights.total / 1e9:.3g} B weights"
    sites = ", ".join(dict.fromkeys(site for site, _ in job.taps))
    layers = len({layer for _, layer in job.taps})
    kept = "every token" if job.fraction == 1 else f"{job.fraction:.3g} of the tokens"
    return "\n".join(
        [
            visible(
                f"{size.name}: {size.num_layers} layers of {size.hidden_size:,}, "
                f"{size.dtype}{weights}"
            ),
            f"{job.tokens:,} tokens in requests of {job.request_tokens:,}; {sites} at {layers} "
            f"layers: {len(job.taps)} rows{_widths(job)} for {kept}",
            f"{_count(fleet.engines, 'engine')} of {_count(fleet.gpus, 'GPU')} (TP {fleet.tp}, "
            f"PP {fleet.pp}) on {_count(fleet.nodes, 'machine')} of {fleet.gpus_per_node}",
        ]
    )


def _widths(job: PlannedJob) -> str:
    """Return the widths of the rows for the head, if there are others than the stream's."""
    found = sorted({job.size.width(tap) for tap in job.taps})
    if found == [job.size.hidden_size]:
        return ""
    return f" of {' and '.join(f'{width:,}' for width in found)} numbers"


def _per_token(load: Load) -> str:
    busiest = max(max(stage) for stage in load.rank_bytes)
    return (
        f"per token with {load.codec}, {load.returned}: {load.rows:g} rows, "
        f"{load.token_bytes:,.0f} bytes, {load.stored_bytes:,.0f} bytes stored, {busiest:,.0f} "
        f"bytes on the busiest rank:"
    )


def _codec_rows(loads: Sequence[Load]) -> list[list[str]]:
    rows = [
        [
            "codec",
            "return",
            "bytes/row",
            "per token",
            "stored",
            "tokens/s",
            "time",
            "bottleneck",
        ]
    ]
    for one in loads:
        rows.append(
            [
                one.codec,
                one.returned,
                f"{one.row_bytes:,}",
                _bytes(one.token_bytes),
                _bytes(one.total_bytes),
                f"{one.rate:,.0f}",
                _time(one.seconds),
                one.first.name,
            ]
        )
    return rows


def _needs_rows(loads: Sequence[Load]) -> list[list[str]]:
    """Return the bandwidths needed by each codec and layout, as table rows."""
    head = ["codec", "return", "bus, busiest rank", "writer, engine", "network, machine", "store"]
    names = (BUS, WRITER, NETWORK, STORE)
    every = [[one.resource(name) for name in names] for one in loads]
    rows = [
        [one.codec, one.returned, *(_needed(each)[0] for each in found)]
        for one, found in zip(loads, every, strict=True)
    ]
    return [head, *rows, ["available", "", *(_needed(each)[1] for each in every[0])]]


def _resource_rows(load: Load) -> list[list[str]]:
    rows = [["", "per", "needed", "available", "share", ""]]
    for one in load.resources:
        mark = "bottleneck" if one is load.first else ""
        rows.append([one.name, one.where, *_needed(one), f"{one.share:.1%}", mark])
    return rows


def _needed(one: Resource) -> tuple[str, str]:
    if one.needed is None or one.available is None:
        return "", ""
    return f"{_bytes(one.needed)}/s", f"{_bytes(one.available)}/s"


def _figures(load: Load, rates: Rates) -> dict[str, Figure]:
    """Return the figures that the estimate is based on, by name."""
    found = {"engine": load.engine}
    if rates.engine is None:
        found["gpu_flops"] = rates.gpu_flops
        if load.gpus > 1:
            found["efficiency"] = rates.efficiency
    found["row"] = load.row
    if load.encoder is not None:
        found["encoder"] = load.encoder
    rest = ("bus", "step", "request", "reader", "writer", "network", "store", "gpu_memory")
    return found | {name: getattr(rates, name) for name in rest}


_NAMES = {
    "engine": "engine without captures",
    "gpu_flops": "GPU",
    "efficiency": "multi-GPU efficiency",
    "row": "captured row, on its device",
    "encoder": "encoding, per GPU",
    "bus": "bus, per GPU",
    "step": "host, per step",
    "request": "front end, per request",
    "reader": "front end, reading",
    "writer": "store writer, per engine",
    "network": "network, per machine",
    "store": "store, total",
    "gpu_memory": "memory, per GPU",
}


def _value(name: str, value: float) -> str:
    """Format a figure in its unit."""
    if name == "engine":
        return f"{value:,.0f} tokens/s"
    if name == "gpu_flops":
        return f"{value / 1e12:,.0f} TFLOP/s"
    if name == "efficiency":
        return f"{value:.0%}"
    if name in ("row", "step", "request"):
        return _short(value)
    return _bytes(value) + ("" if name == "gpu_memory" else "/s")


def _figure_rows(load: Load, rates: Rates) -> list[list[str]]:
    return [
        [_NAMES[name], _value(name, one.value), one.basis, one.source]
        for name, one in _figures(load, rates).items()
    ]


def _advice(advice: Advice) -> str:
    chosen = advice.load
    lines = [f"recommended: {chosen.codec}, {chosen.returned}"]
    lines += [_item(text) for text in (*advice.reasons, *advice.notes)]
    if advice.capacities:
        lines.append(_item(f"Captures that keep the model's pace (at most {PACE - 1:.0%} slower):"))
        rows = [
            [
                f"    {one.codec}",
                one.returned,
                _count(one.taps, "tap"),
                f"or {one.fraction:.1%} of the tokens",
            ]
            for one in advice.capacities
        ]
        lines.append(_columns(rows, "<<><"))
    return "\n".join(lines)


def _item(text: str) -> str:
    """Format a sentence as a wrapped list item."""
    lines, line = [], "-"
    for word in text.split():
        if len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = " "
        line += f" {word}"
    return "\n".join([*lines, line])


def _columns(rows: Sequence[Sequence[str]], align: str) -> str:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:{align[n]}{widths[n]}}" for n, cell in enumerate(row)).rstrip()
        for row in rows
    )


def _bytes(value: float) -> str:
    """Format a number of bytes with three significant digits, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            digits = 0 if unit == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
            return f"{value:,.{digits}f} {unit}"
        value /= 1000
    raise AssertionError


def _short(seconds: float) -> str:
    for unit, length in (("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _time(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
