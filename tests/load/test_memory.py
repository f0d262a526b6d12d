"""A call that is over leaves nothing behind that only the garbage collector could free."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.run.simulated import simserver

SCRIPT = """
from gevent import monkey
monkey.patch_all()
import collections, gc, json, sys
import gevent
from vllm_locust.config import Target, Timeouts
from vllm_locust.load.kernel import KernelTransport
from vllm_locust.load.transport import Call
from vllm_locust.tls import TlsFiles, tls_context

transport = KernelTransport(tls_context(TlsFiles()))
call = Call(
    target=Target.parse(sys.argv[1]),
    path="/v1/chat/completions",
    payload={"model": "sim", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "stream": True},
    headers=(),
    streamed=True,
    timeouts=Timeouts(5_000_000_000, 20_000_000_000, 20_000_000_000, None),
)
outcomes = collections.Counter()


def user():
    for _ in range(5):
        outcomes[transport.perform(call).outcome] += 1


def seen():
    return collections.Counter(type(found).__name__ for found in gc.get_objects())


gevent.joinall([gevent.spawn(user) for _ in range(4)], raise_error=True)
gc.collect()
gc.disable()
before = seen()
gevent.joinall([gevent.spawn(user) for _ in range(4)], raise_error=True)
left = seen() - before
# Greenlets leave references; the watchdog's list of limits has a tuple for each call until its time has come.
for name in ("tuple", "ReferenceType"):
    del left[name]
print(json.dumps({"outcomes": outcomes, "left": {name: n for name, n in left.items() if n >= 10}}))
transport.close()
"""


def test_no_garbage_after_a_call(tmp_path: Path) -> None:
    with simserver(tmp_path, "--first-token-ms", "5", "--token-interval-ms", "1") as server:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, server.url], capture_output=True, text=True, check=True, timeout=60
        )
    found = json.loads(done.stdout)
    assert found == {"outcomes": {"ok": 40}, "left": {}}
