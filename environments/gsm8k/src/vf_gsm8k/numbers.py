"""Parse one number as people write it, exactly: as a Fraction, never as a float.

Parsing is strict on purpose: a text that could be read as two different numbers is not accepted as a number.
"""

from __future__ import annotations

import re
from fractions import Fraction

from vf_gsm8k.notation import inline_fractions, plain

INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
NUMBER = rf"(?:{INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
# SI notation groups thousands by spaces. LaTeX and Unicode spaces have already been replaced by blanks
# (`notation.plain`).
_SPACED = rf"(?:[0-9]{{1,3}}(?:[ ][0-9]{{3}})+(?:\.[0-9]+)?|{NUMBER})"

# Matches "-$1,200.50", "$-3", "$42$" (LaTeX math), "3/4", "2 1/2", "15%", "1.2e3" and "1.2 \times 10^3".
_VALUE = re.compile(
    rf"""
    (?P<currency>(?:US|CA|AU|NZ|HK|[ACSR])?\$)?[ ]?(?P<sign>[-+])?[ ]?\$?
    (?: (?P<whole>[0-9]+)[ ](?P<part>[1-9][0-9]{{0,3}})[ ]?/[ ]?(?P<parts>[1-9][0-9]{{0,3}})
      | (?P<top>{_SPACED})
        (?: [ ]?/[ ]?(?P<bottom>{INTEGER})
          | (?:[eE](?P<e>[-+]?[0-9]{{1,2}})
              | [ ]?(?:\\times|\*|x)[ ]?10[ ]?(?:\^|\*\*)[ ]?(?P<brace>\{{)?[ ]?(?P<ten>-?[0-9]{{1,2}})[ ]?(?(brace)\}}))
            (?![0-9.^])
        )?
    )
    [ ]?\$?%?\$?
    """,
    re.VERBOSE,
)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(rf"[ ]?({'|'.join(_SCALES)})\b", re.IGNORECASE)

# Matches the unit after a number: words, "km/h", "cm^2", "(per person)". Digits are allowed only as exponents of a
# unit.
_UNIT = re.compile(r"(?:[ $]?(?:[(/-] ?)?[^\W\d_](?:[^\W\d_]|[ '/().%$\"-]|\^ ?\{?[23]\}?)*)?")
_NUMBER_WORD = (
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|(?:thir|four|fif|six|seven|eigh|nine)teen"
    r"|(?:twen|thir|for|fif|six|seven|eigh|nine)ty)"
)
# Matches words that change the number before them, name a second number, or retract it: "3 dozen", "42 or fifty",
# "6 times seven", "42 below zero", "42 if x is even", "42 is wrong". The alternatives that begin with `^` match only
# directly after the number: "42 quarters", and a variable as in "42a" (but not "42m", "42 a day" or "42L").
_NOT_A_UNIT = re.compile(
    r"\b(?:times|plus|minus|multiplied|divided|squared|cubed|factorial|choose|modulo|over|or|and|but|point|half|versus|vs"
    r"|dozens?|hundreds?|thousands?|millions?|billions?|trillions?|(?:ten|hundred|thousand|million)ths?"
    r"|lakhs?|crores?|negative|below|doubled|tripled|quadrupled|halved|if|unless|assuming|provided"
    r"|wrong|incorrect|false|invalid|mistaken|(?:is|was|are|were|can) ?not|(?:is|was|are|were|ca)n't|not (?:correct|right|true)"
    rf"|(?:to|through|until|not) (?:an?|the|{_NUMBER_WORD}))\b"
    rf"|^ ?-?(?:[xyzneik]|(?-i:[KMB])|bn|mln|mil|gross|tens|halves|thirds|quarters|fourths|{_NUMBER_WORD})\b"
    r"|^ ?-?(?:fif|six|seven|eigh|nin)ths\b"
    r"|^(?: ?[-(])?(?!(?-i:[mglhstLCFVWJ])\b|a [a-z]{2})[a-z\u0370-\u03ff]\b",
    re.IGNORECASE,
)
_SHORT_SCALE = re.compile(r" ?(?:[kmb]|bn|mn|mil|mm)\b", re.IGNORECASE)

_FILLER = re.compile(
    r"(?:(?:about|approximately|approx\.?|around|roughly|exactly|precisely|only|just|simply|now|then|therefore|thus|hence|so|also|clearly"
    r"|indeed|equal to|equals?|a total of|USD|EUR|GBP|INR|CAD|AUD|Rs\.?)(?: ?: ?|\b[. ]*))+",
    re.IGNORECASE,
)
_NEGATIVE = re.compile(r"(?:negative|minus) ?(?=[$0-9.])", re.IGNORECASE)
_LABEL = re.compile(r"(?=[^\W\d_])[^\d_:=,;\\{}<>+*^]{1,60}: ?")
# Matches the beginning of a sentence, up to the number after its verb: "Janet makes" of "Janet makes $18 every day".
_SENTENCE = re.compile(
    r"[^\W\d_](?:[^\W\d_]|[ ,'()-]){0,120}?\b(?:is|are|was|were|will be|would be|has|have|had|makes?|made|earn(?:s|ed)?|costs?"
    r"|pa(?:ys?|id)|needs?|needed|gets?|got|takes?|took|spen(?:ds?|t)|saves?|saved|receives?|received|s(?:ells?|old)"
    r"|contains?|equals?|gives?|gave|eats?|ate|drinks?|drank|buys?|bought|walks?|runs?|ran|reads?|uses?|used|collected"
    r"|bak(?:es?|ed)|weighs?|owes?|owed|left with)(?: (?:be|been|left|(?:left )?with|a total of|about|only))? ?(?=[-+$0-9.])",
    re.IGNORECASE,
)
_CHANGES_WHAT_FOLLOWS = re.compile(
    r"\b(?:no|not|never|cannot|half|third|quarter|twice|doubled?s?|tripled?s?|least|most|more|less|fewer|over|under|than"
    r"|between|from|minus|negative|without|except|or|either|if|unless|some|out|up|maybe|perhaps|unknown|percent(?:age)?"
    rf"|{_NUMBER_WORD})\b|n't\b",
    re.IGNORECASE,
)

