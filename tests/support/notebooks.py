"""The notebooks in examples/notebooks: their lines, and how they are executed and stored."""

import ast
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
ASYNC = {"live_probe"}
"""Notebooks that start an `AsyncLLM`, whose engine has a process of its own."""

PLAIN = "no-midstream"
"""Tag of cells that use nothing of midstream, such as a training loop; their lines do not count."""

MOST_LINES = 15
MOST_BYTES = 400_000
NOISE = re.compile(
    r"(?<![\w.$}~/])/(?:home|root|work|Users|mnt|tmp)/[\w.-]+|Traceback|it/s\]|INFO "
)
"""What stored outputs must not have: paths of a machine, errors, progress bars, log lines."""

_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": str(ROOT / "src"),
}
# One engine for all notebooks of a kernel. It taps whatever one of them asks for.
_SHARED = """
import gc, os
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import midstream

_SITES = ["resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "z", "final_norm"]
_ENGINES = []

def _shared(model, midstream=None, **settings):
    assert model == {model!r} and settings == {{"dtype": "float32", "enforce_eager": True}}
    asked = dict(midstream or {{}})
    assert set(asked.pop("sites", [])) <= set(_SITES) and set(asked) <= {{"readout_bytes"}}
    if not _ENGINES:
        own = {{"sites": _SITES, "readout_bytes": 64 << 20}}
        _ENGINES.append(_LLM(model, midstream=own, max_model_len=512, seed=0, **settings))
    return _ENGINES[0]

_LLM, midstream.LLM = midstream.LLM, _shared
"""
_FORGET = """
for _registry in (_ENGINES[0].saes, _ENGINES[0].lenses) if _ENGINES else ():
    for _name in _registry.names:
        _registry.remove(_name)
for _name in [name for name in globals() if not name.startswith("_")]:
    if _name not in ("In", "Out", "get_ipython", "exit", "quit", "open"):
        del globals()[_name]
"""


def read(path: Path) -> Any:
    """Read a notebook."""
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    """The cells with code, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def is_plain(cell: Any) -> bool:
    """Whether a cell says that it uses nothing of midstream."""
    return PLAIN in cell.metadata.get("tags", [])


def lines_of(source: str) -> int:
    """Number of lines that are neither blank nor comments."""
    lines = (line.strip() for line in source.split("\n"))
    return sum(line != "" and not line.startswith("#") for line in lines)


def midstream_lines(notebook: Any) -> int:
    """Lines of code, data and printing too, of all cells but the plain ones."""
    return sum(lines_of(cell.source) for cell in code_cells(notebook) if not is_plain(cell))


def all_lines(notebook: Any) -> int:
    """Lines of code of all cells."""
    return sum(lines_of(cell.source) for cell in code_cells(notebook))


def names_of_midstream(notebook: Any) -> set[str]:
    """What a notebook imports from midstream, and `llm`, the engine."""
    found = {"llm", "midstream"}
    for cell in code_cells(notebook):
        for node in ast.walk(parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("midstream"):
                found |= {one.asname or one.name for one in node.names}
    return found


def parse(source: str) -> ast.Module:
    """Parse a cell, in which `await` may stand outside of functions."""
    return compile(source, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def source_hash(notebook: Any) -> str:
    """Hash of the code, which the stored outputs are of."""
    text = "\0".join(cell.source for cell in code_cells(notebook))
    return hashlib.sha256(text.encode()).hexdigest()


def store(notebook: Any, path: Path) -> None:
    """Write an executed notebook: without log lines, progress bars and what differs by machine.

    A chart is kept as SVG alone, which code hosts show: its PNG is three times as large.
    """
    for nth, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{nth}"
        cell.metadata = {"tags": tags} if (tags := cell.metadata.get("tags")) else {}
        if cell.cell_type == "code":
            # vLLM and tqdm write to stderr; so do processes of the engine to stdout.
            cell.outputs = [one for one in cell.outputs if one.output_type != "stream"]
            for one in cell.outputs:
                one.pop("transient", None)
                if "image/svg+xml" in one.get("data", {}):
                    one.data.pop("image/png", None)
                    one.metadata.pop("image/png", None)
    notebook.metadata = {**_METADATA, "midstream": {"source": source_hash(notebook)}}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def hub_cache(folder: Path, model: Path) -> Path:
    """Make a cache of the Hugging Face Hub in a folder, with a model's files under its name."""
    cache = folder / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = cache / "snapshots" / "local"
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("local")
    for path in model.resolve().iterdir():
        (snapshot / path.name).symlink_to(path)
    return folder


@contextmanager
def kernel(hub: Path, **environment: str) -> Iterator[tuple[KernelManager, Any]]:
    """A kernel of this Python that finds the model in a cache, and nothing online."""
    env = {**os.environ, **ENVIRONMENT, "HF_HOME": str(hub), **environment}
    manager, client = start_new_kernel(kernel_name="python3", env=env, cwd=str(FOLDER))
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def execute(notebook: Any, started: tuple[KernelManager, Any], timeout: int = 500) -> None:
    """Execute a notebook in a kernel; its outputs replace the stored ones."""
    manager, client = started
    runner = NotebookClient(notebook, km=manager, timeout=timeout, record_timing=False)
    runner.kc = client
    runner.execute()


def share_engine(started: tuple[KernelManager, Any]) -> None:
    """Have all `LLM(…)` in a kernel return one engine. Call `forget` between notebooks."""
    _run(started, _SHARED.format(model=MODEL))


def forget(started: tuple[KernelManager, Any]) -> None:
    """Delete what a notebook made in a kernel, except the shared engine."""
    _run(started, _FORGET)


def _run(started: tuple[KernelManager, Any], code: str) -> None:
    reply = started[1].execute_interactive(code, output_hook=lambda _: None, timeout=300)
    assert reply["content"]["status"] == "ok", reply["content"]
