"""Cost of one update of reinforcement learning compared with a plain published trainer, and the memory of
more views.

    python -m benchmarks.grpo [--threads 1] [--rounds 2] [--steps 64] [--only time memory views]

Float32, hidden 512, 8 layers, vocabulary 32k; one group of 8 completions of 128 tokens after prompts of 128;
four inner updates (mu), each with other masks; a reference. The baseline is diffu-GRPO as d1 publishes it
(Zhao et al. 2025): it samples as `benchmarks/published.py` does, at temperature 0.9 with half as many
denoising steps as tokens, computes log-probabilities at temperature 1 with all logits of all positions, and
those of old policy and reference for all four masks in one batch. Its adapters, 4-bit weights and GPU are
left out. The time is that of a whole update, from the rollout to the last of its four steps. The memory is
everything except the weights. Loss and gradients are first checked to be equal on the same rollouts and
masks.

Shapes: B completions, T positions, V vocabulary, D parameters.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import published
from benchmarks.generation import random_model
from benchmarks.harness import peak_bytes, report, timed
from unmask.config.run import AttentionName
from unmask.models.diffusion_lm import DiffusionLM
from unmask.rl.config import GRPOConfig
from unmask.rl.trainer import GRPOTrainer, Update

GROUP, PROMPT, LENGTH, BLOCK, MU = 8, 128, 128, 32, 4
TEMPERATURE, EPSILON, BETA = 0.9, 0.5, 0.04
SHAPE = (512, 8, 32_000)


def reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(lm: DiffusionLM, folder: str, steps: int, **more: Any) -> GRPOTrainer:
    """Ours, with one prompt."""
    settings: dict[str, Any] = {
        "method": "diffu-grpo",
        "num_iterations": MU,
        "max_steps": MU,
        "beta": BETA,
        "epsilon": EPSILON,
    } | more
    args = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=GROUP,
        num_generations=GROUP,
        max_completion_length=LENGTH,
        block_size=BLOCK if lm.attention == "bidirectional" else None,
        steps=steps,
        temperature=TEMPERATURE,
        logprob_temperature=1.0,
        stop_at_eos=False,
        learning_rate=1e-6,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=lm.device.type == "cpu",
        **settings,
    )
    prompt = torch.randint(4, 1000, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    return GRPOTrainer(lm, reward, args, [{"prompt": prompt}])


class Plain:
    """A trainer as published: simple and correct."""

    def __init__(self, lm: DiffusionLM, prompt: Sequence[int], steps: int):
        self.lm, self.reference, self.steps = lm, lm.frozen_copy(), steps
        self.prompt_BP = torch.tensor([list(prompt)] * GROUP, device=lm.device)
        self.optimizer = torch.optim.AdamW(lm.model.parameters(), lr=1e-6)

    def update(self) -> None:
        """Sample, reward, and make four updates."""
        ids_BT = published.generate(self.lm, self.prompt_BP, LENGTH, BLOCK, self.steps, TEMPERATURE).to(
            self.lm.device
        )
        rewards_B = torch.tensor(reward(ids_BT[:, PROMPT:].tolist()), device=ids_BT.device)
        advantage_B = rewards_B - rewards_B.mean()
        hidden_MBT = torch.rand(MU, *ids_BT.shape, device=ids_BT.device) < 0.15
        hidden_MBT[:, :, PROMPT:] = True
        with torch.no_grad():
            old_MBT, reference_MBT = (
                self.log_probs(lm, ids_BT.repeat(MU, 1), hidden_MBT.flatten(0, 1))
                for lm in (self.lm, self.reference)
            )
        for old_BT, reference_BT, hidden_BT in zip(
            old_MBT.chunk(MU), reference_MBT.chunk(MU), hidden_MBT, strict=True
        ):
            self.optimizer.zero_grad()
            self.loss(ids_BT, hidden_BT, advantage_B, old_BT, reference_BT).backward()
            torch.nn.utils.clip_grad_norm_(self.lm.model.parameters(), 1.0)
            self.optimizer.step()

    def loss(
        self, ids_BT: Tensor, hidden_BT: Tensor, advantage_B: Tensor, old_BT: Tensor, reference_BT: Tensor
    ) -> Tensor:
        """The mean over the completions' tokens of the clipped surrogate and the k3 estimate of the KL."""
        log_prob_BT = self.log_probs(self.lm, ids_BT, hidden_BT)
        ratio_BT = (log_prob_BT - old_BT).exp()
        gain_BT = torch.minimum(
            ratio_BT * advantage_B[:, None], ratio_BT.clamp(1 - EPSILON, 1 + EPSILON) * advantage_B[:, None]
        )
        gap_BT = reference_BT - log_prob_BT
        return (-gain_BT + BETA * (gap_BT.exp() - gap_BT - 1)).mean()

    @staticmethod
    def log_probs(lm: DiffusionLM, ids_BT: Tensor, hidden_BT: Tensor) -> Tensor:
        """The log-probabilities of the completion's tokens, from all logits, at temperature 1."""
        logits_BTV = lm.logits(torch.where(hidden_BT, lm.mask_token_id, ids_BT))[:, PROMPT:]
        return logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, PROMPT:, None]).squeeze(-1)