_INEQUALITY = re.compile(r"[<>!≠≤≥±]|\\(?:neq?|leq?|geq?|lt|gt|pm)(?![A-Za-z])")
_EQUALS = re.compile(r"=+")
_GROUP_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_SEVERAL = re.compile(r"[,;:]|\b(?:or|and)\b", re.IGNORECASE)
_CALCULATION = re.compile(r"(?:[0-9.,+*/^(){}\[\] $%-]|\\times|\\frac|\\sqrt)+")


def parse_number(text: str) -> Fraction | None:
    r"""Return the value of a bare number in plain text or LaTeX; None if the text is anything else.

    Accepts thousands separators, a sign, a currency, `%` (15% is 15, never 0.15), decimals, fractions, mixed numbers
    and powers of ten; units, words and equations are not accepted. Example: r"-\$1{,}200.50" -> Fraction(-2401, 2)
    """
    written = plain(text)
    if written is None:
        return None
    found = _leading_number(inline_fractions(written))
    return None if found is None or found[1] else found[0]


def stated_number(written: str) -> Fraction | None:
    """Return the number that a marked answer states, given in `plain` spelling; None if it does not state exactly one.

    Accepts what `parse_number` accepts, and also a unit after the number ("42 km per hour", "1.5 million dollars") and
    a label or a short sentence before it ("Total: 42", "She earns $42 a week"). A word that changes the number, or a
    second number, makes the result None ("3 dozen", "42 or 43", "3-5", "3:30", "half of 84").
    """
    written = inline_fractions(written)
    if label := _LABEL.match(written):
        written = written[label.end() :]
    sentence = _SENTENCE.match(written)
    if sentence and not _CHANGES_WHAT_FOLLOWS.search(sentence[0]):
        written = written[sentence.end() :]
    written = _NEGATIVE.sub("-", _FILLER.sub("", written, count=1) if _FILLER.match(written) else written, count=1)
    found = _leading_number(written)
    if found is None:
        return None
    value, rest, has_currency = found
    if scale := _SCALE.match(rest):
        value, rest = value * _SCALES[scale[1].lower()], rest[scale.end() :]
    return value if is_unit(rest, has_currency=has_currency) else None


def is_unit(rest: str, *, has_currency: bool = False) -> bool:
    """Whether the text after a number does not change its value: it is empty, or the number's unit."""
    if has_currency and _SHORT_SCALE.match(rest):
        return False
    return _UNIT.fullmatch(rest) is not None and not _NOT_A_UNIT.search(rest)


def last_side(written: str) -> str | None:
    r"""Return the last side of an equation in `plain` spelling; a text without "=" is returned whole.

    Returns None if the text states several values or an inequality.

    Examples: "x = 42" -> "42"; "6 \times 7 = 42 apples" -> "42 apples"; "x = 3, y = 4" -> None; "x > 42" -> None
    """
    if _INEQUALITY.search(written):
        return None
    first, *others = (side.strip() for side in _EQUALS.split(written))
    if not others:
        return first
    named = _GROUP_COMMA.sub("", first)
    if any(sign.isdigit() for sign in named) and _SEVERAL.search(named):
        return None
    return others[-1] if all(_CALCULATION.fullmatch(side) for side in others[:-1]) else None


def format_number(value: Fraction) -> str:
    """Format a number as its shortest exact decimal, or as a fraction if it has none. Examples: "42", "-0.5", "1/3"."""
    twos_and_fives = value.denominator
    for prime in (2, 5):
        while twos_and_fives % prime == 0:
            twos_and_fives //= prime
    if twos_and_fives > 1:
        return f"{value.numerator}/{value.denominator}"
    places = 0
    while (value * 10**places).denominator > 1:
        places += 1
    digits = str(abs((value * 10**places).numerator)).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}" if places else f"{sign}{digits}"


def _leading_number(written: str) -> tuple[Fraction, str, bool] | None:
    """Return the number at the start of the text, the text after it, and whether it has a currency sign; or None."""
    match = _VALUE.match(written)
    if match is None:
        return None
    if match["whole"]:
        part = Fraction(int(match["part"]), int(match["parts"]))
        if part >= 1:
            return None
        value = int(match["whole"]) + part
    else:
        top = match["top"].replace(",", "").replace(" ", "")
        value = Fraction(int(top) if top.isdigit() else top)  # a text is read by a pattern of its own
        if match["bottom"]:
            if not (bottom := int(match["bottom"].replace(",", ""))):
                return None
            value /= bottom
        if power := match["e"] or match["ten"]:
            value *= Fraction(10) ** int(power)
    rest = written[match.end() :]
    # In "1,23", "1.2.3", "3-5", "3:30", "1/2/3" and "2^3" the match ends inside a longer expression, so it is no
    # number.
    if rest[:1].isdigit() or re.match(r" ?[-.,/:^*+\\_!{(]* ?\$?[0-9]", rest):
        return None
    has_currency = "$" in match[0]
    return (-value if match["sign"] == "-" else value), rest, has_currency
