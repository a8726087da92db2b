"""Exports in which the rows of a token are together, as the tools that they are for read them."""

import itertools
import json
import os
import re
from collections import Counter

import datasets
import numpy as np
import pytest
import safetensors.torch
import torch
from unit.store.making import entry, header, write

from midstream import open_store
from midstream.errors import StoreError
from midstream.lab.cli.export import FORMS
from midstream.lab.export import export, forms, rows
from midstream.store.dataset import TokenSource

TAPS = (("resid_post", 1), ("mlp_in", 2), ("resid_post", 3))
DRAFT = (("resid_post", 1), ("resid_post", 2), ("final_norm", 3))
ROLES = {"user": [[0, 2]], "assistant": [[2, 3]]}
DTYPES = ("bfloat16", "float16", "float32")


def store(root, *, taps=TAPS, dtype="bfloat16", widths=(), codec="raw", lengths=(7, 4, 12, 5)):
    """Completions of these lengths in several shards; the prompts are of 4 tokens."""
    head = header(dtype=dtype, widths=widths, codec=codec)
    entries = [
        entry(f"r{number}", rows=length, taps=taps, head=head, seed=10 * number, prompt_tokens=4,
              tag="t" * (number % 2), child=number % 2,
              metadata={"roles": ROLES} if number == 1 else {})
        for number, length in enumerate(lengths)
    ]  # fmt: skip
    write(root, entries, head, shard_bytes=700)
    return open_store(root)


def tokens_of(stored, taps=TAPS, *, exclude=False):
    """Of each token, as `request.activations()` gives them: request, position, id, vectors, mask;
    in the order of the shards.
    """
    found = []
    for request in sorted(stored.requests, key=lambda one: (one.shard, one.request)):
        rows = request.activations()
        ids = {int(at): 10 * int(at) + 1 for at in rows.positions}
        for at, position in enumerate(rows.positions.tolist()):
            if exclude and not position:
                continue
            vectors = [rows[tap][at] for tap in taps]
            mask = position in (2, 4, 5, 6, 7) if request.request == "r1" else True
            found.append((request.request, position, ids[position], vectors, mask))
    return found


def test_the_command_and_the_function_have_the_same_forms():
    assert (*forms.ROWS, *forms.ALIGNED) == FORMS


def same(array, vector):
    """Whether a row of a file has the very values of a vector."""
    wanted = vector if vector.dtype == torch.float16 else vector.float()
    return torch.equal(torch.as_tensor(np.array(array)), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exclude", [None, "first"])
def test_a_data_set_has_each_token_with_its_vectors_and_a_card(tmp_path, dtype, exclude):
    stored = store(tmp_path / "store", dtype=dtype, widths={TAPS[1]: 12})
    assert len(stored.shards) > 1
    join = [TAPS[2], TAPS[0], TAPS[1]]
    done = export(stored, tmp_path / "rows", "datasets", join=join, exclude=exclude)
    read = datasets.load_dataset(str(tmp_path / "rows"), split="train", cache_dir=tmp_path / "hub")
    wanted = tokens_of(stored, join, exclude=bool(exclude))
    assert len(read) == done.rows == len(wanted) == (24 if exclude else 28)
    assert done.skipped == done.cut == 0
    names = ["resid_post.3", "resid_post.1", "mlp_in.2"]
    assert read.column_names == ["request", "tag", "child", "position", "token_id", "loss_mask",
                                 *names]  # fmt: skip
    own = {(row["request"], row["position"]): row for row in read.with_format("numpy")}
    for request, position, token_id, vectors, mask in wanted:
        row = own[request, position]
        odd = int(request[1]) % 2
        assert (row["token_id"], row["child"], row["tag"]) == (token_id, odd, "t" * odd)
        assert bool(row["loss_mask"]) == mask
        for name, vector in zip(names, vectors, strict=True):
            assert same(row[name].astype(np.float16 if dtype == "float16" else np.float32), vector)
    card = datasets.load_dataset_builder(str(tmp_path / "rows"), cache_dir=tmp_path / "hub")
    assert list(card.config.data_files) == ["train"]
    text = (tmp_path / "rows" / "README.md").read_text()
    rows_of_card = dict(re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE))
    assert rows_of_card["Model"] == "acme/tiny"
    assert rows_of_card["Revision"] == "abc"
    assert rows_of_card["Sites"] == "resid_post, mlp_in"
    assert rows_of_card["Layers"] == "1–3"
    assert rows_of_card["Dtype of the model"] == dtype
    assert rows_of_card["Tokens"] == str(len(wanted))


