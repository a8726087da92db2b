"""Hooks in vLLM's model runners."""
