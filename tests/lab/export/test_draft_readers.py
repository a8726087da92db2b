"""What speculators and SpecForge themselves read of exports for draft models; scripts/trainers.sh
installs both.
"""

import pytest
import torch
from lab.export.test_forms import DRAFT, TAPS, completions, store

from midstream.lab.export import export

LAYERS = [TAPS[0], ("resid_post", 2), TAPS[2]]


def test_speculators_reads_each_completion(tmp_path):
    data = pytest.importorskip("speculators.train.data")
    stored = store(tmp_path / "store", taps=LAYERS)
    export(stored, tmp_path / "data", "speculators")
    read = data.ArrowDataset(max_len=32, datapath=tmp_path / "data", on_missing="raise")
    wanted = completions(stored, LAYERS, 99)
    assert len(read) == len(wanted) == 4
    assert read.approx_lengths == [len(ids) for ids, *_ in wanted]
    for row, (ids, mask, vectors) in zip(map(read.__getitem__, range(4)), wanted, strict=True):
        values = torch.stack(vectors)
        assert row["input_ids"].tolist() == list(ids)
        assert row["loss_mask"].tolist() == [int(counts) for counts in mask]
        assert torch.equal(row["hidden_states"], values[:, :2].flatten(1))
        assert torch.equal(row["verifier_last_hidden_states"], values[:, 2])
    together = data.CollateFn(32, 8, 2)([read[number] for number in range(4)])
    assert together["hidden_states"].shape == (1, 32, 16)
    assert (together["document_ids"] >= 0).sum() == 28


def test_specforge_reads_each_completion(tmp_path, monkeypatch):
    reader = pytest.importorskip("specforge.runtime.data_plane.offline_reader")
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.runtime.data_plane.feature_store import load_feature_file

    stored = store(tmp_path / "store", taps=DRAFT)
    export(stored, tmp_path / "data", "specforge")
    monkeypatch.setenv("SPECFORGE_VALIDATE_OFFLINE_FEATURES", "1")
    samples = reader.OfflineManifestReader(str(tmp_path / "data")).read()
    wanted = completions(stored, DRAFT, 99)
    assert len(samples) == len(wanted) == 4
    for sample, (ids, mask, vectors) in zip(samples, wanted, strict=True):
        values = torch.stack(vectors)
        path = sample.feature_store_uri.removeprefix("file://")
        row = normalize_offline_sample(load_feature_file(path), max_len=32)
        assert row["input_ids"].tolist() == [list(ids)]
        assert row["loss_mask"].tolist() == [[*map(int, mask[:-1]), 0]]
        assert torch.equal(row["hidden_state"], values[:, :2].flatten(1)[None])
        assert torch.equal(row["target"], values[:, 2][None])
