"""HTTP front end for `vllm serve`: capture, edit and probe requests, and `/v1/midstream`.

vLLM's own endpoints are unchanged. Middleware removes the field `midstream` from a request body
before vLLM parses it, passes its plan to the engine, and adds the results to the response.
"""
