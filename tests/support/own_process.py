"""Python in a separate process, with the tests' support and the package in its path.

Such a process is forked from one that has imported vLLM (`zygote`), which saves it eight seconds.
Where a GPU is, and where how a process starts is what is tested, it is a fresh interpreter.
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
    return zygote.start(arguments, **given)


def python(*arguments: str | Path, timeout: float, fresh: bool = False, **env: str) -> str:
    """Run `python ARGUMENTS`, which must end well, and return what it printed."""
    code, out, error = run(*arguments, timeout=timeout, fresh=fresh, env=environment(**env))
    assert code == 0, f"exit {code}\n{out[-2000:]}\n{error[-6000:]}"
    return out


def run(
    *arguments: str | Path,
    timeout: float,
    fresh: bool = False,
    env: Mapping[str, str] | None = None,
) -> tuple[int, str, str]:
    """Run `python ARGUMENTS`, and return (exit status, output, errors)."""
    pipe = subprocess.PIPE
    process = start(*arguments, fresh=fresh, env=env, stdout=pipe, stderr=pipe, text=True)
    try:
        out, error = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        raise
    return int(process.wait()), out, error
