"""Requests in the words of other tools, written for these tests."""

import base64
from typing import Any

import numpy as np

WIDTH = 3  # of the model in unit tests


def encoded(array: Any, dtype: str = "float32") -> str:
    """Return an array's numbers in base64."""
    return base64.b64encode(np.asarray(array, dtype).tobytes()).decode()


def packed(rows: Any, layers: list[int], **more: Any) -> dict[str, Any]:
    """Return vectors of one hook point as the vLLM fork packs them."""
    shape = list(np.shape(rows))
    made = {"dtype": "float32", "shape": shape, "layer_indices": layers, "data": encoded(rows)}
    return made | more


def lens_array(rows: Any, dtype: str = "float32") -> dict[str, Any]:
    """Return an array as vllm-lens sends it, uncompressed."""
    return {"data": encoded(rows, dtype), "dtype": dtype, "shape": list(np.shape(rows))}


def direction(vectors: dict[int, Any]) -> dict[str, Any]:
    """Return EasySteer's payload of one vector for each layer."""
    tensors = {
        f"layer.{layer}": {"shape": [len(row)], "data": encoded(row)}
        for layer, row in vectors.items()
    }
    return {"version": 1, "kind": "direction", "tensors": tensors, "extra": {}, "sha256": "0"}


V = [1.0, -2.0, 0.5]
ROWS = {"dtype": "float32", "shape": [1, WIDTH], "data": encoded([V])}

# A value for each field that is translated.
TRANSLATED: dict[str, Any] = {
    "output_residual_stream": [1],
    "apply_steering_vectors": [{"activations": lens_array([V]), "layer_indices": [1]}],
    "steering": {
        "vectors": [{"data": direction({1: V}), "apply": {"prompt": "all", "generation": "all"}}]
    },
    "steering_vectors": {"post_block": packed([V], [1])},
    "prefill_steering_vectors": {"post_block": {"1": V}},
    "decode_steering_vectors": {"post_block": {"1": {"vector": V, "scale": 2.0}}},
    "steering_clamps": {"post_block": {"1": [{"vector": V, "max": 4.0}]}},
    "prefill_steering_clamps": {"post_block": {"1": [{"vector": V, "value": 0.0}]}},
    "decode_steering_clamps": {"post_block": packed([V], [1], bounds=[[None, 2.0]])},
    "steering_name": "calm",
    "steering_module_ref": ["calm", 1.5],
    "capture": {"memory": {"hooks": {"post_block": [1]}}},
    "patch": [{"layer": 1, "hook": "post_block", "dest_position": 0, "source_inline": 0}],
}
