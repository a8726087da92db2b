"""What midstream adds to vLLM's app: endpoints, authorization, schema and fingerprint."""
