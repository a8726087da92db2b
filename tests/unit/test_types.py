"""Type checkers accept the examples and the documents' snippets, and reject wrong arguments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import blocks

# Starts processes of its own, which take long to read PyTorch and vLLM.
pytestmark = [pytest.mark.engine, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/guide.md",
    "docs/operations.md",
    "docs/selecting.md",
    "docs/steering.md",
    "docs/coming-from.md",
    "docs/export.md",
    "docs/probing.md",
    "docs/quickstart.md",
)
RIGHT = """
from pathlib import Path
import numpy as np
import torch
from midstream import LLM, SAE, Ablate, Capture, Clamp, Directions, Gate, Probe, Replace
from midstream import SamplingParams, Scale
from midstream import Steer, TokenIds, Window
from midstream.plan import Sites
from midstream.sites import HookName
from midstream.store import RowDataset, SequenceDataset, open_store

v = torch.zeros(4)
a = np.zeros(4, dtype=np.float16)
Steer(v, layer=14, scale=1.0)
Steer(v, layer=3, site=Sites("mlp_out"))
Capture(sites=HookName("blocks.10.hook_resid_post"))
SamplingParams(2, max_tokens=3, capture=Capture([1]), steering_vectors={"post_block": {3: v}})
LLM("m", dtype="float32", enforce_eager=True, midstream={"sites": ["z"]}, layers=[1])
Steer(a, [1, 2], torch.tensor(2.0), site="resid_mid", positions=["prompt", -1, TokenIds([3])])
Steer("happy", scale=2)
Steer({3: v, 4: v})
Steer([0.0, 1.0], range(3), np.float32(2), phase="generated", norm="match")
Ablate(torch.zeros(2, 4), 3)
Capture("all", ["resid_pre", "resid_post"], positions=slice(0, 4))
Capture(layers=[np.int64(3)], positions="last_prompt", exclude=0)
Clamp(v, 3, low=0.0)
Gate(Steer(v, 3), v, 0.5)
Gate(Steer(v, 3), Probe(v, 2))
Replace(torch.zeros(2, 4), 3, positions=range(2))
Scale(0.5, 3, positions=Window(0, 3))
llm = LLM("m")
out = llm.generate(
    "a", SamplingParams(max_tokens=2), capture=Capture([1]), edits=[Steer(v, 3), Scale(1.0, 2)]
)[0]
rows: torch.Tensor = out.activations["resid_post", 3]
for short in (True, "all", 3, [1, 2], range(3), a, ["resid_post.1"], [True, None]):
    llm.generate(["a", "b"], capture=short)
llm.generate(["a", "b"], capture=[[1], "all"])
found = Directions.fit(llm, ["a"], ["b"])
for edit in (found, found[3], 2.0 * found, -1 * found[3], -found, (v, 10)):
    llm.generate("a", edits=edit, steer=edit)
llm.generate("a", edits=[(v, 3), found[2]], steer=[(v, 3), found[2]])
llm.vectors.register("mood", found)
llm.saes.register("sae", "folder")
llm.lenses.register("lens", Path("folder"))
logits, cache = llm.run_with_cache("a", "blocks.1.hook_resid_post", edits=found[3])
last: torch.Tensor = logits[0, -1] + cache["resid_post", 1][0, -1, 0]
url: str = found.push_to_hub("me/mood", model="m", license="mit")
again: Directions = Directions.from_pretrained("me/mood")
sae: SAE = SAE.from_pretrained("me/saes", "layers.3")
status: str = out.receipt.status
text: str = out.outputs[0].text
store = open_store("folder")
for stored in (store, store.select(layer=3)):
    RowDataset(stored, 8)
    SequenceDataset(stored, 2, length=256, join=["resid_post.3"])
