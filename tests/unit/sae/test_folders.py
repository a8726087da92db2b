"""Folders of sparse autoencoders: the layouts that are read, and those of other tools."""

from __future__ import annotations

import json

import pytest
from unit.sae.test_sae import FLAT, tensors, write

from midstream.errors import SpecError
from midstream.sae.sae import SAE


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path):
    folder = write(tmp_path, FLAT, tensors())
    (folder / "cfg.json").write_text(json.dumps(FLAT), encoding="utf-8-sig")
    assert SAE.load(folder).hook_name == FLAT["hook_name"]


@pytest.mark.parametrize(
    "names", [[], ["ae.pt", "config.json"], ["cfg.json", "sae.safetensors"], ["layers.3"]]
)
def test_a_folder_of_another_tool_is_refused_with_the_layouts_that_are_read(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(SpecError) as caught:
        SAE.load(tmp_path)
    told = str(caught.value)
    assert str(tmp_path) in told
    for layout in ("`cfg.json` and `sae_weights.safetensors`", "`params.npz`"):
        assert layout in told
    assert "SAE(" in told
    assert all(f"`{name}`" in told for name in names)
    assert ("it is empty" in told) == (not names)


def test_a_folder_with_too_many_files_is_described_shortly(tmp_path):
    for nth in range(2000):
        (tmp_path / f"file{nth:04}").touch()
    with pytest.raises(SpecError, match="and 1992 more") as caught:
        SAE.load(tmp_path)
    assert len(str(caught.value)) < 1000
