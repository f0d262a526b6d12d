"""A merge in a process of its own: it takes memory and seconds, and the master's loop must keep turning."""

from __future__ import annotations

import logging
import subprocess
import sys

from vllm_locust.standard_streams import Output, OutputFailed
from vllm_locust.store.rundir import RunDirectory

logger = logging.getLogger(__name__)


def merge_apart(run_dir: RunDirectory) -> int:
    """Print its report. Returns its exit code, 1 where a signal ended it; whether anybody reads makes no difference."""
    command = [sys.executable, "-m", "vllm_locust", "merge", str(run_dir.path)]
    merge = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output = Output(sys.stdout)
        output.write(merge.stdout)
        output.flush()
    except OutputFailed as error:
        logger.warning("%s; the report is in %s", error, run_dir.report_txt)
    return merge.returncode if merge.returncode >= 0 else 1
