"""Folders of sparse autoencoders: the layouts that are read, and those of other tools."""

import json

import pytest
from unit.sae.test_sae import FLAT, tensors, write

from midstream.errors import SpecError
from midstream.sae.sae import SAE


def test_a_configuration_may_begin_with_a_byte_order_mark(tmp_path):
    folder = write(tmp_path, FLAT, tensors())
    (folder / "cfg.json").write_text(json.dumps(FLAT), encoding="utf-8-sig")
    assert SAE.load(folder).hook_name == FLAT["hook_name"]


def test_a_folder_of_another_tool_is_refused_with_the_layouts_that_are_read(tmp_path):
    layouts = ("`cfg.json` and `sae_weights.safetensors`", "`params.npz`", "SAE(")
    for names in (
        [], ["model.pt", "config.json"], ["cfg.json", "model.safetensors"], ["layers.3"]
    ):  # fmt: skip
        folder = tmp_path / f"of {len(names)} {''.join(names[:1])}"
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"{}")
        with pytest.raises(SpecError) as caught:
            SAE.load(folder)
        said = str(caught.value)
        assert all(part in said for part in (str(folder), *layouts))
        assert all(f"`{name}`" in said for name in names)
        assert ("it is empty" in said) == (not names)


def test_a_folder_with_too_many_files_is_described_shortly(tmp_path):
    for nth in range(300):
        (tmp_path / f"file{nth:04}").touch()
    with pytest.raises(SpecError, match="and 292 more") as caught:
        SAE.load(tmp_path)
    assert len(str(caught.value)) < 1000
