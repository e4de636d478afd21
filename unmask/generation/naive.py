"""The naive sampler: one sequence at a time, no cache. It defines the tokens that the engine samples.

Shapes: T tokens, V vocabulary, N = 1 (fields of a `Decision` for one position).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unmask.config.sampler import SamplerConfig
from unmask.generation.canvas import CanvasSettings, accept, is_confident, propose, random_tokens
from unmask.generation.constraints.decide import decide_given, windows_of
from unmask.generation.output import CanvasStep, Generation, Trace, make_generation
from unmask.generation.policies import Decision, count_remasked, decide, guide, refuse_nan
from unmask.generation.requests import (
    Request,
    block_start,
    check_verified,
    check_verifier,
    make_requests,
    without_ends,
)
from unmask.generation.revise import doubts, present_log_probs
from unmask.generation.speculation import Tree, draft_inputs, draw_drafts, num_drafts, tree_of, verify
from unmask.generation.variable_length import (
    RECORDS,
    OpenText,
    decide_open,
    make_filled,
    open_texts,
    settled_length,
    trained_max_gap,
)
from unmask.models.diffusion_lm import DiffusionLM
from unmask.models.length_tokens import predicting_lengths
from unmask.models.model_state import evaluating


def generate(
    lm: DiffusionLM,
    prompts: Sequence[Any],
    config: SamplerConfig | None = None,
    keys: Sequence[int] | None = None,
    verifier: DiffusionLM | None = None,
) -> Generation:
    """Complete prompts one by one. Arguments, errors and tokens are those of `unmask.generate`; lossy
    settings are ignored."""
    config = config or SamplerConfig()
    return complete(lm, make_requests(lm, prompts, config, keys), config, verifier)


@torch.no_grad()
def complete(
    lm: DiffusionLM, requests: Sequence[Request], config: SamplerConfig, verifier: DiffusionLM | None = None
) -> Generation:
    """Complete requests one by one."""
    if verifier is not None:
        check_verifier(lm, verifier)
        for request in requests:
            check_verified(verifier, request.length, config)
    with evaluating(lm), evaluating(verifier or lm):
        if config.self_speculative:
            traces = [_speculate(lm, verifier, request, config) for request in requests]
        else:
            denoise = _denoise_canvas if lm.noise == "uniform" else _denoise
            traces = [denoise(lm, request, config) for request in requests]
    return make_generation(lm, requests, traces, config)


def fill_gaps(
    lm: DiffusionLM,
    texts: Sequence[Any],
    config: SamplerConfig | None = None,
    keys: Sequence[int] | None = None,
    *,
    max_gap: int | None = None,
) -> Generation:
    """Fill gaps whose length the model finds, one text at a time. Arguments, errors and tokens are those of
    `unmask.infill` with `length="auto"` and a model that was trained for it."""
    max_gap = trained_max_gap(lm, max_gap)
    config = without_ends(lm, config or SamplerConfig())
    opened, config = open_texts(lm, texts, config, keys, max_gap, "<gap>")
    with evaluating(lm):
        return make_filled(lm, [_fill(lm, text, config, max_gap) for text in opened], config)


@torch.no_grad()
def _fill(lm: DiffusionLM, text: OpenText, config: SamplerConfig, max_gap: int) -> OpenText:
    """The text, filled. A cell is a position: its gap, its token (None: hidden), the step that revealed it,
    and the record of this."""
    hidden = zip(text.gap, text.ids, text.hidden, strict=True)
    cells: list[tuple[int, int | None, int, tuple]] = [
        (gap, None if is_hidden else token, -1, (0.0,) * 3) for gap, token, is_hidden in hidden
    ]
    # the gaps that have expanded or were deleted from, and the token that did it
    moved: dict[int, int | None] = {}
    passes, expand, delete = 0, lm.expand_token_id, lm.delete_token_id
    settled = set[int]()  # the gaps whose length is known

    def may(place: int) -> list[bool]:
        own = [other for other, cell in enumerate(cells) if cell[0] == cells[place][0]]
        still = (
            cells[place][0] >= 0
            and cells[place][0] not in settled
            and all(cells[other][1] is None for other in own if other >= place)
        )
        last, done = place == own[-1], moved.get(cells[place][0])
        return [
            still and last and len(own) < max_gap and done != delete,
            still and len(own) > 1 and done != expand,
            still,
        ]

    while any(token is None for _, token, _, _ in cells):
        shown = [
            (expand if may(place)[2] else lm.mask_token_id) if cell[1] is None else cell[1]
            for place, cell in enumerate(cells)
        ]
        hidden_1T = torch.tensor([[token is None for _, token, _, _ in cells]], device=lm.device)
        logits_TV = predicting_lengths(lm).logits(
            torch.tensor([shown], device=lm.device), hidden_BT=hidden_1T
        )[0]
        present_1V = torch.zeros_like(logits_TV[:1], dtype=torch.bool)
        present_1V[0, [lm.mask_token_id if token is None else token for _, token, _, _ in cells]] = True
        decisions, events = {}, {}
        for place in hidden_1T[0].nonzero().flatten().tolist():
            key_1, step_1, place_1 = (
                torch.tensor([number], device=lm.device) for number in (text.key, passes, place)
            )
            may_12 = torch.tensor([may(place)[:2]], device=lm.device)
            where = (config, key_1, step_1, place_1, present_1V)
            decisions[place], event_12 = decide_open(lm, logits_TV[place][None], may_12, *where)
            if event_12 is not None:
                events[place] = event_12[0].tolist()
        if events and (known := _known_lengths(cells, may, events)):
            cells = [cell for place, cell in enumerate(cells) if place < known.get(cell[0], len(cells))]
            settled |= known.keys()
            passes += 1
            continue
        order = sorted(decisions, key=lambda place: (-float(decisions[place].priority_N), place))
        count = _num_accepted(order, decisions, config) if config.parallel else config.tokens_per_step or 1
        tokens = {place: int(decision.token_N) for place, decision in decisions.items()}
        gone = len(cells)
        for place in sorted(order[:count], reverse=True):
            if place >= gone:
                continue
            gap, (expands, deletes, _) = cells[place][0], may(place)
            if tokens[place] == expand and expands:
                cells[place:place], moved[gap] = [cells[place]], expand
            elif tokens[place] == delete and deletes:
                first = [cell[0] for cell in cells].index(gap) + 1
                while config.temperature == 0 and place > first and tokens.get(place - 1) == delete:
                    place -= 1
                gone, moved[gap] = max(place, first), delete
                cells = cells[:gone] + [cell for cell in cells[gone:] if cell[0] != gap]
            elif tokens[place] not in (expand, delete):
                values = [getattr(decisions[place], name) for name in RECORDS]
                record = tuple(0.0 if value is None else float(value) for value in values)
                cells[place] = gap, tokens[place], passes, record
        passes += 1
    gaps, ids, steps, records = (list(column) for column in zip(*cells, strict=True))
    return OpenText(text.key, ids, [False] * len(ids), gaps, steps, records, passes)


def _known_lengths(
    cells: list[tuple[int, int | None, int, tuple]],
    may: Callable[[int], list[bool]],
    events: dict[int, list[float]],
) -> dict[int, int]:
    """The places where gaps end whose length is all but certain, by the probabilities of expand and delete at
    each place."""
    ends = dict[int, int]()
    for gap in {cell[0] for cell in cells if cell[0] >= 0}:
        own = [place for place, cell in enumerate(cells) if cell[0] == gap]
        opened = [place for place in own if place in events and may(place)[2]]
        if opened:
            missing = settled_length([events[place][1] for place in opened], events[opened[-1]][0])
            ends |= {} if missing is None else {gap: max(opened[0] + missing, own[0] + 1)}
    return ends


def _denoise(lm: DiffusionLM, request: Request, config: SamplerConfig) -> Trace:
    ids, hidden = list(request.ids), list(request.hidden)
    steps, passes = [-1] * len(ids), 0
    revealed: dict[int, Decision] = {}
    for block, (start, stop) in enumerate(request.blocks):
        counts, step = request.counts[block] if request.counts else [], 0
        visible = request.length
        if lm.attention != "bidirectional":
            visible = min(block_start(lm, start) + (lm.block_size or 1), request.length)
        while any(hidden[start:stop]):
            logits_TV = _logits(lm, request, ids[:visible], hidden[:visible], config)
            decisions = _decide(lm, request, ids, hidden, (start, stop), logits_TV, passes, config)
            order = sorted(decisions, key=lambda position: (-float(decisions[position].priority_N), position))
            again = []
            if request.revisions:
                visible_N = torch.tensor(
                    sorted(position for position in revealed if position >= start), dtype=torch.long
                )
                again = _unlikely(
                    lm, logits_TV, ids[:visible], hidden[:visible], visible_N, request.key, passes, config
                )
                again = again[: request.revisions[block][step]]
            num_remasked = count_remasked(counts, step, config.remask_fraction)
            num_revealed = (
                _num_accepted(order, decisions, config)
                if config.parallel
                else counts[step] + num_remasked + len(again)
            )
            earlier = sorted(
                (float(decision.log_prob_N.float()), position)
                for position, decision in revealed.items()
                if position >= start
            )
            # the least probable ones
            for position in [position for _, position in earlier[:num_remasked]] + again:
                ids[position], hidden[position], steps[position] = lm.mask_token_id, True, -1
                del revealed[position]
            for position in order[:num_revealed]:
                revealed[position] = decisions[position]
                ids[position], hidden[position] = int(decisions[position].token_N), False
                steps[position] = passes
            step, passes = step + 1, passes + 1
        if request.stop_at_eos and not set(lm.eos_token_ids).isdisjoint(ids[request.start : stop]):
            break
    return _trace(request, config, ids, steps, revealed, passes)


def _denoise_canvas(lm: DiffusionLM, request: Request, config: SamplerConfig) -> Trace:
    """The most probable tokens of canvases that begin as random tokens, block by block; with a constraint the
    most probable text that it accepts. Known tokens, for a repetition penalty, are those that are given and
    those of finished blocks."""
    settings, ids, steps, passes = CanvasSettings.of(lm, config), list(request.ids), [-1] * request.length, 0
    decided: dict[int, Decision] = {}
    canvas_steps: list[CanvasStep] = []
    for start, stop in request.blocks:
        hidden = [position for position in range(start, stop) if request.hidden[position]]
        position_N = torch.tensor(hidden, device=lm.device)
        key_N, visible = torch.full_like(position_N, request.key), request.length
        if lm.attention != "bidirectional":
            visible = min(block_start(lm, start) + (lm.block_size or 1), request.length)
        canvas_N = random_tokens(lm, config.seed, key_N, torch.full_like(key_N, passes), position_N)
        earlier, soft_1TD, first_1 = list[list[int]](), None, position_N.new_tensor([start])
        windows = windows_of(request.gaps, (start, stop), ids, request.hidden, lm.device)
        known = [token for at, token in enumerate(ids) if at < start or not request.hidden[at]]
        known_1V = torch.zeros(1, lm.vocab_size, dtype=torch.bool, device=lm.device)
        known_1V[0, [token for token in known if token != lm.mask_token_id]] = True
        for step in range(settings.max_denoising_steps):
            shown_1T = torch.tensor([ids[:visible]], device=lm.device)
            shown_1T[0, position_N] = canvas_N
            is_hidden_1T = torch.zeros_like(shown_1T, dtype=torch.bool)
            is_hidden_1T[0, position_N] = True
            more = {"first_B": first_1, "soft_BTD": soft_1TD} if lm.canvas else {}
            logits_NV = lm.logits(shown_1T, hidden_BT=is_hidden_1T, **more)[0, position_N]
            temperature_N = torch.full_like(logits_NV[:, 0], settings.temperature(step))
            step_N = torch.full_like(key_N, passes)
            where = key_N, step_N, position_N, known_1V.expand(len(hidden), -1), windows
            found = propose(lm, logits_NV, config, temperature_N, *where)
            refuse_nan(found.entropy_N)
            best, entropy_1N = found.decision.token_N.tolist(), found.entropy_N[None]
            passes += 1
            recent = earlier[max(step - settings.stability_threshold, 0) :]
            stable = recent == [best] * settings.stability_threshold
            confident = is_confident(
                entropy_1N, position_N.new_tensor([len(hidden)]), settings.confidence_threshold
            )
            is_last = (stable and bool(confident)) or step == settings.max_denoising_steps - 1
            kept_N = accept(entropy_1N, settings.entropy_bound)[0] & (not is_last)
            if found.drawn_log_prob_N is not None:
                kept = torch.where(kept_N, found.drawn_N, -1).tolist()
                log_probs = torch.where(kept_N, found.drawn_log_prob_N, 0).tolist()
                at = hidden[0] - request.start, canvas_N.tolist()
                canvas_steps.append(CanvasStep(*at, kept, log_probs, settings.temperature(step)))
            if is_last:
                break
            earlier.append(best)
            renewed_N = random_tokens(lm, config.seed, key_N, step_N + 1, position_N)
            canvas_N = torch.where(kept_N, found.drawn_N, renewed_N)
            if found.soft_ND is not None:  # of a token that is given, its own embedding
                soft_1TD = lm.model.get_input_embeddings()(shown_1T)
                soft_1TD[0, position_N] = found.soft_ND
        for index, position in enumerate(hidden):
            row = (None if each is None else each[index : index + 1] for each in found.decision)
            decided[position] = Decision(*row)  # type: ignore[arg-type]
            ids[position], steps[position] = best[index], passes - 1
        if request.stop_at_eos and not set(lm.eos_token_ids).isdisjoint(ids[request.start : stop]):
            break
    trace = _trace(request, config, ids, steps, decided, passes)
    trace.canvas_steps = canvas_steps
    return trace


def _trace(
    request: Request,
    config: SamplerConfig,
    ids: list[int],
    steps: list[int],
    revealed: dict[int, Decision],
    passes: int,
) -> Trace:
    """What was sampled, by the decision at each revealed position."""
    start, decisions = request.start, [revealed.get(at) for at in range(request.start, request.length)]

    def record(field: str) -> list[float]:
        return [0.0 if each is None else float(getattr(each, field)) for each in decisions]

    def most_probable(which: str, count: int) -> tuple[list[list[int]], list[list[float]]]:
        fields = f"{which}_id_NK", f"{which}_log_prob_NK"
        parts = [[getattr(each, field) for field in fields] if each else [None, None] for each in decisions]
        ids, log_probs = (
            [[] if values_NK is None else values_NK[0, :count].tolist() for values_NK in column]
            for column in zip(*parts, strict=True)
        )
        if which == "forbidden":  # the constraint may forbid fewer
            log_probs = [[each for each in row if each > -math.inf] for row in log_probs]
        return [row[: len(known)] for row, known in zip(ids, log_probs, strict=True)], log_probs

    trace = Trace(ids[start:], steps[start:], record("log_prob_N"), forward_passes=passes)
    if config.trace:
        trace.sampled_log_probs, trace.entropies = record("sampled_log_prob_N"), record("entropy_N")
    if config.top_log_probs:
        trace.top_ids, trace.top_log_probs = most_probable("top", config.top_log_probs)
    if config.top_forbidden:
        forbidden = most_probable("forbidden", config.top_forbidden)
        trace.forbidden_ids, trace.forbidden_log_probs = forbidden
    return trace


def _speculate(
    lm: DiffusionLM, verifier: DiffusionLM | None, request: Request, config: SamplerConfig
) -> Trace:
    """Tokens of the verifier, or of the model's causal reading, one after the other. A round ends with the
    first that is not its draft."""
    ids = list(request.prompt)
    steps: list[int] = [-1] * request.start
    decisions: dict[int, Decision] = {}
    key_1, causal = torch.tensor([request.key], device=lm.device), verifier or lm.as_causal()
    tree = tree_of(lm, config)
    # of each position the candidates, and the distributions that they were drawn from
    drafts: list[list[tuple[Tensor, Tensor]]] = []
    passes = num_drafted = num_accepted = 0
    ended = False
    while not ended:
        num_drafted += tree.num_drafts(len(drafts))
        node = 0
        for candidates in [*drafts, []]:
            logits_1V = causal.logits(torch.tensor([[*ids, lm.mask_token_id]], device=lm.device))[:, -1]
            position_1 = torch.tensor([len(ids)], device=lm.device)
            present_1V = torch.zeros_like(logits_1V, dtype=torch.bool)
            present_1V[:, ids] = True
            offered = [
                (torch.zeros_like(key_1), *candidate)
                for candidate, _ in zip(candidates, tree.children[node], strict=False)
            ]
            decision, rank_1 = verify(logits_1V, offered, config, key_1, position_1, present_1V)
            decisions[len(ids)] = decision
            ids, steps = [*ids, int(decision.token_N)], [*steps, passes]
            num_accepted += int(rank_1 >= 0)
            ended = len(ids) == request.length or (request.stop_at_eos and ids[-1] in lm.eos_token_ids)
            if ended or rank_1 < 0:
                break
            node = tree.children[node][int(rank_1)]
        passes += 1
        drafts = [] if ended else _drafts(lm, request, ids, tree, config, seen=len(ids) - (verifier is None))
    rest = request.length - len(ids)
    canvas, steps = [*ids, *[lm.mask_token_id] * rest], [*steps, *[-1] * rest]
    trace = _trace(request, config, canvas, steps, decisions, passes)
    trace.num_drafted, trace.num_accepted = num_drafted, num_accepted
    return trace


def _drafts(
    lm: DiffusionLM, request: Request, ids: list[int], tree: Tree, config: SamplerConfig, seen: int
) -> list[list[tuple[Tensor, Tensor]]]:
    """Candidates of the next tokens, given the first `seen` ones: with a verifier all, else all but the last.
    There the model sees a mask, because the engine drafts in the pass that verifies, before it is known which
    draft is refused."""
    count = min(num_drafts(lm, config), request.length - len(ids))
    num_masks = min(num_drafts(lm, config) + 1, request.length - seen)
    logits_TV = lm.forward(draft_inputs(lm, ids[:seen], num_masks))[0]
    drafts = []
    for position in range(len(ids), len(ids) + count):
        logits_1V = logits_TV[position - int(lm.logit_shift)][None]
        present_1V = torch.zeros_like(logits_TV[:1], dtype=torch.bool)
        present_1V[:, ids] = True
        key_1, position_1 = (torch.tensor([number], device=lm.device) for number in (request.key, position))
        draft_1K, drafted_1KV = draw_drafts(logits_1V, tree.width, config, key_1, position_1, present_1V)
        drafts.append(list(zip(draft_1K.unbind(1), drafted_1KV.unbind(1), strict=True)))
    return drafts


def _logits(
    lm: DiffusionLM, request: Request, ids: list[int], hidden: list[bool], config: SamplerConfig
) -> Tensor:
    """Logits [T, V]; with guidance, moved away from the logits with a hidden prompt."""
    hidden_1T = torch.tensor([hidden], device=lm.device)
    logits_TV = lm.logits(torch.tensor([ids], device=lm.device), hidden_BT=hidden_1T)[0]
    if config.cfg_scale:
        unconditional = [
            token if was_hidden else lm.mask_token_id
            for token, was_hidden in zip(ids, request.hidden, strict=False)
        ]
        unconditional_TV = lm.logits(torch.tensor([unconditional], device=lm.device), hidden_BT=hidden_1T)[0]
        logits_TV = guide(logits_TV, unconditional_TV, config.cfg_scale)
    return logits_TV


def _decide(
    lm: DiffusionLM,
    request: Request,
    ids: list[int],
    hidden: list[bool],
    block: tuple[int, int],
    logits_TV: Tensor,
    step: int,
    config: SamplerConfig,
) -> dict[int, Decision]:
    """The decision at every hidden position of the block, given the request's constraint if there is one."""
    positions = [position for position in range(*block) if hidden[position]]
    position_N = torch.tensor(positions, device=lm.device)
    present_NV = torch.zeros_like(logits_TV[position_N], dtype=torch.bool)
    present_NV[:, [token for token, is_hidden in zip(ids, hidden, strict=True) if not is_hidden]] = True
    where = (
        torch.full_like(position_N, request.key),
        torch.full_like(position_N, step),
        position_N,
        present_NV,
    )
    if request.gaps:
        decision = decide_given(
            logits_TV[position_N], config, *where, windows_of(request.gaps, block, ids, hidden, lm.device)
        )
    else:
        decision = decide(logits_TV[position_N], config, *where)
    parts = {name: values_N.split(1) for name, values_N in decision._asdict().items() if values_N is not None}
    return {
        position: Decision(**{name: each[n] for name, each in parts.items()})
        for n, position in enumerate(positions)
    }


