"""Readers of prompts in files, the same for each command."""
