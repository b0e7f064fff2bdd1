"""The MuSiQue taskset: turns official records into multi-step retrieval tasks."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal, cast

import verifiers.v1 as vf
from plumbob.retrieval import check_name, check_reranker, folded
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from vf_musique.complete import MusiqueCompleteToolset
from vf_musique.metrics import share
from vf_musique.prompts import AnswerStyle, system_prompt
from vf_musique.records import Record
from vf_musique.rewards import F1_FLOOR, Gold, Weights, components, known_words, original_reward, shaped_reward
from vf_musique.sources import SYNTHETIC_ROWS, Synthetic, load_records, parse_spec
from vf_musique.submission import UNANSWERABLE, Submission, read_completion, read_tags
from vf_musique.tools import MusiqueState, MusiqueToolset, MusiqueToolsetConfig, ToolUse, retriever_of

RewardName = Literal["shaped", "original"]
_REFERENCE = re.compile(r"#([0-9]+)")
"""In a step of the gold decomposition: the answer of an earlier step, by its number."""


class Scoring(BaseModel):
    """How a rollout is scored; the module `rewards` defines the terms."""

    model_config = ConfigDict(frozen=True)

    reward: RewardName = "shaped"
    weights: Weights = Weights()
    grounding: float = Field(0.5, ge=0, le=1)
    hop_factor: bool = False
    f1_floor: float = Field(F1_FLOOR, ge=0, lt=1)
    blind_reading_cost: float = Field(1.0, ge=0, le=1)


class MusiqueTaskConfig(vf.TaskConfig):
    """The task's settings, copied from the taskset's by `make_task_config`, except the placement of `tools`."""

    tools: MusiqueToolsetConfig = MusiqueToolsetConfig()
    answer_style: AnswerStyle = "tags"
    scoring: Scoring = Scoring()


def _read_hops(value: Any) -> Any:
    """Parse hop counts, given as text "2,3", as a number, or as a list. Raises ValueError for other values."""
    if isinstance(value, str):
        value = [piece.strip() for piece in value.split(",") if piece.strip()]
    values = value if isinstance(value, list | tuple) else [value]
    if any(str(hops) not in ("2", "3", "4") for hops in values):
        raise ValueError(f'hops is a list of 2, 3 and 4, written "2,3"; got {value!r}')
    return tuple(sorted({int(hops) for hops in values}))


class MusiqueConfig(vf.TasksetConfig):
    task: MusiqueTaskConfig = MusiqueTaskConfig()  # ty: ignore[incompatible-mutable-override]
    datasets: str = "bdsaglam/musique,answerable"
    """Parts `path,name,split` joined by ";". Path: a hub dataset, a .jsonl or .parquet file, a directory with the
    official files, or "synthetic". Name: answerable (default) or full. Split: for example train[:100], or
    train+validation."""
    split: Literal["train", "validation"] = "train"
    """The split of parts that name none. It is ignored for a file, which is used whole."""
    seed: int = 0
    """Seed of the order, of the noise and of the synthetic questions."""
    shuffle: bool = True
    """Whether to shuffle. False keeps the source's order, which official scoring of predictions needs."""
    curriculum: bool = False
    """Sort the tasks by their number of hops, fewest first."""
    hops: Annotated[tuple[int, ...], BeforeValidator(_read_hops)] = ()
    """Use only questions with these numbers of hops, such as "2" or "2,3"; empty for all."""
    noise: float = Field(1.0, ge=0, le=1)
    """Probability with which each non-supporting paragraph is kept."""
    num_examples: int = -1
    """Number of tasks, selected after shuffling and before sorting by `curriculum`; -1 for all. A synthetic split has
    1000 rows, or as many as this setting or the bound of a slice requests, if that is more."""
    retriever: str = "bm25"
    """Name of the retriever: bm25, semantic, hybrid or golden, with the options that `plumbob.retrieval` defines."""
    max_top_k: int = Field(5, ge=1)
    """Largest number of documents that one search returns."""
    rerank_url: str | None = None
    """URL of a Cohere-style rerank service that reorders the retriever's results; $RERANK_API_KEY holds its token."""
    rerank_model: str | None = None
    """With `rerank_url`: model of the service, if it has several. Without: folder or hub name of a cross-encoder that
    reorders the retriever's results in this process."""
    answer_style: AnswerStyle = "tags"
    """How the model submits its answer: "tags" in its last message, or "complete" by calling that tool."""
    reward: RewardName = "shaped"
    """The reward: "shaped", or "original" (the predecessor's) for comparison."""
    weights: Weights = Weights()
    """Weights of the shaped reward, such as "f1=0.5,format=0"; components that are not named keep their default."""
    grounding: float = Field(0.5, ge=0, le=1)
    """Share of a correct answer's credit that depends on its citations, in [0, 1]."""
    hop_factor: bool = False
    """Multiply the shaped reward by hops / 4."""
    f1_floor: float = Field(F1_FLOOR, ge=0, lt=1)
    """F1 up to which an answer earns nothing in the shaped reward; the metric `f1` is the official one at any value."""
    blind_reading_cost: float = Field(1.0, ge=0, le=1)
    """Share of the reward for evidence that a rollout loses if it read all its documents by id, before any search had
    returned them; proportionally less if it read some of them so."""
    max_documents: int | None = Field(None, ge=1)
    """Number of different documents that the tools show in one rollout; None for no limit."""
    synthetic_paragraphs: int = Field(20, ge=4, le=200)
    """Number of paragraphs of a synthetic question."""

    @field_validator("datasets")
    @classmethod
    def _parses(cls, value: str) -> str:
        parse_spec(value)
        return value

    @field_validator("retriever")
    @classmethod
    def _exists(cls, value: str) -> str:
        check_name(value)
        return value

    @field_validator("num_examples")
    @classmethod
    def _some(cls, value: int) -> int:
        if value == 0 or value < -1:
            raise ValueError(f"num_examples must be at least 1, or -1 for all, not {value}")
        return value


