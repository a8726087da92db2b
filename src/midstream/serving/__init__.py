"""What `vllm serve` gains: requests that capture, edit and probe over HTTP, and `/v1/midstream`.

vLLM's own endpoints stay as they are. A request's field `midstream` is taken out before vLLM sees
the body and handed to the engine with the request; what came of it is put on the answer.
"""
