"""`midstream.Client`: the blocking client, with sweeps, fits and questions."""

from __future__ import annotations

from typing import Any

from midstream.client import client
from midstream.client.outputs import ServedOutput
from midstream.lab.client.ask_request import questions
from midstream.lab.client.fit_request import FitRequest, fit
from midstream.lab.client.sweep_stream import SweepStream, sweep_body
from midstream.lab.fit import Directions
from midstream.lab.sweep import Sweep
from midstream.lab.sweep.async_run import OnCell
from midstream.plan.forms import LayersLike, PositionsLike
from midstream.sinks.daemon_threads import in_threads
from midstream.sites import SiteName
from midstream.validation import suggests

# Names of `LLM` and of the `openai` client.
_ANSWER = "write client.complete(prompt, …) or client.chat(messages, …)"
# Questions that are sent at the same time.
_AT_ONCE = 16
INSTEAD = {
    **dict.fromkeys(("generate", "create", "completions", "responses", "run_with_cache"), _ANSWER),
    "register": "write client.vectors.register(name, vectors)",
    **dict.fromkeys(("info", "models"), "write client.status() or client.sites()"),
}


@suggests(INSTEAD)
class Client(client.Client):
    """Client of a midstream server; returns results in the form of the offline API.

    Works beside the `openai` client, which can send requests to the same server with `extra_body`.
    """

    def sweep(
        self, prompt: Any, source: Any, metric: Any, *, on_cell: OnCell | None = None, **more: Any
    ) -> Sweep:
        """Patch a prompt at each cell of a grid, and return a metric of each cell.

        The server computes ordinary requests first.

        Args:
            prompt, source, metric: as for `midstream.LLM.sweep`. The source may also be rows that
                the server keeps, `output.outputs[0].captured`; the metric is no function.
            on_cell: called with each `SweepCell` and its value as soon as it is known.
            **more: other arguments of `midstream.LLM.sweep`, except `sampling_params`,
                `use_tqdm` and `lora_request`; `model`, the name of the model or of an adapter; of
                the chat template `add_generation_prompt`, `continue_final_message` and
                `chat_template_kwargs`.

        Returns:
            The sweep. Its receipts are sums.

        Raises:
            SpecError: an argument is malformed, or has no JSON form.
            ServerError: the server rejected the request, or the sweep failed.
            httpx.HTTPError: the server is unreachable, or the connection failed.
        """
        stream = SweepStream(sweep_body(prompt, source, metric, more), on_cell)
        for data in self._events_of(stream.request):
            stream.feed(data)
        return stream.end()

    def fit(
        self,
        positive: Any,
        negative: Any,
        method: str = "mean",
        layers: LayersLike = "all",
        positions: PositionsLike = "last_prompt",
        site: SiteName = "resid_post",
        *,
        name: str | None = None,
        reduce: str = "",
        folds: int = 5,
        groups: Any = None,
        seed: int = 0,
        model: str | None = None,
    ) -> Directions:
        """Fit a direction between two classes of prompts at each layer, on the server.

        The server computes ordinary requests first.

        Args:
            positive, negative, method, layers, positions, site, reduce, folds, groups, seed: as for
                `midstream.Directions.fit`; `method` is a name. Positions that select messages, as
                `Role`, are rejected.
            name: name to register the vectors of all fitted layers under; needs what changes of
                vectors need. None: they are not registered.
            model: name of the model, or of an adapter; None: the model.

        Returns:
            The directions, with scores on held-out rows.

        Raises:
            SpecError: an argument is malformed.
            ServerError: the server rejected the request.
            httpx.HTTPError: the server is unreachable, or the connection failed.
        """
        request = FitRequest(
            positive, negative, method, layers, positions, site, name, reduce, folds, groups, seed,
            model,
        )  # fmt: skip
        return self._run(fit(request))

    def ask(
        self, sources: Any, question: str | list[str], layer: int, **options: Any
    ) -> list[ServedOutput]:
        """Ask the model questions about activations: rows of an earlier request are placed at the
        placeholder tokens of a chat's message, and the model answers.

        Args:
            sources: answers whose rows the server keeps (`activations="keep"`), references to
                these, `output.outputs[0].captured`; or answers with activations, or rows, which are
                sent. One, or a list.
            question, layer: as for `midstream.LLM.ask`.
            **options: other arguments of `midstream.LLM.ask`, except `sampling_params`, `use_tqdm`
                and `lora_request`; all others are fields of the body of `/v1/chat/completions`,
                such as `model`, the name of an adapter, `max_tokens` and `chat_template_kwargs`.

        Returns:
            One answer per question.

        Raises:
            SpecError: an argument is malformed, or the server keeps no such rows.
            ServerError: the server rejected a request.
            ReceiptError: a placeholder was no single token.
            httpx.HTTPError: the server is unreachable, or the connection failed.
        """
        exchanges = questions(sources, question, layer, options)
        return in_threads(self._run, exchanges, _AT_ONCE)
