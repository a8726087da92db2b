"""Writer of the blocks of docs/scaling.md: costs of rows, and outputs of `midstream plan`.

scripts/scaling_table.py [--check]
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import markers
import torch
from typer.testing import CliRunner

from midstream.cli.app import app
from midstream.codecs import parse_codec
from midstream.tools.capacity.advice import USUAL
from midstream.tools.capacity.rates import (
    NARROW,
    WIDE,
    Workload,
    encoder_rate,
    known_rates,
    row_seconds,
)
from midstream.tools.capacity.shape import NAMED, read_model

# By the name of the block.
PLANS = {"70b": "--model llama-70b --tp 8 --tokens 1000000000"}


def pages() -> dict[str, dict[str, str]]:
    """Return every block, by page and name."""
    shown = {name: plan(text) for name, text in PLANS.items()}
    made = {"row costs": row_costs(), "rates": rates(), "named shapes": named_shapes()}
    return {"docs/scaling.md": made | shown}


def row_costs() -> str:
    """Return the table of the cost of one row, by codec, at the two measured widths."""
    rows = []
    for spec in USUAL:
        codec = parse_codec(spec)
        name = spec.partition(":")[0]
        encoder = encoder_rate(name)
        moved = "" if encoder is None else f"{WIDE.vector_bytes / encoder.value * 1e9:.0f} ns"
        rows.append(
            [
                f"`{spec}`",
                *(
                    _cost(codec.row_bytes(_width(one), torch.bfloat16), name, one)
                    for one in (NARROW, WIDE)
                ),
                moved,
            ]
        )
    head = [
        "codec",
        f"{_width(NARROW):,} wide, {NARROW.layers} layers",
        f"{_width(WIDE):,} wide, {WIDE.layers} layers",
        "encoding alone, at the latter",
    ]
    return markers.table(head, rows, numbers=True)


def rates() -> str:
    """Return the table of the other rates of the estimates."""
    known = known_rates()
    rows = [
        [
            "prompt processing of a GPU",
            f"{known.gpu_flops.value / 1e12:,.0f} TFLOP/s",
            known.gpu_flops,
        ],
        ["copies from a GPU to the host", _gb(known.bus.value), known.bus],
        ["host time of a step", f"{known.step.value * 1e6:,.0f} µs", known.step],
        ["front-end time of a request", f"{known.request.value * 1e3:.2f} ms", known.request],
        ["front end, reading rows", _gb(known.reader.value), known.reader],
        ["store writer of an engine", _gb(known.writer.value), known.writer],
        ["network of a machine", _gb(known.network.value), known.network],
        ["store, total", _gb(known.store.value), known.store],
        [
            "multi-GPU efficiency",
            f"{known.efficiency.value:.0%}",
            known.efficiency,
        ],
        ["memory of a GPU", f"{known.gpu_memory.value / 1e9:.0f} GB", known.gpu_memory],
    ]
    table = [[str(what), str(value), one.basis, one.source] for what, value, one in rows]
    return markers.table(["rate", "value", "basis", "source"], table)


def named_shapes() -> str:
    """Return the table of the named model shapes."""
    rows = []
    for name in NAMED:
        size = read_model(name)
        assert size.weights is not None
        rows.append(
            [
                f"`{name}`",
                f"{size.num_layers}",
                f"{size.hidden_size:,}",
                f"{size.weights.total / 1e9:.3g} B",
                f"{size.weights.met / 1e9:.3g} B",
            ]
        )
    head = ["name", "layers", "width", "weights", "active per token, without embeddings"]
    return markers.table(head, rows, numbers=True)


def plan(arguments: str) -> str:
    """Return a `midstream plan` command and its output."""
    done = CliRunner().invoke(app, ["plan", *shlex.split(arguments)])
    if done.exit_code:
        raise RuntimeError(f"midstream plan {arguments}: {done.output}")
    return f"```bash\nmidstream plan {arguments}\n```\n\n```text\n{done.output.rstrip()}\n```"


def _cost(row_bytes: int, codec: str, work: Workload) -> str:
    return f"{row_bytes:,} B, {row_seconds(codec, work.vector_bytes).value * 1e9:.0f} ns"


def _width(work: Workload) -> int:
    return work.vector_bytes // 2  # bfloat16


def _gb(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


if __name__ == "__main__":
    sys.exit(markers.main(pages(), __doc__))
