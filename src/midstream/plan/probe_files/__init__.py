"""Files of probes: the probe with what is known of it, and what differs between two of them."""

from midstream.plan.probe_files.files import ProbeFiles

__all__ = ["ProbeFiles"]