"""
WRONG = """
import torch
import midstream
from midstream import Capture, Directions, Gate, LLM, SamplingParams, Steer
v = torch.zeros(4)
Steer(v, layer="x")
Steer(v, layer=1, scale="big")
Steer(3, layer=1)
Steer(v, 1, phase="decode")
Steer(v, 1, norm="l2")
Steer(v, 1, positions="last_token")
Capture(layers="every")
Capture([1], stream="yes")
Gate("happy", v)
LLM("m").generate("a", capture=3.5)
Steer(v, 1, site="residul")
Capture([1], sites=["resid_post", "mlp_uot"])
LLM("m", sites=["z"])
LLM("m").generate("a", captures=Capture([1]))
LLM("m").chat([], tool=[])
SamplingParams(max_tokns=3)
SamplingParams(edit=Steer(v, 1))
midstream.SpecErorr
Directions.load("d").vector
LLM("m").generate("a", edits=v)
LLM("m").saes.register("sae", 3)
LLM("m").run_with_cache("a", return_type="loss")
LLM("m").generate("a")[0].activation
text: int = LLM("m").generate("a")[0].receipt.status
"""
# What a checker says of vLLM's own types, and of objects of plain vLLM in the pages.
_VLLMS = ("EngineInput", 'class "RequestOutput"')
# A name with a layer in a page, which no type lists: checked programs write it as a `HookName`.
_LAYERED = ("hook_resid_post", "HookName")
_CHECKED = {"reportArgumentType", "reportAttributeAccessIssue", "reportCallIssue"}


def pyright(folder: Path, *more: Path) -> dict[str, list[tuple[int, str]]]:
    """(line, message) of each error of pyright, by file name."""
    settings = {
        "include": [str(folder), *map(str, more)],
        "extraPaths": [str(ROOT / "src")],
        "pythonVersion": "3.10",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*command, "-p", folder], capture_output=True, text=True, check=False, timeout=300
    )
    shown = json.loads(done.stdout)
    assert shown["summary"]["filesAnalyzed"] > 0, done.stderr
    found: dict[str, list[tuple[int, str]]] = {}
    for one in shown["generalDiagnostics"]:
        if one["severity"] == "error" and one.get("rule") in {*_CHECKED, "reportAssignmentType"}:
            place = one["range"]["start"]["line"] + 1
            found.setdefault(Path(one["file"]).name, []).append((place, one["message"]))
    return found


def lines_with_an_error(text: str) -> list[int]:
    return [n for n, line in enumerate(text.splitlines(), 1) if n > 5 and line]


def snippets(page: str) -> str:
    """Return a page's Python with the line numbers that it has there."""
    lines: list[str] = []
    for start, _, code in blocks(page, ["python"]):
        lines += [""] * (start - len(lines)) + code.splitlines()
    return "\n".join(lines)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    folder = tmp_path_factory.mktemp("typed")
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)
    for page in PAGES:
        (folder / f"{Path(page).stem}.py").write_text(snippets(page))
    return pyright(folder, ROOT / "examples")


def test_right_arguments_and_outputs_have_the_types_that_are_declared(found):
    assert found.get("right.py", []) == []


def test_each_wrong_argument_is_an_error_of_its_line(found):
    # A call that fits no overload is an error, and the argument at fault another one.
    assert sorted({line for line, _ in found["wrong.py"]}) == lines_with_an_error(WRONG)


def test_the_examples_and_the_pages_have_no_error(found):
    rest = {
        name: [each for each in errors if not any(word in each[1] for word in (*_VLLMS, *_LAYERED))]
        for name, errors in found.items()
        if name not in ("right.py", "wrong.py")
    }
    assert {name: errors for name, errors in rest.items() if errors} == {}


# A page's snippets may lack annotations, define a name twice, and use names that its text explains.
_PAGES = ("--no-strict-optional", "--allow-untyped-defs", "--allow-incomplete-defs",
    "--allow-untyped-calls", "--allow-redefinition", "--disable-error-code=type-arg",
    "--disable-error-code=no-redef", "--disable-error-code=name-defined",
    # The project's own cache is of other options: sharing it, each run would read all again.
    f"--cache-dir={ROOT / '.mypy_cache' / 'pages'}")  # fmt: skip


@pytest.fixture(scope="module")
def mypy_errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str]]]:
    """(line, text) of each error of mypy, by file name. One run: each takes long to read vLLM."""
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "right.py").write_text(RIGHT)
    (folder / "wrong.py").write_text(WRONG)
    for page in PAGES:
        (folder / f"{Path(page).stem.replace('-', '_')}.py").write_text(snippets(page))
    files = [*folder.glob("*.py"), *sorted((ROOT / "examples").glob("*.py"))]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *_PAGES, *map(str, files)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr  # those of wrong.py
    found: dict[str, list[tuple[int, str]]] = {}
    for line in done.stdout.splitlines():
        place, is_error, text = line.partition(": error: ")
        if is_error:
            name, _, number = place.rpartition(":")
            found.setdefault(Path(name).name, []).append((int(number), text))
    return found


def test_mypy_finds_no_error_in_the_examples_and_the_pages(mypy_errors):
    rest = {
        name: [error for error in errors if not any(word in error[1] for word in _LAYERED)]
        for name, errors in mypy_errors.items()
        if name != "wrong.py"
    }
    assert {name: errors for name, errors in rest.items() if errors} == {}


def test_mypy_agrees(mypy_errors):
    # The project's settings skip vLLM, so an output's unknown attribute may be vLLM's.
    unseen = WRONG.splitlines().index('LLM("m").generate("a")[0].activation') + 1
    lines = [line for line in lines_with_an_error(WRONG) if line != unseen]
    assert sorted({line for line, _ in mypy_errors["wrong.py"]}) == lines
