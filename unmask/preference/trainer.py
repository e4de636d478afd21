"""Preference optimisation of diffusion models: DPO on variance-reduced ELBO estimates (VRPO, Zhu et al. 2025, LLaDA 1.5).

Shapes: B rows (pairs, each of which holds its chosen and its rejected response as two documents; of KTO single responses), N responses (of
pairs: P chosen, then their P rejected), M views, T tokens, R redraws.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unmask.config.run import SamplerConfig
from unmask.data.formats import UNPAIRED
from unmask.data.pairs import joined, pair_rows, preference_rows
from unmask.data.report import Rows
from unmask.data.rows import Collator, Row, documents_apart
from unmask.diffusion.likelihood import any_order
from unmask.diffusion.log_probs import noise_groups
from unmask.diffusion.views import Draw, Views, all_masked_views, elbo_views, exact_count_views, exact_views
from unmask.errors import ConfigError
from unmask.models.adapters import changes_nothing
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.model_state import disable_dropout, evaluating
from unmask.preference.config import DPOConfig
from unmask.preference.kto_rows import UnpairedCollator, beside_others, labelled
from unmask.preference.losses import dpo, hinge, ipo, kto, margins, simpo
from unmask.preference.reference_log_probs import (
    NO_SCORES,
    REFERENCE_FILE,
    ScoreTable,
    content,
    digests,
    identity,
    read_scores,
    score_rows,
    write_scores,
)
from unmask.preference.win_rate import Judge, check_prompts, find_judge, wins
from unmask.training.config import TrainingConfig, canvas, steps_per_epoch, total_steps
from unmask.training.distributed import failing_together
from unmask.training.pair_config import room
from unmask.training.per_view_backward import Chunk, PerViewBackward
from unmask.training.reference_model import Reference, make_reference
from unmask.training.trainer import Batch, DiffusionTrainer

MEASURED_PAIRS, REDRAWS = 32, 8
"""Pairs, and plans of each, over which the variance of the margin is taken."""
FIRST_REDRAW = 1 << 30
"""Their numbers begin here; those below are of the epochs."""


class DPOTrainer(DiffusionTrainer):
    """Trains on `prompt`, `chosen`, `rejected` (standard or conversational; the prompt may be implicit), with `loss_type: kto` also on
    `prompt`, `completion`, `label`.

    Policy and reference are scored on the same masks of the same response. The reference is the model as given: it is scored once, before
    the first step, for every epoch's masks, and stored in the output directory; training then holds one model. It can also be scored
    along, as a frozen copy or with the adapters off. Dropout is off. One view is gone through at a time.

    Args:
        model, args, datasets, rest: as in DiffusionTrainer.
        judge: a function instead of the config's `judge`.
        sampler: how completions for the judge are generated; a `canvas_length` is their length.
        rehearsed: of the rows only so many first are trained on, and scored by the reference.
    """

    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        model: DiffusionLM | str | Path,
        args: DPOConfig,
        *datasets: Any,
        judge: Judge | None = None,
        sampler: SamplerConfig | None = None,
        rehearsed: int | None = None,
        **rest: Any,
    ):
        self.judge = find_judge(judge or args.judge)  # what cannot be imported is told before the model is loaded
        unpaired = args.loss_type == "kto"
        if self.judge is not None and unpaired:
            raise ConfigError("kto has no chosen responses to compare with", where="judge", remedy="Use a loss of pairs, or leave it out")
        self.responses = 1 if unpaired else 2  # in a row
        self.held_out = torch.zeros(())  # KTO's baseline of all rows that are evaluated, whatever the batches
        collator = (UnpairedCollator if unpaired else Collator)(0, marking=not args.dispatched)
        super().__init__(model, args, *datasets, data_collator=rest.pop("data_collator", collator), **rest)
        if self.judge is not None and self.eval_dataset is None:
            raise ConfigError("there are no held-out pairs to judge on", where="judge", remedy="Give them (data.eval), or leave it out")
        self.rows_given = len(self.train_dataset or ())
        if rehearsed is not None:
            self.train_dataset = self.train_dataset[:rehearsed]
            self.eval_dataset = self.eval_dataset and self.eval_dataset[:rehearsed]
        disable_dropout(self.lm.model)
        self.sampler = sampler or SamplerConfig()
        if (length := canvas(self.lm, args)) is not None:
            self.sampler = self.sampler.model_copy(update={"max_new_tokens": length})
        if self.judge is not None:
            check_prompts(self.lm, self.eval_dataset, self.sampler)
        self.per_view = PerViewBackward(self)
        self.exact = args.exact(self.lm)
        self.reference = self._make_reference() if args.needs_reference and args.reference != "stored" else None
        self.stored: dict[str, ScoreTable] = {}
        self.scoring_seconds = 0.0  # that it took to score the training rows
        if args.needs_reference and args.reference == "stored":
            self._score_reference(rest.get("progress"))

    @classmethod
    def make_rows(cls, lm: DiffusionLM, args: DPOConfig, dataset: Sequence[Mapping[str, Any]], where: str) -> Rows[dict[str, Any]]:
        fits, report = room(lm, args), args.data_report(where)
        if args.loss_type != "kto":
            pairs = preference_rows(lm.tokenizer, dataset, fits, report, ends=lm.eos_token_ids)
            return report.of([joined([pair["chosen"], pair["rejected"]], number) for number, pair in enumerate(pairs)])
        if any("label" in row for row in islice(dataset, 100) if isinstance(row, Mapping)):
            rows: Sequence[Row] = pair_rows(lm.tokenizer, dataset, fits, report, ends=lm.eos_token_ids, layouts=UNPAIRED)
        else:
            rows = labelled(preference_rows(lm.tokenizer, dataset, fits, report, ends=lm.eos_token_ids))
        return report.of(beside_others(rows, fits.max_length, where))

    def planned_steps(self, args: TrainingConfig) -> int:
        return total_steps(args, range(self.rows_given))

    def planned_seconds(self, args: DPOConfig) -> float:
        """The reference's scores of all rows."""
        rows = range(self.rows_given)
        return self.scoring_seconds * len(rows) / len(self.train_dataset) * plans(args, rows, exact=self.exact)

    # Views, and what their scores come to.

    def plan(self, batch: Batch, draw: Draw) -> Views:
        if self.lm.autoregressive:
            return all_masked_views(batch["maskable"])
        group_BT = noise_groups(self.lm, batch["maskable"], batch["documents"])
        if self.exact:
            return exact_views(group_BT, self.lm.block_size or 1)
        return (elbo_views if self.args.complementary else exact_count_views)(group_BT, draw, views=self.args.samples)

    def draw(self, batch: Batch) -> Draw:
        draw = super().draw(batch)
        return replace(draw, iteration=0) if self.args.plan_reused or self.exact else draw

    def views_of(self, batch: Any) -> Views:
        """Those of the epoch; made once, and kept in the batch."""
        if "views" not in batch:
            batch["views"] = self.plan(batch, self.draw(batch))
        return batch["views"]

    def tokens_of(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        return batch["input_ids"], documents_apart(batch)

    def of_responses(self, batch: Batch, value_BT: Tensor) -> Tensor:
        """What the tokens of every response [N] come to."""
        return torch.cat([(value_BT * (batch["documents"] == number)).sum(1) for number in range(1, self.responses + 1)])

    def lengths(self, batch: Batch) -> Tensor:
        """How many tokens every response [N] has."""
        return self.of_responses(batch, batch["maskable"])

    def bounds(self, batch: Batch, log_prob_BMT: Tensor) -> Tensor:
        """The log-likelihood of every response [N], or the estimate of its lower bound, in nats."""
        if not self.exact or self.lm.autoregressive:
            return self.of_responses(batch, (self.views_of(batch).weight_BMT * log_prob_BMT).sum(1))
        group_BT, numbers = noise_groups(self.lm, batch["maskable"], batch["documents"]), range(1, self.responses + 1)
        return torch.cat([any_order(group_BT.where(batch["documents"] == number, -1), log_prob_BMT) for number in numbers])

    @torch.no_grad()
    def score_responses(self, lm: DiffusionLM, batch: Batch) -> Tensor:
        """The bounds [N] that a model gives to the responses of a batch, on its views."""
        with evaluating(lm), self.accelerator.autocast(), self.phases("scoring"):
            return self.bounds(batch, self.per_view.log_probs(lm, batch))

    # The loss.

    def micro_loss(self, lm: DiffusionLM, batch: Batch) -> Tensor:
        return self.loss_on(batch, self.per_view.log_probs(lm, batch))

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        loss = self.per_view.step(model, inputs, num_items_in_batch)
        return super().training_step(model, inputs, num_items_in_batch) if loss is None else self.record_loss(loss)

    def loss_on(self, batch: Batch, log_prob_BMT: Tensor, chunk: Chunk | None = None) -> Tensor:
        bound_N = self.bounds(batch, log_prob_BMT)
        gain_N = self.gains(batch, bound_N, self.reference_of(batch))
        if "desirable" in batch:
            return self._unpaired_loss(batch, bound_N, gain_N)
        margin_P = margins(gain_N)
        loss_P = self._pair_loss(margin_P)
        if self.args.rpo_alpha:
            chosen_P, length_P = (part_N.chunk(2)[0] for part_N in (bound_N, self.lengths(batch)))
            loss_P = loss_P - self.args.rpo_alpha * chosen_P / length_P
        self._tell(margin_P, bound_N, torch.arange(len(bound_N), device=bound_N.device) < len(margin_P))
        return loss_P.sum()

    def gains(self, batch: Batch, bound_N: Tensor, reference_N: Tensor) -> Tensor:
        """How much likelier than the reference the policy makes each response [N], in nats, or in nats per token."""
        gain_N = bound_N - reference_N
        per_token = self.args.length_normalization or self.args.loss_type == "simpo"
        return gain_N / self.lengths(batch) if per_token else gain_N

    def _pair_loss(self, margin_P: Tensor) -> Tensor:
        args = self.args
        if args.loss_type == "simpo":
            return simpo(margin_P, beta=args.beta, gamma=args.simpo_gamma, label_smoothing=args.label_smoothing)
        if args.loss_type == "sigmoid":
            return dpo(margin_P, beta=args.beta, label_smoothing=args.label_smoothing)
        return (ipo if args.loss_type == "ipo" else hinge)(margin_P, beta=args.beta)

    def _unpaired_loss(self, batch: Any, bound_N: Tensor, gain_N: Tensor) -> Tensor:
        """KTO; what is told as a margin is how far gains are on their right side of the baseline."""
        desirable_N, baseline, args = batch["desirable"], self.held_out if self.means.evaluating else batch["baseline"], self.args
        weights = {"desirable_weight": args.desirable_weight, "undesirable_weight": args.undesirable_weight}
        loss_N = kto(gain_N, desirable_N, baseline, beta=args.beta, **weights)
        self.record("kl", baseline, len(loss_N))
        self._tell(torch.where(desirable_N, gain_N - baseline, baseline - gain_N), bound_N, desirable_N)
        return loss_N.sum()

    @torch.no_grad()
    def baseline(self, batches: Iterable[Any]) -> Tensor:
        """KTO's estimate of the divergence from the reference, over all processes: the mean gain of responses to other prompts, at least
        0. Of a diffusion model bounds stand for likelihoods, on the same masks for both."""
        total: Any = torch.zeros(2, dtype=self.lm.log_prob_dtype, device=self.accelerator.device)
        with self.lockstep():
            for other in (batch["mismatched"] for batch in batches):
                gain_N = self.gains(other, self.score_responses(self.lm, other), self.reference_of(other))
                total += torch.stack([gain_N.sum(), gain_N.new_tensor(len(gain_N))])
        total = self.accelerator.reduce(total, "sum")
        return (total[0] / total[1]).clamp(min=0)

    def _tell(self, margin: Tensor, bound_N: Tensor, chosen_N: Tensor) -> None:
        self.record("margin", margin.detach().mean(), len(margin))
        self.record("accuracy", (margin > 0).float().mean(), len(margin))
        for name, part in (("chosen", bound_N[chosen_N]), ("rejected", bound_N[~chosen_N])):
            if len(part) > 0:
                self.record(name, part.detach().mean(), len(part))

    def count_items(self, batch: Any) -> Tensor:
        return torch.tensor(len(batch["sample_id"]), device=batch["sample_id"].device)

    # The reference.

    @torch.no_grad()
    def reference_of(self, batch: Any) -> Tensor:
        """The reference's bounds [N] of the responses, on the views of the batch; 0 for a loss without a reference."""
        if "reference" not in batch:
            batch["reference"] = self._reference_of(batch)
        return batch["reference"]

    def _reference_of(self, batch: Any) -> Tensor:
        if self.reference is not None:
            with self.reference.model_in_use() as lm:
                return self.score_responses(lm, batch)
        if not self.args.needs_reference:
            return torch.zeros(self.responses * len(batch["sample_id"]), dtype=self.lm.log_prob_dtype, device=batch["sample_id"].device)
        table = self.stored.get("eval" if self.means.evaluating else "train", NO_SCORES)
        return table.look_up(self.draw(batch).iteration, batch["sample_id"], digests(batch, self.views_of(batch)))

    def _make_reference(self) -> Reference:
        args = self.args
        if args.reference == "adapter" and not hasattr(self.lm.model, "disable_adapter"):
            raise ConfigError("the policy has no adapters", where="reference", remedy="Set lora (peft_config), or use stored or frozen")
        if args.reference == "adapter" and not changes_nothing(self.lm):
            remedy = "Use stored or frozen, or LoRA with bias none and init_lora_weights true"
            raise ConfigError("the policy as given is not the base under its adapters", where="reference", remedy=remedy)
        # A frozen copy is one also where there are adapters.
        return make_reference(self.lm, self.accelerator, moves=args.reference == "frozen", path=args.reference_model)

    def _score_reference(self, progress: Any) -> None:
        args = self.args
        with self._given_reference() as lm:
            known = identity(lm)
            if self.train_dataset is not None:
                started, epochs = time.perf_counter(), range(plans(args, self.train_dataset, exact=self.exact))
                self.stored["train"] = self._stored("train", lm, known, self.train_dataset, epochs, progress)
                self.scoring_seconds = time.perf_counter() - started
            if self.eval_dataset is not None:
                self.stored["eval"] = self._stored("eval", lm, known, self.eval_dataset, range(1), progress)
            if args.log_variance_steps:
                redraws = range(FIRST_REDRAW, FIRST_REDRAW + REDRAWS)
                self.stored["redrawn"] = self._stored("redrawn", lm, known, self.train_dataset[:MEASURED_PAIRS], redraws, progress)

    def _given_reference(self) -> contextlib.AbstractContextManager[DiffusionLM]:
        """The model to score with before training: the policy as it was given, or another one, which is then let go. A policy that will be
        sharded is not on the device yet, and is copied there."""
        path = self.args.reference_model
        if path is None and not self.sharded:
            return contextlib.nullcontext(self.lm)
        return make_reference(self.lm, self.accelerator, moves=self.sharded, path=path).model_in_use()

    def _stored(
        self, name: str, lm: DiffusionLM, known: Mapping[str, str], items: Sequence[Row], numbers: range, progress: Any
    ) -> ScoreTable:
        """The reference's scores of all responses under all plans: from disk, or made and written there."""
        args = self.args
        rows = [item[name] for item in items for name in ("response", "mismatched")] if args.loss_type == "kto" else items
        settings = {"samples": args.samples, "complementary": args.complementary, "exact": self.exact, "seed": args.seed}
        settings |= {"first_plan": numbers.start, "bf16": args.bf16, "fp16": args.fp16}
        path, wanted = Path(args.output_dir) / f"{name}_{REFERENCE_FILE}", content(known, rows, settings)

        def score(part: Sequence[Row], plan: int) -> tuple[Tensor, Tensor]:
            batch = self._prepare_inputs(Collator(0)(part))
            batch["views"] = self.plan(batch, Draw(args.seed, batch["sample_id"], numbers[plan]))
            return self.score_responses(lm, batch), digests(batch, batch["views"])

        def told(share: float) -> None:
            if progress is not None:
                progress.update(0.0, reference_scored=share)

        if (table := read_scores(path, wanted, len(numbers), replace=args.stale_reference == "replace")) is None:
            shape: dict[str, Any] = {"batch": args.train_batch_size, "responses": self.responses, "dtype": self.lm.log_prob_dtype}
            table = score_rows(rows, len(numbers), score, self.accelerator, told=told, **shape)
            if args.should_save:
                write_scores(path, table, wanted)
        return table

    # The variance of the margin, and evaluation.

    def prepared(self, batches: list[Any]) -> list[Any]:
        if not batches:
            return batches
        every = self.args.log_variance_steps
        if every and (self.state.global_step + 1) % every == 0:
            self.record("margin_variance", self.margin_variance())
        with self.lockstep():
            for batch in batches:
                self.reference_of(batch)
        if self.args.loss_type == "kto":  # one for all micro-batches, so that accumulating gradients changes nothing
            baseline = self.baseline(batches)
            batches = [batch | {"baseline": baseline} for batch in batches]
        return batches

    @torch.no_grad()
    def margin_variance(self) -> Tensor:
        """The variance of the margin over redraws of the masks, in nats squared, on average over the first pairs of the training data:
        always the same ones, so that figures of different steps can be compared."""
        batches = list(self.in_batches(self.train_dataset[:MEASURED_PAIRS], self.args.train_batch_size))
        margin_RP = torch.stack([torch.cat([self._redrawn_margins(batch, redraw) for batch in batches]) for redraw in range(REDRAWS)])
        return margin_RP.var(0).mean()

    def in_batches(self, rows: Sequence[Any], size: int) -> Iterator[Any]:
        """All of these rows, collated, on the device."""
        for start in range(0, len(rows), size):
            yield self._prepare_inputs(self.data_collator(rows[start : start + size]))

    def _redrawn_margins(self, batch: Any, redraw: int) -> Tensor:
        batch = batch | {"views": self.plan(batch, Draw(self.args.seed, batch["sample_id"], FIRST_REDRAW + redraw))}
        if "redrawn" in self.stored:
            batch["reference"] = self.stored["redrawn"].look_up(redraw, batch["sample_id"], digests(batch, batch["views"]))
        return margins(self.gains(batch, self.score_responses(self.lm, batch), self.reference_of(batch)))

    def measure(self, rows: Any) -> None:
        mine = [rows[at] for at in range(self.accelerator.process_index, len(rows), self.accelerator.num_processes)]
        if self.judge is not None:
            with failing_together("judge"), self.lockstep():
                values = wins(self.judge, self.lm, mine, self.sampler)
            for value in values:
                self.record("win_rate", value)
        if self.args.loss_type == "kto":
            self.held_out = self.baseline(self.in_batches(mine, self.args.eval_batch_size))


def plans(args: DPOConfig, rows: Sized, *, exact: bool) -> int:
    """How many plans of masks the rows are trained on: one for each epoch; one in all, where it is reused or nothing is drawn."""
    epochs = args.max_steps / steps_per_epoch(args, rows) if args.max_steps > 0 else args.num_train_epochs
    return 1 if args.plan_reused or exact else math.ceil(epochs)
