"""What stands on the public API: fits, sweeps, attribution, capture jobs, tools, reports.

Nothing outside imports it, but by the names in `midstream.entries`.
"""
