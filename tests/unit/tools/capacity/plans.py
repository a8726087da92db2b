"""Plans for tests: a small model, any fleet."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from midstream.tools.capacity import Fleet, PlannedJob, read_model
from midstream.tools.capacity.rates import known_rates

RATES = known_rates()
CODECS = ("raw", "full8", "rp8:k=512,seed=0", "topk8:k=64")


def job(model: str = "llama-8b", layers: Any = "all", sites: Any = "resid_post", **fields) -> Any:
    """A planned job; `tp`, `pp`, `dp`, `nodes`, `gpus_per_node` make its fleet."""
    fleet = Fleet.of(
        fields.pop("tp", 1),
        fields.pop("pp", 1),
        fields.pop("gpus_per_node", 8),
        fields.pop("nodes", None),
        fields.pop("dp", None),
    )
    return PlannedJob.of(
        read_model(model), layers, sites, fields.pop("tokens", 10**9), fleet, **fields
    )


@st.composite
def jobs(draw) -> PlannedJob:
    """Any job on any fleet."""
    model = draw(st.sampled_from(("llama-8b", "llama-70b", "llama-405b", "qwen3-30b-a3b")))
    layers = read_model(model).num_layers
    chosen = draw(st.lists(st.integers(0, layers - 1), min_size=1, max_size=layers, unique=True))
    sites = draw(st.sampled_from(("resid_post", ["resid_mid", "mlp_out"])))
    return job(
        model,
        chosen,
        sites,
        tokens=draw(st.integers(1, 10**12)),
        request_tokens=draw(st.integers(1, 8192)),
        fraction=draw(st.floats(0.001, 1)),
        tp=draw(st.sampled_from((1, 2, 4, 8))),
        pp=draw(st.integers(1, 4)),
        dp=draw(st.integers(1, 64)),
    )
