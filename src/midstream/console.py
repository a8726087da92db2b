"""Text for terminals: escaping, formatting, and quiet output."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from midstream.errors import ConfigError, MidstreamError, SeamError, UnsupportedError

if TYPE_CHECKING:
    from rich.console import Console


def visible(text: str) -> str:
    """Escape control characters, which a terminal would act on."""
    return "".join(
        char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in text
    )


def format_ranges(numbers: Iterable[int]) -> str:
    """Format ascending integers as `0–3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


ALWAYS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Defaults that a user's own settings override."""

WHEN_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "PYTHONWARNINGS": "ignore",
}

TAIL_LINES = 30

_REFUSALS: dict[str, type[MidstreamError]] = {
    kind.__name__: kind for kind in (ConfigError, UnsupportedError, SeamError)
}
_REFUSED = re.compile(rf"midstream\.errors\.({'|'.join(_REFUSALS)}): (.+)")


@contextmanager
def defaults(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are unset for a while. Enter it before vLLM is imported."""
    added = [name for name in values if name not in os.environ]
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def quiet(*, verbose: bool, descriptor: int = 1) -> Iterator[Console]:
    """Yield a console on the real output; redirect all other output to a log, whose end is printed
    on an error. Enter it before vLLM is imported. A midstream error that is only in the log of an
    engine process is raised again in place of vLLM's.
    """
    from rich.console import Console

    if verbose:
        yield Console(stderr=descriptor == 2)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with (
        defaults(WHEN_QUIET),
        tempfile.TemporaryFile("w+b") as log,
        _real_output(descriptor) as output,
        _redirected(log),
    ):
        try:
            yield Console(file=output)
        except MidstreamError:
            raise
        except Exception as error:
            logged = _read(log)
            refusal = _refusal(logged)
            if refusal is not None:
                raise refusal from error
            output.write(_tail(logged))
            raise
        finally:
            output.flush()


@contextmanager
def _real_output(descriptor: int) -> Iterator[IO[str]]:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with open(os.dup(descriptor), "w", encoding=encoding, errors="replace") as output:
        yield output


@contextmanager
def _redirected(log: IO[bytes]) -> Iterator[None]:
    kept = [(number, os.dup(number)) for number in (1, 2)]
    try:
        for number, _ in kept:
            os.dup2(log.fileno(), number)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)


def _read(log: IO[bytes]) -> str:
    sys.stdout.flush()
    sys.stderr.flush()
    log.seek(0)
    return log.read().decode("utf-8", "replace")


def _refusal(logged: str) -> MidstreamError | None:
    """Return the last midstream error in the log of an engine process; None if there is none."""
    matches = _REFUSED.findall(logged)
    return _REFUSALS[matches[-1][0]](matches[-1][1]) if matches else None


def _tail(logged: str) -> str:
    lines = logged.splitlines()[-TAIL_LINES:]
    return "\n".join(["--- end of the log before the failure:", *lines, "---", ""])
