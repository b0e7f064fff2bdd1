"""A record beside the reference, stage by stage in the order of the data: the first stage that differs is the answer.

Each stage has one limit for each precision, beside it. What a stage is given is what the record says, so that a difference in
one stage makes none in the next.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from plumbob.doctor import explain
from plumbob.doctor.explain import Conditions, Scored, slices
from plumbob.doctor.measuring import entries
from plumbob.doctor.record import LossTrial, Rollout, Row, Settings, StepRecord, TrainedRow, Update
from plumbob.doctor.reference import formulas
from plumbob.doctor.reference import rows as reference
from plumbob.doctor.reference.model import Live, Plain, load, of_tokens, plain_name

Limit = dict[str, float]
"""Precision -> the largest difference of a healthy run."""


@dataclass
class Outcome:
    """What a stage found."""

    stage: str
    """A stage of `plumbob.doctor.findings`."""
    check: str
    """A statement that is true in a healthy run."""
    verdict: Literal["pass", "fail", "not examined"] = "pass"
    gap: float = 0.0
    limit: float = 0.0
    evidence: str = ""
    """The numbers; of a stage that was not examined, why."""
    cause: str | None = None
    what: str = ""
    """The condition that gives these numbers; "" if none does."""

    def fail(self, cause: str, evidence: str = "", what: str = "") -> None:
        self.verdict, self.cause, self.what, self.evidence = "fail", cause, what, evidence or self.evidence

    def explained(self, case: Conditions, seen: Any, due: Any, general: str, noise: float = 0.0) -> None:
        """Fail for the condition that explains the gap, or else for the stage's general cause. `noise`: see `explain`."""
        cause, what = explain.explain(case, seen, due, noise) or (general, "")
        self.fail(cause, what=what)

    def skip(self, why: str) -> None:
        self.verdict, self.evidence = "not examined", why


