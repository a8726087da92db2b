"""The drift of a guard that was put with its training, over HTTP."""

import math

import pytest
from support.serving_fake import WIDTH, refused, serving

from midstream import Probe
from midstream.drift import DriftMonitor

pytestmark = pytest.mark.anyio
GUARD = "/v1/midstream/guards/drifting"
# Score p of the fake engine is p / 8; the highest of a prompt of five tokens is 0.75.
FORM = {"probe": Probe([1.0] * WIDTH, layer=1).to_dict(), "above": 5.0}
TRAINING = {"edges": [0.5], "counts": [3, 1]}


async def test_scores_of_completions_are_compared_with_those_of_the_training():
    async with serving() as (site, client):
        site.server.metrics.drift = DriftMonitor(least=2)
        made = await client.put(GUARD, json={**FORM, "training": TRAINING})
        assert made.json()["training"] == TRAINING
        for _ in range(2):
            answer = await client.post("/v1/completions", json={"prompt": "abcde", "model": "m"})
            assert answer.status_code == 200
        # Shares with half a score more in each bin: 3.5 and 1.5 of 5; 0.5 and 2.5 of 3.
        a, e = 0.5 / 3, 3.5 / 5
        wanted = (a - e) * math.log(a / e) + (e - a) * math.log((1 - a) / (1 - e))
        indices = site.server.metrics.drift.indices()
        assert indices == {("drifting", made.json()["version"]): pytest.approx(wanted)}
        site.server.metrics.drift = DriftMonitor()


async def test_a_wrong_training_is_refused_with_its_field():
    async with serving() as (_, client):
        wrong = {**TRAINING, "counts": [1]}
        error = await refused(client.put(GUARD, json={**FORM, "training": wrong}), 400)
        assert error["param"] == "training.counts"
