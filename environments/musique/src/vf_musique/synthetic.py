"""Generate synthetic multi-hop questions in the official schema: any number, offline, of all six graph types.

Each question has its own small world, in which every fact is stated in one paragraph. Decoy chains use the question's
relations in the same order but from other start entities, so that the correct last fact can only be found by following
the question from the entities that it names. The other distractors use the relations of these chains with other
entities, and the entities of these chains with other relations and as objects. No single search finds all needed facts,
because the entities of later hops are not named in the question. The questions are easier and more uniform than MuSiQue
and do not replace it.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vf_musique.synthetic_world import JOINS, RELATIONS, Relation, Split, aliases_of, draw_name

ROOT = -1
"""Marks an input of a step that the question names; any other number is the step whose answer is the input."""

GRAPHS: dict[str, tuple[tuple[int, ...], ...]] = {
    "2hop": ((ROOT,), (0,)),
    "3hop1": ((ROOT,), (0,), (1,)),
    "3hop2": ((ROOT,), (ROOT,), (0, 1)),
    "4hop1": ((ROOT,), (0,), (1,), (2,)),
    "4hop2": ((ROOT,), (ROOT,), (0, 1), (2,)),
    "4hop3": ((ROOT,), (0,), (ROOT,), (1, 2)),
}
"""For each graph type, the inputs of each of its steps."""

_DECOY_CHAINS = 3
"""Number of decoy chains, which use the question's relations and end in a wrong answer, if there is room for them."""

_KINDS_BY_HOPS = [[kind for kind in GRAPHS if kind[0] == hops] for hops in "234"]


@dataclass
class _World:
    """The facts of one question. A relation has only one object for its subjects, and a name belongs to one entity."""

    split: Split
    rng: random.Random
    names: set[str] = field(default_factory=set)
    facts: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)

    def new(self, kind: str) -> str:
        """Return a random name of this kind that is not yet used in this world; values may repeat."""
        while True:
            name = draw_name(kind, self.split, self.rng)
            if name not in self.names or kind in ("year", "number", "colour"):
                self.names.add(name)
                return name

    def state(self, relation: Relation, subjects: tuple[str, ...], obj: str) -> str | None:
        """Return the fact as a sentence; None if the relation already has an object for these subjects."""
        if (relation.fact, subjects) in self.facts:
            return None
        self.facts.add((relation.fact, subjects))
        return _fill(relation.fact, subjects, obj)


@dataclass(frozen=True)
class _Step:
    """One hop of a chain. Each input is `ROOT` or the number of the step whose object is the subject."""

    relation: Relation
    inputs: tuple[int, ...]
    subjects: tuple[str, ...]
    object: str


def generate(split: Split, *, seed: int, paragraphs: int = 20, unanswerable: bool = False) -> Iterator[dict[str, Any]]:
    """Yield records in the official schema without end; record i depends only on (split, seed, paragraphs, i).

    `unanswerable`: each record is followed by its twin, which has the same id and question but lacks a paragraph that
    the answer needs. A third of the questions have 2 hops, a third 3 and a third 4.
    """
    for index in itertools.count():
        rng = random.Random(f"vf-musique/{split}/{seed}/{index}")
        kind = rng.choice(rng.choice(_KINDS_BY_HOPS))
        record, twin = make_question(kind, split, rng, paragraphs)
        question_id = f"{kind}__synthetic-{split}-{seed}-{index}"
        yield {"id": question_id, **record}
        if unanswerable:
            yield {"id": question_id, **twin}


