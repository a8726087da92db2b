"""Vectors of edits and probes: their values, references to them by name, and their algebra."""
