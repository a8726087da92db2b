"""Capture of every layer of every prompt token: midstream against its alternatives.

    python benchmarks/against.py [--shapes 0.6b 8b] [--rounds 5] [--seconds 280] [--json FILE]

All variants have the same prompts, of one length. Each runs in a process of its own; they take
turns in a random order in each round, and figures are medians. The time of a variant ends when all
vectors are tensors in its process and were read.

plain vLLM: no captures; the baseline of the other variants. "plain again" is the same engine.
midstream: `LLM.generate(capture=…)`, with the engine core in a separate process, vLLM's default.
transformers: `output_hidden_states=True` without the language head, every batch full and without
padding, in the fastest of several batch sizes, copied into pinned memory while the next batch is
computed.
extract_hidden_states: vLLM's own connector, which writes a file for each request; here to memory
(tmpfs), and read by vLLM's own function. It needs a GPU.
vllm-lens: a plugin with forward hooks, if it is installed. It runs models eagerly, and on vLLM's V1
runner; the release is in the results, and need not be made for this vLLM.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import engines
import overhead
import shapes

BATCH_SIZES = (4, 8, 16, 32, 64)
PLAIN, MIDSTREAM, EXTRACT = "plain vLLM", "midstream", "extract_hidden_states"
LENS = "vllm-lens, eager"
# By prompt and layer: [tokens, hidden].
Vectors = list[list[torch.Tensor]]


def main() -> int:
    """Measure every shape, and write the table."""
    parser = engines.arguments(__doc__, list(shapes.SHAPES))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument(
        "--extract-kv-gib", type=float, default=24, help=f"KV cache of {EXTRACT}, which holds rows"
    )
    args = parser.parse_args()
    about = {"prompts": args.prompts, "length": args.length}
    run = engines.Run("against", args, **about, shapes={})
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    needed = PLAIN, MIDSTREAM
    for shape in args.shapes:
        with (
            run.limited(),
            tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
            run.engines(makers(shape, args, folder), needed, **environment) as started,
        ):
            measure(run, shape, started, args)
    return run.finish()


def makers(shape: str, args: argparse.Namespace, folder: str) -> dict[str, tuple[Any, ...]]:
    """Return what makes each alternative, by its name."""
    layers = shapes.SHAPES[shape]["num_hidden_layers"]
    model = shapes.write(shape, engines.CACHE)
    # Little memory for the others, which hold no rows there, so that all fit beside it.
    args.kv_gib = args.kv_gib or min(3.0, engines.KV_GIB[shape])
    settings = engines.settings(shape, args, max_model_len=2 * args.length)
    found: dict[str, tuple[Any, ...]] = {
        PLAIN: (PlainVllm, model, settings),
        MIDSTREAM: (Midstream, model, settings, layers),
        "transformers": (Transformers, model),
    }
    if torch.cuda.is_available():
        more = {"kv_cache_memory_bytes": int(args.extract_kv_gib * (1 << 30))}
        found[EXTRACT] = Extractor, model, settings | more, layers, folder
    if importlib.util.find_spec("vllm_lens"):
        found[LENS] = Lens, model, settings, layers
    return found


def measure(run: engines.Run, shape: str, started: Any, args: argparse.Namespace) -> None:
    """Put the median of each variant, and midstream's error against the connector, into results."""
    draw = overhead.random_prompts(args.prompts, args.length)
    prompts = [one["prompt_token_ids"] for one in draw]
    into = run.results["shapes"][shape] = {
        **started[MIDSTREAM].call(PlainVllm.describe),
        "layers": shapes.SHAPES[shape]["num_hidden_layers"],
        "variants": {},
    }
    if LENS in started:
        into["vllm_lens"] = importlib.metadata.version("vllm-lens")
    calls = {name: functools.partial(one.call, take, prompts) for name, one in started.items()}
    calls = {PLAIN: calls[PLAIN], "plain again": calls[PLAIN]} | calls
    if calls.pop("transformers", None):
        run.stage("transformers: find its batch size")
        try:
            size = started["transformers"].call(Transformers.find_size, prompts)
        except engines.EngineError as error:
            run.failed("transformers", error)
        else:
            call = functools.partial(started["transformers"].call, take, prompts)
            calls[f"transformers, batches of {size}"] = call
    into["agreement"] = agreement(run, started, prompts[:1])

    def summary(values: dict[str, list[tuple[float, int]]]) -> dict[str, Any]:
        found = engines.seconds({name: [one[0] for one in each] for name, each in values.items()})
        for name, one in found.items():
            median, nbytes = one["median_s"], values[name][-1][1]
            one |= {
                "prompts_per_s": args.prompts / median,
                "tokens_per_s": args.prompts * args.length / median,
                "bytes": nbytes,
                "gb_s": nbytes / median / 1e9,
            }
        return found

    run.measure(into, "variants", calls, summary)


