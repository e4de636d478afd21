"""Cost of conversion compared with plain causal training of the same model: time of a step, memory of the
loss, packing.

    python -m benchmarks.conversion [--threads 1] [--rounds 7]

Shapes: B batch, T tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import peak_bytes, report, timed
from unmask.config.run import AttentionName
from unmask.data.characters import character_tokenizer
from unmask.data.rows import Collator
from unmask.diffusion.log_probs import noise_groups, view_log_probs, weighted_cross_entropy
from unmask.diffusion.schedules import Noise, get_schedule
from unmask.diffusion.views import MaskRNG, Views, all_masked_views, complementary_pair, random_views
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion, with_pattern

BATCH, LENGTH, VOCABULARY = 4, 512, 32_000
DOCUMENTS = 32
NOISE = Noise(get_schedule("linear"))


def llama(vocabulary: int = VOCABULARY, hidden: int = 384, layers: int = 6) -> LlamaForCausalLM:
    """About 25M parameters by default."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64}
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, max_position_embeddings=LENGTH, tie_word_embeddings=True)
    ).train()


class Causal:
    """A training step of transformers: its attention, logits of all rows, its loss."""

    def __init__(self, ids_BT: Tensor):
        self.model, self.ids_BT = llama(), ids_BT
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def loss(self) -> Tensor:
        return self.model(input_ids=self.ids_BT, labels=self.ids_BT).loss

    def __call__(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Diffusion:
    """A training step of Unmask."""

    def __init__(
        self, lm: DiffusionLM, batch: dict[str, Tensor], *, pair: bool = False, lm_loss: float = 0.0
    ):
        self.lm, self.batch, self.pair, self.lm_loss = lm, batch, pair, lm_loss
        self.optimizer = torch.optim.AdamW(lm.model.parameters(), lr=1e-4, fused=True)
        self.steps = 0

    def views(self) -> Views:
        if self.lm.autoregressive:
            return all_masked_views(self.batch["maskable"])
        groups = noise_groups(self.lm, self.batch["maskable"], self.batch["documents"])
        draw = MaskRNG(0, self.batch["sample_id"], self.steps)
        plan = complementary_pair(groups, draw, NOISE) if self.pair else random_views(groups, draw, NOISE)
        return plan.with_causal(self.batch["maskable"], self.lm_loss) if self.lm_loss else plan

    def loss(self) -> Tensor:
        views = self.views()
        log_prob_BMT = view_log_probs(self.lm, self.batch["input_ids"], self.batch["documents"], views)
        return weighted_cross_entropy(log_prob_BMT, views) / self.batch["maskable"].sum()

    def __call__(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


class Plain(Diffusion):
    """The same step of a bidirectional model, without optimisations: transformers' own attention under a
    mask, logits of all rows."""

    def __init__(self, lm: DiffusionLM, batch: dict[str, Tensor]):
        super().__init__(lm, batch)
        lm.model.set_attn_implementation("sdpa")

    def loss(self) -> Tensor:
        views, ids_BT, document_BT = self.views(), self.batch["input_ids"], self.batch["documents"]
        noised_BT = torch.where(views.hidden_BMT[:, 0], self.lm.mask_token_id, ids_BT)
        real_B1QK = (document_BT[:, None, :, None] == document_BT[:, None, None, :]) & (
            document_BT[:, None, None, :] > 0
        )
        # padding itself: a softmax over nothing is not a number
        seen_B1QK = real_B1QK | torch.eye(ids_BT.shape[1], dtype=torch.bool)
        logits_BTV = self.lm.model(input_ids=noised_BT, attention_mask=seen_B1QK, use_cache=False).logits
        logits_BTV[..., self.lm.mask_token_id] = -torch.inf
        cross_entropy_BT = F.cross_entropy(logits_BTV.transpose(1, 2), ids_BT, reduction="none")
        weight_BT = views.weight_BMT[:, 0]
        return (
            torch.where(weight_BT > 0, cross_entropy_BT * weight_BT, 0.0).sum() / self.batch["maskable"].sum()
        )


def diffusion_lm(attention: AttentionName, vocabulary: int = VOCABULARY, **more: Any) -> DiffusionLM:
    lm = make_diffusion(llama(vocabulary), character_tokenizer("ab"))
    lm.model.train()
    return with_pattern(lm, attention, **more)


def whole_rows() -> dict[str, Tensor]:
    ids_BT = torch.randint(10, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    ones_BT = torch.ones_like(ids_BT)
    maskable_BT = torch.arange(LENGTH).expand_as(ids_BT) > 0
    return {
        "input_ids": ids_BT,
        "documents": ones_BT,
        "maskable": maskable_BT,
        "sample_id": torch.arange(BATCH),
    }


def steps(rounds: int) -> None:
    """Time of a step compared with plain causal steps."""
    batch = whole_rows()
    causal = Causal(batch["input_ids"])
    same = Diffusion(diffusion_lm("causal", logit_shift=True), batch)
    torch.testing.assert_close(same.loss(), causal.loss(), rtol=1e-4, atol=0)  # the same model, data and loss
    block: dict[str, Any] = {"attention": "block_causal", "block_size": 4, "logit_shift": True}
    contenders: dict[str, Callable[[], Any]] = {
        "causal": causal,
        "block": Diffusion(diffusion_lm(**block), batch),
        "pair": Diffusion(diffusion_lm(**block), batch, pair=True),
        "block with AR loss": Diffusion(diffusion_lm(**block, causal_context=True), batch, lm_loss=0.1),
        "bidirectional": Diffusion(diffusion_lm("bidirectional"), batch),
    }
    seconds = timed(contenders, rounds)
    one = seconds["causal"]
    rows = [("a plain causal step", f"{one:.2f} s", "")]
    rows += [
        ("block, one noised copy / 2 causal steps", f"{seconds['block'] / one / 2:.3f}", "at most 1.15"),
        (
            "block, complementary pair / 4 causal steps",
            f"{seconds['pair'] / one / 4:.3f}",
            "at most 1.15 (two copies)",
        ),
        ("the same / 3 causal steps", f"{seconds['pair'] / one / 3:.3f}", ""),
        (
            "block, causal context, AR loss / 2 causal steps",
            f"{seconds['block with AR loss'] / one / 2:.3f}",
            "",
        ),
        ("bidirectional / 1 causal step", f"{seconds['bidirectional'] / one:.3f}", "at most 1.05"),
    ]
    report(
        (
            f"A training step: {BATCH} x {LENGTH} tokens, "
            f"{sum(w.numel() for w in causal.model.parameters()) / 1e6:.1f}M parameters"
        ),
        rows,
    )


def memory() -> None:
    """Peak memory of the loss by vocabulary: hidden states in, log-probabilities and gradients out."""
    peaks = {}
    for vocabulary in (8_000, 32_000, 128_000):
        lm = diffusion_lm("bidirectional", vocabulary)
        batch, rows_BT = whole_rows(), torch.ones(BATCH, LENGTH, dtype=torch.bool)
        batch["input_ids"] = batch["input_ids"] % 8_000
        targets_N = batch["input_ids"].flatten()
        table = lm.model.get_input_embeddings().weight
        log_prob_N = lm.log_probs(lm.noised_inputs(batch["input_ids"], target_BT=rows_BT), targets_N)
        plain_N = (
            lm.logits(batch["input_ids"])
            .log_softmax(-1)
            .flatten(0, 1)
            .gather(1, targets_N[:, None])
            .squeeze(1)
        )
        torch.testing.assert_close(log_prob_N, plain_N, rtol=1e-4, atol=1e-4)
        del log_prob_N, plain_N

        def step(
            lm: DiffusionLM = lm,
            ids_BT: Tensor = batch["input_ids"],
            rows_BT: Tensor = rows_BT,
            targets_N: Tensor = targets_N,
        ) -> None:
            lm.log_probs(lm.noised_inputs(ids_BT, target_BT=rows_BT), targets_N).sum().backward()
            lm.model.zero_grad()

        peaks[vocabulary] = peak_bytes(step) - table.nbytes  # the gradient of the embeddings
    rows = [(f"vocabulary {vocabulary:,}", f"{peak / 1e6:,.0f} MB", "") for vocabulary, peak in peaks.items()]
    rows.append(("128k / 8k", f"{peaks[128_000] / peaks[8_000]:.3f}", "at most 1.3"))
    report(
        f"Peak memory of forward and backward pass, embeddings aside, {BATCH * LENGTH} rows of logits", rows
    )


def packing(rounds: int) -> None:
    """Throughput of real tokens, packed compared with padded, on two mixes of documents of 32 to 512
    tokens."""
    generator = torch.Generator().manual_seed(0)
    share_N = torch.rand(DOCUMENTS, generator=generator)
    # as in text collections, most documents are short
    by_octave = (32 * (LENGTH / 32) ** share_N).long().tolist()
    pack("as many from 32 to 64 as from 256 to 512", by_octave, rounds)
    pack("all lengths as often", (32 + (LENGTH - 32) * share_N).long().tolist(), rounds)


def pack(mix: str, lengths: list[int], rounds: int) -> None:
    """Pack and pad the same documents; padded rows are as long as the longest of their batch."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(10, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]

    def row(ids: list[int], numbers: list[int], sample: int) -> dict:
        starts = [i == 0 or numbers[i] != numbers[i - 1] for i in range(len(ids))]
        return {
            "input_ids": ids,
            "documents": numbers,
            "maskable": [not start for start in starts],
            "sample_id": sample,
        }

    padded = [row(ids, [1] * len(ids), number) for number, ids in enumerate(documents)]
    ids = [token for document in documents for token in document]
    numbers = [number for number, document in enumerate(documents, 1) for _ in document]
    packed = [
        row(ids[at : at + LENGTH], numbers[at : at + LENGTH], at // LENGTH)
        for at in range(0, len(ids), LENGTH)
    ]
    collate = Collator(0)
    batches = {
        name: [collate(rows[at : at + BATCH]) for at in range(0, len(rows), BATCH)]
        for name, rows in (("padded", padded), ("packed", packed))
    }
    both = [Kind(diffusion_lm("bidirectional"), batches["padded"][0]) for Kind in (Plain, Diffusion)]
    # the same model, data and loss
    torch.testing.assert_close(both[0].loss(), both[1].loss(), rtol=1e-4, atol=0)
    block = {"block_size": 4, "logit_shift": True}
    contenders = {
        "plainly padded": epoch(Plain(diffusion_lm("bidirectional"), {}), batches["padded"]),
        "padded": epoch(Diffusion(diffusion_lm("bidirectional"), {}), batches["padded"]),
        "packed": epoch(Diffusion(diffusion_lm("bidirectional"), {}), batches["packed"]),
        "block padded": epoch(Diffusion(diffusion_lm("block_causal", **block), {}), batches["padded"]),
        "block packed": epoch(Diffusion(diffusion_lm("block_causal", **block), {}), batches["packed"]),
    }
    seconds = timed(contenders, rounds)
    results = [
        (
            "bidirectional: packed / padded as transformers has it",
            f"{seconds['plainly padded'] / seconds['packed']:.3f}",
            "at least 1.5",
        ),
        ("bidirectional: packed / padded, both Unmask's", f"{seconds['padded'] / seconds['packed']:.3f}", ""),
        (
            "block of 4: packed / padded, both Unmask's",
            f"{seconds['block padded'] / seconds['block packed']:.3f}",
            "",
        ),
    ]
    held = sum(batch["input_ids"].numel() for batch in batches["padded"])
    title = (
        f"Packing: {len(lengths)} documents of 32 to {LENGTH} tokens, {mix}, {sum(lengths)} in all; padded "
        f"rows hold {held}"
    )
    report(title, results)


def epoch(stepper: Diffusion, batches: list[dict[str, Tensor]]) -> Callable[[], None]:
    """A step on each batch."""

    def steps() -> None:
        for batch in batches:
            stepper.batch = batch
            stepper()

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["steps", "memory", "packing"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.only in (None, "steps"):
        steps(options.rounds)
    if options.only in (None, "memory"):
        memory()
    if options.only in (None, "packing"):
        packing(max(1, options.rounds // 3))


if __name__ == "__main__":
    main()
