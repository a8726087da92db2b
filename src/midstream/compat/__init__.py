"""Older interfaces, translated into plans."""
