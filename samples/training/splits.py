"""Which things are held out of training: decided by a hash of their name, so every machine and run agrees.

Called by the generators (which leave the held-out things away while training, and use only them while testing).
"""

from hashlib import blake2b

HELD_OUT_SHARE = {
    "sprite": 0.05,  # one drawing of a concept that other styles still teach
    "word": 0.10,  # words to read
    "font": 0.12,  # typefaces
    "pair": 0.20,  # unordered pairs of nouns in questions about relations
    "colour": 0.15,  # colour and shape together
    "phrasing": 0.15,  # wordings of a question
}
HELD_OUT_STYLE = "openmoji"  # a whole drawing style that is never trained on (its licence is share-alike, too)


def fraction(kind: str, name: str) -> float:
    """A number in [0, 1) that depends only on the kind and the name."""
    digest = blake2b(f"{kind}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def held_out(kind: str, name: str) -> bool:
    """Whether the thing called `name` belongs to the test side of its kind."""
    return fraction(kind, name) < HELD_OUT_SHARE[kind]


def pair_name(first: str, second: str) -> str:
    """One name for an unordered pair, for `held_out("pair", ...)`."""
    return "+".join(sorted((first, second)))
