"""HTTP front end: `/v1/midstream`, and the field `midstream` around vLLM's unchanged endpoints."""
