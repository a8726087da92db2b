"""Check that no stale graph is loaded, for tests on the CPU and on a GPU."""

import json
from pathlib import Path
from typing import Any

from support.nightly import NIGHTLY
from support.own_process import python

TAPS = [
    {"sites": ["resid_post"], "layers": "all"},
    {"sites": ["resid_mid"], "layers": [1]},
    {"sites": ["resid_post"], "layers": "all"},
]


def run(cache: Path, model: Path, settings: str, args: dict[str, Any]) -> dict[str, Any]:
    """What one engine did, on the shared cache."""
    printed = python(
        "-m", "support.stale", model, settings, json.dumps(args),
        timeout=540, VLLM_CACHE_ROOT=str(cache),
    )  # fmt: skip
    (result,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(result.removeprefix("RESULT "))


def check_no_stale_graph(cache: Path, model: Path, args: dict[str, Any]) -> None:
    """Two engines with other taps; nightly plain vLLM first and last, and the first taps again."""
    first = run(cache, model, "plain", args) if NIGHTLY else None
    plain = [] if first is None else [first["plain"]]
    for settings in TAPS if NIGHTLY else TAPS[:2]:
        # With one model an engine compiles half as much.
        models = "startup" if NIGHTLY else "always"
        found = run(cache, model, json.dumps({**settings, "tapped_model": models}), args)
        wanted = {
            (site, layer)
            for site in settings["sites"]
            for layer in range(len(found["taps"]))
            if settings["layers"] == "all"
        } or {("resid_mid", 1)}
        assert {tuple(tap) for tap in found["taps"]} == wanted
        plain.append(found["plain"])
        # vLLM's own model is found as plain vLLM left it. The third taps are the first ones again.
        again = settings == TAPS[0] and len(plain) > 2
        first = first or found
        assert found["compiled"] == (0 if again else first["compiled"])
        assert abs(found["moved"] - 3.0) < 0.1, "the edit did not reach its own site"
    if NIGHTLY:
        plain.append(run(cache, model, "plain", args)["plain"])
    assert plain == plain[:1] * len(plain)
