"""Every list in the bodies of midstream's routes, of other tools' fields, and of vLLM's bodies as
far as midstream reads them; see `long_lists`.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save
from support.long_lists import V, edits, numbers, rows, texts, whole
from support.others_words import direction, lens_array, packed

from midstream.compat import easysteer, translation, vllm_fork, vllm_lens
from midstream.compat.foreign_fields import _IGNORED
from midstream.config.config import KEY
from midstream.runtime.frontend.request.prompt.tokenized import texts_of
from midstream.server import request_field
from midstream.server.middleware import _parse
from midstream.server.routes import (
    captures,
    compat_steering,
    guards,
    requests,
    steering,
    tokens,
    uploads,
    vectors,
)

Make = Callable[[int], Any]
# Of a field that takes no list.
NONE: dict[str, Make] = {}


def by_layer(count: int) -> dict[str, Any]:
    return {str(nth): V for nth in range(count)}


def everywhere(count: int) -> list[dict[str, Any]]:
    return [{"op": "scale", "factor": 2.0, "layer": 1}] * count


def clamps(count: int) -> list[dict[str, Any]]:
    return [{"vector": V, "max": 4.0}] * count


def names(count: int) -> list[str]:
    return ["calm"] * count


_HOOKS: dict[str, Make] = {
    "layers": lambda n: {"post_block": by_layer(n)},
    "hook points": lambda n: {f"h{nth}": by_layer(1) for nth in range(n)},
    "numbers": lambda n: {"post_block": {"1": numbers(n)}},
    "packed": lambda n: {"post_block": packed([V] * n, whole(n))},
    "scales": lambda n: {"post_block": packed([V] * n, whole(n), scales=numbers(n))},
}
_CLAMPS: dict[str, Make] = {
    "clamps": lambda n: {"post_block": {"1": clamps(n)}},
    "layers": lambda n: {"post_block": {str(nth): clamps(1) for nth in range(n)}},
    "packed": lambda n: {"post_block": packed(
        [V] * n, whole(n), bounds=[[None, 2.0]] * n, strengths=numbers(n))},
}  # fmt: skip
# Fields that are read as another one is, whose forms are all tried.
_AS_HOOKS = {"layers": _HOOKS["layers"]}
_AS_CLAMPS = {"clamps": _CLAMPS["clamps"]}
_TIER: dict[str, Make] = {
    "edits": edits,
    "names": names,
    "probes": lambda n: [
        {"op": "probe", "direction": V, "layer": 1, "name": f"p{nth}"} for nth in range(n)
    ],
    "positions": lambda n: {"op": "scale", "factor": 2.0, "layer": 1, "positions": whole(n)},
    "vectors": lambda n: {"post_block": by_layer(n)},
}
# By method and path of a route, and by field of its body, the forms of the field's lists; the field
# "" is the body as a whole. Sweeps and fits have theirs in `long_lists`.
ROUTES: dict[str, dict[str, dict[str, Make]]] = {
    "PUT /v1/midstream/captures/{name}": {
        "capture": {
            "captures": lambda n: [{"layers": [1], "positions": [nth]} for nth in range(n)],
            "layers": lambda n: {"layers": whole(n)},
            "positions": lambda n: {"layers": [1], "positions": whole(n)},
            "texts": lambda n: {"layers": [1], "exclude": texts(n)},
        },
        "sink": NONE,
    },
    "POST /v1/midstream/captures/{name}/collect": {},
    "PUT /v1/midstream/vectors/{name:path}": {
        "": {
            "layers": by_layer,
            "keys": lambda n: {f"resid_post.{nth}": V for nth in range(n)},
            "one vector": numbers,
            "matrix": lambda n: {"1": rows(n)},
            "edits": lambda n: {"edits": edits(n)},
            "base": lambda n: {"base": edits(n)},
            "prompt": lambda n: {"prompt": edits(n)},
            "generated": lambda n: {"generated": everywhere(n)},
            "safetensors": lambda n: save(
                {f"resid_post.{nth}": np.ones(3, "f4") for nth in range(n)}),
            "gguf": lambda n: gguf(
                [(f"direction.{nth + 1}", 3, 32 * nth) for nth in range(n)], 32 * n),
        },
    },
    "PUT /v1/midstream/steering": {
        "base": _TIER,
        "prompt": {"edits": edits},
        "generated": {"edits": everywhere},
    },
    "PUT /v1/midstream/guards/{name}": {
        "probe": {
            "numbers": lambda n: {"direction": numbers(n), "layer": 1},
            "positions": lambda n: {"direction": V, "layer": 1, "positions": whole(n)},
            "texts": lambda n: {"direction": V, "layer": 1, "positions": texts(n)},
        },
        "edits": {"edits": edits, "everywhere": everywhere},
        "scope": {"models": lambda n: {"models": texts(n)}, "keys": lambda n: {"keys": texts(n)}},
        "training": {
            "edges": lambda n: {"edges": list(range(n)), "counts": [1] * (n + 1)},
            "counts": lambda n: {"edges": [0], "counts": [1] * n},
        },
        "action": NONE, "above": NONE, "below": NONE, "for": NONE, "if_unavailable": NONE,
        "pool": NONE, "message": NONE,
        "output": NONE, "text": NONE, "visible": NONE, "webhook": NONE, "when": NONE,
    },
    "POST /v1/midstream/guards/{name}/promote": {},
    "POST /v1/midstream/guards/{name}/rollback": {"version": NONE},
    "POST /v1/steering/set": {
        "vectors": _HOOKS, "prefill_vectors": _AS_HOOKS, "decode_vectors": _AS_HOOKS,
        "clamps": _CLAMPS, "prefill_clamps": _AS_CLAMPS, "decode_clamps": _AS_CLAMPS,
        "replace": NONE,
    },
    "POST /v1/steering/clear": {},
    "POST /v1/steering/modules/register": {"name": NONE, "vectors": _AS_HOOKS},
    "POST /v1/steering/modules/unregister": {"name": NONE},
    "POST /v1/steering/vectors": {},
    "POST /v1/steering/dynamic": {},
    "POST /v1/midstream/tokens": {"ids": {"ids": whole}},
    "POST /v1/midstream/requests/{id:path}/update": {
        "edits": {
            "edits": edits,
            "positions": lambda n: {"op": "scale", "factor": 2.0, "layer": 1,
                                    "positions": whole(n)},
            "texts": lambda n: {"op": "scale", "factor": 2.0, "layer": 1, "positions": texts(n)},
            "vector": lambda n: {"op": "steer", "vector": numbers(n), "layer": 1},
        },
        "scale": NONE,
    },
}  # fmt: skip
# Routes whose lists are cases of `long_lists.BODIES`.
ELSEWHERE = {"POST /v1/midstream/sweep": "sweep", "POST /v1/midstream/fit": "fit"}
# Fields that a body of a route must have beside the list.
REST: dict[str, dict[str, Any]] = {
    "POST /v1/steering/modules/register": {"name": "m"},
    "POST /v1/steering/modules/unregister": {"name": "m"},
    "PUT /v1/midstream/guards/{name}": {"probe": {"direction": V, "layer": 1}, "above": 1.0},
}


def gguf(tensors: list[tuple[str, int, int]], size: int) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1)
    head += text("general.architecture") + struct.pack("<I", 8) + text("controlvector")
    for name, count, offset in tensors:
        head += text(name) + struct.pack("<IQIQ", 1, count, 0, offset)
    head += bytes(-len(head) % 32)
    return head + np.ones(size // 4, "<f4").tobytes()


def run_route(route: str, server: Any, body: Any) -> None:
    """Do what a route does with a body, but for what vLLM's engine does."""
    if route == "PUT /v1/midstream/vectors/{name:path}":
        read = uploads.read_file if isinstance(body, bytes) else uploads.by_value
        vectors.register_name(server, "m", read(body))
    elif route == "POST /v1/midstream/requests/{id:path}/update":
        requests._read(requests.UpdateBody(**body).edits, {}, server)
    elif route == "PUT /v1/midstream/captures/{name}":
        captures.change("m", captures.ServerCaptureBody(**body), server)
    elif route == "PUT /v1/midstream/guards/{name}":
        form = guards.GuardBody(**body).model_dump(by_alias=True)
        action = {"action": "switch"} if "edits" in body else {}
        server.llm.guards.put("m", {**form, **action})
    elif route == "POST /v1/midstream/tokens":
        texts_of(server.llm, tokens.TokensBody(**body).ids)
    else:
        endpoint, model = {
            "PUT /v1/midstream/steering": (steering.change, steering.Tiers),
            "POST /v1/steering/set": (compat_steering.set_vectors, compat_steering.VectorsBody),
            "POST /v1/steering/modules/register":
                (compat_steering.register, compat_steering.Module),
        }[route]  # fmt: skip
        endpoint(model(**body), server)  # type: ignore[operator]


