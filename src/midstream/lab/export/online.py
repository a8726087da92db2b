"""A backend of speculators' online training (`hs_connectors`): rows from a midstream server.

`python -m midstream.lab.export.online` is speculators' own training command with the backend
`midstream`. Its data loaders ask the server for each sample's rows when they need them, over HTTP,
so nothing is lost, or sent twice, if either side is killed and starts again. Without an accelerator
it trains on the CPU, which speculators' own command does not.
"""

from __future__ import annotations

import json
import logging
import runpy
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream.errors import MissingExtraError, ServerError, SpecError, UnsupportedError
from midstream.lab.export.dataset_folder import hugging_face
from midstream.plan import Capture
from midstream.plan.control.controller import read_seconds
from midstream.sites import Tap
from midstream.validation import at, show

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.client import Client

NAME = "midstream"
WAIT_SECONDS = 600.0
_PAUSE_SECONDS = 1.0
_AWAY = (429, 502, 503, 504)  # statuses of a server that is busy, or not there now
_LOGGER = logging.getLogger(__name__)


class ServedRows:
    """What speculators' data set reads hidden states by; it is pickled for each loader's process.

    A sample's rows are computed when it is read, with the server's edits and its prefix cache.
    """

    def __init__(
        self,
        data_path: str,
        url: str,
        taps: str,
        edits: str = "[]",
        wait_seconds: float = WAIT_SECONDS,
        key: str | None = None,
    ) -> None:
        """Args:
        data_path: folder of speculators' prepared data set, whose `input_ids` are asked for.
        url: of the server.
        taps: (site, layer) of a token's vectors, as `resid_post.1,resid_post.14,resid_post.29`.
            Training applies the model's final norm to the last one, and joins the others.
        edits: JSON of the edits of each request, as in `"edits"` of a request's field.
        wait_seconds: how long a sample waits for a server that is away or busy.
        key: API key of the server.

        Raises:
            SpecError: an argument is malformed.
        """
        with at("taps"):
            self._taps = [_tap(name) for name in taps.split(",")]
            if len(set(self._taps)) < len(self._taps):
                raise SpecError("", f"a tap is listed twice in {show(taps)}")
            self._captures = [
                Capture.parse({"layers": [layer], "sites": [site], "positions": "prompt"})
                for site, layer in self._taps
            ]
        with at("edits"):
            try:
                self._edits = json.loads(edits)
            except ValueError as error:
                raise SpecError("", f"expected JSON: {error}") from None
        with at("wait_seconds"):
            self._wait = read_seconds(wait_seconds)
        self._data_path, self._url, self._key = data_path, url, key
        self._data: Any = None
        self._client: Client | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_data": None, "_client": None}

    def setup(self) -> None:
        """Open the data set and a client, in the process that reads."""
        from midstream.client import Client

        if self._client is None:
            datasets = hugging_face("speculators' data set")
            self._data = datasets.load_from_disk(self._data_path).with_format(None)
            self._client = Client(self._url, api_key=self._key, timeout=self._wait)

    def get_cached(self, file_idx: int) -> dict[str, Tensor]:
        """Return the rows of a sample.

        Args:
            file_idx: its number in the data set, from 0.

        Returns:
            `hidden_states` [tokens, taps, width] in the model's dtype, `token_ids` int64 [tokens].

        Raises:
            ServerError: the server rejects the request, or does not answer in time.
            UnsupportedError: the sample has images, audio or video.
            ReceiptError: rows are missing.
        """
        import torch

        self.setup()
        sample = self._data[file_idx]
        for message in sample.get("messages") or ():
            if not isinstance(message.get("content"), (str, type(None))):
                raise UnsupportedError(f"sample {file_idx} has media; only text is supported")
        ids = sample["input_ids"]
        output = self._asked(ids)
        receipt, rows = output.receipt, output.activations
        if receipt is None or receipt.status != "ok" or rows is None:
            raise ServerError(500, f"sample {file_idx}: rows are missing; {receipt}")
        values = [rows[tap] for tap in self._taps]
        for tap, own in zip(self._taps, values, strict=True):
            if rows.positions_of(*tap).tolist() != list(range(len(ids))):
                raise ServerError(500, f"sample {file_idx}: rows of {tap} are not of all tokens")
            if own.shape != values[0].shape:
                raise SpecError("taps", "expected taps of one width")
        return {"hidden_states": torch.stack(values, 1), "token_ids": torch.tensor(ids)}

    def get_generated(self, hs_transfer_params: Any) -> Any:
        """Raise UnsupportedError: no request but `get_cached`'s has rows."""
        raise UnsupportedError(f"expected rows of get_cached, got {hs_transfer_params!r}")

    def cache(self, handle: str, file_idx: int) -> None:
        """Do nothing: rows are computed again."""

    def delete(self, handle: str) -> None:
        """Do nothing: the server frees what it has sent."""

    def _asked(self, ids: list[int]) -> Any:
        """Send a sample's request until it is answered, for at most the time to wait."""
        import httpx

        assert self._client is not None
        end = time.monotonic() + self._wait
        while True:
            try:
                options = {"capture": self._captures, "edits": self._edits or None}
                return self._client.complete(ids, max_tokens=1, temperature=0, **options)
            except ServerError as error:
                if error.status not in _AWAY or time.monotonic() >= end:
                    raise
                _LOGGER.warning("%s: %s; asking again", self._url, error)
            except httpx.TransportError as error:
                if time.monotonic() >= end:
                    raise ServerError(503, f"{self._url} did not answer: {error}") from error
            time.sleep(_PAUSE_SECONDS)


