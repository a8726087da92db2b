"""Engine under test: `midstream.LLM` in this process with every site tapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstream import Capture
from midstream.lab.attribution.hooked.end_hooks import COMPARED
from midstream.lab.tools.doctor.cases import Case, compares
from midstream.plan import Sites
from midstream.sites import ENDS, IN_LAYERS, Tap

MAX_MODEL_LEN = 256
BLOCKS = 128
LOGPROBS = 3


def _latent_attention(dtype: str) -> dict[str, Any]:
    """Return vLLM's setting of latent attention (MLA) in float32 on a CPU with AMX, which by
    default takes kernels that have bfloat16 alone.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    is_asked = current_platform.is_cpu() and dtype in ("float32", "float")
    if not is_asked or "CPU_MLA" not in AttentionBackendEnum.__members__:
        return {}
    return {"attention_backend": "CPU_MLA"}


@contextmanager
def engine(folder: str | Path, dtype: str, **more: Any) -> Iterator[Any]:
    """Start an engine and shut it down on exit.

    Args:
        folder: folder or name of the model.
        dtype: dtype of the engine.
        **more: further arguments of `midstream.LLM`.
    """
    from midstream import LLM

    has_tokenizer = any(
        (Path(folder) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    settings: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "enforce_eager": True,
        "skip_tokenizer_init": Path(folder).is_dir() and not has_tokenizer,
        "disable_log_stats": True,
        "enable_prefix_caching": False,
        # The requests are short, so few KV blocks are enough.
        "num_gpu_blocks_override": BLOCKS,
        "seed": 0,
        **_latent_attention(dtype),
        **more,
    }
    # One matrix at a time: the cases that have one wait for each other.
    llm = LLM(str(folder), midstream={"sites": [*IN_LAYERS, *COMPARED], "maps": 1}, **settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def run_cases(llm: Any, cases: Sequence[Case], taps: Sequence[tuple[str, int]]) -> list[Any]:
    """Run all cases as one batch, each with captures of its part of `taps`; return the outputs."""

    def captures(tap: Tap | None) -> list[Capture]:
        layers: dict[str, list[int]] = {}
        for site, layer in taps:
            if compares(tap, (site, layer)):
                layers.setdefault(site, []).append(layer)
        return [
            Capture(sites=Sites(site)) if site in ENDS else Capture(sorted(chosen), Sites(site))
            for site, chosen in layers.items()
        ]

    outputs: list[Any] = llm.generate(
        [case.request for case in cases],
        [sampling(len(case.tokens)) for case in cases],
        capture=[captures(case.tap) for case in cases],
        edits=[None if case.edit is None else [case.edit] for case in cases],
        probes=[None if case.probe is None else [case.probe] for case in cases],
        use_tqdm=False,
    )
    return outputs


def sampling(count: int) -> Any:
    """Return the sampling parameters of a test request for `count` tokens."""
    from midstream import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=count, ignore_eos=True, logprobs=LOGPROBS, detokenize=False
    )
