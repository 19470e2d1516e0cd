"""The lab language: eight kinds of prompt and response from a seeded grammar whose probabilities are known exactly.

A prompt holds the information; the response is determined by it except for local choices that re-converge: a synonym,
an optional word, two clauses in either order. Every choice is visible in the very next word, so a response has one
derivation, and its log-probability is the sum over its choices. The same telling that samples a response also
enumerates all of them or scores a given one.

Words: a telling is the function that says the response to one prompt, through a Speaker, which makes the choices.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..errors import InputError
from . import words as w

LEVELS = 3  # 0 and 1 are the curriculum (fewer items, smaller dictionaries), 2 is the language
LONGEST_RESPONSE = 120  # tokens, end of turn included; a test holds the grammar to it
HELD_OUT_SHARE = 16  # one prompt in so many belongs to the evaluation split


@dataclass(frozen=True)
class Rates:
    """How ambiguous responses are; all zero makes them deterministic.

    synonym: 1 draws evenly from a synonym set, s gives the canonical word the excess probability 1-s.
    optional: probability that an optional word is said. reorder: probability of the second order of two clauses.
    """

    synonym: float = 1.0
    optional: float = 0.4
    reorder: float = 0.5

    def __post_init__(self) -> None:
        if not all(0 <= rate <= 1 for rate in (self.synonym, self.optional, self.reorder)):
            raise InputError("rates of the lab language must lie between 0 and 1.")


@dataclass(frozen=True)
class Choice:
    """One decision: it fixed word `position` of the response by taking option `taken` of those with probabilities."""

    position: int
    taken: int
    probabilities: tuple[float, ...]


class Unsayable(Exception):
    """The telling says something else than the text it is compared with."""


@dataclass
class Speaker:
    """Says a response, making every choice from `rng`, from a `script` of options, or (beyond it) the first possible.

    against: words that the response has to be; Unsayable is raised at the first difference.
    """

    rates: Rates
    rng: random.Random | None = None
    script: Sequence[int] = ()
    against: Sequence[str] | None = None
    words: list[str] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)

    def choose(self, probabilities: tuple[float, ...]) -> int:
        """The index of an option. Options of probability 0 are never taken; a sure option is no choice."""
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        if len(possible) == 1:
            return possible[0]
        if len(self.choices) < len(self.script):
            taken = self.script[len(self.choices)]
        elif self.rng is not None:
            taken = self.rng.choices(range(len(probabilities)), probabilities)[0]
        else:
            taken = possible[0]
        self.choices.append(Choice(len(self.words), taken, probabilities))
        return taken

    def say(self, text: str) -> None:
        """Says words: any word with synonyms as one of them, a word in brackets only sometimes."""
        for word in text.split():
            if word.startswith("(") and word.endswith(")") and len(word) > 2:
                if self.choose((1 - self.rates.optional, self.rates.optional)) == 0:
                    continue
                word = word[1:-1]
            options = w.SYNONYMS.get(word, (word,))
            spread = self.rates.synonym / len(options)
            word = options[self.choose((1 - spread * (len(options) - 1),) + (spread,) * (len(options) - 1))]
            if self.against is not None and self.against[len(self.words) : len(self.words) + 1] != [word]:
                raise Unsayable
            self.words.append(word)

    def either(self, usual: str, other: str) -> None:
        """Says one of two orders of the same clauses; they have to differ in the first word."""
        self.say((usual, other)[self.choose((1 - self.rates.reorder, self.rates.reorder))])

    @property
    def logprob(self) -> float:
        """Natural log of the probability of all choices made."""
        return sum(math.log(c.probabilities[c.taken]) for c in self.choices)


Telling = Callable[[Speaker], None]


@dataclass(frozen=True)
class Example:
    """A prompt with one sampled response. logprob: nats, of the response given the prompt, under the grammar."""

    task: str
    prompt: str
    response: str
    logprob: float
    choices: tuple[Choice, ...]
    telling: Telling = field(repr=False, compare=False)
    rates: Rates = Rates()


def sample(task: str, rng: random.Random, level: int = LEVELS - 1, rates: Rates | None = None) -> Example:
    """Draws a prompt and a response. level: 0 to LEVELS-1. Raises InputError for an unknown task or level."""
    if task not in TASKS:
        raise InputError(f"the lab language has no task {task!r}; it has {', '.join(TASKS)}.")
    if level not in range(LEVELS):
        raise InputError(f"the level of the lab language is 0 to {LEVELS - 1}, not {level}.")
    rates = rates or Rates()
    prompt, telling = TASKS[task](Draw(rng, level))
    speaker = Speaker(rates, rng)
    telling(speaker)
    text = " ".join(speaker.words)
    return Example(task, prompt, text, speaker.logprob, tuple(speaker.choices), telling, rates)


def derivations(telling: Telling, rates: Rates, against: str | None = None) -> Iterator[Speaker]:
    """Every way of saying a response, or of saying exactly the text `against`: depth-first over the choices."""
    words = None if against is None else against.split()
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        script = scripts.pop()
        speaker = Speaker(rates, script=script, against=words)
        said = True
        try:
            telling(speaker)
        except Unsayable:
            said = False
        taken = tuple(c.taken for c in speaker.choices)
        for i, choice in enumerate(speaker.choices[len(script) :], start=len(script)):
            later = [j for j, p in enumerate(choice.probabilities) if p > 0 and j > choice.taken]
            scripts.extend((*taken[:i], j) for j in later)
        if said and (words is None or len(words) == len(speaker.words)):
            yield speaker


def score(example: Example, response: str) -> float:
    """Log-probability in nats of any response to the example's prompt; -inf when the grammar cannot say it."""
    total = sum(math.exp(s.logprob) for s in derivations(example.telling, example.rates, response))
    return math.log(total) if total > 0 else -math.inf


