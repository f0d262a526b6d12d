"""``python -m tests.run.hostile_peer PORT``: speaks to a Locust master as no worker would, first as a stranger, then as
a worker that has registered.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgpack
import zmq

KINDS = ("ready", "snapshot", "flushed", "present")
NONSENSE: tuple[Any, ...] = (
    None,
    17,
    float("inf"),
    "../../etc/passwd",
    b"\x80\x04.",
    [[]],
    {"run_id": ["x"], "worker_id": {}, "spool_path": "/etc/shadow", "last_seq": "9" * 5000},
    {"schema": 2, "worker_id": "w" * 300, "sequence": -1, "counters": {}, "finished": {"/": 1}, "histograms": {}},
    {"x": "y" * 1_000_000},
)
RAW = (b"", b"\xc1", b"\x00", b"\x93\xa1a", b"\xdd\xff\xff\xff\xff", msgpack.dumps(("a",)), msgpack.dumps({"a": 1}))


def main() -> None:
    port, context = sys.argv[1], zmq.Context()
    for name in ("stranger", "registered"):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, name.encode())
        socket.connect(f"tcp://127.0.0.1:{port}")
        if name == "registered":
            socket.send(msgpack.dumps(("client_ready", -1, name)))
        for raw in RAW:
            socket.send(raw)
        for nonsense in NONSENSE:
            for kind in KINDS:
                socket.send(msgpack.dumps((f"vllm_locust.{kind}", nonsense, name)))
            for kind in ("heartbeat", "stats", "spawning", "spawning_complete", "exception"):
                socket.send(msgpack.dumps((kind, nonsense, name)))
        socket.send(msgpack.dumps(("vllm_locust.flushed", {}, "somebody_else")))
        socket.send(msgpack.dumps((["no", "kind"], {}, name)))
        time.sleep(0.5)
        socket.close(linger=1000)
    context.term()


if __name__ == "__main__":
    main()
