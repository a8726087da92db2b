"""The `inspect_ai` entry point: registers the provider of the models `midstream/MODEL`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inspect_ai.model import modelapi

if TYPE_CHECKING:
    from midstream.lab.harness.inspect_provider import MidstreamAPI


@modelapi(name="midstream")
def midstream() -> type[MidstreamAPI]:
    """Return the provider's class, whose imports Inspect leaves until a model is made."""
    from midstream.lab.harness.inspect_provider import MidstreamAPI

    return MidstreamAPI
