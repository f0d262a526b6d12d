"""Trace replay: every request of a recorded trace is sent at its recorded time, with its recorded lengths.

locust -f locustfiles/trace_replay.py --host http://HOST:8000 --headless --arrival trace --workload trace.jsonl
"""

from __future__ import annotations

from locust import task

from vllm_locust import OpenLoopChatUser


class TraceReplay(OpenLoopChatUser):
    @task
    def replay_next(self) -> None:
        self.ask(self.next_prompt())
