"""Taps in the model's layers."""
