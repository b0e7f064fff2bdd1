"""The fixed vocabulary of the synthetic questions: kinds of entities, their names, and the relations between them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "validation"]

_VALIDATION_SHARE = 4  # one in this many names is a validation name


def _words(text: str) -> list[str]:
    return text.split()


_FIRST = _words(
    "Anna Bruno Clara David Emma Felix Grace Henry Irene Jacob Karen Louis Maria Nora Oscar Paula Quinn Robert Sarah "
    "Thomas Ursula Victor Wanda Xavier"
)
_LAST = _words(
    "Baker Carter Dale Ellis Fisher Grant Hunter Irving Jordan Knight Lane Mason North Olsen Porter Reed Shaw Turner "
    "Vance Walker Young Zimmer Archer Brooks"
)
_ADJECTIVES = _words(
    "Amber Broken Crimson Distant Early Frozen Golden Hidden Iron Lonely Misty Northern Quiet Restless Silver Southern "
    "Tall Velvet Wooden Winter Bold Young Bright Copper"
)
_TOWNS_1 = _words(
    "Ash Birch Cedar Elm Fox Hawk Maple Oak Pine Rose Stone Swan Thorn Willow Wolf Bear Clay Deer Eagle Fern Moss Heath "
    "Lake Salt"
)
_TOWNS_2 = _words(
    "Bridge Castle Cross Dale Falls Field Ford Gate Grove Harbor Haven Hill Hollow Mill Moor Point Port Ridge Shore "
    "Spring Vale View Wells Wood"
)
_NOUNS = {
    "book": _words("Garden Letter Mirror Mountain Orchard Promise Shadow Song Story Tower Voyage Window"),
    "company": _words("Anchor Arrow Compass Crown Feather Hammer Kettle Lantern Needle Saddle Wheel Whistle"),
    "ship": _words("Dolphin Falcon Gull Heron Otter Petrel Salmon Seal Sparrow Swallow Tern Whale"),
    "river": _words("Brook Creek River Stream Canal Rapids"),
    "club": _words("Badgers Eagles Foxes Giants Hawks Lions Owls Panthers Ravens Tigers Wolves Stags"),
}
_SUFFIX = {"company": " Company", "club": " Club"}
_NUMBERS = {str(n): word for n, word in enumerate(_words("two three four five six seven eight nine ten"), start=2)}
# No name holds one of these words or a number word, because a question may name any thing and must not hold its answer.
_COLOURS = _words("black blue brown green grey orange pink purple red white yellow")


def halves_of(kind: str) -> tuple[list[str], list[str]]:
    """Return the words that a name of this kind begins and ends with."""
    if kind == "person":
        return _FIRST, _LAST
    if kind == "town":
        return _TOWNS_1, _TOWNS_2
    return _ADJECTIVES, _NOUNS[kind]


def split_of(first: int, second: int) -> Split:
    """Return the split of the name with these two halves.

    Each name is in one split, so no question is in both splits.
    """
    return "validation" if (first + second) % _VALIDATION_SHARE == 0 else "train"


def draw_name(kind: str, split: Split, rng: random.Random) -> str:
    """Return a random name of this kind that only this split uses, or a value (year, number, colour) that both use."""
    if kind == "year":
        return str(rng.randint(1801, 1999))
    if kind == "number":
        return rng.choice(list(_NUMBERS.values()))
    if kind == "colour":
        return rng.choice(_COLOURS)
    firsts, seconds = halves_of(kind)
    while True:
        i, j = rng.randrange(len(firsts)), rng.randrange(len(seconds))
        if split_of(i, j) == split:
            article = "The " if kind in ("book", "ship") else ""
            return f"{article}{firsts[i]} {seconds[j]}{_SUFFIX.get(kind, '')}"


def aliases_of(value: str) -> list[str]:
    """Return other spellings of an answer: a number word's digits, a company's or club's name without its suffix."""
    digits = [digit for digit, word in _NUMBERS.items() if word == value]
    return digits or [value.removesuffix(suffix) for suffix in _SUFFIX.values() if value.endswith(suffix)]


