"""What pages of real and of older servers become in our names."""

from __future__ import annotations

import pytest

from tests.goldens import GOLDENS
from vllm_locust.collect.families import FAMILIES, FamilyKind, read_page
from vllm_locust.server_series import split_label

Key = tuple[str | None, str]


def readings(text: str) -> dict[Key, float]:
    page = read_page(text)
    found = {(one.engine, one.metric): one.value for one in page.readings}
    assert len(found) == len(page.readings), "nothing comes twice"
    return found


def test_vllm_0_32() -> None:
    found = readings((GOLDENS / "vllm_0_32" / "metrics.txt").read_text())
    plain = {key: value for key, value in found.items() if "_bucket" not in key[1]}
    assert plain == {
        ("0", "requests_running"): 0,
        ("0", "requests_waiting"): 0,
        ("0", "kv_cache_usage"): 0,
        ("0", "prompt_tokens_total"): 285,
        ("0", "generation_tokens_total"): 482,
        ("0", "prefix_cache_queries_total"): 285,
        ("0", "prefix_cache_hits_total"): 0,
        ("0", "preemptions_total"): 0,
        ("0", 'request_success_total{finished_reason="stop"}'): 0,
        ("0", 'request_success_total{finished_reason="length"}'): 30,
        ("0", 'request_success_total{finished_reason="abort"}'): 0,
        ("0", 'request_success_total{finished_reason="error"}'): 0,
        ("0", 'request_success_total{finished_reason="repetition"}'): 0,
        ("0", "queue_seconds_sum"): 0.002071868999792059,
        ("0", "queue_seconds_count"): 30,
        ("0", "prefill_seconds_sum"): 2.689053807999926,
        ("0", "prefill_seconds_count"): 30,
        ("0", "decode_seconds_sum"): 3.5738036210000246,
        ("0", "decode_seconds_count"): 30,
        ("0", "ttft_seconds_sum"): 3.395561695098877,
        ("0", "ttft_seconds_count"): 30,
        ("0", "itl_seconds_sum"): 3.5738036210000246,
        ("0", "itl_seconds_count"): 452,
        ("0", "e2e_seconds_sum"): 7.040315866470337,
        ("0", "e2e_seconds_count"): 30,
        (None, "process_start_time_seconds"): 1796059559.06,
    }
    assert found["0", 'ttft_seconds_bucket{le="+Inf"}'] == 30
    assert found["0", 'ttft_seconds_bucket{le="0.25"}'] == 29
    assert len(found) == 157


def test_vllm_0_24_tells_the_same_families() -> None:
    new, old = (readings((GOLDENS / name / "metrics.txt").read_text()) for name in ("vllm_0_32", "vllm_0_24"))
    assert new.keys() == old.keys()
    assert old["0", "generation_tokens_total"] == 8
    assert old["0", "ttft_seconds_sum"] == 0.0735023021697998


VLLM_0_6 = """
# HELP vllm:num_requests_running Number of requests currently running on GPU.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:num_requests_swapped{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:gpu_prefix_cache_hit_rate{model_name="m"} -1.0
vllm:prompt_tokens_total{model_name="m"} 100.0
vllm:generation_tokens_total{model_name="m"} 50.0
vllm:num_preemptions_total{model_name="m"} 4.0
vllm:request_success_total{finished_reason="stop",model_name="m"} 9.0
vllm:time_per_output_token_seconds_sum{model_name="m"} 1.5
vllm:time_per_output_token_seconds_count{model_name="m"} 49.0
vllm:request_queue_time_seconds_sum{model_name="m"} 0.25
vllm:request_queue_time_seconds_sum{model_name="a-lora"} 0.5
vllm:request_queue_time_seconds_count{model_name="m"} 9.0
vllm:request_queue_time_seconds_count{model_name="a-lora"} 1.0
"""
"""Lines of the old engine; its adapters have series of their own."""

VLLM_0_10 = """
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{engine="0",model_name="m"} 32.0
vllm:gpu_prefix_cache_hits_total{engine="0",model_name="m"} 16.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 32.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 16.0
vllm:time_per_output_token_seconds_count{engine="0",model_name="m"} 7.0
"""
"""Old and new names side by side, as 0.10.0 has them."""

TWO_ENGINES = """
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_running{engine="1",model_name="m"} 7.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m",pid="11"} 0.25
vllm:kv_cache_usage_perc{engine="0",model_name="m",pid="12"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m",pid="11"} 0.75
vllm:num_requests_running{engine="0",model_name="m",pid="12"} 5.0
"""
"""Data parallel, behind two front ends of which each tells some of the engines' gauges."""

SGLANG = """
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 6.0
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",tp_rank="1"} 6.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 2.0
sglang:num_queue_reqs{dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 1.0
sglang:token_usage{dp_rank="0",engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.28
sglang:prompt_tokens_total{model_name="m"} 1000.0
sglang:generation_tokens_total{model_name="m"} 400.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 200.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 50.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 2.0
sglang:time_to_first_token_seconds_count{model_name="m"} 8.0
"""

TGI = """
# TYPE tgi_queue_size gauge
tgi_queue_size 4
tgi_batch_current_size 8
tgi_request_input_length_sum 900
tgi_request_input_length_count 30
tgi_request_generated_tokens_sum 600
tgi_request_success 28
tgi_request_queue_duration_sum 3.5
tgi_request_queue_duration_count 30
tgi_request_queue_duration_bucket{le="+Inf"} 30
"""

TENSORRT_LLM = """
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 12
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 1
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.62
trtllm_prompt_tokens_total{engine_type="trtllm",model_name="m"} 77
trtllm_generation_tokens_total{engine_type="trtllm",model_name="m"} 88
trtllm_request_success_total{engine_type="trtllm",finished_reason="stop",model_name="m"} 3
"""

