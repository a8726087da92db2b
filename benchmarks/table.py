"""Writer of the tables of README.md, docs/benchmarks.md and benchmarks/results/README.md.

    python benchmarks/table.py [--check]

The README has three figures of the latest commit of which all were measured, with the 8B shape on a
GPU, and the comparison with other tools. The document has the tables of these results, and the
folder of the results has every one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import markers
from figures import added, figures, latest_8b, percent, ratio, where
from fitted import draft_head, probes

RESULTS = markers.ROOT / "benchmarks" / "results"


def pages(results: list[dict[str, Any]] | None = None) -> dict[str, dict[str, str]]:
    """Return every block, by page and name. Default: of the committed results."""
    found = read() if results is None else results
    return {
        "README.md": {"ratio": ratio(found), "figures": figures(found)},
        "docs/benchmarks.md": {"benchmarks": "\n\n".join(map(render, latest_8b(found).values()))},
        "docs/probing.md": {"probes": "".join(map(render, _of(found, "probes")[-1:]))},
        "docs/train-draft.md": {"draft_head": "".join(map(render, _of(found, "draft_head")[-1:]))},
        "benchmarks/results/README.md": {"benchmarks": "\n\n".join(map(render, found))},
    }


def _of(results: list[dict[str, Any]], benchmark: str) -> list[dict[str, Any]]:
    return [result for result in results if result["benchmark"] == benchmark]


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the results in a folder, oldest first."""
    found = [
        {**json.loads(path.read_text(encoding="utf-8")), "file": path.name}
        for path in sorted(folder.glob("*.json"))
    ]
    return sorted(found, key=lambda result: str(result["machine"]["date"]))


def render(result: dict[str, Any]) -> str:
    """Return one result as Markdown.

    Raises:
        ValueError: an unknown benchmark.
    """
    name = result.get("benchmark")
    if name not in RENDERERS:
        raise ValueError(f"no table for the benchmark {name!r}; there are {', '.join(RENDERERS)}")
    return RENDERERS[name](result)


def overhead(result: dict[str, Any]) -> str:
    """Render a result of overhead.py or flat_cost.py: time added to plain vLLM, by workload."""
    parts = [where(result)]
    for shape, measured in result["shapes"].items():
        workloads = {
            name: variants
            for name, variants in measured.items()
            if isinstance(variants, dict) and "plain" in variants
        }
        if not workloads:
            continue
        runner = measured["engine"]["runner"]
        ranks = result.get("tensor_parallel_size", 1)
        runner += f", TP {ranks}" if ranks > 1 else ""
        variants = list(dict.fromkeys(name for each in workloads.values() for name in each))
        rows = [[name, *(_cell(each, name) for each in workloads.values())] for name in variants]
        head = [f"{shape}, runner {runner}", *workloads]
        parts.append(markers.table(head, rows, numbers=True))
    return "\n\n".join(parts)


def against(result: dict[str, Any]) -> str:
    """Render a result of against.py: captures of every layer of every prompt token, by variant."""
    parts = [where(result)]
    for shape, measured in result["shapes"].items():
        variants = measured["variants"]
        if "plain vLLM" not in variants:
            continue
        plain = variants["plain vLLM"]["median_s"]
        rows = [
            [
                name,
                f"{one['median_s']:.3f} s",
                f"{one['tokens_per_s'] / result['length']:,.0f}",
                f"{one['tokens_per_s']:,.0f}",
                f"{one['gb_s']:.2f}" if one["bytes"] else "",
                f"{one['median_s'] / plain:.2f} ×",
            ]
            for name, one in variants.items()
        ]
        head = [
            f"{shape}, every layer of {result['prompts']} × {result['length']} prompt tokens",
            "time",
            "prompts/s",
            "tokens/s",
            "GB/s to the caller",
            "relative to plain",
        ]
        parts += [markers.table(head, rows, numbers=True), measured["agreement"]]
    return "\n\n".join(parts)


