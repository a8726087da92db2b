"""Speculators' online training reads rows from a server, which may be killed meanwhile."""

import json
import pickle
import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import serving
from support.oracle import HookEdit, Oracle
from support.own_process import python
from support.serving import Running
from support.tiny import HIDDEN, LAYERS

from midstream import Steer
from midstream.errors import SpecError, UnsupportedError
from midstream.lab.export.online import Backend, ServedRows, register

TAPS = "resid_mid.1,resid_post.0,resid_post.2"
ORDER = [("resid_mid", 1), ("resid_post", 0), ("resid_post", LAYERS - 1)]
# Prompts of one beginning, which the prefix cache serves.
SAMPLES = [[*range(3, 70), 100 + number, 7] for number in range(5)]
UP = torch.linspace(-1, 1, HIDDEN)


@pytest.fixture(scope="module")
def start(talking_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Starts a server with a prefix cache at a port."""
    folder = tmp_path_factory.mktemp("online")
    sites = "--sites=resid_mid,resid_post"
    command = serving.command(talking_llama, "--enable-prefix-caching", sites)
    return lambda port: serving.running(command, folder, port=port)


@pytest.fixture(scope="module")
def server(start: Any) -> Iterator[Running]:
    with start(None) as running:
        yield running


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A data set as speculators prepares it."""
    datasets = pytest.importorskip("datasets")
    masks = [[0, *[1] * (len(ids) - 1)] for ids in SAMPLES]
    columns = {"input_ids": SAMPLES, "loss_mask": masks, "seq_len": list(map(len, SAMPLES))}
    folder = str(tmp_path_factory.mktemp("data") / "prepared")
    datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)
    return folder


def expected(oracle: Oracle, ids: list[int], edits: list[HookEdit]) -> torch.Tensor:
    values = oracle.run(ids, edits).values
    return torch.stack([values[tap] for tap in ORDER], 1)


@pytest.mark.parametrize("edited", [False, True])
def test_a_samples_rows_are_transformers_in_the_order_of_taps_under_edits(
    server: Running, data: str, talking_oracle: Oracle, edited: bool
) -> None:
    edits = json.dumps([Steer(UP, 1).to_dict()]) if edited else "[]"
    hooks = [HookEdit("resid_post", 1, UP, 1.0, lambda _: True)] if edited else []
    rows = pickle.loads(pickle.dumps(ServedRows(data, f"{server.url}/v1", TAPS, edits)))
    for number, ids in enumerate(SAMPLES):
        sample = rows.get_cached(number)
        assert sample["token_ids"].tolist() == ids
        wanted = expected(talking_oracle, ids, hooks)
        torch.testing.assert_close(sample["hidden_states"], wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(rows.get_cached(number)["hidden_states"], sample["hidden_states"])


def test_speculators_data_set_trains_from_a_server(
    server: Running, data: str, talking_oracle: Oracle
) -> None:
    theirs = pytest.importorskip("speculators.train.data")
    register()
    from hs_connectors import HiddenStatesTransfer
    from speculators.train.config import TrainConfig

    chosen = ["--hidden-states-backend", "midstream", "--midstream-url", server.url]
    config = TrainConfig.resolve(
        ["--verifier-name-or-path", "acme/tiny", *chosen, "--midstream-taps", TAPS]
    )
    arguments = Namespace(**config.flatten())
    transfer = Backend.from_train_args(arguments, data)
    assert isinstance(transfer, HiddenStatesTransfer)
    read = theirs.ArrowDataset(max_len=128, datapath=data, transfer=transfer, on_missing="raise")
    for number, ids in enumerate(SAMPLES):
        row, wanted = read[number], expected(talking_oracle, ids, [])
        assert row["input_ids"].tolist() == ids
        pair = row["hidden_states"], wanted[:, :-1].flatten(1)
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)
        last = row["verifier_last_hidden_states"]
        torch.testing.assert_close(last, wanted[:, -1], rtol=1e-4, atol=1e-4)


def test_speculators_command_knows_the_backend() -> None:
    pytest.importorskip("speculators.train.config")
    options = ["--verifier-name-or-path=acme/tiny", "--hidden-states-backend=midstream"]
    shown = python("-m", "midstream.lab.export.online", *options, "--dump-config", timeout=120)
    assert "hidden_states_backend: midstream" in shown


def test_the_loss_of_a_head_falls_on_rows_of_a_server(
    server: Running, talking_llama: Path, tmp_path: Path
) -> None:
    pytest.importorskip("speculators.train.config")
    datasets = pytest.importorskip("datasets")
    draw = torch.Generator().manual_seed(0)
    # Half is to train on, and the same half again to measure the loss after each epoch.
    ids = 2 * torch.randint(3, 200, (12, 60), generator=draw).tolist()
    columns = {"input_ids": ids, "loss_mask": [[1] * 60] * 24, "seq_len": [60] * 24}
    data = tmp_path / "prepared"
    datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(data)
    model = [f"--verifier-name-or-path={talking_llama}", "--target-layer-ids", "1", "2"]
    taps = "--midstream-taps=resid_post.0,resid_post.1,resid_post.2"
    source = ["--hidden-states-backend=midstream", f"--midstream-url={server.url}", taps]
    small = ["--total-seq-len=128", "--num-workers=0", "--epochs=8", "--train-data-ratio=0.5"]
    plain = ["--draft-attn-impl=eager", "--loss-implementation=eager"]
    folders = [f"--data-path={data}", f"--save-path={tmp_path}/head", f"--log-dir={tmp_path}/log"]
    options = [*model, *source, *small, *plain, *folders]
    python("-m", "midstream.lab.export.online", *options, timeout=300)
    files = [tmp_path / "head" / name / "val_metrics.json" for name in ("0", "checkpoint_best")]
    first, best = (json.loads(file.read_text())["loss_epoch"] for file in files)
    assert best < 0.95 * first


def test_a_sample_waits_for_a_server_that_is_killed_and_comes_back(start: Any, data: str) -> None:
    port = serving.free_port()
    rows = ServedRows(data, f"http://127.0.0.1:{port}", TAPS, wait_seconds=300)
    with ThreadPoolExecutor(1) as pool:
        with start(port) as first:
            before = rows.get_cached(0)
            for process in first.tree:
                process.kill()
            waiting = pool.submit(rows.get_cached, 0)
            time.sleep(2)
        assert not waiting.done()
        with start(port):
            again = waiting.result(300)
    assert torch.equal(again["hidden_states"], before["hidden_states"])


def test_what_is_malformed_is_refused_with_what_would_be_right(data: str) -> None:
    for taps in ("12", "resid_post", "resid_post.x", "resid_post.1,resid_post.1"):
        with pytest.raises(SpecError, match=r"taps: .*(as resid_post\.12|listed twice)"):
            ServedRows(data, "http://127.0.0.1:1", taps)
    with pytest.raises(SpecError, match="edits: expected JSON"):
        ServedRows(data, "http://127.0.0.1:1", TAPS, "[")
    with pytest.raises(UnsupportedError, match="midstream serve MODEL"):
        Backend.build_kv_transfer_config(None)  # type: ignore[arg-type]
