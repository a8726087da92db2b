"""Python in a separate process, with the tests' support and the package in its path.

Such a process is forked from one that has imported vLLM (`zygote`), which saves it eight seconds.
Where a GPU is, and where how a process starts is what is tested, it is a fresh interpreter. Where
midstream is not to be imported, it is a fork that has vLLM alone.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from support import zygote
from support.engines import HAS_GPU

ROOT = Path(__file__).resolve().parents[2]
Process = subprocess.Popen[Any] | zygote.Child


def environment(**env: str) -> dict[str, str]:
    """Return the environment of such a process."""
    return {**os.environ, **env, "PYTHONPATH": zygote.python_path()}


def start(
    *arguments: str | Path,
    fresh: bool = False,
    has_midstream: bool = True,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    text: bool = False,
) -> Process:
    """Start `python ARGUMENTS`; `fresh`: as an interpreter that starts from nothing."""
    given: dict[str, Any] = {"cwd": cwd, "stdout": stdout, "stderr": stderr, "text": text}
    given["env"] = environment() if env is None else env
    if fresh or HAS_GPU:
        return subprocess.Popen([sys.executable, *map(str, arguments)], **given)
    return zygote.start(arguments, has_midstream=has_midstream, **given)


def python(
    *arguments: str | Path,
    timeout: float,
    fresh: bool = False,
    has_midstream: bool = True,
    **env: str,
) -> str:
    """Run `python ARGUMENTS`, which must end well, and return what it printed."""
    kind = {"fresh": fresh, "has_midstream": has_midstream}
    code, out, error = run(*arguments, timeout=timeout, env=environment(**env), **kind)
    assert code == 0, f"exit {code}\n{out[-2000:]}\n{error[-6000:]}"
    return out


def run(
    *arguments: str | Path,
    timeout: float,
    env: Mapping[str, str] | None = None,
    **kind: bool,
) -> tuple[int, str, str]:
    """Run `python ARGUMENTS`, and return (exit status, output, errors); `kind` as for `start`."""
    pipe = subprocess.PIPE
    process = start(*arguments, env=env, stdout=pipe, stderr=pipe, text=True, **kind)
    try:
        out, error = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        raise
    return int(process.wait()), out, error
