"""A fake engine whose front end is real: plans are resolved for tokens, as before vLLM's engine."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from midstream.config.config import Config
from midstream.runtime.frontend.async_frontend import AsyncFrontEnd
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.protocol.segments import Room
from midstream.transport.leases import Address
from support.serving_fake import WIDTH, FakeEngine, Params
from support.stored import worker_info
from support.tokenizers import byte_level

SITES = ("resid_pre", "resid_mid", "resid_post", "rot_q", "z", "mlp_out")
HEADS = {"rot_q": 3, "z": 3}
LAYERS = 32
MAX_LENGTH = 1 << 15
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def front_end(tokenizer: Any) -> AsyncFrontEnd:
    """Return the front end of an engine that never runs."""
    taps = tuple((site, layer) for layer in range(LAYERS) for site in SITES)
    taps += (("final_norm", LAYERS - 1),)
    worker = worker_info(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        taps=taps,
        heads=tuple(HEADS.get(site, 0) for site, _ in taps),
        capture_limit=1 << 20,
        room=Room(1 << 16, 1 << 16, 1 << 20, 1 << 16, 1 << 12),
        edits_per_site=1 << 12,
        arena=Address(0, 0, ""),
        arena_bytes=1 << 40,
    )
    config = SimpleNamespace(
        additional_config={"midstream": Config()},
        cache_config=SimpleNamespace(enable_prefix_caching=False, block_size=16),
        model_config=SimpleNamespace(
            is_mm_prefix_lm=False,
            max_model_len=MAX_LENGTH,
            model="fake",
            revision=None,
            get_vocab_size=lambda: len(tokenizer),
        ),
        parallel_config=SimpleNamespace(
            _api_process_count=1, _api_process_rank=0, tensor_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        speculative_config=None,
    )
    engine = SimpleNamespace(vllm_config=config, get_tokenizer=lambda: tokenizer)
    engine.renderer = SimpleNamespace(render_messages=_render(tokenizer))
    client = SimpleNamespace(abort_requests_async=None, core_engines=[None])
    return AsyncFrontEnd([[worker]], engine, client)


def _render(tokenizer: Any) -> Any:
    def render(messages: list[Any], _params: Any) -> tuple[Any, dict[str, str]]:
        text = tokenizer.apply_chat_template(messages, chat_template=TEMPLATE, tokenize=False)
        return messages, {"prompt": text}

    return render


class ResolvingEngine(FakeEngine):
    """A `FakeEngine` that resolves every plan before it answers; see `AsyncEngineCall`."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = byte_level()
        self.front = front_end(self.tokenizer)

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **given: Any
    ) -> AsyncGenerator[Any, None]:
        plan = (params.extra_args or {}).get("midstream")
        if isinstance(plan, CallPlan):
            await self.resolve(prompt, plan, request_id)
        bare = Params(params.n)
        async for output in super().generate("abc", bare, request_id, **given):
            yield output

    async def resolve(self, prompt: Any, plan: CallPlan, request_id: str) -> None:
        """Resolve a plan for a prompt, as AsyncLLM does, and release what it takes."""
        if plan.messages is not None:
            prompt = list(plan.messages)
            _, rendered = self.front._engine.renderer.render_messages(prompt, None)
            prompt = rendered["prompt"]
        if isinstance(prompt, str):
            prompt = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        params = SimpleNamespace(
            n=1, max_tokens=4, stop=(), output_kind=SimpleNamespace(name="FINAL_ONLY"),
            extra_args=None,
        )  # fmt: skip
        call = self.front.begin(plan, None)
        try:
            rendered = {"type": "token", "prompt_token_ids": prompt}
            others = (self.front.steering.plan_edits(), self.front.captures.current)
            await self.front.plans.resolve_ahead(plan, rendered, params, *others)
            request = SimpleNamespace(
                request_id=request_id,
                prompt_token_ids=list(prompt),
                prompt_embeds=None,
                prompt_is_token_ids=None,
                cache_salt=None,
                sampling_params=params,
                data_parallel_rank=None,
            )
            self.front.admit(request, plan)
        finally:
            if call.admitted is not None:
                self.front._release([call.uid])
                self.front._forget(call)
                call.admitted = None
            self.front.plans.forget(plan)
            self.front.leave(call)
