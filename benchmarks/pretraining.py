"""Pre-training of a causal model: a step of Unmask's trainer beside a step of a bare PyTorch loop.

    python -m benchmarks.pretraining [--steps 30]

One thread on a CPU. Both train the same model on the same packed rows with the same optimizer, clipping and
schedule. They take turns step by step, so that a busy moment of the machine affects both, and the losses of
all steps are checked equal. The trainer's time is all that passes between two steps of the others, with
loading, metrics, logging (at every step) and callbacks.

- bare: transformers' model under a mask made in each step, the logits of all rows, `cross_entropy`.
- lean: the same loop with Unmask's attention and loss, so that only the trainer's own work is compared.

Shapes: B batch, T tokens, Q queries, K keys.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, get_linear_schedule_with_warmup

from benchmarks.harness import report
from unmask.data.characters import character_tokenizer
from unmask.data.rows import Collator
from unmask.diffusion.log_probs import view_log_probs, weighted_cross_entropy
from unmask.diffusion.views import all_masked_views
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion
from unmask.supervised.pretrain import PretrainConfig, PretrainTrainer

ALPHABET = "abcdefghijklmnopqrstuvwxyz "
BAR, WARM = 1.05, 3


def texts(count: int, length: int) -> list[dict[str, str]]:
    """Random documents of up to this many characters."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(length // 8, length, (count,), generator=generator).tolist()
    return [
        {
            "text": "".join(
                ALPHABET[i] for i in torch.randint(len(ALPHABET), (size,), generator=generator).tolist()
            )
        }
        for size in sizes
    ]


class Loop:
    """A training loop of a few lines, over rows that are given."""

    def __init__(self, lm: DiffusionLM, args: PretrainConfig):
        self.lm, self.model = lm, lm.model.train()
        options = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
        }
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), **options, weight_decay=args.weight_decay, fused=True
        )
        self.schedule = get_linear_schedule_with_warmup(self.optimizer, 0, args.max_steps)
        self.norm, self.losses, self.seconds = args.max_grad_norm, list[float](), list[float]()

    def step(self, rows: list[dict[str, Any]]) -> None:
        started = time.perf_counter()
        loss = self.loss(Collator(0)(rows))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - started)

    def loss(self, batch: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Bare(Loop):
    """Without any code of Unmask."""

    def __init__(self, lm: DiffusionLM, args: PretrainConfig):
        super().__init__(lm, args)
        self.model.set_attn_implementation("sdpa")

    def loss(self, batch: dict[str, Any]) -> Tensor:
        ids_BT, document_BT = batch["input_ids"], batch["documents"]
        seen_BQK = (document_BT[:, :, None] == document_BT[:, None, :]).tril()
        place_T = torch.arange(ids_BT.shape[1])
        starts_BT = torch.cat([torch.ones_like(document_BT[:, :1]), document_BT.diff(dim=1)], 1) > 0
        position_BT = place_T - torch.where(starts_BT, place_T, 0).cummax(1).values
        logits_BTV = self.model(
            input_ids=ids_BT, position_ids=position_BT, attention_mask=seen_BQK[:, None], use_cache=False
        ).logits.float()
        logits_BTV[..., self.lm.mask_token_id] = -torch.inf
        target_BT = torch.where(batch["maskable"], ids_BT, -100)[:, 1:]
        return F.cross_entropy(logits_BTV[:, :-1].transpose(1, 2), target_BT)


class Lean(Loop):
    """With Unmask's attention and loss."""

    def loss(self, batch: dict[str, Any]) -> Tensor:
        views = all_masked_views(batch["maskable"])
        log_prob_BMT = view_log_probs(self.lm, batch["input_ids"], batch["documents"], views)
        return weighted_cross_entropy(log_prob_BMT, views) / batch["maskable"].sum()


class Turns(TrainerCallback):
    """After each step of the trainer, one of each loop on the same rows."""

    def __init__(self, loops: list[Loop]):
        self.loops, self.collated, self.seconds = loops, deque[list[dict[str, Any]]](), list[float]()
        self.started = 0.0

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        self.collated.append(rows)
        return Collator(0)(rows)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        rows = self.collated.popleft()
        for loop in self.loops[:: 1 if len(self.seconds) % 2 else -1]:
            loop.step(rows)
        self.started = time.perf_counter()


def run(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    heads = {"num_attention_heads": options.hidden // 64, "num_key_value_heads": options.hidden // 64}
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden,
        "num_hidden_layers": options.layers,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, vocab_size=options.vocabulary, max_position_embeddings=options.length)
    )
    models = [model, copy.deepcopy(model), copy.deepcopy(model)]
    lm, *others = (make_diffusion(each, character_tokenizer(ALPHABET), attention="causal") for each in models)
    with tempfile.TemporaryDirectory() as folder:
        common = {
            "output_dir": folder,
            "save_strategy": "no",
            "disable_tqdm": True,
            "use_cpu": True,
            "report_to": "none",
        }
        steps = {
            "max_steps": options.steps,
            "logging_steps": 1,
            "max_length": options.length,
            "per_device_train_batch_size": options.batch,
        }
        args = PretrainConfig(**common, **steps)
        loops = {"bare": Bare(others[0], args), "lean": Lean(others[1], args)}
        turns = Turns(list(loops.values()))
        rows = texts(options.batch * options.steps, options.length)
        trainer = PretrainTrainer(
            lm, args, train_dataset=rows, data_collator=turns.collate, callbacks=[turns]
        )
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    for name, loop in loops.items():
        torch.testing.assert_close(
            torch.tensor(loop.losses),
            torch.tensor(losses),
            rtol=1e-4,
            atol=1e-4,
            msg=f"{name}: {loop.losses} {losses}",
        )
    seconds = {"trainer": turns.seconds[WARM:]} | {name: loop.seconds[WARM:] for name, loop in loops.items()}
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds["trainer"], seconds[name], strict=True))
        for name in loops
    }
    title = (
        f"pre-training, {options.layers} layers of {options.hidden}, vocabulary {options.vocabulary:,}, "
        f"{options.batch} x {options.length}"
    )
    report(
        f"{title}; losses of {options.steps} steps equal",
        [
            ("a step of the trainer", f"{statistics.median(seconds['trainer']) * 1e3:.0f} ms", ""),
            ("  trainer / bare loop", f"{ratios['bare']:.3f} x", f"bar: {BAR}"),
            (
                "  trainer / the loop with Unmask's attention and loss",
                f"{ratios['lean']:.3f} x",
                f"bar: {BAR}",
            ),
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {
        "steps": 30,
        "hidden": 256,
        "layers": 4,
        "batch": 4,
        "length": 256,
        "vocabulary": 8000,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    torch.set_num_threads(1)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