def serving(result: dict[str, Any]) -> str:
    """Render a result of serving.py: latencies of requests without a plan."""
    columns: dict[str, Callable[[dict[str, float]], str]] = {
        "median latency": lambda one: f"{one['median_ms']:.2f} ms",
        "95th percentile": lambda one: f"{one['p95_ms']:.2f} ms",
        "requests/s": lambda one: f"{one['per_s']:.1f}",
        "other clients' requests/s": lambda one: (
            f"{one['others_per_s']:.1f}" if one["others_per_s"] else ""
        ),
    }
    variants = result.get("variants", {})
    if not all("per_s" in one for one in variants.values()):
        # Results before that was measured.
        del columns["requests/s"]
    rows = [[name, *(cell(one) for cell in columns.values())] for name, one in variants.items()]
    head = [
        f"{result['model']}, {result['words']} + {result['tokens']} tokens, "
        f"{result['clients']} other clients{_apart(result)}",
        *columns,
    ]
    return "\n\n".join([where(result), markers.table(head, rows, numbers=True)])


def _apart(result: dict[str, Any]) -> str:
    """Return on how many processors servers and clients ran, if these were not the same."""
    if not result.get("client_cpus"):
        return ""
    return f" on {result['client_cpus']} processors, servers on {result['server_cpus']}"


def capture_cost(result: dict[str, Any]) -> str:
    """Render a result of capture_cost.py: time added by captures, and throughput of rows."""
    parts = [where(result)]
    for shape, measured in result["shapes"].items():
        works = list(measured["work"].items())
        names = list(dict.fromkeys(name for _, variants in works for name in variants))
        rows = [
            [name, *(cell for _, variants in works for cell in _cost(variants, name))]
            for name in names
        ]
        head = [f"{shape}, {measured['layers']} layers, runner {measured['engine']['runner']}"]
        for work, _ in works:
            head += [work, "reading all tensors", "GB/s"]
        parts.append(markers.table(head, rows, numbers=True))
    return "\n\n".join(parts)


def _cost(variants: dict[str, dict[str, float]], name: str) -> tuple[str, str, str]:
    one = variants[name]
    if not one["row_bytes"]:
        return _cell(variants, name), "", ""
    return _cell(variants, name), f"{one['read_s']:.3f} s", f"{one['bytes_per_s'] / 1e9:.2f}"


def transport(result: dict[str, Any]) -> str:
    """Render a result of transport.py: GB/s between two processes, without an engine."""
    codecs = {
        name: one for name, one in result.items() if isinstance(one, dict) and "moved_gb_s" in one
    }
    rows = [
        [
            name,
            f"{one['vectors_gb_s']:.1f}",
            f"{one['moved_gb_s']:.1f}",
            f"{one['pages_gb_s']:.1f}",
        ]
        for name, one in codecs.items()
    ]
    rows.append(["a copy without a reader", *[f"{result['bus_gb_s']:.1f}"] * 2, ""])
    head = ["transport alone", "GB/s of vectors", "GB/s moved", "… reading every page"]
    return f"{where(result)}\n\n{markers.table(head, rows, numbers=True)}"


def step_cost(result: dict[str, Any]) -> str:
    """Render a result of step_cost.py: host time before and after a forward pass."""
    host = result.get("host", result).items()
    found = {name: one for name, one in host if isinstance(one, dict) and "before_us" in one}
    columns = {"before_us": "before a forward pass", "after_us": "after it"}
    more = {"ship_us": "start of copies", "settle_us": "verification"}
    more |= {"collect_us": "collection", "evaluated_us": "evaluation", "calls": "calls"}
    columns |= {key: more[key] for key in more if any(key in one for one in found.values())}
    units = {key: " µs" if key.endswith("_us") else "" for key in columns}
    rows = [
        [name, *(f"{one[key]:.0f}{units[key]}" if key in one else "" for key in columns)]
        for name, one in found.items()
    ]
    shape = f"host, {result['sequences']} sequences × {result['layers']} layers"
    return f"{where(result)}\n\n{markers.table([shape, *columns.values()], rows, numbers=True)}"


def disk(result: dict[str, Any]) -> str:
    """Render a result of disk.py: GB/s to a disk, or to memory."""
    parts = [where(result)]
    served = "" if result["shape"] == "none" else f", {result['shape']} served"
    cores = f", {result['cores']} cores" if "cores" in result else ""
    # A result of one folder has no places.
    places = result.get("places") or {result.get("folder", "disk"): result.get("ways", {})}
    for place, ways in places.items():
        rows = [
            [way, f"{one['gb_s']:.2f}", f"{one['gb_s'] / ways['dd']['gb_s']:.0%}"]
            for way, one in ways.items()
        ]
        head = [f"to {place}, {result['gib']} GiB{cores}{served}", "GB/s", "of dd"]
        parts.append(markers.table(head, rows, numbers=True))
    return "\n\n".join(parts)


