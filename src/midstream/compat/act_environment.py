"""The mode that environment variables drive: `VLLM_ACT_*`, with the worker class that
`midstream.worker` names.

| variable | values | default |
|---|---|---|
| `VLLM_ACT_CAPTURE` | `1`: capture; unset, empty or `0`: do not | `0` |
| `VLLM_ACT_MODE` | `rp8`, `full8`, `topk8`, `raw`: the codec | `rp8` |
| `VLLM_ACT_RP_K` | 1 to 16384, the width of `rp8`'s sketches | `512` |
| `VLLM_ACT_RETURN` | `sharded`, `gathered` | `sharded` |
| `VLLM_ACT_OUTDIR` | a folder | `/tmp/vllm_activations` |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from midstream.config.config import Config
from midstream.errors import ConfigError
from midstream.spec.capture import GATHERED, SHARDED

WORKER_CLASS = "midstream.worker.CaptureWorker"
MODES = ("rp8", "full8", "topk8", "raw")
MAX_WIDTH = 16384
# As files, of every request, all that it computes.
SINK = "npz"
CAPTURE = {"layers": "all", "sites": "resid_post", "positions": "all"}


def from_act_environment(environment: Mapping[str, str] = os.environ) -> Config | None:
    """The settings that the variables stand for; None: nothing is to be captured.

    Raises:
        ConfigError: a variable has a value that is none of its own.
    """
    if _word(environment, "VLLM_ACT_CAPTURE", ("0", "1")) == "0":
        return None
    mode = _word(environment, "VLLM_ACT_MODE", MODES)
    width = environment.get("VLLM_ACT_RP_K", "").strip() or "512"
    folder = environment.get("VLLM_ACT_OUTDIR", "").strip() or "/tmp/vllm_activations"
    if not re.fullmatch(r"[1-9][0-9]{0,4}", width) or int(width) > MAX_WIDTH:
        raise ConfigError(f"VLLM_ACT_RP_K: expected 1 to {MAX_WIDTH}, got {width!r}")
    return Config.parse(
        {
            "sites": [CAPTURE["sites"]],
            "return": _word(environment, "VLLM_ACT_RETURN", (SHARDED, GATHERED)),
            "codec": f"rp8:k={width}" if mode == "rp8" else mode,
            "sinks": {SINK: {"root": folder, "capture": CAPTURE}},
        }
    )


def _word(environment: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    """A variable's value; the first of the known ones where it is unset or empty."""
    value = environment.get(name, "").strip() or known[0]
    if value not in known:
        raise ConfigError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
    return value
