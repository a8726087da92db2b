"""Every list that a client can send: how to make it of any length, and what it costs."""

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from midstream.lab.server import fit_body, sweep_body
from midstream.plan.control.act import Flag, Stop, Switch
from midstream.plan.control.control_laws import Threshold
from midstream.plan.control.controller import Controller
from midstream.plan.operations import KINDS_BY_OP
from midstream.plan.positions.items import VALUES
from midstream.plan.probe import Probe
from midstream.plan.readouts.attention import Attention, Mass, TopKeys
from midstream.plan.readouts.capture import Capture
from midstream.plan.readouts.features import Features
from midstream.plan.readouts.lens import Lens
from midstream.plan.readouts.logits import Logits
from midstream.plan.readouts.norms import Norms
from midstream.server.request_field import read_field

WIDTH = 3
V = [1.0, 2.0, 2.0]
ONE = {"layer": 1}

# A value of each class that a plan is read as.
FORMS: dict[type, dict[str, Any]] = {
    Capture: {"layers": [1]},
    Attention: {"layers": [1], "reduce": "entropy", "queries": [0]},
    Features: {"sae": "a", "top": 3},
    Lens: {"layers": [1], "top": 3},
    Logits: {"top": 3},
    Norms: {"norms": True, "layers": [1]},
    Probe: {"direction": V, "layer": 1, "name": "p"},
    KINDS_BY_OP["steer"]: {"op": "steer", "vector": V, "layer": 1},
    KINDS_BY_OP["ablate"]: {"op": "ablate", "directions": V, "layer": 1},
    KINDS_BY_OP["clamp"]: {"op": "clamp", "direction": V, "layer": 1, "low": 0},
    KINDS_BY_OP["feature"]: {"op": "feature", "encoder": V, "decoder": V, "layer": 1},
    KINDS_BY_OP["reconstruct"]: {"op": "reconstruct", "sae": "a"},
    KINDS_BY_OP["affine"]: {"op": "affine", "read": [V], "write": [V], "layer": 1},
    KINDS_BY_OP["loreft"]: {
        "op": "loreft", "rotation": [[1, 0, 0]], "weight": [V], "bias": [0.0], "layer": 1,
    },
    KINDS_BY_OP["replace"]: {"op": "replace", "rows": V, "layer": 1},
    KINDS_BY_OP["scale"]: {"op": "scale", "factor": 2.0, "layer": 1},
    KINDS_BY_OP["route"]: {"op": "route", "activate": [1], "layer": 1},
    KINDS_BY_OP["bias"]: {"op": "bias", "tokens": {"5": 1.0}},
    KINDS_BY_OP["gate"]: {
        "op": "gate",
        "edit": {"op": "scale", "factor": 2.0, "layer": 1},
        "probe": {"direction": V, "layer": 1},
        "threshold": 0.0,
    },
}  # fmt: skip
CAPTURES = (Capture, Attention, Features, Lens, Logits, Norms)


def field_of(cls: type, value: dict[str, Any]) -> dict[str, Any]:
    """Return a field `midstream` with one value of a class."""
    if cls in CAPTURES:
        return {"capture": value}
    return {"probes": value} if cls is Probe else {"edits": value}


def texts(count: int) -> list[Any]:
    return [{"text": f"w{nth}"} for nth in range(count)]


def numbers(count: int) -> list[float]:
    return [0.5] * count


def rows(count: int) -> list[list[float]]:
    return [[float(nth), 1.0, 2.0] for nth in range(count)]


def whole(count: int) -> list[int]:
    return list(range(count))


def tokens(count: int) -> dict[str, float]:
    return {str(nth): 1.0 for nth in range(count)}


def edits(count: int) -> list[Any]:
    return [{"op": "scale", "factor": 2.0, "layer": 1, "positions": [nth]} for nth in range(count)]


def mlp(count: int) -> dict[str, Any]:
    return {"hidden": rows(count), "hidden_bias": numbers(count), "output": numbers(count)}


def classes(count: int) -> dict[str, Any]:
    names = [f"c{nth}" for nth in range(count)]
    return {"weights": rows(count), "bias": numbers(count), "names": names}


def sets(count: int) -> dict[str, Any]:
    return {"declared": "law", "edits": {f"s{nth}": edits(2) for nth in range(count)}}


def metadata(count: int) -> dict[str, Any]:
    return {f"k{nth}": nth for nth in range(count)}


