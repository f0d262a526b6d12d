"""GPUs read through a driver that answers as an H200 did, and through drivers that refuse, lose GPUs and split them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pynvml
import pytest

from tests.collect.fake_nvml import RECORDED, FakeDevice, FakeNvml, FakeTime, gpm_of
from vllm_locust.collect.gpu_source import Remarks, Tick
from vllm_locust.collect.nvml import NvmlSource
from vllm_locust.errors import UsageError
from vllm_locust.telemetry import COLUMNS, TelemetryKind

SECOND_NS = 1_000_000_000


class Bench:
    """A source over a fake driver, and what it said."""

    def __init__(self, *devices: FakeDevice, gpus: str | None = None, **environment: str) -> None:
        self.said: list[str] = []
        self.number = -1
        self.time = FakeTime()
        self.nvml = FakeNvml(*devices, process_names={420: "/usr/bin/python3.12"})
        self.source = NvmlSource(
            self.nvml,
            Remarks(self.said.append),
            host="h",
            axis=self.time,  # type: ignore[arg-type]
            gpus=gpus,
            environment=environment,
            monotonic_ns=self.time.monotonic_ns,
        )

    def tick(self, *, slow: bool = False, after_ns: int = SECOND_NS // 10) -> None:
        """``slow``: a second later by the tick's number, so that it is every GPU's turn."""
        self.time.now_ns += after_ns
        self.number += 10 if slow else 0
        self.source.tick(Tick(self.number, 10, 1))

    def gpu_rows(self) -> list[Mapping[str, Any]]:
        return list(self.source.take(last=True)[TelemetryKind.GPU])


def test_a_row_is_what_the_driver_answered_in_our_units() -> None:
    bench = Bench(FakeDevice())
    bench.tick(slow=True)
    bench.tick(slow=True)
    first, second = bench.gpu_rows()
    assert {**first, "time_unix_ns": 0} == {
        "time_unix_ns": 0,
        "host": "h",
        "gpu_index": 0,
        "gpu_uuid": "GPU-b6ac",
        "gpu_name": "NVIDIA H200",
        "mig_instance": None,
        "utilization": 1.0,
        "memory_bandwidth_utilization": 0.24,
        "memory_used_bytes": 10_525_474_816,
        "memory_total_bytes": 150_754_820_096,
        "power_w": 691.391,
        "sm_clock_mhz": 1470,
        "memory_clock_mhz": 3201,
        "throttle_reasons": ["sw_power_cap"],
        "temperature_c": 49,
        "energy_j": 10_843.923,
        "encoder_utilization": 0.0,
        "decoder_utilization": 0.0,
        "ecc_errors": 0,
        "xid": None,
    }
    assert set(second) == {column.name for column in COLUMNS[TelemetryKind.GPU]} - {"energy_j"}
    # GPM is about the time between two samples: the second row is the first that has it.
    assert {name: second[name] for name in second if name not in first} == pytest.approx(
        {
            "sm_activity": 0.958,
            "sm_occupancy": 0.1416,
            "tensor_activity": 0.93,
            "dram_activity": 0.1669,
            "pcie_tx_bytes_per_s": 4.39 * 1_048_576,
            "pcie_rx_bytes_per_s": 12.83 * 1_048_576,
            "nvlink_tx_bytes_per_s": 0.0,
            "nvlink_rx_bytes_per_s": 0.0,
        }
    )
    assert bench.said == []


@pytest.mark.parametrize(
    ("load", "tensor", "dram"), [("idle", 0.0, 0.0), ("matmul", 0.93, 0.1669), ("copy", 0.0, 0.8904)]
)
def test_gpm_tells_loads_apart_that_utilization_does_not(load: str, tensor: float, dram: float) -> None:
    utilization, memory, _, clock_mhz = RECORDED[load]["nvml_gpu_mem_power_clock"][-1]
    device = FakeDevice(utilization=(utilization, memory), gpm=gpm_of(load))
    device.clocks[pynvml.NVML_CLOCK_SM] = clock_mhz
    bench = Bench(device)
    bench.tick(slow=True)
    bench.tick(slow=True)
    row = bench.gpu_rows()[1]
    assert (row["tensor_activity"], row["dram_activity"]) == pytest.approx((tensor, dram))
    assert (row["utilization"], row["sm_clock_mhz"]) == (utilization / 100, clock_mhz)


def test_slow_fields_are_asked_only_in_slow_ticks() -> None:
    device = FakeDevice()
    bench = Bench(device)
    bench.tick(slow=True)
    device.asked.clear()
    bench.tick()
    assert device.asked == ["utilization", "memory", "fields", "clock", "clock", "throttle"]
    assert "temperature_c" not in bench.gpu_rows()[1]


@pytest.mark.parametrize(
    ("slow_every_s", "expected"),
    [
        (1, {"GPU-0": [0, 13, 20], "GPU-1": [1, 13, 21], "GPU-2": [2, 13, 22]}),
        (2, {"GPU-0": [0, 20], "GPU-1": [1, 21], "GPU-2": [2, 22]}),
    ],
)
def test_gpus_take_turns_with_slow_fields_and_a_missed_turn_is_made_up_for(
    slow_every_s: int, expected: dict[str, list[int]]
) -> None:
    devices = [FakeDevice(uuid=uuid) for uuid in expected]
    bench = Bench(*devices)
    slow: dict[str, list[int]] = {uuid: [] for uuid in expected}
    rows: list[Mapping[str, Any]] = []
    for number in [n for n in range(25) if n not in (10, 11, 12)]:
        bench.time.now_ns += SECOND_NS // 10
        for device in devices:
            device.asked.clear()
        bench.source.tick(Tick(number, 10, slow_every_s))
        for device in devices:
            if "temperature" in device.asked:
                slow[device.uuid].append(number)
        taken = list(bench.source.take()[TelemetryKind.GPU])
        assert bool(taken) == (number in {n for numbers in expected.values() for n in numbers} | {13})
        rows += taken
    rows += bench.gpu_rows()
    assert slow == expected
    for uuid in expected:
        times = [row["time_unix_ns"] for row in rows if row["gpu_uuid"] == uuid]
        assert len(times) == 22
        assert times == sorted(times)


FIELD_OF_CALL = {
    "utilization": ("utilization", "memory_bandwidth_utilization"),
    "memory": ("memory_used_bytes", "memory_total_bytes"),
    "clock": ("sm_clock_mhz", "memory_clock_mhz"),
    "throttle": ("throttle_reasons",),
    "temperature": ("temperature_c",),
    "encoder": ("encoder_utilization",),
    "decoder": ("decoder_utilization",),
    "ecc": ("ecc_errors",),
    "events": ("xid",),
    "gpm_sample": ("sm_activity", "sm_occupancy", "tensor_activity", "dram_activity"),
}


@pytest.mark.parametrize("refusal", ["NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND"])
@pytest.mark.parametrize("call", FIELD_OF_CALL)
def test_a_field_that_is_refused_is_null_with_its_reason_once_and_the_others_are_there(call: str, refusal: str) -> None:
    whole = Bench(FakeDevice())
    whole.tick(slow=True)
    whole.tick(slow=True)
    everything = set(whole.gpu_rows()[1])
    device = FakeDevice(fails={call: refusal})
    bench = Bench(device)
    for _ in range(3):
        bench.tick(slow=True)
    asked_again = device.asked[len(device.asked) - device.asked[::-1].index("utilization") :]
    rows = bench.gpu_rows()
    missing = everything - set(rows[2])
    assert set(FIELD_OF_CALL[call]) <= missing
    # Without GPM traffic comes from counters, which this GPU has for PCIe alone.
    assert missing - {"nvlink_tx_bytes_per_s", "nvlink_rx_bytes_per_s"} == set(FIELD_OF_CALL[call])
    reasons = {"NOT_SUPPORTED": "Not Supported", "NO_PERMISSION": "Insufficient Permissions"}
    assert bench.said
    assert len(bench.said) == len(set(bench.said))
    of_counters = [line for line in bench.said if ": no nvlink_" in line]
    mine = [line for line in bench.said if line not in of_counters]
    assert all(line.endswith(reasons.get(refusal, "Function Not Found")) for line in mine)
    assert bool(of_counters) == (call == "gpm_sample")
    assert all(line.startswith("GPU 0 (GPU-b6ac): no ") for line in bench.said)
    assert call not in asked_again


def test_an_error_that_may_pass_is_said_once_and_asked_again() -> None:
    device = FakeDevice(fails={"temperature": "UNKNOWN"})
    bench = Bench(device)
    bench.tick(slow=True)
    bench.tick(slow=True)
    device.fails.clear()
    bench.tick(slow=True)
    assert [row.get("temperature_c") for row in bench.gpu_rows()] == [None, None, 49]
    assert bench.said == ["GPU 0 (GPU-b6ac): no temperature_c for now: Unknown Error"]


def test_power_comes_from_the_older_call_where_the_field_is_not_there() -> None:
    device = FakeDevice()
    del device.fields[pynvml.NVML_FI_DEV_POWER_INSTANT]
    bench = Bench(device)
    bench.tick()
    bench.tick()
    assert [row["power_w"] for row in bench.gpu_rows()] == [454.173, 454.173]
    assert bench.said == ["GPU 0 (GPU-b6ac): no power_w: Not Supported"]


def test_without_gpm_traffic_comes_from_counters() -> None:
    device = FakeDevice(gpm_supported=False)
    device.fields[pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX] = (3, 7)
    bench = Bench(device)
    bench.tick(slow=True)
    device.fields[pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES] = (3, 6_000)
    device.fields[pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX] = (3, 17)
    bench.tick(slow=True, after_ns=2 * SECOND_NS)
    row = bench.gpu_rows()[1]
    traffic = {name: value for name, value in row.items() if name.endswith("_per_s")}
    assert traffic == {
        "pcie_tx_bytes_per_s": 2_500.0,
        "pcie_rx_bytes_per_s": 0.0,
        "nvlink_tx_bytes_per_s": 5 * 1024.0,
    }
    assert bench.said == [
        "GPU 0 (GPU-b6ac): no gpm_support: Not Supported",
        "GPU 0 (GPU-b6ac): no nvlink_rx: Not Supported",
    ]


def test_a_lost_gpu_stops_no_other_and_may_come_back() -> None:
    lost, well = FakeDevice(uuid="GPU-1"), FakeDevice(uuid="GPU-2")
    bench = Bench(lost, well)
    bench.tick(slow=True)
    lost.fails["*"] = "GPU_IS_LOST"
    bench.tick(slow=True)
    bench.tick()
    assert [row["gpu_uuid"] for row in bench.gpu_rows()] == ["GPU-1", "GPU-2", "GPU-2", "GPU-2"]
    assert bench.said == ["GPU 0 (GPU-1) is lost: GPU is lost; the others go on"]
    lost.asked.clear()
    bench.tick()
    assert lost.asked == []  # it is not asked at every tick
    bench.tick(after_ns=11 * SECOND_NS)
    assert lost.asked == ["handle"]
    lost.fails.clear()
    bench.tick(after_ns=11 * SECOND_NS, slow=True)
    latest = [row for row in bench.gpu_rows() if row["time_unix_ns"] == bench.time.unix_ns()]
    assert [row["gpu_uuid"] for row in latest] == ["GPU-1", "GPU-2"]
    assert "sm_activity" not in latest[0]  # it would be about the time in which the GPU was away
    assert "sm_activity" in latest[1]
    assert bench.said[1:] == ["GPU 0 (GPU-1) is back"]


def test_an_xid_is_in_the_row_after_it_and_the_last_of_several_counts() -> None:
    device = FakeDevice()
    bench = Bench(device)
    bench.tick(slow=True)
    device.xids = [31, 79]
    bench.tick(slow=True)
    bench.tick(slow=True)
    assert [row["xid"] for row in bench.gpu_rows()] == [None, 79, None]


def test_utilization_is_the_mean_of_the_drivers_own_samples_between_rows() -> None:
    device = FakeDevice(utilization=(100, 24))
    bench = Bench(device)
    bench.source.devices[0].samples_since_us = 1
    start_us = bench.time.unix_ns() // 1000
    device.samples = [(start_us + 50_000, 20), (start_us + 90_000, 40), (start_us + 150_000, 80)]
    bench.tick()
    bench.tick()
    bench.tick(slow=True)
    assert [row["utilization"] for row in bench.gpu_rows()] == pytest.approx([0.3, 0.8, 0.8])


def test_processes_have_names_and_memory() -> None:
    bench = Bench(FakeDevice(processes=[(420, 9_871_294_464), (2**22 + 7, None)]))
    bench.tick()
    bench.tick(slow=True)
    rows = bench.source.take(last=True)
    assert rows[TelemetryKind.GPU_PROCESSES] == [
        {
            "time_unix_ns": rows[TelemetryKind.GPU][1]["time_unix_ns"],
            "host": "h",
            "gpu_index": 0,
            "gpu_uuid": "GPU-b6ac",
            "mig_instance": None,
            "pid": pid,
            "name": name,
            "memory_bytes": memory,
        }
        for pid, name, memory in ((420, "python3.12", 9_871_294_464), (2**22 + 7, None, None))
    ]


def mig_gpu() -> FakeDevice:
    instances = [
        FakeDevice(uuid="MIG-a", instance_id=1, memory=(5, 10), gpm=gpm_of("copy"), processes=[(420, 5)]),
        FakeDevice(uuid="MIG-b", instance_id=2, memory=(6, 10), gpm=gpm_of("matmul"), processes=[]),
    ]
    return FakeDevice(uuid="GPU-1", mig=True, instances=instances, gpm_supported=True, processes=[])


def test_mig_instances_tell_of_their_part_and_their_gpu_of_the_whole() -> None:
    bench = Bench(mig_gpu())
    bench.tick(slow=True)
    bench.tick(slow=True)
    rows = bench.gpu_rows()
    latest = {row["gpu_uuid"]: row for row in rows if row["time_unix_ns"] == rows[-1]["time_unix_ns"]}
    assert {uuid: row["mig_instance"] for uuid, row in latest.items()} == {"GPU-1": None, "MIG-a": 1, "MIG-b": 2}
    assert {row["gpu_index"] for row in rows} == {0}
    assert latest["MIG-a"]["dram_activity"] == pytest.approx(0.8904)
    assert latest["MIG-b"]["tensor_activity"] == pytest.approx(0.93)
    assert (latest["MIG-a"]["memory_used_bytes"], latest["MIG-b"]["memory_used_bytes"]) == (5, 6)
    assert "power_w" not in latest["MIG-a"]
    assert latest["GPU-1"]["power_w"] == 691.391


@pytest.mark.parametrize(
    ("gpus", "visible", "chosen"),
    [
        (None, None, ["GPU-aa1", "GPU-ab2", "GPU-1", "MIG-a", "MIG-b"]),
        ("all", "0", ["GPU-aa1", "GPU-ab2", "GPU-1", "MIG-a", "MIG-b"]),
        ("0", "1", ["GPU-aa1"]),
        ("1,0,1", None, ["GPU-aa1", "GPU-ab2"]),
        (None, "GPU-ab", ["GPU-ab2"]),
        (None, "MIG-b", ["GPU-1", "MIG-b"]),
        (None, "1,-1,0", ["GPU-ab2"]),
        ("GPU-1", None, ["GPU-1", "MIG-a", "MIG-b"]),
        ("2", None, ["GPU-1", "MIG-a", "MIG-b"]),
    ],
)
def test_the_gpus_that_are_meant(gpus: str | None, visible: str | None, chosen: list[str]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    bench = Bench(FakeDevice(uuid="GPU-aa1"), FakeDevice(uuid="GPU-ab2"), mig_gpu(), gpus=gpus, **environment)
    assert [device.identity.uuid for device in bench.source.devices] == chosen


@pytest.mark.parametrize(
    ("gpus", "visible", "problem"),
    [
        ("7", None, r"--gpus: there is no GPU '7' here; there are: 0 \(GPU-aa1\), 1 \(GPU-ab2\)"),
        (None, "GPU-x", r"CUDA_VISIBLE_DEVICES: there is no GPU 'GPU-x' here"),
        ("GPU-a", None, r"--gpus: 'GPU-a' fits 2 GPUs"),
        (None, "", r"CUDA_VISIBLE_DEVICES='' hides all 2 GPUs"),
        (None, "-1", r"hides all 2 GPUs"),
        ("aa1", None, r"there is no GPU 'aa1'"),
    ],
)
def test_gpus_that_are_not_there_are_bad_usage(gpus: str | None, visible: str | None, problem: str) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    with pytest.raises(UsageError, match=problem):
        Bench(FakeDevice(uuid="GPU-aa1"), FakeDevice(uuid="GPU-ab2"), gpus=gpus, **environment)


def test_a_gpu_that_cannot_be_opened_stops_no_other() -> None:
    bench = Bench(FakeDevice(fails={"handle": "NO_PERMISSION"}), FakeDevice(uuid="GPU-2"))
    bench.tick()
    assert [row["gpu_index"] for row in bench.gpu_rows()] == [1]
    assert bench.said == ["GPU 0 cannot be opened: Insufficient Permissions; the others go on"]


def test_no_gpu_that_can_be_opened_is_bad_usage() -> None:
    with pytest.raises(UsageError, match="none of 0 NVIDIA GPUs"):
        Bench()


def test_what_the_driver_held_for_us_is_given_back() -> None:
    bench = Bench(FakeDevice())
    bench.tick(slow=True)
    bench.source.close()
    assert bench.nvml.freed == ["gpm", "gpm", "events", "library"]


def test_a_binding_that_lacks_a_call_costs_only_its_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetEncoderUtilization")
    bench = Bench(FakeDevice())
    bench.tick(slow=True)
    row = bench.gpu_rows()[0]
    assert "encoder_utilization" not in row
    assert row["decoder_utilization"] == 0.0
    assert bench.said == ["GPU 0 (GPU-b6ac): no encoder_utilization: AttributeError: nvmlDeviceGetEncoderUtilization"]


def test_the_counter_of_energy_is_read_every_ten_seconds() -> None:
    """It costs 5 ms on an H200; between its readings the power tells the same."""
    bench = Bench(FakeDevice())
    for number in range(301):
        bench.source.tick(Tick(number, 10, 2))
        bench.time.now_ns += SECOND_NS // 10
    rows = list(bench.source.take(last=True)[TelemetryKind.GPU])
    assert [number for number, row in enumerate(rows) if "energy_j" in row] == [0, 100, 200, 300]
    assert all("power_w" in row for row in rows)
