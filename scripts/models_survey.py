"""Survey of all decoder-only architectures of vLLM by the doctor, into docs/data/models.json.

scripts/models_survey.py [ARCHITECTURE …] [--out FILE] [--limit SECONDS] [--missing]

vLLM and transformers are imported once. Each architecture runs in a process that is forked from
there, one at a time, and is killed at the limit. The file is written after each architecture, so an
interrupted survey can continue with --missing. scripts/models_table.py creates the tables of
docs/models.md from the file.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import survey_multimodal
import survey_processors
import survey_settings
from markers import ROOT
from survey_bare import BARE

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
OWN, BACKEND = "vLLM", "Transformers backend"
UNKNOWN = "are not supported for now"
UNREAD = "failed to be inspected"
NO_MODEL = "transformers has no such model; its code comes with its weights, and is never run here"


@dataclass(frozen=True)
class Candidate:
    """One architecture.

    Attributes:
        name: name in vLLM's registry, or in transformers if vLLM has no own model of it.
        runs: OWN or BACKEND.
        model_type: model type of transformers' configuration; empty if transformers has none.
        multimodal: whether it is in vLLM's list of multimodal models.
    """

    name: str
    runs: str
    model_type: str
    multimodal: bool = False


def main() -> int:
    """Run the survey. Return the exit status: 1 if any outcome is "wrong"."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ARCHITECTURE")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/data/models.json")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument(
        "--missing", action="store_true", help="only architectures missing in the file"
    )
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    _import_once()
    found = _read(options.out)
    for one in candidates():
        if options.names and one.name not in options.names:
            continue
        if options.missing and one.name in found["models"]:
            continue
        started = time.monotonic()
        said = _one(one, options.limit)
        if UNKNOWN in said["reason"]:
            # A model of transformers that vLLM does not support.
            found["models"].pop(one.name, None)
            continue
        found["models"][one.name] = said
        _write(options.out, found)
        seconds = time.monotonic() - started
        sys.stdout.write(
            f"{one.name}: {said['outcome']} {said.get('images', '')} {said['reason'][-400:]!r} "
            f"({seconds:.0f} s)\n"
        )
        sys.stdout.flush()
    return int(any(one["outcome"] == "wrong" for one in found["models"].values()))


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
    found = [Candidate(name, OWN, types.get(name, "")) for name in own]
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


def _import_once() -> None:
    import transformers  # noqa: F401
    import vllm.model_executor.models.llama
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


def _one(candidate: Candidate, limit: float) -> dict[str, Any]:
    """Return the doctor's findings for one architecture, from a separate process."""
    if not candidate.model_type and candidate.name not in {**BARE, **survey_multimodal.BARE}:
        return _entry(candidate, {"outcome": "cannot be built", "reason": NO_MODEL})
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _in_child(candidate, writing)
    os.close(writing)
    text = _until(reading, limit)
    if text is None:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if text:
        return _entry(candidate, json.loads(text))
    if text is None:
        reason = f"no answer within {limit:.0f} s"
    else:
        reason = f"vLLM's process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return _entry(candidate, {"outcome": "cannot be built", "reason": reason})


def _in_child(candidate: Candidate, writing: int) -> None:
    os.setsid()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    try:
        text = json.dumps(_examine(candidate))
    except BaseException:  # noqa: BLE001
        # The doctor itself failed: a bug in midstream, not a finding about the model.
        text = json.dumps({"outcome": "wrong", "reason": traceback.format_exc(limit=-3)})
    with os.fdopen(writing, "w", encoding="utf-8") as pipe:
        pipe.write(text)
    os._exit(0)


def _examine(candidate: Candidate) -> dict[str, Any]:
    """Examine an architecture: a multimodal one with its processor if that can be made here."""
    from midstream.lab.tools.doctor.report import UNBUILT

    if candidate.name in survey_multimodal.BARE:
        return _examine_bare(candidate)
    if candidate.name not in survey_processors.FAMILIES:
        return _examine_small(candidate)
    said = _examine_processed(candidate)
    if said["outcome"] != UNBUILT:
        return said
    return {**_examine_small(candidate), "without": said["reason"]}


