"""Speed-up by each training optimization (cached masks, mixed precision, loading), and by all of them beside
a plain loop.

    python -m benchmarks.training [--rounds 5] [--only masks steps packed loading]

One thread on a CPU. Each step is forward pass, loss, backward pass and a fused AdamW; contenders take turns,
and their losses and gradients are checked equal first (in bfloat16: to 2%). The plain loop (`Plain`) trains
transformers' own model on the same batches and noise.

Shapes: B batch, M views, T tokens, V vocabulary, D width, N positions with a loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import ratio, report, timed, turns
from unmask.data.characters import character_tokenizer
from unmask.data.rows import Collator, make_row, separate_documents
from unmask.diffusion.log_probs import noise_groups, view_log_probs, weighted_cross_entropy
from unmask.diffusion.schedules import Noise, get_schedule
from unmask.diffusion.views import MaskRNG, Views, all_masked_views, random_views
from unmask.models.attention import Layout, clear_mask_cache, make_mask, mask_cache_stats
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.load import make_diffusion, with_pattern

VOCABULARY = 8_000
NOISE = Noise(get_schedule("linear"))
PATTERNS: dict[str, dict[str, Any]] = {
    "causal": {"attention": "causal", "logit_shift": True},
    "bidirectional": {"attention": "bidirectional"},
    "block_causal [x_t ; x_0]": {"attention": "block_causal", "block_size": 4},
}
Table = list[tuple[str, str, str]]


def rows_of(length: int, count: int, documents: int = 1) -> list[dict[str, Any]]:
    """Rows of random tokens; of several documents these are of random lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        ids = torch.randint(10, VOCABULARY, (length,), generator=generator).tolist()
        starts = torch.randperm(length - 1, generator=generator)[: documents - 1] + 1
        at = torch.zeros(length, dtype=torch.long).index_fill(0, starts, 1).cumsum(0) + 1
        rows.append(make_row(ids, at.tolist(), [False] + [True] * (length - 1), number))
    return rows


