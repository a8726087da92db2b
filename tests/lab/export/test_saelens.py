"""SAELens reads exported activations, and trains from them and from rows of a store."""

import json

import pytest
import torch
from support import saelens
from unit.store.making import header, rows_of, write

from midstream import open_store
from midstream.lab.export import export, saelens_batches
from midstream.store import Entry, RowDataset

TAPS = (("resid_post", 1), ("mlp_in", 2))
HOOK = "blocks.1.hook_resid_post"
WIDTH = 16


def sparse_rows(count, seed):
    """[count, width]: each a sum of three of 32 directions."""
    draw = torch.Generator().manual_seed(7)
    directions = torch.nn.functional.normalize(torch.randn(32, WIDTH, generator=draw), dim=-1)
    draw.manual_seed(seed)
    active = torch.rand(count, 32, generator=draw).topk(3).indices
    weights = torch.zeros(count, 32).scatter_(1, active, 1 + torch.rand(count, 3, generator=draw))
    return weights @ directions


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """40 requests of 100 tokens."""
    head = header(dtype="float32", hidden_size=WIDTH)
    entries = [
        Entry(
            request=f"r{number}",
            prompt_tokens=100,
            taps={tap: rows_of(sparse_rows(100, 2 * number + at), head)
                  for at, tap in enumerate(TAPS)},
        )
        for number in range(40)
    ]  # fmt: skip
    root = tmp_path_factory.mktemp("acts")
    write(root, entries, head, shard_bytes=50_000)
    return open_store(root)


def assert_learnt(sae, losses):
    assert losses[-20:].mean() < 0.4 * losses[:5].mean()
    assert saelens.explained(sae, sparse_rows(500, 999)) > 0.6


def test_an_sae_trains_from_exported_activations(stored, tmp_path):
    from sae_lens.config import CacheActivationsRunnerConfig
    from sae_lens.training.activations_store import ActivationsStore

    export(stored.select(site="resid_post"), tmp_path / "acts", "saelens", length=50)
    known = json.loads((tmp_path / "acts" / "cache_activations_runner_cfg.json").read_text())
    config = CacheActivationsRunnerConfig(
        **known | {"model_batch_size": 8}, new_cached_activations_path=str(tmp_path / "acts")
    )
    assert (config.hook_name, config.d_in, config.context_size) == (HOOK, WIDTH, 50)
    assert (config.training_tokens, config.model_name) == (4000, "acme/tiny")
    store = ActivationsStore.from_config(None, config)
    # SAELens mixes rows within a buffer: the sums of all rows are those of the store.
    raw, ids = store.get_raw_llm_batch()
    assert raw.shape == (8 * 50, WIDTH)
    assert torch.equal(raw[:100], sparse_rows(100, 0))
    assert ids[:100].tolist() == [10 * at for at in range(100)]
    store.current_row_idx, store.train_batch_size_tokens = 0, 64
    store.n_batches_in_buffer = 16
    assert_learnt(*saelens.trained(iter(store), WIDTH, 64, steps=200, batch=64))


def test_an_sae_trains_from_rows_of_a_store(stored):
    dataset = RowDataset(stored, 64, join=TAPS[:1], seed=1)
    batches = saelens_batches(dataset)
    assert_learnt(*saelens.trained(batches, WIDTH, 64, steps=200, batch=64))


def test_batches_of_several_taps_are_named_as_saelens_names_them(stored):
    dataset = RowDataset(stored, 64, join=TAPS, shuffle=False)
    epochs = list(saelens_batches(dataset, epochs=2, dtype=torch.float16))
    assert len(epochs) == 2 * 63
    assert list(epochs[0]) == [HOOK, "blocks.2.mlp.hook_in"]
    assert epochs[0][HOOK].dtype == torch.float16
    assert torch.equal(epochs[63]["blocks.2.mlp.hook_in"], sparse_rows(100, 1)[:64].half())
    plain = RowDataset(stored.select(layer=2), 64, shuffle=False)
    assert torch.equal(next(saelens_batches(plain)), sparse_rows(100, 1)[:64])
    shuffled = RowDataset(stored.select(layer=2), 4000)
    one, two = saelens_batches(shuffled, epochs=2)
    assert not torch.equal(one, two), "each epoch has an order of its own"
    assert torch.allclose(one.sum(0), two.sum(0), atol=1e-2)
    assert list(saelens_batches([])) == []
