"""One engine on a shared compile cache, in a separate process; prints its results as JSON.

python -m support.stale MODEL plain|SETTINGS
"""

import json
import sys
from pathlib import Path

from support.engines import engine, generated, greedy, tokens

PROMPT = [5, 17, 33, 101, 8, 77, 54]


def main() -> None:
    from vllm.compilation.counter import compilation_counter

    model, settings = Path(sys.argv[1]), sys.argv[2]
    args = {"enforce_eager": False, "max_model_len": 256, **json.loads(sys.argv[3])}
    found: dict[str, object] = {}
    if settings == "plain":
        with engine(model, plain=True, inductor=True, **args) as llm:
            found["plain"] = generated(llm.generate(tokens(PROMPT), greedy(6), use_tqdm=False)[0])
    else:
        from midstream import Capture, Steer

        with engine(model, midstream=json.loads(settings), inductor=True, **args) as llm:
            taps = sorted(llm.info.shape.taps)
            site, layer = taps[0]
            vector = [3.0] * llm.info.shape.hidden_size
            plain = llm.generate(tokens(PROMPT), greedy(6), use_tqdm=False)[0]
            steered = llm.generate(
                tokens(PROMPT),
                greedy(6),
                steer=[Steer(vector, layer=layer, site=site)],
                capture=[[Capture(layers=[n], sites=s) for s, n in taps]],
                use_tqdm=False,
            )[0]
            read = llm.generate(
                tokens(PROMPT), greedy(6), capture=Capture(layers=[layer], sites=site),
                use_tqdm=False,
            )[0]  # fmt: skip
            n = len(PROMPT)
            moved = steered.activations[site, layer][:n] - read.activations[site, layer][:n]
            found["plain"] = generated(plain)
            found["steered"] = generated(steered)
            found["taps"] = [list(tap) for tap in steered.activations]
            found["moved"] = moved.float().mean().item()
    found["compiled"] = compilation_counter.num_backend_compilations
    sys.stdout.write(f"\nRESULT {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
