"""The sub-commands that stand on the public API."""