# A list of each length, by the name of its field; a class's own comes first.
LISTS: dict[str, Callable[[int], Any]] = {
    "Mass.positions": texts, "Positions.include": whole, "TokenIds.ids": whole,
    "positions": whole, "queries": whole, "exclude": texts, "layer": whole, "layers": whole,
    "site": lambda count: ["resid_post"] * count, "sites": lambda count: ["resid_post"] * count,
    "head": lambda count: [nth % 3 for nth in range(count)],
    "heads": lambda count: [nth % 3 for nth in range(count)],
    "dims": whole, "index": whole, "features": whole,
    "vector": numbers, "direction": numbers, "encoder": numbers, "decoder": numbers,
    "decoder_bias": numbers, "directions": rows, "subspace": rows, "rows": rows, "read": rows,
    "write": rows, "rotation": rows, "weight": rows, "matrix": rows, "Affine.bias": numbers,
    "LoReFT.bias": numbers, "activate": whole, "deactivate": whole, "Route.bias": tokens,
    "Bias.tokens": tokens, "Lens.tokens": whole, "Logits.tokens": whole, "token": whole,
    "Scale.factor": numbers, "shift": numbers, "value": numbers, "metadata": metadata, "mlp": mlp,
    "classes": classes,
    "hidden": lambda count: {"weights": rows(count), "bias": numbers(count)},
    "attention_pool": lambda count: {"query": rows(count), "value": rows(count)},
    "Attention.reduce": lambda count: {"mass": {"positions": whole(count)}},
    "attention": lambda count: {"mass": {"positions": whole(count)}},
    "act": lambda count: {"switch": {"above": 0.5, "edits": edits(count)}},
    "edit": lambda count: {"op": "replace", "rows": rows(count), "layer": 1,
                           "positions": [{"slice": [0, count]}]},
    "probe": lambda count: {"direction": rows(count), "layer": whole(count)},
    "Switch.edits": lambda count: edits(count), "Controller.edits": sets,
    "strength": numbers,
}  # fmt: skip
# Fields that take no list: a list there is refused. `bias` and `scale` of other classes, too.
SINGLE = frozenset([
    "phase", "norm", "scale", "lens", "low", "high", "mode", "threshold", "sae", "error", "alpha",
    "bias", "name", "codec", "sink", "tag", "request_id", "stream", "layout", "max_rows", "reuse",
    "reduce", "top", "kind", "sharpness", "hold", "smooth", "release", "k", "return_",
    "link", "pool",
])  # fmt: skip


def fields() -> list[tuple[type, str]]:
    """Return each field of the classes of `FORMS`."""
    return [
        (cls, name)
        for cls in FORMS
        for name in list(inspect.signature(cls.__init__).parameters)[1:]
    ]


def list_of(cls: type, name: str) -> Callable[[int], Any] | None:
    """Return what makes a field's list; None: the field takes no list."""
    found = LISTS.get(f"{cls.__name__}.{name}")
    return found if found is not None else None if name in SINGLE else LISTS.get(name)


# What is read by its own parser: each is a part of a field above, or of a body below.
PARTS: dict[type, str] = {
    Mass: "Attention.reduce", TopKeys: "Attention.reduce", Controller: "Controller.edits",
    Threshold: "Controller.edits",
    Switch: "act", Stop: "act", Flag: "act", **dict.fromkeys(VALUES, "positions"),
}  # fmt: skip

# The lists of other bodies, by route and field.
BODIES: dict[str, dict[str, Callable[[int], Any]]] = {
    "sweep": {
        "prompt": whole, "source": whole, "layers": whole, "exclude": texts, "positions": whole,
        "sites": lambda count: ["resid_post"] * count, "heads": whole, "features": whole,
        "groups": lambda count: {f"g{nth}": [nth % 60] for nth in range(count)},
        "metric": lambda count: {"logit_diff": whole(count)},
        "align": lambda count: [[nth, nth] for nth in range(count)], "mask": whole,
    },
    "fit": {
        "positive": lambda count: ["a"] * count, "negative": lambda count: ["a"] * count,
        "layers": whole, "positions": whole, "groups": whole,
    },
}  # fmt: skip
SINGLE_OF_BODIES = {
    "sweep": frozenset([
        "alpha", "repeats", "sae", "model", "stream", "add_generation_prompt",
        "continue_final_message", "chat_template_kwargs",
    ]),
    "fit": frozenset(["method", "site", "reduce", "folds", "seed", "name", "model"]),
}  # fmt: skip
KNOWN = {"sweep": sweep_body._KNOWN, "fit": fit_body._KNOWN}
BODY = {
    "sweep": {"prompt": "abc", "source": 0, "metric": "kl"},
    "fit": {"positive": ["a", "b"], "negative": ["c", "d"]},
}
READ: dict[str, Callable[[Any], Any]] = {
    "sweep": sweep_body.read_sweep,
    "fit": lambda body: fit_body.read_fit(body, 4096),
    "midstream": read_field,
}


def steps(work: Callable[[], object]) -> tuple[int, Exception | None]:
    """Return the number of Python lines that some work ran, and the error that it ended with.

    A line counts each time that it begins or is jumped back to, as in a comprehension.
    """
    count = 0

    def trace(_frame: FrameType, _event: str, _: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before, error = sys.gettrace(), None
    sys.settrace(trace)
    try:
        work()
    except Exception as found:  # noqa: BLE001 - refusals are results here
        error = found
    finally:
        sys.settrace(before)
    return count, error
