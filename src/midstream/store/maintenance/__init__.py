"""Maintenance of stores: merge, prune and verify."""
