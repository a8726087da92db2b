"""Figures of README.md: the latest results that make a point, and how ratios are written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import markers

# Of these benchmarks README.md has figures, and the document tables.
LEADING = ("overhead", "stream")
# Two engines of plain vLLM differ by more where other work disturbs the machine: such a run shows
# nothing of less than that, and README.md's figures are of a few per cent.
STEADY = 0.03


def latest_8b(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return results of `LEADING` benchmarks of the 8B shape on a GPU with the newest vLLM, by
    benchmark: the latest ones of one commit, that for which most of these benchmarks have a result,
    and of several such commits the one measured last. Runs on a disturbed machine do not count.
    """
    measured = [
        one
        for one in results
        if one["benchmark"] in LEADING
        and one["machine"]["device"] != "cpu"
        and _is_steady(one.get("shapes", {}).get("8b", {}))
    ]
    newest = max(map(_release, measured), default=())
    of_commits: dict[str, dict[str, dict[str, Any]]] = {}
    for one in measured:
        if _release(one) == newest:
            commit = one["machine"]["commit"]
            # A commit that is measured again comes last.
            of_commits[commit] = of_commits.pop(commit, {}) | {one["benchmark"]: one}
    # Of equal ones, max() returns the first.
    best: dict[str, dict[str, Any]] = max(reversed(of_commits.values()), key=len, default={})
    return {name: best[name] for name in LEADING if name in best}


def _is_steady(measured: dict[str, Any]) -> bool:
    """Whether something was measured, and two engines of plain vLLM agree in each workload."""
    again = [
        added(one, "plain again")
        for one in measured.values()
        if isinstance(one, dict) and "plain again" in one
    ]
    return bool(measured) and all(abs(ratio - 1) <= STEADY for ratio in again)


def _release(result: dict[str, Any]) -> tuple[int, ...]:
    return tuple(map(int, result["machine"]["vllm"].split(".")))


def figures(results: list[dict[str, Any]]) -> str:
    """Return figures that make a point, of the latest results of the 8B shape on a GPU, each with
    its script, result and machine.
    """
    rows = []
    for name, result in latest_8b(results).items():
        read_figures = _overhead_figures if name == "overhead" else _stream_figures
        rows += [[*row, _source(result)] for row in read_figures(result["shapes"]["8b"])]
    return markers.table(["", "measured", "script, result, machine"], rows) if rows else ""


def ratio(results: list[dict[str, Any]]) -> str:
    """Return a sentence that compares midstream with its alternatives, of the latest result of
    against.py on a GPU.
    """
    found = [
        one
        for one in results
        if one["benchmark"] == "against" and one["machine"]["device"] != "cpu"
    ]
    if not found:
        return ""
    ((shape, measured), *_), source = found[-1]["shapes"].items(), _source(found[-1])
    median = {name.split(",")[0]: one["median_s"] for name, one in measured["variants"].items()}
    mine, theirs, reference = (
        median[name] for name in ("midstream", "extract_hidden_states", "transformers")
    )
    parts = [
        f"{mine / theirs:.0%} of the time of vLLM's own `extract_hidden_states`",
        f"{mine / reference:.0%} of that of transformers",
    ]
    if (hooks := median.get("vllm-lens")) is not None:
        parts.append(f"{mine / hooks:.0%} of that of vllm-lens")
    return (
        f"Capturing every layer of every prompt token of a {shape.upper()} model takes "
        f"{', '.join(parts[:-1])}, and {parts[-1]} ({source})."
    ).replace("%", " %")


def _overhead_figures(measured: dict[str, Any]) -> list[list[str]]:
    works = {name: one for name, one in measured.items() if name.startswith("decode")}
    idle, again = (
        [added(one, name) for one in works.values() if name in one] or [1.0]
        for name in ("idle", "plain again")
    )
    name, largest = list(works.items())[-1]
    one, many = (added(largest, f"add at every layer, K = {k}") for k in (1, 256))
    return [
        [
            "Cost for requests that use no midstream feature",
            f"a decode step of an 8B model: {percent_range(idle)}; plain vLLM against itself: "
            f"{percent_range(again)}",
        ],
        [
            "256 steering vectors cost what one costs",
            f"{name}, a vector added at every layer: {percent(one)} with one vector for all,"
            f" {percent(many)} with 256 different ones",
        ],
    ]


def _stream_figures(measured: dict[str, Any]) -> list[list[str]]:
    variants = next(one for one in measured.values() if "plain" in one)
    every = variants["every token, every layer"]
    return [
        [
            "Capturing everything",
            f"every layer of every prompt token of an 8B model: {percent(1 / every['of_plain'])}"
            f" time, {every['gb_s']:.1f} GB/s to the caller",
        ]
    ]


def added(variants: dict[str, dict[str, float]], name: str) -> float:
    """Return a variant's time relative to plain vLLM's; results before 2026-11-27 have medians
    only.
    """
    measured = variants[name].get("of_plain")
    return measured or variants[name]["median_s"] / variants["plain"]["median_s"]


def _source(result: dict[str, Any]) -> str:
    machine, script = result["machine"], f"benchmarks/{result['benchmark']}.py"
    links = f"[script]({script}), [result](benchmarks/results/{result.get('file', '')})"
    return f"{links}; {machine['device']}, vLLM {machine['vllm']}, {machine['commit']}"


def percent(ratio: float) -> str:
    """Return by how much a ratio is above 1, as text."""
    added = round((ratio - 1) * 100, 1) + 0.0  # no −0.0
    return f"{added:+.1f} %".replace("-", "−")


def percent_range(ratios: list[float]) -> str:
    """Return by how much ratios are above 1, as text: the least to the most."""
    least, most = percent(min(ratios)), percent(max(ratios))
    return least if least == most else f"{least} to {most}"


def where(result: dict[str, Any]) -> str:
    """Return machine, versions, commit, and the number of rounds, as a line of text."""
    where = result["machine"]
    changed = ", with uncommitted changes" if where.get("changed") else ""
    rounds = f"; medians of {result['rounds']} rounds" if "rounds" in result else ""
    if "stopped_after_s" in result:
        rounds += f", as many as fitted into {result['stopped_after_s']} s"
    return (
        f"{where['device']}, vLLM {where['vllm']}, torch {where['torch']}, midstream "
        f"{where['midstream']} ({where['commit']}{changed}), {where['date']}{rounds}"
    )
