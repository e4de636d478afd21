"""Which trackers a run may report to, and whether what they need is installed."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from unmask.errors import ConfigError, require_known

NEEDS = {
    "azure_ml": {"azureml": "azureml-core"},
    "clearml": {"clearml": "clearml"},
    "codecarbon": {"codecarbon": "codecarbon"},
    "comet_ml": {"comet_ml": "comet_ml"},
    "dagshub": {"dagshub": "dagshub", "mlflow": "mlflow"},
    "dvclive": {"dvclive": "dvclive"},
    "flyte": {"flytekit": "flytekit", "flytekitplugins": "flytekitplugins-deck-standard", "pandas": "pandas"},
    "kubeflow": {},
    "mlflow": {"mlflow": "mlflow"},
    "neptune": {"neptune": "neptune"},
    "swanlab": {"swanlab": "swanlab"},
    "tensorboard": {"tensorboard": "tensorboard"},
    "trackio": {"trackio": "trackio"},
    "wandb": {"wandb": "wandb"},
}
"""The trackers that transformers supports, with the modules that each imports and the packages that provide
them."""
KUBEFLOW_SERVER = "KUBEFLOW_TRAINER_SERVER_URL"


def check_trackers(report_to: Any, logging_dir: Any, section: str = "") -> None:
    """Raise ConfigError for a tracker that is unknown or not installed, or a folder to which none would
    write."""
    where = f"{section}report_to"
    names = [report_to] if isinstance(report_to, str) else list(report_to or [])
    some = [name for name in names if name not in ("none", "all")]
    if len(names) > 1 and len(some) < len(names):
        raise ConfigError(
            f"{names} mixes names with none or all", where=where, remedy="Give names, or none or all alone"
        )
    for name in some:
        require_known(name, [*NEEDS, "none", "all"], "tracker", where=where)
        absent = [
            package for module, package in NEEDS[name].items() if importlib.util.find_spec(module) is None
        ]
        if absent:
            what = f"{name} needs {' and '.join(absent)}, which is not installed"
            raise ConfigError(what, where=where, remedy=f"Install it with pip install {' '.join(absent)}")
    if "kubeflow" in some and KUBEFLOW_SERVER not in os.environ:
        raise ConfigError(
            f"kubeflow needs {KUBEFLOW_SERVER}, which is not set",
            where=where,
            remedy="Set it, or leave kubeflow out",
        )
    if logging_dir is not None and not {"tensorboard", "all"} & set(names):
        raise ConfigError(
            "TensorBoard alone writes there",
            where=f"{section}logging_dir",
            remedy="Set report_to: tensorboard, or leave it out",
        )
