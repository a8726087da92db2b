"""Hooks of mkdocs: pages of linked files outside docs/, of notebooks with their outputs, long
tables that are made from code and data (`<!-- table: NAME -->`), and words for the search.

Links stay those of the repository: `../examples/common.py` leads to the file there, and to a page
with its text on the site. Nothing is fetched.
"""

from __future__ import annotations

import base64
import functools
import html
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import limits_table
import models_table
import nbformat
import never_table
import versions_table
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yml": "yaml"}
NOTEBOOKS = "examples/notebooks"
TABLE = re.compile(r"<!-- table: (.+) -->")
# For contributors: neither in the navigation nor in the search.
INTERNAL = ("files/", "internal/", "contributing.md")
# Not into fenced blocks, where this is text.
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
# Search needs English alone, and nobody debugs the theme.
UNNEEDED = ("assets/javascripts/lunr", "**/*.map", "sitemap.xml.gz")

# Path in the repository by URI of each page that is made of a file outside docs/.
_sources: dict[str, str] = {}
# Outputs of notebooks, which Markdown must not read, by URI of the page.
_outputs: dict[str, list[str]] = {}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of files outside docs/, beginning with those that the documents link to."""
    _sources.clear()
    _outputs.clear()
    waiting = list(PAGES)
    waiting += [f"{NOTEBOOKS}/{path.name}" for path in sorted((ROOT / NOTEBOOKS).glob("*.ipynb"))]
    for file in list(files.documentation_pages()):
        waiting += _linked(f"docs/{file.src_uri}", file.content_string)
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).exists():
            continue
        seen.add(path)
        uri, text = _uri(path), _text(path)
        # Links of a folder's page start in the folder.
        _sources[uri] = f"{path}/README.md" if (ROOT / path).is_dir() else path
        files.append(File.generated(config, uri, content=text))
        waiting += _linked(_sources[uri], text)
    _list_all(files, config)
    return files


def _list_all(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that mkdocs.yml does not list to its section Reference."""
    listed = str(config.nav)
    others = next(section["Reference"] for section in config.nav or () if "Reference" in section)
    for file in files.documentation_pages():
        uri = file.src_uri
        if f"'{uri}'" not in listed and not uri.startswith(INTERNAL):
            others.append(uri)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the text with its tables, and links to files outside docs/ turned to their pages."""
    own = page.file.src_uri
    source = _sources.get(own, f"docs/{own}")
    if own == "index.md":
        page.meta["hide"] = ["toc"]
    if own.startswith(INTERNAL):
        page.meta["search"] = {"exclude": True}
    page.meta["tags"] = config.extra["search_words"].get(own, [])
    markdown = TABLE.sub(lambda found: _tables()[found[1]], markdown)

    def turned(found: re.Match[str]) -> str:
        path = _repository_path(source, found[1])
        if path.startswith("docs/") and source.startswith("docs/"):
            return found[0]
        target = posixpath.relpath(_uri(path), posixpath.dirname(own) or ".")
        return f"]({target}{found[2] or ''})"

    parts = FENCE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(turned, part) for i, part in enumerate(parts))


@functools.cache
def _tables() -> dict[str, str]:
    """Return the tables of pages, by name."""
    scripts = (limits_table, models_table, never_table, versions_table)
    return {name: text for script in scripts for name, text in script.site_tables().items()}


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a notebook's page with its outputs."""
    for number, output in enumerate(_outputs.get(page.file.src_uri, ())):
        content = content.replace(f"<p>notebook-output-{number}.</p>", output)
    return content


def on_post_build(config: MkDocsConfig) -> None:
    """Delete what the site does not need."""
    site = Path(config.site_dir)
    for pattern in UNNEEDED:
        for path in sorted(site.glob(pattern), reverse=True):
            for inner in [*sorted(path.rglob("*"), reverse=True), path]:
                inner.rmdir() if inner.is_dir() else inner.unlink()


def _linked(source: str, text: str) -> Iterator[str]:
    """Yield the files and folders of the repository outside docs/ that a text links to."""
    for part in FENCE.split(text)[::2]:
        for target, _ in LINK.findall(part):
            path = _repository_path(source, target)
            if not path.startswith(("docs/", "..")):
                yield path


def _repository_path(source: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _uri(path: str) -> str:
    """Return the page of a file or folder of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".ipynb"):
        return f"notebooks/{posixpath.basename(path).removesuffix('.ipynb')}.md"
    if (ROOT / path).is_dir():
        return f"files/{path}/index.md"
    # Data is a file for programs.
    return f"files/{path}" if path.endswith((".md", ".json")) else f"files/{path}.md"


def _text(path: str) -> str:
    """Return a file or folder of the repository as Markdown."""
    file = ROOT / path
    if path.endswith(".ipynb"):
        return _notebook(path)
    if file.is_dir():
        readme = file / "README.md"
        if readme.is_file():
            return readme.read_text(encoding="utf-8")
        names = sorted(one.name for one in file.iterdir() if not one.name.startswith(("_", ".")))
        return f"# {path}\n\n" + "\n".join(f"- [{name}]({name})" for name in names) + "\n"
    text = file.read_text(encoding="utf-8")
    if path.endswith((".md", ".json")):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n````\n"


def _notebook(path: str) -> str:
    """Return a notebook as Markdown, with a paragraph in place of each output."""
    found = nbformat.read(ROOT / path, as_version=4)
    outputs = _outputs.setdefault(_uri(path), [])
    parts = []
    for cell in found.cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            parts.append(f"notebook-output-{len(outputs)}.")
            outputs.append(f'<div class="notebook-output">{_shown(output)}</div>')
    return "\n\n".join(parts) + "\n"


def _shown(output: Any) -> str:
    """Return one output of a cell as HTML."""
    if output.output_type == "stream":
        return f"<pre>{html.escape(output.text)}</pre>"
    data = output.get("data", {})
    if "text/html" in data:
        return str(data["text/html"])
    if "image/svg+xml" in data:
        encoded = base64.b64encode(data["image/svg+xml"].encode()).decode()
        return f'<img alt="chart" src="data:image/svg+xml;base64,{encoded}">'
    return f"<pre>{html.escape(data.get('text/plain', ''))}</pre>"
