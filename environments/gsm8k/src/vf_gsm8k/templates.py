"""The templates of the synthetic problems, with two to four steps each.

A template chooses random numbers such that every intermediate result is a positive integer, and returns the question
and its solution. Each line of a solution holds one equation, `expression = integer`, which the tests evaluate.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

NAMES = (
    "Ada", "Amir", "Anouk", "Bela", "Chidi", "Dalia", "Emeka", "Farid", "Greta", "Hana", "Ines", "Jonas", "Kaya",
    "Lena", "Mateo", "Mira", "Nadia", "Omar", "Pilar", "Quinn", "Rosa", "Samir", "Tomas", "Uma", "Vera", "Wen",
    "Yara", "Zeno",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A generated problem.

    Example: Problem("album", (12, 9, 13), "Mira puts 12 stamps ...", "Stamps in the album: 12 * 9 = 108\\n...", 95)
    """

    template: str
    numbers: tuple[int, ...]
    """All random numbers of the problem; together with the template they determine the answer."""
    question: str
    solution: str
    answer: int


def album(rng: random.Random) -> Problem:
    per_page, pages, given = rng.randint(6, 24), rng.randint(4, 30), rng.randint(5, 20)
    name = rng.choice(NAMES)
    total = per_page * pages
    return Problem(
        "album",
        (per_page, pages, given),
        f"{name} puts {per_page} stamps on each of the {pages} pages of an album, then gives {given} of the stamps to "
        f"a cousin. How many stamps are left in the album?",
        f"Stamps in the full album: {per_page} * {pages} = {total}\nStamps left: {total} - {given} = {total - given}",
        total - given,
    )


def relay(rng: random.Random) -> Problem:
    runners, laps, track = rng.randint(3, 9), rng.randint(2, 12), 10 * rng.randint(15, 60)
    each = laps * track
    return Problem(
        "relay",
        (runners, laps, track),
        f"In a charity relay, each of {runners} runners completes {laps} laps of a track that is {track} metres long. "
        f"How many metres do all the runners cover together?",
        f"Metres for one runner: {laps} * {track} = {each}\n"
        f"Metres for all of them: {runners} * {each} = {runners * each}",
        runners * each,
    )


def ferry(rng: random.Random) -> Problem:
    foggy, trips, seats = rng.randint(1, 5), rng.randint(6, 14), rng.randint(12, 90)
    fewer = rng.randint(2, trips - 2)
    clear, slow = 7 - foggy, trips - fewer
    crossings = clear * trips + foggy * slow
    days = "1 day was" if foggy == 1 else f"{foggy} days were"
    return Problem(
        "ferry",
        (foggy, trips, seats, fewer),
        f"A ferry crosses the bay {trips} times on a clear day and {fewer} fewer times on a foggy day. It carries "
        f"{seats} passengers on every crossing. Last week {days} foggy and the others were clear. How many passengers "
        f"did the ferry carry that week?",
        f"Clear days: 7 - {foggy} = {clear}\n"
        f"Crossings on a foggy day: {trips} - {fewer} = {slow}\n"
        f"Crossings in the week: {clear} * {trips} + {foggy} * {slow} = {crossings}\n"
        f"Passengers: {crossings} * {seats} = {crossings * seats}",
        crossings * seats,
    )


def hives(rng: random.Random) -> Problem:
    count, spring, times, kept = rng.randint(3, 12), rng.randint(4, 15), rng.randint(2, 4), rng.randint(3, 20)
    name = rng.choice(NAMES)
    summer = spring * times
    each = spring + summer
    total = count * each
    return Problem(
        "hives",
        (count, spring, times, kept),
        f"{name} looks after {count} beehives. Each hive yields {spring} jars of honey in spring and {times} times as "
        f"many in summer. {name} keeps {kept} jars and sells all the others. How many jars does {name} sell?",
        f"Summer jars from one hive: {spring} * {times} = {summer}\n"
        f"Jars from one hive: {spring} + {summer} = {each}\n"
        f"Jars from all hives: {count} * {each} = {total}\n"
        f"Jars sold: {total} - {kept} = {total - kept}",
        total - kept,
    )


