"""Edits of a request with the cached rows of an earlier one, over HTTP."""

import gc
import re

import pytest
import torch
from support.codec_rows import encoded
from support.open_files import open_files
from support.serving_fake import Site, make, refused, rows, serving

from midstream.codecs import parse_codec
from midstream.plan import Replace, Vector
from midstream.plan.vectors.device_row import DeviceSource
from midstream.results.activations import Activations
from midstream.results.serialization import PackedRows, pack
from midstream.server.cached_rows.patched_rows import opened_rows
from midstream.steering.guard_definition import fingerprint

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"


def keep(site: Site, count: int = 6) -> str:
    """Rows of layers 1 and 2 at positions 2 … count; row p of layer l is 10·p + l in each place."""
    data = pack(rows((1, 2), count, 2), 3, torch.float32)
    return site.server.captures.store(data, "127.0.0.1", "r", {"codec": "raw"}).id


def asking(rows_: object, **edit: object) -> dict[str, object]:
    edits = {"op": "replace", "rows": rows_, **edit}
    return {"prompt": "abcdef", "midstream": {"edits": edits}}


def edits_of(site: Site) -> tuple[Replace, ...]:
    ((_, params, _),) = site.engine.calls
    return params.extra_args["midstream"].plan.edits


def value(layer: int, *positions: int) -> tuple[Vector, ...]:
    return tuple(Vector.parse([10.0 * position + layer] * 3) for position in positions)


async def test_captured_rows_are_those_of_the_listed_positions_in_their_order():
    async with serving() as (site, client):
        body = asking({"captured": keep(site), "positions": [5, 2]}, layer=2, positions=[0, 1])
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        (edit,) = edits_of(site)
        assert edit.rows == value(2, 5, 2)


async def test_captured_rows_tell_their_positions():
    async with serving() as (site, _):
        with opened_rows(site.server.captures, "me", lambda _: True, 1 << 20) as open_rows:
            found = open_rows(keep(site))
            assert found.positions(("resid_post", 2)) == (2, 3, 4, 5)


async def test_all_rows_are_used_without_positions_and_no_file_is_left_open():
    before = open_files()
    async with serving() as (site, client):
        id_ = keep(site)
        body = asking({"captured": id_}, layer=2, positions=[0, 1, 2, 3])
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        (edit,) = edits_of(site)
        assert edit.rows == value(2, 2, 3, 4, 5)
        for wrong in ({"captured": id_, "positions": 9}, {"captured": "x"}):
            await refused(client.post(COMPLETIONS, json=asking(wrong, layer=2)), 400)
    assert open_files() <= before


@pytest.mark.parametrize(
    ("rows_", "edit", "param", "problem"),
    [
        ({"positions": [2, 6]}, {"layer": 1}, "rows.positions", "resid_post.1 .* position 6"),
        ({}, {"layer": 0}, "layer", "no vector for resid_post at layer 0"),
        ({}, {"layer": 1, "site": "resid_mid"}, "site", "resid_mid"),
        ({"captured": "unknown"}, {"layer": 1}, "rows.captured", "there are no rows 'unknown'"),
        ({"captured": 3}, {"layer": 1}, "rows.captured", "`str`, got `int`"),
    ],
)
async def test_what_is_not_there_is_400_by_its_path(rows_, edit, param, problem):
    async with serving() as (site, client):
        body = asking({"captured": keep(site), **rows_}, **edit)
        error = await refused(client.post(COMPLETIONS, json=body), 400)
        assert error["param"] == f"midstream.edits.{param}"
        assert re.search(problem, error["message"])
        assert site.engine.calls == []


async def test_rows_of_another_client_are_not_there():
    site = await make(has_key=True)
    async with site.client() as client:
        mine, others = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
        answer = await client.post(
            COMPLETIONS,
            json={"prompt": "abcdef", "midstream": {"capture": {"layers": [1]}}},
            headers=mine,
        )
        id_ = answer.json()["midstream"]["activations"]["id"]
        body = asking({"captured": id_, "positions": 1}, layer=1)
        await refused(client.post(COMPLETIONS, json=body, headers=others), 400, "there are no rows")
        assert (await client.post(COMPLETIONS, json=body, headers=mine)).status_code == 200
    site.server.close()


