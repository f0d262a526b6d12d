"""The environment's variables that are settings of the package, and those that only look like it."""

from __future__ import annotations

from vllm_locust.run.flags import unknown_variables


def test_a_mistyped_variable_is_told() -> None:
    names = (
        "VLLM_LOCUST_RATE",
        "VLLM_LOCUST_RATES",
        "VLLM_LOCUST_TEST_CLOCK",
        "VLLM_LOCUST_RESET_PREFIX_CACHE",
        "PATH",
    )
    services = ("VLLM_LOCUST_VALKEY_SERVICE_HOST", "VLLM_LOCUST_MASTER_PORT", "VLLM_LOCUST_MASTER_PORT_5557_TCP_ADDR")
    assert unknown_variables((*names, *services)) == ["VLLM_LOCUST_RATES"]
