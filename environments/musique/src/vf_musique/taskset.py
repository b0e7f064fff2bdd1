"""The taskset: official records in, multi-step retrieval tasks out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import takewhile
from typing import Annotated, Any, Literal, cast

import verifiers.v1 as vf
from plumbob.retrieval import check_name
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from vf_musique.complete import MusiqueCompleteToolset
from vf_musique.oracle import oracle_messages
from vf_musique.prompts import AnswerStyle, system_prompt
from vf_musique.records import Record
from vf_musique.rewards import Gold, Weights, components, original_reward, shaped_reward
from vf_musique.sources import SYNTHETIC_ROWS, Synthetic, load_records, parse_spec
from vf_musique.submission import Submission, read_completion, read_tags
from vf_musique.tools import MusiqueState, MusiqueToolset, MusiqueToolsetConfig, ToolUse

RewardName = Literal["shaped", "original"]


class Scoring(BaseModel):
    """How a rollout is scored; see `rewards`."""

    model_config = ConfigDict(frozen=True)

    reward: RewardName = "shaped"
    weights: Weights = Weights()
    grounding: float = Field(0.5, ge=0, le=1)
    hop_factor: bool = False


class MusiqueTaskConfig(vf.TaskConfig):
    """Filled in from the taskset's settings; only the placement of `tools` is set here."""

    tools: MusiqueToolsetConfig = MusiqueToolsetConfig()
    answer_style: AnswerStyle = "tags"
    scoring: Scoring = Scoring()


def _read_hops(value: Any) -> Any:
    """As text "2,3", as a number, or as a list."""
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
    official files, or "synthetic". Name: answerable (if left out) or full. Split: as train[:100] or train+validation."""
    split: Literal["train", "validation"] = "train"
    """For parts that name no split. A file is used whole, whatever this says."""
    seed: int = 0
    """Of the order, the noise and the synthetic questions."""
    shuffle: bool = True
    """Off keeps the source's order, which official scoring of predictions needs."""
    curriculum: bool = False
    """Few hops first."""
    hops: Annotated[tuple[int, ...], BeforeValidator(_read_hops)] = ()
    """Only questions with so many hops, as "2" or "2,3"; empty for all."""
    noise: float = Field(1.0, ge=0, le=1)
    """Each non-supporting paragraph is kept with this probability."""
    num_examples: int = -1
    """How many tasks, picked after shuffling and before the curriculum's order; -1 for all. A synthetic split has 1000
    rows, or as many as this or a slice's bound asks for."""
    retriever: str = "bm25"
    max_top_k: int = Field(5, ge=1)
    """The most documents of one search."""
    rerank_url: str | None = None
    """A Cohere-style rerank service that orders what the retriever finds; its token is in $RERANK_API_KEY."""
    rerank_model: str | None = None
    """The service's model, if it has several."""
    answer_style: AnswerStyle = "tags"
    reward: RewardName = "shaped"
    weights: Weights = Weights()
    """Of the shaped reward, as "f1=0.5,format=0"; components not named keep their default."""
    grounding: float = Field(0.5, ge=0, le=1)
    """The share of a right answer's credit that its citations must earn."""
    hop_factor: bool = False
    """Multiply the shaped reward by hops / 4."""
    synthetic_paragraphs: int = Field(20, ge=4, le=200)
    """Paragraphs of a synthetic question."""

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
    """One document. Its id is the paragraph's official idx, so that dropping others does not change it."""

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
    """The official id; an unanswerable twin has the same."""
    kind: str
    """The graph type, as 3hop2."""
    hops: int
    answerable: bool
    answers: list[str]
    """The answer, then its aliases."""
    documents: list[Passage]
    decomposition: list[Hop]

    @property
    def supporting(self) -> list[str]:
        return [document.id for document in self.documents if document.supporting]

    @property
    def gold(self) -> Gold:
        return Gold(tuple(self.answers), frozenset(self.supporting), self.hops, self.answerable)