def _examine_bare(candidate: Candidate) -> dict[str, Any]:
    """Examine a multimodal class by a whole configuration, as it is written here."""
    from midstream.lab.tools.doctor.drawn_images import DRAWN
    from midstream.lab.tools.doctor.examine import Options, examine
    from midstream.lab.tools.doctor.model_copy import drawn_weights, unknown_config
    from midstream.lab.tools.doctor.report import UNBUILT

    fields = survey_multimodal.BARE[candidate.name] | {"architectures": [candidate.name]}
    unknown_config(fields)
    reasons = []
    weights = ("load_format", drawn_weights(0))
    for images, engine in ((DRAWN, {}), ("", {"language_model_only": True})):
        with tempfile.TemporaryDirectory(prefix="midstream-survey-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(fields), encoding="utf-8")
            settings = (weights, *engine.items())
            said = examine(Options(folder, size=None, images=images, engine=settings)).to_dict()
        if said["outcome"] != UNBUILT:
            break
        reasons.append(said["reason"])
    return {**said, "reason": "; ".join(dict.fromkeys([said["reason"], *reasons]))}


def _examine_processed(candidate: Candidate) -> dict[str, Any]:
    """Examine a tiny multimodal model whose image goes through its processor and its tower."""
    from midstream.lab.tools.doctor.drawn_images import PROCESSED
    from midstream.lab.tools.doctor.examine import Options, examine

    dtype = "bfloat16" if candidate.model_type in survey_settings.BFLOAT16 else "float32"
    with tempfile.TemporaryDirectory(prefix="midstream-survey-") as folder:
        text = survey_processors.save(candidate.name, Path(folder))
        options = Options(folder, size=None, dtype=dtype, images=PROCESSED, text=text)
        return examine(options).to_dict()


def _examine_small(candidate: Candidate) -> dict[str, Any]:
    """Examine a small random copy, of a configuration."""
    from transformers import CONFIG_MAPPING

    from midstream.lab.tools.doctor.examine import Options, examine_config
    from midstream.lab.tools.doctor.model_copy import unknown_config

    engine: dict[str, Any] = {}
    if candidate.name in survey_settings.LEFT_TO_THE_BACKEND:
        engine["model_impl"] = "transformers"
    if candidate.multimodal:
        config = survey_multimodal.config_of(candidate.name, candidate.model_type)
    elif candidate.model_type:
        settings = survey_settings.SETTINGS.get(candidate.model_type, {})
        config = CONFIG_MAPPING[candidate.model_type](**settings)
    else:
        config = unknown_config(BARE[candidate.name])
    dtype = "bfloat16" if candidate.model_type in survey_settings.BFLOAT16 else "float32"
    options = Options(
        candidate.name,
        dtype=dtype,
        architecture=None if candidate.multimodal else candidate.name,
        engine=tuple(sorted(engine.items())),
    )
    said = examine_config(options, config).to_dict()
    if candidate.multimodal:
        said = _of_the_whole(candidate, said)
    if UNREAD in said["reason"]:
        said["reason"] = f"vLLM cannot load it here: {_why_unread(candidate.name)}"
    # Remove the arguments that pydantic appends.
    said["reason"] = said["reason"].split(" [type=")[0]
    return said


def _of_the_whole(candidate: Candidate, said: dict[str, Any]) -> dict[str, Any]:
    """Return a report on a multimodal class; what was found of its language model alone in another
    class is not of this one.
    """
    from vllm.model_executor.models import registry

    served = registry._MULTIMODAL_MODELS[candidate.name][1]  # noqa: SLF001
    if said["outcome"] != "ok" or said["architecture"] == served:
        return said
    return {"outcome": "cannot be built", "reason": said["reason"]}


def _why_unread(name: str) -> str:
    """Return why vLLM cannot import a model's module; vLLM's own error omits the reason."""
    from vllm.model_executor.models import registry

    try:
        registry.ModelRegistry.models[name].load_model_cls()
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return "no reason given"


def _until(reading: int, limit: float) -> str | None:
    """Return the text from a pipe until it is closed; None if that takes longer than the limit."""
    end = time.monotonic() + limit
    parts: list[bytes] = []
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            part = pipe.read(1 << 16)
            if not part:
                return b"".join(parts).decode("utf-8")
            parts.append(part)
    return None


def _entry(candidate: Candidate, said: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of the file for a report."""
    sites = said.get("sites", [])
    entry: dict[str, Any] = {
        "runs": candidate.runs,
        "multimodal": candidate.multimodal,
        "outcome": said["outcome"],
        "reason": said["reason"],
    }
    if said.get("compared_with"):
        entry["compared_with"] = said["compared_with"]
    entry |= {name: said[name] for name in ("images", "without") if said.get(name)}
    if sites:
        entry["layer_classes"] = said["layer_classes"]
        entry["layers"] = 1 + max(one["layer"] for one in sites)
        for outcome in ("lacking", "not compared"):
            entry[outcome] = _by_reason([one for one in sites if one["outcome"] == outcome])
        entry["compared"] = sum(one["outcome"] == "ok" for one in sites)
        entry["operations"] = sum(one["outcome"] == "ok" for one in said["operations"])
        entry["worst"] = float(f"{said['worst']:.1e}") if said["worst"] is not None else None
    return entry


def _by_reason(sites: list[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in sites:
        names = found.setdefault(one["reason"], [])
        if one["site"] not in names:
            names.append(one["site"])
    return found


def _read(path: Path) -> dict[str, Any]:
    if path.exists():
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return read
    return {"models": {}}


def _write(path: Path, found: dict[str, Any]) -> None:
    from midstream.lab.tools.doctor.examine import versions

    found["versions"] = dict(versions())
    found["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    found["models"] = dict(sorted(found["models"].items(), key=lambda item: item[0].lower()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
