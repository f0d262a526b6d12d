"""A collector of one run, ``--collect``: a process beside the master's that ends with it. It needs no Redis by hand,
since the master tells it where its own one is.

Started by exec, with its orders as one line of JSON on standard input. It answers with one line: that it samples, or
why it cannot. The end of its input ends it.
"""

from __future__ import annotations

import json
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, Self

from vllm_locust.errors import StoreError, UsageError, VllmLocustError
from vllm_locust.run.telemetry.collect import CollectOrder, collect
from vllm_locust.store.child_process import start_module

_MODULE: Final = "vllm_locust.run.telemetry.own_collector"


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
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        refused = json.loads(line)["refused"] if line.endswith(b"\n") else None
        if refused == []:
            return
        self.end()
        if refused is None:
            raise StoreError("the collector of --collect ended before it began, as said above")
        raise UsageError(*(f"--collect {config.what}: {problem}" for problem in refused))

    def end(self) -> None:
        """At once: what it had sampled is where it belongs, or nobody waits for it."""
        self._process.kill()
        self._process.wait()
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

    threading.Thread(target=watch, name="parent", daemon=True).start()
    try:
        return collect(order, ended=ended, started=lambda: _answer([]))
    except VllmLocustError as error:
        _answer(list(error.problems))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
