"""The OpenAPI schema is whole, and no answer to any request is outside of it."""

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode
from support.nightly import rounds
from support.serving_fake import Site, make

from midstream import Attention, Capture, Features, Gate, Lens, Logits, Norms, Probe, Steer

ROUTES = {
    "/v1/midstream/activations/{id}": "GET DELETE",
    "/v1/midstream/captures": "GET DELETE",
    "/v1/midstream/captures/{name}": "GET PUT DELETE",
    "/v1/midstream/captures/{name}/collect": "POST",
    "/v1/midstream/vectors": "GET",
    "/v1/midstream/vectors/{name}": "GET PUT DELETE",
    "/v1/midstream/steering": "GET PUT DELETE",
    "/v1/midstream/guards": "GET",
    "/v1/midstream/guards/{name}": "GET PUT DELETE",
    "/v1/midstream/guards/{name}/history": "GET",
    "/v1/midstream/guards/{name}/promote": "POST",
    "/v1/midstream/guards/{name}/rollback": "POST",
    "/v1/midstream/parameters/{name}": "GET",
    "/v1/midstream/sites": "GET",
    "/v1/midstream/status": "GET",
    "/v1/midstream/requests/{id}/update": "POST",
    "/v1/midstream/sweep": "POST",
    "/v1/midstream/fit": "POST",
    "/v1/midstream/tokens": "POST",
    "/v1/steering": "GET",
    "/v1/steering/set": "POST",
    "/v1/steering/clear": "POST",
    "/v1/steering/layers": "GET",
    "/v1/steering/modules": "GET",
    "/v1/steering/modules/register": "POST",
    "/v1/steering/modules/unregister": "POST",
}
ENDPOINTS = {f"{method} {path}" for path, several in ROUTES.items() for method in several.split()}
METHODS = ("get", "put", "post", "delete")


@pytest.fixture(scope="module")
def site() -> Site:
    return asyncio.run(make(max_body_bytes=4096, vector_bytes=120, held_captures=4))


@pytest.fixture(scope="module")
def asked(site: Site) -> dict[str, Any]:
    load_all_checks()
    schema = schemathesis.openapi.from_asgi("/openapi.json", site.app)
    return {one.ok().label: one.ok() for one in schema.get_all_operations()}


# As FastAPI writes it, a request that fits the schema may be refused all the same: whether a layer
# exists is the model's matter. So it is answers that are held to the schema, whatever was asked.
CHECKED = (
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)


# What takes nothing can be given nothing wrong.
TAKES = (
    "/activations/", "/vectors/", "PUT", "/set", "register", "/sweep", "/fit", "/tokens", "/update",
)  # fmt: skip
MODES = [
    (label, mode)
    for label in sorted(ENDPOINTS)
    for mode in GenerationMode
    if mode.is_positive or any(part in label for part in TAKES)
]


@pytest.mark.parametrize(("label", "mode"), MODES)
def test_answers_are_as_the_schema_says_and_none_is_a_fault(asked, label, mode):
    operation = asked[label]

    @settings(max_examples=rounds(suite=3, nightly=12), suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def hold(case: Any) -> None:
        answer = case.call()
        assert answer.status_code < 500 or answer.status_code == 507, answer.text
        case.validate_response(answer, checks=[CHECKS.get_one(name) for name in CHECKED])

    hold()


def operations(site: Site) -> list[tuple[str, str, dict[str, Any]]]:
    paths = site.app.openapi()["paths"]
    return [
        (method, path, paths[path][method])
        for path in paths
        for method in METHODS
        if method in paths[path] and path.startswith(("/v1/midstream", "/v1/steering"))
    ]


# What an endpoint of each kind can answer besides its own: every one is asked for a key by vLLM,
# and none is served before the engine is there.
ALWAYS = {"401", "503", "default"}
CHANGING = {"403"}


def test_every_endpoint_is_there(site):
    found = {f"{method.upper()} {path}" for method, path, _ in operations(site)}
    assert found == ENDPOINTS


def test_every_endpoint_has_words_examples_and_all_statuses(site):
    for method, path, operation in operations(site):
        where = f"{method} {path}"
        statuses = set(operation["responses"])
        assert statuses >= ALWAYS, where
        assert operation["summary"], where
        assert operation["tags"][0].startswith("midstream"), where
        is_row = "/activations/" in path
        if method != "get" and not is_row:
            assert statuses >= CHANGING, where
        for parameter in operation.get("parameters", ()):
            assert parameter["schema"].get("examples") or parameter.get("examples"), where
            assert "400" in statuses, where
        if "requestBody" in operation:
            assert statuses >= {"400", "413"}, where
            for kind, content in operation["requestBody"]["content"].items():
                assert kind != "application/json" or _has_example(site, content), where
        assert "422" not in statuses, where
        good = next(found for status, found in operation["responses"].items() if status[0] == "2")
        if "application/json" in good.get("content", {}):
            assert _has_example(site, good["content"]["application/json"]), where


def _has_example(site: Site, content: dict[str, Any]) -> bool:
    """Whether a content, or each required field of its schema, has an example."""
    if "example" in content or "examples" in content:
        return True
    schema = content["schema"]
    if "$ref" in schema:
        schema = site.app.openapi()["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "examples" in schema or "example" in schema:
        return True
    fields = schema.get("properties", {})
    return bool(fields) and any("examples" in each for each in fields.values())


def test_readiness_is_in_the_schema_and_needs_no_key(site):
    answers = site.app.openapi()["paths"]["/midstream/ready"]["get"]["responses"]
    assert {"200", "503"} <= set(answers)
    assert "401" not in answers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capture", Capture("all", ["resid_post"], codec="full8", max_rows=3, sink="npz", tag="t")),
        ("capture", Norms([1], positions="prompt")),
        ("capture", Attention([0], reduce="entropy", name="a")),
        ("capture", Features("sae", 3)),
        ("capture", Lens([1], tokens=[4])),
        ("capture", Logits(top=3)),
        ("edits", Steer([1.0, 2.0], 3, norm="match")),
        ("edits", Gate(Steer([1.0, 2.0], 3), Probe([1.0, 2.0], 1), threshold=0.5, hold=4)),
        ("probes", Probe([1.0, 2.0], 3, name="p", head=1)),
    ],
)
def test_each_field_of_a_plan_is_in_the_schema(site, field, value):
    request = site.app.openapi()["components"]["schemas"]["MidstreamRequest"]
    fields = request["properties"][field]["anyOf"][0]["properties"]
    assert value.to_dict().keys() <= fields.keys()