class Passage(BaseModel):
    """One document. Its id is the paragraph's official idx, so that removing other paragraphs does not change it."""

    model_config = ConfigDict(frozen=True)

    id: str
    title: str
    text: str
    supporting: bool


class Hop(BaseModel):
    """One step of the gold decomposition; #1 in a question stands for the first step's answer."""

    model_config = ConfigDict(frozen=True)

    question: str
    answer: str
    support: str | None


class MusiqueData(vf.TaskData):
    question_id: str
    """The official id, which an unanswerable twin shares."""
    kind: str
    """The graph type, such as 3hop2."""
    hops: int
    answerable: bool
    answers: list[str]
    """The gold answer, followed by its aliases."""
    documents: list[Passage]
    decomposition: list[Hop]

    @property
    def supporting(self) -> list[str]:
        return [document.id for document in self.documents if document.supporting]

    @property
    def gold(self) -> Gold:
        titles = (document.title for document in self.documents if document.supporting)
        known = known_words(self.prompt_text, (hop.answer for hop in self.decomposition[:-1]), titles)
        return Gold(tuple(self.answers), frozenset(self.supporting), self.hops, self.answerable, known)


def sub_questions(steps: Sequence[Hop]) -> list[str]:
    """Return the gold sub-questions, with the earlier answers in place of #1, #2, ..."""
    answers = [step.answer for step in steps]

    def fill(match: re.Match[str]) -> str:
        number = int(match[1]) - 1 if len(match[1]) < 4 else -1
        return answers[number] if 0 <= number < len(answers) else match[0]

    return [_REFERENCE.sub(fill, step.question) for step in steps]


def oracle_messages(data: MusiqueData, style: AnswerStyle) -> list[vf.AssistantMessage]:
    """Return one search per gold hop, then the answer with the supporting documents.

    For an unanswerable question: the searches up to the hop that its documents do not support, then "unanswerable".
    """
    steps = data.decomposition
    missing = next((i for i, step in enumerate(steps) if step.support is None), len(steps))
    queries = sub_questions(steps)[: missing + 1] or [data.prompt_text]
    turns = [
        vf.AssistantMessage(content="", tool_calls=[_call(i, "retrieve_documents", query=query)])
        for i, query in enumerate(queries)
    ]
    answer, cited = (data.answers[0], data.supporting) if data.answerable else (UNANSWERABLE, [])
    reasoning = " ".join(f"{query} {step.answer}." for query, step in zip(queries, steps, strict=False)) or "Found."
    if style == "complete":
        call = _call(len(turns), "complete", reasoning=reasoning, final_answer=answer, cited_doc_ids=cited)
        return [*turns, vf.AssistantMessage(content="", tool_calls=[call])]
    final = f"<think>{reasoning}</think>\n<cite>{', '.join(cited)}</cite>\n<answer>{answer}</answer>"
    return [*turns, vf.AssistantMessage(content=final)]


def _call(number: int, name: str, **arguments: Any) -> vf.ToolCall:
    return vf.ToolCall(id=f"oracle_{number}", name=name, arguments=json.dumps(arguments, ensure_ascii=False))


