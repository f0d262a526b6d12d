"""Real answers of real servers, byte for byte."""

from __future__ import annotations

from pathlib import Path

GOLDENS = Path(__file__).parent
VLLM = GOLDENS / "vllm_0_32"
STREAMS = sorted(VLLM.glob("*.sse"))


def golden(name: str) -> bytes:
    return (VLLM / name).read_bytes()
