"""The many ways in which people ask the same thing.

`ask(kind, ...)` picks one; the wordings that `splits` holds out are used in tests only. In training some questions are
written carelessly (small letters, no mark at the end), as people type.
"""

import random

from samples.training.splits import held_out

# {a} and {b} are names with their article ("the cat"), {x} is an indefinite one ("a cat"), {ns} a plural,
# {k} a kind ("animal"), {v} is/are, {side} a relation, {p} a place, {c} a colour.
PHRASINGS: dict[str, list[str]] = {
    "describe": [
        "Describe the picture.", "Describe this image.", "What is in this picture?", "What do you see?",
        "What's in the image?", "Can you describe this picture?", "Tell me what you see.",
        "What does the picture show?", "Caption this image.", "Please describe the image.", "What can be seen here?",
        "What is this a picture of?", "Give a short description.", "Write a caption.", "What is shown in the photo?",
        "Describe what you see in one sentence.", "What is happening here?", "What are we looking at?",
        "Summarize the picture.", "Explain the picture.", "What am I looking at?", "Describe it briefly.",
        "Describe the scene.", "What is going on in this image?", "Tell me about this picture.", "What's this?",
        "What is on the screen?", "Describe the photo in a few words.", "What does the camera see?",
        "Say what you see.", "Describe what the camera sees in one short sentence.", "What is in front of the camera?",
        "Describe the current frame.", "What is visible?", "What's in this picture?", "Describe this.",
        "Tell me what is in the image.", "What can you see in this picture?", "What is in the image?",
        "What is it that you see?", "Give me a caption for this image.", "In one sentence, what does the picture show?",
        "Can you tell me what is in the picture?", "Could you describe the image?",
        "I need a caption for this picture.", "What have we got here?", "Explain this image.", "What do you see now?",
        "What's in this photo?", "What do you think this is?",
    ],
    "detail": [
        "Describe the picture in detail.", "Give a detailed description of the image.", "Describe everything you see.",
        "Describe this image in as much detail as possible.", "Tell me everything about this picture.",
        "Write a long description of the picture.", "Please describe the image in detail.",
        "What do you see? Be thorough.", "Describe the scene thoroughly.", "Explain in detail what the picture shows.",
        "Give me a full description.", "Write a paragraph about the picture.", "Describe every object and where it is.",
        "Give me all the details.", "Go into detail.", "Can you describe the image with all details?",
        "Tell me more about the picture.", "Describe it in detail.", "More detail, please.",
    ],
    "list": [
        "List the objects.", "What objects are in the picture?", "List everything you see.",
        "Which things can you see?", "Name the objects in the image.", "What things are there?",
        "Which objects are shown?", "Make a list of what is in the picture.", "What items do you see?",
        "Enumerate the objects.", "Name everything in this picture.", "Can you list the things in the photo?",
        "What are the objects here?", "Tell me which objects are visible.",
    ],
    "json": [
        "List the objects as JSON.", "Return the objects as a JSON object.", "Give me JSON with the objects.",
        "Answer in JSON: which objects are in the picture?", "Output the objects as JSON.",
        "What is in the picture? Answer as JSON.", "Respond with JSON listing the objects.",
        "JSON list of all objects, please.", "Extract the objects as JSON.", "Which objects do you see? Reply in JSON.",
    ],
    "name": [
        "What is this?", "What is this object?", "Name this.", "What is it?", "What is shown here?",
        "What thing is this?", "What does this show?", "Can you name this object?",
        "What is the object in the picture?", "Identify the object.", "Which object is this?",
        "What do you think it is?", "What is that?", "Name the object.", "What could this be?",
        "What is in the picture?", "What is depicted?", "Recognize this object.", "Do you know what this is?",
        "What's this thing called?", "What do you call this?", "Tell me what this is.", "What is the main object?",
        "What is in the middle of attention here?", "What do we have here?",
    ],
    "name_kind": [
        "What {k} is this?", "Which {k} is this?", "What kind of {k} is shown?", "What {k} do you see?",
        "Name the {k}.", "Which {k} is in the picture?", "What type of {k} is it?",
        "Can you tell me which {k} this is?", "What {k} is in the image?", "Identify the {k}.",
        "What sort of {k} is that?",
    ],
    "count": [
        "How many {ns} are there?", "How many {ns} are in the picture?", "Count the {ns}.", "How many {ns} do you see?",
        "What is the number of {ns}?", "How many {ns} can you see?", "How many {ns} does the image show?",
        "Tell me how many {ns} there are.", "Please count the {ns}.", "How many {ns} are shown?", "Number of {ns}?",
        "How many {ns} are visible?", "Can you count the {ns} in this picture?", "How many {ns}?",
        "What's the count of {ns}?",
    ],
    "count_all": [
        "How many objects are there?", "How many things are in the picture?", "Count the objects.",
        "How many items do you see?", "What is the number of objects?", "How many objects can you count?",
        "How many objects does the image contain?", "Count everything in the picture.", "How many things do you see?",
        "Tell me the number of objects.",
    ],
    "colour": [
        "What color {v} {a}?", "What colour {v} {a}?", "Which color {v} {a}?", "What is the color of {a}?",
        "Tell me the color of {a}.", "What color do you see on {a}?", "{a}: what color?",
        "Which colour does the picture show for {a}?", "Name the color of {a}.", "What's the colour of {a}?",
        "Can you tell me what color {a} {v}?", "What color has {a}?", "In what color {v} {a}?",
    ],
    "colour_only": [
        "What color is it?", "What color is this?", "Which colour is it?", "What color is the object?",
        "What's the color?", "What colour is shown?", "Name the color.", "What color is the thing in the picture?",
        "Which color does it have?", "Tell me the color.",
    ],
    "of_colour": [
        "What is {c}?", "Which object is {c}?", "What is the {c} thing?", "Which thing is {c}?",
        "What is the {c} object?", "Name the {c} object.", "Is anything {c}? What?", "What {c} object do you see?",
        "Which one is {c}?", "What do you see that is {c}?",
    ],
    "where": [
        "Where {v} {a}?", "Where in the picture {v} {a}?", "In which part of the image {v} {a}?",
        "Where can I find {a}?", "What is the position of {a}?", "Where do you see {a}?", "Tell me where {a} {v}.",
        "Locate {a}.", "Find {a}.", "Where exactly {v} {a}?", "In which corner or side {v} {a}?",
        "Where is the location of {a}?",
    ],
    "at": [
        "What is {p}?", "What do you see {p}?", "Which object is {p}?", "What can be seen {p}?", "Name the object {p}.",
        "What thing is {p}?", "What's {p} of the picture?", "Tell me what is {p}.", "Which thing is {p}?",
        "What object is located {p}?",
    ],
    "relation": [
        "What is {side} {a}?", "Which object is {side} {a}?", "What do you see {side} {a}?",
        "What thing is {side} {a}?", "Name the object {side} {a}.", "What can be seen {side} {a}?",
        "Which thing is {side} {a}?", "What's {side} {a}?", "Tell me what is {side} {a}.",
        "What object lies {side} {a}?",
    ],
    "relation_yes_no": [
        "{V} {a} {side} {b}?", "Can you see {a} {side} {b}?", "Is it true that {a} {v} {side} {b}?",
        "{V} {a} positioned {side} {b}?", "Tell me: {v} {a} {side} {b}?", "{V} {a} found {side} {b}?",
        "{a} {v} {side} {b}, right?", "Would you say {a} {v} {side} {b}?", "Does the picture show {a} {side} {b}?",
        "{V} {a} really {side} {b}?",
    ],
    "left_right": [
        "{V} {a} to the left or to the right of {b}?", "{V} {a} left or right of {b}?", "On which side of {b} {v} {a}?",
        "Left or right: where {v} {a} compared to {b}?", "Which side of {b} {v} {a} on, left or right?",
        "Do you see {a} to the left or the right of {b}?", "{V} {a} on the left or right side of {b}?",
        "Tell me whether {a} {v} left or right of {b}.", "Where {v} {a} relative to {b}, left or right?",
        "{a}: left or right of {b}?",
    ],
    "above_below": [
        "{V} {a} above or below {b}?", "{V} {a} over or under {b}?", "Above or below: where {v} {a} compared to {b}?",
        "Do you see {a} above or below {b}?", "Tell me whether {a} {v} above or below {b}.",
        "Where {v} {a} relative to {b}, above or below?", "{V} {a} higher or lower than {b}?",
        "{a}: above or below {b}?", "Which is it: {a} above {b} or below?", "{V} {a} placed above or below {b}?",
    ],
    "relative": [
        "Where {v} {a} relative to {b}?", "Where {v} {a} compared to {b}?", "How {v} {a} placed relative to {b}?",
        "What is the position of {a} relative to {b}?", "Where do you see {a} as seen from {b}?",
        "In which direction from {b} {v} {a}?", "What is the spatial relation between {a} and {b}?",
        "Where {v} {a} in relation to {b}?", "How are {a} and {b} arranged?", "Where {v} {a} with respect to {b}?",
    ],
    "exists": [
        "Is there {x}?", "Is there {x} in the picture?", "Do you see {x}?", "Can you see {x}?",
        "Does the image contain {x}?", "Does the picture show {x}?", "Is {x} visible?", "Are there any {ns}?",
        "Do you see any {ns}?", "Is there {x} here?", "Any {ns} in the image?", "Does the photo have {x}?",
        "Is {x} present?", "Are there {ns} in the picture?", "Can you find {x}?",
    ],
    "is_it": [
        "Is this {x}?", "Is it {x}?", "Is that {x}?", "Does this show {x}?", "Would you call this {x}?",
        "Is the object {x}?", "Is the thing in the picture {x}?", "Am I looking at {x}?", "This is {x}, right?",
        "Could this be {x}?",
    ],
    "is_colour": [
        "{V} {a} {c}?", "Is the color of {a} {c}?", "Would you say {a} {v} {c}?", "{a} {v} {c}, right?",
        "Is it true that {a} {v} {c}?", "Do you see {a} in {c}?", "Tell me, {v} {a} {c}?", "{V} {a} colored {c}?",
        "Does {a} look {c}?", "Is {c} the color of {a}?",
    ],
    "bigger": [
        "Which is bigger, {a} or {b}?", "What is larger, {a} or {b}?", "{V} {a} bigger than {b}?",
        "Which one is larger: {a} or {b}?", "{V} {a} larger than {b}?", "Is {a} or {b} bigger?",
        "Compare the size of {a} and {b}.", "Which is the larger one, {a} or {b}?",
        "Which takes up more space, {a} or {b}?", "Which looks bigger, {a} or {b}?",
        "Tell me which is bigger, {a} or {b}.",
    ],
    "smaller": [
        "Which is smaller, {a} or {b}?", "What is smaller, {a} or {b}?", "Which one is smaller: {a} or {b}?",
        "Is {a} or {b} smaller?", "{V} {a} smaller than {b}?", "Which looks smaller, {a} or {b}?",
        "Which is the smaller one, {a} or {b}?", "Which takes up less space, {a} or {b}?",
        "Tell me which is smaller, {a} or {b}.", "Which of them is smaller, {a} or {b}?",
    ],
    "biggest": [
        "What is the biggest object?", "Which object is the largest?", "What is the largest thing?",
        "Name the biggest object.", "Which thing is biggest?", "What takes up the most space?",
        "What's the biggest thing in the picture?", "Tell me the largest object.", "Which item is the biggest?",
        "Of all objects, which is the largest?",
    ],
    "background": [
        "What color is the background?", "What is in the background?", "What does the background look like?",
        "Describe the background.", "Which colour is the background?", "What's the background color?",
        "What color is behind the objects?", "What is the background?", "Tell me the color of the background.",
        "How does the background look?",
    ],
    "placard": [
        "Write a museum placard for this.", "Describe it as a museum placard.",
        "Describe this picture as a museum placard.", "Write a placard text.",
        "Write a gallery label for this picture.", "Imagine this hangs in a museum. Write the label.",
        "Give me a museum label for what you see.", "Compose a short museum placard.",
        "As a museum placard, describe the picture.", "Write the wall text for this work.",
        "Caption this like a museum placard.", "Write a museum placard for what stands before the camera.",
        "Please write an exhibition label.", "What would the museum placard say?", "Placard, please.",
        "Write a placard for this object.", "You are a curator. Write a short museum placard for what you see.",
        "Describe what the camera sees as a museum placard.",
        "Write the museum placard for this work of art: a title and a sentence.", "Write a museum-style caption.",
        "Write a short wall label in the style of a museum.", "Pretend this is in a gallery and write its label.",
        "Museum placard for this frame, please.", "Write a two-sentence museum placard.",
        "What does its museum label say?", "Caption for the museum wall?",
    ],
    "title": [
        "Give the picture a title.", "What would be a good title?", "Suggest a title.", "Title this picture.",
        "Find a title for this image.", "What should this picture be called?", "Make up a title for it.",
        "Give me a short title.", "Write a title.", "Name this artwork.",
    ],
    "read": [
        "What does it say?", "Read the text.", "What is written here?", "What does the text say?", "Read the word.",
        "What word is this?", "Which word is shown?", "Can you read this?", "What text do you see?",
        "Transcribe the text.", "What is the text in the image?", "Please read what is written.",
        "What is written in the picture?", "What letters do you see?", "Read it to me.", "OCR this image.",
        "Extract the text.", "What does the sign say?", "Read the sign.", "What is written on it?",
        "What is on the sign?",
    ],
    "has_text": [
        "Is there any text?", "Is anything written in the picture?", "Do you see any text?",
        "Does the image contain writing?", "Are there any words?", "Is there writing in the image?",
        "Can you see letters?", "Does it have text?", "Is some text visible?", "Are there letters in the picture?",
    ],
    "text_colour": [
        "What color is the text?", "Which color do the letters have?", "What colour is the writing?",
        "In which color is it written?", "What is the color of the letters?", "What color are the letters?",
        "Tell me the color of the text.", "What is the text color?", "Name the color of the writing.",
        "Which colour is the text?",
    ],
    "kind_exists": [
        "Is there {x} in the picture?", "Do you see {x}?", "Does the image show {x}?", "Is {x} visible?",
        "Can you see {x} here?", "Is there any {k}?", "Does the picture contain {x}?", "Is {x} in this image?",
        "Do you spot {x}?", "Any {k} here?",
    ],
    "unknowable": [
        "Who made this picture?", "When was this picture taken?", "Where was this photo taken?",
        "What is the name of the person?", "Who is this?", "How much does it cost?", "What happens next?",
        "How old is it?", "What does it smell like?", "Why is it there?", "Who owns this?",
        "What is the artist thinking?", "How heavy is it?", "What is behind the camera?", "What sound does it make?",
        "Which city is this?", "What time is it in the picture?", "How does it taste?", "What day was it?",
        "Is it expensive?",
    ],
    "what_happens": [
        "What happens in the clip?", "What happens in the video?", "Describe the video.", "What is happening?",
        "Describe the clip.", "What do you see in the video?", "Summarize the video.", "What is going on in this clip?",
        "What changes over time?", "Tell me what happens.", "Caption this video.", "What does the video show?",
        "Explain what happens in these frames.", "What event takes place?", "Describe what happens.",
    ],
    "direction": [
        "In which direction does {a} move?", "Which way does {a} move?", "Where does {a} go?",
        "Does {a} move left, right, up or down?", "What is the direction of {a}?", "Which direction is {a} moving?",
        "How does {a} move?", "Tell me the direction in which {a} moves.", "Which way is {a} going?",
        "To which side does {a} move?", "What direction does {a} travel in?",
    ],
    "what_moves": [
        "What moves?", "Which object moves?", "What is moving?", "What moves in the clip?",
        "Which thing changes its place?", "Name the object that moves.", "What is in motion?",
        "Which object is moving in the video?", "Tell me what moves.", "Does anything move? What?",
    ],
    "does_move": [
        "Does {a} move?", "Is {a} moving?", "Does {a} change its place?", "Is {a} in motion?",
        "Does {a} stay where it is?", "Do you see {a} move?", "Is there movement of {a}?", "Tell me, does {a} move?",
        "Does {a} move during the video?", "Is {a} standing still?",
    ],
    "appears": [
        "What appears?", "Which object appears?", "What new thing comes into the picture?", "What shows up?",
        "What appears in the clip?", "Does anything appear?", "What enters the scene?",
        "Which thing is new at the end?", "What turns up during the video?", "What is added?",
    ],
    "vanishes": [
        "What disappears?", "Which object disappears?", "What goes away?", "What vanishes?",
        "What is missing at the end?", "Does anything disappear?", "What leaves the scene?",
        "Which thing is gone at the end?", "What is removed during the clip?", "What is no longer there at the end?",
    ],
    "which_picture": [
        "Which picture shows {x}?", "In which image is {x}?", "Which of the pictures has {x}?",
        "Where is {x}: which picture?", "Which image contains {x}?", "What is the number of the picture with {x}?",
        "Find the picture with {x}.", "In which picture do you see {x}?", "Which one shows {x}?",
        "Tell me which image has {x}.",
    ],
    "nth_picture": [
        "What is in the {nth} picture?", "What does the {nth} image show?", "Describe the {nth} picture.",
        "What do you see in the {nth} image?", "What is shown in the {nth} picture?",
        "Name the object in the {nth} picture.", "What can be seen in the {nth} image?",
        "Tell me about the {nth} picture.", "And the {nth} picture?", "Caption the {nth} image.",
    ],
    "same": [
        "Do the pictures show the same thing?", "Are these the same?", "Is it the same object in both pictures?",
        "Do both images show the same object?", "Are the two pictures alike?", "Same or different?",
        "Is the same thing shown in both?", "Do these images match?", "Compare the two pictures.",
        "What is different between the pictures?",
    ],
    "how_many_pictures": [
        "How many pictures are there?", "How many images did I send?", "How many images do you see?",
        "Count the pictures.", "How many photos are these?", "What is the number of images?",
        "How many pictures did you get?", "Tell me how many pictures there are.", "How many images are here?",
        "How many images have I shown you?",
    ],
}  # fmt: skip

