"""Both clients return the directions that the server fitted."""

import numpy as np
import pytest
from lab.server.routes.test_fit import NEGATIVE, POSITIVE, expected, script

from midstream import Directions
from midstream.errors import SpecError


def test_a_fit_is_the_servers_with_its_probes_and_edits(both, site):
    site.engine.script = script
    more = {"seed": 2, "groups": (list("aabbc"), list("ccbba"))}
    found = both.call("fit", POSITIVE, NEGATIVE, "lda", [1, 3], name="good", model="m", **more)
    wanted = expected("lda", **more).at([1, 3])
    assert isinstance(found, Directions)
    assert np.array_equal(found.vectors, wanted.vectors)
    assert dict(found.scores) == dict(wanted.scores)
    assert found[3].probe("p") == wanted[3].probe("p")
    assert [one["name"] for one in both.call("vectors.list")] == ["good"]


def test_what_is_malformed_is_refused_before_it_is_sent(both, site):
    for change, path in (
        ({"positive": "text"}, "positive"),
        ({"method": object()}, "method"),
        ({"site": "nowhere"}, "site"),
        ({"layers": "x"}, "layers"),
        ({"reduce": "max"}, "reduce"),
        ({"name": "../x"}, "name"),
    ):
        with pytest.raises(SpecError) as refusal:
            both.call("fit", **{"positive": POSITIVE, "negative": NEGATIVE, **change})
        assert refusal.value.path == path
    assert not site.engine.calls
