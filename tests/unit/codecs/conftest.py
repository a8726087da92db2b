"""Hypothesis judges what is found, not how fast: these tests run on busy machines."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "midstream", max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("midstream")
