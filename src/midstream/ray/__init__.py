"""Bulk work on a Ray cluster: `midstream capture … --ray`, and captures as a step of Ray Data.

Needs `pip install "midstream[ray]"`. `Spreading(Job(…), Spread(…))` is a dataset capture into a
store; `capture_dataset(ds, …)` gives a `ray.data.Dataset` for whoever goes on from there.
"""

from midstream.ray.dataset import capture_dataset
from midstream.ray.spread import Spread
from midstream.ray.spreading import Spreading

__all__ = ["Spread", "Spreading", "capture_dataset"]