ONE_WORD = [
    "Answer in one word.", "Answer with one word.", "One word only.", "Reply with a single word.",
    "Just one word, please.", "Answer using a single word or number.", "Use one word.",
    "Answer the question using a single word or phrase.", "In one word.", "Respond with only one word.",
]  # fmt: skip
PREFIXES = [
    "", "", "", "", "", "", "", "", "", "Please tell me: ", "Hey, ", "Hi! ", "Look at the picture. ", "Question: ",
    "Quick question: ", "Look closely. ", "Can you help me? ", "OK. ", "Now, ", "And ", "So, ", "Take a look. ",
    "I wonder: ", "Hello. ",
]  # fmt: skip
SUFFIXES = ["", "", "", "", "", "", "", "", " Thanks.", " Please.", " Answer briefly.", " Keep it short.", " Be brief."]


def wordings(kind: str, testing: bool) -> list[str]:
    """The wordings of one side of the split; at least one on either side."""
    known = [text for text in PHRASINGS[kind] if not held_out("phrasing", text)]
    kept = [text for text in PHRASINGS[kind] if held_out("phrasing", text)]
    return (kept or PHRASINGS[kind][-1:]) if testing else (known or PHRASINGS[kind])


_CACHE: dict[tuple[str, bool], list[str]] = {}


