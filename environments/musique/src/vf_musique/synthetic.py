"""Our own multi-hop questions in the official schema: any number of them, offline, all six graph types.

Each question has a small world of its own, in which every fact stands in one paragraph. Decoy chains take its relations
in its order from other starts, so that only following the question from what it names tells the right last fact from
the others. The other distractors take those chains' and its own relations with other entities, and their entities with
other relations and as objects, so that no single search finds all it needs: the later hops' entities are not named in
the question. They are easier and more uniform than MuSiQue, and do not replace it.
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
"""An input that the question names; any other input is the answer of that step."""

GRAPHS: dict[str, tuple[tuple[int, ...], ...]] = {
    "2hop": ((ROOT,), (0,)),
    "3hop1": ((ROOT,), (0,), (1,)),
    "3hop2": ((ROOT,), (ROOT,), (0, 1)),
    "4hop1": ((ROOT,), (0,), (1,), (2,)),
    "4hop2": ((ROOT,), (ROOT,), (0, 1), (2,)),
    "4hop3": ((ROOT,), (0,), (ROOT,), (1, 2)),
}
"""Each graph type's steps, and what each step asks about."""

_DECOY_CHAINS = 3
"""How many chains of a question's relations end in a wrong answer, where there is room for them."""

_KINDS_BY_HOPS = [[kind for kind in GRAPHS if kind[0] == hops] for hops in "234"]


@dataclass
class _World:
    """The facts of one question; a relation has one object for its subjects, and a name one entity."""

    split: Split
    rng: random.Random
    names: set[str] = field(default_factory=set)
    facts: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)

    def new(self, kind: str) -> str:
        while True:
            name = draw_name(kind, self.split, self.rng)
            if name not in self.names or kind in ("year", "number", "colour"):
                self.names.add(name)
                return name

    def state(self, relation: Relation, subjects: tuple[str, ...], obj: str) -> str | None:
        """The fact as a sentence; None if the relation has an object for these subjects already."""
        if (relation.fact, subjects) in self.facts:
            return None
        self.facts.add((relation.fact, subjects))
        return _fill(relation.fact, subjects, obj)


@dataclass(frozen=True)
class _Step:
    relation: Relation
    inputs: tuple[int, ...]
    subjects: tuple[str, ...]
    object: str


def generate(split: Split, *, seed: int, paragraphs: int = 20, unanswerable: bool = False) -> Iterator[dict[str, Any]]:
    """Endless records in the official schema; the i-th depends on (split, seed, paragraphs, i) alone.

    `unanswerable`: each record is followed by its twin, which has the same id and question but lacks a paragraph that
    the answer needs. A third of the questions have 2 hops, a third 3, a third 4.
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
    """A record without its id, and its unanswerable twin."""
    world = _World(split, rng)
    steps = _make_steps(kind, world)
    support = [_paragraph(world, step.relation, step.subjects, step.object) for step in steps]
    assert all(support), "the steps of a question state different facts"
    room = max(0, paragraphs - len(steps))
    decoys = [step for _ in range(_DECOY_CHAINS) for step in _decoy_chain(kind, steps, world)][:room]
    others = [_paragraph(world, step.relation, step.subjects, step.object) for step in decoys]
    assert all(others), "and so do the decoys"
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
    """Random relations along the graph, each used once; starts anew when no relation fits."""
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
    """One fact, and at times a second one about the same subject; None if the first would contradict another."""
    fact = world.state(relation, subjects, obj)
    if fact is None:
        return None
    title, kind = subjects[0], relation.subjects[0]
    more = [other for other in RELATIONS if other.subjects == (kind,) and other is not relation]
    aside = world.rng.choice(more)
    sentences = [fact]
    # Values only: a second entity would be one more thing that a paragraph could be found by.
    if (
        not aside.phrase
        and world.rng.random() < 0.5
        and (second := world.state(aside, (title,), world.new(aside.object)))
    ):
        sentences.append(second)
    return {"title": title, "paragraph_text": " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)}


def _decoy_chain(kind: str, steps: list[_Step], world: _World) -> list[_Step]:
    """The question's relations in its order, last first, from other starts; of several starts some may stay.

    Where it does not depend on a new start, it is the question's own chain, which it leaves out.
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
    while (name := world.new(kind)) == taken:
        pass
    return name


def _distractors(steps: list[_Step], world: _World) -> Iterator[dict[str, str]]:
    """Endless paragraphs that look like the steps' own; none states a step's fact or contradicts it.

    `steps`: the question's and the decoys', so that no chain stands out by how often its entities are named.
    """
    while True:
        pairs = list(itertools.product((_same_relation, _same_subject, _same_object), steps))
        world.rng.shuffle(pairs)
        for maker, step in pairs:
            if (paragraph := maker(step, world)) is not None:
                yield paragraph


def _same_relation(step: _Step, world: _World) -> dict[str, str] | None:
    """Another subject of the step's relation; of two subjects one stays."""
    subjects = [world.new(kind) for kind in step.relation.subjects]
    if len(subjects) == 2:
        kept = world.rng.randrange(2)
        subjects[kept] = step.subjects[kept]
    return _paragraph(world, step.relation, tuple(subjects), world.new(step.relation.object))


def _same_subject(step: _Step, world: _World) -> dict[str, str] | None:
    """Something else about what the step asks about."""
    place = world.rng.randrange(len(step.subjects))
    kind = step.relation.subjects[place]
    relation = world.rng.choice([other for other in RELATIONS if other.subjects == (kind,) and other != step.relation])
    return _paragraph(world, relation, (step.subjects[place],), world.new(relation.object))


def _same_object(step: _Step, world: _World) -> dict[str, str] | None:
    """Something else that has the step's answer as its object; None if only one relation has such objects."""
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