@dataclass
class Examined:
    """What is examined, and what it is compared with."""

    record: StepRecord
    plain: Plain | None = None
    """The model with the weights that the step began with; None if they are not known any more."""
    tokenizer: Any = None
    live: Live | None = None
    rows: int = 24
    """Number of rows whose log-probabilities are computed."""
    seed: int = 0
    previous: StepRecord | None = None
    """The record of the step before, if it was recorded."""
    apart: float = 0.0
    """Nats by which the trainer's log-probabilities are apart from the plain model's, when they were compared."""

    @property
    def precision(self) -> str:
        return self.record.settings.precision

    @functools.cached_property
    def random(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    @functools.cached_property
    def rollouts(self) -> dict[str, Rollout]:
        return {rollout.name: rollout for rollout in self.record.rollouts}

    @functools.cached_property
    def drawn(self) -> list[int]:
        """Rows drawn at random, so that each member number, the longest and the shortest row are among them."""
        rows = self.record.rows
        order = [int(i) for i in self.random.permutation(len(rows)) if rows[int(i)].loss_mask.any()]
        first = {rows[i].member: i for i in reversed(order)}
        by_length = sorted(order, key=lambda i: len(rows[i].token_ids))
        return list(dict.fromkeys([*by_length[-1:], *by_length[:1], *first.values(), *order]))[: self.rows]

    @functools.cached_property
    def before(self) -> dict[int, list[int]]:
        """Index of a row -> those of the rows before it in its microbatch."""
        passes: dict[int, list[int]] = defaultdict(list)
        for t in self.record.updates[0].trained if self.record.updates else ():
            passes[t.microbatch].append(t.row)
        return {row: those[:k] for those in passes.values() for k, row in enumerate(those)}

    def truth(self, row: Row) -> reference.Truth | None:
        rollout = self.rollouts.get(row.rollout)
        return reference.row_of(rollout.requests) if rollout is not None and rollout.requests else None


Judge = Callable[[Examined, Outcome], None]
Stage = Callable[[Examined], Outcome]
STAGES: list[Stage] = []
"""In the order of the data. What a run that is under way shows beside them is `known_change`."""


def _stage(name: str, check: str, limit: float = 0.0) -> Callable[[Judge], Stage]:
    """Makes a stage of a function that is given what is examined, and the outcome, which passes unless it is changed."""

    def made(judge: Judge) -> Stage:
        @functools.wraps(judge)
        def stage(x: Examined) -> Outcome:
            out = Outcome(name, check, limit=limit)
            judge(x, out)
            if out.verdict == "pass" and not out.evidence:
                out.skip("nothing of it was recorded")
            return out

        STAGES.append(stage)
        return stage

    return made


# 1. Rows


@_stage("rows", "prompts are what the chat template makes of the conversation")
def prompts(x: Examined, out: Outcome) -> None:
    played = [r for r in x.record.rollouts if r.requests and r.messages]
    if x.tokenizer is None or not played:
        return out.skip("no tokenizer or no requests")
    header = reference.header_of(x.tokenizer, played[0])
    missing = Counter(what for rollout in played for what in _lacks(x, rollout, header))
    out.gap, out.evidence = missing.total(), f"all prompts of {len(played)} rollouts are"
    if missing:
        what = missing.most_common(1)[0][0]
        out.fail("prompt-incomplete", f"{missing.total()} of {len(played)} rollouts have {what}", what)


def _lacks(x: Examined, rollout: Rollout, header: list[int]) -> Iterator[str]:
    """What is wrong with a rollout's prompts."""
    made, first = reference.prompts(x.record, rollout, x.tokenizer), rollout.requests[0].prompt_ids
    fits = next((name for name, ids in made if np.array_equal(ids, first)), None)
    if fits:
        yield f"a prompt without {fits}"
    elif fits is None:
        # A template without a place for tools may have them in a message of its own, which is no conversation of the record.
        tools = x.record.tools[rollout.tools] if rollout.tools >= 0 else []
        names, text = [str(t.get("function", t).get("name", "")) for t in tools], x.tokenizer.decode(first)
        whole, without = (reference.render(x.tokenizer, reference.opening(rollout), given) for given in (tools, ()))
        if whole != without or not names or not all(name in text for name in names):
            yield "a first prompt that is another one than the template's"
    if header and any(not np.array_equal(r.prompt_ids[-len(header) :], header) for r in rollout.requests):
        yield "a prompt without the header that opens the assistant's turn"


@_stage("rows", "rows are what was sampled: ids, loss mask and log-probabilities")
def rows(x: Examined, out: Outcome) -> None:
    record = x.record
    known = [(row, truth) for row in record.rows if (truth := x.truth(row)) is not None]
    if not known:
        return out.skip("no requests were recorded")
    made = explain.made
    wrong = [(r, t) for r, t in known if made(r.token_ids, r.loss_mask) != made(t.token_ids, t.loss_mask)]
    out.gap, out.evidence = len(wrong), f"{len(known)} rows"
    if wrong:
        same_ids = sum(np.array_equal(r.token_ids, t.token_ids) for r, t in wrong)
        of = [x.rollouts[r.rollout] for r, _ in wrong]
        out.evidence = f"{len(wrong)} of {len(known)} rows are other ones, {len(wrong) - same_ids} of them in their ids"
        seen = [made(r.token_ids, r.loss_mask) for r, _ in wrong]
        for what, rows_ in explain.of_rows([t for _, t in wrong], of, record, x.tokenizer).items():
            if sum(a != b for a, b in zip(seen, rows_, strict=True)) <= explain.REST * len(wrong):
                return out.fail("prompt-incomplete", what=what)
        for what, mask in explain.MASKS.items():
            if seen == [made(t.token_ids, mask(list(t.loss_mask))) for _, t in wrong]:
                return out.fail("loss-mask-wrong", what=what)
        if Counter(seen) == Counter(made(t.token_ids, t.loss_mask) for _, t in wrong):
            return out.fail("rewards-of-other-rollouts", f"{out.evidence}, and each is the row of another rollout")
        return out.fail("loss-mask-wrong" if same_ids == len(wrong) else "row-not-what-was-sampled")
    pairs = [(r.sampling_logprobs, t.logprobs) for r, t in known if r.sampling_logprobs is not None]
    other = sum(not np.allclose(a, b, 0, 1e-6) for a, b in pairs)
    if other:
        told = f"the sampling log-probabilities of {other} of {len(known)} rows are not those of the engine"
        out.fail("row-not-what-was-sampled", told)


# 2. Log-probabilities and draws

LOGPROB: Limit = {"float32": 2e-5, "bfloat16": 0.03}
"""Nats, on average."""
NO_WEIGHTS = "the step's first weights are not known"
NOISE = 0.5
"""Nats that dropout makes at most, on average."""
DROPOUT = 0.2
"""Share of an adapter that settings may drop without being the answer."""
TOKEN: Limit = {"float32": 2e-3, "bfloat16": 1.5}
"""Nats: the largest gap of one token."""


@_stage("logprobs", "the engine computes the model's log-probabilities")
def engine_logprobs(x: Examined, out: Outcome) -> None:
    pairs = []
    for i in x.drawn:
        truth, given = x.truth(x.record.rows[i]), x.record.rows[i].sampling_logprobs
        if truth is not None:
            pairs.append((Scored(truth.token_ids, truth.loss_mask, i), truth.logprobs))
        elif given is not None:
            pairs.append((_scored(x, i), given))
    # An engine that agreed before the first update computes rightly: what differs later is what it was sent.
    general = "weights-not-synced" if x.record.step and x.previous is not None else "engine-trainer-mismatch"
    _logprobs(x, out, pairs, general)
    if out.verdict == "fail" and not out.what:
        _requests(x, out)  # what is asked for explains what is done


@_stage("logprobs", "the trainer computes the model's log-probabilities")
def trainer_logprobs(x: Examined, out: Outcome) -> None:
    early = [i for i, rows in x.before.items() if len(rows) in (1, 2)]  # what a row adds to others shows soonest here
    every = list(dict.fromkeys(t.row for u in x.record.updates for t in u.trained))
    order = [*early[:6], *x.drawn, *(every[k] for k in x.random.permutation(len(every)))]
    has = [i for i in dict.fromkeys(order) if i >= 0 and x.record.rows[i].logprobs is not None][: x.rows]
    pairs = [(_scored(x, i), x.record.rows[i].logprobs) for i in has]
    differ = _logprobs(x, out, pairs, "engine-trainer-mismatch")
    x.apart = out.gap
    if out.verdict != "fail" or out.what or x.plain is None:
        return
    passes = {t.row: t.microbatch for update in x.record.updates[:1] for t in update.trained}
    known = {i: k > 0 for i, k in passes.items() if i in differ}
    first, later = ([differ[i] for i, late in known.items() if late is after] for after in (False, True))
    if first and later and not any(first) and np.mean(later) > 0.5:
        what = "weights that change between the microbatches of one update"
        return out.fail("normaliser-depends-on-microbatches", what=what)
    if x.live is not None:
        # Without gradients, nothing is dropped at random.
        still, plain = (of([(s.ids, s.at) for s, _ in pairs[:6]]) for of in (x.live.score, x.plain.every))
        if np.abs(np.concatenate(still) - np.concatenate(plain)).mean() <= out.limit:
            # Dropout adds noise; a large difference is another mistake between the scores and the loss.
            cause = "dropout-in-training" if out.gap < NOISE else "loss-differs-from-settings"
            return out.fail(cause, what="passes with gradients alone")
    dropped = x.record.settings.lora_dropout
    if 0 < dropped <= DROPOUT:
        out.skip(f"the adapter's dropout moves them by {out.gap:.2g} nats")
    elif dropped:
        out.fail("dropout-in-training")


def _scored(x: Examined, row: int) -> Scored:
    return Scored(x.record.rows[row].token_ids.tolist(), x.record.rows[row].loss_mask.tolist(), row)


def _logprobs(x: Examined, out: Outcome, given: Iterable[tuple[Scored, Any]], general: str) -> dict[int, bool]:
    """Compare log-probabilities [n] of rows with the plain model's; index of each row -> whether they differ."""
    pairs = [(s, np.asarray(own, float)) for s, own in given if len(own) == sum(s.at[1:])]
    if x.plain is None or not pairs:
        out.skip(NO_WEIGHTS if x.plain is None else "no log-probabilities were recorded")
        return {}
    expected = x.plain.every([(s.ids, s.at) for s, _ in pairs])
    gaps = [np.abs(o - e) for (_, o), e in zip(pairs, expected, strict=True)]
    every = np.concatenate(gaps)
    out.gap, out.limit, most = float(every.mean()), LOGPROB[x.precision], TOKEN[x.precision]
    out.evidence = f"{out.gap:.2g} nats on average, {every.max():.2g} at most; {len(every)} tokens of {len(pairs)} rows"
    differ = [not (g.mean() <= out.limit and g.max() <= most) for g in gaps]
    if np.isfinite(every).all() and out.gap <= out.limit and every.max() <= most:
        return {}
    # Only the rows that differ are explained: of a part of the rows, the condition holds for that part alone.
    apart = [k for k, one in enumerate(differ) if one] or [*range(len(gaps))]
    few = sorted(apart, key=lambda k: (len(x.before.get(pairs[k][0].row, ())), len(pairs[k][0].ids)))[:6]
    seen, right = [pairs[k][1] for k in few], [expected[k] for k in few]
    others = [[t for i in x.before.get(pairs[k][0].row, ()) for t in x.record.rows[i].token_ids.tolist()] for k in few]
    case = explain.of_logprobs(x.plain, [pairs[k][0] for k in few], others, seen, right)
    if len(apart) < len(pairs):
        out.evidence += f"; {len(apart)} of these rows differ"
    out.explained(case, np.concatenate(seen), np.concatenate(right), general, out.limit)
    return {s.row: one for (s, _), one in zip(pairs, differ, strict=True)}


LIKELIER = 16.0
"""Nats: by chance one examination in nine million has tokens that are so much likelier under one other distribution."""
DRAWN = 1536
"""Sampled tokens that are read: with the rows that hold so many, a wrong temperature shows by far."""
COPIES = -25.0
"""Nats: no two rollouts are equal by chance that are each less likely than this."""


@_stage("sampling", "tokens are drawn as the settings say", limit=LIKELIER)
def draws(x: Examined, out: Outcome) -> None:
    s = x.record.settings
    _requests(x, out)
    if out.cause:
        return
    if x.plain is None or s.top_p < 1 or s.top_k or s.min_p:
        return out.skip(NO_WEIGHTS if x.plain is None else "the settings leave tokens out")
    likelier: dict[tuple[str, str], float] = defaultdict(float)
    truths = [truth for i in x.drawn if (truth := x.truth(x.record.rows[i])) is not None]
    before = itertools.accumulate((sum(t.loss_mask) for t in truths), initial=0)
    read = [(t.token_ids, t.loss_mask) for t, count in zip(truths, before, strict=False) if count < DRAWN]
    with torch.no_grad():
        for i, logits, tokens in itertools.chain.from_iterable(x.plain.scored(read)):
            plain, seen = of_tokens(logits, tokens), explain.seen_before(*read[i], logits.shape[-1])
            for name, other in explain.alternatives(logits, tokens, seen, s.temperature).items():
                likelier[name] += float((other - plain).sum(dtype=torch.double))
    if not likelier:
        return out.skip("no requests were recorded")
    (cause, what), out.gap = max(likelier.items(), key=lambda one: one[1])
    out.evidence = f"under another distribution drawn tokens are likelier by {out.gap:.2g} nats in all ({what})"
    if not out.gap <= out.limit:
        out.fail(cause, what=what)


def _requests(x: Examined, out: Outcome) -> None:
    """Rollouts are no copies, and requests ask for what the settings say, each with its own seed, and end where they should."""
    s, seen = x.record.settings, Counter[tuple[str, tuple[int, ...]]]()
    for rollout in x.record.rollouts:
        if sum(float(r.logprobs.sum()) for r in rollout.requests) < COPIES:
            seen[rollout.task, tuple(t for r in rollout.requests for t in r.token_ids.tolist())] += 1
    seeds = [seed for r in x.record.rollouts if r.requests and (seed := r.requests[0].sampling.seed) is not None]
    copies, alike = seen.total() - len(seen), len(seeds) - len(set(seeds))
    if copies or alike:
        told = f"{copies} of {len(x.record.rollouts)} rollouts copy others, not by chance; {alike} have the seed of another"
        return out.fail("groups-without-variety", told, "rollouts that are copied or have one seed")
    end = None if x.tokenizer is None else reference.end_of_turn(x.tokenizer)
    for request in (request for rollout in x.record.rollouts for request in rollout.requests):
        asked, ids = request.sampling, request.token_ids.tolist()
        stops = set(asked.stop_token_ids)
        if end is not None and end not in stops:
            told = f"requests end at {asked.stop_token_ids}, the template ends turns with {end}"
            return out.fail("stop-token-wrong", told)
        if stops & set(ids[:-1]) or (request.finish_reason == "stop" and not stops & set(ids[-1:])):
            return out.fail("stop-token-wrong", "a turn goes on after a stop token, or ends without one")
        if (asked.temperature, asked.top_p, asked.top_k) != (s.temperature, s.top_p, s.top_k):
            told = f"a request asks for temperature {asked.temperature:g}, top-p {asked.top_p:g}, top-k {asked.top_k}"
            cause = "temperature-not-applied" if asked.temperature != s.temperature else "sampling-altered"
            return out.fail(cause, told)


# 3. Rewards and advantages


@_stage("advantages", "rows have their rollouts' rewards, and groups are of one task and whole")
def pairing(x: Examined, out: Outcome) -> None:
    record = x.record
    pairs = [(row, x.rollouts[row.rollout]) for row in record.rows if row.rollout in x.rollouts]
    if not pairs:
        return out.skip("rows and rollouts cannot be matched")
    other = sum(not np.isclose(row.reward, rollout.reward, 1e-9, 1e-9, equal_nan=True) for row, rollout in pairs)
    tasks: dict[str, set[str]] = defaultdict(set)
    for row, rollout in pairs:
        tasks[row.group].add(rollout.task)
    mixed = sum(len(of) > 1 for of in tasks.values())
    large = sum(n > record.settings.group_size for n in Counter(row.group for row in record.rows).values())
    out.gap, out.evidence = other + mixed, f"{len(pairs)} rows in {len(tasks)} groups"
    if other:
        told = f"{other} of {len(pairs)} rows have another reward than their rollout"
        return out.fail("rewards-of-other-rollouts", told)
    if mixed or (large and record.settings.group_size):
        told = f"{mixed} of {len(tasks)} groups hold different tasks; {large} are too large"
        return out.fail("advantages-wrong", told)
    cut = sum(row.truncated != rollout.truncated for row, rollout in pairs)
    if cut and record.settings.overlong != "keep":
        told = f"{cut} of {len(pairs)} rows are marked as cut off where their rollouts are not, or the other way round"
        out.fail("signal-left-out", told)


ADVANTAGE = 1e-5
"""Of the largest advantage, in every precision: advantages are computed in float64 or float32."""


@_stage("advantages", "advantages follow from the rewards by the settings", limit=ADVANTAGE)
def advantage(x: Examined, out: Outcome) -> None:
    record = x.record
    s = record.settings
    if s.random_rewards:
        return out.skip("rewards are drawn by lot")
    if "advantages" in s.own:
        return out.skip(f"rewards or advantages are the user's own: {s.own['advantages']}")
    if s.components != "sum_then_normalize" and s.scale != "none":
        return out.skip("each component of the reward is normalised by itself, which is not computed a second time")
    numbers = [i for i, row in enumerate(record.rows) if math.isfinite(row.reward)]
    known = [record.rows[i] for i in numbers]
    given = {t.row: float(t.advantages[0]) for u in record.updates for t in u.trained if len(t.advantages)}
    expected, own = formulas.advantages(known, s), np.array([row.advantage for row in known])
    late = np.array([given.get(i, row.advantage) for i, row in zip(numbers, known, strict=True)])
    scale = max(1e-12, float(np.abs(expected).max(initial=0)), float(np.abs(own).max(initial=0)))
    rounded = _rounded_rewards(known, s) / scale
    for seen, where in ((own, "advantages"), (late, "advantages that the loss is given")):
        gaps = np.maximum(np.abs(seen - expected) / scale - rounded, 0)
        out.gap, wrong = float(gaps.max(initial=0)), int((~(gaps <= ADVANTAGE)).sum())
        out.evidence = f"{wrong} of {len(known)} {where} differ, the most by {out.gap:.2g} of the largest one"
        if wrong and len(known) < len(record.rows):
            lost = len(record.rows) - len(known)
            return out.fail("not-finite", f"{lost} of {len(record.rows)} rewards are no finite numbers")
        if wrong:
            case = explain.of_advantages(known, s, seen, expected)
            return out.explained(case, seen, expected, "advantages-wrong", 1e-6 * scale)


def _rounded_rewards(rows: Sequence[Row], settings: Settings) -> np.ndarray:
    """[B] what float32 can change of an advantage: a division makes much of the rounding of nearly equal rewards."""
    rewards, groups = np.array([row.reward for row in rows]), np.array([row.group for row in rows])
    rounding = 4 * np.spacing(np.float32(np.abs(rewards).max(initial=0)))
    if settings.scale == "none":
        return np.full(len(rows), rounding)
    batch = settings.scale.startswith("batch")
    spread = [float(np.std(rewards if batch else rewards[groups == row.group])) for row in rows]
    return rounding / (np.array(spread) + settings.scale_epsilon)


# 4. Loss


@_stage("loss", "the KL term compares with the model with which the run began")
def reference_policy(x: Examined, out: Outcome) -> None:
    record = x.record
    known = [i for i, row in enumerate(record.rows) if row.reference_logprobs is not None]
    before = x.previous.updates if x.previous else []
    if not record.settings.kl_beta:
        out.evidence = "there is no KL term"
        return
    if record.step and not before:
        return out.skip("the step before was not recorded")
    if record.step:
        # What the policy computes after an update is no longer what the reference computes.
        moved = any(len(t.after) and (t.after != t.before).any() for u in before for t in u.tensors)
        pairs = [(record.rows[i].logprobs, record.rows[i].reference_logprobs) for i in known]
        same = sum(a is not None and b is not None and np.array_equal(a, b) for a, b in pairs)
        out.gap, out.evidence = same, f"{same} of {len(known)} rows have the policy's own log-probabilities"
        return out.fail("kl-term-wrong") if moved and 2 * same > len(known) else None
    _logprobs(x, out, [(_scored(x, i), record.rows[i].reference_logprobs) for i in known[: x.rows]], "kl-term-wrong")
    if out.verdict == "fail" and out.cause != "temperature-not-applied":
        out.cause = "kl-term-wrong"


WEIGHT = 1e-4
"""Relative difference of a weight, and of an importance weight."""
SLOPE: Limit = {"float32": 1e-3, "bfloat16": 2e-3}
"""Of the largest slope."""


@_stage("loss", "tokens have the weights that the settings give them", limit=WEIGHT)
def weights(x: Examined, out: Outcome) -> None:
    record = x.record
    s = record.settings
    for update in record.updates:
        members = [record.rows[i] for i in update.members if i >= 0]
        if len(members) < len(update.members) or any(t.row < 0 for t in update.trained):
            return out.fail("row-not-what-was-sampled", "a row of the update is none of the step's")
        expected = dict(zip(update.members, formulas.weights(members, record.rows, s), strict=True))
        due = {i for i in update.members if expected[i] and (record.rows[i].advantage or s.kl_beta > 0)}
        left = due - {t.row for t in update.trained}
        if record.processes == 1 and update.trained and left:
            told = f"{len(left)} of {len(due)} rows with an advantage are not trained"
            return out.fail("loss-differs-from-settings", told)
        trained = [t for t in update.trained if len(t.weights)]
        if not trained:
            continue
        seen, want = np.array([t.weights.mean() for t in trained]), np.array([expected[t.row] for t in trained])
        uneven = max(float(np.ptp(t.weights)) / max(float(np.abs(t.weights).max()), 1e-30) for t in trained)
        out.gap = max(out.gap, float((np.abs(seen - want) / np.maximum(np.abs(want), 1e-30)).max()), uneven)
        out.evidence = f"weights differ by at most {out.gap:.2g}"
        if not out.gap <= WEIGHT:
            case = explain.of_microbatches(seen, want, np.array([t.microbatch for t in trained]))
            return out.explained(case, seen, want, "loss-differs-from-settings", 1e-9)


@_stage("loss", "importance weights are the trainer's probabilities over the engine's", limit=10 * WEIGHT)
def corrections(x: Examined, out: Outcome) -> None:
    for t in (t for u in x.record.updates for t in u.trained):
        engine = x.record.rows[t.row].sampling_logprobs
        if engine is None or len(engine) != len(t.old_logprobs):
            continue
        expected = formulas.corrections(t.old_logprobs, engine, x.record.settings)
        # At a bound, rounding may fall on either side of it.
        apart = np.sort(np.abs(t.corrections - expected))[: max(1, int(0.99 * len(expected)))]
        out.gap = max(out.gap, float(apart.max(initial=0)))
        out.evidence = f"they differ by at most {out.gap:.2g}"
    if not out.gap <= out.limit:
        out.fail("loss-differs-from-settings")


COLUMNS = ("advantages", "weights", "corrections", "logprobs", "old_logprobs")
"""Fields of the record that the loss is given, in the order of `formulas.Tokens`."""


@_stage("loss", "the loss has the slopes of its formula")
def slopes(x: Examined, out: Outcome) -> None:
    if "loss" in x.record.settings.own:
        return out.skip(f"the loss is the user's own: {x.record.settings.own['loss']}")
    out.limit = SLOPE[x.precision]
    for update in x.record.updates:
        without = [t for t in update.trained if t.slopes is None and t.advantages.any() and t.weights.any()]
        if without:
            told = f"{len(without)} of {len(update.trained)} rows with an advantage have no slope"
            return out.fail("no-gradient", told)
        trained = [t for t in update.trained if t.slopes is not None and len(t.slopes)]
        if trained and _slopes_differ(x, out, trained):
            return
    trial = x.record.updates[0].trial if x.record.updates else None
    if trial is not None and _slopes_differ(x, out, [trial]):
        out.evidence += ", where log-probabilities are moved by up to 0.6 nats"


def _slopes_differ(x: Examined, out: Outcome, given: Sequence[TrainedRow | LossTrial]) -> bool:
    """Compare the slopes of trained rows, or those of the trial of the loss, with the formula's; whether they differ."""

    def column(name: str) -> np.ndarray:
        return np.concatenate([np.asarray(getattr(one, name), float) for one in given])

    trained = [one for one in given if isinstance(one, TrainedRow)]
    sizes = [len(one.weights) for one in given]
    microbatch = np.repeat([one.microbatch for one in trained] or [0], sizes)
    rows_ = np.repeat(np.arange(len(given)), sizes) if trained else column("rows").astype(int)
    apart = None if any(one.reference_logprobs is None for one in given) else column("reference_logprobs")
    tokens, observed = formulas.Tokens(*map(column, COLUMNS), rows_, apart), column("slopes")
    expected = formulas.slopes(tokens, x.record.settings)
    scale = float(np.abs(expected).max(initial=0)) or float(np.abs(observed).max(initial=0)) or 1.0
    gaps = np.abs(observed - expected) / scale
    out.gap = max(out.gap, float(gaps.max(initial=0)))
    wrong = int((~(gaps <= out.limit)).sum())
    out.evidence = f"slopes of {wrong} of {len(observed)} tokens differ, the most by {out.gap:.2g} of the largest one"
    # A ratio at a clip bound may round to either side of it.
    if wrong <= 0.002 * len(observed) and np.isfinite(gaps).all():
        return False
    if not np.isfinite(observed).all():
        out.fail("not-finite", f"{out.evidence}; some are no finite numbers")
        return True
    case = explain.of_slopes(tokens, x.record.settings, observed, expected, microbatch)
    out.explained(case, observed, expected, "loss-differs-from-settings", 1e-6 * scale)
    return True


# 5. Gradient and optimizer

GRADIENT: Limit = {"float32": 2e-3, "bfloat16": 0.15}
"""Of the norm of the sampled entries."""
ROUNDED = 2e-6
"""Nats by which log-probabilities in float32 are apart at most, if the weights are the same to the last bit."""


@_stage("gradient", "the gradient is that of the loss in every tensor")
def gradient(x: Examined, out: Outcome) -> None:
    s = x.record.settings
    update = x.record.updates[0] if x.record.updates else Update()
    if x.plain is None or not update.tensors or not update.trained:
        return out.skip("the step's first weights, or the gradient, are not known")
    if s.adapter and (x.live is None or s.lora_dropout):
        return out.skip("the adapter's first weights are not known" if x.live is None else "an adapter with dropout")
    parts: dict[int, list[Any]] = defaultdict(list)
    for t in update.trained:
        row = x.record.rows[t.row]
        if t.slopes is not None and t.slopes.any() and len(t.slopes) == row.loss_mask[1:].sum():
            parts[t.microbatch].append((row.token_ids.tolist(), row.loss_mask.tolist(), t.slopes))
    if not parts:
        return out.skip("no token has a slope")
    given = dict(x.live.tensors()) if s.adapter and x.live else {}
    whole = (x.plain.gradient(rows_, given) for rows_ in parts.values())
    places = [torch.from_numpy(t.indices) for t in update.tensors]
    found = [entries([own.get(plain_name(t.name)) for t in update.tensors], places) for own in whole]
    # A tensor without a gradient has one of 0.
    observed, *sampled = (
        np.concatenate([np.zeros(len(at)) if one is None else one for one, at in zip(own, places, strict=True)])
        for own in ([t.gradient for t in update.tensors], *found)
    )
    expected, tensors = np.sum(sampled, axis=0), slices({t.name: t.indices for t in update.tensors})
    if not expected.any() and not observed.any():
        return out.fail("no-gradient", "all of it is 0", "trained tensors on which no log-probability depends")
    out.gap = float(np.linalg.norm(observed - expected) / max(np.linalg.norm(expected), 1e-30))
    norm = np.linalg.norm
    sizes = {name: max(norm(expected[at]), norm(observed[at]), 1e-30) for name, at in tensors.items()}
    each = [(float(norm(observed[at] - expected[at]) / sizes[name]), name) for name, at in tensors.items()]
    worst = _worst(out, f"it differs by {out.gap:.2g}", each)
    out.limit = GRADIENT[x.precision]
    if x.precision == "float32":  # weights that the run has rounded before its first step give another gradient, too
        out.limit *= max(1.0, x.apart / ROUNDED)
    if out.gap <= out.limit and worst <= (20 * out.limit if x.precision == "float32" else 1.0):
        return
    earlier = x.previous.updates[-1].tensors if x.previous and x.previous.updates else []
    kept = [(t.name, t.indices.tolist(), t.gradient.tolist()) for t in earlier if t.gradient is not None]
    known = {(name, i): value for name, at, values in kept for i, value in zip(at, values, strict=True)}
    before = [known.get((t.name, i), math.nan) for t in update.tensors for i in t.indices.tolist()]
    case = explain.of_gradient(observed, sampled, np.array(before) if known else None)
    lost = any(expected[at].any() and not observed[at].any() for at in tensors.values())
    general = "no-gradient" if lost else "loss-differs-from-settings"
    out.explained(case, observed, expected, general, 1e-3 * float(np.abs(expected).max()))


def _worst(out: Outcome, told: str, each: Sequence[tuple[float, str]]) -> float:
    """The largest of the gaps of tensors, each with its name; what is told of all of them is completed by it."""
    gap, name = max(each)
    out.evidence = f"{told} of its size, by up to {gap:.2g} in one of {len(each)} tensors, {name}"
    return gap


UPDATE = 2e-2
"""Of the change, beyond what float32 rounds."""


@_stage("optimizer", "the optimizer has the tensors that the settings train")
def trained_tensors(x: Examined, out: Outcome) -> None:
    update = x.record.updates[0] if x.record.updates else Update()
    if x.plain is None or not update.tensors:
        return out.skip("the optimizer's tensors were not recorded")
    wanted, found = x.plain.trainable(), {plain_name(t.name) for t in update.tensors}
    missing = [name for name in wanted if name not in found]
    outside = [t.name for t in update.tensors if not math.isfinite(t.learning_rate)]
    out.gap, out.evidence = len(missing) + len(outside), f"{len(found)} tensors"
    if missing or outside:
        told = f"{len(missing)} of {len(wanted)} tensors are not trained, {len(outside)} are none of the optimizer's"
        told += f", such as {(missing or outside)[0]}"
        out.fail("no-gradient" if missing else "update-differs-from-settings", told)


@_stage("optimizer", "weights change as AdamW with the settings changes them", limit=UPDATE)
def update(x: Examined, out: Outcome) -> None:
    record = x.record
    if found := _replaced(x):
        return out.fail("update-differs-from-settings", found)
    for k, one in enumerate(record.updates):
        tensors = [t for t in one.tensors if t.gradient is not None and len(t.after)]
        norm = math.sqrt(sum(t.gradient_norm**2 for t in one.tensors))
        if not tensors or not math.isfinite(norm):
            continue
        change = functools.partial(formulas.change, tensors, norm, record.step, record.settings)
        observed, expected = np.concatenate([t.after.astype(float) - t.before for t in tensors]), change(1.0)
        rounding = np.concatenate([np.spacing(np.abs(t.before).astype(np.float32)) for t in tensors])
        apart = np.maximum(np.abs(observed - expected) - rounding, 0)
        gap = float(apart.sum() / max(np.abs(expected).sum(), 1e-30))
        out.gap, each = max(out.gap, gap), []
        for name, at in slices({t.name: t.before for t in tensors}).items():
            size = np.abs(expected[at]).sum()
            each.append((float(apart[at].sum() / size) if size > 0 else float(apart[at].sum() > 0), name))
        worst = _worst(out, f"in update {k + 1} of step {record.step + 1} the change differs by {gap:.2g}", each)
        if not (gap <= UPDATE and worst <= 10 * UPDATE):
            case = explain.of_update(change, observed)
            noise = 2 * float(rounding.max())
            return out.explained(case, observed, expected, "update-differs-from-settings", noise)


def _replaced(x: Examined) -> str:
    """What tells that weights are others when a step updates them than the step before has left them; "" if they are not."""
    left, found = {t.name: t for u in (x.previous.updates[-1:] if x.previous else ()) for t in u.tensors}, list[bool]()
    for now in x.record.updates[0].tensors if x.record.updates else ():
        if (then := left.get(now.name)) is not None and len(then.after):
            _, a, b = np.intersect1d(then.indices, now.indices, return_indices=True)
            found += (then.after[a] != now.before[b]).tolist()
    told = f"{sum(found)} of {len(found)} recorded weights are others when step {x.record.step + 1} updates them"
    return f"{told} than step {x.record.step} has left them" if 2 * sum(found) > len(found) else ""


# 6. Weight sync and the saved model

SERVED: Limit = {"float32": 1e-3, "bfloat16": 0.12}
"""Nats, on average."""
KNOWN: Limit = {"float32": 2.5e-4, "bfloat16": 0.06}
"""The same after a known change of all weights, of sampled tokens."""


@_stage("sync", "the engine serves the trained weights after the step")
def served(x: Examined, out: Outcome) -> None:
    out.limit = SERVED[x.precision]
    one = x.record.served
    if one is None or one.trained.shape != one.served.shape:
        return out.skip("what the engine serves was not recorded")
    out.gap = float(np.abs(one.trained - one.served).mean())
    out.evidence = f"engine and trainer differ by {out.gap:.2g} nats on fixed ids after the sync"
    if not out.gap <= out.limit:
        out.fail("weights-not-synced")


LARGE = 0.3
"""Nats by which a known change of the weights moves log-probabilities at least."""


def _change(x: Examined, plain: Plain, live: Live, seed: int) -> Mapping[str, torch.Tensor]:
    """Change all trained weights so far that log-probabilities of sampled tokens move by `LARGE` nats; the new weights.

    Of sampled ones, because a policy that is sure of its replies changes them far later than those of its prompts.
    """
    start = {n: t.detach().clone() for n, t in live.tensors().items()}
    scored = [(s.ids, s.at) for s in (_scored(x, i) for i in x.drawn[:4])]
    before, random, moved = np.concatenate(plain.every(scored)), torch.Generator().manual_seed(seed), start
    size = {n: 0.1 * (t.float().square().mean().sqrt().item() or 0.2) for n, t in start.items()}
    noise = {n: torch.randn(t.shape, generator=random).to(t) * size[n] for n, t in start.items()}
    for factor in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0):
        moved = {n: t + factor * noise[n] for n, t in start.items()}
        with plain.having(moved):
            if np.abs(np.concatenate(plain.every(scored)) - before).mean() >= LARGE:
                break
    with torch.no_grad():
        for name, tensor in live.tensors().items():
            tensor.copy_(moved[name])
    live.changed()
    return moved


