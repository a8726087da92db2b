"""Sweeps and fits over HTTP."""
