// Signs that are written with several characters: a family of emoji, a flag, a letter and its vowel sign. While words
// come piece by piece, half of one would show for a moment as something else.

const segmenter = globalThis.Intl?.Segmenter ? new Intl.Segmenter() : null;
const LONGEST = 64; // code units in which the last sign of a text is looked for

// A last character of these kinds stays what it is, whatever follows.
const WHOLE =
  /^[\s\p{P}\p{N}\p{Script=Latin}\p{Script=Greek}\p{Script=Cyrillic}\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}\p{Script=Arabic}\p{Script=Hebrew}]$/u;
const CONTINUES = /^[\p{M}\u200d\ufe0f\p{Emoji_Modifier}]/u;

/** As much of a growing text as looks the same when more comes: without a last sign that may be unfinished. */
export function settled(text) {
  if (!segmenter) return text;
  const tail = text.slice(-LONGEST);
  const last = [...segmenter.segment(tail)].at(-1)?.segment ?? "";
  return WHOLE.test(last) ? text : text.slice(0, text.length - last.length);
}

/** Whether a text continues another one behind its last sign, so that what is new can stand by itself. */
export const continues = (text, before) => text.startsWith(before) && !CONTINUES.test(text.slice(before.length));