LLAMA_CPP = """
# HELP llamacpp:requests_processing Number of requests processing
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 4
llamacpp:requests_deferred 46
llamacpp:prompt_tokens_total 512
llamacpp:tokens_predicted_total 17029
llamacpp:kv_cache_usage_ratio 0.42
llamacpp:predicted_tokens_seconds nan
"""

OF_SERVERS: dict[str, tuple[str, dict[Key, float]]] = {
    "vllm 0.6": (
        VLLM_0_6,
        {
            ("0", "requests_running"): 3,
            ("0", "requests_waiting"): 2,
            ("0", "kv_cache_usage"): 0.25,
            ("0", "prompt_tokens_total"): 100,
            ("0", "generation_tokens_total"): 50,
            ("0", "preemptions_total"): 4,
            ("0", 'request_success_total{finished_reason="stop"}'): 9,
            ("0", "queue_seconds_sum"): 0.75,
            ("0", "queue_seconds_count"): 10,
            ("0", "itl_seconds_sum"): 1.5,
            ("0", "itl_seconds_count"): 49,
        },
    ),
    "vllm 0.10": (
        VLLM_0_10,
        {
            ("0", "kv_cache_usage"): 0.5,
            ("0", "prefix_cache_queries_total"): 32,
            ("0", "prefix_cache_hits_total"): 16,
            ("0", "itl_seconds_count"): 7,
        },
    ),
    "two engines": (
        TWO_ENGINES,
        {
            ("0", "requests_running"): 5,
            ("1", "requests_running"): 7,
            ("0", "requests_waiting"): 0,
            ("1", "requests_waiting"): 3,
            ("0", "kv_cache_usage"): 0.5,
            ("1", "kv_cache_usage"): 0.75,
        },
    ),
    "sglang": (
        SGLANG,
        {
            ("0", "requests_running"): 6,
            ("1", "requests_running"): 2,
            ("0", "requests_waiting"): 1,
            ("0", "kv_cache_usage"): 0.28,
            ("0", "prompt_tokens_total"): 1000,
            ("0", "generation_tokens_total"): 400,
            ("0", "prefix_cache_queries_total"): 1000,
            ("0", "prefix_cache_hits_total"): 250,
            ("0", "ttft_seconds_sum"): 2,
            ("0", "ttft_seconds_count"): 8,
        },
    ),
    "tgi": (
        TGI,
        {
            ("0", "requests_running"): 8,
            ("0", "requests_waiting"): 4,
            ("0", "prompt_tokens_total"): 900,
            ("0", "generation_tokens_total"): 600,
            ("0", "request_success_total"): 28,
            ("0", "queue_seconds_sum"): 3.5,
            ("0", "queue_seconds_count"): 30,
            ("0", 'queue_seconds_bucket{le="+Inf"}'): 30,
        },
    ),
    "tensorrt-llm": (
        TENSORRT_LLM,
        {
            ("0", "requests_running"): 12,
            ("0", "requests_waiting"): 1,
            ("0", "kv_cache_usage"): 0.62,
            ("0", "prompt_tokens_total"): 77,
            ("0", "generation_tokens_total"): 88,
            ("0", 'request_success_total{finished_reason="stop"}'): 3,
        },
    ),
    "llama.cpp": (
        LLAMA_CPP,
        {
            ("0", "requests_running"): 4,
            ("0", "requests_waiting"): 46,
            ("0", "kv_cache_usage"): 0.42,
            ("0", "prompt_tokens_total"): 512,
            ("0", "generation_tokens_total"): 17029,
        },
    ),
}


@pytest.mark.parametrize("server", OF_SERVERS)
def test_other_servers_and_releases(server: str) -> None:
    text, expected = OF_SERVERS[server]
    assert readings(text) == expected


@pytest.mark.parametrize(
    ("text", "waiting"),
    [(VLLM_0_6, 2.0), (TWO_ENGINES, 3.0), (SGLANG, 1.0), (TGI, 4.0), (LLAMA_CPP, 46.0), (VLLM_0_10, None), ("", None)],
)
def test_requests_waiting(text: str, waiting: float | None) -> None:
    assert read_page(text).requests_waiting == waiting


def test_a_page_of_something_else() -> None:
    page = read_page("process_start_time_seconds 5\nnode_load1 0.5\nDCGM_FI_DEV_GPU_UTIL 3\n")
    assert not page.of_a_server
    assert [(one.engine, one.metric, one.value) for one in page.readings] == [(None, "process_start_time_seconds", 5.0)]


def test_bounds_are_written_in_one_way_and_broken_values_are_left_out() -> None:
    found = readings(
        'vllm:time_to_first_token_seconds_bucket{le="1"} 2\n'
        'vllm:time_to_first_token_seconds_bucket{le="inf"} 3\n'
        "vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\n"
    )
    assert found == {("0", 'ttft_seconds_bucket{le="1.0"}'): 2, ("0", 'ttft_seconds_bucket{le="+Inf"}'): 3}


def test_the_table_is_whole() -> None:
    metrics = [family.metric for family in FAMILIES]
    assert len(set(metrics)) == len(metrics)
    for family in FAMILIES:
        assert len(set(family.names)) == len(family.names)
        assert family.names[0].startswith("vllm:")
        assert (family.kind is FamilyKind.HISTOGRAM) == family.metric.endswith("_seconds")
        assert (family.kind is FamilyKind.COUNTER) == family.metric.endswith("_total")


def test_labels_come_off_again() -> None:
    assert split_label('request_success_total{finished_reason="stop"}') == ("request_success_total", "stop")
    assert split_label('x_bucket{le="+Inf"}') == ("x_bucket", "+Inf")
    assert split_label("requests_running") == ("requests_running", None)
