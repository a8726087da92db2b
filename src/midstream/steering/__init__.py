"""Steering vectors under a name: where they are kept, and the forms and files they come in.

Needs neither vLLM nor a device. Importing it costs little: torch and safetensors are imported
when a file of safetensors is read.
"""

from __future__ import annotations

from midstream.steering.listing import Description, Listing
from midstream.steering.parse import Placed, read_placed
from midstream.steering.registry import VectorRegistry

__all__ = ["Description", "Listing", "Placed", "VectorRegistry", "read_placed"]