def dataset(result: dict[str, Any]) -> str:
    """Render a result of dataset.py: GB/s of reading a store, and of a plain read of its files."""
    parts = [where(result)]
    for workload, ways in result["workloads"].items():
        rows = [
            [
                name,
                *(
                    cell
                    for unit in ("gb_s", "gb_cpu_s")
                    for cell in (f"{one[unit]:.2f}", f"{one[f'{unit}_of_plain']:.0%}")
                ),
            ]
            for name, one in ways.items()
        ]
        about = f"{result['gib']:g} GiB of {result['codec']}, {workload}"
        head = [
            f"{about}, {result['cores']} cores, load {result['load']:.1f}",
            *("GB/s", "of plain", "GB per second of CPU time", "of plain"),
        ]
        parts.append(markers.table(head, rows, numbers=True))
    return "\n\n".join(parts)


def stream(result: dict[str, Any]) -> str:
    """Render a result of stream.py: prompts per second in steady state, by variant."""
    parts = [where(result)]
    for shape, measured in result["shapes"].items():
        for work, variants in measured.items():
            if not isinstance(variants, dict) or "plain" not in variants:
                continue
            rows = [
                [
                    name,
                    f"{one['prompts_per_s']:,.1f}",
                    percent(1 / one["of_plain"]),
                    f"{one['gb_s']:.2f}" if one["gb_s"] else "",
                ]
                for name, one in variants.items()
            ]
            head = [
                f"{shape}, runner {measured['engine']['runner']}, {work} of {result['length']} "
                f"tokens, {result['in_flight']} in flight",
                "prompts/s",
                "added time",
                "GB/s to the caller",
            ]
            parts.append(markers.table(head, rows, numbers=True))
    return "\n\n".join(parts)


def sweep(result: dict[str, Any]) -> str:
    """Render a result of sweep.py: time of a cell, by variant."""
    parts = [where(result)]
    for shape, measured in result["shapes"].items():
        for work, variants in measured.items():
            if not isinstance(variants, dict) or "llm.sweep" not in variants:
                continue
            best = variants["llm.sweep"]["median_s"]
            rows = [
                [
                    name,
                    f"{one['cells']:,}",
                    f"{one['median_s'] * 1e3:.2f} ms",
                    f"{1 / one['median_s']:,.0f}",
                    f"{one['median_s'] / best:.1f} ×",
                    "" if name == "llm.sweep" else f"{one['differs_by']:.1e}",
                ]
                for name, one in variants.items()
            ]
            cached = variants["llm.sweep"]["cached"]
            head = [
                f"{shape}, {work}, {cached:.0%} from the prefix cache",
                "cells",
                "time of a cell",
                "cells/s",
                "relative to llm.sweep",
                f"differs by, of {variants['llm.sweep']['spread']:.2g}",
            ]
            parts.append(markers.table(head, rows, numbers=True))
    return "\n\n".join(parts)


def identical(result: dict[str, Any]) -> str:
    """Render a result of identical.py: answers that differ from plain vLLM's."""
    head = [
        f"{result['prompts']} prompts, compared with plain vLLM",
        "tokens",
        "prompts with other tokens",
        "prompts with other logprobs",
        "largest difference",
    ]
    rows = [
        [
            f"{shape}, runner {measured['engine']['runner']}, {name}",
            f"{one['tokens']:,}",
            str(one["other_tokens"]),
            str(one["other_logprobs"]),
            f"{one['largest_difference']:.2g}",
        ]
        for shape, measured in result["shapes"].items()
        for name, one in measured["compared"].items()
    ]
    return f"{where(result)}\n\n{markers.table(head, rows, numbers=True)}"


