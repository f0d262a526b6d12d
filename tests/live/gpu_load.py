"""Real work for a GPU: ``python -m tests.live.gpu_load KIND SECONDS`` prints READY once it is under way.

``matmul`` keeps the tensor cores busy, ``copy`` the memory, ``decode`` multiplies by thin matrices as the decoding of
few sequences does, ``generate`` is a transformer that writes tokens. Needs torch, and transformers for ``generate``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from vllm_locust import clock

KINDS = ("matmul", "copy", "decode", "generate")


def _step(kind: str, torch: Any, device: str) -> Callable[[], object]:
    def random(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    if kind == "matmul":
        a, b, out = random(8192, 8192), random(8192, 8192), random(8192, 8192)
        return lambda: torch.matmul(a, b, out=out)
    if kind == "copy":
        source = torch.empty(1 << 30, device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)
    if kind == "decode":
        thin, weights = random(16, 8192), [random(8192, 8192) for _ in range(32)]
        return lambda: [torch.matmul(thin, one) for one in weights]
    return _generation(torch, device)


def _generation(torch: Any, device: str) -> Callable[[], object]:
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32_000,
    )
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    prompt = torch.randint(1, 32_000, (32, 256), device=device)
    return lambda: model.generate(prompt, max_new_tokens=32, do_sample=False, pad_token_id=0)


def main() -> None:
    kind, seconds = sys.argv[1], float(sys.argv[2])
    torch = importlib.import_module("torch")
    with torch.no_grad():
        steps = [_step(kind, torch, f"cuda:{index}") for index in range(torch.cuda.device_count())]
        for step in steps:
            step()
        torch.cuda.synchronize()
        print("READY", flush=True)
        end_ns = clock.monotonic_ns() + round(seconds * 1e9)
        while clock.monotonic_ns() < end_ns:
            for step in steps:
                for _ in range(1 if kind == "generate" else 10):
                    step()
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)


if __name__ == "__main__":
    main()
