"""Numbers in English words, as the num2words library writes them: prompts of SmolVLM2 count their frames so."""

from __future__ import annotations

from typing import Final

_SMALL: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS: Final = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """0 … 999,999: 21 is ``twenty-one``, 105 ``one hundred and five``, 1200 ``one thousand, two hundred``."""
    if not 0 <= number < 1_000_000:
        raise ValueError(f"{number} is not from 0 to 999,999")
    if number < 20:
        return _SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f"-{_SMALL[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_SMALL[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    if not rest:
        return f"{in_words(thousands)} thousand"
    return f"{in_words(thousands)} thousand{', ' if rest >= 100 else ' and '}{in_words(rest)}"
