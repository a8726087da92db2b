"""A task of lm-eval with its own data, and lm-eval's own steered model as the reference."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

QUESTIONS = [
    ("The sky is", [" blue", " an apple", " seven"], 0),
    ("Two and two are", [" four", " a house"], 0),
    ("A dog can", [" bark", " read Greek", " be a number"], 0),
    ("Paris is in", [" Japan", " France"], 1),
]
_TASK = """
task: tiny
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def write(folder: Path) -> None:
    """Write the task `tiny` and its data."""
    data = folder / "tiny.jsonl"
    lines = [
        json.dumps({"question": question, "choices": choices, "label": label})
        for question, choices, label in QUESTIONS
    ]
    data.write_text("\n".join(lines))
    (folder / "tiny.yaml").write_text(_TASK.format(data=data))


def write_vectors(folder: Path, vectors: dict[int, Tensor], scale: float) -> tuple[str, str]:
    """Write a vector for each layer as midstream reads them, and as lm-eval's steered model does.

    Returns:
        The setting MIDSTREAM as JSON, and the path of lm-eval's file.
    """
    mine, theirs = folder / "happy.safetensors", folder / "happy.pt"
    save_file({f"resid_post.{layer}": vector for layer, vector in vectors.items()}, mine)
    torch.save(
        {
            f"layers.{layer}": {
                "steering_vector": vector,
                "steering_coefficient": scale,
                "action": "add",
            }
            for layer, vector in vectors.items()
        },
        theirs,
    )
    settings = {"vectors": {"happy": str(mine)}, "steering": {"base": ["happy", scale]}}
    return json.dumps(settings), str(theirs)


def name_vllm(folder: Path) -> Path:
    """A folder for Python's path in which lm-eval finds the version of vLLM. vLLM's builds for the
    CPU are a package of another name, which lm-eval does not look for.
    """
    found = folder / "metadata"
    info = found / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return found