def _tap(name: str) -> Tap:
    site, _, layer = name.strip().rpartition(".")
    if not (site and layer.isascii() and layer.isdecimal()):
        raise SpecError("", f"expected site and layer, as resid_post.12, got {show(name)}")
    return site, int(layer)


class Backend:
    """The four hooks by which speculators' commands know a backend."""

    @staticmethod
    def add_train_args(parser: ArgumentParser) -> None:
        """Add the options of training."""
        parser.add_argument(
            "--midstream-url", default="http://127.0.0.1:8000", help="URL of the server"
        )
        parser.add_argument(
            "--midstream-taps",
            default="",
            help="vectors of a token in their order, as resid_post.1,resid_post.14,resid_post.29; "
            "the last is resid_post of the last layer",
        )
        parser.add_argument(
            "--midstream-edits", default="[]", help="JSON of the edits of each request"
        )
        parser.add_argument(
            "--midstream-wait-seconds",
            type=float,
            default=WAIT_SECONDS,
            help="how long a sample waits for a server that is away",
        )
        parser.add_argument(
            "--midstream-key-file", default="", help="file with the API key of the server"
        )

    @staticmethod
    def add_launch_args(parser: ArgumentParser) -> None:
        """Add nothing: any midstream server is one."""

    @staticmethod
    def from_train_args(args: Namespace, data_path: str) -> ServedRows:
        """Return what reads the rows of a data set."""
        if not args.midstream_taps:
            raise SpecError("midstream_taps", "expected --midstream-taps resid_post.1,…")
        file = args.midstream_key_file
        return ServedRows(
            data_path,
            args.midstream_url,
            args.midstream_taps,
            args.midstream_edits,
            args.midstream_wait_seconds,
            Path(file).read_text(encoding="utf-8").strip() if file else None,
        )

    @staticmethod
    def build_kv_transfer_config(args: Namespace) -> dict[str, Any]:
        """Raise UnsupportedError: an engine needs no connector for this."""
        raise UnsupportedError(
            "launch_vllm.py reserves KV cache for hidden states of fixed layers, which this "
            "backend does not read; start the server by `midstream serve MODEL`"
        )


def register() -> None:
    """Register the backend `midstream` with hs_connectors.

    Raises:
        MissingExtraError: hs_connectors is not installed.
    """
    try:
        import hs_connectors
    except ImportError as error:
        raise MissingExtraError(
            "speculators' online training needs `pip install speculators hs-connectors`"
        ) from error
    if NAME not in hs_connectors.HiddenStatesBackend.registry:
        hs_connectors.HiddenStatesTransfer.register(ServedRows)
        hs_connectors.HiddenStatesBackend.register(NAME)(Backend)


def train_without_accelerator() -> None:
    """Have speculators' trainer use the CPU where torch has no accelerator; else do nothing."""
    import torch
    from speculators.train import cli, trainer

    if torch.accelerator.is_available():
        return

    class OnCpu(trainer.Trainer):  # type: ignore[misc]
        """A trainer with a device that it would take from an accelerator."""

        def setup_trainer(self) -> None:
            self.local_rank = self.device_type = "cpu"
            super().setup_trainer()

    cli.Trainer = OnCpu
    # It waits for the device before it reads a clock.
    torch.accelerator.synchronize = lambda *_: None


if __name__ == "__main__":
    from midstream.lab.export import online

    online.register()
    online.train_without_accelerator()
    runpy.run_module("speculators.train", run_name="__main__", alter_sys=True)