def take(tool: Any, prompts: list[list[int]]) -> tuple[float, int]:
    """Return the seconds until all vectors were read, and their size in bytes."""
    start = time.perf_counter()
    found = tool.vectors(prompts)
    nbytes = sum(read_pages(layer) for layers in found for layer in layers)
    return time.perf_counter() - start, nbytes


def read_pages(vectors: torch.Tensor) -> int:
    """Read a number of each page of the vectors, and return their size in bytes."""
    vectors[:, :: 2048 // vectors.element_size()].sum().item()
    return vectors.numel() * vectors.element_size()


def first(tool: Any, prompts: list[list[int]]) -> Any:
    """Return the vectors of the first prompt, float32 [layers, tokens, hidden]."""
    return torch.stack(tool.vectors(prompts)[0]).float().numpy()


class PlainVllm:
    """vLLM without captures.

    Attributes:
        plugins: names of the plugins that vLLM loads. vllm-lens changes every engine that loads it.
    """

    plugins = ""

    def __init__(self, model: Path, settings: dict[str, Any]) -> None:
        os.environ["VLLM_PLUGINS"] = self.plugins
        self.llm = self.make(model, settings)
        self.llm_engine = self.llm.llm_engine

    def make(self, model: Path, settings: dict[str, Any]) -> Any:
        """Return the `LLM`."""
        return engines.plain(model, settings)

    def describe(self) -> dict[str, Any]:
        """Return the modes of compilation, and midstream's view of the engine."""
        return engines.describe(self.llm)

    def generate(
        self, prompts: list[list[int]], extra_args: dict[str, Any] | None = None, **asked: Any
    ) -> list[Any]:
        """Run the prompts; `extra_args` are of the sampling parameters."""
        given: list[Any] = [{"prompt_token_ids": one} for one in prompts]
        params = overhead.sampling(1, extra_args=extra_args)
        found: list[Any] = self.llm.generate(given, params, use_tqdm=False, **asked)
        return found

    def vectors(self, prompts: list[list[int]]) -> Vectors:
        """Run the prompts, and return no vectors."""
        self.generate(prompts)
        return []


class Midstream(PlainVllm):
    """midstream's captures."""

    plugins = "midstream"

    def __init__(self, model: Path, settings: dict[str, Any], layers: int) -> None:
        super().__init__(model, settings)
        self.layers = layers

    def make(self, model: Path, settings: dict[str, Any]) -> Any:
        """Return midstream's `LLM`."""
        return engines.tapped(model, settings, {})

    def vectors(self, prompts: list[list[int]]) -> Vectors:
        """Return the vectors that midstream captures."""
        from midstream import Capture

        outputs = self.generate(prompts, capture=Capture(layers="all"))
        return [[one.activations["resid_post", n] for n in range(self.layers)] for one in outputs]


class Extractor(PlainVllm):
    """vLLM's connector, which writes every layer's vectors to files. Its layer n is the input of
    midstream's layer n.
    """

    def __init__(self, model: Path, settings: dict[str, Any], layers: int, folder: str) -> None:
        self.folder = Path(folder)
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(range(1, layers + 1))}
            },
        }
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }
        # vLLM's example of this connector has chunked prefill off.
        more = {"enable_chunked_prefill": False}
        more |= {"speculative_config": speculative, "kv_transfer_config": transfer}
        super().__init__(model, settings | more)

    def vectors(self, prompts: list[list[int]]) -> Vectors:
        """Return the vectors that vLLM's connector writes, and delete its files."""
        from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
            load_hidden_states,
        )

        found = [
            load_hidden_states(one.kv_transfer_params["hidden_states_path"])["hidden_states"]
            for one in self.generate(prompts)
        ]
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return [list(one.unbind(1)) for one in found]


