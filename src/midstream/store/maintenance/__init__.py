"""Merging, pruning, rewriting and verifying stores."""
