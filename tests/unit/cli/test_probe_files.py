"""Commands on files of probes: what they say, as JSON too, and their exit status."""

import json

import pytest
from support.command import CliRunner

from midstream import Probe
from midstream.cli.app import app
from midstream.plan import ProbeInfo


@pytest.fixture
def files(tmp_path):
    info = ProbeInfo("org/small", 3, scores={"auc": 0.91}, threshold=1.5, classes=("no", "yes"))
    other = ProbeInfo("org/small", 3, scores={"auc": 0.875}, threshold=1.5, classes=("no", "yes"))
    Probe([3.0, 0.0, 4.0], layer=5, name="guard").with_info(info).save(tmp_path / "a.safetensors")
    Probe([4.0, 0.0, 3.0], layer=5, name="guard").with_info(other).save(tmp_path / "b.safetensors")
    return [str(tmp_path / name) for name in ("a.safetensors", "b.safetensors")]


def run(*words):
    result = CliRunner().invoke(app, ["probe", *words])
    return result.exit_code, result.output


def test_show_says_what_a_file_has(files):
    code, text = run("show", files[0])
    assert code == 0
    for words in (
        "name='guard', layer=5",
        "model: org/small",
        "scores: auc 0.91",
        "threshold: 1.5",
    ):
        assert words in text
    assert "notes" not in text
    code, text = run("show", files[0], "--json")
    shown = json.loads(text)
    assert (code, shown["info"]["width"], shown["shapes"]) == (0, 3, {"direction": [3]})
    assert shown["probe"]["direction"] == {"tensor": "direction"}


def test_diff_says_what_differs_by_its_exit_status_too(files):
    code, text = run("diff", *files)
    assert code == 1
    assert "cosine of direction: 0.960000" in text
    assert "info.scores.auc: 0.91 → 0.875 (-0.035)" in text
    assert "threshold" not in text
    code, text = run("diff", *files, "--json")
    shown = json.loads(text)
    assert (code, shown["status"]) == (1, 1)
    assert shown["cosines"] == {"direction": pytest.approx(0.96)}
    assert run("diff", files[0], files[0])[0] == 0


def test_what_is_no_file_of_a_probe_is_refused(files, tmp_path):
    (tmp_path / "c.safetensors").write_bytes(b"no")
    for words in (["show"], ["diff", files[0]]):
        code, text = run(*words, str(tmp_path / "c.safetensors"))
        assert (code, "cut short" in text) == (2, True)
        code, text = run(*words, str(tmp_path / "gone.safetensors"), "--json")
        assert (code, "cannot be read" in text) == (2, True)
