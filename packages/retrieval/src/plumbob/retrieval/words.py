"""How lexical retrieval splits text into words.

Text is lowercased, accents are removed, words are runs of letters and digits, and English function words are dropped.
There is no stemming: on MuSiQue, stemming lowers recall and a long stop list raises it (README.md has the numbers). In
a language that is written without spaces, a whole run of letters is one word, so use a semantic retriever there.
"""

from __future__ import annotations

import re
import unicodedata

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

_WORD = re.compile(r"\w+")
_ACCENTS = re.compile("[\u0300-\u036f]+")
# For ASCII text, one table lowercases letters and blanks what is not in a word, in a quarter of the regex's time.
_ASCII = bytes(
    ord(chr(code).lower() if chr(code).isalnum() or chr(code) == "_" else " ") for code in range(128)
) + bytes(128)


def words(text: str) -> list[str]:
    """The words of `text` in order, without stop words.

    If all are stop words ("The Who"), they are kept, as there are no others.
    """
    if text.isascii():
        found = text.encode("ascii").translate(_ASCII).decode("ascii").split()
    else:
        found = _WORD.findall(_ACCENTS.sub("", unicodedata.normalize("NFKD", text)).lower())
    return [word for word in found if word not in STOP_WORDS] or found