class Lens(PlainVllm):
    """vllm-lens's captures."""

    plugins = "activations"

    def __init__(self, model: Path, settings: dict[str, Any], layers: int) -> None:
        # vllm-lens sets both itself. A release that does not would be another variant.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        super().__init__(model, settings | {"enforce_eager": True})
        self.asked = {"output_residual_stream": list(range(layers))}

    def vectors(self, prompts: list[list[int]]) -> Vectors:
        """Return the vectors that vllm-lens captures."""
        outputs = self.generate(prompts, extra_args=self.asked)
        return [list(one.activations["residual_stream"].unbind(0)) for one in outputs]


class Transformers:
    """transformers' `output_hidden_states`."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoConfig, AutoModel

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        torch.set_default_dtype(torch.bfloat16 if self.device == "cuda" else torch.float32)
        with torch.device(self.device):
            self.network = AutoModel.from_config(AutoConfig.from_pretrained(model)).eval()
        torch.set_default_dtype(torch.float32)
        self.size = 1

    def find_size(self, prompts: list[list[int]]) -> int:
        """Try batch sizes until one is slower than the one before, keep the fastest, return it."""
        best, fastest = float("inf"), self.size
        for self.size in BATCH_SIZES:
            try:
                # The first call of a size allocates its pinned memory.
                took = min(take(self, prompts)[0] for _ in range(2))
            except torch.OutOfMemoryError:
                break
            if took > best or self.size > len(prompts):
                break
            best, fastest = took, self.size
        self.size = fastest
        return fastest

    @torch.inference_mode()
    def vectors(self, prompts: list[list[int]]) -> Vectors:
        """Return the vectors of the network, in batches of the size that was found."""
        found: Vectors = []
        for batch in torch.tensor(prompts, device=self.device).split(self.size):
            states = self.network(batch, output_hidden_states=True, use_cache=False).hidden_states
            # To pinned memory, which PyTorch caches for the next round.
            kept = [state.to("cpu", non_blocking=True) for state in states[1:]]
            found.extend([state[nth] for state in kept] for nth in range(len(batch)))
        if self.device == "cuda":
            torch.cuda.synchronize()
        return found


def agreement(run: engines.Run, started: Any, prompts: list[list[int]]) -> str:
    """Describe the error between the variants with equal weights, on the first prompt."""
    others = [name for name in (EXTRACT, LENS) if name in started]
    if not others:
        return "not compared: no other tool of vLLM's started"
    run.stage(f"agreement of midstream and {' and '.join(others)}")
    return "; ".join(_agreement(run, started, name, prompts) for name in others)


def _agreement(run: engines.Run, started: Any, other: str, prompts: list[list[int]]) -> str:
    try:
        mine, theirs = (
            torch.from_numpy(started[name].call(first, prompts)) for name in (MIDSTREAM, other)
        )
    except engines.EngineError as error:
        run.failed("agreement", error)
        return f"{other} not compared: a variant failed"
    if mine.shape != theirs.shape:
        return f"shapes of {other} differ: {tuple(mine.shape)} and {tuple(theirs.shape)}"
    apart = ((mine - theirs).norm(dim=-1) / theirs.norm(dim=-1)).flatten()
    return (
        f"midstream against {other}, relative error of a vector: median "
        f"{apart.median():.2%}, worst {apart.max():.2%}"
    )


if __name__ == "__main__":
    sys.exit(main())
