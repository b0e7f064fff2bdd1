"""How lexical retrieval splits text into words, and when two texts count as the same.

Text is folded: other spellings of a character, case, accents and signs that nobody sees are no difference. A word is a
run of letters and digits with the marks that stand on them, which are letters of their own in many scripts. Where no
spaces stand between words, a katakana run is one word, and other runs become pairs of neighbouring characters: Han,
hiragana, Thai, Lao, Khmer and Burmese, and Hangul, whose particles have no space before them. English function words are
dropped. There is no stemming: on MuSiQue, stemming lowers recall and a long stop list raises it (README.md has the
numbers).
"""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

import regex  # `re` knows neither scripts nor marks

# English function words, by class. The list leaves out adverbs with content ("first", "last"), numbers, "may", and
# single letters such as the s of "it's", which are also names (vitamin D, the film M).
_CLASSES = """
articles, demonstratives: a an the this that these those such same other another
pronouns: i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers
    herself it its itself they them their theirs themselves one ones oneself somebody someone something anybody anyone
    anything everybody everyone everything nobody none nothing each either neither both all any some every no few many
    much more most several enough own less least
questions, relatives: who whom whose which what when where why how whoever whatever whichever whenever wherever
    whereas whereby wherein whether while
be, have, do, modals: am is are was were be been being have has had having do does did doing done can could might must
    shall should will would ought cannot
conjunctions: and but or nor so if then else than because as though although unless until since yet
prepositions: of at by for with about against between into through during before after above below to from up down in
    out on off over under again further upon within without among amongst along across around behind beside besides
    beyond despite except inside outside near onto toward towards via per throughout till unto
adverbs: not only just very too also even ever never now here there hence thus therefore thereby therein thereupon
    however moreover otherwise instead rather quite perhaps still already always often sometimes almost mostly
    meanwhile indeed nevertheless nonetheless anyhow anyway somehow sometime somewhere elsewhere everywhere nowhere
    anywhere once twice together apart
light verbs: get gets got getting go goes went gone become becomes became make makes made making take takes took taken
    give gives gave given keep keeps kept put puts seem seems seemed
questions' carriers (what is the name of): name
remnants of contractions (they'll, don't): ll re ve don didn doesn isn aren wasn weren hasn haven hadn
    couldn wouldn shouldn mustn needn won ain
"""
STOP_WORDS = frozenset(word for part in re.split(r"^.*?:", _CLASSES, flags=re.MULTILINE) for word in part.split())

# For ASCII text, one table lowercases letters and blanks what is not in a word, in a quarter of the regex's time.
_ASCII = bytes(
    ord(chr(code).lower() if chr(code).isalnum() or chr(code) == "_" else " ") for code in range(128)
) + bytes(128)
_UNSEEN = regex.compile(r"\p{Default_Ignorable_Code_Point}+")
# Marks that writers may leave out: accents, Hebrew points, Arabic vowel signs and the stroke that lengthens a word. The
# breve of й and ў and the dots of ї make other letters, as do the marks of all other scripts.
_OPTIONAL = regex.compile(
    "(?<![\u0438\u0443])\u0306|(?<!\u0456)\u0308|[\u0300-\u0305\u0307\u0309-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\ufe20-\ufe2f"
    "\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0640\u064b-\u0652\u0670\u06d6-\u06ed]"
)
_STROKES = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ħ": "h", "ı": "i", "æ": "ae", "œ": "oe"})
_OTHER_DIGIT = regex.compile(r"[^\P{Nd}0-9]")
_WORD = regex.compile(r"[^\W\p{M}]\w*")
_PAIRED = r"\p{Han}+|\p{Hangul}+|\p{Hiragana}[\p{Hiragana}ー]*|\p{Line_Break=Complex_Context}[\p{Line_Break=Complex_Context}\p{M}]*"
_RUN = regex.compile(rf"({_PAIRED})|\p{{Word_Break=Katakana}}+|(?:(?!{_PAIRED}|\p{{Word_Break=Katakana}}).)+")
_UNSPACED = r"[\p{Han}\p{Hiragana}\p{Word_Break=Katakana}\p{Line_Break=Complex_Context}]"
_PIECE = regex.compile(rf"(?:{_UNSPACED}\p{{M}}*|(?:(?!{_UNSPACED})\S)+)\s*")


def folded(text: str) -> str:
    """The form in which two texts are equal if they read the same (Unicode's NFKC_Casefold), with single blanks.

    It is empty for a text of which nothing is seen, such as a zero-width space.
    """
    if text.isascii():
        return " ".join(text.lower().split())
    return " ".join(unicodedata.normalize("NFC", _decomposed(text)).split())


def _decomposed(text: str) -> str:
    # A zero-width space ends a word, other signs that are not seen (soft hyphen, joiners) stand inside one.
    apart = unicodedata.normalize("NFKD", text.replace("\u200b", " ")).casefold()
    return _UNSEEN.sub("", unicodedata.normalize("NFKD", apart))


def words(text: str) -> list[str]:
    """The words of `text` in order, without stop words.

    If all are stop words ("The Who"), they are kept, as there are no others.
    """
    if text.isascii():
        found = text.encode("ascii").translate(_ASCII).decode("ascii").split()
    else:
        bare = unicodedata.normalize("NFC", _OPTIONAL.sub("", _decomposed(text))).translate(_STROKES)
        bare = _OTHER_DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0], digit[0])), bare)
        found = [part for word in _WORD.findall(bare) for part in _parts(word)]
    return [word for word in found if word not in STOP_WORDS] or found


def _parts(word: str) -> list[str]:
    """A word, in scripts that write no spaces the units that stand for words."""
    if word.isascii():
        return [word]
    parts: list[str] = []
    for run in _RUN.finditer(word):
        characters = regex.findall(r"\X", run[0]) if run[1] else []
        parts += [a + b for a, b in pairwise(characters)] if len(characters) > 1 else [run[0]]
    return parts


def pieces(text: str) -> list[str]:
    """The text cut into words, or characters where no spaces stand between words, each with the blanks behind it."""
    return _PIECE.findall(text)