def _unlikely(
    lm: DiffusionLM,
    logits_TV: Tensor,
    ids: list[int],
    hidden: list[bool],
    position_N: Tensor,
    key: int,
    step: int,
    config: SamplerConfig,
) -> list[int]:
    """The visible positions that may be hidden again, the first to be hidden first."""
    assert config.revise is not None
    ids_1T, position_N = torch.tensor([ids], device=lm.device), position_N.to(lm.device)
    if config.revise.by == "quality":  # in a pass of its own
        assert lm.quality_head is not None
        inputs = lm.noised_inputs(ids_1T, hidden_BT=torch.tensor([hidden], device=lm.device))
        with lm.capturing() as seen:
            lm.forward(replace(inputs, index_N=position_N))
        log_prob_N = logsigmoid(lm.quality_head(seen[0]))
    else:
        log_prob_N = present_log_probs(logits_TV[position_N], ids_1T[0, position_N])
    key_N, step_N = torch.full_like(position_N, key), torch.full_like(position_N, step)
    priority_N = doubts(log_prob_N, config.revise, config.seed, key_N, step_N, position_N)
    ranked = sorted(
        (-priority, position)
        for priority, position in zip(priority_N.tolist(), position_N.tolist(), strict=True)
    )
    return [position for negative, position in ranked if negative < math.inf]


def _num_accepted(order: list[int], decisions: dict[int, Decision], config: SamplerConfig) -> int:
    """The number of tokens that this step reveals by threshold, factor or entropy bound."""
    log_probs = [float(decisions[position].priority_N) for position in order]
    if config.threshold is not None:
        accepted = [math.exp(log_prob) >= config.threshold for log_prob in log_probs]
    elif config.factor is not None:
        accepted = [
            math.exp(log_prob) >= 1 - config.factor / (n + 1) for n, log_prob in enumerate(log_probs, start=1)
        ]
    else:
        left_out = int(config.entropy_rule == "sum-minus-max")
        sums = [-sum(log_probs[: n + 1 - left_out]) for n in range(len(log_probs))]
        waits = torch.finfo(torch.float32).min  # the priority of tokens of `reveal_last`
        accepted = [
            of <= (config.entropy_bound or 0.0) and log_prob > waits
            for of, log_prob in zip(sums, log_probs, strict=True)
        ]
    return max(1, sum(accepted))
