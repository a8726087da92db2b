"""Evaluation harnesses: midstream as a model of theirs."""
