"""Every endpoint that takes a probe takes its dict: the form is the same everywhere."""

import pytest
from support.serving_fake import WIDTH, refused, serving

from midstream import Gate, Probe, Steer
from midstream.plan import MLP, Classes, Stop

pytestmark = pytest.mark.anyio
GUARDS = "/v1/midstream/guards"
ASK = {"prompt": "abcde", "model": "fake"}

PROBES = {
    "a direction": Probe([1.0] * WIDTH, layer=1, name="p"),
    "several layers": Probe([[1.0] * WIDTH] * 2, layer=[1, 2], name="p"),
    "an MLP": Probe(mlp=MLP([[1.0] * WIDTH] * 2, [0.0, 1.0], [1.0, 2.0]), layer=1, name="p"),
    "classes": Probe(
        layer=1, name="p", classes=Classes([[1.0] * WIDTH, [2.0] * WIDTH], names=["calm", "angry"])
    ),
    "an act": Probe([1.0] * WIDTH, layer=1, name="p", act=Stop(above=1.0)),
}


@pytest.mark.parametrize("kind", PROBES)
async def test_every_endpoint_takes_a_probe_as_its_dict(kind):
    probe = PROBES[kind]
    form = probe.to_dict()
    async with serving() as (site, client):
        answer = await client.post("/v1/completions", json={**ASK, "midstream": {"probes": form}})
        assert answer.status_code == 200
        assert site.engine.calls[-1][1].extra_args["midstream"].plan.probes == (probe,)
        answer = await client.put("/v1/midstream/steering", json={"base": form})
        assert answer.status_code == 200, answer.text
        assert site.engine.steering.plan_edits() == (probe,)
        threshold = {} if probe.act is not None else {"above": 1.0}
        if probe.classes is not None:
            wrong = client.put(f"{GUARDS}/p", json={"probe": form, **threshold})
            await refused(wrong, 400, "the class whose scores it reads")
            threshold["output"] = "angry"
        answer = await client.put(f"{GUARDS}/p", json={"probe": form, **threshold})
        assert answer.status_code == 200, answer.text
        (guard,) = site.engine.guards.active()
        assert guard.probe.replace(name="p", act=None) == probe.replace(act=None)
        if kind == "a direction":
            gate = Gate(Steer([1.0] * WIDTH, layer=2), probe, threshold=0.5)
            edit = {**gate.to_dict(), "probe": form}
            answer = await client.put("/v1/midstream/steering", json={"base": edit})
            assert answer.status_code == 200, answer.text
            assert site.engine.steering.plan_edits() == (gate,)
            elsewhere = {**edit, "probe": {**form, "positions": [1]}}
            await refused(
                client.put("/v1/midstream/steering", json={"base": elsewhere}), 400, "the edit's"
            )
