"""What the package imports by name, when it is used first, and so all that it knows of
`midstream.lab`. No other module imports by a string.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

# Public names that need vLLM or torch, and the module of each.
PUBLIC = {
    "AsyncClient": "midstream.lab.client",
    "AsyncLLM": "midstream.lab.api.async_llm",
    "Client": "midstream.lab.client",
    "Controller": "midstream.plan.control.controller",
    "Directions": "midstream.lab.fit",
    "KL": "midstream.lab.sweep",
    "LLM": "midstream.lab.api.llm",
    "LogProb": "midstream.lab.sweep",
    "LogitDiff": "midstream.lab.sweep",
    "Recovered": "midstream.lab.sweep",
    "SAE": "midstream.sae.sae",
    "SamplingParams": "midstream.api.sampling_params",
    "Threshold": "midstream.plan.control.control_laws",
    "activate": "midstream.runtime.install",
    "extra_body": "midstream.client",
    "open_store": "midstream.store",
    "stack": "midstream.results.stack",
}
# Names that were public up to 0.1, and the module that has them: they warn, and go with 0.2.
MOVED = {
    "Activations": "midstream.results.activations",
    "Config": "midstream.config.config",
    "Direction": "midstream.lab.fit",
    "JacobianLens": "midstream.lenses",
    "LocalInfo": "midstream.results.local_info",
    "Probes": "midstream.results.probe_scores",
    "Receipt": "midstream.results.receipt",
    "Sweep": "midstream.lab.sweep",
    "TunedLens": "midstream.lenses",
    "register_layer": "midstream.layers",
    **dict.fromkeys(
        (
            *("CapturedRows", "Entropy", "Flag", "MLP", "Mass", "Media", "Named", "Plan"),
            *("Positions", "Reading", "Sites", "Stop", "Switch", "TopKeys", "Vector"),
        ),
        "midstream.plan",
    ),
    **dict.fromkeys(
        (
            *("BusyError", "CodecError", "ConfigError", "ControllerError", "EngineError"),
            *("ExistsError", "FetchError", "MidstreamError", "MissingExtraError", "NoRoomError"),
            *("NotAskedError", "NothingSelectedError", "RankError", "ReceiptError"),
            *("ReceiptWarning", "SeamError", "ServerError", "SpecError", "StoreError"),
            *("TapError", "UnsupportedError"),
        ),
        "midstream.errors",
    ),
}
# Methods of the core's classes that the lab has: the module, and the class with that method.
METHODS = {"Probe.fit": ("midstream.lab.fit", "FittedProbe")}
# Sub-commands in the order of the help, and the module with the function of that name.
COMMANDS = {
    "demo": "midstream.lab.cli.demo",
    "report": "midstream.lab.cli.report",
    "doctor": "midstream.lab.cli.doctor",
    "serve": "midstream.cli.serve",
    "studio": "midstream.cli.studio",
    "capture": "midstream.lab.cli.capture",
    "replay": "midstream.lab.cli.replay",
    "sweep": "midstream.lab.cli.sweep",
    "docs": "midstream.cli.docs",
}
# The same of the group `store`.
STORE_COMMANDS = {
    "inspect": "midstream.lab.cli.inspect",
    "export": "midstream.lab.cli.export",
    "verify": "midstream.cli.verify",
    "merge": "midstream.cli.merge",
    "prune": "midstream.cli.prune",
}
# The same of the group `probe`.
PROBE_COMMANDS = {"show": "midstream.cli.show", "diff": "midstream.cli.diff"}
# Modules of routes that the server adds to its own; each has a `router`.
ROUTES = ("midstream.lab.server.routes.sweep", "midstream.lab.server.routes.fit")


def public(name: str) -> Any:
    return getattr(import_module({**MOVED, **PUBLIC}[name]), name)


def method(name: str) -> Any:
    module, owner = METHODS[name]
    return getattr(getattr(import_module(module), owner), name.partition(".")[2])


def command(name: str) -> ModuleType:
    return import_module({**COMMANDS, **STORE_COMMANDS, **PROBE_COMMANDS}[name])


def routers() -> list[Any]:
    return [import_module(module).router for module in ROUTES]
