"""Rows that are computed after a step from captured ones: attention, logits, lenses, features."""