class MusiqueTask(vf.Task[MusiqueData, MusiqueState, MusiqueTaskConfig]):
    @classmethod
    def toolsets(cls, config: MusiqueTaskConfig) -> list[MusiqueToolset]:  # ty: ignore[incompatible-method-override]
        kind = MusiqueCompleteToolset if config.answer_style == "complete" else MusiqueToolset
        return [kind(config.tools)]

    @property
    def key(self) -> str:
        return self.data.id or self.hash

    @vf.stop
    async def completed(self, trace: vf.Trace) -> bool:
        """`complete` was called."""
        return cast(MusiqueState, trace.state).completion is not None

    async def finalize(self, trace: vf.Trace, runtime: Any) -> None:
        """Keep what the tools did on the record: the state is not written to it, and scoring a record needs it."""
        trace.info["musique"] = cast(MusiqueState, trace.state).model_dump(mode="json", exclude={"artifacts"})

    @vf.reward(weight=1.0)
    async def musique_reward(self, trace: vf.Trace) -> float:
        scoring, gold, uses = self.config.scoring, self.data.gold, tool_uses(trace)
        found = retrieved(uses)
        if scoring.reward == "original":
            return original_reward(gold, self.submission(trace, even_if_it_calls=True), found)
        submission = self.submission(trace)
        return shaped_reward(
            components(gold, submission, found),
            gold,
            scoring.weights,
            searched=any(use.tool == "retrieve_documents" for use in uses),
            invented=not found.issuperset(submission.cited),
            grounding=scoring.grounding,
            hop_factor=scoring.hop_factor,
        )

    @vf.metric
    async def scores(self, trace: vf.Trace) -> dict[str, float]:
        """Every component of the reward, the official metrics, and what the tools were used for."""
        submission, uses = self.submission(trace), tool_uses(trace)
        gold, found = self.data.gold, retrieved(uses)
        metrics = vars(components(gold, submission, found))
        if not gold.answerable:  # the official metrics leave these questions out, and no evidence for them is right
            metrics = {name: metrics[name] for name in ("format", "sufficiency")}
        queries = [" ".join(use.asked.lower().split()) for use in uses if use.tool == "retrieve_documents"]
        return {
            **metrics,
            "hops": gold.hops,
            "answered": float(submission.answered),
            "n_retrieved": len(found),
            "n_cited": len(submission.cited),
            "unretrieved_citations": len(set(submission.cited) - found),
            "searches": len(queries),
            "repeated_queries": len(queries) - len(set(queries)),
            "unknown_documents": sum(use.tool == "get_document" and not use.found for use in uses),
        }

    def submission(self, trace: vf.Trace, *, even_if_it_calls: bool = False) -> Submission:
        """What the model handed in, in the configured style.

        A last message that calls a tool is not the last word, even if the rollout ended there; the predecessor read it
        (`even_if_it_calls`).
        """
        if self.config.answer_style == "complete":
            done = tool_state(trace).completion
            return read_completion(done.reasoning, done.final_answer, done.cited) if done else Submission()
        turns = trace.assistant_messages
        if not turns or (turns[-1].tool_calls and not even_if_it_calls):
            return Submission()
        return read_tags(turns[-1].content or "", reasoned=bool(turns[-1].reasoning_content))

    def prediction(self, trace: vf.Trace) -> dict[str, Any]:
        """The official submission row: {id, predicted_answer, predicted_support_idxs, predicted_answerable}."""
        submission = self.submission(trace)
        return {
            "id": self.data.question_id,
            "predicted_answer": submission.answer or "",
            "predicted_support_idxs": [int(doc_id) for doc_id in submission.cited],
            "predicted_answerable": not submission.says_unanswerable,
        }

    def oracle(self) -> list[vf.AssistantMessage]:
        """A perfect transcript's assistant turns, in the configured style; perfect with the golden retriever."""
        return oracle_messages(self.data, self.config.answer_style)


def tool_state(trace: vf.Trace) -> MusiqueState:
    """What the tools recorded: of a live rollout its state, of one read back from a file what `finalize` kept.

    Nothing of a rollout that failed before that, whose state reads back as one without fields.
    """
    kept = trace.info.get("musique")
    if kept is not None:
        return MusiqueState.model_validate(kept)
    return trace.state if isinstance(trace.state, MusiqueState) else MusiqueState()


def tool_uses(trace: vf.Trace) -> list[ToolUse]:
    """The calls that came before the answer."""
    return list(takewhile(lambda use: use.tool != "complete", tool_state(trace).uses))


def retrieved(uses: list[ToolUse]) -> frozenset[str]:
    return frozenset(doc_id for use in uses for doc_id in use.found)


class MusiqueTaskset(vf.Taskset[MusiqueTask, MusiqueConfig]):  # ty: ignore[invalid-type-arguments]
    oracle_settings = {"retriever": "golden"}  # noqa: RUF012
    """Settings under which `oracle()` is perfect."""
    check_settings = {"datasets": "synthetic"}  # noqa: RUF012
    """Settings that need no network; `hub check` has none."""

    def load(self) -> Iterator[MusiqueTask]:
        """Every row is read and checked before the first task comes out; ValueError names the first bad one.

        A retriever's model is loaded here too, so that a wrong one fails now and not within every rollout.
        """
        config = self.config
        check_name(config.retriever, load_model=True)
        records = select_records(config)
        task_config = make_task_config(config)
        return (MusiqueTask(make_data(record, config), task_config) for record in records)


def select_records(config: MusiqueConfig) -> list[Record]:
    rows = max(SYNTHETIC_ROWS, config.num_examples)
    synthetic = Synthetic(config.seed, rows, config.synthetic_paragraphs, config.hops)
    records = load_records(config.datasets, config.split, synthetic)
    if config.reward == "original" and not all(record.answerable for record in records):
        raise ValueError("reward=original knows no unanswerable questions; use the answerable set, or reward=shaped")
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
    """The task's own config, with the taskset's settings in it."""
    names = ("reward", "weights", "grounding", "hop_factor")
    tools = {name: getattr(config, name) for name in ("retriever", "max_top_k", "rerank_url", "rerank_model")}
    return config.task.model_copy(
        update={
            "tools": config.task.tools.model_copy(update=tools),
            "answer_style": config.answer_style,
            "scoring": Scoring(**{name: getattr(config, name) for name in names}),
        }
    )


def make_data(record: Record, config: MusiqueConfig) -> MusiqueData:
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
