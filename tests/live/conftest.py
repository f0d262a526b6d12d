"""Where the real vLLM and the real data set are. Each variable that is not set skips the tests that need it."""

from __future__ import annotations

import os

import pytest


def _given(variable: str, what: str) -> str:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set: {what}")
    return value


@pytest.fixture(scope="session")
def vllm_url() -> str:
    """A running vLLM that nothing else uses, without an API key."""
    url = _given("VLLM_LOCUST_TEST_VLLM_URL", "base address of an idle vLLM without an API key")
    return url.rstrip("/").removesuffix("/v1")


@pytest.fixture(scope="session")
def sharegpt() -> str:
    return _given("VLLM_LOCUST_TEST_SHAREGPT", "path of ShareGPT_V3_unfiltered_cleaned_split.json")


@pytest.fixture(scope="session")
def serve_script() -> str:
    return _given("VLLM_LOCUST_TEST_VLLM_SERVE", "script that starts a vLLM, see tests/live/server_process.py")


@pytest.fixture(scope="session")
def tokenizer_flags() -> tuple[str, ...]:
    """The tokenizer is optional: without it, prompt lengths are estimates."""
    path = os.environ.get("VLLM_LOCUST_TEST_TOKENIZER")
    return ("--tokenizer", path) if path else ()