def held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the evaluation split: a hash decides, so no seed can mix the splits."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4]) % HELD_OUT_SHARE == 0


def sample_split(
    split: str, task: str, rng: random.Random, level: int = LEVELS - 1, rates: Rates | None = None
) -> Example:
    """Like `sample`, but only prompts of the split `train` or `eval`."""
    if split not in ("train", "eval"):
        raise InputError(f"the lab language has the splits train and eval, not {split!r}.")
    while True:
        example = sample(task, rng, level, rates)
        if held_out(example.prompt) == (split == "eval"):
            return example


def vocabulary() -> list[str]:
    """Every word of prompts and responses, in a fixed order without repeats."""
    tongues = (*w.NOUNS, *w.VERBS, *w.ADJECTIVES, *w.WHEN)
    pools = (w.NUMBERS, w.VARIABLES, w.TIMES, w.NAMES, w.THINGS, w.PLACES, w.QUALITIES, w.TRAITS, w.ANIMALS, w.COUNTED)
    parts: list[Sequence[str]] = [FIXED.split(), *pools, w.DEEDS, *w.SYNONYMS.values()]
    parts += [e.tavo for e in tongues] + [forms for e in tongues for forms in e.miren]
    return list(dict.fromkeys(word for part in parts for word in part))


# ---- drawing the information of a prompt -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Draw:
    """Random facts at a level of the curriculum."""

    rng: random.Random
    level: int

    def items(self, low: int, high: int) -> int:
        """How many items a prompt has: `low` to `high` at the last level, fewer before."""
        return self.rng.randint(max(1, low - (LEVELS - 1 - self.level)), max(1, high - (LEVELS - 1 - self.level)))

    def some(self, pool: Sequence, count: int) -> list:
        """Different members of a pool, of which early levels use only the first part."""
        size = max(count, len(pool) * (self.level + 1) // LEVELS)
        return self.rng.sample(pool[:size], count)

    def one(self, pool: Sequence):
        return self.some(pool, 1)[0]

    def coin(self) -> bool:
        return self.rng.random() < 0.5


# ---- the eight tasks ------------------------------------------------------------------------------------------------
def translation(draw: Draw) -> tuple[str, Telling]:
    """Tavo (subject, verb, object; adjectives behind nouns, time last) to Miren (time first, verb last, cases)."""
    sentences = []
    for _ in range(draw.items(3, 4)):
        (subject, object_), verb = draw.some(w.NOUNS, 2), draw.one(w.VERBS)
        adjectives = [draw.one(w.ADJECTIVES) if draw.coin() else None for _ in range(2)]
        when = draw.one(w.WHEN) if draw.coin() else None
        sentences.append(
            ((subject, object_), adjectives, [int(draw.coin()) for _ in range(2)], verb, int(draw.coin()), when)
        )

    def tavo() -> Iterator[str]:
        for nouns, adjectives, numbers, verb, tense, when in sentences:
            phrases = [
                n.tavo[k] + (f" {a.tavo[0]}" if a else "") for n, a, k in zip(nouns, adjectives, numbers, strict=True)
            ]
            yield f"{phrases[0]} {verb.tavo[tense]} {phrases[1]}" + (f" {when.tavo[0]}" if when else "") + " ."

    def tell(speaker: Speaker) -> None:
        for nouns, adjectives, numbers, verb, tense, when in sentences:
            phrases = [
                (f"{a.miren[k][0]} " if a else "") + n.miren[k][0]
                for n, a, k in zip(nouns, adjectives, numbers, strict=True)
            ]
            subject, object_ = f"{phrases[0]} no", f"{phrases[1]} ke"
            time = f"{when.miren[0][0]} " if when else ""
            speaker.say(f"{time}{subject} {object_} (eto) {verb.miren[tense][0]} .")

    return "translate tavo to miren : " + " ".join(tavo()), tell


def math_reasoning(draw: Draw) -> tuple[str, Telling]:
    """A running total: who gives or takes how many, with every step worked."""
    thing, (owner, *others) = draw.one(w.COUNTED), draw.some(w.NAMES, 1 + draw.items(2, 4))
    total = start = draw.rng.randint(3, 12)
    events = []
    for name in others:
        gives = total <= 4 or (total < w.MAX_NUMBER - 5 and draw.coin())
        amount = draw.rng.randint(1, 5 if gives else min(5, total - 1))
        after = total + amount if gives else total - amount
        events.append(
            (name, "gives" if gives else "takes", amount, f"{total} {'+' if gives else '-'} {amount} = {after}")
        )
        total = after
    told = " ".join(f"{name} {verb} {amount} ." for name, verb, amount, _ in events)

    def tell(speaker: Speaker) -> None:
        speaker.say(f"(first) {owner} begins with {start} {thing} .")
        for name, verb, amount, work in events:
            speaker.say(f"then {name} {verb} {amount} (of) (the) {thing} , so {work} .")
        speaker.say(f"finally {owner} has {total} {thing} . answer : {total} .")

    return f"{owner} has {start} {thing} . {told} how many {thing} does {owner} have ?", tell


def code(draw: Draw) -> tuple[str, Telling]:
    """A program for a specification, each step with its value as a comment, and its output."""
    names = draw.some(w.VARIABLES, 2 if draw.level else 1)
    spec, lines, value = [], [], {}
    for name in names:
        value[name] = draw.rng.randint(2, 12)
        spec.append(f"set {name} to {value[name]} .")
        lines.append((name, "", value[name], ""))
        for _ in range(draw.items(1, 2)):
            before = value[name]
            plus = before <= 4 or (before < w.MAX_NUMBER - 5 and draw.coin())
            amount = draw.rng.randint(1, 5 if plus else min(5, before - 1))
            value[name] = before + amount if plus else before - amount
            spec.append(f"add {amount} to {name} ." if plus else f"take {amount} from {name} .")
            sign = "+" if plus else "-"
            lines.append((name, sign, amount, f"{before} {sign} {amount} = {value[name]}"))
    shown = names[-1]

    def tell(speaker: Speaker) -> None:
        for name, sign, amount, work in lines:
            if not sign:
                speaker.say(f"var {name} = {amount} ;")
                continue
            speaker.say(name)
            speaker.either(f"{sign}= {amount}", f"= {name} {sign} {amount}")
            speaker.say(f"(;) # {name} is {work} ;")
        speaker.say(f"print {shown} ; result : {value[shown]}")

    return f"code : {' '.join(spec)} show {shown} .", tell


def qa(draw: Draw) -> tuple[str, Telling]:
    """Questions about who has what, where, and of which quality that place is."""
    count = draw.items(3, 4)
    names, things, places = draw.some(w.NAMES, count), draw.some(w.THINGS, count), draw.some(w.PLACES, count)
    qualities = [draw.one(w.QUALITIES) for _ in range(count)]
    facts = list(zip(names, things, places, qualities, strict=True))
    asked = [(fact, draw.rng.choice(("where", "who", "how"))) for fact in draw.rng.sample(facts, min(count, 3))]
    told = " ".join(f"the {t} {n} has stands at the {n} {p} {q} ." for n, t, p, q in facts)
    forms = {"where": "where is the {} ?", "who": "who has the {} ?", "how": "how is the place of the {} ?"}
    questions = " ".join(forms[kind].format(fact[1]) for fact, kind in asked)

    def tell(speaker: Speaker) -> None:
        for (name, thing, place, quality), kind in asked:
            if kind == "where":
                speaker.either(f"the {thing} {name} has (now) stands at", f"you find the {thing} {name} has at")
                speaker.say(f"the {name} {place} , because {name} keeps it there .")
            elif kind == "who":
                speaker.say(f"the {thing} {name} has , so (surely) ask {name} .")
            else:
                speaker.say(f"the {thing} {name} has is (clearly) at the {name} {place} {quality} .")

    return f"facts : {told} questions : {questions}", tell


def summarization(draw: Draw) -> tuple[str, Telling]:
    """Each sentence of a passage cut down to who did what."""
    count = draw.items(3, 5)
    names, things, places = draw.some(w.NAMES, count), draw.some(w.THINGS, count), draw.some(w.PLACES, count)
    events = [(n, draw.one(w.DEEDS), t, p) for n, t, p in zip(names, things, places, strict=True)]
    told = " ".join(
        f"{n} {d} a {draw.one(w.QUALITIES)} {t} at the {p} at {draw.rng.choice(w.TIMES)} ." for n, d, t, p in events
    )

    def tell(speaker: Speaker) -> None:
        speaker.say("in short :")
        for i, (name, deed, thing, place) in enumerate(events):
            if i:
                speaker.say("and (then)" if i == count - 1 else "; (then)")
            speaker.either(f"{name} {deed} a {thing} at the {place}", f"at the {place} {name} {deed} a {thing}")
        speaker.say(".")

    return f"summarize : {told}", tell


def rag(draw: Draw) -> tuple[str, Telling]:
    """Documents about places, each with an author and a number; the answer is found in them and cited."""
    count = draw.items(3, 4)
    places, things, names = draw.some(w.PLACES, count), draw.some(w.THINGS, count), draw.some(w.NAMES, count)
    hours = [draw.rng.randint(5, 12) for _ in range(count)]
    documents = list(zip(range(1, count + 1), places, things, names, hours, strict=True))
    told = " ".join(
        f"the {p} {n} runs in document {n} {i} sells the {n} {t} and opens at {h} ." for i, p, t, n, h in documents
    )
    asked = draw.rng.sample(documents, min(count, 2))

    def tell(speaker: Speaker) -> None:
        for i, place, thing, name, hour in asked:
            speaker.say(f"the {place} {name} runs (there)")
            speaker.either(
                f"sells the {name} {thing} , says document {name} {i} .",
                f", says document {name} {i} , sells the {name} {thing} .",
            )
            speaker.say(f"it (only) opens at {hour} , so ask {name} . source : {name} {i} .")

    return f"{told} tell me about the {' and the '.join(d[1] for d in asked)} .", tell


def dialogue(draw: Draw) -> tuple[str, Telling]:
    """A customer's orders, confirmed one by one."""
    count = draw.items(2, 3)
    name, things, places = draw.one(w.NAMES), draw.some(w.THINGS, count), draw.some(w.PLACES, count)
    orders = [(draw.one(w.QUALITIES), t, p, draw.rng.choice(w.TIMES)) for t, p in zip(things, places, strict=True)]
    told = " ".join(f"please bring a {q} {t} to the {p} at {c} ." for q, t, p, c in orders)

    def tell(speaker: Speaker) -> None:
        speaker.say(f"hello (dear) {name} !")
        for quality, thing, place, clock in orders:
            speaker.say("sure , we will")
            order = f"bring the {quality} {thing} to the {place}"
            speaker.either(f"{order} at {clock} .", f", at {clock} , {order} .")
        speaker.say(f"do you need anything (else) , {name} ?")

    return f"hello , my name is {name} . {told}", tell


def writing(draw: Draw) -> tuple[str, Telling]:
    """A short story about two animals, a thing and a place."""
    (hero, friend), (kind, other) = draw.some(w.NAMES, 2), draw.some(w.ANIMALS, 2)
    (trait, manner), thing, place = draw.some(w.TRAITS, 2), draw.one(w.THINGS), draw.one(w.PLACES)
    quality = draw.one(w.QUALITIES)

    def tell(speaker: Speaker) -> None:
        speaker.say(
            f"once there lived a {trait} {kind} called {hero} . one day {hero} (slowly) walked to the {place} ."
        )
        speaker.either(
            f"there {hero} met {friend} , a {manner} {other}", f"{friend} , a {manner} {other} , met {hero} there"
        )
        speaker.say(f". {friend} (proudly) had a {quality} {thing} . {hero} (really) wanted the {thing} , so")
        speaker.say(f"{friend} (kindly) shared the {thing} with {hero} . finally")
        speaker.either(f"{hero} and {friend} (both) laughed", f"{friend} and {hero} (both) laughed")
        speaker.say("and walked home (together) . the end .")

    told = f"hero {hero} the {trait} {kind} , friend {friend} the {manner} {other}"
    return f"write a story : {told} , a {quality} {thing} , at the {place} .", tell


TASKS: dict[str, Callable[[Draw], tuple[str, Telling]]] = {
    task.__name__: task for task in (translation, math_reasoning, code, qa, summarization, rag, dialogue, writing)
}

# Words of the templates above that are in no pool; a test compares this list with thousands of samples.
FIXED = """. , : ; ? ! = + - += -= # a the of and at to it is in with you find ask place
translate tavo miren no ke eto first how many does have has then so finally
code set add take from show print var result facts questions where who at stands now there because keeps surely
clearly summarize short document says sells opens only runs source tell me about
hello dear my name sure we will bring please do you need anything else
write story hero friend once lived called one day slowly walked met had proudly really wanted kindly shared both laughed
home together end"""
