"""The held-out tests, and how to take them: in this process, through transformers, or through a server.

Run one of
    python -m samples.training.evaluate PACK --checkpoint FOLDER
    python -m samples.training.evaluate PACK --transformers FOLDER
    python -m samples.training.evaluate PACK --base-url http://127.0.0.1:8000/v1
with `--blind` to show grey pictures, `--limit N` for the first N cases of each test, `--json FILE` for the numbers.
The cases are the same everywhere: they follow from seeds, and pictures are drawn on the CPU and sent as PNG.
"""

import argparse
import base64
import io
import json
import random
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from samples.training import questions
from samples.training.clips import OUTRO, clip, intro, stamp
from samples.training.dialogue import ENDS, Part, Seen, Writer, load_tokenizer
from samples.training.pack import Pack
from samples.training.phrasings import ask
from samples.training.questions import View
from samples.training.reading import Scribe, ink
from samples.training.render import Renderer, plan
from samples.training.splits import fraction
from samples.training.world import (
    SHAPES,
    Background,
    Catalogue,
    Item,
    Picture,
    Writing,
    background,
    paints_of,
    placed,
    shape_sprites,
)

SIZES = [(384, 512), (480, 640), (512, 512), (512, 384), (300, 400), (256, 256)]  # height and width of test pictures
MOST = 40  # tokens of an answer


@dataclass
class Case:
    """A question with pictures and a function that judges an answer."""

    test: str
    pictures: list[Picture]
    size: tuple[int, int]
    question: str
    right: Callable[[str], bool]
    expected: str
    seconds: tuple[float, ...] = ()  # times of the frames of a clip
    duration: int = 0
    ready: NDArray[np.uint8] | None = None  # a picture that is drawn already, (height, width, 3)


def words_of(answer: str) -> list[str]:
    return re.findall(r"[a-z0-9'$%.:-]+[a-z0-9%]|[a-z0-9]", answer.lower())


def says(word: str) -> Callable[[str], bool]:
    """The answer contains the word or phrase as whole words."""
    pattern = re.compile(rf"(?<![a-z0-9]){re.escape(word.lower())}(?![a-z0-9])")
    return lambda answer: pattern.search(answer.lower()) is not None


def says_only(word: str, others: list[str]) -> Callable[[str], bool]:
    """The answer contains the word and none of the others."""
    right, wrong = says(word), [says(other) for other in others if other != word]
    return lambda answer: right(answer) and not any(other(answer) for other in wrong)


def counts(number: int) -> Callable[[str], bool]:
    """The answer's first number is this one."""
    return lambda answer: (re.findall(r"\d+", answer.replace(" no ", " 0 ")) or ["-"])[0] == str(number)


def begins(word: str) -> Callable[[str], bool]:
    return lambda answer: answer.lower().strip().startswith(word)


def reads(text: str) -> Callable[[str], bool]:
    """What stands between the quotes (or all of it) is exactly the text, small and capital letters included."""
    return lambda answer: (re.findall(r'"([^"]*)"', answer) or [answer.strip(" .")])[0] == text


def names(noun: str) -> Callable[[str], bool]:
    """The answer is the name, with any article and perhaps a colour before it."""
    return lambda answer: (
        re.sub(r"^(a|an|the|some|it is an?|this is an?) ", "", answer.lower().strip(" .")) == noun.lower()
    )


def scene(
    items: list[Item], rng: random.Random, smallest: float = 0.24, largest: float = 0.46
) -> tuple[tuple[Item, ...], Background]:
    spots = placed(items, rng, smallest, largest)
    return spots, background(rng, paints_of(spots))


def case(
    test: str,
    items: tuple[Item, ...],
    ground: Background,
    rng: random.Random,
    turn: tuple[str, str],
    right: Callable[[str], bool],
) -> Case:
    return Case(test, [Picture(ground, items)], rng.choice(SIZES), turn[0], right, turn[1])


