"""The Triton kernels compile for GPUs, on a machine without one."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from midstream.ops import layout

pytestmark = pytest.mark.engine  # compiles
triton = pytest.importorskip("triton")

INTEGERS = ("tokens", "ids", "tally", "table", "instructions", "lists", "scans", "states")
INTEGERS += ("requests", "positions", "key_heads")
FLOATS = ("numbers", "bank", "scores", "mapped", "decoded", "weights", "codes", "slopes", "out")
OF_MODEL = ("hidden", "residual", "ring", "queries", "keys")
SCALARS = {"scale": "fp32", "cap": "fp32"}
# A row of 4096 in bfloat16, with a second half of the stream.
ROW = {"width": 4096, "unit": 4096, "has_residual": True}
TILES = {"tile_rows": 16, "tile_columns": 32, "depth": 128, "precision": "bf16x3"}
LIMIT = {"block": 4096, "limit": layout.limit_of("bfloat16")}
SITE_CONSTANTS = {"width", "unit", "block", "limit", "dependent"}
SITE = {**ROW, **LIMIT, "has_maps": True, "has_saes": True}


def _kernels() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Each kernel with its constants and the options of its launch."""
    from midstream.ops.map_kernel import map_kernel
    from midstream.ops.sae.kernel import change_kernel, decode_kernel, encode_kernel
    from midstream.ops.scan.kernel import scan_kernel
    from midstream.ops.scan.launch import MAX_DEPTH, TILE_ROWS
    from midstream.ops.scan.launch import launch_options as of_scans
    from midstream.ops.site_kernel import site_kernel
    from midstream.ops.site_triton import _launch_options
    from midstream.runtime.worker.readouts.scores_kernel import scores_kernel

    def options(dependent: bool, is_few: bool) -> dict[str, Any]:
        """Those of a launch that are no constants of the kernel."""
        found = _launch_options(4096, 4096, torch.bfloat16, dependent, is_few)
        return {name: value for name, value in found.items() if name not in SITE_CONSTANTS}

    few = {"num_warps": 4}
    scores = {"size": 16, "dim": 80, "padded": 128, "block_rows": 16, "block_keys": 64}
    return {
        "site": (site_kernel, {**SITE, "dependent": False}, options(False, True)),
        "site of many rows": (site_kernel, {**SITE, "dependent": False}, options(False, False)),
        "dependent site": (site_kernel, {**SITE, "dependent": True}, options(True, True)),
        "maps": (map_kernel, {**ROW, **TILES}, few),
        "scan": (
            scan_kernel,
            {**ROW, "kept": 4, "tile": TILE_ROWS, "depth": MAX_DEPTH, "block": 4096},
            of_scans(),
        ),
        "encode": (encode_kernel, {**ROW, **TILES}, few),
        "change": (change_kernel, {"unit": 4096, "block": 1024}, few),
        "decode": (decode_kernel, {**ROW, **TILES}, few),
        "scores": (scores_kernel, {**scores, "has_cap": True, "has_slopes": True}, {}),
    }


def _types(names: list[str], constants: Mapping[str, Any]) -> dict[str, str]:
    """The types of a kernel's arguments, for a model in bfloat16."""
    groups = dict.fromkeys(constants, "constexpr")
    for group, kind in ((INTEGERS, "*i32"), (FLOATS, "*fp32"), (OF_MODEL, "*bf16")):
        groups |= dict.fromkeys(group, kind)
    return {name: groups.get(name, SCALARS.get(name, "i32")) for name in names}


@pytest.mark.parametrize(
    "name",
    [
        "site",
        # The source is that of "site", which has other options.
        pytest.param("site of many rows", marks=pytest.mark.nightly),
        pytest.param("dependent site", marks=pytest.mark.nightly),
        "maps",
        "scan",
        "encode",
        "change",
        "decode",
        "scores",
    ],
)
def test_a_kernel_compiles_for_an_h100(name, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compiled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants, options = _kernels()[name]
    types = _types(kernel.arg_names, constants)
    assert set(constants) <= set(types)
    aligned = {
        (nth,): [["tt.divisibility", 16]]
        for nth, kind in enumerate(types.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, types, constants, aligned)
    target = GPUTarget("cuda", 90, 32)
    found = compiled(source, target=target, options={"num_warps": 8, **options})
    assert found.asm["cubin"]
