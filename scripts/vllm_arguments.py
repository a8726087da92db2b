"""Writer of src/midstream/api/vllm_arguments.py: the arguments of vLLM, for type checkers.

Usage: scripts/vllm_arguments.py [--check]
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "src" / "midstream" / "api" / "vllm_arguments.py"
HEAD = '''"""Arguments of vLLM by name, for type checkers; written by scripts/vllm_arguments.py."""
# ruff: noqa: UP013 (a class has a line for each of 500 names)

from __future__ import annotations

from typing import Any, TypedDict

VERSION = "{}"
'''


def names_of(theirs: Iterable[Callable[..., Any]], own: Callable[..., Any] | None) -> list[str]:
    """Return the arguments of some functions that one of midstream does not name itself."""
    named = set() if own is None else set(inspect.signature(own).parameters)
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    found = [
        one.name
        for function in theirs
        for one in inspect.signature(function).parameters.values()
        if one.kind not in kinds and not one.name.startswith("_")
    ]
    return sorted(set(found) - named - {"self"})


def text() -> str:
    """Return the module of the installed vLLM."""
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from midstream.api import async_llm, llm

    tables = {
        "EngineArguments": names_of((vllm.LLM.__init__, EngineArgs), llm.LLM.__init__),
        "AsyncEngineArguments": names_of(
            (AsyncLLM.__init__, AsyncEngineArgs), async_llm.AsyncLLM.__init__
        ),
        "SamplingArguments": names_of((vllm.SamplingParams,), None),
        "GenerateArguments": names_of((vllm.LLM.generate,), llm.LLM.generate),
        "ChatArguments": names_of((vllm.LLM.chat,), llm.LLM.chat),
        "AsyncGenerateArguments": names_of((AsyncLLM.generate,), async_llm.AsyncLLM.generate),
    }
    parts = [HEAD.format(vllm.__version__)]
    for table, names in tables.items():
        fields = textwrap.fill(
            ", ".join(f'"{name}":_Any' for name in names), 92, break_long_words=False,
            break_on_hyphens=False,
        ).replace(":_", ": ")  # fmt: skip
        body = textwrap.indent(fields, " " * 8)
        parts.append(
            f'{table} = TypedDict(\n    "{table}",\n    {{\n{body},\n    }},\n'
            "    total=False,\n)  # fmt: skip\n"
        )
    return "\n".join(parts)


if __name__ == "__main__":
    wanted = text()
    if "--check" not in sys.argv:
        FILE.write_text(wanted, encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != wanted:
        sys.exit(f"{FILE.name} is not of the installed vLLM; run scripts/vllm_arguments.py")
