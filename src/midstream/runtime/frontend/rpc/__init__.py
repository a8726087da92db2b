"""Calls to the workers."""
