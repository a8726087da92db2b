"""A fit that a server carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.client.protocol import Exchange, call
from midstream.errors import ServerError, SpecError
from midstream.lab.fit import Directions
from midstream.lab.fit.prompts import naming_fields, read_capture, read_prompts
from midstream.plan.vectors.named_vector import read_name
from midstream.validation import at

FIT = "/v1/midstream/fit"


@dataclass(frozen=True)
class FitRequest:
    """A fit that a server is asked for; see `Client.fit`."""

    positive: Any
    negative: Any
    method: Any
    layers: Any
    positions: Any
    site: Any
    name: str | None
    reduce: str
    folds: int
    groups: Any
    seed: int
    model: str | None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "positive": read_prompts("positive", self.positive),
            "negative": read_prompts("negative", self.negative),
        }
        if not isinstance(self.method, str):
            raise SpecError("method", 'a server fits by the name of a method, such as "mean"')
        with naming_fields():
            capture = read_capture(self.layers, self.site, self.positions, self.reduce).to_dict()
        body |= {name: getattr(self, name) for name in ("method", "site", "reduce")}
        body |= {"folds": self.folds, "seed": self.seed}
        body |= {name: capture[name] for name in ("layers", "positions") if name in capture}
        groups = self.groups
        if groups is not None:
            is_two = isinstance(groups, tuple) and len(groups) == 2
            body["groups"] = [list(keys) for keys in groups] if is_two else list(groups)
        if self.name is not None:
            with at("name"):
                body["name"] = read_name(self.name)
        if self.model is not None:
            body["model"] = self.model
        return body


def fit(request: FitRequest) -> Exchange[Directions]:
    value = yield from call("POST", FIT, request.body())
    try:
        return Directions.from_json(value["directions"])
    except (KeyError, TypeError, SpecError) as error:
        raise ServerError(500, f"the server sent invalid directions: {error}") from None