def buns(rng: random.Random) -> Problem:
    trays, per_tray, box = rng.randint(4, 15), rng.randint(12, 36), rng.randint(3, 9)
    total = trays * per_tray
    # At least one bun is burnt, and the good ones fill whole boxes.
    burnt = total % box + box * rng.randint(1, 2)
    good = total - burnt
    name = rng.choice(NAMES)
    return Problem(
        "buns",
        (trays, per_tray, box, burnt),
        f"{name} bakes {trays} trays of {per_tray} buns. {burnt} of the buns burn and are thrown away. The rest are "
        f"packed in boxes of {box}. How many boxes does {name} fill?",
        f"Buns baked: {trays} * {per_tray} = {total}\n"
        f"Good buns: {total} - {burnt} = {good}\n"
        f"Boxes: {good} / {box} = {good // box}",
        good // box,
    )


def library(rng: random.Random) -> Problem:
    monday, times = rng.randint(11, 60), rng.randint(2, 4)
    tuesday = monday * times
    lent = monday + tuesday
    books, back = lent + rng.randint(50, 900), rng.randint(10, lent - 1)
    away = lent - back
    return Problem(
        "library",
        (monday, times, books, back),
        f"A village library owns {books} books, and on Monday morning all of them are on the shelves. {monday} are lent "
        f"on Monday and {times} times as many on Tuesday. By Friday, {back} of the lent books are back on the shelves. "
        f"How many books are on the shelves then?",
        f"Lent on Tuesday: {monday} * {times} = {tuesday}\n"
        f"Lent on both days: {monday} + {tuesday} = {lent}\n"
        f"Still away on Friday: {lent} - {back} = {away}\n"
        f"On the shelves: {books} - {away} = {books - away}",
        books - away,
    )


def trail(rng: random.Random) -> Problem:
    fast, slow = rng.randint(14, 25), rng.randint(8, 13)
    before, after, left = rng.randint(2, 5), rng.randint(2, 5), rng.randint(3, 40)
    morning, afternoon = fast * before, slow * after
    length = morning + afternoon + left
    name = rng.choice(NAMES)
    return Problem(
        "trail",
        (fast, slow, before, after, left),
        f"{name} follows a cycle trail that is {length} km long: {before} hours at {fast} km per hour before lunch, then "
        f"{after} hours at {slow} km per hour. How many kilometres of the trail are left?",
        f"Before lunch: {fast} * {before} = {morning}\n"
        f"After lunch: {slow} * {after} = {afternoon}\n"
        f"Ridden so far: {morning} + {afternoon} = {morning + afternoon}\n"
        f"Left: {length} - {morning + afternoon} = {left}",
        left,
    )


def tank(rng: random.Random) -> Problem:
    leak, net, minutes, start = rng.randint(2, 9), rng.randint(3, 18), rng.randint(5, 40), 5 * rng.randint(2, 30)
    pump, missing = leak + net, net * minutes
    full = start + missing
    return Problem(
        "tank",
        (leak, net, minutes, start),
        f"A water tank has room for {full} litres and already holds {start} litres. A pump adds {pump} litres every "
        f"minute, while a leak lets {leak} litres out every minute. After how many minutes is the tank full?",
        f"Litres missing: {full} - {start} = {missing}\n"
        f"Gained per minute: {pump} - {leak} = {net}\n"
        f"Minutes: {missing} / {net} = {minutes}",
        minutes,
    )


def ages(rng: random.Random) -> Problem:
    young, older, times, years = rng.randint(4, 19), rng.randint(2, 15), rng.randint(2, 4), rng.randint(3, 20)
    first, second, third = rng.sample(NAMES, 3)
    age_second, age_third = young + older, young * times
    now = age_second + age_third
    return Problem(
        "ages",
        (young, older, times, years),
        f"{first} is {young} years old. {second} is {older} years older than {first}, and {third} is {times} times as "
        f"old as {first}. What will the ages of {second} and {third} add up to in {years} years?",
        f"{second} now: {young} + {older} = {age_second}\n"
        f"{third} now: {young} * {times} = {age_third}\n"
        f"Together now: {age_second} + {age_third} = {now}\n"
        f"In {years} years, both being older: {now} + 2 * {years} = {now + 2 * years}",
        now + 2 * years,
    )


