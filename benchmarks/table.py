"""Writes the tables of README.md and docs/benchmarks.md from benchmarks/results/*.json.

    python benchmarks/table.py [--check]

The README has the latest overhead on each device, the page has every result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import markers

RESULTS = markers.ROOT / "benchmarks" / "results"


def pages(results: list[dict[str, Any]] | None = None) -> dict[str, dict[str, str]]:
    """Every block, by page; of the committed results unless others are given."""
    found = read() if results is None else results
    latest = {one["machine"]["device"]: one for one in found if one["benchmark"] == "overhead"}
    return {
        "README.md": {"benchmarks": "\n\n".join(render(one) for one in latest.values())},
        "docs/benchmarks.md": {"benchmarks": "\n\n".join(render(one) for one in found)},
    }


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The results in a folder, oldest first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda result: str(result["machine"]["date"]))


def render(result: dict[str, Any]) -> str:
    """One run as Markdown.

    Raises:
        ValueError: there is no table for such a benchmark.
    """
    name = result.get("benchmark")
    if name not in RENDERERS:
        raise ValueError(f"no table for the benchmark {name!r}; there are {', '.join(RENDERERS)}")
    return RENDERERS[name](result)


def overhead(result: dict[str, Any]) -> str:
    """What overhead.py and flat_cost.py write: added time against plain vLLM, by workload."""
    where = result["machine"]
    changed = ", with uncommitted changes" if where.get("changed") else ""
    parts = [
        f"{where['device']}, vLLM {where['vllm']}, torch {where['torch']}, midstream "
        f"{where['midstream']} ({where['commit']}{changed}), {where['date']}; medians of "
        f"{result['rounds']} rounds"
    ]
    for shape, measured in result["shapes"].items():
        workloads = {
            name: variants
            for name, variants in measured.items()
            if isinstance(variants, dict) and "plain" in variants
        }
        if not workloads:
            continue
        runner = measured["engine"]["runner"]
        variants = list(dict.fromkeys(name for each in workloads.values() for name in each))
        rows = [[name, *(_cell(each, name) for each in workloads.values())] for name in variants]
        head = [f"{shape}, runner {runner}", *workloads]
        parts.append(markers.table(head, rows, numbers=True))
    return "\n\n".join(parts)


def _cell(variants: dict[str, dict[str, float]], name: str) -> str:
    if name not in variants:
        return ""
    plain, median = variants["plain"]["median_s"], variants[name]["median_s"]
    if name == "plain":
        return f"{median * 1e3:.3f} ms"
    return f"{(median / plain - 1) * 100:+.1f} %".replace("-", "−")


def parity(result: dict[str, Any]) -> str:
    """What benchmarks/parity.py wrote: relative errors against transformers."""
    where = result["machine"]
    lines = [
        f"{where['device']}, vLLM {where['vllm']}, torch {where['torch']}, midstream "
        f"{where['midstream']} ({where['commit']}), {where['date']}; SmolLM2-135M-Instruct, every "
        "site of every layer, prompt and 12 generated tokens",
        "",
        "| dtype | prompt | what against what | median | worst | places within 2 % |",
        "|---|---|---|---|---|---|",
    ]
    for dtype, prompts in result["dtypes"].items():
        for prompt, rows in prompts.items():
            shown = prompt.replace("\n", " ").replace("|", "\\|")[:40]
            lines += [
                f"| {dtype} | {shown} | {what} | {row['median']:.2%} | {row['worst']:.2%} | "
                f"{row['within_2_percent']:.0%} |"
                for what, row in rows.items()
            ]
    return "\n".join(lines)


# Both are medians of variants by workload.
RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "overhead": overhead,
    "flat_cost": overhead,
    "parity": parity,
}


if __name__ == "__main__":
    sys.exit(markers.main(pages(), __doc__))