def test_a_card_is_valid_whatever_a_model_is_called(tmp_path):
    head = header(model='"]: - |x|\n---\n`<b>')
    write(tmp_path / "store", [entry(rows=3, taps=TAPS, head=head)], head)
    export(open_store(tmp_path / "store"), tmp_path / "rows", "datasets")
    read = datasets.load_dataset(str(tmp_path / "rows"), split="train", cache_dir=tmp_path / "hub")
    assert len(read) == 3
    text = (tmp_path / "rows" / "README.md").read_text()
    assert text.count("\n---\n") == 1
    assert "<b>" not in text


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_numpy_have_each_token_of_each_completion(tmp_path, dtype):
    stored = store(tmp_path / "store", dtype=dtype, widths={TAPS[1]: 12})
    assert export(stored, tmp_path / "rows", "memmap").rows == 28
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in (tmp_path / "rows").glob("*.npy")}
    assert set(arrays) == {"position", "token_id", "loss_mask", "completion",
                           "resid_post.1", "mlp_in.2", "resid_post.3"}  # fmt: skip
    lines = (tmp_path / "rows" / "requests.jsonl").read_text().splitlines()
    requests = [json.loads(line) for line in lines]
    manifest = json.loads((tmp_path / "rows" / "manifest.json").read_text())
    assert manifest["taps"] == ["resid_post.1", "mlp_in.2", "resid_post.3"]
    assert (manifest["dtype"], manifest["model"]) == (dtype, "acme/tiny")
    at = {
        (requests[number]["request"], int(position)): row
        for row, (number, position) in enumerate(
            zip(arrays["completion"], arrays["position"], strict=True)
        )
    }
    wanted = tokens_of(stored)
    assert len(at) == len(wanted) == 28
    for request, position, token_id, vectors, mask in wanted:
        row = at[request, position]
        number = int(arrays["completion"][row])
        assert requests[number]["child"] == int(request[1]) % 2
        assert int(arrays["token_id"][row]) == token_id
        assert bool(arrays["loss_mask"][row]) == mask
        for name, vector in zip(manifest["taps"], vectors, strict=True):
            assert same(arrays[name][row], vector)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_of_saelens_are_one_stream_of_tokens(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(rows, "_BATCH_BYTES", 600)  # several batches
    stored = store(tmp_path / "store", dtype=dtype, widths={TAPS[1]: 12})
    done = export(stored, tmp_path / "acts", "saelens", length=5, exclude="first")
    assert (done.rows, done.cut) == (20, 4)
    read = datasets.load_from_disk(str(tmp_path / "acts"))
    hooks = ["blocks.1.hook_resid_post", "blocks.2.mlp.hook_in", "blocks.3.hook_resid_post"]
    assert read.column_names == [*hooks, "token_ids"]
    assert read.features[hooks[1]].shape == (5, 12)
    wanted = tokens_of(stored, exclude=True)[:20]
    numpy = read.with_format("numpy")
    assert numpy["token_ids"][:].reshape(-1).tolist() == [token[2] for token in wanted]
    for number, hook in enumerate(hooks):
        values = np.asarray(numpy[hook][:])
        assert values.shape[:2] == (4, 5)
        for row, token in zip(values.reshape(20, -1), wanted, strict=True):
            kind = np.float16 if dtype == "float16" else np.float32
            assert same(row.astype(kind), token[3][number])


def completions(stored, taps, length):
    """Of each completion: token ids, mask, and vectors [n, taps, width], of its first tokens."""
    found = {}
    for request, position, token_id, vectors, mask in tokens_of(stored, taps):
        if position < length:
            found.setdefault(request, []).append((token_id, mask, torch.stack(vectors)))
    return [tuple(zip(*tokens, strict=True)) for tokens in found.values()]


@pytest.mark.parametrize("length", [None, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_files_of_speculators_are_completions_with_all_taps(tmp_path, dtype, length):
    taps = [TAPS[0], ("resid_post", 2), TAPS[2]]
    stored = store(tmp_path / "store", dtype=dtype, taps=taps)
    done = export(stored, tmp_path / "data", "speculators", length=length)
    assert (done.rows, done.cut) == ((28, 0) if length is None else (21, 7))
    read = datasets.load_from_disk(str(tmp_path / "data"))
    assert read.format["type"] == "torch"
    wanted = completions(stored, taps, length or 99)
    assert len(read) == len(wanted) == 4
    for number, (ids, mask, vectors) in enumerate(wanted):
        row = read[number]
        assert row["input_ids"].tolist() == list(ids)
        assert row["input_ids"].dtype == row["loss_mask"].dtype == torch.int64
        assert row["loss_mask"].tolist() == [int(counts) for counts in mask]
        assert int(row["seq_len"]) == len(ids)
        path = tmp_path / "data" / "hidden_states" / f"hs_{number}.safetensors"
        file = safetensors.torch.load_file(path)
        assert set(file) == {"hidden_states", "token_ids"}
        assert torch.equal(file["token_ids"], row["input_ids"])
        assert torch.equal(file["hidden_states"], torch.stack(vectors))
        assert file["hidden_states"].dtype == getattr(torch, dtype)
    counted = Counter(
        token for ids, mask, _ in wanted for token, counts in zip(ids, mask, strict=True) if counts
    )
    assert torch.load(tmp_path / "data" / "token_freq.pt") == counted


@pytest.mark.parametrize("length", [None, 6])
def test_files_of_specforge_are_completions_with_aux_taps_joined(tmp_path, monkeypatch, length):
    monkeypatch.setattr("midstream.lab.export.specforge._GROUP", 3)
    stored = store(tmp_path / "store", taps=DRAFT)
    join = ["resid_post.1", "resid_post.2", "final_norm"]
    done = export(stored, tmp_path / "data", "specforge", length=length, join=join, exclude="first")
    assert (done.rows, done.cut) == ((28, 0) if length is None else (21, 7))
    wanted = completions(stored, DRAFT, length or 99)
    places = ["rows_0-3/data_0", "rows_0-3/data_1", "rows_0-3/data_2", "rows_3-6/data_3"]
    found = sorted((tmp_path / "data").rglob("*.ckpt"))
    assert found == [tmp_path / "data" / f"{place}.ckpt" for place in places]
    for path, (ids, mask, vectors) in zip(found, wanted, strict=True):
        record = torch.load(path, weights_only=True)
        assert set(record) == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
        assert record["input_ids"].tolist() == list(ids)
        assert record["loss_mask"].tolist() == [0, *map(int, mask[1:])]
        assert record["loss_mask"].dtype == record["input_ids"].dtype == torch.int64
        values = torch.stack(vectors)
        assert torch.equal(record["aux_hidden_state"], values[:, :2].flatten(1)[None])
        assert torch.equal(record["hidden_state"], values[:, 2][None])
        # As large as its rows: nothing else is saved with a view.
        assert os.path.getsize(path) < values.nbytes + 4000


def test_completions_without_all_rows_are_left_out_and_counted(tmp_path):
    entries = [
        entry("whole", rows=5, taps=DRAFT),
        entry("gap", positions=[0, 1, 3], taps=DRAFT),
        entry("partly", rows=5, taps=DRAFT[:2]),
    ]
    write(tmp_path / "store", entries)
    stored = open_store(tmp_path / "store")
    done = export(stored, tmp_path / "data", "specforge")
    assert (done.rows, done.skipped) == (5, 2)
    assert len(list((tmp_path / "data").rglob("*.ckpt"))) == 1
    done = export(stored, tmp_path / "rows", "memmap")
    assert (done.rows, done.skipped) == (8, 5)


def test_a_lossy_codec_is_decoded(tmp_path):
    stored = store(tmp_path / "store", codec="full8")
    assert export(stored, tmp_path / "rows", "memmap").rows == 28
    first = tokens_of(stored)[0]
    assert same(np.load(tmp_path / "rows" / "resid_post.3.npy")[0], first[3][2])


@pytest.mark.parametrize(
    ("form", "options", "problem"),
    [
        ("csv", {}, r"to: expected one of `npz`.*got 'csv'"),
        ("npz", {"join": [TAPS[0]]}, "join: the form npz has none"),
        ("parquet", {"exclude": "first"}, "exclude: the form parquet has none"),
        ("memmap", {"length": 8}, "length: the form memmap has none, got 8"),
        ("saelens", {"length": 0}, "length: expected"),
        ("saelens", {"length": 29}, "length: 28 tokens are fewer than a context of 29"),
        ("datasets", {"exclude": "last"}, 'exclude: expected "first"'),
        ("datasets", {"join": [("resid_post", 9)]}, "join: no rows of resid_post.9"),
        ("speculators", {"join": ["resid_post.3", "resid_post.1"]}, "must be resid_post of the"),
        ("speculators", {"join": ["mlp_in.2"]}, "must be resid_post of the last layer, got mlp_in"),
        ("specforge", {}, "must be final_norm, after .*got resid_post.1, mlp_in.2, resid_post.3"),
        ("speculators", {}, "speculators has vectors of one width, got resid_post.1: 8, mlp_in.2"),
    ],
)
def test_what_a_form_cannot_have_is_refused(tmp_path, form, options, problem):
    stored = store(tmp_path / "store", widths={TAPS[1]: 12})
    with pytest.raises(StoreError, match=problem):
        export(stored, tmp_path / "out", form, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_rows_of_several_models_are_refused(tmp_path):
    for model in ("acme/a", "acme/b"):
        head = header(model=model)
        write(tmp_path / "store", [entry(model[-1], head=head)], head)
    with pytest.raises(StoreError, match=r"acme/a.*; acme/b.*select those of one `model`"):
        export(open_store(tmp_path / "store"), tmp_path / "out", "memmap")


@pytest.mark.parametrize("form", list(forms.ALIGNED))
def test_an_export_is_whole_or_is_not_there(tmp_path, monkeypatch, form):
    taps = DRAFT if form == "specforge" else [("resid_post", 1), ("resid_post", 2)]
    stored = store(tmp_path / "store", taps=taps)
    monkeypatch.setattr(rows, "_BATCH_BYTES", 300)
    options = {"length": 4} if form == "saelens" else {}
    read, calls = TokenSource.read, itertools.count()

    def failing(*window):
        if next(calls) == 2:
            raise StoreError("damaged")
        return read(*window)

    with monkeypatch.context() as patch:
        patch.setattr(TokenSource, "read", failing)
        with pytest.raises(StoreError, match="damaged"):
            export(stored, tmp_path / "out", form, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    export(stored, tmp_path / "out", form, **options)
    with pytest.raises(StoreError, match="out exists already"):
        export(stored, tmp_path / "out", form, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]