def gradient(lm: DiffusionLM, call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """The loss, and the gradient of all parameters [D]."""
    lm.model.zero_grad()
    loss = call()
    return float(loss), torch.cat(
        [weight.grad.flatten() for weight in lm.model.parameters() if weight.grad is not None]
    )


def made_updates(trainer: GRPOTrainer) -> list[Update]:
    """Rollouts of the only prompt, scored, with masks for every inner update."""
    trainer.model.train()
    return trainer.collect_updates([[trainer.train_dataset[i] for i in range(GROUP)]])[0]


def check_same(trainer: GRPOTrainer, plain: Plain) -> tuple[float, float]:
    """The relative differences of loss and gradients from the baseline's, in the second update on a
    rollout."""
    trainer.create_optimizer_and_scheduler(MU)
    updates = made_updates(trainer)
    with torch.no_grad():
        for weight in plain.lm.model.parameters():
            weight.mul_(1.001)  # as after a first update
    update = updates[1]
    ids_BT, hidden_BT, advantage_B = (
        update.rollout.ids_BT,
        update.views.hidden_BMT[:, 0],
        update.advantage_BT[:, 0],
    )
    assert update.old_BMT is not None and update.reference_BMT is not None
    old_BT, reference_BT = update.old_BMT[:, 0, PROMPT:], update.reference_BMT[:, 0, PROMPT:]

    def theirs() -> Tensor:
        loss = plain.loss(ids_BT, hidden_BT, advantage_B, old_BT, reference_BT)
        loss.backward()
        return loss.detach()

    their_loss, their_D = gradient(plain.lm, theirs)
    our_loss, our_D = gradient(
        plain.lm, lambda: trainer.training_step(trainer.model, update, trainer.count_items(update))
    )
    assert abs(our_loss - their_loss) < 1e-5 * max(1.0, abs(their_loss)), (our_loss, their_loss)
    apart = float((our_D - their_D).norm() / their_D.norm())
    assert apart < 1e-4, apart
    return abs(our_loss - their_loss), apart


def title(steps: int) -> str:
    return (
        f"mu {MU}, {steps} denoising steps: hidden {SHAPE[0]}, {SHAPE[1]} layers, vocabulary {SHAPE[2]:,}, "
        f"group {GROUP}"
    )


def compare_times(steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lm = random_model(*SHAPE, "bidirectional")
        trainer = trainer_of(lm, folder, steps)
        plain = Plain(lm, trainer.train_dataset[0].prompt, steps)
        loss_apart, gradient_apart = check_same(trainer, plain)

        def ours() -> None:
            fresh = trainer_of(lm, folder, steps)
            fresh.reference = trainer.reference
            fresh.train()

        seconds = timed({"plain": plain.update, "ours": ours}, rounds, warm=True)
    report(
        f"one update, {title(steps)}",
        [
            ("loss apart", f"{loss_apart:.1e}", ""),
            ("gradient apart, relatively", f"{gradient_apart:.1e}", ""),
            ("plain, seconds", f"{seconds['plain']:.1f}", ""),
            ("ours, seconds", f"{seconds['ours']:.1f}", ""),
            ("plain / ours", f"{seconds['plain'] / seconds['ours']:.2f}", "at least 2.5"),
        ],
    )


def compare_memory() -> None:
    """Two updates, because the optimizer's states do not exist in the first."""
    steps = 4  # each holds the same memory
    with tempfile.TemporaryDirectory() as folder:
        lm = random_model(*SHAPE, "bidirectional")
        prompt = trainer_of(lm, folder, steps).train_dataset[0].prompt

        def plain() -> None:
            trainer = Plain(lm, prompt, steps)
            trainer.update()
            trainer.update()

        peaks = {
            "plain": peak_bytes(plain),
            "ours": peak_bytes(lambda: trainer_of(lm, folder, steps, max_steps=2 * MU).train()),
        }
    figures = [(f"{name}, MB beside the weights", f"{peak / 1e6:,.0f}", "") for name, peak in peaks.items()]
    report(
        f"memory, {title(steps)}",
        [*figures, ("ours / plain", f"{peaks['ours'] / peaks['plain']:.3f}", "at most 0.65")],
    )


def most_scored(trainer: GRPOTrainer, update: Update) -> int:
    """The number of tokens scored in the largest pass of an update."""
    return max(
        int(update.views.target_BMT[piece].sum())
        for piece in trainer.per_view.chunks_with_targets(trainer.lm, update)
    )


def compare_views() -> None:
    """Peak memory of an update on a rollout: the maximum over its updates, because the number of hidden
    tokens is random."""
    peaks: dict[tuple[str, int], int] = {}
    patterns: tuple[tuple[AttentionName, int | None], ...] = (("bidirectional", None), ("block_causal", 32))
    for attention, block_size in patterns:
        for samples in (1, 4, 16):
            with tempfile.TemporaryDirectory() as folder:
                trainer = trainer_of(
                    random_model(*SHAPE, attention, block_size),
                    folder,
                    4,
                    method="bgpo",
                    samples=samples,
                    beta=0.0,
                )
                trainer.create_optimizer_and_scheduler(MU)
                update = max(made_updates(trainer), key=lambda update, t=trainer: most_scored(t, update))  # type: ignore[misc]
                assert update.views.count == samples
                items = trainer.count_items(update)
                peaks[attention, samples] = peak_bytes(
                    lambda t=trainer, u=update, n=items: t.training_step(t.model, u, n)
                )  # type: ignore[misc]
    rows = [
        (
            f"{attention}, {samples} views",
            f"{peak / 1e6:,.0f} MB, {peak / peaks[attention, 1]:.3f}",
            "0.95 to 1.05",
        )
        for (attention, samples), peak in peaks.items()
    ]
    report("memory of an update (BGPO), and beside that of one view", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=LENGTH // 2)
    parser.add_argument(
        "--only", nargs="+", choices=["time", "memory", "views"], default=["time", "memory", "views"]
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if "time" in options.only:
        compare_times(options.steps, options.rounds)
    if "memory" in options.only:
        compare_memory()
    if "views" in options.only:
        compare_views()


if __name__ == "__main__":
    main()