@dataclass(frozen=True)
class Relation:
    """A relation between one or two subjects and one object. For given subjects there is only one object.

    In the templates, {a} and {b} are the subjects and {o} is the object. `fact` states the relation, `question` asks
    for the object, and `phrase` stands for the object inside a longer question.
    """

    subjects: tuple[str, ...]
    object: str
    fact: str
    question: str
    phrase: str = ""
    """Empty if the object is a value (year, number, colour), because no further question can be asked about it."""


RELATIONS = (
    Relation(("person",), "town", "{a} was born in {o}.", "Where was {a} born?", "the birthplace of {a}"),
    Relation(("person",), "company", "{a} works for the {o}.", "Who does {a} work for?", "the employer of {a}"),
    Relation(("person",), "person", "{a} was taught by {o}.", "Who taught {a}?", "the teacher of {a}"),
    Relation(("person",), "club", "{a} plays for the {o}.", "Which club does {a} play for?", "the club of {a}"),
    Relation(("book",), "person", "{a} was written by {o}.", "Who wrote {a}?", "the author of {a}"),
    Relation(("book",), "town", "The story of {a} is set in {o}.", "Where is {a} set?", "the setting of {a}"),
    Relation(("book",), "year", "{a} was first printed in {o}.", "When was {a} first printed?"),
    Relation(("company",), "person", "The {a} was founded by {o}.", "Who founded the {a}?", "the founder of the {a}"),
    Relation(("company",), "town", "The {a} is based in {o}.", "Where is the {a} based?", "the home town of the {a}"),
    Relation(("company",), "year", "The {a} was opened in {o}.", "When was the {a} opened?"),
    Relation(("company",), "number", "The {a} runs {o} shops.", "How many shops does the {a} run?"),
    Relation(("town",), "person", "The mayor of {a} is {o}.", "Who is the mayor of {a}?", "the mayor of {a}"),
    Relation(("town",), "river", "{a} lies on the {o}.", "On which river does {a} lie?", "the river at {a}"),
    Relation(("town",), "number", "There are {o} bridges in {a}.", "How many bridges are in {a}?"),
    Relation(("town",), "colour", "The flag of {a} is {o}.", "What colour is the flag of {a}?"),
    Relation(("town",), "year", "{a} became a city in {o}.", "When did {a} become a city?"),
    Relation(("ship",), "person", "The captain of {a} is {o}.", "Who is the captain of {a}?", "the captain of {a}"),
    Relation(("ship",), "town", "{a} was built in {o}.", "Where was {a} built?", "the town that built {a}"),
    Relation(("ship",), "colour", "The hull of {a} is {o}.", "What colour is the hull of {a}?"),
    Relation(("club",), "person", "The {a} is coached by {o}.", "Who coaches the {a}?", "the coach of the {a}"),
    Relation(("club",), "town", "The {a} trains in {o}.", "Where does the {a} train?", "the training town of the {a}"),
    Relation(
        ("river",), "town", "The {a} rises near {o}.", "Near which town does the {a} rise?", "the source of the {a}"
    ),
    Relation(("river",), "number", "The {a} has {o} dams.", "How many dams does the {a} have?"),
)

JOINS = (
    Relation(
        ("town", "town"),
        "company",
        "The train from {a} to {b} is run by the {o}.",
        "Who runs the train from {a} to {b}?",
        "the operator of the train from {a} to {b}",
    ),
    Relation(
        ("person", "person"),
        "town",
        "{a} first met {b} in {o}.",
        "Where did {a} first meet {b}?",
        "the place where {a} first met {b}",
    ),
    Relation(
        ("person", "town"),
        "company",
        "In {b}, {a} owns a part of the {o}.",
        "What does {a} own a part of in {b}?",
        "the business that {a} owns a part of in {b}",
    ),
    Relation(
        ("company", "town"),
        "person",
        "The {a} sends its goods to {b} through {o}.",
        "Through whom does the {a} send goods to {b}?",
        "the person through whom the {a} sends goods to {b}",
    ),
    Relation(
        ("person", "person"),
        "year",
        "{a} and {b} built a house together in {o}.",
        "When did {a} and {b} build a house together?",
    ),
    Relation(
        ("town", "town"),
        "number",
        "There are {o} inns on the road from {a} to {b}.",
        "How many inns are on the road from {a} to {b}?",
    ),
)
