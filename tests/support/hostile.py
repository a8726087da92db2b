"""Plans that must be rejected: valid plans, each with one defect of a known kind."""

import base64
import json
import random
import string
import struct
from collections.abc import Callable, Iterator
from typing import Any

Json = Any

# Values that no field of a plan can have, wherever they stand.
POISON: list[Json] = [
    {"💥": 1},
    [[{"💥": 1}]],
    float("nan"),
    float("inf"),
    -float("inf"),
    {"__class__": "os.system", "args": ["true"]},
    [None, {"💥": 1}],
    {"slice": [0, None, 0]},
    {"f32": "!!!"},
    {"tokens": []},
    2**200,
]
_GARBAGE = [
    "",
    "nul",
    "{",
    "}",
    "[]]",
    '{"capture": }',
    "{'edits': 1}",
    "\x00",
    "\ufeff{}",
    "1e999",
]


def good_plan(draw: random.Random, width: int, layers: int, prompt: int) -> dict[str, Json]:
    """A plan that the engine would take: of layers, sites and positions that are there."""

    def vector() -> Json:
        numbers = [draw.randint(-32, 32) / 8 for _ in range(width - 1)] + [1.0]
        if draw.random() < 0.3:
            packed = base64.b64encode(struct.pack(f"<{width}f", *numbers)).decode()
            return {"f32": packed}
        return numbers

    def where() -> dict[str, Json]:
        found: dict[str, Json] = {"layer": draw.choice([0, layers - 1, -1, [0, 1], "all"])}
        if draw.random() < 0.5:
            found["site"] = draw.choice(["resid_post", "post_block", ["resid_post"]])
        kind = draw.randrange(4)
        if kind == 1:
            found["positions"] = draw.choice(["prompt", 0, [0, prompt - 1], {"slice": [1, None]}])
        elif kind == 2:
            found["phase"] = draw.choice(["prompt", "generated"])
        elif kind == 3:
            found |= {"positions": {"tokens": [3, 5]}, "phase": "generated"}
        return found

    def edit() -> dict[str, Json]:
        scale = draw.randint(-8, 8) / 4
        made: list[Callable[[], dict[str, Json]]] = [
            lambda: {"op": "steer", "vector": vector(), "scale": scale},
            lambda: {"op": "steer", "vector": vector(), "norm": "match"},
            lambda: {"op": "ablate", "directions": vector()},
            lambda: {"op": "clamp", "direction": vector(), "low": -1.0, "high": 0.5},
            lambda: {"op": "scale", "factor": scale},
        ]
        return draw.choice(made)() | where()

    plan: dict[str, Json] = {}
    if draw.random() < 0.6:
        reads = {"layers": draw.choice([0, "all", [0, layers - 1]]), "positions": "all"}
        plan["capture"] = reads if draw.random() < 0.5 else [reads, reads | {"positions": [0]}]
    if draw.random() < 0.7 or not plan:
        plan["edits"] = [edit() for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.4:
        plan["probes"] = [{"direction": vector(), "layer": 0, "name": "p"}]
    return plan


def hostile_plans(
    seed: int, count: int, *, width: int = 4, layers: int = 3, prompt: int = 6
) -> Iterator[tuple[str, Json]]:
    """(kind of defect, plan) of plans that no parser may take."""
    draw = random.Random(seed)
    for nth in range(count):
        kind, spoil = DEFECTS[nth % len(DEFECTS)]
        yield kind, spoil(draw, good_plan(draw, width, layers, prompt))


# ---------------------------------------------------------------- defects


def _nodes(value: Json, found: list[tuple[Json, Any]]) -> list[tuple[Json, Any]]:
    """Every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        found.append((value, key))
        if isinstance(inner, (dict, list)):
            _nodes(inner, found)
    return found


def _poisoned(draw: random.Random, plan: Json) -> Json:
    holder, key = draw.choice(_nodes(plan, []))
    holder[key] = draw.choice(POISON)
    return plan


def _unknown_field(draw: random.Random, plan: Json) -> Json:
    dicts = [plan, *(v[k] for v, k in _nodes(plan, []) if isinstance(v[k], dict))]
    name = "".join(draw.choices(string.ascii_lowercase, k=6)) + draw.choice(
        ["_", "é", "\x00", "💥"]
    )
    draw.choice(dicts)[name] = draw.choice([1, None, "x", []])
    return plan


def _part(draw: random.Random, plan: Json) -> dict[str, Json]:
    """One capture, edit or probe of a plan."""
    parts = [
        one for value in plan.values() for one in (value if isinstance(value, list) else [value])
    ]
    found: dict[str, Json] = draw.choice(parts)
    return found


def _missing_field(draw: random.Random, plan: Json) -> Json:
    part = _part(draw, plan)
    needed = ["op", "layer", "layers", "vector", "directions", "direction", "factor"]
    del part[draw.choice([name for name in needed if name in part])]
    return plan


def _renamed_field(draw: random.Random, plan: Json) -> Json:
    part = _part(draw, plan)
    name = draw.choice(list(part))
    part[draw.choice([name + "s_", name.upper(), " " + name])] = part.pop(name)
    return plan


def _huge_number(draw: random.Random, plan: Json) -> Json:
    part = _part(draw, plan)
    key = "layers" if "layers" in part else "layer"
    part[key] = draw.choice([2**31 + 1, -(2**63), 10**300, [0, 2**64]])
    return plan


def _float_overflow(draw: random.Random, plan: Json) -> Json:
    vector = [3.5e38, *[0.0] * 3]
    plan["probes"] = [{"direction": draw.choice([vector, [1e308] * 4]), "layer": 0, "name": "big"}]
    return plan


def _too_many(draw: random.Random, plan: Json) -> Json:
    if draw.random() < 0.5:
        plan["capture"] = {"layers": list(range(5000))}
    else:
        plan["capture"] = {"layers": 0, "positions": list(range(5000))}
    return plan


def _twice(draw: random.Random, plan: Json) -> Json:
    which = draw.randrange(4)
    if which == 0:
        plan["capture"] = [{"layers": [0, 1]}, {"layers": [0, 1]}]
    elif which == 1:
        probe = {"direction": [1.0, 0, 0, 0], "layer": 0, "name": "same"}
        plan["probes"] = [probe, {**probe, "layer": 1}]
    elif which == 2:
        plan["capture"] = {"layers": 0, "positions": [4, 4]}
    else:
        plan["capture"] = {"layers": [1, 1]}
    return plan


def _empty(draw: random.Random, plan: Json) -> Json:
    which = draw.choice([*plan, ""])
    if not which:
        return draw.choice([{}, [], "", b"", 0, 1.5, True, [plan], (1, 2), set(), "all", object()])
    # `"edits": []` is a plan: such a request can be updated.
    nothing = [] if which == "edits" else [[]]
    # A layer, and "all" of them, are short forms of a capture.
    plan[which] = draw.choice([*nothing, {}, None, "", 0.5, "alle"])
    return plan


def _bad_words(draw: random.Random, plan: Json) -> Json:
    part = _part(draw, plan)
    name = draw.choice(["phase", "positions", "site", "sites", "op", "norm"])
    part[name] = draw.choice(
        ["nonsense", "RESID_POST", "prompt ", "last\n", "resid", "🙂", "__proto__"]
    )
    return plan


def _bad_bytes(draw: random.Random, plan: Json) -> Json:
    data: Json = draw.choice(
        ["AAAAA", "not base64", "=" * 8, "", 7, None, "\ud800", "A" * 21, ["AAAAAA=="], "AADAfw=="]
    )
    vector: dict[str, Json] = {"f32": data}
    if draw.random() < 0.3:
        vector = {"f32": "AACAPw==", draw.choice(["shape", "f16", "pickle"]): data}
    plan["edits"] = {"op": "steer", "vector": vector, "layer": 0}
    return plan


def _text(draw: random.Random, plan: Json) -> Json:
    text = json.dumps(plan)
    which = draw.randrange(7)
    if which == 0:
        return text[: draw.randrange(len(text))]
    if which == 1:
        return text + draw.choice(["x", "}", "\x00", "{}"])
    if which == 2:
        first = next(iter(plan))
        return "{" + f"{json.dumps(first)}: {json.dumps(plan[first])}, " + text[1:]
    if which == 3:
        return draw.choice(_GARBAGE)
    if which == 4:
        return draw.choice(["[", '{"edits":', '{"edits":[']) * draw.randint(2000, 60000)
    if which == 5:
        return text.encode() + bytes([draw.randrange(128, 256)])
    place = draw.randrange(1, len(text))
    return (text[:place] + "\x01" + text[place:]).encode("utf-16")


DEFECTS: list[tuple[str, Callable[[random.Random, Json], Json]]] = [
    ("a value of no field", _poisoned),
    ("an unknown field", _unknown_field),
    ("a missing field", _missing_field),
    ("a renamed field", _renamed_field),
    ("a number that is too large", _huge_number),
    ("a number that float32 does not have", _float_overflow),
    ("too many", _too_many),
    ("the same twice", _twice),
    ("nothing, or no plan", _empty),
    ("words that nobody knows", _bad_words),
    ("a packed vector that is none", _bad_bytes),
    ("text that is no JSON", _text),
]