def make_question(
    kind: str, split: Split, rng: random.Random, paragraphs: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a record without its id, and its unanswerable twin."""
    world = _World(split, rng)
    steps = _make_steps(kind, world)
    support = [_paragraph(world, step.relation, step.subjects, step.object) for step in steps]
    assert all(support), "the steps of a question state different facts"
    room = max(0, paragraphs - len(steps))
    decoys = [step for _ in range(_DECOY_CHAINS) for step in _decoy_chain(kind, steps, world)][:room]
    others = [_paragraph(world, step.relation, step.subjects, step.object) for step in decoys]
    assert all(others), "the decoys state different facts"
    distractors = _distractors([*steps, *decoys], world)
    extra = next(distractors)
    others += itertools.islice(distractors, room - len(decoys))
    placed: list[tuple[dict[str, str], int | None]] = [
        *((paragraph, number) for number, paragraph in enumerate(support) if paragraph),
        *((paragraph, None) for paragraph in others if paragraph),
    ]
    rng.shuffle(placed)
    answerable = _record(steps, placed, answerable=True)
    gone = rng.randrange(len(steps))
    placed = [(extra, None) if number == gone else (paragraph, number) for paragraph, number in placed]
    return answerable, _record(steps, placed, answerable=False)


def _make_steps(kind: str, world: _World) -> list[_Step]:
    """Choose random relations along the graph, each at most once; starts again if no relation fits."""
    graph = GRAPHS[kind]
    while True:
        relations: list[Relation] = []
        for inputs in graph:
            wanted = [None if i == ROOT else relations[i].object for i in inputs]
            inner = len(relations) < len(graph) - 1
            fitting = [
                relation
                for relation in (RELATIONS if len(inputs) == 1 else JOINS)
                if relation not in relations
                and (relation.phrase or not inner)
                and all(kind in (None, subject) for kind, subject in zip(wanted, relation.subjects, strict=True))
            ]
            if not fitting:
                break
            relations.append(world.rng.choice(fitting))
        else:
            break
    steps: list[_Step] = []
    for relation, inputs in zip(relations, graph, strict=True):
        subjects = tuple(
            world.new(kind) if i == ROOT else steps[i].object for i, kind in zip(inputs, relation.subjects, strict=True)
        )
        steps.append(_Step(relation, inputs, subjects, world.new(relation.object)))
    return steps


def _paragraph(world: _World, relation: Relation, subjects: tuple[str, ...], obj: str) -> dict[str, str] | None:
    """Return a paragraph with a fact, sometimes also a second one about its subject; None if it contradicts another."""
    fact = world.state(relation, subjects, obj)
    if fact is None:
        return None
    title, kind = subjects[0], relation.subjects[0]
    more = [other for other in RELATIONS if other.subjects == (kind,) and other is not relation]
    aside = world.rng.choice(more)
    sentences = [fact]
    # The second fact has a value as its object, because a second entity would let other searches find the paragraph.
    if (
        not aside.phrase
        and world.rng.random() < 0.5
        and (second := world.state(aside, (title,), world.new(aside.object)))
    ):
        sentences.append(second)
    return {"title": title, "paragraph_text": " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)}


def _decoy_chain(kind: str, steps: list[_Step], world: _World) -> list[_Step]:
    """Return the steps of a decoy chain, last one first: the question's relations in its order, from other starts.

    If the question has several starts, some of them may be kept. Steps that do not depend on a new start are the
    question's own steps and are left out.
    """
    graph = GRAPHS[kind]
    starts = [number for number, inputs in enumerate(graph) if ROOT in inputs]
    new_starts = world.rng.sample(starts, world.rng.randint(1, len(starts)))
    chain: dict[int, _Step] = {}
    for number, (step, inputs) in enumerate(zip(steps, graph, strict=True)):
        if number in new_starts:
            subjects = tuple(map(world.new, step.relation.subjects))
        else:
            pairs = zip(inputs, step.subjects, strict=True)
            subjects = tuple(chain[i].object if i in chain else subject for i, subject in pairs)
        if subjects != step.subjects:
            obj = _another(step.object, step.relation.object, world)
            chain[number] = _Step(step.relation, inputs, subjects, obj)
    return list(chain.values())[::-1]


def _another(taken: str, kind: str, world: _World) -> str:
    """Return a new name or value of this kind that is not `taken`."""
    while (name := world.new(kind)) == taken:
        pass
    return name


def _distractors(steps: list[_Step], world: _World) -> Iterator[dict[str, str]]:
    """Yield paragraphs without end that resemble those of the steps; none states a step's fact or contradicts it.

    `steps`: those of the question and of the decoys, so that the entities of no chain are named more often than others.
    """
    while True:
        pairs = list(itertools.product((_same_relation, _same_subject, _same_object), steps))
        world.rng.shuffle(pairs)
        for maker, step in pairs:
            if (paragraph := maker(step, world)) is not None:
                yield paragraph


def _same_relation(step: _Step, world: _World) -> dict[str, str] | None:
    """Return a fact with the step's relation and another subject; of two subjects one is kept."""
    subjects = [world.new(kind) for kind in step.relation.subjects]
    if len(subjects) == 2:
        kept = world.rng.randrange(2)
        subjects[kept] = step.subjects[kept]
    return _paragraph(world, step.relation, tuple(subjects), world.new(step.relation.object))


def _same_subject(step: _Step, world: _World) -> dict[str, str] | None:
    """Return a fact about one of the step's subjects, with another relation."""
    place = world.rng.randrange(len(step.subjects))
    kind = step.relation.subjects[place]
    relation = world.rng.choice([other for other in RELATIONS if other.subjects == (kind,) and other != step.relation])
    return _paragraph(world, relation, (step.subjects[place],), world.new(relation.object))


def _same_object(step: _Step, world: _World) -> dict[str, str] | None:
    """Return a fact with the step's object and another relation; None if no other relation has objects of this kind."""
    fitting = [other for other in RELATIONS if other.object == step.relation.object and other != step.relation]
    if not fitting:
        return None
    relation = world.rng.choice(fitting)
    subjects = tuple(world.new(kind) for kind in relation.subjects)
    return _paragraph(world, relation, subjects, step.object)


def _record(steps: list[_Step], placed: list[tuple[dict[str, str], int | None]], *, answerable: bool) -> dict[str, Any]:
    where = {number: idx for idx, (_, number) in enumerate(placed) if number is not None}
    phrases: list[str] = []
    decomposition = []
    for number, step in enumerate(steps):
        names = [subject if i == ROOT else phrases[i] for i, subject in zip(step.inputs, step.subjects, strict=True)]
        references = [
            subject if i == ROOT else f"#{i + 1}" for i, subject in zip(step.inputs, step.subjects, strict=True)
        ]
        decomposition.append(
            {
                "id": number,
                "question": _fill(step.relation.question, references),
                "answer": step.object,
                "paragraph_support_idx": where.get(number),
            }
        )
        phrases.append(_fill(step.relation.phrase, names))
        question = _fill(step.relation.question, names)
    return {
        "paragraphs": [
            {"idx": idx, **paragraph, "is_supporting": number is not None}
            for idx, (paragraph, number) in enumerate(placed)
        ],
        "question": question,
        "question_decomposition": decomposition,
        "answer": steps[-1].object,
        "answer_aliases": aliases_of(steps[-1].object),
        "answerable": answerable,
    }


def _fill(template: str, subjects: tuple[str, ...] | list[str], obj: str = "") -> str:
    text = template.format(a=subjects[0], b=subjects[-1], o=obj)
    return re.sub(r"\b([Tt]he) the\b", r"\1", text)
