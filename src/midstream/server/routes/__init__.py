"""Endpoints under `/v1/midstream`, and the compatible ones under `/v1/steering`."""
