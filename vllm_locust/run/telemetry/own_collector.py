"""A collector of one run, ``--collect``: a process beside the master's that ends with it. It needs no Redis by hand,
since the master tells it where its own one is.

Started by exec, with its orders as one line of JSON on standard input. It answers with one line: that it samples, or
why it cannot. The end of its input ends it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, Self

from vllm_locust import clock
from vllm_locust.errors import NoGpu, StoreError, UsageError, VllmLocustError
from vllm_locust.run.telemetry.collect import CollectOrder, collect
from vllm_locust.store.child_process import start_module

_MODULE: Final = "vllm_locust.run.telemetry.own_collector"
ANSWER_LIMIT_S = 30.0
"""Opening the driver of a host with many GPUs takes seconds; one that is stuck never answers."""
_GONE_S: Final = 2.0
_LEFT_ALONE_S: Final = 5.0
"""Of a collector whose input has ended: it is stuck in the driver if it is still there by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCollectorConfig:
    what: Literal["host", "gpus"]
    """The GPUs are those of ``CUDA_VISIBLE_DEVICES``, else all; the host's load comes with them."""
    redis_url: str
    redis_password_file: str | None

    def to_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        return cls(**json.loads(line))

    def order(self) -> CollectOrder:
        password_file = None if self.redis_password_file is None else Path(self.redis_password_file)
        return CollectOrder.parse(
            redis_url=self.redis_url, redis_password_file=password_file, host_only=self.what == "host"
        )


class OwnCollector:
    """The process as the master sees it. Raises ``UsageError`` where it has nothing to sample."""

    def __init__(self, config: OwnCollectorConfig) -> None:
        self._process = start_module(_MODULE, config.to_line())
        refused: list[str] | None = None
        try:
            line = self._first_line(config.what)
            refused = json.loads(line)["refused"] if line.endswith(b"\n") else None
        finally:
            if refused != []:
                self.end()
        if refused == []:
            return
        if refused is None:
            raise StoreError("the collector of --collect ended before it began, as said above")
        raise UsageError(*(f"--collect {config.what}: {problem}" for problem in refused))

    def _first_line(self, what: str) -> bytes:
        assert self._process.stdout is not None
        pipe, line = self._process.stdout.fileno(), b""
        deadline_ns = clock.monotonic_ns() + round(ANSWER_LIMIT_S * 1e9)
        while not line.endswith(b"\n"):
            left_s = (deadline_ns - clock.monotonic_ns()) / 1e9
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                driver = "; look whether nvidia-smi answers, or leave out --collect" if what == "gpus" else ""
                raise UsageError(f"--collect {what}: the collector did not answer within {ANSWER_LIMIT_S:g} s{driver}")
            more = os.read(pipe, 65536)
            if not more:
                break
            line += more
        return line

    def end(self) -> None:
        """At once: what it had sampled is where it belongs, or nobody waits for it."""
        self._process.kill()
        # One that is stuck in the kernel's part of a driver goes only when that lets it.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GONE_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def _answer(refused: list[str]) -> None:
    print(json.dumps({"refused": refused}), flush=True)


def main() -> int:
    order = OwnCollectorConfig.from_line(sys.stdin.readline()).order()
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        ended.set()
        clock.sleep(_LEFT_ALONE_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
    try:
        return collect(order, ended=ended, started=lambda: _answer([]))
    except NoGpu as error:
        _answer(
            [f"{error}; give --collect host for this host's load alone, or start vllm-locust collect on the GPU host"]
        )
        return error.exit_code
    except VllmLocustError as error:
        _answer(list(error.problems))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