def colour_cases(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
    """The colour of a named thing among 2 to 4 things."""
    tested = replace(catalogue, testing=True)
    while True:
        count = rng.randint(2, 4)
        if rng.random() < 0.5:
            shapes = rng.sample(SHAPES, count)
            items = [(tested if n == 0 else catalogue).shape(rng, name) for n, name in enumerate(shapes)]
        else:
            items = [
                catalogue.repainted(catalogue.thing(rng, name, 0), rng) for name in rng.sample(catalogue.things, count)
            ]
        spots, ground = scene(items, rng)
        item = spots[0]
        question = ask("colour", rng, True, a=f"the {item.noun.name}", v=item.noun.verb)
        others = [c for c in questions.SHAPE_COLOURS if c not in item.noun.name]
        yield case("colour", spots, ground, rng, (question, item.colour), says_only(item.colour, others))


def count_cases(low: int, high: int, test: str) -> Callable[[Catalogue, random.Random], Iterator[Case]]:
    """How many things of a kind, with others beside them half of the time."""

    def make(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
        while True:
            number = rng.randint(low, high)
            hero = catalogue.shape(rng) if rng.random() < 0.3 else catalogue.thing(rng)
            if not hero.noun.countable:
                continue
            other = catalogue.shape(rng) if hero.is_shape else catalogue.thing(rng)
            extra = rng.randint(1, 3) if rng.random() < 0.5 and other.noun.name != hero.noun.name else 0
            items = [hero] * number + [other] * extra
            rng.shuffle(items)
            spots, ground = scene(items, rng)
            question = ask("count", rng, True, ns=questions.pluralise(hero.label))
            yield case(test, spots, ground, rng, (question, str(number)), counts(number))

    return make


def relation_cases(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
    """How two things lie to each other: pairs of nouns that training never related."""
    while True:
        items = [catalogue.shape(rng) if rng.random() < 0.2 else catalogue.thing(rng) for _ in range(rng.randint(2, 3))]
        spots, ground = scene(items, rng)
        view = View(spots, ground, catalogue, rng, True)
        pair = questions.clear_pair(view)
        if pair is None:
            continue
        first, second, side = pair
        kind = rng.choice(["relation_yes_no", "choice", "relation"])
        the_first, the_second = questions.the(first), questions.the(second)
        if kind == "relation_yes_no":
            asked = side if rng.random() < 0.5 else questions.OPPOSITE[side]
            question = ask(kind, rng, True, a=the_first, b=the_second, v=first.noun.verb, side=asked)
            yes = "yes" if asked == side else "no"
            yield case("relations", spots, ground, rng, (question, yes), begins(yes))
        elif kind == "choice":
            wording = "left_right" if "left" in side or "right" in side else "above_below"
            question = ask(wording, rng, True, a=the_first, b=the_second, v=first.noun.verb)
            word = side.removeprefix("to the ").removesuffix(" of")
            yield case(
                "relations", spots, ground, rng, (question, word), says_only(word, ["left", "right", "above", "below"])
            )
        elif len(spots) == 2:
            question = ask(kind, rng, True, side=side, a=the_second)
            yield case("relations", spots, ground, rng, (question, first.label), says(first.label))


def exists_cases(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
    """Whether a thing is there; half of the things are not."""
    while True:
        items = [catalogue.thing(rng, tinted=0) for _ in range(rng.randint(2, 4))]
        spots, ground = scene(items, rng)
        turn = questions.exists(View(spots, ground, catalogue, rng, True))
        if turn:
            yes = "yes" if turn[1].startswith("Yes") else "no"
            yield case("yes or no", spots, ground, rng, (turn[0], yes), begins(yes))


def naming_cases(which: str) -> Callable[[Catalogue, random.Random], Iterator[Case]]:
    """Name a single thing: every concept in turn."""

    def make(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
        source = {"unseen style": catalogue.unseen, "unseen drawing": catalogue.kept_back}.get(which)
        everything = sorted(source or catalogue.names)
        while True:
            order = list(everything)
            rng.shuffle(order)
            for name in order:
                sprite = rng.choice(source[name]) if source else catalogue.sprite(name, rng)
                item = Item(catalogue.nouns[name], sprite, flip=rng.random() < 0.5, angle=rng.uniform(-0.1, 0.1))
                spots, ground = scene([item], rng, 0.4, 0.8)
                yield case(f"naming, {which}", spots, ground, rng, (ask("name", rng, True), name), names(name))

    return make


def reading_cases(scribes: tuple[Scribe, Scribe]) -> Callable[[Catalogue, random.Random], Iterator[Case]]:
    """One large word: held-out words in held-out typefaces."""

    def make(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
        scribe = scribes[1]
        while True:
            text = rng.choice((str.lower, str.capitalize, str.upper))(rng.choice(scribe.words))
            ground = background(rng, plain=0.7)
            _, colour = ink(ground.middle, rng)
            mask = scribe.strip([text], rng, 0.95)
            width = rng.uniform(0.8, 1.0)
            strip = Writing(
                text,
                mask,
                colour,
                0.5,
                rng.uniform(0.35, 0.65),
                width,
                width * rng.uniform(0.5, 0.7),
                rng.uniform(-0.05, 0.05),
            )
            yield Case(
                "one large word",
                [Picture(ground, (), (strip,))],
                rng.choice(SIZES[:3]),
                ask("read", rng, True),
                reads(text),
                text,
            )

    return make


def motion_cases(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
    """The direction of a moving thing in four frames."""
    while True:
        film = clip(catalogue, rng, 4, "move", True)
        question, answer = next(turn for turn in film.turns if re.search(r" (left|right|up|down)\.$", turn[1]))
        frames = [replace(frame, finish=(0.0, 0.0, 1.0, 0.0)) for frame in film.frames]
        question = ask("direction", rng, True, a="the " + answer[4:].split(" move")[0])
        word = answer.rstrip(".").split(" ")[-1]
        right = says_only(word, ["left", "right", "up", "down"])
        yield Case("motion in 4 frames", frames, (384, 384), question, right, word, tuple(film.seconds), film.duration)


def lines_cases(scribes: tuple[Scribe, Scribe]) -> Callable[[Catalogue, random.Random], Iterator[Case]]:
    """Three short lines in one picture: held-out words in held-out typefaces."""

    def make(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
        scribe = scribes[1]
        while True:
            lines = [rng.choice((str.lower, str.capitalize, str.upper))(rng.choice(scribe.short)) for _ in range(3)]
            ground = background(rng, plain=0.7)
            _, colour = ink(ground.middle, rng)
            strip = Writing(" ".join(lines), scribe.strip(lines, rng, 0.95), colour, 0.5, 0.5, 0.95, 0.7)
            question = ask("read", rng, True)
            yield Case(
                "three lines",
                [Picture(ground, (), (strip,))],
                rng.choice(SIZES[:3]),
                question,
                reads(" ".join(lines)),
                " ".join(lines),
            )

    return make


def where_cases(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
    """In which ninth of the picture a thing lies."""
    while True:
        items = [catalogue.thing(rng, tinted=0) for _ in range(rng.randint(2, 4))]
        spots, ground = scene(items, rng)
        known = [item for item in View(spots, ground, catalogue, rng, True).distinct if questions.place_of(item)]
        if known:
            item = known[0]
            place = questions.place_of(item)
            question = ask("where", rng, True, a=questions.the(item), v=item.noun.verb)
            yield case(
                "place",
                spots,
                ground,
                rng,
                (question, place),
                lambda answer, place=place: answer.rstrip(".").endswith(place),
            )


def absent_cases(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
    """The colour of a thing that is not there: the model should say that it does not see it."""
    while True:
        items = [catalogue.thing(rng, tinted=0.3) for _ in range(rng.randint(1, 4))]
        spots, ground = scene(items, rng)
        noun, _ = View(spots, ground, catalogue, rng, True).absent()
        question = ask("colour", rng, True, a=f"the {noun.name}", v=noun.verb)
        yield case("no such thing", spots, ground, rng, (question, "not seen"), says("not see"))


def event_cases(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
    """What happens in a clip of 3 to 6 frames: something appears, disappears, grows, shrinks or nothing happens."""
    words = {"appear": "appear", "vanish": "disappear", "grow": "bigger", "shrink": "smaller", "still": "nothing"}
    while True:
        event = rng.choice(list(words))
        film = clip(catalogue, rng, rng.randint(3, 6), event, True)
        frames = [replace(frame, finish=(0.0, 0.0, 1.0, 0.0)) for frame in film.frames]

        def right(answer: str, word: str = words[event]) -> bool:
            return re.search(rf"\b{word}", answer.lower()) is not None

        question = ask("what_happens", rng, True)
        yield Case(
            "event in a clip", frames, (384, 384), question, right, words[event], tuple(film.seconds), film.duration
        )


def easy_vqa_cases(catalogue: Catalogue, rng: random.Random) -> Iterator[Case]:
    """The test part of easy-VQA, in an order given by hashes (64-pixel pictures as they are)."""
    entries = sorted(
        catalogue.pack.easy_vqa.get("test", []), key=lambda e: fraction("easy", f"{e['sprite']} {e['question']}")
    )
    answers = sorted({entry["answer"] for entry in entries})
    for entry in entries:
        picture = catalogue.pack.sprites[entry["sprite"]][::2, ::2, :3]
        answer = entry["answer"]
        right = begins(answer) if answer in ("yes", "no") else says_only(answer, answers)
        yield Case("easy-VQA", [], (64, 64), entry["question"], right, answer, ready=np.ascontiguousarray(picture))


def all_cases(pack: Pack, limit: int, only: list[str] | None = None) -> list[Case]:
    """The first `limit` cases of every test."""
    catalogue = Catalogue(pack)
    makers: dict[str, Callable[[Catalogue, random.Random], Iterator[Case]]] = {
        "easy-VQA": easy_vqa_cases,
        "colour": colour_cases,
        "count 1-6": count_cases(1, 6, "count 1-6"),
        "count 7-10": count_cases(7, 10, "count 7-10"),
        "relations": relation_cases,
        "yes or no": exists_cases,
        "naming, seen style": naming_cases("seen style"),
        "naming, unseen drawing": naming_cases("unseen drawing"),
        "naming, unseen style": naming_cases("unseen style"),
        "one large word": reading_cases((Scribe(pack), Scribe(pack, testing=True))),
        "three lines": lines_cases((Scribe(pack), Scribe(pack, testing=True))),
        "motion in 4 frames": motion_cases,
        "event in a clip": event_cases,
        "place": where_cases,
        "no such thing": absent_cases,
    }
    found: list[Case] = []
    for name, make in makers.items():
        if not only or name in only:
            source = make(catalogue, random.Random(f"test {name}"))
            found += [made for made, _ in zip(source, range(limit), strict=False)]
    return found


def greyed(pictures: list[list[NDArray[np.uint8]]]) -> list[list[NDArray[np.uint8]]]:
    """The same number of pictures, all of them plain grey."""
    return [[np.full_like(picture, 128) for picture in shown] for shown in pictures]


def drawn(cases: list[Case], renderer: Renderer) -> list[list[NDArray[np.uint8]]]:
    """The pictures of every case, (height, width, 3) uint8."""
    pictures: list[list[NDArray[np.uint8]]] = [[made.ready] if made.ready is not None else [] for made in cases]
    for size in sorted({made.size for made in cases}):
        wanted = [(n, picture) for n, made in enumerate(cases) if made.size == size for picture in made.pictures]
        for start in range(0, len(wanted), 32):
            part = wanted[start : start + 32]
            pixels = renderer.draw(plan([picture for _, picture in part]), *size, grain=False)
            for (n, _), image in zip(
                part, (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy(), strict=True
            ):
                pictures[n].append(image)
    return pictures


def squashed(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What SmolVLM's processor makes of a picture that is not split: longest side to 512, then 256 x 256, Lanczos."""
    image = Image.fromarray(picture)
    width, height = image.size
    if width >= height:
        size = (512, int(512 / (width / height)) + int(512 / (width / height)) % 2)
    else:
        size = (int(512 * (width / height)) + int(512 * (width / height)) % 2, 512)
    image = image.resize(size, Image.Resampling.LANCZOS).resize((256, 256), Image.Resampling.LANCZOS)
    return np.asarray(image)


def parts_of(made: Case) -> list[Part]:
    """The message as parts: the frames of a clip with SmolVLM's words, or the picture and the question."""
    if made.seconds:
        parts: list[Part] = [intro(len(made.seconds), made.duration)]
        for seconds in made.seconds:
            parts += [stamp(seconds), Seen()]
        return [*parts, OUTRO + made.question]
    return [Seen(), made.question]


Answerer = Callable[[list[Case], list[list[NDArray[np.uint8]]]], list[str]]


def local_answerer(
    folder: Path, device: str, through_transformers: bool = False, dtype: torch.dtype = torch.float32
) -> Answerer:
    """Answers from a checkpoint folder, by the training module or by transformers."""
    from samples.training.model import load

    writer = Writer(load_tokenizer(folder))
    model = load(folder, dtype).to(device)
    generate = model.generate
    if through_transformers:
        from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

        config = {
            k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k != "quantization_config"
        }
        theirs = SmolVLMForConditionalGeneration(SmolVLMConfig(**config)).to(dtype).eval()
        state = model.state_dict()
        theirs.load_state_dict({**state, "lm_head.weight": state["model.text_model.embed_tokens.weight"]})

        def generate(prompts: Any, pictures: Any, ends: Any, most: int) -> list[list[int]]:
            found = []
            for prompt, pixels in zip(prompts, pictures, strict=True):
                given = {"pixel_values": pixels[None].to(dtype)} if len(pixels) else {}
                ids = theirs.generate(
                    input_ids=torch.tensor([prompt]),
                    max_new_tokens=most,
                    do_sample=False,
                    eos_token_id=sorted(ends),
                    pad_token_id=0,
                    **given,
                )
                answer = ids[0, len(prompt) :].tolist()
                found.append([token for token in answer if token not in ends])
            return found

    def answer(cases: list[Case], pictures: list[list[NDArray[np.uint8]]]) -> list[str]:
        texts: list[str] = []
        together = 64 if device == "cpu" else 256
        with ThreadPoolExecutor() as pool:
            small = list(pool.map(lambda shown: np.stack([squashed(picture) for picture in shown]), pictures))
        for start in range(0, len(cases), together):
            prompts = [writer.prompt([("User", parts_of(made))]) for made in cases[start : start + together]]
            tensors = [
                torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
                for pixels in small[start : start + together]
            ]
            texts += [writer.tokenizer.decode(ids).strip() for ids in generate(prompts, tensors, ENDS, MOST)]
        return texts

    return answer


def served_answerer(base_url: str, parallel: int = 8) -> Answerer:
    """Answers from an OpenAI-compatible server, by the first model that it names."""
    with urllib.request.urlopen(f"{base_url.rstrip('/')}/models", timeout=30) as listed:
        model = json.load(listed)["data"][0]["id"]

    def url_of(picture: NDArray[np.uint8]) -> dict[str, Any]:
        encoded = io.BytesIO()
        Image.fromarray(picture).save(encoded, "PNG")
        return {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()},
        }

    def one(made: Case, shown: list[NDArray[np.uint8]]) -> str:
        left = iter(shown)
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else url_of(next(left)) for part in parts_of(made)
        ]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": MOST,
            "temperature": 0,
        }
        request = urllib.request.Request(
            f"{base_url.rstrip('/')}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            return str(json.load(response)["choices"][0]["message"]["content"]).strip()

    def answer(cases: list[Case], pictures: list[list[NDArray[np.uint8]]]) -> list[str]:
        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(one, cases, pictures))

    return answer


def score(cases: list[Case], texts: list[str]) -> dict[str, dict[str, float]]:
    """Share of right answers by test, in percent."""
    table: dict[str, dict[str, float]] = {}
    for made, text in zip(cases, texts, strict=True):
        row = table.setdefault(made.test, {"cases": 0, "right": 0})
        row["cases"] += 1
        row["right"] += made.right(text)
    return {name: {**row, "percent": round(100 * row["right"] / row["cases"], 1)} for name, row in table.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--transformers", type=Path)
    parser.add_argument("--base-url")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--limit", type=int, default=400)
    parser.add_argument("--only", action="append", help="take this test only (may be repeated)")
    parser.add_argument("--blind", action="store_true", help="show plain grey pictures instead")
    parser.add_argument("--show", type=int, default=0, help="print this many answers of each test")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pack = Pack.load(arguments.pack)
    cases = all_cases(pack, arguments.limit, arguments.only)
    renderer = Renderer(np.concatenate((pack.sprites, shape_sprites())), arguments.device)
    pictures = drawn(cases, renderer)
    if arguments.blind:
        pictures = greyed(pictures)
    dtype = getattr(torch, arguments.dtype)
    if arguments.base_url:
        answer = served_answerer(arguments.base_url)
    elif arguments.transformers:
        answer = local_answerer(arguments.transformers, "cpu", True, dtype)
    else:
        answer = local_answerer(arguments.checkpoint, arguments.device, False, dtype)
    began = time.monotonic()
    texts = answer(cases, pictures)
    table = score(cases, texts)
    shown: dict[str, int] = {}
    for made, text in zip(cases, texts, strict=True):
        shown[made.test] = shown.get(made.test, 0) + 1
        if shown[made.test] <= arguments.show:
            verdict = "right" if made.right(text) else "WRONG"
            print(f"{made.test} [{verdict}] {made.question} (expected {made.expected}) -> {text}")
    for name, row in table.items():
        print(f"{name:24} {row['percent']:6.1f} %  of {row['cases']}", flush=True)
    print(f"{len(cases)} questions in {time.monotonic() - began:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