class Step:
    """A training step as Unmask's trainers make it, on batches one after another.

    Args:
        kept: whether masks of unpadded rows are kept between steps.
        bf16: whether products are computed in bfloat16.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        pattern: str,
        batches: Iterator[dict[str, Any]],
        *,
        kept: bool,
        bf16: bool,
    ):
        torch.manual_seed(0)
        heads = {"num_attention_heads": options.hidden // 64, "num_key_value_heads": options.hidden // 64}
        sizes = {
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_hidden_layers": options.layers,
        }
        config = LlamaConfig(
            **sizes, **heads, vocab_size=VOCABULARY, max_position_embeddings=4096, tie_word_embeddings=True
        )
        with torch.device(options.device):
            model = LlamaForCausalLM(config).train()
        self.lm: DiffusionLM = with_pattern(
            make_diffusion(model, character_tokenizer("ab")), **PATTERNS[pattern]
        )
        self.optimizer = torch.optim.AdamW(self.lm.model.parameters(), lr=1e-4, fused=True)
        self.device, self.batches, self.kept, self.bf16, self.steps = options.device, batches, kept, bf16, 0

    def views(self, batch: dict[str, Any]) -> Views:
        if self.lm.autoregressive:
            return all_masked_views(batch["maskable"])
        groups = noise_groups(self.lm, batch["maskable"], batch["documents"])
        return random_views(groups, MaskRNG(0, batch["sample_id"], self.steps), NOISE)

    def summed(self, batch: dict[str, Any], views: Views) -> Tensor:
        documents_BT = separate_documents(batch) if self.kept else batch["documents"]
        return weighted_cross_entropy(view_log_probs(self.lm, batch["input_ids"], documents_BT, views), views)

    def loss(self) -> Tensor:
        batch = {
            name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in next(self.batches).items()
        }
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            return self.summed(batch, self.views(batch)) / batch["maskable"].sum()

    def __call__(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        if self.device == "cuda":
            torch.cuda.synchronize()


class Plain(Step):
    """The same step of a causal or bidirectional model as a user of transformers would write it for rows of
    one document without padding: SDPA without a mask, and logits only of the positions with a loss."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.lm.model.set_attn_implementation("sdpa")

    def summed(self, batch: dict[str, Any], views: Views) -> Tensor:
        model, ids_BT, causal = self.lm.model, batch["input_ids"], self.lm.autoregressive
        inputs_BT = ids_BT if causal else ids_BT.masked_fill(views.hidden_BMT[:, 0], self.lm.mask_token_id)
        state_BTD = model.model(input_ids=inputs_BT, use_cache=False, is_causal=causal).last_hidden_state
        if causal:
            state_ND, target_N = state_BTD[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()
        else:
            state_ND, target_N = state_BTD[views.hidden_BMT[:, 0]], ids_BT[views.hidden_BMT[:, 0]]
        logits_NV = model.lm_head(state_ND).float()
        # it has no gradient, and autograd would copy that of all logits
        logits_NV.detach()[:, self.lm.mask_token_id] = -torch.inf
        if causal:
            return F.cross_entropy(logits_NV, target_N, reduction="sum")
        return F.cross_entropy(logits_NV, target_N, reduction="none") @ views.weight_BMT[views.hidden_BMT]


def check_equal(contenders: dict[str, Step]) -> None:
    """All losses and gradients are those of the first, but for rounding."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, step in contenders.items():
        loss = step.loss()
        loss.backward()
        gradients = [parameter.grad for parameter in step.lm.model.parameters() if parameter.grad is not None]
        found[name] = loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])
        step.optimizer.zero_grad()
    first = next(iter(found.values()))
    for name, values in found.items():
        for what, value, of_first in zip(("loss", "gradient"), values, first, strict=True):
            difference = float((value - of_first).norm() / of_first.norm())
            assert difference <= (0.02 if contenders[name].bf16 else 1e-4), (
                f"{name}: the {what} differs by {difference:.2g}"
            )


def collated(rows: list[dict[str, Any]], batch: int) -> Iterator[dict[str, Any]]:
    """The same batch again and again, made beforehand."""
    return cycle([Collator(0)(rows[:batch])])


def steps(options: argparse.Namespace) -> Table:
    """Kept masks and mixed precision in whole training steps."""
    table: Table = []
    for length, batch in ((512, options.batch), (2048, 1)):
        rows = rows_of(length, batch)
        for pattern in PATTERNS:
            made = partial(Step, options, pattern)
            contenders = {
                "made": made(collated(rows, batch), kept=False, bf16=False),
                "kept": made(collated(rows, batch), kept=True, bf16=False),
                "kept, bf16": made(collated(rows, batch), kept=True, bf16=True),
            }
            check_equal(contenders)
            clear_mask_cache()
            seconds = timed(contenders, options.rounds)
            rate = mask_cache_stats()["hit_rate"]
            name = f"{pattern}, {batch} x {length}"
            table += [
                (f"{name}: masks made in each step", f"{seconds['made'] * 1e3:.0f} ms", ""),
                (
                    "  masks kept",
                    f"{seconds['made'] / seconds['kept']:.3f} x",
                    f"hit rate {rate:.2f}; commonly claimed: 1.05 to 1.15",
                ),
                (
                    "  and bfloat16",
                    f"{seconds['kept'] / seconds['kept, bf16']:.3f} x",
                    "commonly claimed: 1.5 to 2 on a GPU",
                ),
            ]
    return table


def masks(options: argparse.Namespace) -> Table:
    """What making a mask takes, with what attention makes of it."""
    table: Table = []
    for length, batch in ((512, options.batch), (2048, 1)):
        document_BT = torch.ones(batch, length, dtype=torch.long, device=options.device)
        for pattern, settings in PATTERNS.items():
            copies = int(settings["attention"] == "block_causal")

            def make(
                settings: dict[str, Any] = settings, copies: int = copies, document_BT: Tensor = document_BT
            ) -> None:
                layout = Layout.of(document_BT)
                layout = layout.with_noised_copies(copies) if copies else layout
                mask = make_mask(settings["attention"], settings.get("block_size"), layout, layout)
                if mask.coarse_tiles is None:
                    mask.additive(torch.float32)

            table.append(
                (
                    f"{pattern}, {batch} x {length}",
                    f"{timed({'': make}, options.rounds)[''] * 1e3:.1f} ms",
                    "one mask",
                )
            )
    return table


def packed(options: argparse.Namespace) -> Table:
    """How often batches of packed rows have documents of the same lengths: what a cache by lengths could
    find."""
    table: Table = []
    for documents in (2, 4, 8):
        rows = rows_of(512, 2_000, documents)
        seen, found = set(), 0
        for first in range(0, len(rows), options.batch):
            key = tuple(tuple(row["documents"]) for row in rows[first : first + options.batch])
            found += key in seen
            seen.add(key)
        asked = len(range(0, len(rows), options.batch))
        table.append(
            (
                f"{documents} documents in a row of 512, batches of {options.batch}",
                f"{found} of {asked}",
                "masks found again",
            )
        )
    return table


def loading(options: argparse.Namespace) -> Table:
    """Batches made in the step, or by a worker beside it (pinned on a GPU), alone and with all else, compared
    with the plain loop."""
    table: Table = []
    rows = rows_of(512, 512)
    cuda = options.device == "cuda"

    def loader(workers: int) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] = {
            "num_workers": workers,
            "persistent_workers": workers > 0,
            "pin_memory": cuda and workers > 0,
        }
        made: DataLoader[Any] = DataLoader(rows, options.batch, collate_fn=Collator(0), **more)  # type: ignore[arg-type]
        return (batch for _ in cycle([None]) for batch in made)

    here, beside = loader(0), loader(1)
    contenders: dict[str, Callable[[], Any]] = {"here": partial(next, here), "beside": partial(next, beside)}
    seconds = timed(contenders, 10 * options.rounds)
    table += [
        ("a batch collated in the step", f"{seconds['here'] * 1e3:.2f} ms", f"{options.batch} x 512"),
        (
            "  the same from a worker",
            f"{seconds['here'] / seconds['beside']:.2f} x",
            "commonly claimed: 1.1 to 1.2",
        ),
    ]
    for pattern in ("causal", "bidirectional"):
        loops: dict[str, Step] = {}
        for bf16, precision in enumerate(("float32", "bfloat16")):
            loops[f"plain, {precision}"] = Plain(options, pattern, loader(0), kept=False, bf16=bool(bf16))
            loops[f"step, {precision}"] = Step(options, pattern, loader(0), kept=True, bf16=bool(bf16))
            loops[f"worker, {precision}"] = Step(options, pattern, loader(1), kept=True, bf16=bool(bf16))
        check_equal(loops)
        rounds = turns(loops, options.rounds)
        for precision in ("float32", "bfloat16"):
            plain, step, worker = (f"{name}, {precision}" for name in ("plain", "step", "worker"))
            table += [
                (
                    f"{pattern}: the plain loop, {precision}",
                    f"{median(rounds[plain]) * 1e3:.0f} ms",
                    "SDPA without a mask",
                ),
                (
                    "  plain / Unmask's step",
                    f"{ratio(rounds, plain, step):.3f} x",
                    "the same precision, batches and logits; kept mask",
                ),
                (
                    "  plain / Unmask's step with a worker",
                    f"{ratio(rounds, plain, worker):.3f} x",
                    "likewise",
                ),
            ]
        alone, everything = (
            ratio(rounds, "plain, float32", name) for name in ("plain, bfloat16", "worker, bfloat16")
        )
        table += [
            (
                "  plain in float32 / in bfloat16",
                f"{alone:.3f} x",
                "nothing of Unmask; commonly claimed: 1.5 to 2 on a GPU",
            ),
            (
                "  plain in float32 / all of it",
                f"{everything:.3f} x",
                "with bfloat16; commonly claimed: 2 to 3 on a GPU",
            ),
        ]
    return table


PARTS: dict[str, Callable[[argparse.Namespace], Table]] = {
    "masks": masks,
    "packed": packed,
    "steps": steps,
    "loading": loading,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in {"hidden": 256, "layers": 4, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.only:
        size = (
            ""
            if name == "packed"
            else f", {options.layers} layers of {options.hidden}, vocabulary {VOCABULARY:,}, {options.device}"
        )
        report(f"{name}{size}", PARTS[name](options))


if __name__ == "__main__":
    main()
