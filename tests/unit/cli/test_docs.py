"""`midstream docs`: opens the installed site, and builds one that a clone lacks."""

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


def test_a_clone_builds_the_site_at_the_first_call(opened, tmp_path, monkeypatch):
    script = tmp_path / "site.sh"
    script.write_text('#!/bin/sh\nmkdir -p "$3" && echo page > "$3/index.html" && "$PYTHON" -V\n')
    script.chmod(0o755)
    monkeypatch.setattr(docs, "SCRIPT", script)
    for _ in range(2):  # the second call finds it
        shown = CliRunner().invoke(app, ["docs", "--print"])
        assert shown.exit_code == 0, shown.stderr
        assert shown.stdout == f"{(tmp_path / 'site/index.html').resolve().as_uri()}\n"
        script.unlink(missing_ok=True)


def test_a_site_that_cannot_be_built_is_an_error_with_its_last_lines(opened, tmp_path, monkeypatch):
    script = tmp_path / "site.sh"
    script.write_text("#!/bin/sh\necho no such theme >&2; exit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(docs, "SCRIPT", script)
    shown = CliRunner().invoke(app, ["docs"])
    assert shown.exit_code == 2
    assert "scripts/site.sh failed: no such theme" in shown.stderr


def test_an_installation_without_the_site_names_what_builds_it(opened, tmp_path, monkeypatch):
    assert docs.SCRIPT.is_file()
    monkeypatch.setattr(docs, "SCRIPT", tmp_path / "absent")
    shown = CliRunner().invoke(app, ["docs"])
    assert shown.exit_code == 2
    assert "scripts/setup.sh docs" in shown.stderr