def known_change(x: Examined) -> list[Outcome]:
    """A known change of all weights shows in the trainer, in what the engine samples and in what is saved."""
    limit = KNOWN[x.precision]
    sync = Outcome("sync", "a known change of the weights shows in what the engine samples", limit=limit)
    saved = Outcome("saved", "the saved model is the trained one", limit=limit)
    asked = [r.requests[0].prompt_ids.tolist() for r in x.record.rollouts if r.requests][:12]
    plain, live = x.plain, x.live
    if live is None or plain is None or not asked:
        for out in (sync, saved):
            out.skip("it takes a run that is under way, whose weights are changed for a moment")
        return [sync, saved]
    with live.undone():
        # Two changes, and an engine that caches prompts has those of the first.
        _change(x, plain, live, 1)
        live.sync()
        live.generate(asked, 4, 1)
        new = _change(x, plain, live, 2)
        live.sync()
        pairs = [(p, r) for p, r in zip(asked, live.generate(asked, 16, 2), strict=True) if r[0]]
        rows_ = [([*p, *ids], [False] * len(p) + [True] * len(ids)) for p, (ids, _) in pairs]
        with plain.having(new):
            expected = np.concatenate(plain.every(rows_))

        def judge(out: Outcome, observed: list[Any], cause: str) -> None:
            out.gap = float(np.abs(np.concatenate(observed) - expected).mean())
            out.evidence = f"it differs by {out.gap:.2g} nats from the plain model with the changed weights"
            if not out.gap <= out.limit:
                out.fail(cause)

        judge(sync, [np.array(logprobs) for _, (_, logprobs) in pairs], "weights-not-synced")
        with tempfile.TemporaryDirectory() as folder:
            live.save(Path(folder))
            try:
                model = load(dataclasses.replace(x.record.settings, model=folder))
                judge(saved, model.every(rows_), "saved-model-differs")
            except (OSError, ValueError, RuntimeError) as error:
                saved.fail("saved-model-differs", f"it cannot be loaded: {error}")
    live.sync()
    return [sync, saved]


def examine(x: Examined) -> list[Outcome]:
    """The outcomes of all stages up to the first that differs."""
    found: list[Outcome] = []
    for stage in STAGES:
        found.append(stage(x))
        if found[-1].verdict == "fail":
            return found
    return found + known_change(x)


def first(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The first stage that differs; None if none does."""
    return next((o for o in outcomes if o.verdict == "fail"), None)