def overtime(rng: random.Random) -> Problem:
    rate, normal, extra, bonus = rng.randint(11, 35), rng.randint(20, 38), rng.randint(2, 12), rng.randint(2, 10)
    hours, late = normal + extra, rate + bonus
    pay = normal * rate + extra * late
    name = rng.choice(NAMES)
    return Problem(
        "overtime",
        (rate, normal, extra, bonus),
        f"{name} is paid ${rate} an hour for the first {normal} hours of a week and ${bonus} an hour more than that "
        f"for every further hour. This week {name} works {hours} hours. How many dollars is {name} paid?",
        f"Further hours: {hours} - {normal} = {extra}\n"
        f"Their rate: {rate} + {bonus} = {late}\n"
        f"Pay: {normal} * {rate} + {extra} * {late} = {pay}",
        pay,
    )


def theatre(rng: random.Random) -> Problem:
    rows, seats, child, more = rng.randint(8, 25), rng.randint(10, 30), rng.randint(3, 9), rng.randint(2, 12)
    empty, children = rng.randint(3, 30), rng.randint(5, 40)
    adult, filled = child + more, rows * seats - empty
    adults = filled - children
    takings = children * child + adults * adult
    return Problem(
        "theatre",
        (rows, seats, child, more, empty, children),
        f"A theatre has {rows} rows of {seats} seats. Tonight {empty} seats stay empty, and {children} of the "
        f"spectators are children. A child pays ${child} and anyone else ${adult}. How many dollars does the theatre "
        f"take tonight?",
        f"Seats: {rows} * {seats} = {rows * seats}\n"
        f"Spectators: {rows * seats} - {empty} = {filled}\n"
        f"Adults: {filled} - {children} = {adults}\n"
        f"Takings: {children} * {child} + {adults} * {adult} = {takings}",
        takings,
    )


def novel(rng: random.Random) -> Problem:
    pace, days, more = rng.randint(9, 30), rng.randint(3, 10), rng.randint(2, 12)
    read, faster = pace * days, 2 * pace
    left = faster * more
    pages = read + left
    name = rng.choice(NAMES)
    return Problem(
        "novel",
        (pace, days, more),
        f"{name} reads {pace} pages of a novel on each of the first {days} days, and twice as many on every day after "
        f"that. The novel has {pages} pages. How many days does {name} take to finish it, from the first day on?",
        f"Read at first: {pace} * {days} = {read}\n"
        f"Pages left: {pages} - {read} = {left}\n"
        f"Days at the faster pace: {left} / (2 * {pace}) = {more}\n"
        f"Days in all: {days} + {more} = {days + more}",
        days + more,
    )


def market(rng: random.Random) -> Problem:
    melons, melon, lemons, lemon = rng.randint(2, 9), rng.randint(3, 8), rng.randint(3, 15), rng.randint(1, 2)
    first, second = melons * melon, lemons * lemon
    spent = first + second
    # The next multiple of ten above the amount spent, or one of the two after it.
    paid = 10 * (spent // 10 + rng.randint(1, 3))
    name = rng.choice(NAMES)
    return Problem(
        "market",
        (melons, melon, lemons, lemon, paid),
        f"At the market {name} buys {melons} melons at ${melon} each and {lemons} lemons at ${lemon} each, and hands "
        f"over ${paid}. How many dollars of change does {name} get?",
        f"Melons: {melons} * {melon} = {first}\n"
        f"Lemons: {lemons} * {lemon} = {second}\n"
        f"Both: {first} + {second} = {spent}\n"
        f"Change: {paid} - {spent} = {paid - spent}",
        paid - spent,
    )


TEMPLATES: tuple[Callable[[random.Random], Problem], ...] = (
    album,
    relay,
    ferry,
    hives,
    buns,
    library,
    trail,
    tank,
    ages,
    overtime,
    theatre,
    novel,
    market,
)
