"""Survey of all architectures of vLLM by the doctor, into docs/data/models.json.

scripts/models_survey.py [ARCHITECTURE …] [--list FILE] [--out FILE] [--limit SECONDS] [--missing]
    [--gpu] [--jobs N]

vLLM and transformers are imported once. Each architecture runs in a process that is forked from
there, N at once, and is killed at the limit. The file is written after each architecture, so an
interrupted survey can continue with --missing. scripts/models_table.py creates the tables of
docs/models.md from the file.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import survey_file
import survey_multimodal
import survey_settings
from markers import ROOT
from survey_examine import BACKEND, OWN, Candidate, EngineSettings, examine
from survey_processes import run_each

# A forked process does not have its parent's threads, so the parent must not start any.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}
GPU_ENVIRONMENT = {
    **{name: value for name, value in ENVIRONMENT.items() if "CPU" not in name},
    # A process that is forked cannot use CUDA if its parent does.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # Its kernels would be compiled first.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
UNKNOWN = "are not supported for now"


def main() -> int:
    """Run the survey. Return the exit status: 1 if any outcome is "wrong"."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/data/models.json")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--list", type=Path, metavar="FILE", help="names, one on each line")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--gpu", action="store_true", help="on CUDA devices; all engines in bfloat16"
    )
    parser.add_argument(
        "--missing", action="store_true", help="only architectures missing in the file"
    )
    options = parser.parse_args()
    os.environ.update(GPU_ENVIRONMENT if options.gpu else ENVIRONMENT)
    _import_once(on_gpu=options.gpu)
    wanted = list(options.names)
    if options.list:
        wanted += options.list.read_text(encoding="utf-8").split()
    found = survey_file.read(options.out)
    known = {candidate.name: candidate for candidate in candidates()}
    chosen = [
        known[name]
        for name in wanted or known
        if name in known and not (options.missing and name in found["models"])
    ]
    if options.gpu:
        found["host"] = "CUDA"
    settings = EngineSettings(options.gpu)
    work = functools.partial(examine, settings=settings)
    for candidate, said, seconds in run_each(chosen, work, options.limit, options.jobs):
        if UNKNOWN in said["reason"]:
            # A model of transformers that vLLM does not support.
            found["models"].pop(candidate.name, None)
            continue
        if "killed by SIGSEGV" in said["reason"] and candidate.name in survey_settings.CRASHES:
            said["reason"] += f": {survey_settings.CRASHES[candidate.name]}"
        found["models"][candidate.name] = survey_file.entry(candidate, said)
        survey_file.write(options.out, found)
        sys.stdout.write(
            f"{candidate.name}: {said['outcome']} {said.get('images', '')} "
            f"{said['reason'][-400:]!r} ({seconds:.0f} s)\n"
        )
        sys.stdout.flush()
    return int(any(entry["outcome"] == "wrong" for entry in found["models"].values()))


def candidates() -> list[Candidate]:
    """Return every architecture, vLLM's own first."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models import registry

    types: dict[str, str] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            # If several types have the name, the last one is the text model.
            types[name] = model_type
    types |= survey_settings.SAME_AS
    own = registry._TEXT_GENERATION_MODELS  # noqa: SLF001
    through = registry._TRANSFORMERS_SUPPORTED_MODELS  # noqa: SLF001
    # vLLM lists a few multimodal classes among its text models.
    found = [
        Candidate(name, OWN, types.get(name, ""), multimodal=name in survey_multimodal.BARE)
        for name in own
    ]
    found += [
        Candidate(name, BACKEND, types.get(name, ""))
        for name in through
        if name.endswith("ForCausalLM")
    ]
    known = {*registry._VLLM_MODELS, *registry._PREVIOUSLY_SUPPORTED_MODELS}  # noqa: SLF001
    found += [
        Candidate(name, BACKEND, model_type)
        for name, model_type in types.items()
        if name not in known or name in survey_settings.LEFT_TO_THE_BACKEND
        if model_type not in survey_settings.NO_DECODERS
    ]
    found += _multimodal()
    return list({one.name: one for one in reversed(found)}.values())[::-1]


def _multimodal() -> list[Candidate]:
    """Return the architectures of vLLM's multimodal list."""
    from transformers.models.auto import modeling_auto as auto
    from vllm.model_executor.models import registry

    types: dict[str, str] = {}
    for table in (
        auto.MODEL_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for model_type, names in table.items():
            types |= dict.fromkeys([names] if isinstance(names, str) else names, model_type)
    types |= survey_multimodal.TYPES
    return [
        Candidate(name, OWN, types.get(name, ""), multimodal=True)
        for name in registry._MULTIMODAL_MODELS  # noqa: SLF001
    ]


def _import_once(*, on_gpu: bool) -> None:
    import transformers  # noqa: F401
    import vllm.model_executor.models.llama

    if not on_gpu:
        import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

    import midstream.api.llm
    import midstream.lab.tools.doctor.examine  # noqa: F401

    # vLLM reads a model's class in a new process, to keep CUDA out of this one; on a CPU that is
    # only slow.
    registry._run_in_subprocess = lambda read: read()  # noqa: SLF001
    # What is imported now stays: garbage collection in the forked processes can skip it.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())
