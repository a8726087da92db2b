"""Requests and the blocks of their KV, as vLLM's scheduler has them."""

from types import SimpleNamespace

from midstream.runtime.core.failed_requests import end_failed


class Scheduler:
    """Requests with their blocks; ids over 0, as 0 is the null block's."""

    def __init__(self, **blocks):
        self.requests = {}
        self.blocks = {}
        self.evicted = None
        self.kv_cache_manager = SimpleNamespace(
            kv_cache_config=SimpleNamespace(
                kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))]
            ),
            get_blocks=lambda name: SimpleNamespace(blocks=(self.blocks[name],)),
            block_pool=SimpleNamespace(
                blocks=[
                    SimpleNamespace(block_id=nth, block_hash=b"h" if nth % 2 else None)
                    for nth in range(9)
                ],
                evict_blocks=self._evict,
            ),
        )
        for name, (request, ids) in blocks.items():
            request.request_id = name
            self.requests[name] = request
            self.blocks[name] = [SimpleNamespace(block_id=n, is_null=n == 0) for n in ids]

    def _evict(self, ids):
        self.evicted = ids

    def finish_requests(self, names, status):
        assert status.name == "FINISHED_ERROR"
        return [self.requests.pop(name) for name in names if name in self.requests]

    def end(self, **failed):
        return {request.request_id: why for request, why in end_failed(self, failed)}
