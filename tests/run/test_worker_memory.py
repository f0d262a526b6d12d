"""What a worker held for a run is freed before the next one begins."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.store.servers import Server

SCRIPT = """
from gevent import monkey
monkey.patch_all()
import gc, json, sys, weakref
from vllm_locust.config import RunConfig, Target
from vllm_locust.load.users import POST
from vllm_locust.run.agreement import versions
from vllm_locust.run.messenger import PREPARE, DRAIN
from vllm_locust.run.secrets import Secrets
from vllm_locust.run.worker_side import WorkerSide
from vllm_locust.workload.load import load_workload

class Messages:
    own_id, is_alone, sessions_wanted = "w", True, False

    def __init__(self):
        self.handlers, self.sent = {}, []

    def on(self, kind, handler):
        self.handlers[kind] = handler

    def to_master(self, kind, payload):
        self.sent.append(payload)

redis_url, spool_dir = sys.argv[1:]
messages = Messages()
side = WorkerSide(messages, Secrets(None, None), redis_url)
config = RunConfig(targets=(Target.parse("http://127.0.0.1:1"),), workload="short_chat")
settings = {"tokenizer": None, "max_model_len": None, "max_tokens": None, "seed": config.seed}
order = {
    "versions": versions(), "flags": {}, "config": config.to_json(), "needs_api_key": False, "model": "m",
    "max_model_len": None, "token_detail": False, "redis_url": redis_url, "spool_dir": spool_dir, "users": 1,
    "workload_fingerprint": load_workload("short_chat", **settings).fingerprint,
    "share": 0, "shares": 1, "prompt_seed": 0,
}
former = []
for number in range(3):
    messages.handlers[PREPARE]("master", order | {"run_id": f"run-{number}"})
    former.append(weakref.ref(POST.worker.workload.source))
    POST.worker.next_prompt()
    messages.handlers[DRAIN]("master", {"run_id": f"run-{number}"})
print(json.dumps({"errors": [one["error"] for one in messages.sent if "error" in one],
                  "held": [source() is not None for source in former], "frozen": gc.get_freeze_count()}))
"""


def test_the_workload_of_a_former_run_is_freed(tmp_path: Path) -> None:
    valkey = Server()
    try:
        command = [sys.executable, "-c", SCRIPT, valkey.url, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    finally:
        valkey.close()
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["errors"] == [None, None, None]
    assert told["held"][:2] == [False, False], "the last one is freed with the next collection"
    assert told["frozen"] == 0