class MusiqueTask(vf.Task[MusiqueData, MusiqueState, MusiqueTaskConfig]):
    zero_one_metrics = ("exact_match", "answered")
    """Metrics that are 0 or 1 in each rollout, so that `evaluate` gives their means the interval of a proportion."""

    @classmethod
    def toolsets(cls, config: MusiqueTaskConfig) -> list[MusiqueToolset]:  # ty: ignore[incompatible-method-override]
        kind = MusiqueCompleteToolset if config.answer_style == "complete" else MusiqueToolset
        return [kind(config.tools)]

    @property
    def key(self) -> str:
        return self.data.id or self.hash

    @property
    def difficulty(self) -> int:
        """Number of hops of the question, for trainers that take easy tasks first."""
        return self.data.hops

    def prepare_rollouts(self) -> None:
        """Begin to embed the documents, so that the first search of a rollout need not wait for that."""
        retriever_of(self.data, self.config.tools).prepare()

    @vf.stop
    async def completed(self, trace: vf.Trace) -> bool:
        """Stop the rollout when `complete` has been called."""
        return cast(MusiqueState, trace.state).completion is not None

    async def finalize(self, trace: vf.Trace, runtime: Any) -> None:
        """Copy the tools' record into `trace.info`: stored traces do not include the state, and scoring needs it."""
        trace.info["musique"] = cast(MusiqueState, trace.state).model_dump(mode="json", exclude={"artifacts"})

    @vf.reward(weight=1.0)
    async def musique_reward(self, trace: vf.Trace) -> float:
        """The reward that the setting `reward` selects."""
        scoring, gold, uses = self.config.scoring, self.data.gold, tool_uses(trace)
        found = retrieved(uses)
        if scoring.reward == "original":
            return original_reward(gold, self.submission(trace, even_if_it_calls=True), found)
        submission = self.submission(trace)
        return shaped_reward(
            components(gold, submission, found, f1_floor=scoring.f1_floor),
            gold,
            scoring.weights,
            searched=any(use.tool == "retrieve_documents" for use in uses),
            invented=not found.issuperset(submission.cited),
            blind=share(read_blindly(uses), found),
            grounding=scoring.grounding,
            hop_factor=scoring.hop_factor,
            blind_reading_cost=scoring.blind_reading_cost,
        )

    @vf.metric
    async def scores(self, trace: vf.Trace) -> dict[str, float]:
        """Every component of the reward, the official metrics, and counts of tool use."""
        submission, uses = self.submission(trace), tool_uses(trace)
        gold, found = self.data.gold, retrieved(uses)
        metrics = vars(components(gold, submission, found, f1_floor=self.config.scoring.f1_floor))
        if not gold.answerable:  # no evidence is correct for these, and the official metrics exclude them
            metrics = {name: metrics[name] for name in ("format", "sufficiency")}
        queries = [folded(use.asked) for use in uses if use.tool == "retrieve_documents"]
        return {
            **metrics,
            "hops": gold.hops,
            "answered": float(submission.answered),
            "n_retrieved": len(found),
            "n_read_blindly": len(read_blindly(uses)),
            "n_cited": len(submission.cited),
            "unretrieved_citations": len(set(submission.cited) - found),
            "searches": len(queries),
            "repeated_queries": len(queries) - len(set(queries)),
            "unknown_documents": sum(use.tool == "get_document" and not use.found for use in uses),
        }

    def submission(self, trace: vf.Trace, *, even_if_it_calls: bool = False) -> Submission:
        """Return the model's submission, read in the configured answer style.

        A last message that calls a tool is not a submission, even if the rollout ended there. `even_if_it_calls`: read
        it nevertheless, as the predecessor environment did.
        """
        if self.config.answer_style == "complete":
            done = tool_state(trace).completion
            return read_completion(done.reasoning, done.final_answer, done.cited) if done else Submission()
        turns = trace.assistant_messages
        if not turns or (turns[-1].tool_calls and not even_if_it_calls):
            return Submission()
        return read_tags(turns[-1].content or "", reasoned=bool(turns[-1].reasoning_content))

    def prediction(self, trace: vf.Trace) -> dict[str, Any]:
        """Return the official submission row: {id, predicted_answer, predicted_support_idxs, predicted_answerable}."""
        submission = self.submission(trace)
        return {
            "id": self.data.question_id,
            "predicted_answer": submission.answer or "",
            "predicted_support_idxs": [int(doc_id) for doc_id in submission.cited],
            "predicted_answerable": not submission.says_unanswerable,
        }

    def oracle(self) -> list[vf.AssistantMessage]:
        """Return the assistant turns of a perfect transcript, which scores 1 with the golden retriever."""
        return oracle_messages(self.data, self.config.answer_style)


