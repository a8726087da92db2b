"""Captured rows that the server keeps: for clients to fetch, and for later requests' edits."""
