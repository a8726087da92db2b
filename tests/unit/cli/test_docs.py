"""`midstream docs`: opens the installed site, and says how to build one that is not there."""

from pathlib import Path

import pytest
from support.command import CliRunner

from midstream.cli import docs
from midstream.cli.app import app


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What the browser was told to open; the site is a folder of its own."""
    found: list[str] = []
    monkeypatch.setattr(docs, "SITE", tmp_path / "site")
    monkeypatch.setattr(docs.webbrowser, "open", found.append)
    return found


def build(folder: Path) -> Path:
    for name in ("index", "quickstart", "api/edits"):
        path = folder / "site" / f"{name}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (folder / "secret.html").write_text("")
    return folder / "site"


@pytest.mark.parametrize("page", ["api/edits", "api/edits.md", "api/edits.html"])
def test_a_page_is_opened_and_its_address_printed(opened, tmp_path, page):
    address = (build(tmp_path) / "api/edits.html").resolve().as_uri()
    shown = CliRunner().invoke(app, ["docs", page])
    assert shown.exit_code == 0
    assert shown.stdout == f"{address}\n"
    assert opened == [address]


def test_without_a_page_it_is_the_first_one_and_print_opens_no_browser(opened, tmp_path):
    address = (build(tmp_path) / "index.html").resolve().as_uri()
    assert CliRunner().invoke(app, ["docs", "--print"]).stdout == f"{address}\n"
    assert opened == []


@pytest.mark.parametrize("page", ["nowhere", "../secret"])
def test_an_unknown_page_is_rejected_and_the_pages_are_named(opened, tmp_path, page):
    build(tmp_path)
    shown = CliRunner().invoke(app, ["docs", page])
    assert shown.exit_code == 2
    assert f"there is no page '{page}'; there are index, quickstart" in shown.stderr
    assert opened == []


def test_an_installation_without_the_site_names_the_command_that_builds_it(opened):
    shown = CliRunner().invoke(app, ["docs"])
    assert shown.exit_code == 2
    assert "scripts/site.sh" in shown.stderr
    assert Path(docs.__file__).parents[3].joinpath("scripts/site.sh").is_file()
