"""Real work for the GPUs of this host, on demand: ``python -m tests.live.gpu_load [--dry]``.

It prints LOADED, the loads that it can do and what it is, when everything is in memory. Then each line ``KIND SECONDS``
on its standard input starts one load: READY when it is under way, DONE with the number of its rounds when it is over.
``matmul`` keeps the tensor cores busy, ``copy`` the memory, ``thin`` multiplies by thin matrices as the decoding of few
sequences does, ``generate`` is a transformer with a KV cache that writes tokens. Needs torch, and transformers for
``generate``; ``--dry`` needs neither and works on the CPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vllm_locust import clock

KINDS = ("matmul", "copy", "thin", "generate")
Round = Callable[[], object]
"""So short that a load ends nearly when it should."""


def _device_rounds(torch: Any, device: str) -> dict[str, Round]:
    def random(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    a, b, out = random(8192, 8192), random(8192, 8192), random(8192, 8192)
    source = torch.empty(1 << 30, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    thin, weights = random(16, 8192), [random(8192, 8192) for _ in range(32)]
    return {
        "matmul": lambda: [torch.matmul(a, b, out=out) for _ in range(10)],
        "copy": lambda: [target.copy_(source) for _ in range(10)],
        "thin": lambda: [torch.matmul(thin, one) for _ in range(10) for one in weights],
        "generate": _Generation(torch, device),
    }


class _Generation:
    """Some 5 billion parameters with random values, 64 sequences: a prefill of 512 tokens each, then 48 steps."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        self._device = device
        self._model: Any = None

    def _load(self) -> Any:
        torch, transformers = self._torch, importlib.import_module("transformers")
        config = transformers.LlamaConfig(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=22,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=32_000,
        )
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(self._device):
            model = transformers.LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
        return model

    def __call__(self) -> object:
        if self._model is None:
            self._model = self._load()
        prompt = self._torch.randint(1, 32_000, (64, 512), device=self._device)
        options = {"attention_mask": self._torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
        return self._model.generate(prompt, min_new_tokens=48, max_new_tokens=48, use_cache=True, **options)


def _cuda_rounds() -> tuple[str, dict[str, Round]]:
    torch = importlib.import_module("torch")
    torch.set_grad_enabled(False)
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    if not devices:
        raise SystemExit("torch sees no GPU")
    of_device = {device: _device_rounds(torch, device) for device in devices}

    def on_all(kind: str) -> Round:
        def once() -> None:
            for rounds in of_device.values():
                rounds[kind]()
            for device in devices:
                torch.cuda.synchronize(device)

        return once

    rounds = {}
    for kind in KINDS:
        try:
            on_all(kind)()
        except Exception as error:  # noqa: BLE001 - the other loads are still worth having
            print(f"no load {kind}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        else:
            rounds[kind] = on_all(kind)
    return f"torch {torch.__version__}, {len(devices)} x {torch.cuda.get_device_name(0)}", rounds


def _dry_rounds() -> tuple[str, dict[str, Round]]:
    matrix = np.ones((256, 256), dtype=np.float32)

    def once() -> None:
        np.matmul(matrix, matrix)
        clock.sleep(0.05)

    return "no GPU: a dry run", dict.fromkeys(KINDS, once)


def _serve(rounds: Mapping[str, Round]) -> None:
    for line in sys.stdin:
        kind, seconds = line.split()
        end_ns = clock.monotonic_ns() + round(float(seconds) * 1e9)
        print(f"READY {kind}", flush=True)
        number = 0
        while clock.monotonic_ns() < end_ns:
            rounds[kind]()
            number += 1
        print(f"DONE {kind} {number}", flush=True)


def main() -> None:
    what, rounds = _dry_rounds() if "--dry" in sys.argv[1:] else _cuda_rounds()
    print(f"LOADED {','.join(rounds)} {what}", flush=True)
    _serve(rounds)


if __name__ == "__main__":
    main()
