"""The bare C client: the yardstick."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.bench.accuracy import Reported, ReportedRequest
from tests.bench.build import program
from tests.bench.clients.client import Load, OneProcess, Session

_MAGIC = 0x31544E454C434C56


class EpollClient:
    name = "epoll-c"
    exit_codes = frozenset({0})
    alone = True

    def prepare(self) -> None:
        program("epoll_client")

    def version(self) -> str:
        return "tests/bench/epoll_client.c"

    def start(self, load: Load) -> Session:
        argv = [
            str(program("epoll_client")),
            f"--port={load.port}",
            f"--streams={load.streams}",
            f"--seconds={load.seconds}",
            f"--tokens={load.schedule.tokens}",
            f"--prompt-bytes={load.prompt_bytes}",
            f"--log={load.work / 'client.bin'}",
        ]
        return OneProcess(argv, load, alone=self.alone)

    def read_report(self, load: Load) -> Reported:
        return Reported(_read_log(load.work / "client.bin"))


def _read_log(path: Path) -> list[ReportedRequest]:
    raw = path.read_bytes()
    head = np.frombuffer(raw, "<u8", 8)
    if int(head[0]) != _MAGIC:
        raise ValueError(f"{path} is not a log of the C client")
    at, requests = 64, []
    for _ in range(int(head[2])):
        serial, sent_ns, tokens, _, _, _ = (int(v) for v in np.frombuffer(raw, "<u8", 6, at))
        kernel = np.frombuffer(raw, "<i8", tokens, at + 48)
        at += 48 + 16 * tokens
        own = np.append(np.diff(kernel) > 0, True)
        requests.append(
            ReportedRequest(
                key=serial,
                ttft_ns=int(kernel[0]) - sent_ns if tokens else None,
                gaps_ns=np.diff(kernel),
                sent_mono_ns=sent_ns,
                own_stamp=own,
            )
        )
    return requests
