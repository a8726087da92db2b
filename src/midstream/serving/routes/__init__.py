"""The endpoints under `/v1/midstream`, and those that others have for the same."""