def declared(route: Any) -> set[str]:
    if route.body_field is not None:
        fields = route.body_field.field_info.annotation.model_fields
        return {about.alias or name for name, about in fields.items()}
    content = (route.openapi_extra or {}).get("requestBody", {}).get("content", {})
    if not content:
        return set()
    return set(content["application/json"]["schema"].get("properties", ())) or {""}


def steered(count: int, **how: Any) -> dict[str, Any]:
    data = direction(dict.fromkeys(range(count), V))
    return {"vectors": [{"data": data, "apply": {"prompt": "all"}, **how}]}


def selecting(name: str) -> Make:
    """Return what makes EasySteer's field with a list in a selector of its clause."""
    phase = name.removeprefix("exclude_").partition("_")[0]

    def make(count: int) -> dict[str, Any]:
        clause = {name: whole(count), **({phase: "all"} if name.startswith("exclude_") else {})}
        return {"vectors": [{"data": direction({1: V}), "apply": clause}]}

    return make


# Lists in fields of other tools, by field and by what grows.
OTHERS: dict[str, dict[str, Make]] = {
    "output_residual_stream": {"layers": whole},
    "apply_steering_vectors": {
        "vectors": lambda n: [{"activations": lens_array([V]), "layer_indices": [1]}] * n,
        "layer_indices": lambda n: [
            {"activations": lens_array([V] * n), "layer_indices": whole(n)}],
        "activations": lambda n: [
            {"activations": lens_array([numbers(n)]), "layer_indices": [1]}],
        "position_indices": lambda n: [
            {"activations": lens_array([[V] * n]), "layer_indices": [1],
             "position_indices": whole(n)}],
        "shape": lambda n: [
            {"activations": {**lens_array([V]), "shape": [1] * n}, "layer_indices": [1]}],
    },
    "steering": {
        "vectors": lambda n: {"conflict": "sequential", "vectors": steered(1)["vectors"] * n},
        "data": steered,
        "layers": lambda n: steered(n, layers=whole(n)),
        "phases": lambda n: {"vectors": [{"data": direction({1: V}),
                                          "apply": {"phases": ["prompt"] * n}}]},
        **{name: selecting(name) for name in easysteer._SELECTORS},
    },
    **dict.fromkeys(vllm_fork.TIERS, _AS_HOOKS),
    **dict.fromkeys(vllm_fork.CLAMPS, _AS_CLAMPS),
    "steering_vectors": _HOOKS,
    "steering_clamps": _CLAMPS,
    **dict.fromkeys(vllm_fork.NAMES, NONE),
    "capture": {
        "consumers": lambda n: {f"s{nth}": {"hooks": {"post_block": [1]}} for nth in range(n)},
        "hooks": lambda n: {"memory": {"hooks": {f"h{nth}": [1] for nth in range(n)}}},
        "layers": lambda n: {"memory": {"hooks": {"post_block": whole(n)}}},
        "positions": lambda n: {"memory": {"hooks": {"post_block": [1]},
                                           "positions": whole(n)}},
    },
    "capture_wait": NONE,
    "patch": {
        "patches": lambda n: [{"layer": 1, "hook": "post_block", "dest_position": nth,
                               "source_inline": 0} for nth in range(n)],
        "patch_vectors": lambda n: [{"layer": 1, "hook": "post_block", "dest_position": 0,
                                     "source_inline": n - 1}],
    },
    "patch_vectors": NONE,
}  # fmt: skip
# Fields within those, of which none is a list of its own.
PLAIN_OTHERS = frozenset(
    ["scale", "norm_match", "dtype", "original_dtype", "compression", "source", "algorithm",
     "normalize", "params", "name"]
)  # fmt: skip
INNER: dict[str, tuple[str, ...]] = {
    "apply_steering_vectors": (*vllm_lens._VECTOR, *vllm_lens._ARRAY),
    "steering": (*easysteer._OPTIONAL, *easysteer._SELECTORS),
}


