"""Capture settings in the environment variables `VLLM_ACT_*`, for the worker class in
`midstream.worker`.

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
import pickletools
import re
from collections.abc import Mapping

from midstream.config.config import Config
from midstream.errors import ConfigError
from midstream.plan.readouts.capture import GATHERED, SHARDED
from midstream.validation import read_word, setting

WORKER_CLASS = "midstream.worker.CaptureWorker"
MODES = ("rp8", "full8", "topk8", "raw")
MAX_WIDTH = 16384
# Every computed token of every request, as files.
SINK = "npz"
CAPTURE = {"layers": "all", "sites": "resid_post", "positions": "all"}


def from_act_environment(environment: Mapping[str, str] = os.environ) -> Config | None:
    """Return the settings of the variables; None if capturing is off."""
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


def is_capture_worker(worker_cls: object) -> bool:
    """Return whether `worker_cls`, a name, class or its pickle (not unpickled), is midstream's."""
    if isinstance(worker_cls, type):
        return f"{worker_cls.__module__}.{worker_cls.__qualname__}" == WORKER_CLASS
    if isinstance(worker_cls, bytes):
        try:
            names = [value for _, value, _ in pickletools.genops(worker_cls) if type(value) is str]
        except ValueError:
            return False
        return ".".join(names) == WORKER_CLASS
    return worker_cls == WORKER_CLASS


def _word(environment: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    """Return a variable's value; the first of the known values if it is unset or empty."""
    with setting(name):
        return read_word(environment.get(name, "").strip() or known[0], known)