async def test_more_rows_than_a_body_could_have_are_refused():
    async with serving(max_body_bytes=2000) as (site, client):
        edit = {"op": "replace", "rows": {"captured": keep(site, count=62)}, "layer": "all"}
        many = {"prompt": "abcdef", "midstream": {"edits": [edit]}}
        assert (await client.post(COMPLETIONS, json=many)).status_code == 200
        many["midstream"]["edits"].append(edit)
        error = await refused(client.post(COMPLETIONS, json=many), 400, "2000 bytes of captured")
        assert error["param"] == "midstream.edits[1].rows"


async def test_rows_that_lost_precision_are_refused():
    codec = parse_codec("full8")
    rows = encoded(codec, torch.randn(4, 3))
    at = torch.arange(4)
    lossy = Activations({("resid_post", 1): rows}, {("resid_post", 1): at}, at)
    async with serving() as (site, client):
        data = pack(lossy, 3, torch.float32)
        id_ = site.server.captures.store(data, "127.0.0.1", "r", {}).id
        error = client.post(COMPLETIONS, json=asking({"captured": id_}, layer=1))
        assert (await refused(error, 400, "codec full8"))[
            "param"
        ] == "midstream.edits.rows.captured"


def keep_on_device(site: Site, client: str, freed: list[str]) -> str:
    """Lengths of rows of layer 1 at positions 2 … 5, which are on the device."""
    source = DeviceSource("their-request", 3, [("resid_post", 1)], freed.append)
    at = torch.arange(2, 6)
    values = {("resid_post", 1): at[:, None].float(), ("resid_post", 2): torch.ones(4, 3)}
    activations = Activations(values, dict.fromkeys(values, at), torch.arange(6))
    activations.source = source
    captures = site.server.captures
    entry = captures.store(PackedRows(activations, 3, torch.float32), client, "r", {})
    captures.hold(entry, source)
    return entry.id


async def test_rows_on_the_device_are_named_and_freed_with_their_handle():
    freed: list[str] = []
    async with serving() as (site, client):
        id_ = keep_on_device(site, "127.0.0.1", freed)
        for positions in ([5, 2], None):
            listed = {} if positions is None else {"positions": positions}
            where = list(range(2 if positions else 4))
            body = asking({"captured": id_, **listed}, layer=1, positions=where)
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200
            (_, params, _) = site.engine.calls.pop()
            (edit,) = params.extra_args["midstream"].plan.edits
            found = [(row.source, row.tap, row.position, row.size, row.norm) for row in edit.rows]
            wanted = positions or [2, 3, 4, 5]
            tap = ("resid_post", 1)
            assert found == [("their-request", tap, p, 3, float(p)) for p in wanted]
        body = asking({"captured": id_, "positions": 2}, layer=2, positions=0)
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        assert edits_of(site)[0].rows == (Vector.parse([1.0] * 3),)
        assert freed == []
        # Also while somebody reads their lengths.
        reading = site.server.captures.open(id_, "127.0.0.1")
        assert reading is not None
        assert (await client.delete(f"/v1/midstream/activations/{id_}")).status_code == 204
        gc.collect()
        assert freed == ["their-request"]
        site.server.captures.end_read(*reading)
        await refused(client.post(COMPLETIONS, json=body), 400, f"there are no rows '{id_}'")


async def test_rows_on_the_device_are_not_there_for_another_client():
    site, freed = await make(has_key=True), []
    mine, others = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
    id_ = keep_on_device(site, fingerprint("a"), freed)
    body = asking({"captured": id_, "positions": [2]}, layer=1, positions=[0])
    async with site.client() as client:
        await refused(client.post(COMPLETIONS, json=body, headers=others), 400, "there are no rows")
        path = f"/v1/midstream/activations/{id_}"
        for response in (client.delete(path, headers=others), client.get(path, headers=others)):
            assert (await response).status_code == 404
        assert site.engine.calls == []
        assert (await client.post(COMPLETIONS, json=body, headers=mine)).status_code == 200
    assert freed == []
    site.server.captures.close()
    gc.collect()
    assert freed == ["their-request"]
    site.server.close()


@pytest.mark.parametrize("returned", ["inline", "none"])
async def test_rows_that_stay_on_the_device_without_a_handle_are_refused(returned):
    async with serving() as (site, client):
        capture = {"layers": [1], "positions": "prompt", "reduce": "device"}
        body = {"prompt": "abcdef", "midstream": {"capture": capture, "activations": returned}}
        error = await refused(client.post(COMPLETIONS, json=body), 400, 'expected "handle"')
        assert error["param"] == "midstream.activations"
        assert site.engine.calls == []
