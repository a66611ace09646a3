# SPDX-License-Identifier: Apache-2.0
"""Prompts of our own for kinds of tasks that collected prompts hardly have.

German sentences to translate, from a small grammar; short questions; and long passages
of other prompts to be summarised. Nothing in here comes from an evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from spexis_runtime.train.prompts import Prompt

SUBJECTS = """Die Bundesregierung|Der Bürgermeister|Ein Sprecher der Polizei
Die Forscherin|Der Trainer der Mannschaft|Eine Gruppe von Studenten|Die Kommission
Der Vorstand des Unternehmens|Die Gewerkschaft|Ein Mitarbeiter des Museums|Die Lehrerin
Der Präsident|Die meisten Kunden|Der Verein|Eine junge Ärztin|Die Opposition
Der Hersteller|Das Gericht in München|Die Bewohner des Dorfes|Der Minister
Mein Nachbar|Die Stadtverwaltung|Ein Landwirt aus Bayern|Die Zeitung"""
VERBS = """hat ein neues Gesetz vorgestellt|will im nächsten Jahr mehr Geld ausgeben
warnte vor steigenden Preisen|hat den Vertrag um zwei Jahre verlängert
sucht nach einer Lösung für das Problem|plant den Bau einer neuen Brücke
lehnte den Vorschlag ab|hat die Ergebnisse der Untersuchung veröffentlicht
freut sich über den Erfolg|möchte die alten Gebäude erhalten
rechnet mit einem langen Winter|hat sich zu den Vorwürfen nicht geäußert
verkaufte die Hälfte der Anteile|eröffnet eine Ausstellung über das Mittelalter
fordert bessere Bedingungen für alle|hat das Spiel in der letzten Minute gewonnen
verzichtet künftig auf Plastik|baut jetzt auch kleine elektrische Fahrzeuge
hat einen Brief an die Eltern geschrieben|bleibt bei der bisherigen Meinung"""
WHEN = """am Montag|seit drei Wochen|nach langen Verhandlungen|trotz der Kritik
in der vergangenen Nacht|zum ersten Mal|wegen des schlechten Wetters|vor der Wahl
im Sommer|in diesem Jahr|kurz vor Weihnachten|ohne weitere Erklärung"""
CLAUSES = """, weil die Kosten zu hoch waren|, obwohl viele dagegen sind
, wie am Abend bekannt wurde|, damit die Kinder sicher zur Schule kommen
, nachdem ein Feuer ausgebrochen war|, sagte sie der Deutschen Presse-Agentur
, was für die Region sehr wichtig ist|, um die Umwelt zu schützen
, aber niemand wurde verletzt|, die seit Jahren leer stehen
, und das soll auch so bleiben|"""
QUESTIONS = """Who invented {}?|When was {} first used?|What is {} made of?
How does {} work?|Why is {} important?|Where does {} come from?
What is the history of {}?|Who discovered {}?|What are the main uses of {}?
What is the difference between {} and {}?|How was {} named?"""
THINGS = """the telephone|penicillin|paper|the bicycle|coffee|chess|gunpowder
the compass|chocolate|glass|electricity|the printing press|rubber|tea|silk|the piano
concrete|the microscope|sugar|the calendar|the steam engine|insulin|cotton|the guitar
radio|porcelain|soap|the vaccine|ice cream|the zip fastener|olive oil|steel|bread
the telescope|the umbrella|plastic|salt|the camera|yeast|the thermometer|jazz|vanilla
the novel|bronze|the lighthouse|honey|the violin|aspirin|cement|the clock"""
MIN_PASSAGE = 600  # characters


def _parts(text: str) -> list[str]:
    return text.replace("\n", "|").split("|")


def translations(number: int, seed: int = 0) -> list[Prompt]:
    draw = random.Random(seed)
    lists = [_parts(text) for text in (SUBJECTS, VERBS, WHEN, CLAUSES)]
    found: dict[str, None] = {}
    while len(found) < number:
        subject, verb, when, clause = (draw.choice(parts) for parts in lists)
        first, *rest = verb.split(" ")
        sentence = f"{subject} {first} {when} {' '.join(rest)}{clause}".strip()
        found[f"Translate German to English: {sentence} ."] = None
    return [Prompt((text,), "own", "translation") for text in found]


def questions(number: int, seed: int = 0) -> list[Prompt]:
    draw = random.Random(seed)
    forms, things = _parts(QUESTIONS), _parts(THINGS)
    found: dict[str, None] = {}
    while len(found) < number:
        form = draw.choice(forms)
        found[form.format(*draw.sample(things, form.count("{}")))] = None
    return [Prompt((text,), "own", "qa") for text in found]


def summaries(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Of the longest paragraph of each prompt that has a long one."""
    found: dict[str, None] = {}
    for prompt in prompts:
        passage = max(prompt.turns[0].split("\n"), key=len).strip()
        if len(passage) >= MIN_PASSAGE:
            found[f"Summarize: {passage}"] = None
    return [Prompt((text,), "own", "summarization") for text in found]
