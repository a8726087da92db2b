"""Inspect's provider `midstream/MODEL`: chats with a midstream server, each with a plan."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from subprocess import Popen
from typing import Any

from inspect_ai._util.error import PrerequisiteError
from inspect_ai._util.local_server import start_local_server
from inspect_ai.model import GenerateConfig, ModelOutput
from inspect_ai.model._providers._vllm_lora import VLLMServer
from inspect_ai.model._providers.vllm import VLLMAPI

from midstream.client.protocol import FIELDS
from midstream.config.config import KEY, Config
from midstream.config.http import url_of_environment
from midstream.errors import MidstreamError
from midstream.lab.harness.logged import joined_field, logged_results

_START_SECONDS = 600
# Servers that were started, or found, by model, URL and everything that they were started with.
_SERVERS: dict[str, VLLMServer] = {}


class MidstreamAPI(VLLMAPI):
    """Inspect's provider for vLLM, whose requests have a plan, on a running or its own server."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        port: int | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        settings: Mapping[str, Any] | None = None,
        **model_args: Any,
    ) -> None:
        """Make the model.

        Args:
            model_name: the name under which a running server serves it; without one, a folder or
                name as for `vllm serve`.
            base_url: of a running server, ending in `/v1`. Default: the environment's
                MIDSTREAM_BASE_URL or VLLM_BASE_URL.
            port: of a running server on this machine.
            config: Inspect's. Its `extra_body["midstream"]` replaces arguments of the plan for one
                call.
            settings: midstream's settings for a server that is started.
            **model_args: `capture`, `edits`, `steer`, `probes`, `controller`, `activations`: the
                plan of every request. All others are Inspect's of its provider for vLLM, and
                options of a server that is started.
        """
        plan = {name: model_args.pop(name) for name in FIELDS if name in model_args}
        url = base_url
        if not (url or port):
            url = url_of_environment() or os.environ.get("VLLM_BASE_URL")
        options = {name: value for name, value in model_args.items() if name not in _OWN}
        try:
            joined_field(plan, None)
            self._settings = Config.parse(dict(settings or {})).to_dict() if settings else {}
        except MidstreamError as error:
            raise _wrong(error) from None
        unused = [*options, *(["settings"] if settings else [])]
        if (url or port) and unused:
            raise PrerequisiteError(
                f"{unused[0]}: a running server is used, whose settings are given when it starts"
            )
        self._plan = plan
        super().__init__(
            model_name, url, port, api_key, config or GenerateConfig(), **{**model_args, **_LAZY}
        )
        theirs: Any = self._server
        key = json.dumps([self.base_model, url, port, self._settings, options], default=str)
        self._server: Any = _SERVERS.setdefault(key, VLLMServer())
        self._server.enable_lora |= theirs.enable_lora
        self._server.max_lora_rank = theirs.max_lora_rank

    def completion_params(self, config: GenerateConfig, tools: bool) -> dict[str, Any]:
        """Return the body of a request, with the plan."""
        params: dict[str, Any] = super().completion_params(config, tools)
        body = params.pop("extra_body", {})
        field = self._field(body)
        body.pop(KEY, None)
        if field is not None and self.stream:
            raise PrerequisiteError("stream: results come with the whole answer; omit it")
        body |= {} if field is None else {KEY: field}
        return {**params, **({"extra_body": body} if body else {})}

    def auto_streamable(self, config: GenerateConfig) -> bool:
        """Return whether a request may be streamed for its display alone: it has no plan."""
        return not self._has_plan(config) and super().auto_streamable(config)

    async def generate(
        self, input: Any, tools: Any, tool_choice: Any, config: GenerateConfig
    ) -> Any:
        """Return Inspect's output, whose metadata has the results as `midstream`."""
        generated = await super().generate(input, tools, tool_choice, config)
        if not isinstance(generated, tuple):
            return generated
        output, call = generated
        answer = call.response or {}
        results = logged_results(answer)
        if results is None and self._has_plan(config) and answer.get("choices"):
            raise _wrong("the server has ignored the plan; start it with `midstream serve`")
        if results is not None and isinstance(output, ModelOutput):
            output.metadata = {**(output.metadata or {}), KEY: results}
            call.response = _without_results(answer)
        return output, call

    def _has_plan(self, config: GenerateConfig) -> bool:
        # Arguments that are None ask for nothing, and those of a call may take back the model's.
        return self._field(config.extra_body) is not None

    def _field(self, body: Mapping[str, Any] | None) -> dict[str, Any] | None:
        try:
            return joined_field(self._plan, (body or {}).get(KEY))
        except MidstreamError as error:
            raise _wrong(error) from None

    def should_retry(self, ex: BaseException) -> Any:
        """Return whether a request is repeated: not if its receipt had problems, which is 500."""
        if getattr(ex, "status_code", None) == 500:
            return False
        return super().should_retry(ex)

    def _start_server(
        self, model_path: str, port: int | None = None
    ) -> tuple[str, Popen[str], int]:
        options = dict(self.server_args)
        timeout = options.pop("timeout", _START_SECONDS)
        host = options.pop("host", "127.0.0.1")
        command = [
            *(sys.executable, "-m", "midstream", "serve", model_path),
            *("--settings", json.dumps(self._settings), "--host", host),
            *("--api-key", self.api_key),
        ]
        # Inspect passes on no option that is false.
        for name in [name for name, value in options.items() if value is False]:
            del options[name]
            command.append(f"--no-{name.replace('_', '-')}")
        url, process, bound_port = start_local_server(
            command,
            host=host,
            port=port,
            api_key=self.api_key,
            server_type="midstream",
            timeout=timeout,
            server_args=options,
        )
        return url, process, bound_port


# Arguments of Inspect's provider that are no options of a server.
_OWN = frozenset({"is_mistral", "retry_delay", "client_timeout"})
_LAZY = {"lazy_init": True}


def _wrong(error: Exception | str) -> PrerequisiteError:
    return PrerequisiteError(f"midstream: {error}")


def _without_results(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer without the field `midstream`, which the output's metadata have."""
    left = {name: value for name, value in answer.items() if name != KEY}
    if "choices" in left:
        left["choices"] = [
            {name: value for name, value in choice.items() if name != KEY}
            for choice in left["choices"]
        ]
    return left
