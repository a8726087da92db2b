"""Scores of gates with memory: those of a request's tokens, in order. A part of the op `site`."""