def ask(kind: str, rng: random.Random, testing: bool = False, **slots: str) -> str:
    """A question of that kind with its slots filled."""
    key = (kind, testing)
    if key not in _CACHE:
        _CACHE[key] = wordings(kind, testing)
    if "v" in slots:
        slots["V"] = slots["v"].capitalize()
    text = rng.choice(_CACHE[key]).format(**slots)
    text = text[0].upper() + text[1:]
    return text if testing else casual(text, rng)


def mistyped(text: str, rng: random.Random) -> str:
    """The text with one slip of the finger in a word of five or more letters."""
    words = text.split(" ")
    long = [n for n, word in enumerate(words) if len(word) >= 5 and word.isalpha()]
    if not long:
        return text
    n = rng.choice(long)
    word, at = words[n], rng.randrange(1, len(words[n]) - 1)
    slips = (
        word[:at] + word[at + 1 :],
        word[:at] + word[at + 1] + word[at] + word[at + 2 :],
        word[: at + 1] + word[at:],
    )
    words[n] = rng.choice(slips)
    return " ".join(words)


def casual(text: str, rng: random.Random) -> str:
    """The question as somebody might type it."""
    prefix = rng.choice(PREFIXES)
    if prefix.endswith((", ", ": ", "And ")) and not text.startswith(("I ", "OCR", "JSON")):
        text = text[0].lower() + text[1:]
    if rng.random() < 0.04:
        text = mistyped(text, rng)
    text = prefix + text + rng.choice(SUFFIXES)
    chance = rng.random()
    if chance < 0.12:
        text = text.lower()
    elif chance < 0.15:
        text = text.upper() if len(text) < 40 else text
    if rng.random() < 0.12:
        text = text.rstrip("?.!")
    return text
