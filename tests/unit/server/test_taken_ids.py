"""An id under which rows are stored already is the client's mistake: 409, with the field."""

import pytest
from support.serving_fake import refused, serving

from midstream.errors import ExistsError

pytestmark = pytest.mark.anyio
CAPTURE = {"layers": [1], "sink": "store", "request_id": "mine"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("capture", "param"),
    [
        (CAPTURE, "midstream.capture.request_id"),
        ([CAPTURE], "midstream.capture[0].request_id"),
    ],
)
async def test_an_id_that_is_taken_is_409_with_the_field_as_the_client_wrote_it(
    capture, param, stream
):
    async with serving() as (site, client):
        problem = "the store has 'mine' already; use another id"
        site.engine.script = lambda *_: [ExistsError("capture[0].request_id", problem)]
        asked = {"prompt": "abc", "stream": stream, "midstream": {"capture": capture}}
        error = await refused(client.post("/v1/completions", json=asked), 409, problem)
        assert (error["param"], error["type"]) == (param, "Conflict")
        assert site.engine.running == 0
