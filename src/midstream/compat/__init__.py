"""Older ways to ask, translated into plans."""
