"""The simulated vLLM server: the demo's target and the tests' oracle. ``main`` is ``vllm-locust simserver``."""

from vllm_locust.simserver.command import main

__all__ = ["main"]