def tool_state(trace: vf.Trace) -> MusiqueState:
    """Return what the tools recorded: for a stored trace what `finalize` kept, for a running rollout its state.

    For a stored trace of a rollout that failed before `finalize`, it is empty.
    """
    kept = trace.info.get("musique")
    if kept is not None:
        return MusiqueState.model_validate(kept)
    return trace.state if isinstance(trace.state, MusiqueState) else MusiqueState()


def tool_uses(trace: vf.Trace) -> list[ToolUse]:
    """Return the recorded calls that were made before the first call of `complete`."""
    return list(takewhile(lambda use: use.tool != "complete", tool_state(trace).uses))


def retrieved(uses: list[ToolUse]) -> frozenset[str]:
    """Return the ids of all documents that these calls returned."""
    return frozenset(doc_id for use in uses for doc_id in use.found)


def read_blindly(uses: list[ToolUse]) -> frozenset[str]:
    """Return the ids of the documents that were read by id before any search had returned them."""
    searched: set[str] = set()
    blind: set[str] = set()
    for use in uses:
        if use.tool == "retrieve_documents":
            searched.update(use.found)
        else:
            blind.update(set(use.found) - searched)
    return frozenset(blind)


class MusiqueTaskset(vf.Taskset[MusiqueTask, MusiqueConfig]):  # ty: ignore[invalid-type-arguments]
    oracle_settings = {"retriever": "golden"}  # noqa: RUF012
    """Settings with which the transcripts of `oracle()` score 1."""
    check_settings = {"datasets": "synthetic"}  # noqa: RUF012
    """Settings with which `hub check`, which has no network, loads the taskset."""

    def load(self) -> Iterator[MusiqueTask]:
        """Yield the tasks. All rows are read and checked first; raises ValueError that names the first invalid row.

        The retriever's model is loaded here too, so that an invalid one fails now instead of in every rollout.
        """
        config = self.config
        check_name(config.retriever, load_model=True)
        if config.rerank_model is not None and config.rerank_url is None:
            check_reranker(config.rerank_model, load_model=True)
        records = select_records(config)
        task_config = make_task_config(config)
        return (MusiqueTask(make_data(record, config), task_config) for record in records)


def select_records(config: MusiqueConfig) -> list[Record]:
    """Load the records and apply the settings hops, shuffle, num_examples and curriculum, in this order.

    Raises ValueError if no record is left, or if reward=original is set for a set with unanswerable questions.
    """
    rows = max(SYNTHETIC_ROWS, config.num_examples)
    synthetic = Synthetic(config.seed, rows, config.synthetic_paragraphs, config.hops)
    records = load_records(config.datasets, config.split, synthetic)
    if config.reward == "original" and not all(record.answerable for record in records):
        raise ValueError(
            "reward=original is not defined for unanswerable questions; use the answerable set or reward=shaped"
        )
    if config.hops:
        records = [record for record in records if record.hops in config.hops]
    if not records:
        raise ValueError(f"datasets: {config.datasets} has no question with hops={','.join(map(str, config.hops))}")
    if config.shuffle:
        random.Random(f"order/{config.seed}").shuffle(records)
    if config.num_examples != -1:
        records = records[: config.num_examples]
    return sorted(records, key=lambda record: record.hops) if config.curriculum else records


def make_task_config(config: MusiqueConfig) -> MusiqueTaskConfig:
    """Return the task's config with the taskset's settings copied into it."""
    names = ("reward", "weights", "grounding", "hop_factor", "f1_floor", "blind_reading_cost")
    shared = ("retriever", "max_top_k", "max_documents", "rerank_url", "rerank_model")
    tools = {name: getattr(config, name) for name in shared}
    return config.task.model_copy(
        update={
            "tools": config.task.tools.model_copy(update=tools),
            "answer_style": config.answer_style,
            "scoring": Scoring(**{name: getattr(config, name) for name in names}),
        }
    )


def make_data(record: Record, config: MusiqueConfig) -> MusiqueData:
    """Return a task's data, after removing paragraphs by the setting `noise`."""
    paragraphs = record.with_noise(config.noise, config.seed).paragraphs
    return MusiqueData(
        id=record.key,
        prompt=record.question,
        system_prompt=system_prompt(config.answer_style, full=record.full),
        question_id=record.id,
        kind=record.kind,
        hops=record.hops,
        answerable=record.answerable,
        answers=list(record.answers),
        documents=[Passage(id=str(p.idx), title=p.title, text=p.text, supporting=p.supporting) for p in paragraphs],
        decomposition=[
            Hop(question=s.question, answer=s.answer, support=None if s.support is None else str(s.support))
            for s in record.steps
        ],
    )
