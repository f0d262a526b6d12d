"""Results to an experiment tracker. Where it is, and with which account, is told in the tracker's own variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from vllm_locust.errors import RunFailed, UsageError
from vllm_locust.export.headline import few_samples_text, figures, settings

Json = Mapping[str, Any]
PROJECT: Final = "vllm-locust"


def _missing(tracker: str) -> UsageError:
    return UsageError(f"--export {tracker}: its library is not installed; pip install 'vllm-locust[{tracker}]'")


def _stage_figures(summary: Json) -> Sequence[dict[str, float]]:
    return [
        {name: float(value) for name, value in figures(stage).items() if value is not None}
        for stage in summary["stages"]
    ]


def to_wandb(run: Json, summary: Json, run_dir: Path) -> str:
    """One run of Weights & Biases with the run's id: settings as its configuration, a step for each stage, the whole
    window as its summary. ``WANDB_PROJECT``, ``WANDB_MODE=offline`` and so on say where to; raises RunFailed where it
    does not get there.
    """
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb") from error
    tracker: Any = wandb
    try:
        with tracker.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run["run_id"],
            name=run["run_name"] or run["run_id"],
            config=settings(run, summary) | {f"tag.{key}": value for key, value in run["tags"].items()},
            dir=str(run_dir),
            settings=tracker.Settings(console="off", silent=True, disable_git=True, save_code=False),
        ) as tracked:
            for step, stage in enumerate(_stage_figures(summary)):
                tracked.log(stage, step=step)
            tracked.summary.update(
                figures(summary["totals"])
                | {"verdict": summary["verdict"]["status"]}
                | {"few_samples": few_samples_text(summary["totals"])}
            )
            return f"wandb: run {tracked.id}, mode {tracked.settings.mode}"
    except tracker.errors.Error as error:
        raise RunFailed(f"--export wandb: {error}; log in, or set WANDB_MODE=offline and sync later") from error


def to_mlflow(run: Json, summary: Json, artifacts: Sequence[Path]) -> str:
    """One run of MLflow: settings as parameters, a step for each stage, and the files. ``MLFLOW_TRACKING_URI`` and
    ``MLFLOW_EXPERIMENT_NAME`` say where to; raises RunFailed where it does not get there.
    """
    try:
        import mlflow
    except ImportError as error:
        raise _missing("mlflow") from error
    tracker: Any = mlflow
    try:
        if "MLFLOW_EXPERIMENT_NAME" not in os.environ and "MLFLOW_EXPERIMENT_ID" not in os.environ:
            tracker.set_experiment(PROJECT)
        with tracker.start_run(
            run_name=run["run_name"] or run["run_id"],
            tags={f"tag.{key}": value for key, value in run["tags"].items()}
            | {"vllm_locust.run_id": run["run_id"], "verdict": summary["verdict"]["status"]}
            | {"few_samples": few_samples_text(summary["totals"]) or "none"},
        ) as tracked:
            tracker.log_params({name: value for name, value in settings(run, summary).items() if value is not None})
            for step, stage in enumerate(_stage_figures(summary)):
                tracker.log_metrics(stage, step=step)
            for path in artifacts:
                tracker.log_artifact(str(path))
            return f"mlflow: run {tracked.info.run_id} at {tracker.get_tracking_uri()}"
    except tracker.exceptions.MlflowException as error:
        raise RunFailed(f"--export mlflow: {error}; look at MLFLOW_TRACKING_URI") from error
