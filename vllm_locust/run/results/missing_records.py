"""Records that are known to exist and are in no part of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_locust.run.results.run_files import read_refused
from vllm_locust.store.intake import RecorderReport
from vllm_locust.store.rundir import RunDirectory


def missing_records(
    flushed: Mapping[str, Any], sent: Mapping[str, int], held: RecorderReport, refused: int
) -> dict[str, int]:
    """What is known to exist and is in no part: from the workers' last words, from gaps in their batches' numbers, and
    for a worker without last words from what it is known to have ``sent``: by the last snapshot that its master had of
    it, and by its last batch.
    """
    lost, batches, spooled = held.lost_rows, 0, 0
    for worker in {*flushed, *held.highest}:
        words = flushed.get(worker, {"last_seq": 0, "spool_path": None, "requests": 0})
        behind = max(int(words["last_seq"]), held.highest.get(worker, 0)) - held.worker_batches.get(worker, 0)
        if words["spool_path"]:
            spooled += behind
        else:
            batches += behind
        if not behind:
            # Every batch is there, so what is missing never became a part of one.
            lost += _unaccounted(int(words["requests"]), worker, held)
    lost += sum(_unaccounted(count, worker, held) for worker, count in sent.items())
    # A refused batch of a known worker is a gap already, maybe refused several times.
    batches = batches or refused
    return {"lost": lost, "batches_lost": batches, "spooled_batches": spooled}


def _unaccounted(requests: int, worker: str, held: RecorderReport) -> int:
    return max(0, requests - held.worker_rows.get(worker, 0) - held.worker_lost_rows.get(worker, 0))


def refused_batches(run_dir: RunDirectory) -> int:
    """Batches that the recorder could not read. Those of another run are no loss of this one."""
    return sum(count for reason, count in read_refused(run_dir).items() if reason != "other_run")
