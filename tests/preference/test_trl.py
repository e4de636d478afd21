"""Preference optimization of a causal model against TRL: the gradients of every parameter agree in the first
step, where the policy is the reference, and in the next two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers import partly_slow
from tests.tiny import llama_lm
from tests.training.tiny_runs import settings
from tests.training.trl_peers import Gradients, Watch, distance, stock_on_disk
from unmask.preference.config import DPOConfig
from unmask.preference.trainer import DPOTrainer

trl = pytest.importorskip("trl", reason="needs TRL: pip install -e '.[peers]' -c constraints.txt")
pytestmark = [
    # TRL uses names of transformers that have newer ones.
    pytest.mark.filterwarnings(
        "ignore:.*gradient_checkpointing.* is deprecated and will be removed in v6:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning"),
]

# The chosen are of one length: TRL's SFT term is the mean over all tokens of a batch, ours over those of each
# response.
PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in [
        ("ab", "cafe", "gh"),
        ("cdefg", "babe", "hhhhhh"),
        ("h", "fade", "e"),
        ("ga", "bead", "dabbed"),
    ]
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
    for side in ("chosen", "rejected")
    for row in PAIRS
]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({}, {}),
    "hinge": ({"loss_type": "hinge", "beta": 0.05}, {"loss_type": "hinge", "beta": 0.05}),
    "ipo": ({"loss_type": "ipo"}, {"loss_type": "ipo"}),
    "per token": ({"length_normalization": True}, {"loss_type": "sigmoid_norm"}),
    **{
        name: (same, same)
        for name, same in {
            "rpo": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
            "mpo": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
            "two": {"loss_type": ["ipo", "sigmoid"]},
            "forward": {"f_divergence_type": "forward_kl"},
            "jensen": {"f_divergence_type": "js_divergence", "loss_type": "ipo"},
            "alpha": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
            "synced": {
                "sync_ref_model": True,
                "ref_model_sync_steps": 1,
                "ref_model_mixup_alpha": 0.3,
            },
        }.items()
    },
}
CASES["synced"] = ({**CASES["synced"][0], "reference": "frozen"}, CASES["synced"][1])
"""Our settings and those of TRL."""
PLAIN = {"bf16": False, "activation_checkpointing": False, "report_to": "none"}


def shared(folder: Path, batch: int, accumulation: int = 1) -> dict[str, Any]:
    """Settings of both trainers; every step has all rows."""
    shape = {
        "per_device_train_batch_size": batch // accumulation,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 3,
    }
    return settings(
        folder,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        beta=0.2,
        **shape,
    )


def ours(rows: Any, config: dict[str, Any]) -> Gradients:
    watch = Watch()
    DPOTrainer(
        llama_lm("causal", dtype=torch.float64),
        args=DPOConfig(**config),
        train_dataset=rows,
        callbacks=[watch],
    ).train()
    return watch.seen


def theirs(
    trainer: Any, kind: Any, rows: Any, config: dict[str, Any], *, reference: bool = True
) -> Gradients:
    watch, path = Watch(), Path(config["output_dir"]) / "model"
    model, tokenizer = stock_on_disk(path)
    rest = {"ref_model": AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)} if reference else {}
    data = datasets.Dataset.from_list(rows)
    trainer(
        model=model,
        args=kind(**config | PLAIN),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[watch],
        **rest,
    ).train()
    return watch.seen


def check(mine: Gradients, other: Gradients) -> None:
    distances = [distance(*pair) for pair in zip(mine, other, strict=True)]
    assert len(distances) == 3 and max(distances) < 1e-5, distances
    assert distance(mine[0], mine[2]) > 1e-2  # the policy has moved


@partly_slow(
    "name, accumulation", [*((name, 1) for name in CASES), ("sigmoid", 2)], *range(0, len(CASES) + 1, 2)
)
def test_gradients_of_pairs_are_those_of_trl(name, accumulation, tmp_path):
    mine, other = CASES[name]
    config = shared(tmp_path, len(PAIRS), accumulation)
    check(ours(PAIRS, config | mine), theirs(trl.DPOTrainer, trl.DPOConfig, PAIRS, config | other))


def test_gradients_of_labeled_responses_are_those_of_trl(tmp_path):
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.7, "beta": 1.0}
    config = shared(tmp_path, len(LABELLED)) | weights
    check(
        ours(LABELLED, config | {"loss_type": "kto"}), theirs(trl.KTOTrainer, trl.KTOConfig, LABELLED, config)
    )


def test_gradients_without_a_reference_are_those_of_trl(tmp_path):
    cpo = pytest.importorskip("trl.experimental.cpo")
    config = shared(tmp_path, len(PAIRS)) | {
        "loss_type": "simpo",
        "beta": 2.0,
        "simpo_gamma": 1.0,
        "label_smoothing": 0.1,
    }
    check(
        ours(PAIRS, config),
        theirs(cpo.CPOTrainer, cpo.CPOConfig, PAIRS, config | {"cpo_alpha": 0.0}, reference=False),
    )
