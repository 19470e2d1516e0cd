"""The words of the lab language: who, what and where, the synonym sets, and the lexicons of two invented tongues.

Everything is a constant of the package: the invented words come from a fixed seed, so that a tokenizer, a prompt set
and a trained target always agree. Prompts use the first word of a synonym set only; responses may use any of them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


def _invent(rng: random.Random, count: int, syllables: list[str], parts: tuple[int, ...], taken: set[str]) -> list[str]:
    """`count` new words of 2 or 3 syllables that are not in `taken` (which grows)."""
    words: list[str] = []
    while len(words) < count:
        word = "".join(rng.choice(syllables) for _ in range(rng.choice(parts)))
        if word not in taken:
            taken.add(word)
            words.append(word)
    return words


def _syllables(consonants: str, vowels: str, coda: str = "") -> list[str]:
    return [c + v + e for c in consonants for v in vowels for e in ("", *coda)]


_rng = random.Random(2609)
_taken: set[str] = set()
NAMES = [n.capitalize() for n in _invent(_rng, 96, _syllables("bdfjklmnrtvz", "aeio", "ln"), (2,), _taken)]

# ---- English words: the first of each group is the canonical one -----------------------------------------------------
_THINGS = (
    "lamp lantern|drum|boat ship|box crate|stone rock|cup mug|coat jacket|bag sack|hat cap|rug carpet|pot kettle|bell|"
    "book volume|key|ring band|clock watch|mirror glass|chair seat|table desk|picture painting|rope cord|basket hamper|"
    "knife blade|flute pipe|letter note|map chart|candle taper|blanket quilt|mask|kite|ladder|wheel|hammer|needle|"
    "bottle flask|umbrella|saddle|anchor|crown|feather"
)
_PLACES = (
    "harbor port|market bazaar|forest woods|garden yard|mill|tower|bridge|castle fortress|school|temple shrine|"
    "cave cavern|island isle|village hamlet|meadow field|river stream|farm ranch|library|station|museum gallery|palace|"
    "bakery|theater|square plaza|lake pond|hill mound|valley|beach shore|inn tavern|barn shed|mine"
)
_QUALITIES = (
    "red scarlet|blue azure|green|yellow golden|white pale|black dark|big large|small little|old ancient|new modern|"
    "heavy weighty|light|round|wooden|shiny bright|broken damaged|clean|dusty|rare scarce|cheap"
)
_TRAITS = "brave bold|clever smart|shy timid|kind gentle|proud vain|quiet silent|lazy idle|merry jolly|wise sage|honest"
_ANIMALS = (
    "fox vixen|bear|wolf|rabbit hare|owl|goat|horse pony|cat kitten|dog hound|mouse|duck|frog toad|deer|crow raven|pig|"
    "turtle"
)
_COUNTED = (
    "coins pennies|beads pearls|shells|nuts acorns|apples|eggs|cards|stamps|plums|seeds grains|candies sweets|buttons"
)
_DEEDS = (
    "found discovered|bought purchased|lost misplaced|sold|hid concealed|painted decorated|repaired fixed|stole|"
    "carried|cleaned washed|dropped|borrowed"
)
_GLUE = (
    "then next afterwards|so thus hence therefore|begins starts|gives offers|takes grabs|finally lastly|short brief|"
    "because since|says states|stands lies|keeps owns|sure certainly|hello hi|anything something|print show|"
    "bring deliver|will shall|day morning|walked wandered|met encountered|laughed smiled|wanted wished|lived dwelt|"
    "once formerly|document source|sells peddles|runs manages|end finish|var let|# //|result output|answer reply"
)


def _groups(text: str) -> list[tuple[str, ...]]:
    return [tuple(group.split()) for group in text.split("|")]


def _first(text: str) -> list[str]:
    return [group[0] for group in _groups(text)]


THINGS, PLACES, QUALITIES = _first(_THINGS), _first(_PLACES), _first(_QUALITIES)
TRAITS, ANIMALS, COUNTED, DEEDS = _first(_TRAITS), _first(_ANIMALS), _first(_COUNTED), _first(_DEEDS)
TIMES = ["dawn", "noon", "dusk", "midnight"]
VARIABLES = ["a", "b", "c", "n", "x", "y"]
MAX_NUMBER = 20
NUMBERS = [str(n) for n in range(MAX_NUMBER + 1)]


# ---- two invented tongues: Tavo (the prompt) and Miren (the response) ----------------------------------------------
@dataclass(frozen=True)
class Entry:
    """One meaning: its Tavo forms and, per form, the Miren words that translate it (all equally right)."""

    tavo: tuple[str, ...]
    miren: tuple[tuple[str, ...], ...]


def _lexicon(count: int, tavo_endings: tuple[str, ...], miren_endings: tuple[str, ...]) -> list[Entry]:
    tavo = _invent(_rng, count, _syllables("ptkbdgmn", "aou"), (2, 3), _taken)
    miren = _invent(_rng, 2 * count, _syllables("slrvfzh", "eiy", "nrs"), (2,), _taken)
    entries = []
    for i, stem in enumerate(tavo):
        stems = miren[2 * i : 2 * i + 1 + (i % 2)]
        entries.append(
            Entry(tuple(stem + e for e in tavo_endings), tuple(tuple(s + e for s in stems) for e in miren_endings))
        )
    return entries


NOUNS = _lexicon(60, ("", "ji"), ("", "ka"))  # singular, plural
VERBS = _lexicon(20, ("sa", "sen"), ("mo", "mul"))  # present, past
ADJECTIVES = _lexicon(20, ("we",), ("o", "oka"))  # Miren adjectives agree with their noun in number
WHEN = _lexicon(10, ("x",), ("ta",))

SYNONYMS: dict[str, tuple[str, ...]] = {
    group[0]: group
    for text in (_THINGS, _PLACES, _QUALITIES, _TRAITS, _ANIMALS, _COUNTED, _DEEDS, _GLUE)
    for group in _groups(text)
    if len(group) > 1
}
SYNONYMS |= {forms[0]: forms for e in (*NOUNS, *VERBS, *ADJECTIVES, *WHEN) for forms in e.miren if len(forms) > 1}
