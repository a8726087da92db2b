"""Plain vLLM with midstream's worker class by name, in a separate process."""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from support.engines import prepare_vllm

WORKER = "midstream.worker.CaptureWorker"
PROMPTS = [list(range(3 + n, 8 + 3 * n)) for n in range(5)]
MAX_TOKENS = 6


def run(model: str, *, stats: bool = False, **variables: str) -> dict[str, Any]:
    for name in [name for name in os.environ if name.startswith("VLLM_ACT_")]:
        del os.environ[name]
    os.environ.update({f"VLLM_ACT_{name}": value for name, value in variables.items()})
    from vllm import LLM, SamplingParams

    prepare_vllm()
    # vLLM collects garbage eight times for each engine, of all that was imported.
    gc.freeze()
    found: dict[str, Any] = {"imported": "midstream" in sys.modules}
    worker: Any = WORKER
    if stats:
        from midstream.worker import CaptureWorker

        worker = CaptureWorker
    llm = LLM(
        model,
        worker_cls=worker,
        disable_log_stats=not stats,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=256,
        num_gpu_blocks_override=64,  # of 128 tokens; otherwise a GiB is set to zero
        seed=0,
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    params.detokenize = False
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found["generated"] = [list(output.outputs[0].token_ids) for output in outputs]
    found["ids"] = [output.request_id for output in outputs]
    found["manifests"] = [getattr(output, "activation_manifest", None) for output in outputs]
    metrics = [output.metrics for output in outputs]
    found["extras"] = [
        None if one is None else one.extras["activation_manifest"] for one in metrics
    ]
    found["worker"] = llm.llm_engine.vllm_config.parallel_config.worker_cls
    found["enabled"] = "midstream" in llm.llm_engine.vllm_config.additional_config
    return found


def refused(model: str, **variables: str) -> str:
    try:
        run(model, **variables)
    except ValueError as error:
        return str(error)
    return ""


def main(model: str, folder: Path) -> None:
    gc.unfreeze = lambda: None
    found = {
        "rp8": run(model, CAPTURE="1", RP_K="32", OUTDIR=str(folder / "rp8")),
        "full8": run(
            model,
            stats=True,
            CAPTURE="1",
            MODE="full8",
            RETURN="gathered",
            OUTDIR=str(folder / "full8"),
        ),
        "off": run(model, CAPTURE="0", OUTDIR=str(folder / "off")),
        "refused": refused(model, CAPTURE="1", MODE="rp9"),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
