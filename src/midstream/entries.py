"""What the package imports by name, when it is used first, and so all that it knows of
`midstream.lab`. No other module imports by a string.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

# Public names that need vLLM or torch, and the module of each.
PUBLIC = {
    "Activations": "midstream.results.activations",
    "AsyncClient": "midstream.lab.client",
    "AsyncLLM": "midstream.lab.api.async_llm",
    "Client": "midstream.lab.client",
    "Config": "midstream.config.config",
    "Controller": "midstream.plan.control.controller",
    "Direction": "midstream.lab.fit",
    "Directions": "midstream.lab.fit",
    "JacobianLens": "midstream.lenses",
    "KL": "midstream.lab.sweep",
    "LLM": "midstream.lab.api.llm",
    "LogProb": "midstream.lab.sweep",
    "LogitDiff": "midstream.lab.sweep",
    "Recovered": "midstream.lab.sweep",
    "SAE": "midstream.sae.sae",
    "SamplingParams": "midstream.api.sampling_params",
    "Sweep": "midstream.lab.sweep",
    "Threshold": "midstream.plan.control.control_laws",
    "TunedLens": "midstream.lenses",
    "activate": "midstream.runtime.install",
    "extra_body": "midstream.client",
    "open_store": "midstream.store",
    "register_layer": "midstream.layers",
    "stack": "midstream.results.stack",
}
# Sub-commands in the order of the help, and the module with the function of that name.
COMMANDS = {
    "demo": "midstream.lab.cli.demo",
    "report": "midstream.lab.cli.report",
    "doctor": "midstream.lab.cli.doctor",
    "serve": "midstream.cli.serve",
    "studio": "midstream.cli.studio",
    "capture": "midstream.lab.cli.capture",
    "sweep": "midstream.lab.cli.sweep",
    "inspect": "midstream.lab.cli.inspect",
    "export": "midstream.lab.cli.export",
    "verify": "midstream.cli.verify",
    "merge": "midstream.cli.merge",
    "prune": "midstream.cli.prune",
    "docs": "midstream.cli.docs",
}
# Modules of routes that the server adds to its own; each has a `router`.
ROUTES = ("midstream.lab.server.routes.sweep", "midstream.lab.server.routes.fit")


def public(name: str) -> Any:
    return getattr(import_module(PUBLIC[name]), name)


def command(name: str) -> ModuleType:
    return import_module(COMMANDS[name])


def routers() -> list[Any]:
    return [import_module(module).router for module in ROUTES]