def others_body(name: str, value: Any) -> dict[str, Any]:
    if name != "patch":
        return {name: value}
    count = 1 + max(one["source_inline"] for one in value)
    return {name: value, "patch_vectors": {**lens_array([V] * count)}}


def others_fields() -> Iterator[str]:
    yield from sorted(translation._TRANSLATED)


# Lists in bodies of vLLM's that midstream reads, or looks through.
_ASKED = {KEY: {"capture": {"layers": [1]}}}
VLLM: dict[str, Make] = {
    "prompt, texts": lambda n: {**_ASKED, "prompt": ["abc"] * n},
    "prompt, ids": lambda n: {**_ASKED, "prompt": whole(n)},
    "prompt, lists of ids": lambda n: {**_ASKED, "prompt": [[1, 2]] * n},
    "messages": lambda n: {**_ASKED, "messages": [{"role": "user", "content": "a"}] * n},
    "parts": lambda n: {
        **_ASKED, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * n}]},
    "input": lambda n: {**_ASKED, "input": ["abc"] * n},
    "fields": lambda n: {**_ASKED, **{f"midstreem{nth % 10}{nth}": 1 for nth in range(n)}},
    "fields that are near": lambda n: {f"mid{nth}stream": 1 for nth in range(n)},
    # With an escape, so that Python's parser reads the short one as well.
    "keys at any depth": lambda n: {
        "\xe9": [{f"mid{nth}tream": {"captur": 1}} for nth in range(n)]},
    "empty lists": lambda n: {"captur": [[[[]]] * 8] * n},
    "vllm_xargs": lambda n: {
        "vllm_xargs": {KEY: json.dumps(_ASKED[KEY]), **{f"k{nth}": nth for nth in range(n)}}},
    "the field as text": lambda n: {"vllm_xargs": {KEY: json.dumps({"capture": {
        "layers": [1], "positions": whole(n)}})}},
    **{name: lambda n, name=name: {**_ASKED, name: {f"k{nth}": 1 for nth in range(n)}}
       for name in _IGNORED},
}  # fmt: skip


def run_vllm(body: Mapping[str, Any], server: Any) -> None:
    request_field._read_packed.cache_clear()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    fields = frozenset(["prompt", "messages", "input", "vllm_xargs"])
    parsed = _parse(path, fields, json.dumps(body).encode())
    if parsed is not None:
        server.begin({"client": ("127.0.0.1", 1)}, parsed.value, parsed.field)
