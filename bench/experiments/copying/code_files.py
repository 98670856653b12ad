"""Small Python files from templates, in which something can be changed."""

from __future__ import annotations

from dataclasses import dataclass

from bench.experiments.copying.words import ADJECTIVES, PLACES, THINGS, Material

HEADS = (
    '"""Functions for the {place} of {name}."""\n\n',
    "# The {place}: {adjective} {thing} and {other}.\n\n",
    "import json\n\n",
    "from pathlib import Path\n\n",
)
FUNCTIONS = (
    '''def {function}({first}, {second}):
    """Return the {adjective} {thing} of the {place}."""
    {result} = {first} * {constant}
    if {result} > {second}:
        return {result}
    return {second}
''',
    '''def {function}({first}, {second}):
    """Count every {thing} in the {place}."""
    {result} = 0
    for {item} in {first}:
        if {item} != {second}:
            {result} += 1
    return {result}
''',
    '''def {function}({first}):
    """Read the {adjective} {thing} from a file."""
    with open({first}) as {item}:
        {result} = json.load({item})
    return {result}["{second}"]
''',
    '''def {function}({first}, {second}):
    """Sell the {thing} to {name}."""
    if not {first}:
        raise ValueError("the {place} has no {thing}")
    {result} = {first}.pop()
    {second}.append({result})
    return len({second})
''',
    '''def {function}({first}):
    """Print each {adjective} {thing}, sorted."""
    for {item} in sorted({first}):
        print("{second}", {item}.{result})
    return len({first})
''',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFile:
    """A file and what can be changed in it: its identifiers, its functions, a word of a comment, a constant's value."""

    name: str
    text: str
    identifiers: list[str]
    functions: list[str]
    word: str
    constant: str


def code_file(material: Material) -> CodeFile:
    """A file of one constant and two to four functions, whose identifiers are no part of anything else in it."""
    random = material.random
    limit = f"{material.invented()}_LIMIT".upper()
    number = str(material.number())
    thing, place = material.one_of(THINGS), material.one_of(PLACES)
    word = max(thing, place, key=len)
    text = random.choice(HEADS).format(
        place=place,
        thing=thing,
        other=material.one_of(THINGS),
        adjective=material.one_of(ADJECTIVES),
        name=material.name(),
    )
    text += f"{limit} = {number}\n"
    functions, identifiers = [], []
    for template in random.sample(FUNCTIONS, random.randint(2, 4)):
        function, first, second, result, item = _identifiers(material, text + template, 5)
        text += "\n\n" + template.format(
            function=function,
            first=first,
            second=second,
            result=result,
            item=item,
            constant=limit,
            thing=thing,
            place=place,
            adjective=material.one_of(ADJECTIVES),
            name=material.name(),
        )
        functions.append(function)
        identifiers += [function, first, result]
    return CodeFile(
        name=material.invented(),
        text=text,
        identifiers=identifiers,
        functions=functions,
        word=word,
        constant=number,
    )


def _identifiers(material: Material, taken: str, count: int) -> list[str]:
    chosen: list[str] = []
    while len(chosen) < count:
        word = material.invented()
        if material.random.random() < 0.4:
            word += "_" + material.one_of(THINGS)
        if word not in taken and not any(word in other or other in word for other in chosen):
            chosen.append(word)
    return chosen