def request_cost(result: dict[str, Any]) -> str:
    """Render a result of request_cost.py: CPU time of a request in each of the server's processes,
    by kind.
    """
    kinds = result["kinds"]
    processes = [
        name for name in next(iter(kinds.values())) if not name.endswith(("request", "_s"))
    ]
    rows = [
        [
            kind,
            *(f"{one[name]:.2f} ms" for name in processes),
            f"{one['steps_per_request']:.2f}",
            f"{one['requests_per_s']:.0f}",
        ]
        for kind, one in kinds.items()
    ]
    about = (
        f"{result['layers']} layers of {result['hidden']}, {result['prompt']} + {result['tokens']} "
        f"tokens, {result['clients']} clients"
    )
    head = [about, *processes, "steps of a request", "requests/s"]
    return f"{where(result)}\n\n{markers.table(head, rows, numbers=True)}"


def remote_bridge(result: dict[str, Any]) -> str:
    """Render a result of remote_bridge.py: time of TransformerLens's `run_with_cache`."""
    parts = [where(result)]
    ranks = f", TP {result['ranks']}" if result.get("ranks", 1) > 1 else ""
    for shape, measured in result["shapes"].items():
        rows = [
            [
                work,
                *(f"{each['median_s'] * 1e3:.1f} ms" for each in (ours, theirs)),
                f"{theirs['times']:.1f} ×",
                f"{theirs['differs_by']:.1e}",
            ]
            for work, variants in measured.items()
            if (ours := variants.get("midstream")) and (theirs := variants.get("boot_vllm"))
        ]
        head = [f"{shape}{ranks}", "midstream", "boot_vllm", "times", "differs by"]
        parts.append(markers.table(head, rows, numbers=True))
    return "\n\n".join(parts)


def _cell(variants: dict[str, dict[str, float]], name: str) -> str:
    if name not in variants:
        return ""
    median = variants[name]["median_s"]
    if name == "plain" or "plain" not in variants:
        return f"{median * 1e3:.3f} ms"
    return percent(added(variants, name))


def parity(result: dict[str, Any]) -> str:
    """Render a result of parity.py: relative errors against transformers."""
    lines = [
        f"{where(result)}; SmolLM2-135M-Instruct, every site of every layer, prompt and 12 "
        "generated tokens",
        "",
        "| dtype | prompt | comparison | median | worst | taps within 2 % |",
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


def reuse_chat(result: dict[str, Any]) -> str:
    """Render a result of reuse_chat.py: seconds of a chat, by what is captured."""
    rows = [
        [
            kind,
            f"{one['seconds']:.1f} s",
            f"{one['last_turn_seconds']:.2f} s",
            f"{one['cached_tokens']:,} of {one['prompt_tokens']:,}",
            f"{one['reused_rows']:,}",
        ]
        for kind, one in result["kinds"].items()
    ]
    head = [
        f"{result['model']}, {result['turns']} turns, every token at layers: {result['layers']}",
        "chat",
        "last turn",
        "prompt tokens from the cache",
        "rows reused",
    ]
    return f"{where(result)}\n\n{markers.table(head, rows, numbers=True)}"


def attribution(result: dict[str, Any]) -> str:
    """Render a result of attribution.py: agreement of estimates with patches, by pair."""
    pairs = result["pairs"]
    sites = list(next(iter(pairs.values()))["correlation"]) if pairs else []
    rows = [
        [
            name,
            f"{one['cells']:,}",
            *(f"{one['correlation'][site]:.2f}" for site in sites),
            f"{one['found']} of {one['top']}",
        ]
        for name, one in pairs.items()
    ]
    columns = [f"correlation at `{site}`" for site in sites]
    head = [f"{result['model']}, prompts", "cells", *columns, "largest effects among the estimates"]
    return "\n\n".join([where(result), markers.table(head, rows, numbers=True)])


RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "against": against,
    "attribution": attribution,
    "capture_cost": capture_cost,
    "layer_scaling": capture_cost,
    "stream": stream,
    "sweep": sweep,
    "remote_bridge": remote_bridge,
    "identical": identical,
    "disk": disk,
    "dataset": dataset,
    "serving": serving,
    "transport": transport,
    "step_cost": step_cost,
    "request_cost": request_cost,
    "reuse_chat": reuse_chat,
    # These have the same form: medians of variants by workload.
    **dict.fromkeys(("overhead", "overhead_sites", "overhead_tp", "flat_cost"), overhead),
    **dict.fromkeys(("attention_cost", "lens_cost", "sae_cost", "acting", "guards"), overhead),
    "parity": parity,
    "probes": probes,
    "draft_head": draft_head,
}


if __name__ == "__main__":
    sys.exit(markers.main(pages(), __doc__))
