"""Checking a plan against a model and a prompt."""
