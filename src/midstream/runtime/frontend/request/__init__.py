"""Requests on the way in."""
